"""What documents were before their latest changes, for a collection whose log does not keep that."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

ENTRY_BYTES: Final = 250  # of one that is remembered, beside its content


class BeforeImageLimits(NamedTuple):
    """How much is remembered; whichever is reached first."""

    changes_max: int
    bytes_max: int
    age_ms_max: int


class _CachedImage(NamedTuple):
    partition: int
    seq: int
    at_ms: int


class BeforeImageCache:
    """Oldest first; what goes is told by how far back each partition still reaches."""

    __slots__ = ("_bounds", "_bytes", "_data", "_order", "forgotten")

    def __init__(self, bounds: BeforeImageLimits, forgotten: Sequence[int]) -> None:
        self._bounds = bounds
        self._data: dict[tuple[int, int], bytes] = {}
        self._order: deque[_CachedImage] = deque()
        self._bytes = 0
        # The last change of each partition, the ones before it included, that cannot be told any more.
        self.forgotten = list(forgotten)

    def __len__(self) -> int:
        return len(self._data)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def add(self, partition: int, seq: int, at_ms: int, data: bytes) -> None:
        self._data[partition, seq] = data
        self._order.append(_CachedImage(partition, seq, at_ms))
        self._bytes += len(data) + ENTRY_BYTES
        self._shrink(at_ms)

    def find(self, partition: int, seq: int) -> bytes | None:
        return self._data.get((partition, seq))

    def reaches(self, positions: Sequence[int]) -> bool:
        """Whether whoever has everything up to these positions can be told what followed."""
        return not any(map(int.__lt__, positions, self.forgotten))

    def _shrink(self, now_ms: int) -> None:
        bounds, order = self._bounds, self._order
        while order and (
            len(order) > bounds.changes_max
            or self._bytes > bounds.bytes_max
            or now_ms - order[0].at_ms > bounds.age_ms_max
        ):
            partition, seq, _ = order.popleft()
            self._bytes -= len(self._data.pop((partition, seq))) + ENTRY_BYTES
            self.forgotten[partition] = max(self.forgotten[partition], seq)
