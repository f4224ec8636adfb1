"""Opened files of families: fetched once for everybody, checked, and kept, bounded in bytes.

A small file is fetched whole. Of a large one the end is fetched, which tells where everything is, and the
rest as far as it is asked for. A file that is missing or is not what was published is nobody's error: it is
remembered for a while as one that cannot be used, and whoever wanted it decodes rows instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

from tailrace.search.index_files.body import FileContent, LoadedContent, RemoteContent
from tailrace.search.index_files.format import ROUTING_KEY_LEXICON
from tailrace.search.index_files.published import IndexFileRef, UnusableFileError
from tailrace.storage.object_store.cache import ByteBudget, LoopTasks, ObjectCache
from tailrace.storage.object_store.interface import ObjectStoreError

logger = logging.getLogger("tailrace.query")

OPENED_BYTES_MAX = 128 << 20
LOADING_BYTES_MAX = 64 << 20
FILE_BYTES_MAX = 256 << 20  # a larger one is left alone
WHOLE_BYTES_MAX = 512 << 10  # up to here one request for all of it is the fastest
UNUSABLE_RETRY_S = 60.0  # how long a file that could not be used is left alone
UNUSABLE_MAX = 1024

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class WholeFileRequiredError(Exception):
    """A file that has no checksums of its parts: only all of it can be checked."""


class OpenedFile(Protocol):
    """A file, taken apart."""

    @property
    def memory_bytes(self) -> int: ...


FileOpener = Callable[[FileContent], OpenedFile]


class FileCacheCounts:
    """What was done with files, in plain numbers."""

    __slots__ = ("fetched", "hits", "unusable")

    def __init__(self) -> None:
        self.hits = 0
        self.fetched = 0  # from the disk or the object store
        self.unusable = 0


class IndexFileCache:
    """Lives on the loop.

    `work` fetches and checks. `readers` has the threads of those who read files, and may wait for `work`.
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
        self._lexicons = lexicons or parts  # small, and asked for page by page: others do not push them out
        self._work = work
        self._readers = readers
        self._bytes_max = bytes_max
        self._whole_bytes_max = whole_bytes_max
        self._budget = ByteBudget(LOADING_BYTES_MAX)
        self._opened: OrderedDict[str, tuple[OpenedFile, int]] = OrderedDict()
        self._opening: dict[str, asyncio.Task[OpenedFile | None]] = {}
        self._unusable: OrderedDict[str, float] = OrderedDict()
        self.bytes = 0
        self.counts = FileCacheCounts()

    async def on_thread(self, function: Callable[[Unpack[Ts]], R], *arguments: *Ts) -> R:
        """For those who read files, and may have to wait for bytes."""
        return await self._readers.on_thread(function, *arguments)

    def find(self, published: IndexFileRef) -> OpenedFile | None:
        """The file, if it is open."""
        found = self._opened.get(published.key)
        if found is None:
            return None
        self._opened.move_to_end(published.key)
        self.counts.hits += 1
        self._measure(published.key, found)
        return found[0]

    def holds(self, published: IndexFileRef) -> bool:
        return published.key in self._opened

    def may_open(self, published: IndexFileRef) -> bool:
        """Whether it is worth a try."""
        until = self._unusable.get(published.key)
        return published.bytes <= FILE_BYTES_MAX and (until is None or time.monotonic() >= until)

    async def open(self, published: IndexFileRef, open_file: FileOpener) -> OpenedFile | None:
        """The file; None if it cannot be used."""
        found = self.find(published)
        if found is not None or not self.may_open(published):
            return found
        task = self._opening.get(published.key)
        if task is None:
            task = self._opening[published.key] = self._work.start(self._load(published, open_file))
        # Whoever goes away must not take the file from the others.
        return await asyncio.shield(task)

    def shed(self) -> None:
        """Memory is short: everything can be had again."""
        self._opened.clear()
        self.bytes = 0

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
            self._refuse(published, error)
            return None
        finally:
            del self._opening[published.key]
        self._unusable.pop(published.key, None)
        self.counts.fetched += 1
        self._opened[published.key] = (opened, opened.memory_bytes)
        self.bytes += opened.memory_bytes
        self._shrink()
        return opened

    def _refuse(self, published: IndexFileRef, error: Exception) -> None:
        """Leaves a file alone for a while."""
        self.counts.unusable += 1
        logger.warning("%s cannot be used, its rows are decoded instead: %s", published.key, error)
        self._unusable[published.key] = time.monotonic() + UNUSABLE_RETRY_S
        if len(self._unusable) > UNUSABLE_MAX:
            self._unusable.popitem(last=False)
        _, size = self._opened.pop(published.key, (None, 0))
        self.bytes -= size

    async def _opened_by_parts(self, published: IndexFileRef, open_file: FileOpener) -> OpenedFile | None:
        """None if its parts cannot be checked one by one."""
        body = RemoteContent(self._parts_of(published), self._work, published)
        try:
            try:
                opened = await self.on_thread(open_file, body)
            except UnusableFileError as error:
                if isinstance(error.__cause__, ObjectStoreError):
                    raise
                if not await body.forget():
                    raise
                logger.warning("the cached copy of %s was damaged: %s", published.key, error)
                opened = await self.on_thread(open_file, body)
        except WholeFileRequiredError:
            return None
        body.refuse = partial(self._refuse, published)
        return opened

    async def _opened_whole(self, published: IndexFileRef, open_file: FileOpener) -> OpenedFile:
        """From the cache on disk if that has it whole, else from the store."""
        parts, wanted = self._parts_of(published), published.part(0, published.bytes)
        await parts.opened()
        cached = parts.find(*wanted)
        if cached is not None:
            raw = await parts.read(cached, wanted)
            try:
                if raw is not None:
                    return await self._work.on_thread(_open_checked, published, raw, open_file)
            except UnusableFileError as error:
                logger.warning("the cached copy of %s is damaged: %s", published.key, error)
            await parts.drop(cached)
        data = await parts.fetch(published.key, wanted)
        return await self._work.on_thread(_open_checked, published, bytes(data), open_file)

    def _measure(self, key: str, found: tuple[OpenedFile, int]) -> None:
        """Files grow while they are used, by what was taken out of them."""
        opened, before = found
        if opened.memory_bytes != before:
            self._opened[key] = (opened, opened.memory_bytes)
            self.bytes += opened.memory_bytes - before
            self._shrink()

    def _shrink(self) -> None:
        while self.bytes > self._bytes_max and len(self._opened) > 1:
            _, (_, size) = self._opened.popitem(last=False)
            self.bytes -= size


def _open_checked(published: IndexFileRef, raw: bytes, open_file: FileOpener) -> OpenedFile:
    if len(raw) != published.bytes or hashlib.sha256(raw).hexdigest() != published.sha256:
        raise UnusableFileError("its bytes are not those that were published")
    return open_file(LoadedContent(raw))
