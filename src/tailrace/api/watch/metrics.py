"""Numbers of documents and live queries: read where they are counted, when somebody asks."""

from __future__ import annotations

from collections import Counter
from typing import Final

from tailrace.api.watch.book import Book
from tailrace.api.watch.care import Care
from tailrace.api.watch.gateway import Gateway
from tailrace.telemetry import Telemetry

STATES: Final = ("live", "loading", "lagging", "stale")


def connect(telemetry: Telemetry, gateway: Gateway, book: Book, care: Care) -> None:
    _connect_matching(telemetry, gateway, book)
    _connect_gateway(telemetry, gateway)
    telemetry.watch_purged_tombstones.read = lambda: care.purged
    telemetry.watch_published_views.read = lambda: care.views.published


def _connect_matching(telemetry: Telemetry, gateway: Gateway, book: Book) -> None:
    telemetry.watch_changes.each = lambda: [([op], count) for op, count in book.changes.items()]
    telemetry.watch_match_lag_changes.read = lambda: sum(
        sum(book.lags(collection)) for collection in book.collections()
    )
    telemetry.watch_partition_state.each = lambda: _states(book)
    telemetry.watch_generation.read = lambda: max(
        (book.generation(collection) for collection in book.collections()), default=0
    )
    telemetry.watch_match_candidates.read = lambda: gateway.totals()[0]
    telemetry.watch_match_hits.read = lambda: gateway.totals()[1]
    telemetry.watch_match_hit_ratio.read = lambda: _ratio(*gateway.totals()[:2])
    telemetry.watch_match_fallback.read = lambda: gateway.totals()[2]
    telemetry.watch_match_slow.read = lambda: gateway.samples.slow
    telemetry.watch_index_predicates.each = lambda: _kinds(gateway)
    telemetry.watch_scan_list_predicates.read = lambda: sum(
        len(one.matcher.index.scan) for one in gateway.all_watched()
    )


def _connect_gateway(telemetry: Telemetry, gateway: Gateway) -> None:
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
    telemetry.watch_slo_burn.each = gateway.objectives.worst
    telemetry.watch_audit_dropped.read = lambda: gateway.audit.dropped


def _ratio(candidates: int, hits: int) -> float:
    return hits / candidates if candidates else 0.0


def _states(book: Book) -> list[tuple[list[str], float]]:
    counts = Counter(
        "lagging" if collection.lagging else collection.state for collection in book.collections()
    )
    return [([state], counts[state]) for state in STATES]


def _kinds(gateway: Gateway) -> list[tuple[list[str], float]]:
    counts: Counter[str] = Counter()
    for watched in gateway.all_watched():
        counts.update(watched.matcher.index.kinds)
    return [([kind], count) for kind, count in sorted(counts.items())]


def _transports(gateway: Gateway) -> list[tuple[list[str], float]]:
    counts = Counter(session.wire.name for session in gateway.sessions)
    return [([name], counts[name]) for name in ("ws", "sse")]
