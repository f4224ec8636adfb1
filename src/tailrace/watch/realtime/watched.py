"""A collection that somebody watches; it need not exist yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.watch.book import CollectionRegistry
from tailrace.watch.collection import Collection
from tailrace.watch.evaluation_cost import StepBudget
from tailrace.watch.matcher import Matcher
from tailrace.watch.tally import CollectionCounters

if TYPE_CHECKING:
    from tailrace.watch.realtime.subscription import Subscription


class WatchedCollection:
    __slots__ = ("_book", "_tally", "database", "matcher", "name", "subscriptions")

    def __init__(
        self, book: CollectionRegistry, database: str, name: str, scan_max: int, turn: StepBudget
    ) -> None:
        self._book = book
        self.database = database
        self.name = name
        self.matcher: Matcher[Subscription] = Matcher(scan_max, turn)
        self.subscriptions: set[Subscription] = set()
        self._tally = book.tallies.others

    @property
    def collection(self) -> Collection | None:
        return self._book.find(self.database, self.name)

    @property
    def tally(self) -> CollectionCounters:
        """Where it is counted. What is over is still counted where it was."""
        if (found := self.collection) is not None:
            self._tally = self._book.tallies.of(found)
        return self._tally

    @property
    def applied(self) -> list[int]:
        found = self.collection
        return [0] * self._book.partitions_for(self.name) if found is None else found.applied

    @property
    def earliest(self) -> list[int]:
        """What the log does not have any more, by partition."""
        found = self.collection
        return [0] * self._book.partitions_for(self.name) if found is None else self._book.earliest(found)

    @property
    def generation(self) -> int:
        found = self.collection
        if found is None:
            return self._book.next_generation(self.database, self.name)
        return self._book.generation(found)

    @property
    def state(self) -> str:
        found = self.collection
        return "live" if found is None or found.state == "lagging" else found.state
