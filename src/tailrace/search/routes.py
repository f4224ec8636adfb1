"""HTTP routes of search: GET and POST `_search`, POST `_aggregate`, and the limit of concurrent searches."""

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
from typing import Final
from urllib.parse import parse_qsl

import orjson

from tailrace.auth import Action, Identity
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.log.reader import PointReader
from tailrace.log.segment_catalogue import read_segments
from tailrace.protocol.http_headers import SEARCH_HEADERS, expose_headers_line, header_line
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses, Response
from tailrace.routing.openapi import ERROR, Json, answer, query, request
from tailrace.routing.table import Route, route_group
from tailrace.schema.json_values import invalid_request
from tailrace.schema.registry import read_registry
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT
from tailrace.search.aggregates.groups import aggregate_timeout
from tailrace.search.aggregates.run import Aggregator
from tailrace.search.chunk_process import ChunkProcess
from tailrace.search.index_files.catalogue import IndexCatalogue
from tailrace.search.openapi import (
    AGGREGATE,
    AGGREGATE_REQUEST,
    SEARCH_REQUEST,
    SEARCH_RESULT,
    search_headers,
)
from tailrace.search.query_language import add_context_fields
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
    """Limits running searches. Others wait in a FIFO queue; when that is full they are rejected."""

    def __init__(self, running_max: int, waiting_max: int) -> None:
        self.running_max = running_max
        self._waiting_max = waiting_max
        self.running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return sum(1 for waiter in self._waiting if not waiter.done())

    async def acquire(self, seconds_max: float) -> bool:
        """Wait for a free place; False after `seconds_max`. After True the caller must release it."""
        if self.running < self.running_max:
            self.running += 1
            return True
        if self.waiting >= self._waiting_max:
            raise TailraceError("overloaded", "too many searches are waiting; try again later")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(seconds_max):
                await waiter
        except TimeoutError:
            return not waiter.cancelled()  # the place may have been handed over at the same moment
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()
            raise
        return True

    def release(self) -> None:
        """Give up a place: the next in the queue gets it."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.running -= 1


logger = logging.getLogger("tailrace.api")

EARLY_SEAL_INTERVAL_S = 60.0  # minimum time between two early seals of a stream
INDEXING_THREADS = 2


@lru_cache(128)
def searchable_view(document: bytes) -> RecordView | None:
    """The view of a registry's records; None if search is not configured."""
    registry = read_registry(document)
    return None if registry.search is None else RecordView(registry)


class SearchTotals:
    """Totals of all searches since the start."""

    __slots__ = ("incomplete", "searches", "seconds", "timeouts")

    def __init__(self) -> None:
        self.searches = 0
        self.seconds = 0.0
        self.timeouts = 0
        self.incomplete = 0  # including timeouts


