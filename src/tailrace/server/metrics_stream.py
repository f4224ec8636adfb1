"""The system stream `__stream_metrics__`: series, their sources, and the writer.

Each interval is one append. The number of series is bounded, and a series without changes is recorded only
every few minutes, so an idle server writes hardly anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from heapq import nlargest
from itertools import chain
from typing import Literal, NamedTuple

import orjson

from tailrace.common.clock import Clock
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.metrics import Histogram
from tailrace.common.server_metrics import ServerMetrics
from tailrace.log.decide import AppendRequest, CreateRequest
from tailrace.log.history import HISTORY_THREADS
from tailrace.log.log import Log
from tailrace.log.model import NO_LIFETIME, Lifetime, Stream
from tailrace.log.publish import StreamTraffic, TrafficCounts
from tailrace.log.system_streams import METRICS_STREAM
from tailrace.log.transaction import ignore_reply
from tailrace.schema.profiles.canonical_registries import METRICS_SCHEMA_REGISTRY
from tailrace.schema.profiles.metrics import Record, normalise_metric
from tailrace.schema.profiles.profile import API_VERSION
from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.server.server_details import ServerParts

QUIET_MS_MAX = 300_000  # an unchanged value is recorded again after this time
BUSIEST_STREAMS = 50  # streams that have series of their own
OTHER_STREAMS = "__other__"
DROPPED_SERIES = "tailrace.metrics.series_dropped"
NO_TAGS: Mapping[str, str] = {}
NO_TRAFFIC: tuple[Mapping[str, StreamTraffic], StreamTraffic] = ({}, StreamTraffic())


class MetricSource(NamedTuple):
    """A series that always exists. Counters are recorded as increments, gauges as values."""

    metric: str
    unit: str
    kind: Literal["counter", "gauge"]
    read: Callable[[], float]
    tags: Mapping[str, str] = NO_TAGS


class TimingSource(NamedTuple):
    """A series of a count and a total duration, recorded in milliseconds."""

    metric: str
    read: Callable[[], tuple[int, float]]
    self_caused: bool = False  # also caused by writing the metrics, which alone gives no record


class MetricInterval(NamedTuple):
    start_ms: int
    end_ms: int


class SeriesRecorder:
    """Makes the records of an interval from the values of the sources and those recorded before."""

    def __init__(
        self, sources: list[MetricSource], timings: list[TimingSource], instance: str, series_max: int
    ) -> None:
        self._sources = sources
        self._timings = timings
        self._instance = instance
        self._series_max = series_max
        self._last: dict[int, float] = {}  # by index in `sources`
        self._recorded_ms: dict[int | str, int] = {}  # by index in `sources`, or by name of the series
        self._timed_so_far = [timing.read() for timing in timings]
        self.dropped = 0

    def records(
        self,
        window: MetricInterval,
        shares: Mapping[str, StreamTraffic],
        others: StreamTraffic,
        served: tuple[Mapping[str, StreamTraffic], StreamTraffic] = NO_TRAFFIC,
    ) -> list[Record]:
        """Canonical records of one interval, at most `series_max`.

        `shares` and `others` are the appends, `served` the reads.
        """
        found: list[Record] = []
        dropped = 0
        for record in chain(
            self._server_records(window, shares, others),
            self._traffic_records(window, "append", shares, others),
            self._traffic_records(window, "read", *served),
        ):
            if len(found) < self._series_max - 1:
                found.append(record)
            else:
                dropped += 1
        self.dropped += dropped
        if dropped:
            found.append(self._record(window, DROPPED_SERIES, "count", 1, dropped, dropped))
        return found

    def _server_records(
        self, window: MetricInterval, shares: Mapping[str, StreamTraffic], others: StreamTraffic
    ) -> Iterator[Record]:
        for index, source in enumerate(self._sources):
            record = self._source_record(window, index, source)
            if record is not None:
                yield record
        busy = bool(shares or others.entries)
        for index, timing in enumerate(self._timings):
            record = self._timing_record(window, index, timing, relevant=busy or not timing.self_caused)
            if record is not None:
                yield record

    def _source_record(self, window: MetricInterval, index: int, source: MetricSource) -> Record | None:
        value = source.read()
        last = self._last.get(index)
        self._last[index] = value
        # The value of a counter at the first interval is no increment.
        value_recorded = value if source.kind == "gauge" else value - (value if last is None else last)
        changed = value != last if source.kind == "gauge" else value_recorded != 0
        if not self._is_due(window, index, changed=changed):
            return None
        count = 1 if source.kind == "gauge" or value_recorded else 0
        return self._record(
            window, source.metric, source.unit, count, value_recorded, value_recorded, tags=source.tags
        )

    def _is_due(self, window: MetricInterval, series: int | str, *, changed: bool) -> bool:
        """Whether a series gets a record: when it changed, or after QUIET_MS_MAX."""
        if not changed and window.end_ms - self._recorded_ms.get(series, 0) < QUIET_MS_MAX:
            return False
        self._recorded_ms[series] = window.end_ms
        return True

    def _timing_record(
        self, window: MetricInterval, index: int, timing: TimingSource, *, relevant: bool
    ) -> Record | None:
        count, seconds = timing.read()
        count_was, seconds_was = self._timed_so_far[index]
        self._timed_so_far[index] = (count, seconds)
        if not self._is_due(window, timing.metric, changed=relevant and count != count_was):
            return None
        spent_ms = round((seconds - seconds_was) * 1000, 3)
        return self._record(window, timing.metric, "ms", count - count_was, spent_ms, None)

    def _traffic_records(
        self, window: MetricInterval, what: str, shares: Mapping[str, StreamTraffic], others: StreamTraffic
    ) -> Iterator[Record]:
        busiest = dict(nlargest(BUSIEST_STREAMS, shares.items(), key=lambda item: (item[1].bytes, item[0])))
        rest = StreamTraffic()
        for share in (others, *(share for name, share in shares.items() if name not in busiest)):
            rest.entries += share.entries
            rest.bytes += share.bytes
        due = self._is_due(window, what, changed=bool(busiest or rest.entries))
        if rest.entries or (due and not busiest):
            busiest[OTHER_STREAMS] = rest
        for name, share in busiest.items():
            for metric, unit, total in (
                (f"tieredstore.{what}.bytes", "bytes", share.bytes),
                (f"tieredstore.{what}.entries", "count", share.entries),
            ):
                yield self._record(window, metric, unit, share.entries, total, None, stream=name)

    def _record(
        self,
        window: MetricInterval,
        metric: str,
        unit: str,
        count: int,
        total: float,
        extreme: float | None,
        *,
        tags: Mapping[str, str] = NO_TAGS,
        stream: str | None = None,
    ) -> Record:
        given: Record = {
            "metric": metric,
            "unit": unit,
            "windowStart": window.start_ms,
            "windowEnd": window.end_ms,
            "instance": self._instance,
            "stream": stream,
            "tags": dict(tags),
            "count": count,
            "sum": total,
            "min": extreme,
            "max": extreme,
        }
        return normalise_metric(given)


MIB = 1 << 20
OBJECT_STORE_CALLS = ("put", "get", "head", "delete", "list")


def build_series_recorder(node: ServerParts) -> SeriesRecorder:
    limits, telemetry = node.context.limits, node.context.telemetry
    timings = [
        TimingSource(
            "tieredstore.ingest.flush.latency",
            partial(_sync_timing, telemetry.sync_seconds),
            self_caused=True,
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
    """Requests of the sealer and of the readers to the object store."""
    books = [node.sealing.request_stats, *(parts.book for parts in node.readers)]
    timings = [recorder.timing(kind) for recorder in books]
    return sum(timing.calls for timing in timings), sum(timing.seconds for timing in timings)


def _ingest_sources(node: ServerParts) -> list[MetricSource]:
    log, limits, pressure = node.context.log, node.context.limits, node.sealing.backlog
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
    """Round to whole MiB, so that small changes give no record."""
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
        MetricSource("tieredstore.upload.segments", "count", "counter", lambda: sealing.dispatcher.segments),
        MetricSource(
            "tieredstore.upload.bytes", "bytes", "counter", lambda: sealing.dispatcher.segment_bytes
        ),
        MetricSource("tieredstore.upload.failures", "count", "counter", lambda: sealing.health.failures),
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
    """Backlog and state of the pipeline."""
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


logger = logging.getLogger("tailrace.metrics")

JSON_CONTENT_TYPE = "application/json"
METRICS_PROFILE = orjson.dumps({"apiVersion": API_VERSION, "profile": {"kind": "metrics"}})


class MetricsWriter:
    """Writes the stream, which exists from the start so that it can be followed at once."""

    def __init__(
        self, log: Log, clock: Clock, loop: asyncio.AbstractEventLoop, recorder: SeriesRecorder
    ) -> None:
        self._log = log
        self._clock = clock
        self._loop = loop
        self._recorder = recorder
        self._flush_s = log.limits.metrics_flush_ms / 1000
        self._since_ms = self._now_ms()
        self._timer: asyncio.TimerHandle | None = None
        self.failures = 0

    def start(self) -> None:
        if self._flush_s:
            self._log.publisher.traffic = TrafficCounts()
            self._log.reader.served = TrafficCounts()
            self._try(self.stream)
            self._timer = self._loop.call_later(self._flush_s, self._due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        self._timer = self._loop.call_later(self._flush_s, self._due)
        self.flush()

    def flush(self) -> None:
        """Write the records since the last flush. Errors are counted, and the first one is logged."""
        self._try(self._flush)

    def _try(self, write: Callable[[], object]) -> None:
        """Count an error instead of raising it; the next flush retries."""
        try:
            write()
        except Exception as error:  # noqa: BLE001 - logged
            self._count_failure(error)

    def _count_failure(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            known = isinstance(error, TailraceError)
            logger.warning(
                "cannot write metrics stream, retrying",
                extra=log_fields(error=str(error)),
                exc_info=None if known else error,
            )

    def _flush(self) -> None:
        traffic, served = self._log.publisher.traffic, self._log.reader.served
        if traffic is None or served is None:
            return
        window = MetricInterval(self._since_ms, self._now_ms())
        self._since_ms = window.end_ms
        records = self._recorder.records(window, *traffic.drain(), served.drain())
        if not records:
            return
        entries = [orjson.dumps(record) for record in records]
        request = AppendRequest(b",".join(entries), JSON_CONTENT_TYPE, [len(entry) for entry in entries])
        self._log.backpressure_queue.call(partial(self._append, request), self._count_failure)

    def _append(self, request: AppendRequest) -> None:
        self._log.append(self.stream(), request, ignore_reply, None)
        self.failures = 0

    def stream(self) -> Stream:
        """The stream; created with its schema and profile if it does not exist."""
        name = METRICS_STREAM + self._log.own_suffix
        stream = self._log.find(name)
        if stream is None:
            self._log.create(CreateRequest(name, JSON_CONTENT_TYPE), ignore_reply, None)
            stream = self._log.existing(name)
            registry = Registry(
                name=name,
                version=1,
                boundaries=(VersionBoundary(0, 1),),
                schemas={1: METRICS_SCHEMA_REGISTRY["schema"]},
            )
            self._log.describe(stream, "schema", registry.to_json())
            self._log.describe(stream, "profile", METRICS_PROFILE)
        # The retention is a setting, which may have changed since the last start.
        retention_ms = self._log.limits.metrics_retention
        lifetime = Lifetime(retention_s=-(-retention_ms // 1000)) if retention_ms else NO_LIFETIME
        if stream.lifetime != lifetime:
            stream.lifetime = lifetime
        return stream

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000
