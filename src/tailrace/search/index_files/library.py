"""The companions of streams, ready to be asked: which spans there are, and their files opened.

A fork shows entries of its source, and what was built of those serves the fork as well, as far as its
registry asks for the same.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from tailrace.log.model import Stream
from tailrace.log.segment_catalogue import IndexFileSet
from tailrace.schema.registry import Registry, VersionBoundary, read_registry
from tailrace.search.index_files.body import FileContent
from tailrace.search.index_files.shelf import IndexFileCache, OpenedFile
from tailrace.search.index_files.span import (
    FieldFingerprints,
    IndexSpan,
    UsableFile,
    build_spans,
    find_rollup_files,
)
from tailrace.search.view import RecordView
from tailrace.storage.segments.model import FOREVER, make_stream_id

STREAMS_CACHED_MAX = 256  # whose spans are kept
SCHEMA_DOCUMENT = "schema"  # key of the document with a stream's registry

AncestorLookup = Callable[[Stream], Sequence[tuple[Stream, int]]]


def without_ancestors(stream: Stream) -> Sequence[tuple[Stream, int]]:
    """Without looking at whom it was forked from."""
    return [(stream, FOREVER)]


class _StreamIndexFiles(NamedTuple):
    """What a stream or one of its ancestors has, and up to which entry it is shown."""

    found: IndexFileSet
    stream_id: str
    upto: int

    def is_as(self, other: _StreamIndexFiles) -> bool:
        same = self.found.companions is other.found.companions and self.found.plans is other.found.plans
        return same and (self.stream_id, self.upto) == (other.stream_id, other.upto)


class _CachedSpans(NamedTuple):
    parts: list[_StreamIndexFiles]
    view: RecordView
    spans: list[IndexSpan]
    rollups: list[UsableFile]

    def is_of(self, parts: list[_StreamIndexFiles], view: RecordView) -> bool:
        mine, its = self.view.registry, view.registry
        same = len(parts) == len(self.parts) and all(map(_StreamIndexFiles.is_as, self.parts, parts))
        return same and (mine is its or mine == its)


class IndexCatalogue:
    """Lives on the loop. `levels` tells a stream and its ancestors, each with the last entry it shows."""

    def __init__(
        self,
        shelf: IndexFileCache,
        catalogue: Callable[[Stream], Awaitable[IndexFileSet]],
        levels: AncestorLookup = without_ancestors,
    ) -> None:
        self.shelf = shelf
        self._catalogue = catalogue
        self._levels = levels
        self._kept: OrderedDict[int, _CachedSpans] = OrderedDict()

    async def companions(self, stream: Stream) -> IndexFileSet:
        return await self._catalogue(stream)

    async def spans(self, stream: Stream, view: RecordView) -> Sequence[IndexSpan]:
        """The spans of a stream, in order."""
        kept = await self._of(stream, view)
        return () if kept is None else kept.spans

    async def rollups(self, stream: Stream, view: RecordView) -> Sequence[UsableFile]:
        """The files of rollups, by their first entry."""
        kept = await self._of(stream, view)
        return () if kept is None else kept.rollups

    async def _of(self, stream: Stream, view: RecordView) -> _CachedSpans | None:
        parts: list[_StreamIndexFiles] = []
        for owner, upto in self._levels(stream):
            found = await self._catalogue(owner)
            if found.companions and (owner is stream or has_same_versions(view.registry, owner, upto)):
                identity = make_stream_id(owner.name, owner.incarnation)
                parts.append(_StreamIndexFiles(found, identity, FOREVER if owner is stream else upto))
        if not parts:
            self._kept.pop(stream.number, None)
            return None
        kept = self._kept.get(stream.number)
        if kept is None or not kept.is_of(parts, view):
            loop = asyncio.get_running_loop()
            kept = await loop.run_in_executor(None, _build_all_spans, parts, view)
            self._kept[stream.number] = kept
            if len(self._kept) > STREAMS_CACHED_MAX:
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

    async def opened(self, files: Mapping[str, UsableFile]) -> dict[str, OpenedFile]:
        """The files that can be used, by their keys."""
        found: dict[str, OpenedFile] = {}
        missing: list[UsableFile] = []
        for key, served in files.items():
            opened = self.shelf.find(served.published)
            if opened is None:
                missing.append(served)
            else:
                found[key] = opened
        if missing:
            for served, opened in zip(missing, await asyncio.gather(*map(self.open, missing)), strict=True):
                if opened is not None:
                    found[served.published.key] = opened
        return found

    def at_hand(self, files: Mapping[str, UsableFile]) -> bool:
        """Whether all of some files are open already."""
        return all(self.shelf.holds(served.published) for served in files.values())

    async def open(self, served: UsableFile) -> OpenedFile | None:
        return await self.shelf.open(served.published, partial(_open_usable_file, served))


def has_same_versions(registry: Registry, owner: Stream, upto: int) -> bool:
    """Whether the records up to an entry are of the same versions to a fork as to the one they are from."""
    document = (owner.visible_documents or {}).get(SCHEMA_DOCUMENT)
    if document is None:
        return False
    mine = [one for one in registry.boundaries if one.offset < upto]
    return mine == [one for one in _boundaries(document) if one.offset < upto]


@lru_cache(256)
def _boundaries(document: bytes) -> tuple[VersionBoundary, ...]:
    return read_registry(document).boundaries


def _build_all_spans(parts: list[_StreamIndexFiles], view: RecordView) -> _CachedSpans:
    """On a thread: there may be many."""
    prints = FieldFingerprints(view)
    spans: list[IndexSpan] = []
    rollups: list[UsableFile] = []
    for found, identity, upto in parts:
        plans = {plan.hash: plan for plan in found.plans.plans}
        # One that goes on behind the fork speaks of entries that the fork does not have.
        shown = [one for one in found.companions if one.last <= upto]
        spans += build_spans(prints, shown, plans, identity)
        rollups += find_rollup_files(prints, shown, plans, identity)
    return _CachedSpans(parts, view, spans, rollups)


def _open_usable_file(served: UsableFile, body: FileContent) -> OpenedFile:
    from tailrace.search.index_files.open_file import open_index_file  # brings Arrow, which is large

    return open_index_file(served, body)
