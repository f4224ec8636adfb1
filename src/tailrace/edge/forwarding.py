"""Requests forwarded to upstreams: one to one, as a tunnel, or to all shards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode

import orjson

from tailrace.common.errors import TailraceError
from tailrace.edge.auth import Caller
from tailrace.edge.context import EdgeContext
from tailrace.edge.requests import (
    RESPONSE_REPLACED,
    RequestTarget,
    cache_line,
    framing_header,
    request_bytes,
    request_head,
    request_lines,
    response_lines,
)
from tailrace.edge.upstream_feed import UpstreamAnswer, UpstreamRefusedError
from tailrace.edge.upstreams import Upstream
from tailrace.http.client import UpstreamConnection, UpstreamLostError, UpstreamResponse
from tailrace.http.exchange import BODILESS_STATUSES, REQUEST_ID_HEADER, Exchange, ResponseStream, status_line
from tailrace.http.relay import TunnelEnd, open_tunnel
from tailrace.http.streaming_request import BodyLostError, BodyStream, StreamingExchange
from tailrace.protocol import stream_names
from tailrace.protocol.http_headers import JSON_TYPE, NO_STORE, header_line
from tailrace.protocol.query_params import parse_query


class ClientTunnelEnd(TunnelEnd):
    """The client's end of a tunnel, closed when the edge stops."""

    __slots__ = ()

    def drain(self) -> None:
        self.transport.close()


def answer_upgrade(exchange: Exchange, reply: UpstreamResponse, connection: UpstreamConnection) -> None:
    """Accepts the upgrade of a client as its upstream did, and connects the two."""
    client = exchange.connection
    if exchange.answered or connection.closed:
        connection.abort()
        client.transport.abort()
        return
    server = client.server
    lines = b"".join(b"%b: %b\r\n" % field for field in reply.fields if _passes(field[0].lower()))
    bypass = cache_line("BYPASS")
    named = exchange.begin_response(101, bypass)
    head = status_line(101) + lines + server.app.common_headers(exchange) + bypass + named + b"\r\n"
    exchange.answered = True
    exchange.on_gone = None
    client.write(head)
    open_tunnel(ClientTunnelEnd(client.transport, server), client, connection)


def _passes(name: bytes) -> bool:
    return (
        name not in RESPONSE_REPLACED
        and name != REQUEST_ID_HEADER
        and not name.startswith(b"access-control-")
    )


READ_METHODS = frozenset((b"GET", b"HEAD"))
# Responses up to this size are sent in one write.
WHOLE_BYTES_MAX = 64 * 1024
UNKNOWN_OUTCOME = "append outcome is unknown, check Stream-Next-Offset before retrying"
# Headers that must not be repeated: joined into one they would change their meaning.
SINGLE_HEADERS = frozenset((b"authorization", b"content-type"))

ReplyObserver = Callable[[UpstreamResponse], None]


