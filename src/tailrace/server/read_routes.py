"""GET on a stream: catch-up pages, filtered reads, Arrow pages, and the start of live reads.

A read in memory is served at once; anything else runs as a task with the request timeout. `format=arrow`
returns each entry with its number, timestamp and key as a stream of Arrow record batches: the columns of a
segment (docs/open-format.md) and the epoch of the entry's offset.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tailrace.auth import Action, Identity, authorise
from tailrace.common import timestamps
from tailrace.common.errors import TailraceError
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.tasks import TaskSet
from tailrace.http.exchange import Exchange
from tailrace.log.decide import offset_gone, resolve_position
from tailrace.log.history import MissingBlock, NotLocalError
from tailrace.log.model import ReadPart, Stream
from tailrace.log.reader import EntryLabels, Page
from tailrace.protocol import offsets
from tailrace.protocol.http_headers import header_line, if_none_match, slice_etag
from tailrace.protocol.offsets import next_cursor
from tailrace.protocol.query_params import (
    ReadStart,
    live_mode,
    parse_query,
    read_start,
    routing_key,
    wait_limit_lines,
    wait_ms,
)
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.openapi import Json, answer, array, headers, params, query
from tailrace.routing.request_headers import parse_page_limit
from tailrace.routing.table import Auth, Route, route_group
from tailrace.schema.registry import Registry
from tailrace.search.filtered_reads import FilteredReads, FilterScan
from tailrace.search.index_files.catalogue import IndexCatalogue
from tailrace.server.live import LiveReaders, ReadRequest

ARROW_CONTENT_TYPE = b"Content-Type: application/vnd.apache.arrow.stream\r\n"
ARROW_PAGE_BYTES_MAX = 4 * 1024 * 1024
ARROW_THREADS = 2


class ArrowPages:
    """Encodes Arrow pages on threads of its own: pyarrow is loaded there, and pages may be large."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._threads = ThreadPoolExecutor(ARROW_THREADS, "rows")

    async def encode(
        self, stream: Stream, numbers: Sequence[int], labels: EntryLabels, payloads: list[ReadPart]
    ) -> ReadPart:
        """Encode the rows. Labels beyond the last number are ignored."""
        epochs, json = stream.epochs, stream.json
        return await self._loop.run_in_executor(
            self._threads, _encode_arrow, epochs, json, numbers, labels, payloads
        )


def _encode_arrow(
    epochs: Sequence[tuple[int, int]],
    json: bool,
    numbers: Sequence[int],
    labels: EntryLabels,
    payloads: list[ReadPart],
) -> ReadPart:
    from tailrace.storage.segments.parquet import encode_entries

    count = len(numbers)
    assert count == len(payloads) <= len(labels.times)
    return encode_entries(
        numbers,
        labels.times[:count],
        labels.keys[:count],
        payloads,
        _entry_epochs(epochs, numbers),
        json=json,
    )


def _entry_epochs(epochs: Sequence[tuple[int, int]], numbers: Sequence[int]) -> list[int]:
    """The epoch in the offset of each entry."""
    if len(epochs) == 1:
        return [epochs[0][0]] * len(numbers)
    found: list[int] = []
    index = 0
    for number in numbers:
        while index + 1 < len(epochs) and number >= epochs[index + 1][1]:
            index += 1
        found.append(epochs[index][0])
    return found


PageResponder = Callable[[Exchange], None]

YEAR_S = 31_536_000
SPARK_USER_AGENT = b"tailrace-spark/"  # sent by the Spark source


