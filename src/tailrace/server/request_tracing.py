"""Observes requests for traces, for the log of all requests, and for request ids on every response.

`RequestObserver` wraps the application only where one of these is configured, so that appends cost nothing
without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tailrace.common.errors import TailraceError
from tailrace.common.settings import Settings
from tailrace.http.exchange import Exchange
from tailrace.http.request_log import log_request
from tailrace.log.group_commit import Committer
from tailrace.routing.client_address import load_trusted_proxies
from tailrace.server.app import TailraceApp
from tailrace.server.tracing import Span, Tracer

logger = logging.getLogger("tailrace.requests")

RequestHandler = Callable[[Exchange], None]


def observes_requests(settings: Settings) -> bool:
    return bool(settings.traces_url) or settings.log_requests == "all" or settings.request_ids


class RequestObserver:
    """Forwards requests to the application, and records their responses."""

    def __init__(
        self, app: TailraceApp, settings: Settings, tracer: Tracer | None, committer: Committer
    ) -> None:
        self._app = app
        self._tracer = tracer
        self._committer = committer
        self._logs_all = settings.log_requests == "all"
        self._names_all = settings.request_ids
        self._proxies = load_trusted_proxies(settings.trusted_proxies)
        self._sync = (0.0, 0)  # seconds and records of the last sync
        self.fixed_headers = app.fixed_headers

    # -- called by the HTTP server ---------------------------------------------------------------------

    def handle(self, exchange: Exchange) -> None:
        self._observe(exchange, self._app.handle)

    def handler_for(self, exchange: Exchange) -> RequestHandler:
        handle = self._app.handler_for(exchange)
        return lambda again: self._observe(again, handle)

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        return self._app.refuse(exchange, error)

    def common_headers(self, exchange: Exchange | None) -> bytes:
        return self._app.common_headers(exchange)

    # -- called by the committer -----------------------------------------------------------------------

    def synced(self, seconds: float, records: int) -> None:
        """Called right before the responses of a batch are sent."""
        self._sync = (seconds, records)

    # -- observing -------------------------------------------------------------------------------------

    def _observe(self, exchange: Exchange, handle: RequestHandler) -> None:
        if self._names_all:
            exchange.assign_request_id()
        span = None if self._tracer is None else self._tracer.request(exchange)
        if span is None and not self._logs_all:
            handle(exchange)
            return
        seen = _ObservedRequest(self, span)
        exchange.observe_response(seen.on_response)
        queued_bytes = self._committer.queued_bytes
        handle(exchange)
        seen.commits = self._committer.queued_bytes != queued_bytes

    def on_response(self, exchange: Exchange, status: int, span: Span | None, commits: bool) -> None:
        if self._logs_all and status < 500:  # server errors are logged with their reason
            log_request(exchange, status, time.monotonic() - exchange.started)
        tracer = self._tracer
        if span is None or tracer is None:
            return
        method, path = exchange.method.decode("latin-1"), exchange.path.decode("latin-1")
        route = self._app.table.label(exchange.path)
        span.name = f"{method} {route}"
        span.failed = status >= 500
        span.attributes = {
            "http.request.method": method,
            "http.route": route,
            "url.path": path,
            "http.response.status_code": status,
            "client.address": self._proxies.remote_of(exchange),
        }
        if exchange.request_id:
            span.attributes["tailrace.request_id"] = exchange.request_id.decode("ascii")
        if commits and status < 300:
            seconds, records = self._sync
            now_ns = tracer.now_ns()
            tracer.record("commit", now_ns - int(seconds * 1e9), now_ns, {"tailrace.records": records}, span)
        tracer.end(span)


class _ObservedRequest:
    """One request that is traced or logged."""

    __slots__ = ("_app", "_span", "commits")

    def __init__(self, app: RequestObserver, span: Span | None) -> None:
        self._app = app
        self._span = span
        self.commits = False  # whether it waits for the journal

    def on_response(self, exchange: Exchange, status: int, _head: bytes) -> None:
        try:
            self._app.on_response(exchange, status, self._span, self.commits)
        except Exception:
            logger.exception("cannot record a request")  # its response is sent all the same