class Forwarder:
    """Forwards requests, one upstream request for each."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context
        self._unsent_bytes_max = context.limits.live_unsent_bytes

    async def forward(
        self,
        exchange: Exchange,
        upstream: Upstream,
        caller: Caller | None,
        *,
        apart: bool = False,
        observe: ReplyObserver | None = None,
    ) -> None:
        """Forwards a request and its response; `apart` is for responses that may take long.

        `observe` gets the response header before the client. If it raises, the client gets that error.
        """
        check_single_headers(exchange)
        if exchange.wants_websocket():
            await self._upgrade(exchange, upstream, caller)
            return
        context = self._context
        lines = request_lines(exchange, context.edge_id, context.mark_of(exchange, caller))
        is_read = exchange.method in READ_METHODS
        begun = time.monotonic()
        try:
            reply, connection = await self._ask(exchange, upstream, lines, apart=apart)
        except BodyLostError:
            return  # the client has its error, or is gone
        except UpstreamLostError as lost:
            upstream.record_failed(context.loop.time())
            raise upstream_unavailable(lost, exchange.method) from None
        theirs = reply.get(b"server-timing") or b""
        context.note_upstream(exchange, time.monotonic() - begun, reply.queued_s, theirs)
        try:
            if observe is not None:
                observe(reply)
            if (reply.get(b"content-type") or b"").startswith(b"text/event-stream"):
                upstream.pool.release(reply)
            await self.relay(exchange, reply, "BYPASS" if is_read else "")
        finally:
            if connection is not None:
                connection.abort()

    async def _ask(
        self, exchange: Exchange, upstream: Upstream, lines: bytes, *, apart: bool
    ) -> tuple[UpstreamResponse, UpstreamConnection | None]:
        """The response, and its connection if it is dedicated. Writes are never retried."""
        intake = pending_body(exchange)
        is_head, is_read = exchange.method == b"HEAD", exchange.method in READ_METHODS
        if intake is not None:
            head = request_head(exchange, lines, framing_header(intake))
            return await upstream.uploads.request_streaming(head, intake, head_only=is_head), None
        request = request_bytes(exchange, lines)
        if apart:
            return await upstream.pool.request_dedicated(request)
        return await upstream.pool.request(request, head_only=is_head, again=is_read), None

    async def _upgrade(self, exchange: Exchange, upstream: Upstream, caller: Caller | None) -> None:
        mark = self._context.mark_of(exchange, caller)
        lines = request_lines(exchange, self._context.edge_id, mark, upgrade=True)
        try:
            reply, connection = await upstream.pool.request_dedicated(request_bytes(exchange, lines))
        except UpstreamLostError as lost:
            upstream.record_failed(self._context.loop.time())
            raise upstream_unavailable(lost, exchange.method) from None
        if reply.status != 101:
            try:
                await self.relay(exchange, reply, "BYPASS")
            finally:
                connection.abort()
            return
        answer_upgrade(exchange, reply, connection)

    async def relay(self, exchange: Exchange, reply: UpstreamResponse, cache: str) -> None:
        """Sends an upstream's response to the client, with back-pressure."""
        head = response_lines(reply.fields, cache_line(cache) if cache else b"")
        length = reply.length
        if exchange.is_head or reply.status in BODILESS_STATUSES:
            exchange.respond(reply.status, head)
            reply.abandon()
        elif length is not None and length <= WHOLE_BYTES_MAX:
            try:
                body = await reply.body(WHOLE_BYTES_MAX)
            except UpstreamLostError as lost:
                raise upstream_unavailable(lost, exchange.method) from None
            exchange.respond(reply.status, head, body or b"")
        else:
            await self._stream(exchange, reply, head, length)

    async def _stream(
        self, exchange: Exchange, reply: UpstreamResponse, head: bytes, length: int | None
    ) -> None:
        outlet = exchange.open_stream(reply.status, head, length)
        if outlet.closed:
            reply.abandon()  # the client has left
            return
        drained = ClientDrain(outlet)

        def gone() -> None:
            drained.open()
            reply.abandon()

        outlet.on_gone = gone
        try:
            while piece := await reply.piece():
                outlet.write(piece)
                if outlet.unsent_bytes > self._unsent_bytes_max:
                    await drained.wait()
        except UpstreamLostError:
            # Incomplete response: abort, so that the client notices.
            exchange.connection.transport.abort()
            return
        outlet.end()


