"""Metrics of documents and live queries, read on scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from tailrace.common.server_metrics import ServerMetrics
from tailrace.watch.collection import NATIVE, Collection, MetricLabels
from tailrace.watch.maintenance import Maintenance
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.sources.ingest import CHANGE_OPS

STATES: Final = ("live", "loading", "lagging", "stale")


MetricRow = tuple[list[str], float]


def register_metrics(
    telemetry: ServerMetrics, gateway: Gateway, maintenance: Maintenance, *, partitions: bool
) -> None:
    _CollectionMetrics(gateway, partitions).register(telemetry)
    _register_matching(telemetry, gateway)
    _register_gateway(telemetry, gateway)
    telemetry.watch_purged_tombstones.read = lambda: maintenance.purged
    telemetry.watch_published_views.read = lambda: maintenance.views.published


class _CollectionMetrics:
    """Metrics by collection; collections above the label limit share one set of labels."""

    def __init__(self, gateway: Gateway, partitions: bool) -> None:
        self._gateway = gateway
        self._registry = gateway.registry
        self._counters = gateway.registry.counters
        self._partitions = partitions  # whether there is a partition label

    def register(self, telemetry: ServerMetrics) -> None:
        telemetry.watch_changes.each = self._changes
        telemetry.watch_match_lag_changes.each = self._lags
        telemetry.watch_partition_state.each = self._states
        telemetry.watch_generation.each = lambda: self._highest(self._registry.generation)
        telemetry.watch_dedup_dropped.each = lambda: [
            ([*counters.labels, stage], count)
            for counters in self._counters.all()
            for stage, count in counters.dropped.items()
        ]
        telemetry.watch_bloom_fp_ratio.each = lambda: self._highest(lambda one: one.bloom_ratio)
        telemetry.watch_bloom_rebuilds.each = lambda: [
            ([*counters.labels], counters.bloom_rebuilds) for counters in self._counters.all()
        ]
        objectives = self._gateway.objectives
        telemetry.watch_source_lag_seconds.each = lambda: self._highest(
            lambda one: None if one.config.source == NATIVE else objectives.lag_ms(one) / 1000
        )
        telemetry.watch_source_lag_changes.each = lambda: self._highest(
            lambda one: None if one.config.source == NATIVE else objectives.lag_changes(one)
        )

    def _highest(self, measured: Callable[[Collection], float | None]) -> list[MetricRow]:
        """The value of each collection; the highest of those that share labels."""
        found: dict[MetricLabels, float] = {}
        for collection in self._registry.collections():
            if (value := measured(collection)) is not None:
                labels = self._counters.for_collection(collection).labels
                found[labels] = max(value, found.get(labels, 0))
        return [([*labels], value) for labels, value in found.items()]

    def _changes(self) -> Iterator[MetricRow]:
        for counters in self._counters.all():
            counts = {(op, 0): 0 for op in CHANGE_OPS} | counters.changes
            if not self._partitions:
                for op in CHANGE_OPS:
                    yield [*counters.labels, op], sum(n for (held, _), n in counts.items() if held == op)
                continue
            for (op, partition), count in sorted(counts.items()):
                yield [*counters.labels, op, str(partition)], count

    def _lags(self) -> Iterator[MetricRow]:
        found: Counter[tuple[str, ...]] = Counter()
        for collection in self._registry.collections():
            labels = self._counters.for_collection(collection).labels
            for partition, lag in enumerate(self._registry.lags(collection)):
                found[(*labels, str(partition)) if self._partitions else labels] += lag
        return (([*key], count) for key, count in found.items())

    def _states(self) -> Iterator[MetricRow]:
        found: Counter[tuple[str, ...]] = Counter()
        for collection in self._registry.collections():
            labels, state = self._counters.for_collection(collection).labels, collection.reported_state
            indexes = [(str(n),) for n in range(collection.config.partitions)] if self._partitions else [()]
            for known in STATES:
                for index in indexes:
                    found[*labels, known, *index] += known == state
        return (([*key], count) for key, count in found.items())


def _register_matching(telemetry: ServerMetrics, gateway: Gateway) -> None:
    def each(measured: Callable[[tuple[int, int, int]], float]) -> Callable[[], list[MetricRow]]:
        return lambda: [([*labels], measured(counts)) for labels, counts in gateway.match_counts().items()]

    telemetry.watch_match_candidates.each = each(lambda counts: counts[0])
    telemetry.watch_match_hits.each = each(lambda counts: counts[1])
    telemetry.watch_match_fallback.each = each(lambda counts: counts[2])
    telemetry.watch_match_hit_ratio.each = each(lambda counts: counts[1] / counts[0] if counts[0] else 0.0)
    telemetry.watch_match_latency_seconds.each = lambda: [
        ([*counters.labels], counters.latency) for counters in gateway.registry.counters.all()
    ]
    telemetry.watch_match_slow.read = lambda: gateway.samples.slow
    telemetry.watch_index_predicates.each = lambda: _kinds(gateway)
    telemetry.watch_scan_list_predicates.each = lambda: _scanned(gateway)


def _register_gateway(telemetry: ServerMetrics, gateway: Gateway) -> None:
    telemetry.watch_connections.each = lambda: _transports(gateway)
    telemetry.watch_subscriptions.each = gateway.states
    telemetry.watch_deliveries.each = lambda: [([op], count) for op, count in gateway.deliveries.items()]
    telemetry.watch_outbound_bytes.read = lambda: gateway.outbound_bytes
    telemetry.watch_watermark_level.read = lambda: gateway.level
    telemetry.watch_demotions.read = lambda: gateway.demotions
    delivered = gateway.delivered
    telemetry.watch_delivered_batches.each = lambda: [
        ([why], count) for why, count in delivered.batches.items()
    ]
    telemetry.watch_delivered_skipped.read = lambda: delivered.skipped
    telemetry.watch_resync_required.each = lambda: [([why], count) for why, count in gateway.resyncs.items()]
    telemetry.watch_resume.each = lambda: [([*key], count) for key, count in gateway.resumes.items()]
    telemetry.watch_snapshots.read = lambda: gateway.replays.snapshots
    telemetry.watch_snapshot_documents.read = lambda: gateway.replays.snapshot_documents
    telemetry.watch_auth_failures.each = lambda: [
        ([code], count) for code, count in gateway.auth_failures.items()
    ]
    telemetry.watch_slo_burn.each = gateway.objectives.worst_burn_rates
    telemetry.watch_audit_dropped.read = lambda: gateway.audit.dropped


def _kinds(gateway: Gateway) -> list[MetricRow]:
    counts: Counter[tuple[str, str, str]] = Counter()
    for watched in gateway.all_watched():
        for kind, count in watched.matcher.index.kinds.items():
            counts[*watched.counters.labels, kind] += count
    return [([*key], count) for key, count in sorted(counts.items())]


def _scanned(gateway: Gateway) -> list[MetricRow]:
    counts: Counter[MetricLabels] = Counter()
    for watched in gateway.all_watched():
        counts[watched.counters.labels] += len(watched.matcher.index.scan)
    return [([*labels], count) for labels, count in counts.items()]


def _transports(gateway: Gateway) -> list[tuple[list[str], float]]:
    counts = Counter(session.transport.name for session in gateway.sessions)
    return [([name], counts[name]) for name in ("ws", "sse")]
