"""The index catalogue: published index files of streams, spans, rollups and routing keys, ready to be read.

A fork shows entries of its source, so the index files of the source serve the fork as well, as far as both
registries define the same. Entries that no file covers, or whose file cannot be opened, are left to the
caller, which reads segments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from tailrace.common.caches import LruCache
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.routing_keys import LexiconKeys, LexiconTimes
from tailrace.log.segment_catalogue import IndexFileSet
from tailrace.schema.registry import Registry, VersionBoundary, read_registry
from tailrace.search.index_files.file_cache import (
    FileContent,
    IndexFileCache,
    IndexFileRef,
    OpenedFile,
    UnusableFileError,
)
from tailrace.search.index_files.format import ROUTING_KEY_INDEX, ROUTING_KEY_LEXICON
from tailrace.search.index_files.spans import (
    FieldFingerprints,
    IndexSpan,
    UsableFile,
    build_spans,
    find_rollup_files,
)
from tailrace.search.records import RecordView
from tailrace.storage.object_store.cache import LoopTasks, ObjectCache
from tailrace.storage.segments.index_files import IndexFile
from tailrace.storage.segments.model import FOREVER, make_stream_id, stream_prefix

if TYPE_CHECKING:
    from tailrace.search.index_files.lookup_files import RoutingKeyIndexFile, RoutingKeyLexiconFile


STREAMS_CACHED_MAX = 256  # streams whose spans are cached
SCHEMA_DOCUMENT = "schema"  # key of the document with a stream's registry

AncestorLookup = Callable[[Stream], Sequence[tuple[Stream, int]]]


def without_ancestors(stream: Stream) -> Sequence[tuple[Stream, int]]:
    """Only the stream itself, without the streams it was forked from."""
    return [(stream, FOREVER)]


class _StreamIndexFiles(NamedTuple):
    """The index files of a stream or one of its ancestors, and the last entry it shows of that one."""

    found: IndexFileSet
    stream_id: str
    upto: int

    def is_as(self, other: _StreamIndexFiles) -> bool:
        same = self.found.index_files is other.found.index_files and self.found.plans is other.found.plans
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
    """Spans and rollup files of streams, and their opened files; used on the event loop only.

    `levels` returns a stream and its ancestors, each with the last entry it shows.
    """

    def __init__(
        self,
        files: IndexFileCache,
        list_files: Callable[[Stream], Awaitable[IndexFileSet]],
        levels: AncestorLookup = without_ancestors,
    ) -> None:
        self.files = files
        self._list_files = list_files
        self._levels = levels
        self._cached: LruCache[int, _CachedSpans] = LruCache(entries_max=STREAMS_CACHED_MAX)

    async def index_files(self, stream: Stream) -> IndexFileSet:
        return await self._list_files(stream)

    async def spans(self, stream: Stream, view: RecordView) -> Sequence[IndexSpan]:
        """The spans of a stream, in order."""
        cached = await self._spans_of(stream, view)
        return () if cached is None else cached.spans

    async def rollups(self, stream: Stream, view: RecordView) -> Sequence[UsableFile]:
        """The rollup files by their first entry."""
        cached = await self._spans_of(stream, view)
        return () if cached is None else cached.rollups

    async def _spans_of(self, stream: Stream, view: RecordView) -> _CachedSpans | None:
        parts: list[_StreamIndexFiles] = []
        for owner, upto in self._levels(stream):
            found = await self._list_files(owner)
            if found.index_files and (owner is stream or has_same_versions(view.registry, owner, upto)):
                identity = make_stream_id(owner.name, owner.incarnation)
                parts.append(_StreamIndexFiles(found, identity, FOREVER if owner is stream else upto))
        if not parts:
            self._cached.pop(stream.number)
            return None
        cached = self._cached.get(stream.number)
        if cached is None or not cached.is_of(parts, view):
            loop = asyncio.get_running_loop()
            cached = await loop.run_in_executor(None, _build_all_spans, parts, view)
            self._cached.put(stream.number, cached)
        return cached

    def covered_through(self, stream: Stream) -> int:
        """The last entry up to which all search families cover every row, by the spans last returned."""
        cached = self._cached.get(stream.number)
        through = stream.earliest
        for span in () if cached is None else cached.spans:
            if span.first > through + 1 or (span.last > through and not span.is_complete):
                break
            through = max(through, span.last)
        return through

    async def open_all(self, files: Mapping[str, UsableFile]) -> dict[str, OpenedFile]:
        """Open files. Returns those that can be used, by key."""
        found: dict[str, OpenedFile] = {}
        missing: list[UsableFile] = []
        for key, served in files.items():
            opened = self.files.get(served.published)
            if opened is None:
                missing.append(served)
            else:
                found[key] = opened
        if missing:
            for served, opened in zip(missing, await asyncio.gather(*map(self.open, missing)), strict=True):
                if opened is not None:
                    found[served.published.key] = opened
        return found

    def are_open(self, files: Mapping[str, UsableFile]) -> bool:
        """Whether all of these files are open already."""
        return all(self.files.is_open(served.published) for served in files.values())

    async def open(self, served: UsableFile) -> OpenedFile | None:
        return await self.files.open(served.published, partial(_open_usable_file, served))


def has_same_versions(registry: Registry, owner: Stream, upto: int) -> bool:
    """Whether the records up to an entry have the same schema versions in a fork as in its source."""
    document = (owner.visible_documents or {}).get(SCHEMA_DOCUMENT)
    if document is None:
        return False
    mine = [one for one in registry.boundaries if one.offset < upto]
    return mine == [one for one in _boundaries(document) if one.offset < upto]


@lru_cache(256)
def _boundaries(document: bytes) -> tuple[VersionBoundary, ...]:
    return read_registry(document).boundaries


def _build_all_spans(parts: list[_StreamIndexFiles], view: RecordView) -> _CachedSpans:
    """Runs on a thread: there may be many."""
    prints = FieldFingerprints(view)
    spans: list[IndexSpan] = []
    rollups: list[UsableFile] = []
    for found, identity, upto in parts:
        plans = {plan.hash: plan for plan in found.plans.plans}
        # A file that continues behind the fork covers entries that the fork does not have.
        shown = [one for one in found.index_files if one.last <= upto]
        spans += build_spans(prints, shown, plans, identity)
        rollups += find_rollup_files(prints, shown, plans, identity)
    return _CachedSpans(parts, view, spans, rollups)


def _open_usable_file(served: UsableFile, body: FileContent) -> OpenedFile:
    from tailrace.search.index_files.span_source import open_index_file  # imports Arrow, which is large

    return open_index_file(served, body)


NO_FILES: frozenset[str] = frozenset()
KEY_FILES_CACHED_MAX = 512  # pairs of stream and family


class _CachedKeyFiles(NamedTuple):
    index_files: Sequence[IndexFile]
    runs: list[list[UsableFile]]


class RoutingKeyIndex:
    """Keyed reads and key listings by index files; used on the event loop only."""

    def __init__(self, catalogue: IndexCatalogue) -> None:
        self._catalogue = catalogue
        self._cached: LruCache[tuple[str, str], _CachedKeyFiles] = LruCache(entries_max=KEY_FILES_CACHED_MAX)
        self.lookups = 0  # that an index file served

    async def next_with_key(self, stream: Stream, key: bytes, entry: int) -> int:
        """The first entry at or behind `entry` that may have a key."""
        at = entry
        for run in await self._runs(stream, ROUTING_KEY_INDEX):
            if run[0].index_file.last < at:
                continue
            if run[0].index_file.first > at:
                break
            following = await self._next_in(run, key, at)
            if following is None:
                break
            at = following
            if at <= run[0].index_file.last:
                break
        self.lookups += at > entry
        return at

    async def _next_in(self, run: list[UsableFile], key: bytes, entry: int) -> int | None:
        """As `next_with_key` in one run, or the entry behind it; None if a file cannot be used."""
        found: list[int] = []
        for served in run:
            file = cast("RoutingKeyIndexFile | None", await self._catalogue.open(served))
            if file is None:
                return None
            try:
                places = file.known(key) or await self._catalogue.files.on_thread(file.places, key)
            except UnusableFileError:
                return None
            following = places.next_from(entry)
            if following is not None:
                found.append(following)
        return min(found, default=run[0].index_file.last + 1)

    async def first_keys(
        self, stream: Stream, below: int, upto: int, after: bytes | None, wanted: int, times: LexiconTimes
    ) -> LexiconKeys:
        """The first keys of the entries behind `below` up to `upto`, from the lexicon files."""
        on_thread = self._catalogue.files.on_thread
        covered: list[tuple[int, int]] = []
        keys: list[bytes] = []
        for run in await self._runs(stream, ROUTING_KEY_LEXICON):
            index_file = run[0].index_file
            if index_file.last > upto or index_file.last <= below:
                continue
            listed: list[bytes] | None = []
            for served in run:
                begun_s = time.monotonic()
                file = cast("RoutingKeyLexiconFile | None", await self._catalogue.open(served))
                times.get_s += time.monotonic() - begun_s
                try:
                    more = None if file is None else await on_thread(file.keys, after, wanted, below, times)
                except UnusableFileError:
                    more = None
                if more is None:
                    listed = None
                    break
                listed += more
            if listed is not None:
                keys += listed
                covered.append((index_file.first, index_file.last))
        return LexiconKeys(covered, keys)

    async def _runs(self, stream: Stream, family: str) -> list[list[UsableFile]]:
        """The files of a family by the range they cover, in order; a large range may have several files."""
        index_files = (await self._catalogue.index_files(stream)).index_files
        identity = make_stream_id(stream.name, stream.incarnation)
        cached = self._cached.get((identity, family))
        if cached is None or cached.index_files is not index_files:
            cached = _CachedKeyFiles(index_files, _key_files(index_files, family, identity))
            self._cached.put((identity, family), cached)
        return cached.runs


def _key_files(index_files: Sequence[IndexFile], family: str, identity: str) -> list[list[UsableFile]]:
    runs: dict[tuple[int, int], list[UsableFile]] = {}
    for index_file in index_files:
        if index_file.family == family:
            runs.setdefault((index_file.first, index_file.last), []).append(
                _usable_file(index_file, identity)
            )
    return [runs[span] for span in _without_overlaps(runs)]


def _usable_file(index_file: IndexFile, identity: str) -> UsableFile:
    key = stream_prefix(identity) + index_file.object
    published = IndexFileRef(key, identity, index_file.bytes, index_file.sha256)
    return UsableFile(index_file, published, NO_FILES, True)


def _without_overlaps(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, without overlaps; of those with the same first entry the longest remains."""
    disjoint: list[tuple[int, int]] = []
    for span in sorted(spans, key=lambda one: (one[0], -one[1])):
        if not disjoint or span[0] > disjoint[-1][1]:
            disjoint.append(span)
    return disjoint


