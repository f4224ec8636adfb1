"""Answers at the tail: given again for a moment, and after that a thing to compare with."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tailrace.edge.cache import Slice

RECENT_BYTES_MAX = 32 * 1024 * 1024


class RecentRead(NamedTuple):
    """An answer, and what was known of its stream when it was asked for."""

    slice: Slice
    generation: int
    writes: int
    at: float


class RecentReads:
    """The last answer at the tail for each read; the oldest go when there are too many."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, ...], RecentRead] = OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[str, ...]) -> RecentRead | None:
        return self._found.get(key)

    def put(self, key: tuple[str, ...], recent: RecentRead) -> None:
        self._forget(key)
        self._found[key] = recent
        self._bytes += recent.slice.size
        while self._bytes > RECENT_BYTES_MAX:
            self._forget(next(iter(self._found)))

    def _forget(self, key: tuple[str, ...]) -> None:
        gone = self._found.pop(key, None)
        if gone is not None:
            self._bytes -= gone.slice.size
