"""The companions of streams, ready to be asked: which spans there are, and their files opened."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from tailrace.log.catalogue import CompanionSet
from tailrace.log.model import Stream
from tailrace.query.families.shelf import Opened, Shelf
from tailrace.query.families.span import Prints, Served, Span, rollups_of, spans_of
from tailrace.query.view import View
from tailrace.store.segments import stream_id

STREAMS_MAX = 256  # whose spans are kept


class _Kept(NamedTuple):
    found: CompanionSet
    stream_id: str
    view: View
    spans: list[Span]
    rollups: list[Served]

    def is_of(self, found: CompanionSet, identity: str, view: View) -> bool:
        same = self.found.companions is found.companions and self.found.plans is found.plans
        mine, its = self.view.registry, view.registry
        return same and self.stream_id == identity and (mine is its or mine == its)


class Library:
    """Lives on the loop. Of forks only their own entries are looked at; the rest is decoded."""

    def __init__(self, shelf: Shelf, catalogue: Callable[[Stream], Awaitable[CompanionSet]]) -> None:
        self.shelf = shelf
        self._catalogue = catalogue
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    async def companions(self, stream: Stream) -> CompanionSet:
        return await self._catalogue(stream)

    async def spans(self, stream: Stream, view: View) -> Sequence[Span]:
        """The spans of a stream, in order."""
        kept = await self._of(stream, view)
        return () if kept is None else kept.spans

    async def rollups(self, stream: Stream, view: View) -> Sequence[Served]:
        """The files of rollups, by their first entry."""
        kept = await self._of(stream, view)
        return () if kept is None else kept.rollups

    async def _of(self, stream: Stream, view: View) -> _Kept | None:
        found = await self._catalogue(stream)
        if not found.companions:
            self._kept.pop(stream.number, None)
            return None
        identity = stream_id(stream.name, stream.incarnation)
        kept = self._kept.get(stream.number)
        if kept is None or not kept.is_of(found, identity, view):
            loop = asyncio.get_running_loop()
            kept = await loop.run_in_executor(None, _cut, found, view, identity)
            self._kept[stream.number] = kept
            if len(self._kept) > STREAMS_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(stream.number)
        return kept

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


def _cut(found: CompanionSet, view: View, identity: str) -> _Kept:
    """On a thread: there may be many."""
    prints, plans = Prints(view), {plan.hash: plan for plan in found.plans.plans}
    spans = spans_of(prints, found.companions, plans, identity)
    return _Kept(found, identity, view, spans, rollups_of(prints, found.companions, plans, identity))


def _open(served: Served, raw: bytes) -> Opened:
    from tailrace.query.families.open_file import open_file  # brings Arrow, which is large

    return open_file(served, raw)