class SearchRoutes:
    def __init__(
        self, context: Context, catalogue: IndexCatalogue, seal: Callable[[str], Coroutine[None, None, None]]
    ) -> None:
        """`seal` seals the stream of a name now."""
        self._context = context
        self._seal = seal
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
            on_pressure=self._seal_early,
        )
        self.searcher = Searcher(
            context.log.reader,
            self.tail,
            self._threads,
            self._segments_of,
            limits.search_total_exact_limit,
            catalogue,
        )
        self.records = PointReader(context.log.reader)
        self.counts = SearchTotals()
        self._sealed_early: dict[int, float] = {}  # time of the last request by stream number
        self._tasks = TaskSet()
        self._deferred = DeferredResponses(context.limits.request_ms)

    def _seal_early(self, stream: Stream) -> None:
        """The tail index is over budget: seal a stream, so that index files replace its rows."""
        now = time.monotonic()
        requested = self._sealed_early
        if (
            stream.visible <= stream.sealed
            or now - requested.get(stream.number, -inf) < EARLY_SEAL_INTERVAL_S
        ):
            return
        for number in [number for number, at in requested.items() if now - at >= EARLY_SEAL_INTERVAL_S]:
            del requested[number]
        requested[stream.number] = now
        self._spawn(self._request_seal(stream))

    async def _request_seal(self, stream: Stream) -> None:
        try:
            await self._seal(stream.name)
        except TailraceError as error:
            logger.info("early seal failed", extra=log_fields(stream=stream.name, error=str(error)))

    def index_new_rows(self, grown: set[Stream]) -> None:
        """Called periodically with the streams that were appended to; empties the set."""
        if self._log.pressure is None:  # under memory pressure the index would be evicted at once
            for stream in grown:
                document = (stream.visible_documents or {}).get(SCHEMA_DOCUMENT)
                if document is None or stream.removed or not self.tail.is_behind(stream):
                    continue
                view = searchable_view(document)
                if view is not None:
                    self._spawn(self._index_new_rows(stream, view))
        grown.clear()
        for process in self._chunk_processes:
            process.end_if_idle()

    async def _index_new_rows(self, stream: Stream, view: RecordView) -> None:
        try:
            await self.searcher.index_new_rows(stream, view)
        except TailraceError as error:
            logger.info("tail index update failed", extra=log_fields(stream=stream.name, error=str(error)))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.start(work)

    def close(self) -> None:
        self.tail.close()
        for process in self._chunk_processes:
            process.close()
        for threads in (self._threads, self._indexing):
            threads.shutdown(wait=False, cancel_futures=True)

    def _segments_of(self, number: int) -> list[SegmentInfo]:
        """Runs on a thread. Segments that the hot store does not have yet are in the journal."""
        unfolded = tuple(self._log.streams.uncheckpointed.get(number, ()))
        return read_segments(self._log.store, number, 0, unfolded)

    def search_by_query(self, exchange: Exchange, _: Identity, name: str) -> None:
        stream = self._log.readable(name)
        self._serve(exchange, stream, parse_query_string(exchange.query))

    def search_by_body(self, exchange: Exchange, _: Identity, name: str) -> None:
        stream = self._log.readable(name)
        self._serve(exchange, stream, parse_search_body(_parse_json(exchange.body)))

    def _serve(self, exchange: Exchange, stream: Stream, parameters: SearchParameters) -> None:
        documents = stream.visible_documents
        document = None if documents is None else documents.get(SCHEMA_DOCUMENT)
        view = None if document is None else searchable_view(document)
        view = None if view is None else add_context_fields(view, parameters.q)
        request = bind_search(
            parameters, None if view is None else view.config, self._context.limits.search_timeout_ms
        )
        assert view is not None, "bind_search rejects a stream without search configuration"
        if self._log.pressure is not None:
            raise self._log.pressure
        self._log.touch(stream)
        self._deferred.respond(exchange, self._respond(stream, view, request), stream=stream)

    async def _respond(self, stream: Stream, view: RecordView, request: SearchRequest) -> Response:
        status, body = await self.search(stream, view, request)
        head = responses.JSON_TYPE + responses.NO_STORE + expose_headers_line(SEARCH_HEADERS)
        head += b"".join(header_line(name, value) for name, value in coverage_headers(body))
        return status, head, orjson.dumps(body)

    async def search(
        self, stream: Stream, view: RecordView, request: SearchRequest
    ) -> tuple[int, dict[str, object]]:
        """Run a search within its time-out. Returns status and body."""
        begun = time.monotonic()
        deadline = begun + request.timeout_ms / 1000
        entered = await self.gate.acquire(max(0.0, deadline - begun)) if request.timeout_ms else False
        try:
            result = await self.searcher.search(stream, view, request, deadline if entered else begun)
            took_ms = int((time.monotonic() - begun) * 1000)
            body = await build_search_body(result, request, stream, view, self.records, took_ms)
        finally:
            if entered:
                self.gate.release()
        self.counts.searches += 1
        self.counts.seconds += time.monotonic() - begun
        self.counts.timeouts += result.timed_out
        self.counts.incomplete += not result.complete
        return (408 if result.timed_out else 200), body


