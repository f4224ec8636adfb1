"""The series that every server has, and where their values come from."""

from __future__ import annotations

import os
from functools import partial

from tailrace.common.metrics import Histogram
from tailrace.common.server_metrics import ServerMetrics
from tailrace.log.history import HISTORY_THREADS
from tailrace.server.memory import Node
from tailrace.server.series import SeriesBook, Source, Timing

MIB = 1 << 20
CALLS = ("put", "get", "head", "delete", "list")


def series_book(node: Node) -> SeriesBook:
    limits, telemetry = node.context.limits, node.context.telemetry
    timings = [
        Timing("tieredstore.ingest.flush.latency", partial(_syncs, telemetry.sync_seconds), own=True),
        *(Timing(f"tieredstore.objectstore.{kind}.latency", partial(_calls, node, kind)) for kind in CALLS),
        Timing("tailrace.search.latency", lambda: (node.search.counts.searches, node.search.counts.seconds)),
    ]
    sources = [*_ingest(node), *_process(node), *_objects(node), *_concurrency(node)]
    sources += [*_queries(node), *_indexes(telemetry), *_touch(node)]
    instance = node.context.deployment + node.context.log.own_suffix
    return SeriesBook(sources, timings, instance, limits.metrics_max_series)


def _syncs(distribution: Histogram) -> tuple[int, float]:
    return sum(distribution.counts), distribution.total


def _calls(node: Node, kind: str) -> tuple[int, float]:
    """To the object store: the sealer's and those of readers."""
    books = [node.sealing.book, *(parts.book for parts in node.readers)]
    timings = [book.timing(kind) for book in books]
    return sum(timing.calls for timing in timings), sum(timing.seconds for timing in timings)


def _ingest(node: Node) -> list[Source]:
    log, limits, pressure = node.context.log, node.context.limits, node.sealing.pressure
    committer = log.committer
    return [
        Source("tieredstore.ingest.queue.bytes", "bytes", "gauge", lambda: committer.queued_bytes),
        Source("tieredstore.ingest.queue.requests", "count", "gauge", lambda: committer.queued_records),
        Source(
            "tieredstore.ingest.queue.limit.bytes", "bytes", "gauge", lambda: limits.append_queue_max_bytes
        ),
        Source("tieredstore.ingest.failures", "count", "counter", lambda: log.failures),
        Source(
            "tieredstore.backpressure.current.bytes",
            "bytes",
            "gauge",
            lambda: _rounded(pressure.waiting_bytes),
        ),
        Source("tieredstore.backpressure.limit.bytes", "bytes", "gauge", lambda: limits.spool_bytes),
        Source("tieredstore.backpressure.over_limit", "count", "gauge", lambda: int(pressure.refusing)),
    ]


def _rounded(size_bytes: int) -> int:
    """To whole MiB: what trembles by some pages is no news."""
    return -(-size_bytes // MIB) * MIB


def _process(node: Node) -> list[Source]:
    memory = node.memory
    return [
        Source("process.rss.bytes", "bytes", "gauge", lambda: _rounded(memory.rss_bytes)),
        Source("process.rss.max.bytes", "bytes", "gauge", lambda: _rounded(memory.max_rss_bytes)),
        Source("process.memory.pressure", "count", "gauge", lambda: int(memory.active)),
        Source("process.cpu.seconds", "seconds", "counter", lambda: round(sum(os.times()[:2]))),
        Source("process.connections.live", "count", "gauge", lambda: node.live.connections),
    ]


def _objects(node: Node) -> list[Source]:
    sealing = node.sealing
    return [
        Source("tieredstore.upload.segments", "count", "counter", lambda: sealing.runs.segments),
        Source("tieredstore.upload.bytes", "bytes", "counter", lambda: sealing.runs.segment_bytes),
        Source("tieredstore.upload.failures", "count", "counter", lambda: sealing.standing.failures),
        Source("tieredstore.upload.pending_streams", "count", "gauge", lambda: sealing.queued),
    ]


def _concurrency(node: Node) -> list[Source]:
    committer, history = node.context.log.committer, node.context.log.reader.history
    ingest, read = {"gate": "ingest"}, {"gate": "read"}
    return [
        Source("tieredstore.concurrency.active", "count", "gauge", lambda: committer.in_flight, ingest),
        Source("tieredstore.concurrency.limit", "count", "gauge", lambda: committer.syncs_allowed, ingest),
        Source("tieredstore.concurrency.active", "count", "gauge", lambda: history.fetching, read),
        Source("tieredstore.concurrency.limit", "count", "gauge", lambda: HISTORY_THREADS, read),
    ]


def _queries(node: Node) -> list[Source]:
    gate, tail, counts = node.search.gate, node.search.tail, node.search.counts
    search = {"gate": "search"}
    return [
        Source("tieredstore.concurrency.active", "count", "gauge", lambda: gate.running, search),
        Source("tieredstore.concurrency.queued", "count", "gauge", lambda: gate.waiting, search),
        Source("tieredstore.concurrency.limit", "count", "gauge", lambda: gate.running_max, search),
        Source("tailrace.tail_index.bytes", "bytes", "gauge", lambda: _rounded(tail.bytes)),
        Source("tailrace.tail_index.rows", "count", "gauge", lambda: tail.rows),
        Source("tailrace.tail_index.dropped_rows", "count", "gauge", lambda: tail.dropped_rows),
        Source("tailrace.search.timeouts", "count", "counter", lambda: counts.timeouts),
        Source("tailrace.search.incomplete", "count", "counter", lambda: counts.incomplete),
    ]


def _indexes(telemetry: ServerMetrics) -> list[Source]:
    """What the pipeline has to do and how it is."""
    return [
        Source(
            "tieredstore.index.lag.segments", "count", "gauge", telemetry.pipeline_backlog_segments.current
        ),
        Source(
            "tieredstore.index.quarantined.segments",
            "count",
            "gauge",
            telemetry.pipeline_quarantined_segments.current,
        ),
        Source("tieredstore.index.restarts", "count", "counter", telemetry.pipeline_restarts.current),
    ]


def _touch(node: Node) -> list[Source]:
    touch = node.touch
    return [
        Source("tailrace.touch.waiters", "count", "gauge", lambda: touch.waiters),
        Source("tailrace.touch.wakeups", "count", "counter", lambda: touch.wakeups),
        Source("tailrace.touch.stale", "count", "counter", lambda: touch.stales),
    ]
