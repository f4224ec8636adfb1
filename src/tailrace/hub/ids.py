"""Ids of messages: UUIDs of version 7, made by counting."""

from __future__ import annotations

import os
import secrets
from typing import Final

_COUNTER_BITS: Final = 42
_COUNTER_MASK: Final = 2**_COUNTER_BITS - 1


class Ids:
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
        low = count & 0xFFFF
        # A clock that is set back stands still here: later ids stay greater.
        if now_ms > self._stamp_ms or not low:
            self._stamp_ms = stamp_ms = max(now_ms, self._stamp_ms)
            self._prefix = (
                f"{stamp_ms >> 16 & 0xFFFFFFFF:08x}-{stamp_ms & 0xFFFF:04x}"
                f"-7{count >> 30:03x}-{0x8000 | count >> 16 & 0x3FFF:04x}-"
            )
        return f"{self._prefix}{low:04x}{self._process}"


new_id: Final = Ids()
os.register_at_fork(after_in_child=new_id.restart)
