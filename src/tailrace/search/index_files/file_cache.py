"""Index files on the object store: fetching, checking, and the cache of opened files.

Readers run on threads and wait; the event loop fetches. A small file is fetched whole. Of a large one the
footer is fetched first, and other parts on demand; adjacent ranges share one request, and fetched parts are
cached on disk. Opened files are shared by all searches, within a byte limit. A file that is missing or
damaged is marked as unusable for a while, and its rows are decoded from segments instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, TypeVarTuple, Unpack

from tailrace.common.caches import LruCache
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import SingleFlight
from tailrace.search.index_files.format import ROUTING_KEY_LEXICON
from tailrace.storage.object_store.cache import ByteBudget, LoopTasks, ObjectCache, ObjectRange, cache_source
from tailrace.storage.object_store.interface import ObjectStoreError
from tailrace.storage.object_store.request_stats import stream_and_artifact


class UnusableFileError(Exception):
    """An index file is missing, damaged, or in an unknown format."""


class IndexFileRef(NamedTuple):
    """An index file as the manifest lists it."""

    key: str  # from the root of the store
    stream_id: str
    bytes: int
    sha256: str

    @property
    def artifact(self) -> str:
        """The kind of object, from its key."""
        _, artifact = stream_and_artifact(self.key) or ("", "")
        return artifact

    def part(self, start: int, stop: int) -> ObjectRange:
        return ObjectRange(cache_source(self.key), start, stop)


GAP_BYTES_MAX = 128 << 10  # between two ranges: fetching it as well is cheaper than another request
FETCH_BYTES_MAX = 8 << 20  # of joined ranges
BATCH_BYTES_MAX = 16 << 20  # that one reader fetches at once, if it can be divided
FETCH_TIMEOUT_S = 60.0  # the object store times out long before

ByteRange = tuple[int, int]  # start, and the byte behind the last


class FileSlice(NamedTuple):
    """Some bytes of a file and their position."""

    start: int
    data: memoryview


SliceCheck = Callable[[FileSlice], bool]  # whether the bytes match their checksums


class FileContent(Protocol):
    @property
    def size(self) -> int: ...

    @property
    def held_bytes(self) -> int:
        """Bytes in memory while the file is open."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all of it is in memory and was compared with the hash of the file."""
        ...

    def stretches(self, ranges: Iterable[ByteRange], check: SliceCheck | None = None) -> Sequence[FileSlice]:
        """At least these bytes, checked unless the whole file was. May block."""
        ...


class LoadedContent:
    is_whole = True

    def __init__(self, raw: bytes | memoryview) -> None:
        self._raw = memoryview(raw)
        self.size = self.held_bytes = len(self._raw)

    def stretches(self, ranges: Iterable[ByteRange], check: SliceCheck | None = None) -> Sequence[FileSlice]:
        return [FileSlice(0, self._raw)]


class RemoteContent:
    """A file on the object store. `refuse` is called when an open file becomes unreadable."""

    is_whole = False
    held_bytes = 0

    def __init__(self, parts: ObjectCache, work: LoopTasks, published: IndexFileRef) -> None:
        self._parts = parts
        self._work = work
        self._published = published
        self.size = published.bytes
        self.refuse: Callable[[Exception], None] | None = None

    def stretches(self, ranges: Iterable[ByteRange], check: SliceCheck | None = None) -> Sequence[FileSlice]:
        wanted = join_ranges(ranges)
        try:
            found = self._near(wanted) or self._work.wait(lambda: self._all(wanted), FETCH_TIMEOUT_S)
            if check is not None and not all(map(check, found)):
                # The copy in the disk cache may be damaged.
                if self._work.wait(self.forget, FETCH_TIMEOUT_S):
                    found = self._work.wait(lambda: self._all(wanted), FETCH_TIMEOUT_S)
                if not all(map(check, found)):
                    raise self._refused(UnusableFileError("checksum of a part does not match"))
        except CancelledError:
            raise UnusableFileError("server is stopping") from None
        except (ObjectStoreError, OSError) as error:  # TimeoutError is one of the latter
            raise self._refused(UnusableFileError(f"cannot be fetched: {error}")) from error
        return found

    def _near(self, wanted: Sequence[ByteRange]) -> list[FileSlice]:
        """Read on this thread if the object store is a local directory, which is faster than the loop."""
        found: list[FileSlice] = []
        for start, stop in wanted:
            data = self._parts.get_local(self._published.key, start, stop)
            if data is None:
                return []
            found.append(FileSlice(start, memoryview(data)))
        return found

    def _refused(self, error: UnusableFileError) -> UnusableFileError:
        if self.refuse is not None:
            self._work.loop.call_soon_threadsafe(self.refuse, error)
        return error

    async def forget(self) -> bool:
        """Remove its parts from the disk cache; False if there are none."""
        return await self._parts.evict_object(self._published.part(0, 0).source)

    async def _all(self, wanted: Iterable[ByteRange]) -> list[FileSlice]:
        return await asyncio.gather(*(self._one(start, stop) for start, stop in wanted))

    async def _one(self, start: int, stop: int) -> FileSlice:
        part = self._published.part(start, stop)
        await self._parts.opened()
        cached = self._parts.find(*part)
        if cached is not None:
            raw = await self._parts.read(cached, part)
            if raw is not None:
                return FileSlice(start, memoryview(raw))
            await self._parts.evict(cached)
        return FileSlice(start, await self._parts.fetch(self._published.key, part))


