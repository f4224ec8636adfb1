"""When asks are over if nobody answers them. Most are answered long before, and then cost nothing more."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tailrace.hub.asks import PendingRequest

SECOND_MS: Final = 1000


class RequestDeadlines:
    """Asks by the second in which they end, so that one which was answered can be taken out at once.

    A heap of asks would keep each until its time had come: at ten thousand a second, hundreds of thousands.
    """

    __slots__ = ("_by_second", "_seconds")

    def __init__(self) -> None:
        self._by_second: dict[int, dict[str, PendingRequest]] = {}  # by the id of the copy
        self._seconds: list[int] = []  # a heap of the keys of those

    def __len__(self) -> int:
        return sum(map(len, self._by_second.values()))

    def add(self, ask: PendingRequest) -> None:
        second = ask.deadline_ms // SECOND_MS
        found = self._by_second.get(second)
        if found is None:
            found = self._by_second[second] = {}
            heapq.heappush(self._seconds, second)
        found[ask.copy_id] = ask

    def remove(self, ask: PendingRequest) -> None:
        found = self._by_second.get(ask.deadline_ms // SECOND_MS)
        if found is not None:
            found.pop(ask.copy_id, None)

    def take_due(self, now_ms: int) -> list[PendingRequest]:
        """Those whose time is over, in the order of their deadlines."""
        due: list[PendingRequest] = []
        while self._seconds and self._seconds[0] <= now_ms // SECOND_MS:
            second = self._seconds[0]
            found = self._by_second[second]
            due += sorted(
                (ask for ask in found.values() if ask.deadline_ms <= now_ms), key=lambda ask: ask.deadline_ms
            )
            if second == now_ms // SECOND_MS:
                break  # the rest of this second is still to come
            heapq.heappop(self._seconds)
            del self._by_second[second]
        return due
