"""The bytes of a file: all of them in memory, or fetched from the object store as they are wanted.

Whoever reads runs on a thread and waits; the loop fetches meanwhile. Stretches that lie near each other come
with one request, and a copy of each stays in the cache on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import NamedTuple, Protocol

from tailrace.search.index_files.published import IndexFileRef, UnusableFileError
from tailrace.storage.object_store.cache import LoopTasks, ObjectCache
from tailrace.storage.object_store.interface import ObjectStoreError

GAP_BYTES_MAX = 128 << 10  # between two stretches: fetching it as well is cheaper than another request
FETCH_BYTES_MAX = 8 << 20  # of stretches that were joined
BATCH_BYTES_MAX = 16 << 20  # that one reader fetches at once, if it can be divided
FETCH_TIMEOUT_S = 60.0  # for a fetch; the object store gives up long before

ByteRange = tuple[int, int]  # a byte, and the byte behind the last


class FileSlice(NamedTuple):
    """Some bytes of a file, and where they begin."""

    start: int
    data: memoryview


SliceCheck = Callable[[FileSlice], bool]  # whether the bytes are those that were written


class FileContent(Protocol):
    @property
    def size(self) -> int: ...

    @property
    def held_bytes(self) -> int:
        """What is in memory as long as the file is open."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all of it is in memory, and was compared with the hash of the file."""
        ...

    def stretches(self, ranges: Iterable[ByteRange], check: SliceCheck | None = None) -> Sequence[FileSlice]:
        """At least these bytes, checked unless all of the file was. It may have to wait."""
        ...


class LoadedContent:
    is_whole = True

    def __init__(self, raw: bytes | memoryview) -> None:
        self._raw = memoryview(raw)
        self.size = self.held_bytes = len(self._raw)

    def stretches(self, ranges: Iterable[ByteRange], check: SliceCheck | None = None) -> Sequence[FileSlice]:
        return [FileSlice(0, self._raw)]


class RemoteContent:
    """A file in the object store. Once it is open, `refuse` is told when it cannot be read any more."""

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
                # It may be the copy on our own disk that is damaged.
                if self._work.wait(self.forget, FETCH_TIMEOUT_S):
                    found = self._work.wait(lambda: self._all(wanted), FETCH_TIMEOUT_S)
                if not all(map(check, found)):
                    raise self._refused(UnusableFileError("a part of it does not have its checksum"))
        except CancelledError:
            raise UnusableFileError("the server is closing") from None
        except (ObjectStoreError, OSError) as error:  # TimeoutError is one of the latter
            raise self._refused(UnusableFileError(f"it cannot be fetched: {error}")) from error
        return found

    def _near(self, wanted: Sequence[ByteRange]) -> list[FileSlice]:
        """Read by this thread itself, if the file lies on this machine: a way over the loop takes longer."""
        found: list[FileSlice] = []
        for start, stop in wanted:
            data = self._parts.get_now(self._published.key, start, stop)
            if data is None:
                return []
            found.append(FileSlice(start, memoryview(data)))
        return found

    def _refused(self, error: UnusableFileError) -> UnusableFileError:
        if self.refuse is not None:
            self._work.loop.call_soon_threadsafe(self.refuse, error)
        return error

    async def forget(self) -> bool:
        """Throws the copies of its parts away; False if there are none."""
        return await self._parts.forget(self._published.part(0, 0).source)

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
            await self._parts.drop(cached)
        return FileSlice(start, await self._parts.fetch(self._published.key, part))


class EmbeddedContent:
    """A stretch of another file that is a file itself."""

    def __init__(self, outer: FileContent, start: int, size: int) -> None:
        if start < 0 or start + size > outer.size:
            raise UnusableFileError("a part of it lies beyond its end")
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
        """What of a stretch of the outer file lies in this one, from its own beginning on."""
        begin = max(self._start - stretch.start, 0)
        end = min(self._start + self.size - stretch.start, len(stretch.data))
        return FileSlice(stretch.start + begin - self._start, stretch.data[begin:end])


def read_exactly(body: FileContent, start: int, stop: int) -> bytes:
    """One stretch of a file, exactly, unchecked."""
    [found] = body.stretches([(start, stop)])
    return bytes(found.data[start - found.start : stop - found.start])


def join_ranges(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Ranges in order, those near each other as one."""
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
    """The places of a list, divided so that each part has no more bytes than are fetched at once."""
    found: list[list[int]] = []
    taken = 0
    for place, size in enumerate(sizes):
        if not found or taken + size > BATCH_BYTES_MAX:
            found.append([])
            taken = 0
        found[-1].append(place)
        taken += size
    return found
