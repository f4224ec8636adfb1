"""A file of which only some stretches are there, as libraries want to see one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from tailrace.storage.segments.arrow import pa


class PartialFile:
    closed = False

    def __init__(self, size: int, stretches: Iterable[tuple[int, bytes | memoryview]]) -> None:
        """`stretches` are bytes of the file, each behind the place at which they begin."""
        self._size = size
        held = sorted(((start, pa.py_buffer(data)) for start, data in stretches), key=lambda one: one[0])
        self._starts: list[int] = [start for start, _ in held]
        self._buffers: list[Any] = [buffer for _, buffer in held]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read_buffer(self, count: int) -> Any:
        """Without a copy."""
        at = bisect_right(self._starts, self._position) - 1
        begin = self._position - self._starts[at] if at >= 0 else -1
        if begin < 0 or begin + count > self._buffers[at].size:
            raise OSError("outside of what is there")
        self._position += count
        return self._buffers[at].slice(begin, count)

    def read(self, count: int = -1) -> bytes:
        left = max(self._size - self._position, 0)
        return self.read_buffer(left if count < 0 else min(count, left)).to_pybytes()

    def close(self) -> None:
        """Nothing is open."""
