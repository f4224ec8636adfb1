"""OpenTelemetry spans of the server: W3C trace context, spans, and the tracer.

The tracer decides which requests are traced, and makes the spans of seals, pipeline jobs and webhooks.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from tailrace.common.clock import Clock
from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.http.exchange import Exchange
from tailrace.server.pipeline_process import PipelineHeartbeat
from tailrace.storage.sealing import SealRun

# Later versions may add fields at the end, which are ignored.
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class TraceContext(NamedTuple):
    """The ids of a span, as in the `traceparent` header."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True

    def child(self) -> TraceContext:
        """A new span in the same trace."""
        return TraceContext(self.trace_id, secrets.token_bytes(8), self.sampled)

    def header(self) -> str:
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{int(self.sampled):02x}"


def new_trace() -> TraceContext:
    return TraceContext(secrets.token_bytes(16), secrets.token_bytes(8))


def parse_traceparent(value: bytes) -> TraceContext | None:
    """The span of the caller; None if the header is invalid, which is ignored."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = bytes.fromhex(match[2].decode()), bytes.fromhex(match[3].decode())
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))


# Span kinds, numbered as in OTLP.
INTERNAL: Final = 1
SERVER: Final = 2
CLIENT: Final = 3

TEXT_MAX: Final = 256  # characters of a name or an attribute
TRACESTATE_MAX: Final = 512

AttributeValue = str | int


class Span(msgspec.Struct, eq=False):
    """A span in progress, or one that has ended."""

    name: str
    context: TraceContext
    begun_ns: int
    parent_id: bytes = b""
    kind: int = INTERNAL
    ended_ns: int = 0
    failed: bool = False
    tracestate: str = ""
    attributes: dict[str, AttributeValue] = {}


RUNS_MAX: Final = 1000  # pipeline jobs followed at once


class Tracer:
    """Used on the event loop only. `submit` receives spans that have ended and must not block."""

    def __init__(self, one_in: int, clock: Clock, submit: Callable[[Span], None]) -> None:
        self._one_in = one_in
        self._clock = clock
        self._submit = submit
        self._untraced = 0
        self._runs: dict[
            tuple[str, str, str], int
        ] = {}  # segments of running jobs by job, stream and start time

    # -- requests --------------------------------------------------------------------------------------

    def request(self, exchange: Exchange) -> Span | None:
        """The span of a request, or None if it is not traced.

        A `traceparent` header decides whether it is; of the other requests one in `one_in` starts a trace.
        """
        raw = exchange.headers.get(b"traceparent")
        caller = None if raw is None else parse_traceparent(raw)
        if caller is not None:
            if not caller.sampled:
                return None
            state = exchange.headers.get(b"tracestate", b"")[:TRACESTATE_MAX].decode("latin-1")
            return Span("", caller.child(), self.now_ns(), caller.span_id, SERVER, tracestate=state)
        self._untraced += 1
        if not self._one_in or self._untraced % self._one_in:
            return None
        return Span("", new_trace(), self.now_ns(), kind=SERVER)

    def end(self, span: Span) -> None:
        span.ended_ns = self.now_ns()
        self._submit(span)

    def record(
        self, name: str, begun_ns: int, ended_ns: int, attributes: dict[str, AttributeValue], parent: Span
    ) -> None:
        """Record a child span that has ended."""
        context = parent.context
        span = Span(name, context.child(), begun_ns, context.span_id, INTERNAL, ended_ns)
        span.attributes = attributes
        self._submit(span)

    def now_ns(self) -> int:
        return self._clock.now_ns()

    # -- background work -------------------------------------------------------------------------------

    def record_seal(self, run: SealRun) -> None:
        span = Span("seal", new_trace(), run.begun_ns, failed=bool(run.error))
        span.attributes = {
            "tailrace.stream": run.stream,
            "tailrace.segments": run.segments,
            "tailrace.segment_bytes": run.segment_bytes,
        }
        if run.error:
            span.attributes["error.message"] = run.error
        self.end(span)

    def record_heartbeat(self, heartbeat: PipelineHeartbeat) -> None:
        """A job that is missing in a heartbeat has ended, some time since the last one."""
        running = {(one.job, one.stream, one.since): one.segments for one in heartbeat.running[:RUNS_MAX]}
        for key, segments in self._runs.items():
            begun_ns = parse_rfc3339_ns(key[2])
            if key in running or begun_ns is None:
                continue
            span = Span("pipeline", new_trace(), begun_ns)
            span.attributes = {
                "tailrace.job": key[0],
                "tailrace.stream": key[1],
                "tailrace.segments": segments,
            }
            self.end(span)
        self._runs = running

    def webhook(self, subscription: str) -> WebhookSpan:
        return WebhookSpan(self, subscription)


class WebhookSpan:
    """The span of a webhook call; its receiver may continue the trace."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Tracer, subscription: str) -> None:
        self._tracer = tracer
        self._span = Span("webhook", new_trace(), tracer.now_ns(), kind=CLIENT)
        self._span.attributes = {"tailrace.subscription": subscription}

    @property
    def traceparent(self) -> str:
        return self._span.context.header()

    def end(self, outcome: str) -> None:
        self._span.attributes["tailrace.outcome"] = outcome
        self._span.failed = outcome == "failed"
        self._tracer.end(self._span)
