"""The metrics of cold history: read where they are counted, when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tailrace.common.server_metrics import ServerMetrics
from tailrace.search.index_files.catalogue import IndexFileService
from tailrace.storage.sealing import SealingService
from tailrace.storage.segments.cold_reader import ColdReader


def connect_storage_metrics(
    telemetry: ServerMetrics, sealing: SealingService, cold: ColdReader, companions: IndexFileService
) -> None:
    readers = (cold.parts, companions.parts, companions.lexicons)

    def requests() -> Iterable[tuple[list[str], float]]:
        made = Counter(sealing.requests)
        for parts in readers:
            if parts.objects is not None:
                made += parts.objects.requests
        return [([kind], count) for kind, count in sorted(made.items())]

    def sent() -> int:
        return 0 if sealing.sealer is None else sealing.sealer.bytes_out

    def received() -> int:
        sealer = 0 if sealing.sealer is None else sealing.sealer.bytes_in
        return sealer + sum(parts.fetched_bytes for parts in readers)

    telemetry.hot_bytes.read = lambda: sealing.pressure.stored_bytes
    telemetry.unsealed_bytes.read = lambda: sealing.pressure.waiting_bytes
    telemetry.spooled_bytes.read = sealing.spooled_bytes
    telemetry.seal_queue.read = lambda: sealing.queued
    telemetry.sealed_segments.read = lambda: sealing.runs.segments
    telemetry.sealed_bytes.read = lambda: sealing.runs.segment_bytes
    telemetry.seal_failures.read = lambda: sealing.standing.failures
    telemetry.seal_conflicts.read = lambda: len(sealing.runs.conflicts)
    trims, sweeps = sealing.trims, sealing.sweeps
    telemetry.trimmed_entries.read = lambda: trims.entries
    telemetry.trimmed_segments.read = lambda: trims.segments
    telemetry.trimmed_bytes.read = lambda: trims.segment_bytes
    telemetry.sweeps.read = lambda: sweeps.passes
    telemetry.swept_objects.read = lambda: sweeps.seen.objects
    telemetry.swept_orphans.read = lambda: sweeps.seen.orphans
    telemetry.swept_orphan_bytes.read = lambda: sweeps.seen.orphan_bytes
    telemetry.swept_tombstones.read = lambda: sweeps.seen.forgotten
    telemetry.object_store_ok.read = lambda: float(sealing.standing.state == "ok")
    telemetry.object_requests.each = requests
    telemetry.object_sent_bytes.read = sent
    telemetry.object_received_bytes.read = received
    telemetry.cold_cache_bytes.read = lambda: cold.parts.cached_bytes
    telemetry.cold_reads.reads[("cache",)] = lambda: cold.counts.hits
    telemetry.cold_reads.reads[("store",)] = lambda: cold.counts.misses
    telemetry.cold_reads.reads[("shared",)] = lambda: cold.counts.shared
    telemetry.cold_failures.read = lambda: cold.counts.corrupt
