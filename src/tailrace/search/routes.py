"""HTTP routes of search: `_search` and `_aggregate`, with the limit of concurrent searches.

How many searches run at once, and how many may wait for their turn.

GET and POST `_search`.

POST `_aggregate`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import inf
from urllib.parse import parse_qsl

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.log.reader import PointReader
from tailrace.log.segment_catalogue import read_segments
from tailrace.protocol.http_headers import SEARCH_HEADERS, expose_headers_line, header_line
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.schema.json_values import invalid_request
from tailrace.schema.registry import read_registry
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT
from tailrace.search.aggregates.groups import aggregate_timeout
from tailrace.search.aggregates.run import Aggregator
from tailrace.search.chunk_process import ChunkProcess
from tailrace.search.language import add_context_fields
from tailrace.search.records import RecordView
from tailrace.search.requests import (
    AggregateRequest,
    SearchParameters,
    SearchRequest,
    bind_aggregate,
    bind_search,
    parse_aggregate,
    parse_search_body,
)
from tailrace.search.response import build_search_body, coverage_headers
from tailrace.search.run import Searcher
from tailrace.search.tail_index import TailIndex
from tailrace.storage.segments.model import SegmentInfo


class ConcurrencyLimiter:
    """First come, first served. Beyond the queue a search is refused."""

    def __init__(self, running_max: int, waiting_max: int) -> None:
        self.running_max = running_max
        self._waiting_max = waiting_max
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return sum(1 for turn in self._waiting if not turn.done())

    async def enter(self, seconds_max: float) -> bool:
        """Whether it is our turn; False if it did not come in time. Who enters has to leave."""
        if self.running < self.running_max:
            self.running += 1
            return True
        if self.waiting >= self._waiting_max:
            raise TailraceError("overloaded", "too many searches are waiting; try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(seconds_max):
                await turn
        except TimeoutError:
            return not turn.cancelled()  # else it was given in the same moment
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise
        return True

    def leave(self) -> None:
        """Hands the place to the next in the queue."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1


logger = logging.getLogger("tailrace.api")

SEARCH_METHODS = "GET, HEAD, POST, OPTIONS"
EARLY_SEAL_INTERVAL_S = 60.0  # between two times that a stream is sealed for want of memory
INDEXING_THREADS = 2


@lru_cache(128)
def searchable_view(document: bytes) -> RecordView | None:
    """The searchable side of a registry; None if search is not configured."""
    registry = read_registry(document)
    return None if registry.search is None else RecordView(registry)


class SearchTotals:
    """What searches did since the start, in plain numbers."""

    __slots__ = ("incomplete", "searches", "seconds", "timeouts")

    def __init__(self) -> None:
        self.searches = 0
        self.seconds = 0.0
        self.timeouts = 0
        self.incomplete = 0  # those that ran out of time among them


