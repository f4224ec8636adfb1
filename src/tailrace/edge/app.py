"""The application of an edge: admin routes, shared reads, and forwarded requests."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Coroutine

import orjson

from tailrace.common.errors import TailraceError
from tailrace.edge.auth import Authenticator, Caller
from tailrace.edge.cache import (
    GZIP_HEADER,
    VARY_HEADER,
    Slice,
    SliceCompressor,
    accepts_gzip,
    is_compressible,
)
from tailrace.edge.context import EdgeContext
from tailrace.edge.forwarding import LISTING_PATHS, Forwarder, ShardRouter
from tailrace.edge.held_streams import HeldEventStreams, is_event_stream
from tailrace.edge.invalidation import REVOKED_PATH as REVOKED
from tailrace.edge.live import EdgeLiveReaders
from tailrace.edge.long_poll import LongPolls
from tailrace.edge.requests import (
    RequestTarget,
    SharedRead,
    cache_line,
    parse_read,
    parse_target,
    response_lines,
)
from tailrace.edge.slices import SliceReader
from tailrace.edge.stream_info import StreamInfoCache
from tailrace.edge.upstream_feed import UpstreamRefusedError, is_transient
from tailrace.edge.upstreams import Upstream
from tailrace.http import request_log
from tailrace.http.client import UpstreamLostError, UpstreamResponse
from tailrace.http.cors import AllowedOrigins, CommonHeaders
from tailrace.http.exchange import Exchange
from tailrace.protocol import http_headers
from tailrace.protocol.http_headers import JSON_TYPE, NO_STORE, error_response, if_none_match
from tailrace.protocol.query_params import live_mode, parse_query

HEALTH_PATHS = (b"/healthz", b"/health")
ADMIN_PATHS = (*HEALTH_PATHS, b"/readyz", b"/metrics")
READ_METHODS = (b"GET", b"HEAD")
# Served by the edge itself, never forwarded or cached.
BYPASS = NO_STORE + cache_line("BYPASS")
METRICS_TYPE = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"


class AdminRoutes:
    """Routes that the edge serves itself."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context
        self.stopping = False

    def answer(self, exchange: Exchange, inspect: Callable[[Exchange], None]) -> None:
        """`inspect` authorises access to the metrics."""
        if exchange.method not in READ_METHODS:
            allow = (("Allow", "GET, HEAD, OPTIONS"),)
            raise TailraceError(
                "method_not_allowed", "method not allowed: use GET, HEAD or OPTIONS", headers=allow
            )
        if exchange.path == b"/metrics":
            inspect(exchange)
            exchange.respond(200, METRICS_TYPE + BYPASS, self._context.telemetry.render())
        elif exchange.path in HEALTH_PATHS:
            exchange.respond(200, JSON_TYPE + BYPASS, b'{"status":"ok"}')
        else:
            self._answer_ready(exchange)

    def _answer_ready(self, exchange: Exchange) -> None:
        upstreams = self._context.upstreams
        wrong = {"wrong": upstreams.wrong} if upstreams.wrong else {}
        if self.stopping or not upstreams.ready:
            reason = "the edge is stopping" if self.stopping else "upstreams are unavailable"
            body = {"status": "degraded", "reason": reason, "upstreams": upstreams.unhealthy, **wrong}
            head = JSON_TYPE + BYPASS + b"Retry-After: 5\r\n"
            exchange.respond(503, head, orjson.dumps(body))
            return
        ready = {"status": "ready", "deployment": upstreams.deployment, **wrong}
        exchange.respond(200, JSON_TYPE + BYPASS, orjson.dumps(ready))


class EdgeMetricsApp:
    """A separate listener for metrics without a token."""

    fixed_headers: bytes | None = b"X-Content-Type-Options: nosniff\r\n"

    def __init__(self, own: AdminRoutes) -> None:
        self._own = own

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        return self.handle

    def handle(self, exchange: Exchange) -> None:
        if exchange.path not in ADMIN_PATHS:
            raise TailraceError("not_found", "this port serves /metrics, /healthz and /readyz")
        self._own.answer(exchange, _allow_all)

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        return error_response(error)

    def common_headers(self, exchange: Exchange | None) -> bytes:
        return self.fixed_headers or b""


