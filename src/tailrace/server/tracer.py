"""Decides which requests are traced, and makes the spans of what the server does by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tailrace.common.clock import Clock
from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.http.exchange import Exchange
from tailrace.server.context import new_trace, parse_traceparent
from tailrace.server.pipeline_state import PipelineHeartbeat
from tailrace.server.span import CLIENT, INTERNAL, SERVER, TRACESTATE_MAX, AttributeValue, Span
from tailrace.storage.sealing import SealRun

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