class EmbeddedContent:
    """A range of another file that is a file itself."""

    def __init__(self, outer: FileContent, start: int, size: int) -> None:
        if start < 0 or start + size > outer.size:
            raise UnusableFileError("a part lies beyond the end of the file")
        self._outer = outer
        self._start = start
        self.size = size
        self.is_whole = outer.is_whole
        self.held_bytes = size if outer.is_whole else 0

    def stretches(self, ranges: Iterable[ByteRange], check: SliceCheck | None = None) -> Sequence[FileSlice]:
        outside = [(start + self._start, stop + self._start) for start, stop in ranges]
        inside: SliceCheck | None = None if check is None else lambda stretch: check(self._inner(stretch))
        return [self._inner(stretch) for stretch in self._outer.stretches(outside, inside)]

    def _inner(self, stretch: FileSlice) -> FileSlice:
        """The part of a slice of the outer file that lies in this one."""
        begin = max(self._start - stretch.start, 0)
        end = min(self._start + self.size - stretch.start, len(stretch.data))
        return FileSlice(stretch.start + begin - self._start, stretch.data[begin:end])


def read_exactly(body: FileContent, start: int, stop: int) -> bytes:
    """One range of a file, exactly and unchecked."""
    [found] = body.stretches([(start, stop)])
    return bytes(found.data[start - found.start : stop - found.start])