def _allow_all(_: Exchange) -> None:
    """No check: access to the port is enough."""


logger = logging.getLogger("tailrace.edge")

# Public routes of the owner.
PUBLIC_PATHS = (b"/openapi.json", b"/hub/health", b"/v1/stream/__ds/jwks.json")
WRITE_METHODS = (b"POST", b"PUT", b"DELETE")
# Spans are appended to a stream that only the owner knows.
TRACES_PATH = b"/v1/traces"

_X_CACHE = re.compile(rb"X-Cache: ([A-Z]+)\r\n")


class EdgeApp:
    """The application of an edge; clients use it like a server."""

    def __init__(
        self,
        context: EdgeContext,
        gate: Authenticator,
        book: StreamInfoCache,
        slices: SliceReader,
        live: EdgeLiveReaders,
        long_polls: LongPolls,
        held: HeldEventStreams,
        on_write: Callable[[str, bytes, int], None],
    ) -> None:
        self._context = context
        self._gate = gate
        self._book = book
        self._slices = slices
        self._live = live
        self._long_polls = long_polls
        self._held = held
        self._on_write = on_write
        self._forwarder = Forwarder(context)
        self._shards = ShardRouter(context) if context.upstreams.mode == "sharded" else None
        self._loop_mark = b"tailrace-edge-" + context.edge_id
        self.own = AdminRoutes(context)
        self._packer = SliceCompressor()
        settings = context.settings
        self._logs_all = settings.log_requests == "all"
        # Set before forwarding, so that the server's log has the same id.
        self._names_all = settings.request_ids or self._logs_all
        total = "edge-total" if settings.server_timing else None
        self._origins = AllowedOrigins(settings)
        self.common_headers = CommonHeaders(settings.resource_policy, self._origins, total)
        self.fixed_headers = self.common_headers.fixed

    # -- called by the HTTP server

    def handle(self, exchange: Exchange) -> None:
        if self._names_all:
            exchange.assign_request_id()
        if self._logs_all:
            exchange.observe_response(self._log_answer)
        if self._loop_mark in exchange.headers.get(b"via", b""):
            logger.error("proxy loop detected")
            raise TailraceError("internal", "proxy loop detected: an upstream of this edge leads back to it")
        if exchange.method == b"OPTIONS":
            exchange.respond(204, http_headers.preflight_lines())
        elif exchange.path in ADMIN_PATHS:
            self.own.answer(exchange, self._gate.inspect)
        else:
            self._route(exchange)

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        return self.handle

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        return self._context.refusal(exchange, error)

    def end_live(self) -> None:
        """Shutdown: ends waits and live readers."""
        self._long_polls.end_all()
        self._live.end_all()
        self._held.end_all()

    # -- request log

    def _log_answer(self, exchange: Exchange, status: int, head: bytes) -> None:
        """Logs a response that is not logged yet, with X-Cache."""
        seconds = time.monotonic() - exchange.started
        found = _X_CACHE.search(head)
        more = {"cache": found[1].decode()} if found is not None else {}
        request_log.log_request(exchange, status, seconds, **more)

    # -- forwarded and shared requests

    def _route(self, exchange: Exchange) -> None:
        if exchange.wants_websocket():
            self._origins.check_websocket(exchange)
        target = parse_target(exchange.path, self._context.limits.name_bytes)
        if target.kind == "server" and not self._shows(exchange.path):
            raise TailraceError("not_found", "this edge does not expose routes of its server")
        begun = time.monotonic()
        caller = self._let_in(exchange, target)
        self._context.note(exchange, "edge-auth", time.monotonic() - begun)
        if self._shards is not None:
            self._shards.check(exchange, target)
            if exchange.path in LISTING_PATHS and exchange.method == b"GET":
                self._start(exchange, self._shards.list(exchange), wait=False)
                return
        if target.kind != "stream":
            self._start_pass(exchange, target, caller)
            return
        if exchange.method == b"GET":
            self._read(exchange, target, caller)
            return
        self._start(exchange, self._write_or_head(exchange, target, caller), wait=False)

    def _let_in(self, exchange: Exchange, target: RequestTarget) -> Caller:
        """Checks the request before any lookup or forwarding."""
        if target.kind == "stream" or _is_system_read(exchange, target):
            return self._gate.admit(exchange, target.name)
        if exchange.path in PUBLIC_PATHS:
            return Caller.from_exchange(exchange)
        return self._gate.identify(exchange)

    def _shows(self, path: bytes) -> bool:
        """A route of the server; an edge in front of this one needs the revocations."""
        return self._context.settings.edge_expose_server or path == REVOKED

    def _read(self, exchange: Exchange, target: RequestTarget, caller: Caller) -> None:
        reading = parse_read(target, exchange.query, exchange.headers)
        if reading is None or not caller.shared or _wants_fresh(exchange, reading):
            self._start_pass(exchange, target, caller)
        elif reading.mode == "":
            self._start(exchange, self._answer_slice(exchange, reading, caller), wait=False)
        else:
            work = self._answer_live(exchange, target, reading, caller)
            self._start(exchange, self._answer_or_hold(exchange, target, caller, work), wait=True)

    def _start_pass(self, exchange: Exchange, target: RequestTarget, caller: Caller) -> None:
        work = self._answer_or_hold(exchange, target, caller, self._pass(exchange, target, caller))
        self._start(exchange, work, wait=_may_wait(exchange, target))

    def _start(self, exchange: Exchange, work: Coroutine[None, None, None], *, wait: bool) -> None:
        self._context.answer_later(exchange, work, wait=wait)

    async def _answer_or_hold(
        self, exchange: Exchange, target: RequestTarget, caller: Caller, work: Coroutine[None, None, None]
    ) -> None:
        """Holds a known event stream while its upstream is unavailable, instead of a 503."""
        try:
            await work
        except TailraceError as refusal:
            if refusal.code != "unavailable" or exchange.answered:
                raise
            if not self._is_known_event_stream(exchange, target, caller):
                raise
            self._held.hold(exchange, lambda: self._upstream(exchange, target))

    def _is_known_event_stream(self, exchange: Exchange, target: RequestTarget, caller: Caller) -> bool:
        return is_event_stream(exchange, _names_stream(target)) and self._held.is_known(
            exchange, target.name, caller
        )

    async def _pass(self, exchange: Exchange, target: RequestTarget, caller: Caller) -> None:
        """Forwards a request unchanged; long responses get a dedicated connection."""
        apart = _may_wait(exchange, target)
        sent_at = self._context.loop.time()

        def observe(reply: UpstreamResponse) -> None:
            if target.kind == "stream":
                self._book.note_reply(target.name, reply, sent_at)
            elif exchange.method in WRITE_METHODS and (
                target.kind == "resource" or exchange.path == TRACES_PATH
            ):
                self._book.note_change(target.name)
            self._count(reply)
            if is_event_stream(exchange, _names_stream(target)):
                self._note_event_stream(exchange, target, caller, reply)

        upstream = self._upstream(exchange, target)
        await self._forwarder.forward(exchange, upstream, caller, apart=apart, observe=observe)

    def _note_event_stream(
        self, exchange: Exchange, target: RequestTarget, caller: Caller, reply: UpstreamResponse
    ) -> None:
        if reply.status == 200:
            self._held.note_answered(exchange)
        elif is_transient(reply.status) and self._is_known_event_stream(exchange, target, caller):
            raise TailraceError("unavailable", f"the upstream responded with status {reply.status}")

    async def _write_or_head(self, exchange: Exchange, target: RequestTarget, caller: Caller) -> None:
        asking = self._book.asking(target.name, self._context.loop.time())

        def observe(reply: UpstreamResponse) -> None:
            if exchange.method in WRITE_METHODS:
                self._on_write(target.name, exchange.method, reply.status)
                if exchange.method == b"POST" or reply.status in (404, 410):
                    self._book.note_reply(target.name, reply, asking.sent_at)
            else:
                self._book.note_head(target.name, reply, self._context.loop.time(), asking)
            self._count(reply)

        upstream = self._upstream(exchange, target)
        await self._forwarder.forward(exchange, upstream, caller, observe=observe)

    def _upstream(self, exchange: Exchange, target: RequestTarget) -> Upstream:
        upstreams = self._context.upstreams
        place = target.name if self._shards is None else self._shards.place(exchange, target)
        return upstreams.for_stream(place) if place else upstreams.any()

    async def _answer_live(
        self, exchange: Exchange, target: RequestTarget, reading: SharedRead, caller: Caller
    ) -> None:
        follow = self._long_polls.answer if reading.mode == "long-poll" else self._live.follow
        if not await follow(exchange, reading, caller):
            await self._pass(exchange, target, caller)

    async def _answer_slice(self, exchange: Exchange, reading: SharedRead, caller: Caller) -> None:
        try:
            found, outcome = await self._get_slice(exchange, reading, caller)
        except UpstreamRefusedError as refused:
            refusal = refused.refusal
            self._context.telemetry.edge_requests.add("read", "MISS", refusal.status)
            exchange.respond(refusal.status, response_lines(refusal.fields, cache_line("MISS")), refusal.body)
            return
        except UpstreamLostError:
            raise TailraceError("unavailable", "the upstream is unavailable") from None
        await self._respond(exchange, reading, found, outcome)

    async def _get_slice(self, exchange: Exchange, reading: SharedRead, caller: Caller) -> tuple[Slice, str]:
        context = self._context
        begun = time.monotonic()
        found = await self._slices.cached(reading, caller)
        looked = time.monotonic()
        context.note(exchange, "edge-cache", looked - begun)
        if found is not None:
            return found, "HIT"
        found = await self._slices.fetched(reading, caller)
        context.note_upstream(exchange, time.monotonic() - looked, found.queued_s, found.timing)
        return found, "MISS"

    async def _respond(self, exchange: Exchange, reading: SharedRead, found: Slice, outcome: str) -> None:
        facts = self._book.get(reading.name)
        head = found.lines + reading.start_line + cache_line(outcome)
        if found.end:
            # At an open tail the end of the slice is the requested offset.
            end = found.end if found.up_to_date else max(found.end, facts.end)
            head += http_headers.header_line("Stream-End-Offset", end)
        if earliest := max(found.earliest, facts.earliest):
            head += http_headers.header_line("Stream-Earliest-Offset", earliest)
        if outcome == "HIT":
            age_s = max(0, int(self._context.loop.time() - found.stored_at))
            head += b"Age: %d\r\n" % age_s
        body = found.body
        if is_compressible(found):
            head += VARY_HEADER
        wanted = exchange.headers.get(b"if-none-match")
        if wanted is not None and found.tag and if_none_match(wanted.decode("latin-1"), found.tag):
            self._context.telemetry.edge_requests.add("read", outcome, 304)
            exchange.respond(304, head)
            return
        if is_compressible(found) and accepts_gzip(exchange.headers.get(b"accept-encoding", b"")):
            body = await self._packer.compress(found)
            head += GZIP_HEADER
        self._context.telemetry.edge_requests.add("read", outcome, 200)
        exchange.respond(200, http_headers.header_line("Content-Type", found.content_type) + head, body)

    def _count(self, reply: UpstreamResponse) -> None:
        self._context.telemetry.edge_requests.add("forward", "BYPASS", reply.status)


def _names_stream(target: RequestTarget) -> bool:
    return target.kind in ("stream", "reserved")


def _is_system_read(exchange: Exchange, target: RequestTarget) -> bool:
    """Hub streams have a policy that only the owner knows, and write errors come from the owner."""
    return target.kind == "reserved" and target.name.startswith("__") and exchange.method in READ_METHODS


def _wants_fresh(exchange: Exchange, reading: SharedRead) -> bool:
    """`no-cache` or `no-store` on a plain read: the owner must serve it."""
    control = exchange.headers.get(b"cache-control", b"").lower()
    return reading.mode == "" and (b"no-cache" in control or b"no-store" in control)


def _may_wait(exchange: Exchange, target: RequestTarget) -> bool:
    """Whether the response may take long, or never end."""
    if exchange.wants_websocket() or exchange.path.startswith((b"/realtime/", b"/replication/")):
        return True
    if target.kind == "resource":
        return b"/touch/" in exchange.path
    if _names_stream(target) and exchange.method == b"GET":
        try:
            return live_mode(parse_query(exchange.query)) != ""
        except TailraceError:
            return False
    return False
