"""Bodies are kept as they are, and compressed on their way to clients that want that."""

from __future__ import annotations

import asyncio
import gzip
from collections import OrderedDict

from tailrace.edge.cache import Slice
from tailrace.protocol.http_headers import is_text

# Shorter ones are not worth it.
BODY_BYTES_MIN = 1024
# Longer ones take a while, and have a thread to take it on.
INLINE_BYTES_MAX = 32 * 1024
COMPRESSED_BYTES_MAX = 32 * 1024 * 1024
LEVEL = 1
VARY_HEADER = b"Vary: Accept-Encoding\r\n"
GZIP_HEADER = b"Content-Encoding: gzip\r\n"


class SliceCompressor:
    """Slices in their compressed form; those that are asked for often are compressed once."""

    def __init__(self) -> None:
        self._packed: OrderedDict[Slice, bytes] = OrderedDict()
        self._bytes = 0

    async def pack(self, found: Slice) -> bytes:
        packed = self._packed.get(found)
        if packed is not None:
            self._packed.move_to_end(found)
            return packed
        if len(found.body) <= INLINE_BYTES_MAX:
            packed = gzip.compress(found.body, LEVEL, mtime=0)
        else:
            packed = await asyncio.to_thread(gzip.compress, found.body, LEVEL, mtime=0)
        self._keep(found, packed)
        return packed

    def _keep(self, found: Slice, packed: bytes) -> None:
        if found not in self._packed:
            self._packed[found] = packed
            self._bytes += _held_bytes(found, packed)
        while self._bytes > COMPRESSED_BYTES_MAX:
            self._bytes -= _held_bytes(*self._packed.popitem(last=False))


def _held_bytes(found: Slice, packed: bytes) -> int:
    """The slice counts too: it may be here only."""
    return found.size + len(packed)


def is_compressible(found: Slice) -> bool:
    return len(found.body) >= BODY_BYTES_MIN and is_text(found.content_type)


def accepts_gzip(accepted: bytes) -> bool:
    """Whether `Accept-Encoding` allows it. A quality of nothing forbids; others are not compared."""
    for item in accepted.lower().split(b","):
        coding, _, weight = item.partition(b";")
        if coding.strip() in (b"gzip", b"x-gzip"):
            return weight.replace(b" ", b"").removeprefix(b"q=").strip(b"0.") != b"" or not weight.strip()
    return False