class SearchRoutes:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._log = context.log
        limits = context.limits
        running_max = limits.search_concurrency or 2 * (os.cpu_count() or 1)
        self.gate = ConcurrencyLimiter(running_max, limits.search_queue)
        self._threads = ThreadPoolExecutor(running_max, "search")
        self._indexing = ThreadPoolExecutor(INDEXING_THREADS, "tail-index")
        idle_s = limits.helper_idle_ms / 1000
        self._chunk_processes = ChunkProcess(idle_s), ChunkProcess(idle_s, niceness=0)
        self.tail = TailIndex(
            context.log.reader,
            limits.tail_index_max_bytes,
            self._indexing,
            process=self._chunk_processes[0],
            urgent=self._chunk_processes[1],
        )
        self.searcher = Searcher(
            context.log.reader, self.tail, self._threads, self._segments_of, limits.search_total_exact_limit
        )
        self.records = PointReader(context.log.reader)
        self.counts = SearchTotals()
        self._sealed_early: dict[int, float] = {}  # by stream, when that was last asked for
        self._tasks: set[asyncio.Task[None]] = set()

    def seal_early(self, seal: Callable[[str], Coroutine[None, None, None]]) -> None:
        """The way to have a stream sealed when the tail index has no room: what is sealed can be indexed."""

        async def ask(stream: Stream) -> None:
            try:
                await seal(stream.name)
            except TailraceError as refusal:
                logger.info("%s was not sealed early: %s", stream.name, refusal)

        def on_pressure(stream: Stream) -> None:
            now = time.monotonic()
            asked = self._sealed_early
            if (
                stream.visible <= stream.sealed
                or now - asked.get(stream.number, -inf) < EARLY_SEAL_INTERVAL_S
            ):
                return
            for number in [number for number, at in asked.items() if now - at >= EARLY_SEAL_INTERVAL_S]:
                del asked[number]
            asked[stream.number] = now
            self._spawn(ask(stream))

        self.tail.on_pressure = on_pressure

    def follow(self, grown: set[Stream]) -> None:
        """Called now and then with the streams that were appended to; empties the set."""
        if self._log.pressure is None:  # else what is built here would be shed at once
            for stream in grown:
                document = (stream.visible_documents or {}).get(SCHEMA_DOCUMENT)
                if document is None or stream.removed or not self.tail.is_behind(stream):
                    continue
                view = searchable_view(document)
                if view is not None:
                    self._spawn(self._follow(stream, view))
        grown.clear()
        for process in self._chunk_processes:
            process.end_if_idle()

    async def _follow(self, stream: Stream, view: RecordView) -> None:
        try:
            await self.searcher.follow(stream, view)
        except TailraceError as error:
            fields = {"stream": stream.name, "error": error}
            logger.info("rows that arrived are not indexed yet", extra={"fields": fields})

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._context.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self.tail.close()
        for process in self._chunk_processes:
            process.close()
        for threads in (self._threads, self._indexing):
            threads.shutdown(wait=False, cancel_futures=True)

    def _segments_of(self, number: int) -> list[SegmentInfo]:
        """On a thread. What the hot store has not heard of yet is in the journal."""
        fresh = tuple(self._log.streams.uncheckpointed.get(number, ()))
        return read_segments(self._log.store, number, 0, fresh)

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, name: str) -> None:
        if method not in (b"GET", b"HEAD", b"POST"):
            raise responses.method_not_allowed(SEARCH_METHODS)
        authorise(identity, Action.QUERY_STREAM, stream=name)
        stream = self._log.readable(name)
        asked = (
            parse_search_body(_parse_json(exchange.body))
            if method == b"POST"
            else parse_query_string(exchange.query)
        )
        documents = stream.visible_documents
        document = None if documents is None else documents.get(SCHEMA_DOCUMENT)
        view = None if document is None else searchable_view(document)
        view = None if view is None else add_context_fields(view, asked.q)
        request = bind_search(
            asked, None if view is None else view.config, self._context.limits.search_timeout_ms
        )
        assert view is not None, "without a configuration the query was refused"
        if self._log.pressure is not None:
            raise self._log.pressure
        self._log.touch(stream)
        self._spawn(self._answer(exchange, stream, view, request))

    async def _answer(
        self, exchange: Exchange, stream: Stream, view: RecordView, request: SearchRequest
    ) -> None:
        try:
            async with asyncio.timeout(self._context.limits.request_ms / 1000):
                status, body = await self.search(stream, view, request)
        except TimeoutError:
            responses.respond_error(exchange, TailraceError("request_timeout", "request timed out"))
            return
        except TailraceError as refusal:
            responses.respond_error(exchange, responses.stream_deleted(stream) if stream.removed else refusal)
            return
        except Exception:
            if stream.removed:
                responses.respond_error(exchange, responses.stream_deleted(stream))
                return
            responses.respond_error(exchange, TailraceError("internal", "the search failed"))
            raise
        head = responses.JSON_TYPE + responses.NO_STORE + expose_headers_line(SEARCH_HEADERS)
        head += b"".join(header_line(name, value) for name, value in coverage_headers(body))
        exchange.respond(status, head, orjson.dumps(body))

    async def search(
        self, stream: Stream, view: RecordView, request: SearchRequest
    ) -> tuple[int, dict[str, object]]:
        """Status and body, within the budget of the request."""
        begun = time.monotonic()
        deadline = begun + request.timeout_ms / 1000
        entered = await self.gate.enter(max(0.0, deadline - begun)) if request.timeout_ms else False
        try:
            outcome = await self.searcher.search(stream, view, request, deadline if entered else begun)
            took_ms = int((time.monotonic() - begun) * 1000)
            body = await build_search_body(outcome, request, stream, view, self.records, took_ms)
        finally:
            if entered:
                self.gate.leave()
        self.counts.searches += 1
        self.counts.seconds += time.monotonic() - begun
        self.counts.timeouts += outcome.timed_out
        self.counts.incomplete += not outcome.complete
        return (408 if outcome.timed_out else 200), body


