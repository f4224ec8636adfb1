"""Shared parts of an edge: settings, upstreams, tasks of requests, errors and Server-Timing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from tailrace.auth import EdgeSignature, ForwardedClient
from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.settings import Settings
from tailrace.common.tasks import TaskSet
from tailrace.edge.auth import Caller, EdgeToken
from tailrace.edge.metrics import EdgeTelemetry
from tailrace.edge.requests import build_request, cache_line, request_id_line, whole_target
from tailrace.edge.upstreams import Upstream, Upstreams
from tailrace.http.cors import add_timing_phase, add_upstream_timing
from tailrace.http.exchange import Exchange
from tailrace.http.request_log import failure_log
from tailrace.protocol.http_headers import error_response

logger = logging.getLogger("tailrace.edge")


class EdgeContext:
    """The shared parts of an edge, and the tasks of requests in progress."""

    def __init__(
        self,
        settings: Settings,
        upstreams: Upstreams,
        telemetry: EdgeTelemetry,
        clock: Clock,
        edge_id: bytes,
        token: EdgeToken | None,
    ) -> None:
        self.settings = settings
        self.limits: Limits = settings.limits
        self.upstreams = upstreams
        self.telemetry = telemetry
        self.clock = clock
        self.edge_id = edge_id
        self.loop = asyncio.get_running_loop()
        # For the edge's own requests, but only if it verifies clients itself.
        self.own_token = token if settings.auth_configured else None
        self._mark = EdgeSignature(settings.edge_signing_key) if settings.edge_signing_key else None
        self._timing = settings.server_timing
        self.tasks = TaskSet()

    def now_s(self) -> float:
        return self.clock.now_ns() / 1e9

    @property
    def token(self) -> bytes | None:
        """The Authorization of the edge itself; None while it has no valid token."""
        return None if self.own_token is None else self.own_token.usable(self.now_s())

    def answer_later(self, exchange: Exchange, work: Coroutine[None, None, None], *, wait: bool) -> None:
        """Runs `work`, which responds to a request. A wait is cancelled with its client, a write never."""
        task = self.tasks.start(self._guard(exchange, work))
        if wait:
            exchange.on_gone = lambda: _cancel(task)

    async def _guard(self, exchange: Exchange, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except TailraceError as refusal:
            exchange.respond(*self.refusal(exchange, refusal))
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("request failed")
            if exchange.answered:
                exchange.connection.transport.abort()
            else:
                exchange.respond(*self.refusal(exchange, TailraceError("internal", "internal error")))
        finally:
            exchange.on_gone = None

    def refusal(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        """An error response of the edge itself, with the request id."""
        self.telemetry.edge_refused.add(error.code)
        status, head, body = error_response(error)
        if exchange is None:
            return status, head, body
        exchange.assign_request_id()
        if status >= 500:
            failure_log.log_failure(exchange, error)
            exchange.on_response = None  # logged above
        if exchange.method in (b"GET", b"HEAD"):
            head += cache_line("BYPASS")
        return status, head, body

    # -- client identity

    def mark_of(self, exchange: Exchange, caller: Caller | None) -> bytes:
        """The header line with the client's identity for the owner; empty without a key."""
        if self._mark is None:
            return b""
        return self._mark_line(
            exchange.method, whole_target(exchange), caller or Caller.from_exchange(exchange)
        )

    def request_for(self, caller: Caller, upstream: Upstream, target: bytes, *more: bytes) -> bytes:
        """An upstream read on behalf of a client, which others may share."""
        mark = self._mark_line(b"GET", target, caller)
        host = upstream.origin.host_header
        more = (mark, request_id_line(caller.request_id), *more)
        return build_request(b"GET", target, host, self.edge_id, caller.authorization, *more, via=caller.via)

    def _mark_line(self, method: bytes, target: bytes, caller: Caller) -> bytes:
        if self._mark is None:
            return b""
        sub = "" if caller.identity is None else caller.identity.sub
        vouched = ForwardedClient(self.edge_id.decode(), caller.ip, sub)
        return b"tailrace-edge: %b\r\n" % self._mark.sign(method, target, vouched, self.now_s())

    # -- Server-Timing

    def note(self, exchange: Exchange, phase: str, seconds: float) -> None:
        """One Server-Timing metric of the edge."""
        if self._timing:
            add_timing_phase(exchange, phase, seconds)

    def note_upstream(self, exchange: Exchange, seconds: float, queued_s: float, theirs: bytes) -> None:
        """Server-Timing of the upstream request: queue, duration, and the owner's own."""
        if self._timing:
            queued_s = min(queued_s, seconds)
            add_timing_phase(exchange, "edge-queue", queued_s)
            add_timing_phase(exchange, "edge-upstream", seconds - queued_s)
            add_upstream_timing(exchange, theirs.decode("latin-1"))

    async def stop(self) -> None:
        await self.tasks.close()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
