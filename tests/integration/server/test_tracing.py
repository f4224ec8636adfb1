"""A server that is traced: its spans arrive at a collector, in the traces of those who call it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.calls import Caller, eventually
from support.collector import Collector
from support.hooks import Hook
from support.server import ServerProcess

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    receiver = Collector()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Traces what its callers trace, and nothing else of what they ask."""
    args = ["--traces-url", collector.base_url, "--traces-one-in", "0"]
    process = ServerProcess(tmp_path_factory.mktemp("traced") / "data", args=args).start()
    yield process
    process.stop()


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


def traced(trace: str, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CALLER}-{flags}", "tracestate": "vendor=1"}


def test_an_append_goes_on_with_its_callers_trace(call: Caller, collector: Collector) -> None:
    call("PUT", "orders/eu", headers={"Content-Type": "application/json"})
    for _ in range(20):  # the head of some is known by then, and goes the short way
        call("POST", "orders/eu", [1])
    sent = call("POST", "orders/eu", [1], headers={**traced(TRACE), "X-Request-Id": "mine"})
    assert sent.status == 204
    assert sent.headers["x-request-id"] == "mine"
    (seen,) = collector.wait_for("POST /v1/stream/{name}")
    span = seen.span
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert (span.kind, span.trace_state) == (Span.SPAN_KIND_SERVER, "vendor=1")
    assert seen.attributes["http.response.status_code"] == 204
    assert seen.attributes["url.path"] == "/v1/stream/orders/eu"
    assert seen.attributes["tailrace.request_id"] == "mine"
    assert seen.resource["service.name"] == "tailrace"
    (commit,) = collector.wait_for("commit")
    assert (commit.span.trace_id, commit.span.parent_span_id) == (span.trace_id, span.span_id)
    assert commit.attributes["tailrace.records"] >= 1
    assert commit.span.start_time_unix_nano <= commit.span.end_time_unix_nano <= span.end_time_unix_nano


def test_reads_and_refusals_are_traced_and_commit_nothing(call: Caller, collector: Collector) -> None:
    trace = "1" * 32
    assert call("GET", "missing", headers=traced(trace)).status == 404
    (seen,) = eventually(
        lambda: [one for one in collector.received() if one.span.trace_id.hex() == trace], bool
    )
    assert seen.name == "GET /v1/stream/{name}"
    assert seen.attributes["http.response.status_code"] == 404


def test_a_caller_that_does_not_sample_is_not_traced(call: Caller, collector: Collector) -> None:
    call("GET", "missing", headers=traced("2" * 32, "00"))
    call("GET", "missing")
    call("GET", "missing", headers=traced("3" * 32))
    eventually(lambda: {one.span.trace_id.hex() for one in collector.received()}, lambda ids: "3" * 32 in ids)
    assert "2" * 32 not in {one.span.trace_id.hex() for one in collector.received()}


def test_seals_are_traces_of_their_own(call: Caller, collector: Collector) -> None:
    call("PUT", "history", [1, 2, 3])
    assert call("POST", "/v1/server/_seal?stream=history").status == 200
    seen = eventually(
        lambda: [one for one in collector.received() if one.attributes.get("tailrace.stream") == "history"],
        bool,
    )
    assert [one.name for one in seen] == ["seal"]
    assert seen[0].attributes["tailrace.segments"] == 1


def test_runs_of_the_pipeline_are_followed_by_its_heartbeats(call: Caller, collector: Collector) -> None:
    running = [{"job": "companions", "stream": "history", "segments": 4, "since": "2026-01-01T00:00:00.000Z"}]
    call("POST", "/v1/pipeline/heartbeat", {"state": "running", "running": running})
    call("POST", "/v1/pipeline/heartbeat", {"state": "running", "running": running})
    call("POST", "/v1/pipeline/heartbeat", {"state": "idle", "running": []})
    (seen,) = collector.wait_for("pipeline")
    assert seen.attributes == {
        "tailrace.job": "companions",
        "tailrace.stream": "history",
        "tailrace.segments": 4,
    }


def test_webhooks_pass_a_trace_on(call: Caller, collector: Collector) -> None:
    hook = Hook()
    try:
        config = {"type": "webhook", "pattern": "woken/*", "webhook": {"url": hook.url}}
        assert call("PUT", "__ds/subscriptions/tracer", config).status == 201
        call("PUT", "woken/a", [1])
        passed_on = hook.next().headers["traceparent"]
    finally:
        hook.close()
    (seen,) = collector.wait_for("webhook")
    assert passed_on == f"00-{seen.span.trace_id.hex()}-{seen.span.span_id.hex()}-01"
    assert seen.attributes["tailrace.subscription"] == "tracer"


def test_spans_are_counted(call: Caller, collector: Collector) -> None:
    def exported() -> float:
        text = call("GET", "/metrics").raw.decode()
        (line,) = [line for line in text.splitlines() if line.startswith("tailrace_trace_spans_total{")][:1]
        return float(line.rpartition(" ")[2])

    assert 'tailrace_trace_spans_total{outcome="dropped"} 0.0' in call("GET", "/metrics").raw.decode()
    call("GET", "missing", headers=traced("4" * 32))
    eventually(exported, lambda count: count > 0)


def test_one_in_so_many_begins_a_trace_and_a_dead_collector_stops_nobody(tmp_path: Path) -> None:
    args = ["--traces-url", "http://127.0.0.1:9", "--traces-one-in", "2"]
    server = ServerProcess(tmp_path / "data", args=args).start()
    call = Caller(server)
    call("PUT", "a", headers={"Content-Type": "application/json"})
    assert [call("POST", "a", [1]).status for _ in range(20)] == [204] * 20
    server.stop()
    assert "cannot export spans" in server.log
