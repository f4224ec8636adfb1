"""Pages of companions: how a head lists any number of them and stays small.

The newest are in the head itself. When there are too many, the oldest become a page; when there are too many
pages of a level, the oldest become a page of pages. Pages are in the order of publication, not of entries, so
each one knows the range that its companions speak of.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tailrace.storage.manifests.model import (
    IndexFilePage,
    IndexFilePageRef,
    ManifestCorruptError,
    decode_manifest,
    encode_manifest,
    index_file_page_key,
    new_attempt_id,
    sha256_of,
)
from tailrace.storage.object_store.objects import ObjectExistsError
from tailrace.storage.segments.companions import IndexFile, index_file_range
from tailrace.storage.segments.segments import stream_prefix

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore

INDEX_FILES_MAX = 256
INDEX_FILE_PAGES_MAX = 256
IndexFilePageRefs = tuple[IndexFilePageRef, ...]


class ListedIndexFiles(NamedTuple):
    """What a head lists."""

    pages: IndexFilePageRefs
    companions: tuple[IndexFile, ...]


class IndexFilePages:
    """Reads and writes the pages of one stream, for one attempt to change its head."""

    def __init__(self, objects: ObjectStore, stream_id: str, companions_max: int = INDEX_FILES_MAX) -> None:
        self._objects = objects
        self._stream_id = stream_id
        self._prefix = stream_prefix(stream_id)
        self._companions_max = companions_max
        self._attempt = new_attempt_id()
        self.superseded: list[str] = []  # pages that are not needed once the head is replaced

    async def load(self, ref: IndexFilePageRef) -> IndexFilePage:
        data, _etag = await self._objects.get(self._prefix + ref.key)
        if sha256_of(data) != ref.sha256:
            raise ManifestCorruptError(self._stream_id, f"{ref.key} does not have the content it was given")
        page = decode_manifest(data, IndexFilePage, self._stream_id, ref.key)
        if page.level != ref.level or _index_file_page_ref(page, ref.key, ref.sha256) != ref:
            raise ManifestCorruptError(self._stream_id, f"{ref.key} is not the page that is named")
        return page

    async def walk(self, listed: ListedIndexFiles) -> AsyncIterator[IndexFile]:
        """Every companion; one page a level is held."""
        for ref in listed.pages:
            page = await self.load(ref)
            async for companion in self.walk(ListedIndexFiles(page.pages, page.companions)):
                yield companion
        for companion in listed.companions:
            yield companion

    async def walk_pages(self, refs: Sequence[IndexFilePageRef]) -> AsyncIterator[IndexFilePageRef]:
        """Every page, pages of pages included."""
        for ref in refs:
            yield ref
            if ref.level:
                async for inner in self.walk_pages((await self.load(ref)).pages):
                    yield inner

    async def found(self, listed: ListedIndexFiles, keys: Collection[str]) -> set[str]:
        """Which of these objects are listed. Only pages that can hold one of them are looked at."""
        found = {one.object for one in listed.companions if one.object in keys}
        for ref in listed.pages:
            if any(_may_hold(ref, key) for key in keys):
                page = await self.load(ref)
                found |= await self.found(ListedIndexFiles(page.pages, page.companions), keys)
        return found

    async def twins(
        self, listed: ListedIndexFiles, added: Sequence[IndexFile], kept: Collection[str]
    ) -> set[str]:
        """Listed companions of the family, making and range of one that is added, other than those kept."""
        wanted = {_build_identity(one) for one in added}
        ranges = {(one.first, one.last) for one in added}
        found = {one.object for one in listed.companions if _build_identity(one) in wanted}
        for ref in listed.pages:
            if any(ref.first <= first and last <= ref.last for first, last in ranges):
                page = await self.load(ref)
                found |= await self.twins(ListedIndexFiles(page.pages, page.companions), added, kept)
        return found.difference(kept)

    async def without(self, listed: ListedIndexFiles, keys: Collection[str]) -> ListedIndexFiles:
        """The list without some objects. A page that loses some of its companions gets a replacement."""
        if not keys:
            return listed
        companions = tuple(one for one in listed.companions if one.object not in keys)
        return ListedIndexFiles(await self._pages_without(listed.pages, keys), companions)

    async def trimmed(self, listed: ListedIndexFiles, earliest: int) -> tuple[ListedIndexFiles, list[str]]:
        """The list without what speaks of trimmed entries only, or sums some of them; and those objects."""
        gone: list[str] = []
        for ref in listed.pages:
            if ref.first <= earliest:
                page = await self.load(ref)
                inner = self.walk(ListedIndexFiles(page.pages, page.companions))
                gone += [one.object async for one in inner if is_trimmed(one, earliest)]
        gone += [one.object for one in listed.companions if is_trimmed(one, earliest)]
        return await self.without(listed, set(gone)), gone

    async def _pages_without(self, refs: IndexFilePageRefs, keys: Collection[str]) -> IndexFilePageRefs:
        remaining: list[IndexFilePageRef] = []
        for ref in refs:
            if not any(_may_hold(ref, key) for key in keys):
                remaining.append(ref)
                continue
            page = await self.load(ref)
            listed = ListedIndexFiles(page.pages, page.companions)
            shorter = await self.without(listed, keys)
            if shorter == listed:
                remaining.append(ref)
                continue
            self.superseded.append(ref.key)
            if shorter.pages or shorter.companions:
                remaining.append(await self._store(page.level, shorter))
        return tuple(remaining)

    async def roll(self, listed: ListedIndexFiles) -> ListedIndexFiles:
        """Moves the oldest into pages until the head holds no more than it may."""
        pages, companions = list(listed.pages), listed.companions
        while len(companions) > self._companions_max:
            oldest, companions = companions[: self._companions_max], companions[self._companions_max :]
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
        return ListedIndexFiles(tuple(pages), companions)

    async def _store(self, level: int, listed: ListedIndexFiles) -> IndexFilePageRef:
        page = IndexFilePage(
            attempt=self._attempt, level=level, companions=listed.companions, pages=listed.pages
        )
        data = encode_manifest(page)
        sha256 = sha256_of(data)
        first, last = _page_range(page)
        key = index_file_page_key(first, last, sha256)
        try:
            await self._objects.create(self._prefix + key, data)
        except ObjectExistsError:
            pass  # with the same content, for its name says so
        return _index_file_page_ref(page, key, sha256)


def is_trimmed(companion: IndexFile, earliest: int) -> bool:
    """Whether retention leaves it nothing to say. Sums over trimmed entries are no longer right."""
    return (companion.first if companion.family == "agg" else companion.last) <= earliest


def _build_identity(companion: IndexFile) -> tuple[str, str, int, int]:
    return companion.family, companion.fingerprint, companion.first, companion.last


def _may_hold(ref: IndexFilePageRef, key: str) -> bool:
    entries = index_file_range(key)
    return entries is not None and ref.first <= entries[0] and entries[1] <= ref.last


def _page_range(page: IndexFilePage) -> tuple[int, int]:
    parts = page.pages if page.level else page.companions
    return min(part.first for part in parts), max(part.last for part in parts)


def _index_file_page_ref(page: IndexFilePage, key: str, sha256: str) -> IndexFilePageRef:
    first, last = _page_range(page)
    count = sum(ref.companions for ref in page.pages) + len(page.companions)
    size = sum(ref.bytes for ref in page.pages) + sum(one.bytes for one in page.companions)
    return IndexFilePageRef(key, first, last, sha256, page.level, count, size)