class ClientDrain:
    """Waits until a client has read what was written, or is gone."""

    def __init__(self, outlet: ResponseStream) -> None:
        self._event = asyncio.Event()
        outlet.on_drain = self._event.set
        self._outlet = outlet

    def open(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        self._event.clear()
        if not self._outlet.closed:
            await self._event.wait()


def upstream_unavailable(lost: UpstreamLostError, method: bytes) -> TailraceError:
    """The error for a request whose upstream connection failed."""
    if lost.sent and method not in READ_METHODS:
        return TailraceError("unavailable", UNKNOWN_OUTCOME)
    return TailraceError("unavailable", "the upstream is unavailable")


def pending_body(exchange: Exchange) -> BodyStream | None:
    """The body, if it is still being received."""
    return exchange.body_stream if isinstance(exchange, StreamingExchange) else None


def check_single_headers(exchange: Exchange) -> None:
    for name in exchange.repeated or ():
        if name in SINGLE_HEADERS or name.startswith((b"stream-", b"producer-")):
            text = name.decode("latin-1")
            raise TailraceError("invalid_header", f"{text} must not be repeated", header=text)


# Listings, and the name field of their rows.
LISTING_PATHS = {b"/v1/streams": "name", b"/v1/databases": "database"}
BYPASS = cache_line("BYPASS")
LISTING_BYTES_MAX = 16 * 1024 * 1024
# Routes that span all servers and are not merged here.
UNSHARDED_PATHS = (b"/hub", b"/v1/pipeline", b"/v1/traces")
# A database is on one server, with all its resources.
DATABASE_PREFIXES = (b"/v1/databases/", b"/replication/v1/databases/")
WATCH_PREFIXES = (b"/realtime/", b"/replication/")
DATABASE_STREAMS = ("__changes__", "__collections__", "__sources__")


class ShardRouter:
    """Routing to sharded upstreams."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context
        self._upstreams = context.upstreams

    def check(self, exchange: Exchange, target: RequestTarget) -> None:
        """Refuses requests that would need more than one server."""
        if target.name == "__ds" or exchange.path.startswith(UNSHARDED_PATHS):
            raise TailraceError("not_found", "not available behind an edge with sharded upstreams")
        raw = exchange.headers.get(b"stream-forked-from")
        if exchange.method == b"PUT" and raw is not None:
            source = stream_names.decode_name(raw.removeprefix(b"/v1/stream/"))
            if source and self._upstreams.for_stream(source) is not self._upstreams.for_stream(target.name):
                raise TailraceError("invalid_fork", "the source of the fork is on another server")

    def place(self, exchange: Exchange, target: RequestTarget) -> str:
        """The name that determines the server; empty if any of them will do."""
        for prefix in DATABASE_PREFIXES:
            if exchange.path.startswith(prefix):
                return _database_key(
                    unquote(exchange.path[len(prefix) :].partition(b"/")[0].decode("latin-1"))
                )
        if exchange.path.startswith(WATCH_PREFIXES):
            database = parse_qs(exchange.query.decode("latin-1")).get("database", [""])[-1]
            if not database:
                raise TailraceError("invalid_request", "the URL must name the database: ?database=")
            return _database_key(database)
        kind, _, rest = target.name.partition("/")
        return _database_key(rest.partition("/")[0]) if kind in DATABASE_STREAMS else target.name

    async def list(self, exchange: Exchange) -> None:
        """One page of the streams, or databases, of all servers, by name. Fails if one server fails."""
        key = LISTING_PATHS[exchange.path]
        lines = request_lines(exchange, self._context.edge_id)
        request = request_bytes(exchange, lines)
        try:
            answers = await asyncio.gather(
                *(self._ask(upstream, request) for upstream in self._upstreams.all)
            )
        except UpstreamLostError:
            raise TailraceError("unavailable", "an upstream is unavailable") from None
        except UpstreamRefusedError as refused:
            refusal = refused.refusal
            exchange.respond(refusal.status, response_lines(refusal.fields, BYPASS), refusal.body)
            return
        query = parse_query(exchange.query)
        limit = int(query.get("limit", self._context.limits.list_page))
        rows: list[dict[str, Any]] = [
            row
            for upstream, answer in zip(self._upstreams.all, answers, strict=True)
            for row in orjson.loads(answer.body)
            if key == "name" or self._upstreams.for_stream(_database_key(row[key])) is upstream
        ]
        rows.sort(key=lambda row: str(row[key]).encode())
        more = len(rows) > limit or any(_has_next(answer) for answer in answers)
        page = rows[:limit]
        head = JSON_TYPE + NO_STORE + BYPASS
        if more and page:
            following = {"limit": str(limit), "after": str(page[-1][key])}
            following.update({name: query[name] for name in ("prefix", "system") if name in query})
            head += header_line("Link", f'<{exchange.path.decode()}?{urlencode(following)}>; rel="next"')
        exchange.respond(200, head, orjson.dumps(page))

    async def _ask(self, upstream: Upstream, request: bytes) -> UpstreamAnswer:
        reply = await upstream.pool.request(request, again=True)
        body = await reply.body(LISTING_BYTES_MAX)
        answer = UpstreamAnswer(reply.status, reply.fields, body or b"")
        if reply.status != 200:
            raise UpstreamRefusedError(answer)
        return answer


def _database_key(database: str) -> str:
    """Databases are placed by the stream of their collections."""
    return f"__collections__/{database}"


def _has_next(answer: UpstreamAnswer) -> bool:
    return any(name.lower() == b"link" for name, _ in answer.fields)
