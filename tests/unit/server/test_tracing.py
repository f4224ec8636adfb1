"""Traces: where spans belong, how they are written, and that sending them holds nobody up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from support.calls import eventually
from support.collector import Collector
from tailrace.common.settings import Settings
from tailrace.server.request_tracing import observes_requests
from tailrace.server.trace_export import (
    QUEUE_SPANS_MAX,
    SpanExporter,
    encode_export,
    parse_header_list,
    traces_url,
)
from tailrace.server.tracing import SERVER, TEXT_MAX, Span, TraceContext, new_trace, parse_traceparent

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[Collector]:
    receiver = Collector()
    yield receiver
    receiver.close()


@pytest.fixture
def exporter(collector: Collector) -> Iterator[SpanExporter]:
    made = SpanExporter(
        collector.base_url, {"x-key": "k"}, {"service.name": "tailrace"}, "1", batch_wait_s=0.05
    )
    yield made
    made.close()


def span(name: str = "seal") -> Span:
    return Span(name, new_trace(), 1_000, ended_ns=2_000)


def test_a_caller_is_read_and_written_as_it_was() -> None:
    header = f"00-{TRACE}-{CALLER}-01"
    caller = parse_traceparent(header.encode())
    assert caller is not None
    assert caller == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(CALLER), True)
    assert caller.header() == header
    child = caller.child()
    assert (child.trace_id, child.sampled) == (caller.trace_id, True)
    assert child.span_id != caller.span_id


def test_a_caller_that_does_not_sample_and_a_later_version() -> None:
    quiet = parse_traceparent(f"00-{TRACE}-{CALLER}-00".encode())
    assert quiet is not None
    assert not quiet.sampled
    later = parse_traceparent(f"cc-{TRACE}-{CALLER}-01-what-comes-later".encode())
    assert later is not None
    assert later.sampled


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{CALLER}-01",
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{CALLER}-01",
        f"00-{TRACE}-{CALLER}-01-more",
        f"00-{TRACE}-{CALLER}-1",
        f"00-{TRACE}-{CALLER}-01\n",
    ],
)
def test_what_is_no_traceparent_counts_as_absent(header: str) -> None:
    assert parse_traceparent(header.encode()) is None


def test_spans_are_what_opentelemetry_reads() -> None:
    context = new_trace()
    written = Span(
        "GET /v1/stream/{name}", context.child(), 1_700_000_000_000_000_001, context.span_id, SERVER
    )
    written.ended_ns = written.begun_ns + 5
    written.failed = True
    written.tracestate = "vendor=1"
    written.attributes = {"url.path": "/v1/stream/bücher" + "x" * 1000, "http.response.status_code": 503}
    body = encode_export([written, span()], {"service.name": "tailrace", "process.pid": 7}, "1.2")
    (group,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert {one.key for one in group.resource.attributes} == {"service.name", "process.pid"}
    (scope,) = group.scope_spans
    assert (scope.scope.name, scope.scope.version) == ("tailrace", "1.2")
    read, other = scope.spans
    assert (read.trace_id, read.span_id) == (context.trace_id, written.context.span_id)
    assert (read.parent_span_id, read.trace_state) == (context.span_id, "vendor=1")
    assert (read.name, read.kind) == (written.name, read.SPAN_KIND_SERVER)
    assert (read.start_time_unix_nano, read.end_time_unix_nano) == (written.begun_ns, written.ended_ns)
    assert read.status.code == Status.STATUS_CODE_ERROR
    values = {one.key: one.value for one in read.attributes}
    assert values["http.response.status_code"].int_value == 503
    assert len(values["url.path"].string_value) == TEXT_MAX
    assert other.parent_span_id == b""
    assert other.status.code == Status.STATUS_CODE_UNSET


def test_spans_arrive_with_the_headers_that_were_set(exporter: SpanExporter, collector: Collector) -> None:
    exporter.start()
    for number in range(3):
        exporter.submit(span(f"span-{number}"))
    seen = eventually(collector.received, lambda spans: len(spans) == 3)
    assert [one.name for one in seen] == ["span-0", "span-1", "span-2"]
    assert seen[0].resource == {"service.name": "tailrace"}
    assert collector.paths == {"/v1/traces"}
    assert collector.sent_headers[0]["x-key"] == "k"
    assert collector.sent_headers[0]["content-type"] == "application/x-protobuf"
    assert eventually(lambda: exporter.exported, lambda count: count == 3) == 3


def test_what_does_not_fit_is_dropped_and_counted(exporter: SpanExporter, collector: Collector) -> None:
    for _ in range(QUEUE_SPANS_MAX + 10):
        exporter.submit(span())
    assert exporter.dropped == 10
    exporter.start()
    exporter.close()
    assert exporter.exported == QUEUE_SPANS_MAX
    assert len(collector.received()) == QUEUE_SPANS_MAX


def test_a_collector_that_asks_for_time_is_tried_again(exporter: SpanExporter, collector: Collector) -> None:
    collector.status = 503
    exporter.start()
    exporter.submit(span())
    eventually(collector.calls.qsize, lambda count: count >= 1)
    collector.status = 200
    assert eventually(lambda: exporter.exported, bool) == 1
    assert exporter.failed == 0


def test_a_refusal_is_counted_and_the_next_batch_goes_on(
    exporter: SpanExporter, collector: Collector
) -> None:
    collector.status = 400
    exporter.start()
    exporter.submit(span())
    assert eventually(lambda: exporter.failed, bool) == 1
    collector.status = 200
    exporter.submit(span())
    assert eventually(lambda: exporter.exported, bool) == 1


def test_closing_without_a_collector_ends_soon(collector: Collector) -> None:
    lonely = SpanExporter("http://127.0.0.1:9", {}, {}, "1")
    lonely.start()
    lonely.submit(span())
    lonely.close()
    assert (lonely.exported, lonely.failed) == (0, 1)


def test_where_spans_go() -> None:
    assert traces_url("http://collector:4318") == "http://collector:4318/v1/traces"
    assert traces_url("https://collector/") == "https://collector/v1/traces"
    assert traces_url("https://collector/otlp/v1/traces") == "https://collector/otlp/v1/traces"
    assert parse_header_list("Authorization=Bearer a=b, x=1,") == {"Authorization": "Bearer a=b", "x": "1"}


def test_nothing_of_it_is_in_the_way_by_default() -> None:
    assert not observes_requests(Settings())
    assert observes_requests(Settings(traces_url="http://127.0.0.1:4318"))
    assert observes_requests(Settings(request_ids=True))
    assert observes_requests(Settings(log_requests="all"))