def _parse_json(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TailraceError("invalid_json", f"body is not valid JSON: {error}") from None


def parse_query_string(raw: bytes) -> SearchParameters:
    """A search in a query string: the names of the body, each as text."""
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict")
    except UnicodeError:
        raise invalid_request("the query string is not valid UTF-8") from None
    body: dict[str, object] = {}
    sort: list[str] = []
    for name, text in pairs:
        if name == "sort":
            sort += [key for key in text.split(",") if key]
        elif name == "q":
            body["q"] = text
        elif name in ("size", "timeout_ms"):
            body[name] = _number(text)
        elif name == "search_after":
            body[name] = _parse_after(text)
        elif name == "track_total_hits":
            body[name] = text
    if sort:
        body["sort"] = sort
    return parse_search_body(body)


def _number(text: str) -> object:
    """A number, or text that no number is expected to be."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _parse_after(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise invalid_request("search_after must be a JSON array") from None


AGGREGATE_METHODS = "POST, OPTIONS"


class AggregateRoutes:
    """Aggregates wait in the same queue as searches, and run on the same threads."""

    def __init__(self, context: Context, search: SearchRoutes) -> None:
        self._context = context
        self._log = context.log
        self._gate = search.gate
        self._aggregator = Aggregator(search.searcher)
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, name: str) -> None:
        if method != b"POST":
            raise responses.method_not_allowed(AGGREGATE_METHODS)
        authorise(identity, Action.QUERY_STREAM, stream=name)
        stream = self._log.readable(name)
        try:
            body: object = orjson.loads(exchange.body)
        except orjson.JSONDecodeError as error:
            raise TailraceError("invalid_json", f"body is not valid JSON: {error}") from None
        asked = parse_aggregate(body)
        documents = stream.visible_documents
        document = None if documents is None else documents.get(SCHEMA_DOCUMENT)
        view = None if document is None else searchable_view(document)
        request = bind_aggregate(asked, None if view is None else view.config)
        assert view is not None, "without a configuration the request was refused"
        self._log.touch(stream)
        task = self._context.loop.create_task(self._answer(exchange, stream, view, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, exchange: Exchange, stream: Stream, view: RecordView, request: AggregateRequest
    ) -> None:
        try:
            body = await self._aggregate(stream, view, request)
        except TailraceError as refusal:
            responses.respond_error(exchange, responses.stream_deleted(stream) if stream.removed else refusal)
            return
        except Exception:
            if stream.removed:
                responses.respond_error(exchange, responses.stream_deleted(stream))
                return
            responses.respond_error(exchange, TailraceError("internal", "the aggregate failed"))
            raise
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, body)

    async def _aggregate(self, stream: Stream, view: RecordView, request: AggregateRequest) -> bytes:
        limit_s = self._context.limits.request_ms / 1000
        deadline = time.monotonic() + limit_s
        if not await self._gate.enter(limit_s):
            raise aggregate_timeout()
        try:
            return await self._aggregator.aggregate(stream, view, request, deadline)
        finally:
            self._gate.leave()
