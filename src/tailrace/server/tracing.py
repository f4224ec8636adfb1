"""OpenTelemetry spans of the server: W3C trace context, spans, and the tracer that makes them.

Where a span belongs: the `traceparent` header of W3C Trace Context, read and written.

A span: something that took a while, as it is exported.

Decides which requests are traced, and makes the spans of what the server does by itself.
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

# Later versions may add fields at the end; what is known of them is read all the same.
_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class TraceContext(NamedTuple):
    """A span as others see it."""

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
    """The caller's span; None if the header is not one, which counts as if it were not there."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace_id, span_id = bytes.fromhex(match[2].decode()), bytes.fromhex(match[3].decode())
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))


# Kinds, by the numbers of the protocol.
INTERNAL: Final = 1
SERVER: Final = 2
CLIENT: Final = 3

TEXT_MAX: Final = 256  # characters of a name or an attribute
TRACESTATE_MAX: Final = 512

AttributeValue = str | int


class Span(msgspec.Struct, eq=False):
    """One that has ended, or will be ended by whoever began it."""

    name: str
    context: TraceContext
    begun_ns: int
    parent_id: bytes = b""
    kind: int = INTERNAL
    ended_ns: int = 0
    failed: bool = False
    tracestate: str = ""
    attributes: dict[str, AttributeValue] = {}


RUNS_MAX: Final = 1000  # runs of the pipeline that are followed at once


class Tracer:
    """Runs on the loop thread. `submit` takes a span that has ended and must not block."""

    def __init__(self, one_in: int, clock: Clock, submit: Callable[[Span], None]) -> None:
        self._one_in = one_in
        self._clock = clock
        self._submit = submit
        self._untraced = 0
        self._runs: dict[
            tuple[str, str, str], int
        ] = {}  # job, stream and begin of what runs, with its inputs

    # -- requests --------------------------------------------------------------------------------------

    def request(self, exchange: Exchange) -> Span | None:
        """The span of a request, or None if it is not one of those that are traced.

        A caller that traces decides for us; of all others one in so many begins a trace.
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

    def past(
        self, name: str, begun_ns: int, ended_ns: int, attributes: dict[str, AttributeValue], parent: Span
    ) -> None:
        """A part of a span, told when it is over."""
        context = parent.context
        span = Span(name, context.child(), begun_ns, context.span_id, INTERNAL, ended_ns)
        span.attributes = attributes
        self._submit(span)

    def now_ns(self) -> int:
        return self._clock.now_ns()

    # -- what the server does by itself ----------------------------------------------------------------

    def sealed(self, run: SealRun) -> None:
        span = Span("seal", new_trace(), run.begun_ns, failed=bool(run.error))
        span.attributes = {
            "tailrace.stream": run.stream,
            "tailrace.segments": run.segments,
            "tailrace.segment_bytes": run.segment_bytes,
        }
        if run.error:
            span.attributes["error.message"] = run.error
        self.end(span)

    def heard(self, beat: PipelineHeartbeat) -> None:
        """What a heartbeat names no more has ended; how exactly that is known is up to the heartbeats."""
        running = {(one.job, one.stream, one.since): one.segments for one in beat.running[:RUNS_MAX]}
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
    """A call to somebody else, who may go on with the trace."""

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
