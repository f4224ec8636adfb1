"""The tail index: the newest rows, not yet covered by index files, as chunks in memory within a byte budget.

Appended rows are indexed in batches by a separate process (`index_new_rows`). A search adds the few rows
appended since; larger gaps, as after a restart, are filled in the background, newest rows first, while
searches scan them. The chunks of a stream cover one range of entries without gaps. The index changes only on
the event loop; chunks are immutable, except that they may drop their inverted lists.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from math import inf

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import wait_event
from tailrace.log.model import Stream
from tailrace.log.reader import Reader
from tailrace.search.chunk_process import ChunkProcess, ChunkProcessError, build_chunk
from tailrace.search.chunks import Chunk, join_chunks
from tailrace.search.records import RecordDecoder, RecordView
from tailrace.search.scan import Payload

logger = logging.getLogger("tailrace.query")

CHUNK_ROWS = 2048  # rows of a chunk that is built while a search waits
BULK_CHUNKS = 4  # chunks built or joined in the background have this many times the rows
CHUNK_BYTES = 8 << 20  # payload bytes of a chunk
READ_BYTES = 1 << 20
SEARCHED_RECENTLY_S = 10.0  # after a search its stream is indexed at the server's own priority
FILL_DELAY_MAX_S = 3.0  # how long a fill waits for running searches
BACKFILL_BUDGET_SHARE = 0.9  # share of the budget above which older rows are left to scans


class StreamIndex:
    """The chunks of one stream, oldest first."""

    def __init__(self, stream: Stream, view: RecordView) -> None:
        self.stream = stream
        self.view = view
        self.document = view.registry.to_json()
        self.decoder = RecordDecoder(view, list(view.config.fields))
        self.chunks: list[Chunk] = []
        self.covered = 0  # last entry up to which index files cover every row
        self.bytes = 0
        self.used = 0  # number of its last search; 0 if it was never searched
        self.searched_s = -inf  # time of its last search, monotonic clock
        self.dropped_rows = 0
        self.too_large = False  # even its newest rows do not fit the budget
        self.busy = False  # a search is adding new rows
        self.filling: asyncio.Task[None] | None = None  # background fill

    @property
    def rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def floor(self) -> int:
        """The last entry that does not belong here: trimmed, or covered by index files."""
        return max(self.stream.earliest, self.covered)

    def update_size(self) -> None:
        self.bytes = sum(chunk.memory_bytes for chunk in self.chunks)


class TailIndex:
    """The chunks of all streams within one budget. With a budget of 0 every row is scanned."""

    def __init__(
        self,
        reader: Reader,
        bytes_max: int,
        threads: Executor,
        rows_at_once: int = CHUNK_ROWS,
        process: ChunkProcess | None = None,
        urgent: ChunkProcess | None = None,
        on_pressure: Callable[[Stream], None] | None = None,
    ) -> None:
        """`process` builds the chunks that no search waits for; without one, `threads` does.

        `urgent` builds those of streams that were searched recently. `on_pressure` is called over budget with
        the stream that uses most: sealing it lets index files replace its rows.
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
        self._idle = asyncio.Event()
        self._idle.set()
        self._on_pressure = on_pressure

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

    # -- searches ----------------------------------------------------------------------------------------

    async def chunks(
        self, stream: Stream, view: RecordView, last: int, covered: int | None = None
    ) -> list[Chunk]:
        """The chunks for a search up to `last`. A small number of new rows is added first.

        Rows up to `covered` are dropped, because index files cover them; None leaves that unchanged.
        """
        if not self.bytes_max:
            return []
        index = self._index(stream, view, covered)
        if index.filling is None and not index.busy and not index.too_large:
            newest = index.chunks[-1].last if index.chunks else max(index.floor, last - self._rows)
            if 0 < last - newest <= self._rows and (index.chunks or newest == index.floor):
                index.busy = True
                try:
                    await self._append_rows(index, newest, last)
                finally:
                    index.busy = False
            if self._has_gap(index, last) and not index.too_large:
                self._start_filling(index, 1)
        return list(index.chunks)

    # -- appends -----------------------------------------------------------------------------------------

    def is_behind(self, stream: Stream) -> bool:
        """Whether enough rows were appended to index them before the next search."""
        index = self._streams.get(stream.number)
        if not self.bytes_max or (index is not None and (index.filling is not None or index.too_large)):
            return False
        newest = index.chunks[-1].last if index is not None and index.chunks else stream.sealed
        return stream.visible - max(newest, stream.earliest) >= self._rows * BULK_CHUNKS

    def index_new_rows(self, stream: Stream, view: RecordView, covered: int) -> None:
        """Index appended rows in the background, sealed ones not included.

        A few rows are left to the next search, which adds them faster than it could wait for a fill.
        """
        if self.is_behind(stream):
            self._start_filling(self._index(stream, view, covered, searched=False), self._rows * BULK_CHUNKS)

    def _start_filling(self, index: StreamIndex, least: int) -> None:
        if index.filling is None:
            index.filling = asyncio.get_running_loop().create_task(self._fill(index, least))
            index.filling.add_done_callback(lambda task: self._on_filled(index, task))

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
            index.too_large = False  # fewer rows are left to index
        while index.chunks and index.chunks[0].last <= index.floor:
            del index.chunks[0]
            index.update_size()
        return index

    # -- growing -----------------------------------------------------------------------------------------

    def _has_gap(self, index: StreamIndex, last: int) -> bool:
        if not index.chunks or index.chunks[-1].last < last:
            return last > index.floor
        return self._can_backfill(index) or self._small_run(index) is not None

    def _can_backfill(self, index: StreamIndex) -> bool:
        room = self.bytes < self.bytes_max * BACKFILL_BUDGET_SHARE
        return room and bool(index.chunks) and index.chunks[0].first > self._backfill_floor(index)

    def _backfill_floor(self, index: StreamIndex) -> int:
        """The first entry to fill back to. Sealed rows cost a fetch: only for streams that are searched."""
        return (index.floor if index.used else max(index.floor, index.stream.sealed)) + 1

    @contextmanager
    def search(self) -> Generator[None]:
        """Context of a running search; fills on threads wait until no search runs."""
        self._searches += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._searches -= 1
            if not self._searches:
                self._idle.set()

    async def _fill(self, index: StreamIndex, least: int) -> None:
        """Index all missing rows, newest first, until fewer than `least` new ones are left.

        On threads it waits for running searches first: side by side each would take twice as long.
        """
        if self._process is None:
            await wait_event(self._idle, FILL_DELAY_MAX_S)
        stream = index.stream
        while not stream.removed:
            last = stream.visible
            bulk = self._rows * BULK_CHUNKS
            newest = index.chunks[-1].last if index.chunks else max(index.floor, last - bulk)
            if last - newest >= least:
                end = min(last, newest + self._step(last - newest))
                await self._append_rows(index, newest, end, background=True)
                if not index.chunks:
                    return  # not even the newest rows fit the budget
            elif self._can_backfill(index):
                first = index.chunks[0].first
                after = max(self._backfill_floor(index) - 1, first - 1 - bulk)
                older = await self._build_chunks(index, after, first - 1, background=True)
                if not index.chunks or index.chunks[0].first != first:
                    continue  # some were dropped in the meantime
                index.chunks[:0] = older
                self._changed(index)
            elif (small_run := self._small_run(index)) is not None:
                await self._join(index, small_run)
            else:
                return

    def _step(self, missing: int) -> int:
        bulk = self._rows * BULK_CHUNKS
        return bulk if missing >= bulk else self._rows

    def _small_run(self, index: StreamIndex) -> slice | None:
        """A run of adjacent small chunks to be joined into one; None if there is none."""
        begin = rows = 0
        for at, chunk in enumerate(index.chunks):
            if rows + chunk.count > self._rows * BULK_CHUNKS or chunk.count > self._rows:
                begin, rows = at if chunk.count <= self._rows else at + 1, 0
            rows += chunk.count
            if at - begin + 1 >= BULK_CHUNKS and rows >= self._rows * BULK_CHUNKS // 2:
                return slice(begin, at + 1)
        return None

    async def _join(self, index: StreamIndex, small_run: slice) -> None:
        small = index.chunks[small_run]
        loop = asyncio.get_running_loop()
        joined = await loop.run_in_executor(self._threads, join_chunks, index.view.config, small)
        if index.chunks[small_run] == small:  # else some were dropped in the meantime
            index.chunks[small_run] = [joined]
            self._changed(index)

    def _on_filled(self, index: StreamIndex, task: asyncio.Task[None]) -> None:
        index.filling = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not index.stream.removed:
            # Searches scan the missing rows; the next one starts another fill.
            level = logging.INFO if isinstance(error, TailraceError) else logging.ERROR
            fields = log_fields(stream=index.stream.name, error=repr(error))
            logger.log(level, "tail index fill failed", extra=fields)

    async def _append_rows(
        self, index: StreamIndex, after: int, last: int, *, background: bool = False
    ) -> None:
        """Append new rows. Small chunks are joined, so that a stream has few of them."""
        loop = asyncio.get_running_loop()
        for chunk in await self._build_chunks(index, after, last, background=background):
            tail, size = [chunk], chunk.count
            for older in reversed(index.chunks):
                if older.count >= 2 * size or older.count + size > self._rows:
                    break
                tail.insert(0, older)
                size += older.count
            replaced = tail[:-1]
            if replaced:
                joined = await loop.run_in_executor(self._threads, join_chunks, index.view.config, tail)
                if index.chunks[-len(replaced) :] == replaced:  # else some were dropped in the meantime
                    index.chunks[-len(replaced) :] = [joined]
                    continue
            if not index.chunks or index.chunks[-1].last + 1 == chunk.first:
                index.chunks.append(chunk)
        self._changed(index)

    async def _build_chunks(
        self, index: StreamIndex, after: int, last: int, *, background: bool
    ) -> list[Chunk]:
        """Build chunks of the entries behind `after` up to `last`; in a process if no search waits."""
        is_searched = time.monotonic() - index.searched_s < SEARCHED_RECENTLY_S
        process = (self._urgent if is_searched else self._process) if background else None
        build = _build_chunk_here if process is None else partial(self._build_in_process, process)
        threads = self._threads if process is None else process.thread
        loop = asyncio.get_running_loop()
        built: list[Chunk] = []
        payloads: list[Payload] = []
        size = 0
        first = after + 1
        while after < last:
            page = await self._reader.read(index.stream, after, READ_BYTES, last - after, apart=True)
            payloads += page.parts
            size += sum(map(len, page.parts))
            after = page.next_entry
            if size >= CHUNK_BYTES or after >= last:
                built.append(await loop.run_in_executor(threads, build, index, first, payloads))
                first, payloads, size = after + 1, [], 0
        return built

    def _build_in_process(
        self, process: ChunkProcess, index: StreamIndex, first: int, payloads: list[Payload]
    ) -> Chunk:
        """Runs on a thread, which waits for the process."""
        try:
            return process.build(index.document, first, payloads)
        except ChunkProcessError as error:
            if process.closed:
                raise
            fields = log_fields(stream=index.stream.name, error=str(error))
            logger.warning("indexing process failed, indexing in the server", extra=fields)
            return _build_chunk_here(index, first, payloads)

    # -- shrinking ---------------------------------------------------------------------------------------

    def _changed(self, index: StreamIndex) -> None:
        index.update_size()
        if self.bytes > self.bytes_max:
            self._evict()
            index.too_large = not index.chunks

    def evict_all(self) -> None:
        """Drop everything under memory pressure; searches scan until the index is built again."""
        for number in list(self._streams):
            self.forget(number)

    def _evict(self) -> None:
        """Over budget: request early sealing, then drop inverted lists, then the oldest chunks."""
        if self._on_pressure is not None:
            largest = max(self._streams.values(), key=lambda index: index.bytes)
            self._on_pressure(largest.stream)
        by_use = sorted(self._streams.values(), key=lambda index: index.used)
        for index in by_use:
            for chunk in index.chunks:
                if self.bytes <= self.bytes_max:
                    return
                if chunk.inverted:
                    chunk.drop_lists()
                    index.update_size()
        for index in by_use:
            while index.chunks and self.bytes > self.bytes_max:
                index.dropped_rows += index.chunks.pop(0).count
                index.update_size()


def _build_chunk_here(index: StreamIndex, first: int, payloads: list[Payload]) -> Chunk:
    return build_chunk(index.view, index.decoder, first, payloads)
