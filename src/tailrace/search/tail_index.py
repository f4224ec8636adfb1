"""The tail index: rows that no built index covers, taken apart in memory, as far as the budget goes.

Rows are indexed as they arrive, many at a time, in a process of their own (`follow`). A search adds the few
that were appended since; larger gaps, after a restart for example, are filled in the background, the newest
rows first, while searches scan.
Chunks of a stream cover one run of entries without a hole. All changes happen on the loop thread; chunks are
made on a thread and never change, apart from losing their inverted lists.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from functools import partial
from math import inf

from tailrace.common.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.log.reader import Reader
from tailrace.search.chunk_process import ChunkProcess, ChunkProcessError, build_chunk
from tailrace.search.chunks import Chunk, join_chunks
from tailrace.search.records import RecordDecoder, RecordView
from tailrace.search.scan import Payload

logger = logging.getLogger("tailrace.query")

CHUNK_ROWS = 2048  # of chunks that grow while searches wait
BULK_CHUNKS = 4  # times as many rows have those that are made or joined in the background: fewer to ask
CHUNK_BYTES = 8 << 20  # of payload
READ_BYTES = 1 << 20
URGENT_S = 10.0  # after a search the index of its stream is made at the server's own priority
PATIENCE_S = 3.0  # with searches under way, before a fill begins
BACKFILL_BUDGET_SHARE = 0.9  # of the budget: beyond, older rows are left to scans


class StreamIndex:
    """The chunks of one stream, oldest first."""

    def __init__(self, stream: Stream, view: RecordView) -> None:
        self.stream = stream
        self.view = view
        self.document = view.registry.to_json()
        self.decoder = RecordDecoder(view, list(view.config.fields))
        self.chunks: list[Chunk] = []
        self.covered = 0  # the last entry that built indexes answer for, with all before it
        self.bytes = 0
        self.used = 0  # when it was last searched, as a count; 0 if it never was
        self.searched_s = -inf  # when it was last searched, on the monotonic clock
        self.dropped_rows = 0
        self.too_large = False  # even its newest rows do not fit the budget
        self.busy = False  # a search is adding what is new
        self.filling: asyncio.Task[None] | None = None  # in the background

    @property
    def rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def floor(self) -> int:
        """Behind this entry rows belong here."""
        return max(self.stream.earliest, self.covered)

    def measure(self) -> None:
        self.bytes = sum(chunk.memory_bytes for chunk in self.chunks)


class TailIndex:
    """All streams' chunks, under one budget. With a budget of 0 there is none, and everything is scanned."""

    def __init__(
        self,
        reader: Reader,
        bytes_max: int,
        threads: Executor,
        rows_at_once: int = CHUNK_ROWS,
        process: ChunkProcess | None = None,
        urgent: ChunkProcess | None = None,
    ) -> None:
        """`process` makes the chunks that no search waits for; without one the threads do.

        `urgent` makes them instead for a stream that was searched a moment ago.
        """
        self._reader = reader
        self._process = process
        self._urgent = urgent or process
        self.bytes_max = bytes_max
        self._threads = threads
        self._rows = rows_at_once
        self._streams: dict[int, StreamIndex] = {}
        self._uses = 0
        self._searches = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        # Asked to seal a stream early, when the budget is not enough.
        self.on_pressure: Callable[[Stream], None] | None = None

    @property
    def bytes(self) -> int:
        return sum(index.bytes for index in self._streams.values())

    @property
    def rows(self) -> int:
        return sum(index.rows for index in self._streams.values())

    @property
    def dropped_rows(self) -> int:
        return sum(index.dropped_rows for index in self._streams.values())

    def find(self, number: int) -> StreamIndex | None:
        return self._streams.get(number)

    def close(self) -> None:
        for index in self._streams.values():
            if index.filling is not None:
                index.filling.cancel()
        self._streams.clear()

    def forget(self, number: int) -> None:
        index = self._streams.pop(number, None)
        if index is not None and index.filling is not None:
            index.filling.cancel()

    # -- what a search asks ------------------------------------------------------------------------------

    async def chunks(
        self, stream: Stream, view: RecordView, last: int, covered: int | None = None
    ) -> list[Chunk]:
        """The chunks for a search up to `last`: what is new is added first, if that is little.

        Rows up to `covered` leave: built indexes answer for them. None: that has not changed.
        """
        if not self.bytes_max:
            return []
        index = self._index(stream, view, covered)
        if index.filling is None and not index.busy and not index.too_large:
            newest = index.chunks[-1].last if index.chunks else max(index.floor, last - self._rows)
            if 0 < last - newest <= self._rows and (index.chunks or newest == index.floor):
                index.busy = True
                try:
                    await self._extend(index, newest, last)
                finally:
                    index.busy = False
            if self._has_gap(index, last) and not index.too_large:
                self._start_filling(index, 1)
        return list(index.chunks)

    # -- what appends call for ---------------------------------------------------------------------------

    def is_behind(self, stream: Stream) -> bool:
        """Whether so many rows have arrived that it is worth to index them before a search asks for it."""
        index = self._streams.get(stream.number)
        if not self.bytes_max or (index is not None and (index.filling is not None or index.too_large)):
            return False
        newest = index.chunks[-1].last if index is not None and index.chunks else stream.sealed
        return stream.visible - max(newest, stream.earliest) >= self._rows * BULK_CHUNKS

    def follow(self, stream: Stream, view: RecordView, covered: int) -> None:
        """Indexes what has arrived, in the background, and nothing that is sealed.

        A few rows are left to the next search, which adds them faster than it could wait for them.
        """
        if self.is_behind(stream):
            self._start_filling(self._index(stream, view, covered, searched=False), self._rows * BULK_CHUNKS)

    def _start_filling(self, index: StreamIndex, least: int) -> None:
        if index.filling is None:
            index.filling = asyncio.get_running_loop().create_task(self._fill(index, least))
            index.filling.add_done_callback(lambda task: self._filled(index, task))

    def _index(
        self, stream: Stream, view: RecordView, covered: int | None, *, searched: bool = True
    ) -> StreamIndex:
        for number in [number for number, index in self._streams.items() if index.stream.removed]:
            self.forget(number)
        index = self._streams.get(stream.number)
        if index is not None and not index.view.same_values(view):
            self.forget(stream.number)
            index = None
        if index is None:
            index = self._streams[stream.number] = StreamIndex(stream, view)
        index.stream = stream
        if searched:
            self._uses += 1
            index.used = self._uses
            index.searched_s = time.monotonic()
        if covered is not None and covered != index.covered:
            index.covered = covered
            index.too_large = False  # there is less to hold
        while index.chunks and index.chunks[0].last <= index.floor:
            del index.chunks[0]
            index.measure()
        return index

    # -- growing -----------------------------------------------------------------------------------------

    def _has_gap(self, index: StreamIndex, last: int) -> bool:
        if not index.chunks or index.chunks[-1].last < last:
            return last > index.floor
        return self._can_go_back(index) or self._few(index) is not None

    def _can_go_back(self, index: StreamIndex) -> bool:
        room = self.bytes < self.bytes_max * BACKFILL_BUDGET_SHARE
        return room and bool(index.chunks) and index.chunks[0].first > self._oldest_wanted(index)

    def _oldest_wanted(self, index: StreamIndex) -> int:
        """Sealed rows have to be fetched: that is done for a stream that is searched."""
        return (index.floor if index.used else max(index.floor, index.stream.sealed)) + 1

    @contextmanager
    def search(self) -> Generator[None]:
        """Surrounds a search, which may have to scan what is not here yet."""
        self._searches += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._searches -= 1
            if not self._searches:
                self._quiet.set()

    async def _fill(self, index: StreamIndex, least: int) -> None:
        """Everything that is missing, the newest rows first; ends when fewer than `least` new ones are left.

        On threads it begins behind the search that asks for it: the two would take twice the time of either.
        """
        if self._process is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._quiet.wait()
        stream = index.stream
        while not stream.removed:
            last = stream.visible
            bulk = self._rows * BULK_CHUNKS
            newest = index.chunks[-1].last if index.chunks else max(index.floor, last - bulk)
            if last - newest >= least:
                end = min(last, newest + self._step(last - newest))
                await self._extend(index, newest, end, background=True)
                if not index.chunks:
                    return  # no room at all
            elif self._can_go_back(index):
                first = index.chunks[0].first
                after = max(self._oldest_wanted(index) - 1, first - 1 - bulk)
                older = await self._made(index, after, first - 1, background=True)
                if not index.chunks or index.chunks[0].first != first:
                    continue  # some were dropped meanwhile
                index.chunks[:0] = older
                self._changed(index)
            elif (few := self._few(index)) is not None:
                await self._join(index, few)
            else:
                return

    def _step(self, missing: int) -> int:
        bulk = self._rows * BULK_CHUNKS
        return bulk if missing >= bulk else self._rows

    def _few(self, index: StreamIndex) -> slice | None:
        """Chunks side by side that have few rows, and together not too many."""
        begin = rows = 0
        for at, chunk in enumerate(index.chunks):
            if rows + chunk.count > self._rows * BULK_CHUNKS or chunk.count > self._rows:
                begin, rows = at if chunk.count <= self._rows else at + 1, 0
            rows += chunk.count
            if at - begin + 1 >= BULK_CHUNKS and rows >= self._rows * BULK_CHUNKS // 2:
                return slice(begin, at + 1)
        return None

    async def _join(self, index: StreamIndex, few: slice) -> None:
        small = index.chunks[few]
        loop = asyncio.get_running_loop()
        joined = await loop.run_in_executor(self._threads, join_chunks, index.view.config, small)
        if index.chunks[few] == small:  # else some were dropped meanwhile
            index.chunks[few] = [joined]
            self._changed(index)

    def _filled(self, index: StreamIndex, task: asyncio.Task[None]) -> None:
        index.filling = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not index.stream.removed:
            # Searches scan what is missing; the next one tries again.
            level = logging.INFO if isinstance(error, TailraceError) else logging.ERROR
            logger.log(level, "the tail index of %s was not completed: %r", index.stream.name, error)

    async def _extend(self, index: StreamIndex, after: int, last: int, *, background: bool = False) -> None:
        """Adds new rows. Small chunks are joined, so that a stream has few of them."""
        loop = asyncio.get_running_loop()
        for chunk in await self._made(index, after, last, background=background):
            tail, size = [chunk], chunk.count
            for older in reversed(index.chunks):
                if older.count >= 2 * size or older.count + size > self._rows:
                    break
                tail.insert(0, older)
                size += older.count
            replaced = tail[:-1]
            if replaced:
                joined = await loop.run_in_executor(self._threads, join_chunks, index.view.config, tail)
                if index.chunks[-len(replaced) :] == replaced:  # else some were dropped meanwhile
                    index.chunks[-len(replaced) :] = [joined]
                    continue
            if not index.chunks or index.chunks[-1].last + 1 == chunk.first:
                index.chunks.append(chunk)
        self._changed(index)

    async def _made(self, index: StreamIndex, after: int, last: int, *, background: bool) -> list[Chunk]:
        """New chunks for the entries behind `after` up to `last`. No search waits for those in background."""
        is_searched = time.monotonic() - index.searched_s < URGENT_S
        process = (self._urgent if is_searched else self._process) if background else None
        make = _build_chunk_here if process is None else partial(self._make_apart, process)
        threads = self._threads if process is None else process.thread
        loop = asyncio.get_running_loop()
        made: list[Chunk] = []
        payloads: list[Payload] = []
        size = 0
        first = after + 1
        while after < last:
            page = await self._reader.read(index.stream, after, READ_BYTES, last - after, apart=True)
            payloads += page.parts
            size += sum(map(len, page.parts))
            after = page.next_entry
            if size >= CHUNK_BYTES or after >= last:
                made.append(await loop.run_in_executor(threads, make, index, first, payloads))
                first, payloads, size = after + 1, [], 0
        return made

    def _make_apart(
        self, process: ChunkProcess, index: StreamIndex, first: int, payloads: list[Payload]
    ) -> Chunk:
        """On a thread, which waits for the process meanwhile."""
        try:
            return process.make(index.document, first, payloads)
        except ChunkProcessError as error:
            if process.closed:
                raise
            fields = {"stream": index.stream.name, "error": error}
            logger.warning("indexing process failed, indexing in the server", extra={"fields": fields})
            return _build_chunk_here(index, first, payloads)

    # -- shrinking ---------------------------------------------------------------------------------------

    def _changed(self, index: StreamIndex) -> None:
        index.measure()
        if self.bytes > self.bytes_max:
            self._shed()
            index.too_large = not index.chunks

    def shed(self) -> None:
        """Memory is short: everything goes, and searches scan until there is time to build it again."""
        for number in list(self._streams):
            self.forget(number)

    def _shed(self) -> None:
        """Over budget: early sealing is asked for, then inverted lists go, then whole chunks."""
        if self.on_pressure is not None:
            largest = max(self._streams.values(), key=lambda index: index.bytes)
            self.on_pressure(largest.stream)
        by_use = sorted(self._streams.values(), key=lambda index: index.used)
        for index in by_use:
            for chunk in index.chunks:
                if self.bytes <= self.bytes_max:
                    return
                if chunk.inverted:
                    chunk.drop_lists()
                    index.measure()
        for index in by_use:
            while index.chunks and self.bytes > self.bytes_max:
                index.dropped_rows += index.chunks.pop(0).count
                index.measure()


def _build_chunk_here(index: StreamIndex, first: int, payloads: list[Payload]) -> Chunk:
    return build_chunk(index.view, index.decoder, first, payloads)
