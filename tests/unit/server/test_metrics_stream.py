"""`__stream_metrics__`: records are bounded, an idle node is quiet, and failures stay with the metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import orjson
import pytest

from support.log_harness import LogHarness
from support.log_model import Append, Lifetime
from tailrace.common.errors import TailraceError
from tailrace.common.limits import DAY_MS, Limits
from tailrace.log.publish import StreamTraffic, TrafficCounts
from tailrace.log.system_streams import METRICS_STREAM
from tailrace.schema.profiles.metrics import normalise_metric
from tailrace.server.metrics_stream import (
    DROPPED_SERIES,
    OTHER_STREAMS,
    MetricInterval,
    MetricSource,
    MetricsWriter,
    SeriesRecorder,
    TimingSource,
)
from tailrace.storage.retention_rules import has_bounds

FLUSH_MS = 10_000


def share(entries: int, size_bytes: int) -> StreamTraffic:
    found = StreamTraffic()
    found.entries, found.bytes = entries, size_bytes
    return found


def book(
    *sources: MetricSource, series_max: int = 2000, timings: Sequence[TimingSource] = ()
) -> SeriesRecorder:
    return SeriesRecorder(list(sources), list(timings), "node", series_max)


def test_x1_many_streams_are_few_series() -> None:
    shares = {f"stream-{number}": share(1, number) for number in range(100_000)}
    records = book().records(MetricInterval(0, FLUSH_MS), shares, share(7, 70))
    assert len(records) == 2 * 51
    streams = {record["stream"] for record in records}
    assert OTHER_STREAMS in streams
    assert "stream-99999" in streams
    written = sum(int(str(record["sum"])) for record in records if record["unit"] == "count")
    assert written == 100_007, "what has no series of its own is in the one of all others"
    assert all(normalise_metric(record) == record for record in records)


def test_x1_no_interval_has_more_than_the_limit() -> None:
    shares = {f"stream-{number}": share(1, number) for number in range(1000)}
    counting = book(series_max=20)
    records = counting.records(MetricInterval(0, FLUSH_MS), shares, StreamTraffic())
    assert len(records) == 20
    assert (records[-1]["metric"], records[-1]["sum"]) == (DROPPED_SERIES, 2 * 51 - 19)
    assert counting.dropped == 2 * 51 - 19


def test_a_million_streams_are_counted_in_little_memory(harness: LogHarness) -> None:
    traffic = TrafficCounts(streams_max=3)
    for number in range(10):
        harness.create(f"s{number}", "text/plain", Lifetime(), Append([], None), None)
        traffic.add(harness.log.existing(f"s{number}"), 1, 10)
    traffic.add(harness.log.existing("__registry__"), 1, 1)
    shares, others = traffic.drain()
    assert (len(shares), others.entries, others.bytes) == (3, 7, 70)
    assert traffic.drain()[0] == {}


def test_an_idle_node_writes_little() -> None:
    values = [float(number) for number in range(40)]
    sources = [
        MetricSource(f"m{n}", "bytes", "gauge" if n % 2 else "counter", values[n].__float__)
        for n in range(40)
    ]
    idle, size = book(*sources), 0
    for end_ms in range(FLUSH_MS, DAY_MS + 1, FLUSH_MS):
        for record in idle.records(MetricInterval(end_ms - FLUSH_MS, end_ms), {}, StreamTraffic()):
            size += len(orjson.dumps(record)) + 1
    assert 0 < size < 20_000_000


def test_timings_are_told_by_what_was_new() -> None:
    spent = [(5, 2.0)]
    timings = [
        TimingSource("own", lambda: spent[-1], self_caused=True),
        TimingSource("calls", lambda: spent[-1]),
    ]
    timed = book(timings=timings)
    window = MetricInterval(0, FLUSH_MS)
    assert timed.records(window, {}, StreamTraffic()) == []
    spent.append((7, 2.5))
    (record,) = timed.records(window, {}, StreamTraffic())
    assert (record["metric"], record["unit"], record["count"], record["sum"]) == ("calls", "ms", 2, 500)
    spent.append((8, 3.0))
    records = timed.records(window, {"s": share(1, 1)}, StreamTraffic())
    assert [record["metric"] for record in records][:2] == ["own", "calls"]


def test_gauges_are_told_when_they_change_and_counters_by_growth() -> None:
    now = {"gauge": 5.0, "counter": 100.0}
    told = book(
        MetricSource("g", "bytes", "gauge", lambda: now["gauge"], {"gate": "ingest"}),
        MetricSource("c", "count", "counter", lambda: now["counter"]),
    )

    def at(end_ms: int) -> dict[object, object]:
        records = told.records(MetricInterval(end_ms - FLUSH_MS, end_ms), {}, StreamTraffic())
        return {record["metric"]: record["sum"] for record in records if record["stream"] is None}

    start_ms = 1_767_225_600_000
    assert at(start_ms) == {"g": 5, "c": 0}
    assert at(start_ms + 10_000) == {}
    now["counter"] = 103
    assert at(start_ms + 20_000) == {"c": 3}
    now["gauge"] = 6
    assert at(start_ms + 30_000) == {"g": 6}
    assert at(start_ms + 320_000) == {"c": 0}
    assert at(start_ms + 330_000) == {"g": 6}


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits(metrics_flush_ms=FLUSH_MS))
    yield harness
    harness.close()


def started(harness: LogHarness, *sources: MetricSource) -> MetricsWriter:
    log = harness.log
    writer = harness.call(MetricsWriter, log, harness.clock, harness.loop, book(*sources))
    harness.call(writer.start)
    return writer


def entries(harness: LogHarness) -> list[dict[str, object]]:
    harness.settle()
    page = harness.run(harness.log.reader.read(harness.log.readable(METRICS_STREAM), 0, 1 << 20, 1000))
    return orjson.loads(b"[" + b",".join(bytes(part) for part in page.parts) + b"]")


def test_flushes_are_canonical_records_on_a_stream_of_the_server(harness: LogHarness) -> None:
    writer = started(harness)
    harness.create("s", "text/plain", Lifetime(), Append([b"abcde"], "text/plain"), None)
    harness.settle()
    assert harness.log.readable(METRICS_STREAM).visible == 0, "there from the start, and empty"
    harness.clock.advance(10)
    harness.call(writer.flush)
    records = entries(harness)
    assert [(record["metric"], record["stream"], record["sum"]) for record in records] == [
        ("tieredstore.append.bytes", "s", 5),
        ("tieredstore.append.entries", "s", 1),
        ("tieredstore.read.bytes", OTHER_STREAMS, 0),
        ("tieredstore.read.entries", OTHER_STREAMS, 0),
    ]
    assert all(normalise_metric(record) == record for record in records)
    assert records[0]["windowEnd"] == int(str(records[0]["windowStart"])) + FLUSH_MS
    stream = harness.log.readable(METRICS_STREAM)
    assert stream.lifetime.retention_s == 7 * 86_400
    assert has_bounds(stream.lifetime)
    assert stream.visible_documents is not None
    assert stream.visible_documents.keys() == {"schema", "profile"}
    harness.clock.advance(10)
    harness.call(writer.flush)
    assert entries(harness) == records, "its own records are not worth a record"
    harness.call(writer.stop)


def fails() -> float:
    raise ValueError("a source that cannot be read")


@pytest.mark.parametrize("read", [fails, lambda: 1.0])
def test_x3_what_goes_wrong_stays_here(harness: LogHarness, read: Callable[[], float]) -> None:
    writer = started(harness, MetricSource("m", "bytes", "gauge", read))
    if read is not fails:
        harness.log.set_shortage("disk", TailraceError("insufficient_storage", "full"))
    harness.call(writer.flush)
    assert writer.failures == 1
    harness.log.set_shortage("disk", None)
    pending = harness.create("s", "text/plain", Lifetime(), Append([b"x"], "text/plain"), None)
    harness.settle()
    assert pending.code is None
    harness.call(writer.stop)
