"""A listener of its own for the metrics, so that they can be scraped without a token."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.routing import responses
from tailrace.server.health import HealthRoutes


class MetricsApp:
    """Health, readiness and metrics, and nothing else. Who can reach the port may read them."""

    fixed_headers: bytes | None = b"X-Content-Type-Options: nosniff\r\n"

    def __init__(self, health: HealthRoutes) -> None:
        self._health = health

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        return self.handle

    def handle(self, exchange: Exchange) -> None:
        if not self._health.handles(exchange.path):
            raise TailraceError("not_found", "this port serves /metrics, /healthz and /readyz")
        if exchange.method not in (b"GET", b"HEAD"):
            raise TailraceError("method_not_allowed", "only GET and HEAD", headers=(("Allow", "GET, HEAD"),))
        if exchange.path == b"/metrics":
            self._health.metrics(exchange)
        else:
            self._health.answer_open(exchange, exchange.path)

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        return responses.error_response(error)

    def common_headers(self, exchange: Exchange | None) -> bytes:
        return self.fixed_headers or b""
