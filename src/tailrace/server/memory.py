"""The memory of the server, by who holds it: all numbers are kept by their owners and only read here."""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

import apsw

from tailrace.common.timestamps import format_rfc3339
from tailrace.routing.context import Context
from tailrace.schema.stream_schema import CACHE_BYTES
from tailrace.search.index_files.catalogue import IndexFileService
from tailrace.search.routes import SearchRoutes
from tailrace.server.allocator import measure_heap
from tailrace.server.live import LiveReaders
from tailrace.server.memory_guard import MemoryGuard, mapped_file_bytes
from tailrace.server.touch import TouchRoutes
from tailrace.storage.checkpoint import CheckpointService
from tailrace.storage.object_store.cache import ObjectCache
from tailrace.storage.sealing import SealingService
from tailrace.storage.segments.cold_reader import ColdReader

ByteCounts = dict[str, int]


class ServerParts(NamedTuple):
    """The parts of a server that can tell something."""

    context: Context
    live: LiveReaders
    memory: MemoryGuard
    sealing: SealingService
    checkpoints: CheckpointService
    cold: ColdReader
    search: SearchRoutes
    touch: TouchRoutes
    companions: IndexFileService

    @property
    def readers(self) -> tuple[ObjectCache, ...]:
        """Those who fetch from the object store for queries."""
        return self.cold.parts, self.companions.parts, self.companions.lexicons


def process_memory(node: ServerParts) -> ByteCounts:
    used, total = measure_heap()
    arrow = arrow_bytes()
    return {
        "rss_bytes": node.memory.rss_bytes,
        "heap_total_bytes": total,
        "heap_used_bytes": used,
        "external_bytes": arrow,
        "array_buffers_bytes": arrow,
    }


def arrow_bytes() -> int:
    """Of Arrow's pool. It is not imported just to be asked."""
    arrow: Any = sys.modules.get("pyarrow")
    return 0 if arrow is None else int(arrow.total_allocated_bytes())


def memory_breakdown(measured: ByteCounts, sqlite_bytes: int) -> ByteCounts:
    managed, mapped = measured["heap_total_bytes"] + measured["external_bytes"], mapped_file_bytes()
    rest = measured["rss_bytes"] - managed - mapped - sqlite_bytes
    return {
        "managed_bytes": managed,
        "mapped_file_bytes": mapped,
        "sqlite_runtime_bytes": sqlite_bytes,
        "unattributed_rss_bytes": max(0, rest),
    }


def sqlite_memory() -> dict[str, object]:
    used, highest = apsw.status(apsw.SQLITE_STATUS_MEMORY_USED)
    return {"available": True, "memory_used_bytes": used, "memory_highwater_bytes": highest}


def gc_stats(guard: MemoryGuard) -> dict[str, object]:
    rows = gc.get_stats()
    return {
        "collections": sum(row["collections"] for row in rows),
        "collected": sum(row["collected"] for row in rows),
        "uncollectable": sum(row["uncollectable"] for row in rows),
        "frozen_objects": gc.get_freeze_count(),
        "forced_collections": guard.collections,
        "last_forced_at": format_rfc3339(guard.collected_ns) if guard.collections else None,
    }


def high_water_marks(memory: MemoryGuard) -> dict[str, object]:
    marks = sorted(memory.high_water.items())
    return {name: {"value": mark.value, "at": format_rfc3339(mark.at_ns)} for name, mark in marks}


def memory_by_subsystem(node: ServerParts, sqlite_bytes: int) -> dict[str, ByteCounts]:
    log, limits = node.context.log, node.context.limits
    return {
        "heap_estimates": {
            "ingest_queue_bytes": log.committer.queued_bytes,
            "tail_memory_bytes": log.streams.memory_bytes,
            "block_cache_bytes": log.reader.cache.bytes,
            "segment_footer_bytes": node.cold.footer_bytes,
            "companion_opened_bytes": node.companions.shelf.bytes,
            "tail_index_bytes": node.search.tail.bytes,
            "document_bytes": log.streams.document_bytes,
            "contract_bytes": node.live.contracts.bytes,
            "touch_journal_bytes": sum(size for size, _ in node.touch.journals()),
        },
        # No cached file is mapped: caches are read. What is mapped are the program and its libraries.
        "mapped_files": {"resident_bytes": mapped_file_bytes()},
        "disk_caches": {
            "segment_cache_bytes": node.cold.parts.cached_bytes,
            "companion_cache_bytes": node.companions.parts.cached_bytes,
            "lexicon_cache_bytes": node.companions.lexicons.cached_bytes,
        },
        "configured_budgets": {
            "ingest_queue_budget_bytes": limits.append_queue_max_bytes,
            "tail_memory_budget_bytes": limits.tail_memory_max_bytes,
            "block_cache_budget_bytes": limits.block_cache_bytes,
            "segment_cache_budget_bytes": limits.segment_cache_max_bytes,
            "companion_cache_budget_bytes": limits.search_companion_file_cache_max_bytes,
            "lexicon_cache_budget_bytes": limits.lexicon_index_cache_max_bytes,
            "companion_opened_budget_bytes": limits.search_companion_memory_max_bytes,
            "tail_index_budget_bytes": limits.tail_index_max_bytes,
            "contract_budget_bytes": CACHE_BYTES,
            "sqlite_cache_budget_bytes": limits.sqlite_cache_bytes,
        },
        "pipeline_buffers": {"spooled_segment_bytes": node.sealing.spooled_bytes()},
        "sqlite_runtime": {"memory_used_bytes": sqlite_bytes},
        "counts": {
            "streams_loaded": len(log.streams.by_number),
            "live_connections": node.live.connections,
            "streams_with_waiters": len(node.live.by_stream),
            "touch_waiters": node.touch.waiters,
            "checkpoints_pending": node.checkpoints.files_pending,
        },
    }


_TOTALS = {
    "heap_estimates": "heap_estimate_bytes",
    "mapped_files": "mapped_file_bytes",
    "disk_caches": "disk_cache_bytes",
    "configured_budgets": "configured_budget_bytes",
    "pipeline_buffers": "pipeline_buffer_bytes",
    "sqlite_runtime": "sqlite_runtime_bytes",
}


def memory_totals(groups: dict[str, ByteCounts]) -> ByteCounts:
    return {name: sum(groups[group].values()) for group, name in _TOTALS.items()}
