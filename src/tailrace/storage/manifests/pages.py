"""Pages of a manifest: how a head lists any number of segments and index files and stays small.

The head lists pages from the oldest to the newest, higher levels first. Each level grows to `pages_max` and
is then folded into one page of the next level. So a head stays small, and recording one segment writes a
bounded number of objects.

The newest index files are in the head itself; the oldest are moved to pages in the same way. Their pages are
in order of publication, not of entries, so each page has the range of entries that its files cover.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from tailrace.storage.manifests.model import (
    IndexFilePage,
    IndexFilePageRef,
    ManifestConflictError,
    ManifestCorruptError,
    ManifestHead,
    SegmentPage,
    SegmentPageRef,
    decode_manifest,
    encode_manifest,
    index_file_page_key,
    new_attempt_id,
    segment_page_key,
    sha256_of,
)
from tailrace.storage.object_store.interface import ObjectExistsError
from tailrace.storage.segments.index_files import IndexFile, index_file_range
from tailrace.storage.segments.model import SegmentInfo, stream_prefix

if TYPE_CHECKING:
    from tailrace.storage.object_store.interface import ObjectStore
    from tailrace.storage.segments.model import RetainedRanges


HEAD_SEGMENTS_MAX = 1000
SEGMENT_PAGES_MAX = 1000


class ListedSegments(NamedTuple):
    """What a head lists."""

    pages: tuple[SegmentPageRef, ...]
    segments: tuple[SegmentInfo, ...]


class TrimmedSegments(NamedTuple):
    """What remains listed after retention, and what is no longer needed once that is recorded."""

    listed: ListedSegments
    superseded: list[str]


class SegmentPages:
    """Reads and writes the pages of one stream, for one attempt to change its head."""

    def __init__(self, objects: ObjectStore, stream_id: str, segments_max: int, pages_max: int) -> None:
        assert segments_max > 0
        assert pages_max > 1
        self._objects = objects
        self._stream_id = stream_id
        self._prefix = stream_prefix(stream_id)
        self._segments_max = segments_max
        self._pages_max = pages_max
        self._attempt = new_attempt_id()

    async def load(self, ref: SegmentPageRef) -> SegmentPage:
        data, _etag = await self._objects.get(self._prefix + ref.key)
        if sha256_of(data) != ref.sha256:
            raise ManifestCorruptError(self._stream_id, f"the content of {ref.key} does not match its hash")
        page = decode_manifest(data, SegmentPage, self._stream_id, ref.key)
        parts = page.pages if ref.level else page.segments
        if page.level != ref.level or not parts or _segment_page_ref(page, ref.key, ref.sha256) != ref:
            raise ManifestCorruptError(self._stream_id, f"{ref.key} is a different page")
        return page

    async def _store(self, page: SegmentPage) -> SegmentPageRef:
        """Creates it. An existing one has the same content, because its name contains the hash."""
        parts = page.pages if page.level else page.segments
        data = encode_manifest(page)
        sha256 = sha256_of(data)
        key = segment_page_key(parts[0].first, parts[-1].last, sha256)
        try:
            await self._objects.create(self._prefix + key, data)
        except ObjectExistsError:
            pass
        return _segment_page_ref(page, key, sha256)

    async def roll(self, listed: ListedSegments) -> ListedSegments:
        """Move the oldest segments into pages, and full runs of pages into pages of pages."""
        pages, segments = list(listed.pages), listed.segments
        while len(segments) > self._segments_max:
            pages.append(
                await self._store(SegmentPage(attempt=self._attempt, segments=segments[: self._segments_max]))
            )
            segments = segments[self._segments_max :]
        level = 0
        while True:
            run = [index for index, ref in enumerate(pages) if ref.level == level]
            if not run:
                return ListedSegments(tuple(pages), segments)
            if len(run) > self._pages_max:
                start, stop = run[0], run[0] + self._pages_max
                folded = SegmentPage(attempt=self._attempt, level=level + 1, pages=tuple(pages[start:stop]))
                pages[start:stop] = [await self._store(folded)]
            else:
                level += 1

    async def cut(self, listed: ListedSegments, retained: RetainedRanges) -> TrimmedSegments:
        """Drops segments without retained entries. A page that loses some of its parts is replaced."""
        superseded: list[str] = []
        pages = await self._cut_pages(listed.pages, retained, superseded)
        segments = tuple(info for info in listed.segments if retained.overlaps(info.first, info.last))
        return TrimmedSegments(ListedSegments(pages, segments), superseded)

    async def within(self, listed: ListedSegments, first: int, last: int) -> list[SegmentInfo]:
        """The segments with some of these entries, oldest first."""
        found: list[SegmentInfo] = []
        async for info in self.walk(listed, first):
            if info.first > last:
                break
            found.append(info)
        return found

    async def join(self, listed: ListedSegments, joined: SegmentInfo) -> TrimmedSegments:
        """Lists one segment in place of all within its range, which it covers exactly."""
        superseded: list[str] = []
        pages, placed = await self._join_pages(listed.pages, joined, superseded, placed=False)
        segments = _with_joined(listed.segments, joined, placed=placed)
        return TrimmedSegments(ListedSegments(pages, segments), superseded)

    async def _join_pages(
        self, refs: tuple[SegmentPageRef, ...], joined: SegmentInfo, superseded: list[str], *, placed: bool
    ) -> tuple[tuple[SegmentPageRef, ...], bool]:
        """The pages afterwards, and whether the segment has found its place: where the first one was."""
        remaining: list[SegmentPageRef] = []
        for ref in refs:
            if ref.last < joined.first or joined.last < ref.first:
                remaining.append(ref)
                continue
            page = await self.load(ref)
            pages, _ = await self._join_pages(page.pages, joined, superseded, placed=placed)
            segments = _with_joined(page.segments, joined, placed=placed)
            if (pages, segments) == (page.pages, page.segments):
                remaining.append(ref)
                continue
            placed = True
            superseded.append(ref.key)
            if pages or segments:
                shorter = SegmentPage(attempt=self._attempt, level=page.level, pages=pages, segments=segments)
                remaining.append(await self._store(shorter))
        return tuple(remaining), placed

    async def _cut_pages(
        self, refs: tuple[SegmentPageRef, ...], retained: RetainedRanges, superseded: list[str]
    ) -> tuple[SegmentPageRef, ...]:
        remaining: list[SegmentPageRef] = []
        for ref in refs:
            if retained.contains(ref.first, ref.last):
                remaining.append(ref)
            elif retained.overlaps(ref.first, ref.last) and (
                shorter := await self._shorter(ref, retained, superseded)
            ):
                remaining.append(shorter)
            else:
                superseded.append(ref.key)
        return tuple(remaining)

    async def _shorter(
        self, ref: SegmentPageRef, retained: RetainedRanges, superseded: list[str]
    ) -> SegmentPageRef | None:
        """The page without what is not retained: itself if that is nothing, None if that is everything."""
        page = await self.load(ref)
        pages = await self._cut_pages(page.pages, retained, superseded)
        segments = tuple(info for info in page.segments if retained.overlaps(info.first, info.last))
        if (pages, segments) == (page.pages, page.segments):
            return ref
        if not pages and not segments:
            return None
        superseded.append(ref.key)
        shorter = SegmentPage(attempt=self._attempt, level=page.level, pages=pages, segments=segments)
        return await self._store(shorter)

    async def walk(self, listed: ListedSegments, from_entry: int = 0) -> AsyncIterator[SegmentInfo]:
        """Every segment with entries at or after `from_entry`, oldest first; holds one page per level."""
        for ref in listed.pages:
            if ref.last >= from_entry:
                page = await self.load(ref)
                async for info in self.walk(ListedSegments(page.pages, page.segments), from_entry):
                    yield info
        for info in listed.segments:
            if info.last >= from_entry:
                yield info

    async def walk_pages(self, refs: Sequence[SegmentPageRef]) -> AsyncIterator[SegmentPageRef]:
        """Every page, pages of pages included."""
        for ref in refs:
            yield ref
            if ref.level:
                async for inner in self.walk_pages((await self.load(ref)).pages):
                    yield inner


def _with_joined(
    segments: tuple[SegmentInfo, ...], joined: SegmentInfo, *, placed: bool
) -> tuple[SegmentInfo, ...]:
    inside = [
        index
        for index, info in enumerate(segments)
        if joined.first <= info.first and info.last <= joined.last
    ]
    if not inside:
        return segments
    return (*segments[: inside[0]], *(() if placed else (joined,)), *segments[inside[-1] + 1 :])


def _segment_page_ref(page: SegmentPage, key: str, sha256: str) -> SegmentPageRef:
    parts = page.pages if page.level else page.segments
    segments = sum(ref.segments for ref in page.pages) + len(page.segments)
    size = sum(part.bytes for part in parts)
    return SegmentPageRef(key, parts[0].first, parts[-1].last, sha256, page.level, segments, size)


def append_segments(head: ManifestHead, added: Sequence[SegmentInfo]) -> tuple[SegmentInfo, ...]:
    """The segments with new ones appended. Entries are never missing in between and never duplicated."""
    stream_id, recorded, uploaded_through = head.stream_id, head.segments, head.uploaded_through
    for info in added:
        if info.first > info.last or info.rows != info.last - info.first + 1:
            raise ManifestConflictError(stream_id, f"{info.key} has a wrong number of rows, {info.rows}")
        if info.epoch < head.epoch:
            raise ManifestConflictError(stream_id, f"{info.key} is of an epoch before {head.epoch}")
    if added and added[0].first != uploaded_through + 1:
        message = (
            f"{added[0].key} starts at {added[0].first}, but the last recorded entry is {uploaded_through}"
        )
        raise ManifestConflictError(stream_id, message)
    # Segments retained for forks only need not be adjacent.
    before_added = recorded[-1:] if recorded and recorded[-1].last > head.earliest else ()
    for before, after in pairwise((*before_added, *added)):
        if after.first != before.last + 1 or after.epoch < before.epoch:
            raise ManifestConflictError(stream_id, f"{after.key} does not follow {before.key}")
    return (*recorded, *added)


INDEX_FILES_MAX = 256
INDEX_FILE_PAGES_MAX = 256
IndexFilePageRefs = tuple[IndexFilePageRef, ...]


class ListedIndexFiles(NamedTuple):
    """What a head lists."""

    pages: IndexFilePageRefs
    index_files: tuple[IndexFile, ...]


class IndexFilePages:
    """Reads and writes the pages of one stream, for one attempt to change its head."""

    def __init__(self, objects: ObjectStore, stream_id: str, index_files_max: int = INDEX_FILES_MAX) -> None:
        self._objects = objects
        self._stream_id = stream_id
        self._prefix = stream_prefix(stream_id)
        self._index_files_max = index_files_max
        self._attempt = new_attempt_id()
        self.superseded: list[str] = []  # pages that are not needed once the head is replaced

    async def load(self, ref: IndexFilePageRef) -> IndexFilePage:
        data, _etag = await self._objects.get(self._prefix + ref.key)
        if sha256_of(data) != ref.sha256:
            raise ManifestCorruptError(self._stream_id, f"the content of {ref.key} does not match its hash")
        page = decode_manifest(data, IndexFilePage, self._stream_id, ref.key)
        if page.level != ref.level or _index_file_page_ref(page, ref.key, ref.sha256) != ref:
            raise ManifestCorruptError(self._stream_id, f"{ref.key} is a different page")
        return page

    async def walk(self, listed: ListedIndexFiles) -> AsyncIterator[IndexFile]:
        """Every index file; holds one page per level."""
        for ref in listed.pages:
            page = await self.load(ref)
            async for index_file in self.walk(ListedIndexFiles(page.pages, page.index_files)):
                yield index_file
        for index_file in listed.index_files:
            yield index_file

    async def walk_pages(self, refs: Sequence[IndexFilePageRef]) -> AsyncIterator[IndexFilePageRef]:
        """Every page, pages of pages included."""
        for ref in refs:
            yield ref
            if ref.level:
                async for inner in self.walk_pages((await self.load(ref)).pages):
                    yield inner

    async def find_listed(self, listed: ListedIndexFiles, keys: Collection[str]) -> set[str]:
        """Which of these objects are listed. Reads only pages that can contain one of them."""
        found = {one.object for one in listed.index_files if one.object in keys}
        for ref in listed.pages:
            if any(_may_hold(ref, key) for key in keys):
                page = await self.load(ref)
                found |= await self.find_listed(ListedIndexFiles(page.pages, page.index_files), keys)
        return found

    async def equivalents(
        self, listed: ListedIndexFiles, added: Sequence[IndexFile], retained: Collection[str]
    ) -> set[str]:
        """Listed files with the family, build and range of one that is added, except those in `retained`."""
        wanted = {_build_identity(one) for one in added}
        ranges = {(one.first, one.last) for one in added}
        found = {one.object for one in listed.index_files if _build_identity(one) in wanted}
        for ref in listed.pages:
            if any(ref.first <= first and last <= ref.last for first, last in ranges):
                page = await self.load(ref)
                found |= await self.equivalents(
                    ListedIndexFiles(page.pages, page.index_files), added, retained
                )
        return found.difference(retained)

    async def without(self, listed: ListedIndexFiles, keys: Collection[str]) -> ListedIndexFiles:
        """The list without some objects. A page that loses some of its files gets a replacement."""
        if not keys:
            return listed
        index_files = tuple(one for one in listed.index_files if one.object not in keys)
        return ListedIndexFiles(await self._pages_without(listed.pages, keys), index_files)

    async def trimmed(self, listed: ListedIndexFiles, earliest: int) -> tuple[ListedIndexFiles, list[str]]:
        """The list without files of trimmed entries and aggregates that include some; and those objects."""
        gone: list[str] = []
        for ref in listed.pages:
            if ref.first <= earliest:
                page = await self.load(ref)
                inner = self.walk(ListedIndexFiles(page.pages, page.index_files))
                gone += [one.object async for one in inner if is_trimmed(one, earliest)]
        gone += [one.object for one in listed.index_files if is_trimmed(one, earliest)]
        return await self.without(listed, set(gone)), gone

    async def _pages_without(self, refs: IndexFilePageRefs, keys: Collection[str]) -> IndexFilePageRefs:
        remaining: list[IndexFilePageRef] = []
        for ref in refs:
            if not any(_may_hold(ref, key) for key in keys):
                remaining.append(ref)
                continue
            page = await self.load(ref)
            listed = ListedIndexFiles(page.pages, page.index_files)
            shorter = await self.without(listed, keys)
            if shorter == listed:
                remaining.append(ref)
                continue
            self.superseded.append(ref.key)
            if shorter.pages or shorter.index_files:
                remaining.append(await self._store(page.level, shorter))
        return tuple(remaining)

    async def roll(self, listed: ListedIndexFiles) -> ListedIndexFiles:
        """Moves the oldest into pages until the head is within its limit."""
        pages, index_files = list(listed.pages), listed.index_files
        while len(index_files) > self._index_files_max:
            oldest, index_files = index_files[: self._index_files_max], index_files[self._index_files_max :]
            pages.append(await self._store(0, ListedIndexFiles((), oldest)))
        level = 0
        while run := [index for index, ref in enumerate(pages) if ref.level == level]:
            if len(run) > INDEX_FILE_PAGES_MAX:
                start, stop = run[0], run[0] + INDEX_FILE_PAGES_MAX
                pages[start:stop] = [
                    await self._store(level + 1, ListedIndexFiles(tuple(pages[start:stop]), ()))
                ]
            else:
                level += 1
        return ListedIndexFiles(tuple(pages), index_files)

    async def _store(self, level: int, listed: ListedIndexFiles) -> IndexFilePageRef:
        page = IndexFilePage(
            attempt=self._attempt, level=level, index_files=listed.index_files, pages=listed.pages
        )
        data = encode_manifest(page)
        sha256 = sha256_of(data)
        first, last = _page_range(page)
        key = index_file_page_key(first, last, sha256)
        try:
            await self._objects.create(self._prefix + key, data)
        except ObjectExistsError:
            pass  # the content is the same, because its name contains the hash
        return _index_file_page_ref(page, key, sha256)


def is_trimmed(index_file: IndexFile, earliest: int) -> bool:
    """Whether retention has made the file useless. Aggregates that include trimmed entries are wrong."""
    return (index_file.first if index_file.family == "agg" else index_file.last) <= earliest


def _build_identity(index_file: IndexFile) -> tuple[str, str, int, int]:
    return index_file.family, index_file.fingerprint, index_file.first, index_file.last


def _may_hold(ref: IndexFilePageRef, key: str) -> bool:
    entries = index_file_range(key)
    return entries is not None and ref.first <= entries[0] and entries[1] <= ref.last


def _page_range(page: IndexFilePage) -> tuple[int, int]:
    parts = page.pages if page.level else page.index_files
    return min(part.first for part in parts), max(part.last for part in parts)


def _index_file_page_ref(page: IndexFilePage, key: str, sha256: str) -> IndexFilePageRef:
    first, last = _page_range(page)
    count = sum(ref.index_files for ref in page.pages) + len(page.index_files)
    size = sum(ref.bytes for ref in page.pages) + sum(one.bytes for one in page.index_files)
    return IndexFilePageRef(key, first, last, sha256, page.level, count, size)
