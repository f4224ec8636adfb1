"""The interpreter's own heap, as its allocator counts it."""

from __future__ import annotations

import ctypes
import re
from typing import Final, NamedTuple

_USED: Final = re.compile(r"bytes in allocated blocks\s*=\s*([\d,]+)")
_RESERVED: Final = re.compile(r"bytes/arena\s*=\s*([\d,]+)")


class HeapUsage(NamedTuple):
    used_bytes: int
    total_bytes: int


def measure_heap() -> HeapUsage:
    """Small objects only: the interpreter takes larger ones straight from the C library.

    The allocator only tells a file, so it is given one in memory. It walks its pools for it, about ten
    milliseconds for each 400 MB.
    """
    text = _read_allocator_stats()
    used, reserved = _USED.search(text), _RESERVED.search(text)
    if used is None or reserved is None:
        return HeapUsage(0, 0)
    return HeapUsage(_parse_grouped_int(used[1]), _parse_grouped_int(reserved[1]))


def _parse_grouped_int(text: str) -> int:
    return int(text.replace(",", ""))


def _read_allocator_stats() -> str:
    libc = ctypes.CDLL(None)
    tell = getattr(ctypes.pythonapi, "_PyObject_DebugMallocStats", None)
    opened = getattr(libc, "open_memstream", None)
    if tell is None or opened is None:
        return ""
    opened.restype = ctypes.c_void_p
    tell.argtypes = libc.fclose.argtypes = libc.free.argtypes = [ctypes.c_void_p]
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    file = opened(ctypes.byref(text), ctypes.byref(size))
    if not file:
        return ""
    tell(file)
    libc.fclose(file)
    try:
        return ctypes.string_at(text.value or 0, size.value).decode() if text.value else ""
    finally:
        libc.free(text)
