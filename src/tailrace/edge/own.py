"""What an edge says of itself: health, readiness and metrics, on its listener or on one of their own."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from tailrace.common.errors import TailraceError
from tailrace.edge.context import EdgeContext
from tailrace.edge.headers import cache_line
from tailrace.http.exchange import Exchange
from tailrace.protocol.http_headers import JSON_TYPE, NO_STORE, error_response

HEALTH_PATHS = (b"/healthz", b"/health")
ADMIN_PATHS = (*HEALTH_PATHS, b"/readyz", b"/metrics")
READ_METHODS = (b"GET", b"HEAD")
# Nobody upstream is asked, and nothing of it is kept.
BYPASS = NO_STORE + cache_line("BYPASS")
METRICS_TYPE = b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"


class AdminRoutes:
    """Answered here, never upstream."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context
        self.stopping = False

    def answer(self, exchange: Exchange, inspect: Callable[[Exchange], None]) -> None:
        """`inspect` refuses who may not look at the numbers."""
        if exchange.method not in READ_METHODS:
            allow = (("Allow", "GET, HEAD, OPTIONS"),)
            raise TailraceError("method_not_allowed", "this path takes GET, HEAD, OPTIONS", headers=allow)
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
            reason = "the edge is stopping" if self.stopping else "upstreams do not answer"
            body = {"status": "degraded", "reason": reason, "upstreams": upstreams.unhealthy, **wrong}
            head = JSON_TYPE + BYPASS + b"Retry-After: 5\r\n"
            exchange.respond(503, head, orjson.dumps(body))
            return
        ready = {"status": "ready", "deployment": upstreams.deployment, **wrong}
        exchange.respond(200, JSON_TYPE + BYPASS, orjson.dumps(ready))


class EdgeMetricsApp:
    """A listener of its own, so that the metrics can be scraped without a token."""

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
    """Who can reach the port may read them."""
