"""The companions of streams, ready to be asked: which spans there are, and their files opened."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from tailrace.log.model import Stream
from tailrace.query.families.shelf import Opened, Shelf
from tailrace.query.families.span import Prints, Served, Span, spans_of
from tailrace.query.view import View
from tailrace.store.companions import Companion, PlanEntry
from tailrace.store.segments import stream_id

STREAMS_MAX = 256  # whose spans are kept


class Listed(NamedTuple):
    """What counts for a stream, and the plans it was built by."""

    companions: Sequence[Companion]
    plans: Mapping[str, PlanEntry]


class Catalogue(Protocol):
    def version(self, stream: Stream) -> object:
        """Asked on the loop; while it stays equal, so does what is listed. None if nothing is."""
        ...

    def listed(self, stream: Stream) -> Listed:
        """Asked on a thread."""
        ...


class _Kept(NamedTuple):
    version: object
    stream_id: str
    view: View
    spans: list[Span]


class Library:
    """Lives on the loop. Of forks only their own entries are looked at; the rest is decoded."""

    def __init__(self, shelf: Shelf, catalogue: Catalogue) -> None:
        self.shelf = shelf
        self._catalogue = catalogue
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    async def spans(self, stream: Stream, view: View) -> Sequence[Span]:
        """The spans of a stream, in order."""
        version = self._catalogue.version(stream)
        if version is None:
            return ()
        identity = stream_id(stream.name, stream.incarnation)
        kept = self._kept.get(stream.number)
        if kept is None or (kept.version, kept.stream_id) != (version, identity) or kept.view is not view:
            loop = asyncio.get_running_loop()
            spans = await loop.run_in_executor(None, self._cut, stream, view, identity)
            kept = self._kept[stream.number] = _Kept(version, identity, view, spans)
            if len(self._kept) > STREAMS_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(stream.number)
        return kept.spans

    def _cut(self, stream: Stream, view: View, identity: str) -> list[Span]:
        listed = self._catalogue.listed(stream)
        return spans_of(Prints(view), listed.companions, listed.plans, identity)

    def covered(self, stream: Stream) -> int:
        """The last entry that all wanted families speak for, with all before it; of what was last asked."""
        kept = self._kept.get(stream.number)
        through = stream.earliest
        for span in () if kept is None else kept.spans:
            if span.first > through + 1 or (span.last > through and not span.is_complete):
                break
            through = max(through, span.last)
        return through

    async def opened(self, files: Mapping[str, Served]) -> dict[str, Opened]:
        """The files that can be used, by their keys."""
        found: dict[str, Opened] = {}
        missing: list[Served] = []
        for key, served in files.items():
            opened = self.shelf.find(served.published)
            if opened is None:
                missing.append(served)
            else:
                found[key] = opened
        for served, opened in zip(missing, await asyncio.gather(*map(self.open, missing)), strict=True):
            if opened is not None:
                found[served.published.key] = opened
        return found

    async def open(self, served: Served) -> Opened | None:
        return await self.shelf.open(served.published, partial(_open, served))


def _open(served: Served, raw: bytes) -> Opened:
    from tailrace.query.families.open_file import open_file  # brings Arrow, which is large

    return open_file(served, raw)
