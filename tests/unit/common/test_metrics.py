"""Metrics: plain numbers in, Prometheus text out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tailrace.common.metrics import LATENCY_BUCKETS_S, Histogram
from tailrace.common.server_metrics import SERVER_METRICS, ServerMetrics


def _samples(telemetry: ServerMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(telemetry.render().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_counters_and_gauges_show_what_they_hold() -> None:
    telemetry = ServerMetrics("9.9")
    telemetry.append_entries.value += 3
    telemetry.requests.add("POST", 204)
    telemetry.requests.add("POST", 204)
    telemetry.streams.read = lambda: 7
    telemetry.live_connections.reads[("sse",)] = lambda: 2
    samples = _samples(telemetry)
    assert samples["tailrace_append_entries_total", ()] == 3
    assert samples["tailrace_requests_total", (("method", "POST"), ("status", "204"))] == 2
    assert samples["tailrace_streams", ()] == 7
    assert samples["tailrace_live_connections", (("mode", "sse"),)] == 2
    assert samples["tailrace_info", (("version", "9.9"),)] == 1


def test_a_commit_is_seen_in_both_histograms() -> None:
    telemetry = ServerMetrics()
    telemetry.observe_sync(0.0003, 5)
    samples = _samples(telemetry)
    assert samples["tailrace_sync_seconds_count", ()] == 1
    assert samples["tailrace_sync_seconds_sum", ()] == pytest.approx(0.0003)
    assert samples["tailrace_commit_records_bucket", (("le", "4.0"),)] == 0
    assert samples["tailrace_commit_records_bucket", (("le", "8.0"),)] == 1


@given(st.lists(st.floats(min_value=0, max_value=10)))
def test_buckets_are_cumulative_and_hold_every_observation(values: list[float]) -> None:
    distribution = Histogram(LATENCY_BUCKETS_S)
    for value in values:
        distribution.observe(value)
    rows = distribution.cumulative()
    for bound, count in rows:
        assert count == sum(value <= float(bound) for value in values)
    assert rows[-1] == ("+Inf", len(values))


def test_every_row_is_exposed_even_before_anything_happened() -> None:
    text = ServerMetrics().render().decode()
    assert [
        metric.exposed for metric in SERVER_METRICS.values() if f"# TYPE {metric.exposed} " not in text
    ] == []
