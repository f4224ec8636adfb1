"""Ids of messages: UUIDs of version 7, made by counting."""

from __future__ import annotations

import os
import secrets
from typing import Final

_COUNTER_BITS: Final = 42
_COUNTER_MASK: Final = 2**_COUNTER_BITS - 1
_LOW_MASK: Final = 0xFFFF  # of the last four digits of the counter, which change with each id
ID_RUN_MAX: Final = 4096
# Looking two digits up takes a third of the time of formatting them.
_HEX_PAIRS: Final = [f"{pair:02x}" for pair in range(256)]
HEX_PAIRS: Final = [pair.encode() for pair in _HEX_PAIRS]


class MessageIds:
    """Ids that are unique, and that grow as long as the process lives.

    After the time come 42 bits of a counter and 32 bits of the process. The counter begins anywhere in the
    lower half of its range, so that two processes with equal bits still differ, and none wraps in practice.
    """

    __slots__ = ("_count", "_prefix", "_process", "_stamp_ms")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin like a new process: a child must not count on as its parent does."""
        self._count = secrets.randbits(_COUNTER_BITS - 1)
        self._process = f"{secrets.randbits(32):08x}"
        self._stamp_ms = -1
        self._prefix = ""

    def __call__(self, now_ms: int) -> str:
        count = self._count = self._count + 1 & _COUNTER_MASK
        if now_ms > self._stamp_ms or not count & _LOW_MASK:
            self._begin(now_ms, count)
        return f"{self._prefix}{_HEX_PAIRS[count >> 8 & 255]}{_HEX_PAIRS[count & 255]}{self._process}"

    def run(self, now_ms: int, length: int) -> tuple[bytes, int, bytes]:
        """Several ids at once: what they begin with, the number of the first, and what they end with.

        Between the two stand the last four digits of the number, which counts up from one id to the next.
        """
        assert 0 < length <= ID_RUN_MAX
        first = self._count + 1
        if (first & _LOW_MASK) + length > _LOW_MASK + 1:
            first = (first | _LOW_MASK) + 1  # these digits would begin anew within the run
        if now_ms > self._stamp_ms or first >> 16 != self._count >> 16:
            self._begin(now_ms, first & _COUNTER_MASK)
        self._count = first + length - 1 & _COUNTER_MASK
        return self._prefix.encode(), first & _LOW_MASK, self._process.encode()

    def _begin(self, now_ms: int, count: int) -> None:
        """What is the same for all ids of one millisecond. A clock that is set back stands still here."""
        self._stamp_ms = stamp_ms = max(now_ms, self._stamp_ms)
        self._prefix = (
            f"{stamp_ms >> 16 & 0xFFFFFFFF:08x}-{stamp_ms & 0xFFFF:04x}"
            f"-7{count >> 30:03x}-{0x8000 | count >> 16 & 0x3FFF:04x}-"
        )


new_id: Final = MessageIds()
os.register_at_fork(after_in_child=new_id.restart)