def _parse_json(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise TailraceError("invalid_json", f"body is not valid JSON: {error}") from None


def parse_query_string(raw: bytes) -> SearchParameters:
    """Parse a search from a query string, which has the names of the JSON body."""
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict")
    except UnicodeError:
        raise invalid_request("query string is not valid UTF-8") from None
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
    """The number, or the text itself, which the parser of the body then rejects."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _parse_after(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise invalid_request("search_after must be a JSON array") from None


class AggregateRoutes:
    """POST `_aggregate`. Aggregates share the queue and the threads of searches."""

    def __init__(self, context: Context, search: SearchRoutes) -> None:
        self._context = context
        self._log = context.log
        self._gate = search.gate
        self._aggregator = Aggregator(search.searcher)
        self._deferred = DeferredResponses()  # the search itself has a deadline

    def aggregate(self, exchange: Exchange, _: Identity, name: str) -> None:
        stream = self._log.readable(name)
        try:
            body: object = orjson.loads(exchange.body)
        except orjson.JSONDecodeError as error:
            raise TailraceError("invalid_json", f"body is not valid JSON: {error}") from None
        parameters = parse_aggregate(body)
        documents = stream.visible_documents
        document = None if documents is None else documents.get(SCHEMA_DOCUMENT)
        view = None if document is None else searchable_view(document)
        request = bind_aggregate(parameters, None if view is None else view.config)
        assert view is not None, "bind_aggregate rejects a stream without search configuration"
        self._log.touch(stream)
        self._deferred.respond(exchange, self._respond(stream, view, request), stream=stream)

    async def _respond(self, stream: Stream, view: RecordView, request: AggregateRequest) -> Response:
        body = await self._aggregate(stream, view, request)
        return 200, responses.JSON_TYPE + responses.NO_STORE, body

    async def _aggregate(self, stream: Stream, view: RecordView, request: AggregateRequest) -> bytes:
        limit_s = self._context.limits.request_ms / 1000
        deadline = time.monotonic() + limit_s
        if not await self._gate.acquire(limit_s):
            raise aggregate_timeout()
        try:
            return await self._aggregator.aggregate(stream, view, request, deadline)
        finally:
            self._gate.release()


_PARAMETERS: Final = (
    query(
        "q", "The query.", {"type": "string", "maxLength": 16384}, required=True, example="service:checkout"
    ),
    query("size", "Hits on a page.", {"type": "integer", "minimum": 1, "maximum": 500, "default": 50}),
    query("sort", "Comma-separated `field:asc` or `field:desc`; `offset` and `_score` too."),
    query("search_after", "`next_search_after` of the previous page, as JSON."),
    query("timeout_ms", "Timeout of the search.", {"type": "number", "minimum": 0}),
)
_SEARCHED: Final[dict[int, Json]] = {
    200: answer("Hits, totals and coverage.", SEARCH_RESULT, search_headers()),
    408: answer(
        "The partial result of a search that timed out (`timed_out`), or `request_timeout`.",
        {"anyOf": [SEARCH_RESULT, ERROR]},
    ),
}
_SEARCH: Final = "/v1/stream/{name}/_search"
_AGGREGATE: Final = "/v1/stream/{name}/_aggregate"
ROUTES: Final = route_group(
    "search",
    Route(
        *("GET", _SEARCH, Action.QUERY_STREAM, SearchRoutes.search_by_query, "searchByQuery"),
        "Search the records of a stream",
        _SEARCHED,
        errors=(404, 410),
        parameters=_PARAMETERS,
    ),
    Route(
        *("POST", _SEARCH, Action.QUERY_STREAM, SearchRoutes.search_by_body, "search"),
        "Search the records of a stream",
        _SEARCHED,
        errors=(404, 410),
        body=request(
            SEARCH_REQUEST,
            {"q": "service:checkout status:>=500", "sort": ["status:desc"], "size": 20},
            "The search.",
        ),
    ),
    Route(
        *("POST", _AGGREGATE, Action.QUERY_STREAM, AggregateRoutes.aggregate, "aggregate"),
        "Aggregate a rollup over time intervals",
        {200: answer("Buckets with their groups and measures.", AGGREGATE)},
        errors=(404, 410),
        body=request(
            AGGREGATE_REQUEST,
            {
                "rollup": "requests",
                "from": "2026-01-01T00:00:00Z",
                "to": "2026-01-02T00:00:00Z",
                "interval": "1h",
                "group_by": ["service"],
            },
            "The aggregate.",
        ),
    ),
    place="owner",
)
