"""Single entries that lie far apart, as the hits of a search do.

Of a segment only their payloads are decoded, several row groups at a time, and only they are kept: the blocks
around fifty hits would be fifty megabytes, and push everything else out of the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from tailrace.common.errors import TailraceError
from tailrace.log.decide import offset_gone
from tailrace.log.history import MissingBlock
from tailrace.log.model import Stream
from tailrace.log.reader import Reader

POINT_CACHE_BYTES_MAX: Final = 8 << 20
_OVERHEAD_BYTES: Final = 200  # of an entry that is kept


class PointReader:
    """Lives on the loop. What was read last stays: entries never change."""

    def __init__(self, reader: Reader, bytes_max: int = POINT_CACHE_BYTES_MAX) -> None:
        self._reader = reader
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()  # by the owner's number, and entry
        self.bytes = 0

    async def payloads(self, stream: Stream, entries: Sequence[int]) -> dict[int, bytes]:
        """The payload of each entry, from wherever it is."""
        found: dict[int, bytes] = {}
        missing: list[MissingBlock] = []
        for entry in entries:
            page = self._reader.try_read(stream, entry - 1, 1, 1, apart=True)
            if not isinstance(page, MissingBlock):
                found[entry] = bytes(page.parts[0])
            elif (kept := self._find(page)) is not None:
                found[entry] = kept
            else:
                missing.append(page)
        if missing:
            try:
                fetched = await self._reader.history.payloads(missing)
            except TailraceError:
                if any(one.entry <= stream.earliest for one in missing):  # taken away while we were reading
                    raise offset_gone(stream, stream.earliest) from None
                raise
            for one, payload in zip(missing, fetched, strict=True):
                found[one.entry] = payload
                self._keep(one, payload)
        return found

    def _find(self, missing: MissingBlock) -> bytes | None:
        key = (missing.number, missing.entry)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def _keep(self, missing: MissingBlock, payload: bytes) -> None:
        key = (missing.number, missing.entry)
        if key in self._kept:
            return  # somebody else has read it meanwhile
        self._kept[key] = payload
        self.bytes += len(payload) + _OVERHEAD_BYTES
        while self.bytes > self._bytes_max:
            _, old = self._kept.popitem(last=False)
            self.bytes -= len(old) + _OVERHEAD_BYTES

    def shed(self) -> None:
        """Memory is short: everything can be had again."""
        self._kept.clear()
        self.bytes = 0
