"""The C library's memory: how many places it takes it from, and giving back what is free.

Both are calls of glibc. Elsewhere nothing happens, and nothing depends on it.
"""

from __future__ import annotations

import ctypes
from typing import Final

MALLOC_ARENAS_MAX: Final = 2
_M_ARENA_MAX: Final = -8


def limit_malloc_arenas() -> None:
    """To be called before there are many threads.

    By default every thread gets an arena of its own, eight for each core, and what one thread frees is of no
    use to the others. With one interpreter lock the threads hardly meet in the allocator.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, MALLOC_ARENAS_MAX)


def trim_malloc() -> None:
    """Memory that was freed goes back to the system: whole pages, wherever they lie."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
