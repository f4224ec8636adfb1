"""What is counted for each collection, under labels of which there are never too many.

The first so many collections have their own; what happens in all others is counted together. Whoever is
counted with the others stays there, so that no counter ever goes down.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from tailrace.common.metrics import Histogram
from tailrace.common.server_metrics import MATCH_BUCKETS_S

if TYPE_CHECKING:
    from tailrace.watch.collection import Collection

MetricLabels = tuple[str, str]  # database and collection

OTHER_LABELS: Final[MetricLabels] = ("*", "*")  # no name has a star
# Where something that came twice was noticed, and left out.
STAGES: Final = ("source", "write", "push", "snapshot")


class CollectionCounters:
    """The counters behind one pair of labels."""

    __slots__ = ("bloom_rebuilds", "changes", "dropped", "labels", "latency", "matched")

    def __init__(self, labels: MetricLabels) -> None:
        self.labels = labels
        self.changes: Counter[tuple[str, int]] = Counter()  # by op and partition
        self.dropped: dict[str, int] = dict.fromkeys(STAGES, 0)
        # Candidates, hits and library evaluations of what is watched no more.
        self.matched = (0, 0, 0)
        self.latency = Histogram(MATCH_BUCKETS_S)
        self.bloom_rebuilds = 0

    def add_matched(self, counts: tuple[int, int, int]) -> None:
        candidates, hits, fallbacks = self.matched
        self.matched = (candidates + counts[0], hits + counts[1], fallbacks + counts[2])


class CounterRegistry:
    """Owned by the loop thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.others = CollectionCounters(OTHER_LABELS)
        self._own: dict[MetricLabels, CollectionCounters] = {}

    def of(self, collection: Collection | None) -> CollectionCounters:
        """Where a collection is counted; one that does not exist is one of the others."""
        if collection is None:
            return self.others
        if collection.tally is None:
            collection.tally = self._given((collection.database, collection.name))
        return collection.tally

    def _given(self, labels: MetricLabels) -> CollectionCounters:
        if labels not in self._own and len(self._own) >= self._most:
            return self.others
        return self._own.setdefault(labels, CollectionCounters(labels))

    def forget(self, collection: Collection) -> None:
        """It is gone, and so are its numbers; those of the others stay."""
        if collection.tally is not None and collection.tally is not self.others:
            self._own.pop(collection.tally.labels, None)

    def all(self) -> list[CollectionCounters]:
        return [*self._own.values(), self.others]
