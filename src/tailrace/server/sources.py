"""The series that every server has, and where their values come from."""

from __future__ import annotations

import os
from functools import partial

from tailrace.common.metrics import Histogram
from tailrace.common.server_metrics import ServerMetrics
from tailrace.log.history import HISTORY_THREADS
from tailrace.server.memory import ServerParts
from tailrace.server.series import MetricSource, SeriesRecorder, TimingSource

MIB = 1 << 20
OBJECT_STORE_CALLS = ("put", "get", "head", "delete", "list")


def build_series_recorder(node: ServerParts) -> SeriesRecorder:
    limits, telemetry = node.context.limits, node.context.telemetry
    timings = [
        TimingSource(
            "tieredstore.ingest.flush.latency", partial(_sync_timing, telemetry.sync_seconds), own=True
        ),
        *(
            TimingSource(f"tieredstore.objectstore.{kind}.latency", partial(_object_store_calls, node, kind))
            for kind in OBJECT_STORE_CALLS
        ),
        TimingSource(
            "tailrace.search.latency", lambda: (node.search.counts.searches, node.search.counts.seconds)
        ),
    ]
    sources = [
        *_ingest_sources(node),
        *_process_sources(node),
        *_object_store_sources(node),
        *_concurrency_sources(node),
    ]
    sources += [*_query_sources(node), *_index_sources(telemetry), *_touch_sources(node)]
    instance = node.context.deployment + node.context.log.own_suffix
    return SeriesRecorder(sources, timings, instance, limits.metrics_max_series)


def _sync_timing(distribution: Histogram) -> tuple[int, float]:
    return sum(distribution.counts), distribution.total


def _object_store_calls(node: ServerParts, kind: str) -> tuple[int, float]:
    """To the object store: the sealer's and those of readers."""
    books = [node.sealing.book, *(parts.book for parts in node.readers)]
    timings = [book.timing(kind) for book in books]
    return sum(timing.calls for timing in timings), sum(timing.seconds for timing in timings)


def _ingest_sources(node: ServerParts) -> list[MetricSource]:
    log, limits, pressure = node.context.log, node.context.limits, node.sealing.pressure
    committer = log.committer
    return [
        MetricSource("tieredstore.ingest.queue.bytes", "bytes", "gauge", lambda: committer.queued_bytes),
        MetricSource("tieredstore.ingest.queue.requests", "count", "gauge", lambda: committer.queued_records),
        MetricSource(
            "tieredstore.ingest.queue.limit.bytes", "bytes", "gauge", lambda: limits.append_queue_max_bytes
        ),
        MetricSource("tieredstore.ingest.failures", "count", "counter", lambda: log.failures),
        MetricSource(
            "tieredstore.backpressure.current.bytes",
            "bytes",
            "gauge",
            lambda: _round_to_mib(pressure.waiting_bytes),
        ),
        MetricSource("tieredstore.backpressure.limit.bytes", "bytes", "gauge", lambda: limits.spool_bytes),
        MetricSource("tieredstore.backpressure.over_limit", "count", "gauge", lambda: int(pressure.refusing)),
    ]


def _round_to_mib(size_bytes: int) -> int:
    """To whole MiB: what trembles by some pages is no news."""
    return -(-size_bytes // MIB) * MIB


def _process_sources(node: ServerParts) -> list[MetricSource]:
    memory = node.memory
    return [
        MetricSource("process.rss.bytes", "bytes", "gauge", lambda: _round_to_mib(memory.rss_bytes)),
        MetricSource("process.rss.max.bytes", "bytes", "gauge", lambda: _round_to_mib(memory.max_rss_bytes)),
        MetricSource("process.memory.pressure", "count", "gauge", lambda: int(memory.active)),
        MetricSource("process.cpu.seconds", "seconds", "counter", lambda: round(sum(os.times()[:2]))),
        MetricSource("process.connections.live", "count", "gauge", lambda: node.live.connections),
    ]


def _object_store_sources(node: ServerParts) -> list[MetricSource]:
    sealing = node.sealing
    return [
        MetricSource("tieredstore.upload.segments", "count", "counter", lambda: sealing.runs.segments),
        MetricSource("tieredstore.upload.bytes", "bytes", "counter", lambda: sealing.runs.segment_bytes),
        MetricSource("tieredstore.upload.failures", "count", "counter", lambda: sealing.standing.failures),
        MetricSource("tieredstore.upload.pending_streams", "count", "gauge", lambda: sealing.queued),
    ]


def _concurrency_sources(node: ServerParts) -> list[MetricSource]:
    committer, history = node.context.log.committer, node.context.log.reader.history
    ingest, read = {"gate": "ingest"}, {"gate": "read"}
    return [
        MetricSource("tieredstore.concurrency.active", "count", "gauge", lambda: committer.in_flight, ingest),
        MetricSource(
            "tieredstore.concurrency.limit", "count", "gauge", lambda: committer.syncs_allowed, ingest
        ),
        MetricSource("tieredstore.concurrency.active", "count", "gauge", lambda: history.fetching, read),
        MetricSource("tieredstore.concurrency.limit", "count", "gauge", lambda: HISTORY_THREADS, read),
    ]


def _query_sources(node: ServerParts) -> list[MetricSource]:
    gate, tail, counts = node.search.gate, node.search.tail, node.search.counts
    search = {"gate": "search"}
    return [
        MetricSource("tieredstore.concurrency.active", "count", "gauge", lambda: gate.running, search),
        MetricSource("tieredstore.concurrency.queued", "count", "gauge", lambda: gate.waiting, search),
        MetricSource("tieredstore.concurrency.limit", "count", "gauge", lambda: gate.running_max, search),
        MetricSource("tailrace.tail_index.bytes", "bytes", "gauge", lambda: _round_to_mib(tail.bytes)),
        MetricSource("tailrace.tail_index.rows", "count", "gauge", lambda: tail.rows),
        MetricSource("tailrace.tail_index.dropped_rows", "count", "gauge", lambda: tail.dropped_rows),
        MetricSource("tailrace.search.timeouts", "count", "counter", lambda: counts.timeouts),
        MetricSource("tailrace.search.incomplete", "count", "counter", lambda: counts.incomplete),
    ]


def _index_sources(telemetry: ServerMetrics) -> list[MetricSource]:
    """What the pipeline has to do and how it is."""
    return [
        MetricSource(
            "tieredstore.index.lag.segments", "count", "gauge", telemetry.pipeline_backlog_segments.current
        ),
        MetricSource(
            "tieredstore.index.quarantined.segments",
            "count",
            "gauge",
            telemetry.pipeline_quarantined_segments.current,
        ),
        MetricSource("tieredstore.index.restarts", "count", "counter", telemetry.pipeline_restarts.current),
    ]


def _touch_sources(node: ServerParts) -> list[MetricSource]:
    touch = node.touch
    return [
        MetricSource("tailrace.touch.waiters", "count", "gauge", lambda: touch.waiters),
        MetricSource("tailrace.touch.wakeups", "count", "counter", lambda: touch.wakeups),
        MetricSource("tailrace.touch.stale", "count", "counter", lambda: touch.stales),
    ]