class ReadRoutes:
    """Serves GET on a stream, except for what `LiveReaders` keeps open."""

    def __init__(self, context: Context, live: LiveReaders, catalogue: IndexCatalogue) -> None:
        self._context = context
        self._log = context.log
        self._limits = context.limits
        self._live = live
        settings = context.settings
        # Prefixes of streams that can be read without a token; None if all can.
        self._public = settings.auth_public_prefixes if settings.auth_configured else None
        self._tasks = TaskSet()
        self.filtered = FilteredReads(context, self._registry_of, catalogue)
        self._rows = ArrowPages(context.loop)
        self.spark_reads = 0

    def register_metrics(self, metrics: ServerMetrics) -> None:
        metrics.spark_reads.read = lambda: self.spark_reads

    def read(self, exchange: Exchange, identity: Identity, name: str, key: str | None = None) -> None:
        authorise(identity, Action.READ_STREAM, stream=name)
        if exchange.headers.get(b"user-agent", b"").startswith(SPARK_USER_AGENT):
            self.spark_reads += 1
        try:
            request = self._request(exchange, name, key)
        except NotLocalError:
            self._spawn(self._read_from_time(exchange, identity, name, key))
            return
        self._serve(exchange, identity, request)

    async def _read_from_time(
        self, exchange: Exchange, identity: Identity, name: str, key: str | None
    ) -> None:
        """A read with `since` whose start has to be looked up in a segment."""
        try:
            async with asyncio.timeout(self._limits.request_ms / 1000):
                stream = self._log.readable(name)
                since_ns = _parse_since_ns(parse_query(exchange.query)["since"])
                start = await self._log.reader.find_before(stream, since_ns)
            self._serve(exchange, identity, self._request(exchange, name, key, start))
        except TimeoutError:
            responses.respond_error(exchange, TailraceError("request_timeout", "request timed out"))
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)

    def _serve(self, exchange: Exchange, identity: Identity, request: ReadRequest) -> None:
        self._log.touch(request.stream)
        if request.mode == "long-poll":
            request = request._replace(identity=identity)
        if request.mode == "sse":
            self._live.open_sse(exchange, request, identity)
        elif request.mode == "ws":
            self._live.open_ws(exchange, request, identity)
        elif request.mode == "long-poll" and request.start >= request.stream.visible:
            self._live.open_long_poll(exchange, request, self)
        elif request.at_now and not request.mode and request.fmt != "arrow":
            self._respond_at_tail(exchange, request)
        else:
            self.respond(exchange, request)

    def _request(
        self, exchange: Exchange, name: str, path_key: str | None, found: int | None = None
    ) -> ReadRequest:
        """Parse and check the request. `found` is the start of a read by time that was looked up already."""
        query = parse_query(exchange.query)
        mode = live_mode(query)
        stream = self._log.readable(name)
        filter_text = query.get("filter")
        if filter_text is not None:
            self.filtered.check(stream, filter_text, mode)
        fmt = query.get("format") or ("json" if stream.json else "raw")
        if fmt not in ("json", "raw", "arrow"):
            raise TailraceError("unsupported_format", "format must be json, raw or arrow")
        if fmt == "json" and not stream.json:
            raise TailraceError("unsupported_format", "format=json requires a JSON stream")
        if fmt == "arrow" and (filter_text is not None or mode in ("sse", "ws")):
            raise TailraceError(
                "unsupported_format", "format=arrow cannot be combined with filter, live=sse or live=ws"
            )
        read_from = read_start(query, mode, exchange.headers)
        start, at_now = self._start(stream, read_from, mode) if found is None else (found, False)
        start = max(start, stream.earliest)
        wait_ms = self._wait_ms(query) if mode == "long-poll" else 0
        key = routing_key(query, path_key)
        return ReadRequest(
            stream,
            start,
            at_now,
            mode,
            query.get("live") == "long-poll",
            fmt,
            bool(query.get("format")),
            key,
            wait_ms,
            query.get("cursor"),
            filter_text or "",
            bytes_max=parse_page_limit(query, "max_bytes", ARROW_PAGE_BYTES_MAX),
            entries_max=parse_page_limit(query, "max_entries", self._limits.read_page_entries),
            start_line=read_from.header,
        )

    def _start(self, stream: Stream, read_from: ReadStart, mode: str) -> tuple[int, bool]:
        """The entry number to start from, and whether that is `offset=now`."""
        offset = read_from.offset
        if offset is None:
            if read_from.since is not None:
                return self._log.reader.entry_before(stream, _parse_since_ns(read_from.since)), False
            if mode:
                raise TailraceError("missing_offset", "live reads require an offset")
            return 0, False
        if offset == "-1":
            return 0, False
        if offset == "now":
            return stream.visible, True
        return resolve_position(stream, offsets.parse_offset(offset), stream.earliest), False

    def _wait_ms(self, query: dict[str, str]) -> int:
        limits = self._limits
        return wait_ms(query, limits.long_poll_default_ms, limits.long_poll_max_ms)

    # -- catch-up --------------------------------------------------------------------------------------

    def respond(self, exchange: Exchange, request: ReadRequest) -> None:
        """Respond with the page after `start`, read from memory or from the store."""
        stream = request.stream
        if request.start < stream.earliest:  # trimmed by retention while a long-poll waited
            responses.respond_error(exchange, offset_gone(stream, stream.earliest))
            return
        if request.filter_text:
            self._respond_filtered(exchange, request)
            return
        key = request.key.encode() or None
        if request.fmt == "arrow":
            self._spawn(self._respond_later(exchange, request, self._read_rows(request, key)))
            return
        bytes_max, entries_max, apart = self._page_limits(request)
        found = self._log.reader.try_read(stream, request.start, bytes_max, entries_max, key, apart=apart)
        if not isinstance(found, MissingBlock):
            self._respond_read(exchange, request, found)
            return
        self._spawn(self._respond_later(exchange, request, self._read(request, key)))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.start(work)

    async def _read(self, request: ReadRequest, key: bytes | None) -> PageResponder:
        bytes_max, entries_max, apart = self._page_limits(request)
        page = await self._log.reader.read(
            request.stream, request.start, bytes_max, entries_max, key, apart=apart
        )
        return lambda exchange: self._respond_read(exchange, request, page)

    async def _read_rows(self, request: ReadRequest, key: bytes | None) -> PageResponder:
        """A page as Arrow record batches: each entry with its number, timestamp and key."""
        stream = request.stream
        bytes_max, entries_max = request.bytes_max, request.entries_max
        contract = self._live.contracts.get(stream.visible_documents)
        if contract is not None and contract.needs_promotion_after(request.start):
            page_limits = self._live.contracts.page_limits(stream, request.start, self._limits)
            bytes_max, entries_max = min(bytes_max, page_limits[0]), min(entries_max, page_limits[1])
        page = await self._log.reader.read_labelled(stream, request.start, bytes_max, entries_max, key)
        numbers, labels = page.entries(), page.labels
        assert labels is not None
        mark = ""
        if (contract := self._live.contracts.get(stream.visible_documents)) is not None:
            page = contract.promoted(stream, request.start, page)
            mark = contract.version_tag(page)
        body = await self._rows.encode(stream, numbers[: page.count], labels, page.parts)
        return lambda exchange: self._respond_page(exchange, request, page, mark, body=body)

    def _page_limits(self, request: ReadRequest) -> tuple[int, int, bool]:
        """The maximum bytes and entries of a page, and whether its entries are not joined into one buffer."""
        limits, raw = self._limits, request.fmt == "raw"
        if request.stream.visible_documents is None:
            return limits.read_page_bytes, limits.read_page_entries, raw
        bytes_max, entries_max, apart = self._live.contracts.page_limits(
            request.stream, request.start, limits
        )
        return bytes_max, entries_max, apart or raw

    def _respond_read(self, exchange: Exchange, request: ReadRequest, page: Page) -> None:
        """Respond with a page; entries of an older schema version are promoted."""
        stream = request.stream
        contract = self._live.contracts.get(stream.visible_documents)
        if contract is None:
            self._respond_page(exchange, request, page)
            return
        try:
            page = contract.promoted(stream, request.start, page)
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)
            return
        self._respond_page(exchange, request, page, contract.version_tag(page))

    async def _respond_later(
        self, exchange: Exchange, request: ReadRequest, work: Coroutine[None, None, PageResponder]
    ) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._limits.request_ms / 1000):
                respond = await work
        except TimeoutError:
            responses.respond_error(exchange, TailraceError("request_timeout", "request timed out"))
            return
        except TailraceError as refusal:
            stream = request.stream
            responses.respond_error(exchange, responses.stream_deleted(stream) if stream.removed else refusal)
            return
        except Exception:
            if request.stream.removed:
                # The stream was deleted during the read.
                responses.respond_error(exchange, responses.stream_deleted(request.stream))
                return
            responses.respond_error(exchange, TailraceError("internal", "read failed"))
            raise
        if self._context.settings.server_timing:
            responses.add_phase(exchange, "hot", time.monotonic() - begun)
        respond(exchange)

    # -- filtered --------------------------------------------------------------------------------------

    def _registry_of(self, stream: Stream) -> Registry | None:
        contract = self._live.contracts.get(stream.visible_documents)
        return None if contract is None else contract.registry

    def _respond_filtered(self, exchange: Exchange, request: ReadRequest) -> None:
        """As `respond`, with the entries that match the filter."""
        key = request.key.encode() or None
        try:
            scan = self.filtered.begin(
                request.stream, request.filter_text, request.start, request.scanned_bytes
            )
        except TailraceError as refusal:
            # The registry may have changed while a long-poll waited.
            responses.respond_error(exchange, refusal)
            return
        if self.filtered.try_scan(request.stream, scan, key):
            self._respond_scan(exchange, request, scan)
        else:
            until = self.filtered.scan_deadline(exchange.started)
            self._spawn(self._respond_later(exchange, request, self._filter_page(request, scan, key, until)))

    async def _filter_page(
        self, request: ReadRequest, scan: FilterScan, key: bytes | None, until: float
    ) -> PageResponder:
        await self.filtered.scan(request.stream, scan, key, until)
        return lambda exchange: self._respond_scan(exchange, request, scan)

    def _respond_scan(self, exchange: Exchange, request: ReadRequest, scan: FilterScan) -> None:
        page = Page(scan.parts, scan.decided, scan.count)
        if not request.mode or page.count or scan.scan_limit_reached:
            more = self.filtered.limit_lines(scan, request.scanned_bytes)
            self._respond_page(exchange, request, page, scan.etag_part, more)
        elif scan.done:
            scanned_bytes = request.scanned_bytes + scan.scanned_bytes
            self._wait(exchange, request._replace(start=scan.decided, scanned_bytes=scanned_bytes))
        else:
            self.respond_empty(exchange, request, scan.decided)

    # -- pages -----------------------------------------------------------------------------------------

    def _respond_at_tail(self, exchange: Exchange, request: ReadRequest) -> None:
        stream = request.stream
        tail = stream.offset(stream.visible)
        head = self._type(request) + responses.next_offset_header(tail) + responses.end_offset_header(tail)
        head += (
            responses.UP_TO_DATE
            + responses.NO_STORE
            + responses.earliest_offset_header(stream)
            + request.start_line
        )
        if stream.visible_closed:
            head += responses.CLOSED
        exchange.respond(200, head, b"[]" if request.fmt == "json" else b"")

    def _respond_page(
        self,
        exchange: Exchange,
        request: ReadRequest,
        page: Page,
        mark: str = "",
        more: bytes = b"",
        body: ReadPart | None = None,
    ) -> None:
        """Respond with a page. `mark`: what else the bytes depend on (for the ETag); `more`: header lines."""
        stream = request.stream
        if request.mode and not page.count and not more:
            # No entry has the key so far: wait behind the entries that were read.
            self._wait(exchange, request._replace(start=page.next_entry))
            return
        following = stream.offset(page.next_entry)
        at_tail = page.next_entry >= stream.visible
        closed = at_tail and stream.visible_closed
        tag = slice_etag(
            stream.offset(request.start),
            following,
            request.key,
            request.fmt,
            request.filter_text,
            closed,
            mark,
        )
        head = responses.next_offset_header(following) + request.start_line + more
        head += responses.end_offset_header(following if at_tail else stream.offset(stream.visible))
        if at_tail:
            head += responses.UP_TO_DATE
        if closed:
            head += responses.CLOSED
        head += responses.earliest_offset_header(stream)
        if request.mode:
            head += (
                responses.NO_STORE
                if request.at_now or not request.shared or mark
                else self._max_age(stream, 20, False)
            )
            if not closed:
                head += header_line(
                    "Stream-Cursor", next_cursor(request.cursor, self._context.clock.now_ns() / 1e9)
                )
        elif mark or (at_tail and not closed):
            head += b"Cache-Control: no-cache\r\n"
        else:
            head += self._max_age(stream, YEAR_S, True)
        if not request.at_now:
            head += b"ETag: %b\r\n" % tag.encode()
        known_tags = None if request.mode else exchange.headers.get(b"if-none-match")
        if known_tags is not None and if_none_match(known_tags.decode("latin-1"), tag):
            exchange.respond(304, head)
            return
        if (served := self._log.reader.served) is not None and page.count:
            served.add(stream, page.count, sum(map(len, page.parts)))
        whole = page_buffers(page.parts, request.fmt, stream.json) if body is None else [body]
        exchange.respond(200, self._type(request) + head, whole)

    def _type(self, request: ReadRequest) -> bytes:
        if request.fmt == "arrow":
            return ARROW_CONTENT_TYPE
        if request.fmt == "raw" and request.stream.json:
            return b"Content-Type: application/octet-stream\r\n"
        return responses.content_type_header(request.stream)

    def _max_age(self, stream: Stream, seconds: int, immutable: bool) -> bytes:
        """Cache-Control, never beyond the expiry or retention of the stream."""
        deadline_ns = stream.deadline_ns()
        if deadline_ns is not None:
            immutable = False
            seconds = min(seconds, (deadline_ns - self._context.clock.now_ns()) // 1_000_000_000)
        if stream.lifetime.retention_s is not None:
            immutable = False
            seconds = min(seconds, stream.lifetime.retention_s)
        if seconds < 1:
            return responses.NO_STORE
        suffix = b", immutable" if immutable else b""
        is_public = self._public is None or stream.name.startswith(self._public)
        kind = b"public" if is_public else b"private"
        return b"Cache-Control: %b, max-age=%d%b\r\n" % (kind, seconds, suffix)

    # -- long-poll -------------------------------------------------------------------------------------

    def _wait(self, exchange: Exchange, request: ReadRequest) -> None:
        stream = request.stream
        if request.start < stream.visible and not stream.removed:
            self.respond(exchange, request)
            return
        waited_ms = int((self._context.loop.time() - exchange.started) * 1000)
        try:
            request = request._replace(wait_ms=max(0, request.wait_ms - waited_ms))
            self._live.open_long_poll(exchange, request, self)
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)

    def respond_empty(self, exchange: Exchange, request: ReadRequest, position: int) -> None:
        stream = request.stream
        offset = stream.offset(position)
        head = responses.next_offset_header(offset) + responses.end_offset_header(
            stream.offset(stream.visible)
        )
        head += responses.NO_STORE + responses.earliest_offset_header(stream) + request.start_line
        at_tail = position >= stream.visible
        if at_tail:
            head += responses.UP_TO_DATE
        if at_tail and stream.visible_closed:
            head += responses.CLOSED
        else:
            head += header_line(
                "Stream-Cursor", next_cursor(request.cursor, self._context.clock.now_ns() / 1e9)
            )
            head += wait_limit_lines(parse_query(exchange.query), self._limits.long_poll_max_ms)
        exchange.respond(204, head)

    def next_match(self, request: ReadRequest, position: int) -> Page | MissingBlock | None:
        """The next entry that a long-poll waits for, or an empty page; None if it cannot be read at once."""
        if request.filter_text:
            return self._next_filtered(request, position)
        return self._log.reader.try_read(request.stream, position, 1, 1, request.key.encode() or None)

    def _next_filtered(self, request: ReadRequest, position: int) -> Page | None:
        try:
            scan = self.filtered.begin(request.stream, request.filter_text, position, request.scanned_bytes)
        except TailraceError:
            return None  # the registry changed, so the filter may be invalid now
        done = self.filtered.try_scan(request.stream, scan, request.key.encode() or None)
        if not done or scan.scan_limit_reached:
            return None
        return Page(scan.parts, scan.decided, scan.count)