LEXICONS = "lexicons"  # cache directory of lexicon files, beside that of all others
FETCH_THREADS = 2  # fetch and check files
DECODE_THREADS = 4  # decode files; they may wait for a fetch


class IndexFileService:
    """The index files of one server: on the object store, cached on disk, and opened in memory."""

    def __init__(
        self, log: Log, url: str, cache_dir: Path, limits: Limits, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._work = LoopTasks(loop, FETCH_THREADS)
        self._readers = LoopTasks(loop, DECODE_THREADS)
        cache_bytes = limits.search_companion_file_cache_max_bytes
        self.parts = ObjectCache(url, cache_dir, cache_bytes, limits, self._work)
        lexicon_bytes = limits.lexicon_index_cache_max_bytes
        self.lexicons = ObjectCache(url, cache_dir.with_name(LEXICONS), lexicon_bytes, limits, self._work)
        memory_bytes = limits.search_companion_memory_max_bytes
        self.files = IndexFileCache(
            self.parts, self._work, self._readers, lexicons=self.lexicons, bytes_max=memory_bytes
        )
        self.catalogue = IndexCatalogue(self.files, log.catalogue.load, log.reader.levels)
        self.keys = RoutingKeyIndex(self.catalogue)
        log.reader.history.use_key_index(self.keys)

    def register_metrics(self, metrics: ServerMetrics) -> None:
        counts = self.files.counts
        metrics.companion_opened_bytes.read = lambda: self.files.bytes
        metrics.companion_cache_bytes.read = lambda: self.parts.cached_bytes
        metrics.lexicon_cache_bytes.read = lambda: self.lexicons.cached_bytes
        metrics.companion_opens.read = lambda: counts.fetched
        metrics.companion_unusable.read = lambda: counts.unusable

    async def close(self) -> None:
        await self._readers.end()
        await self._work.end()
        await self.parts.close()
        await self.lexicons.close()