def join_ranges(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Ranges in order, adjacent ones joined."""
    found: list[ByteRange] = []
    for start, stop in sorted(ranges):
        if found:
            begin, end = found[-1]
            near = start - end <= GAP_BYTES_MAX and max(stop, end) - begin <= FETCH_BYTES_MAX
            if start < end or near:
                found[-1] = (begin, max(stop, end))
                continue
        found.append((start, stop))
    return found


def split_by_size(sizes: Sequence[int]) -> list[list[int]]:
    """The positions in `sizes`, in batches of at most the bytes fetched at once."""
    found: list[list[int]] = []
    taken = 0
    for place, size in enumerate(sizes):
        if not found or taken + size > BATCH_BYTES_MAX:
            found.append([])
            taken = 0
        found[-1].append(place)
        taken += size
    return found


logger = logging.getLogger("tailrace.query")

OPENED_BYTES_MAX = 128 << 20
LOADING_BYTES_MAX = 64 << 20
FILE_BYTES_MAX = 256 << 20  # larger files are not opened
WHOLE_BYTES_MAX = 512 << 10  # up to this size one request for the whole file is fastest
UNUSABLE_RETRY_S = 60.0  # until an unusable file is tried again
UNUSABLE_MAX = 1024

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class WholeFileRequiredError(Exception):
    """The file has no checksums of its parts and can only be checked as a whole."""


class OpenedFile(Protocol):
    """An opened index file of any family."""

    @property
    def memory_bytes(self) -> int: ...


FileOpener = Callable[[FileContent], OpenedFile]


class FileCacheCounts:
    """Counters of the file cache."""

    __slots__ = ("fetched", "hits", "unusable")

    def __init__(self) -> None:
        self.hits = 0
        self.fetched = 0  # from the disk or the object store
        self.unusable = 0


class IndexFileCache:
    """LRU cache of opened index files; used on the event loop only.

    `work` fetches and checks files. `readers` runs readers, which may wait for `work`.
    """

    def __init__(
        self,
        parts: ObjectCache,
        work: LoopTasks,
        readers: LoopTasks,
        *,
        lexicons: ObjectCache | None = None,
        bytes_max: int = OPENED_BYTES_MAX,
        whole_bytes_max: int = WHOLE_BYTES_MAX,
    ) -> None:
        self._parts = parts
        self._lexicons = lexicons or parts  # small and read page by page: a cache of their own
        self._work = work
        self._readers = readers
        self._whole_bytes_max = whole_bytes_max
        self._budget = ByteBudget(LOADING_BYTES_MAX)
        self._opened: LruCache[str, tuple[OpenedFile, int]] = LruCache(  # with the bytes last measured
            size_max=bytes_max, size_of=lambda _, found: found[1], keep_newest=True
        )
        self._opening: SingleFlight[str, OpenedFile | None] = SingleFlight(work)
        self._unusable: LruCache[str, float] = LruCache(entries_max=UNUSABLE_MAX)
        self.counts = FileCacheCounts()

    @property
    def bytes(self) -> int:
        return self._opened.size

    async def on_thread(self, function: Callable[[Unpack[Ts]], R], *arguments: *Ts) -> R:
        """Run a reader, which may wait for bytes, on a thread."""
        return await self._readers.on_thread(function, *arguments)

    def get(self, published: IndexFileRef) -> OpenedFile | None:
        """The file, if it is open."""
        found = self._opened.get(published.key)
        if found is None:
            return None
        self.counts.hits += 1
        opened, measured = found
        if opened.memory_bytes != measured:  # files grow while they are used, by what is decoded
            self._opened.put(published.key, (opened, opened.memory_bytes))
        return opened

    def is_open(self, published: IndexFileRef) -> bool:
        return published.key in self._opened

    def can_retry(self, published: IndexFileRef) -> bool:
        """Whether a file is small enough, and did not fail recently."""
        until = self._unusable.get(published.key)
        return published.bytes <= FILE_BYTES_MAX and (until is None or time.monotonic() >= until)

    async def open(self, published: IndexFileRef, open_file: FileOpener) -> OpenedFile | None:
        """The file; None if it cannot be used."""
        found = self.get(published)
        if found is not None or not self.can_retry(published):
            return found
        return await self._opening.run(published.key, lambda: self._load(published, open_file))

    def evict_all(self) -> None:
        """Close all files under memory pressure; they can be opened again."""
        self._opened.clear()

    def _parts_of(self, published: IndexFileRef) -> ObjectCache:
        return self._lexicons if published.artifact == ROUTING_KEY_LEXICON else self._parts

    async def _load(self, published: IndexFileRef, open_file: FileOpener) -> OpenedFile | None:
        try:
            opened = None
            if published.bytes > self._whole_bytes_max:
                opened = await self._opened_by_parts(published, open_file)
            if opened is None:
                async with self._budget.hold(2 * published.bytes):
                    opened = await self._opened_whole(published, open_file)
        except (UnusableFileError, ObjectStoreError, OSError) as error:
            self._mark_unusable(published, error)
            return None
        self._unusable.pop(published.key)
        self.counts.fetched += 1
        self._opened.put(published.key, (opened, opened.memory_bytes))
        return opened

    def _mark_unusable(self, published: IndexFileRef, error: Exception) -> None:
        """Do not open a file again for a while."""
        self.counts.unusable += 1
        fields = log_fields(key=published.key, error=str(error))
        logger.warning("index file unusable, decoding rows instead", extra=fields)
        self._unusable.put(published.key, time.monotonic() + UNUSABLE_RETRY_S)
        self._opened.pop(published.key)

    async def _opened_by_parts(self, published: IndexFileRef, open_file: FileOpener) -> OpenedFile | None:
        """None if its parts have no checksums."""
        body = RemoteContent(self._parts_of(published), self._work, published)
        try:
            try:
                opened = await self.on_thread(open_file, body)
            except UnusableFileError as error:
                if isinstance(error.__cause__, ObjectStoreError):
                    raise
                if not await body.forget():
                    raise
                logger.warning(
                    "damaged cached index file", extra=log_fields(key=published.key, error=str(error))
                )
                opened = await self.on_thread(open_file, body)
        except WholeFileRequiredError:
            return None
        body.refuse = partial(self._mark_unusable, published)
        return opened

    async def _opened_whole(self, published: IndexFileRef, open_file: FileOpener) -> OpenedFile:
        """From the disk cache if that has the whole file, else from the object store."""
        parts, wanted = self._parts_of(published), published.part(0, published.bytes)
        await parts.opened()
        cached = parts.find(*wanted)
        if cached is not None:
            raw = await parts.read(cached, wanted)
            try:
                if raw is not None:
                    return await self._work.on_thread(_open_checked, published, raw, open_file)
            except UnusableFileError as error:
                logger.warning(
                    "damaged cached index file", extra=log_fields(key=published.key, error=str(error))
                )
            await parts.evict(cached)
        data = await parts.fetch(published.key, wanted)
        return await self._work.on_thread(_open_checked, published, bytes(data), open_file)


def _open_checked(published: IndexFileRef, raw: bytes, open_file: FileOpener) -> OpenedFile:
    if len(raw) != published.bytes or hashlib.sha256(raw).hexdigest() != published.sha256:
        raise UnusableFileError("size or SHA-256 does not match the manifest")
    return open_file(LoadedContent(raw))
