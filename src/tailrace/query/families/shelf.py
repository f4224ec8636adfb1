"""Opened files of families: fetched once for everybody, checked, and kept, bounded in bytes.

A file that is missing or is not what was published is nobody's error: it is remembered for a while as one
that cannot be used, and whoever wanted it decodes rows instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import xxhash

from tailrace.store.byte_budget import ByteBudget
from tailrace.store.disk_cache import Part, owner_of
from tailrace.store.object_parts import ObjectParts, Work
from tailrace.store.objects import ObjectMissingError, ObjectsError

logger = logging.getLogger("tailrace.query")

OPENED_BYTES_MAX = 128 << 20
LOADING_BYTES_MAX = 64 << 20
FILE_BYTES_MAX = 256 << 20  # a larger one is not brought into memory
UNUSABLE_S = 60.0  # how long a file that could not be used is left alone
UNUSABLE_MAX = 1024


class UnusableFileError(Exception):
    """A file that is not what was published, or not in a form that is known here."""


class Opened(Protocol):
    """A file, taken apart."""

    @property
    def memory_bytes(self) -> int: ...


class Published(NamedTuple):
    """An object as the catalogue names it."""

    key: str  # from the root of the store
    stream_id: str
    bytes: int
    sha256: str

    @property
    def part(self) -> Part:
        source = owner_of(self.stream_id) + xxhash.xxh3_64_hexdigest(self.key.encode())
        return Part(source, 0, self.bytes)


Open = Callable[[bytes], Opened]


class ShelfCounts:
    """What was done with files, in plain numbers."""

    __slots__ = ("fetched", "hits", "unusable")

    def __init__(self) -> None:
        self.hits = 0
        self.fetched = 0  # from the disk or the object store
        self.unusable = 0


class Shelf:
    """Lives on the loop. What is computed runs on threads of its own."""

    def __init__(self, parts: ObjectParts, work: Work, bytes_max: int = OPENED_BYTES_MAX) -> None:
        self._parts = parts
        self._work = work
        self._bytes_max = bytes_max
        self._budget = ByteBudget(LOADING_BYTES_MAX)
        self._opened: OrderedDict[str, tuple[Opened, int]] = OrderedDict()
        self._opening: dict[str, asyncio.Task[Opened | None]] = {}
        self._unusable: OrderedDict[str, float] = OrderedDict()
        self.bytes = 0
        self.counts = ShelfCounts()

    def find(self, published: Published) -> Opened | None:
        """The file, if it is open."""
        found = self._opened.get(published.key)
        if found is None:
            return None
        self._opened.move_to_end(published.key)
        self.counts.hits += 1
        self._measure(published.key, found)
        return found[0]

    def may_open(self, published: Published) -> bool:
        """Whether it is worth a try."""
        until = self._unusable.get(published.key)
        return published.bytes <= FILE_BYTES_MAX and (until is None or time.monotonic() >= until)

    async def open(self, published: Published, open_file: Open) -> Opened | None:
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

    async def _load(self, published: Published, open_file: Open) -> Opened | None:
        try:
            async with self._budget.hold(2 * published.bytes):
                opened = await self._fetched(published, open_file)
        except (UnusableFileError, ObjectMissingError, ObjectsError, OSError) as error:
            self.counts.unusable += 1
            logger.warning("%s cannot be used, its rows are decoded instead: %s", published.key, error)
            self._unusable[published.key] = time.monotonic() + UNUSABLE_S
            if len(self._unusable) > UNUSABLE_MAX:
                self._unusable.popitem(last=False)
            return None
        finally:
            del self._opening[published.key]
        self._unusable.pop(published.key, None)
        self.counts.fetched += 1
        self._opened[published.key] = (opened, opened.memory_bytes)
        self.bytes += opened.memory_bytes
        self._shrink()
        return opened

    async def _fetched(self, published: Published, open_file: Open) -> Opened:
        """From the cache on disk if that has it whole, else from the store."""
        wanted = published.part
        await self._parts.opened()
        cached = self._parts.find(*wanted)
        if cached is not None:
            raw = await self._parts.read(cached, wanted)
            try:
                if raw is not None:
                    return await self._work.on_thread(_checked, published, raw, open_file)
            except UnusableFileError as error:
                logger.warning("the cached copy of %s is damaged: %s", published.key, error)
            await self._parts.drop(cached)
        data = await self._parts.fetch(published.key, wanted)
        return await self._work.on_thread(_checked, published, bytes(data), open_file)

    def _measure(self, key: str, found: tuple[Opened, int]) -> None:
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


def _checked(published: Published, raw: bytes, open_file: Open) -> Opened:
    if len(raw) != published.bytes or hashlib.sha256(raw).hexdigest() != published.sha256:
        raise UnusableFileError("its bytes are not those that were published")
    return open_file(raw)