def _parse_since_ns(text: str) -> int:
    since_ns = timestamps.parse_timestamp_ns(text)
    if since_ns is None:
        raise TailraceError("invalid_request", "since must be an RFC 3339 timestamp or Unix nanoseconds")
    return since_ns


def page_buffers(parts: list[ReadPart], fmt: str, is_json: bool) -> list[ReadPart]:
    """The page as buffers that are written without joining: large blocks are not copied."""
    if not is_json:
        return parts
    body: list[ReadPart] = []
    if fmt == "json":
        for part in parts:
            body.append(b"," if body else b"[")
            body.append(part)
        if not body:
            return [b"[]"]
        body.append(b"]")
        return body
    return parts


_EVENTS: Final = (
    'event: data\ndata:[{"id":1}]\nid: 00000000000000000004000000\n\n'
    'event: control\ndata:{"streamNextOffset":"00000000000000000004000000","upToDate":true}\n'
    "id: 00000000000000000004000000\n\n"
)
_BOTH_OFFSETS: Final = ("Stream-Next-Offset", "Stream-End-Offset")
_COMMON_HEADERS: Final = (
    *("Stream-Closed", "Stream-Earliest-Offset", "Stream-Cursor", "Stream-Start", "ETag", "Cache-Control"),
    *("Stream-Filter-Scan-Limit-Reached", "Stream-Filter-Scan-Limit-Bytes", "Stream-Filter-Scanned-Bytes"),
)
_RESPONSES: Final[dict[int, Json]] = {
    200: {
        "description": "Entries after the offset; with `live=sse` events until the server ends the response.",
        "headers": headers(*_COMMON_HEADERS, *_BOTH_OFFSETS, "Stream-Up-To-Date", "Stream-SSE-Data-Encoding"),
        "content": {
            "application/json": {"schema": array({}), "example": [{"id": 1}, {"id": 2}]},
            "text/event-stream": {"example": _EVENTS},
            "application/vnd.apache.arrow.stream": {},
            "*/*": {},
        },
    },
    204: answer(
        "No new entries during a long-poll, or the stream is closed.",
        head=headers(
            *("Stream-Closed", "Stream-Cursor", "Stream-Start", "Stream-Up-To-Date"),
            *("Stream-Earliest-Offset", "Stream-Wait-Limit-Ms"),
            always=_BOTH_OFFSETS,
        ),
    ),
    304: answer("Not modified.", head=headers(*_COMMON_HEADERS, "Stream-Up-To-Date", always=_BOTH_OFFSETS)),
}
_PARAMETERS: Final = params(
    *("offset", "since", "filter", "live", "timeout", "timeout_ms", "cursor", "format", "max_bytes"),
    *("max_entries", "if-none-match", "last-event-id"),
)
_DESCRIPTION: Final = (
    "A live read requires `offset` or `since`. With `live=ws` the connection becomes a WebSocket."
)
ROUTES: Final = route_group(
    "streams",
    Route(
        *("GET", "/v1/stream/{name}", Action.READ_STREAM, ReadRoutes.read, "readStream"),
        "Read entries, at once or live",
        _RESPONSES,
        errors=(404, 410, 426),
        parameters=[*_PARAMETERS, query("key", "Only entries with this routing key.")],
        description=_DESCRIPTION,
        auth=Auth.IDENTIFIED,
    ),
    Route(
        *("GET", "/v1/stream/{name}/pk/{key}", Action.READ_STREAM, ReadRoutes.read, "readKey"),
        "Read the entries with one routing key",
        _RESPONSES,
        errors=(404, 410, 426),
        parameters=_PARAMETERS,
        description=_DESCRIPTION,
        auth=Auth.IDENTIFIED,
    ),
    place="owner",
)
