"""GET /v1/server/_details and /v1/server/_mem: limits, queues and memory of the whole server."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common import memory as allocator
from tailrace.common import memory as auto_tune
from tailrace.common.settings import SETTINGS_TABLE, Setting
from tailrace.common.timestamps import format_rfc3339
from tailrace.http.exchange import Exchange
from tailrace.log.history import HISTORY_THREADS
from tailrace.routing import responses
from tailrace.server import memory
from tailrace.server.cold import cached_bytes_by_artifact
from tailrace.server.memory import ServerParts
from tailrace.server.top_streams import TopStreams

DETAILS_PATH, MEMORY_PATH = b"/v1/server/_details", b"/v1/server/_mem"
SERVER_DETAILS_PATHS = frozenset({DETAILS_PATH, MEMORY_PATH})
LIMIT_GROUPS = ("caches", "concurrency", "ingest", "search", "segmenting", "timeouts", "memory")


class ServerRoutes:
    """Nothing here depends on the number of streams."""

    def __init__(self, node: ServerParts) -> None:
        self._node = node
        self.top = TopStreams(node.context.log, node.live)
        self.pipeline: Callable[[], dict[str, object]] = dict[str, object]
        self.async_index: Callable[[], dict[str, int]] = dict[str, int]
        self.top.cached_bytes_of = lambda stream: sum(cached_bytes_by_artifact(node.readers, stream).values())
        self.top.touch_journals = node.touch.journals
        node.memory.ticks.append(self.top.look)
        node.memory.sheds.append(node.live.contracts.clear)
        node.memory.bound_sqlite()
        allocator.limit_malloc_arenas()
        log = node.context.log
        node.memory.gauges["tail_memory_bytes"] = lambda: log.streams.memory_bytes
        node.memory.gauges["tail_index_bytes"] = lambda: node.search.tail.bytes
        node.memory.gauges["ingest_queue_bytes"] = lambda: log.committer.queued_bytes
        node.memory.gauges["document_bytes"] = lambda: log.streams.document_bytes
        node.memory.gauges["streams_loaded"] = lambda: len(log.streams.by_number)

    def answer(self, exchange: Exchange, identity: Identity, path: bytes) -> None:
        authorise(identity, Action.INSPECT_SERVER)
        body = self._details() if path == DETAILS_PATH else self._mem()
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body))

    # -- details ---------------------------------------------------------------------------------------

    def _details(self) -> dict[str, object]:
        return {
            "auto_tune": self._auto_tune(),
            "configured_limits": configured_limits(self._node),
            "runtime": {
                "memory": self._memory(),
                **self._queues(),
                "concurrency": self._concurrency(),
                "top_streams": self.top.shown(),
                "pipeline": self.pipeline(),
            },
        }

    def _auto_tune(self) -> dict[str, object]:
        size_mb = auto_tune.requested_mb(self._node.context.settings.auto_tune)
        preset_mb = None if size_mb is None else auto_tune.largest_preset_mb(size_mb)
        return {
            "enabled": size_mb is not None,
            "requested_memory_mb": size_mb,
            "preset_mb": preset_mb,
            "effective_memory_limit_mb": preset_mb,
        }

    def _memory(self) -> dict[str, object]:
        guard = self._node.memory
        sqlite = memory.sqlite_memory()
        sqlite_bytes = int(str(sqlite["memory_used_bytes"]))
        measured = memory.process_memory(self._node)
        groups = memory.memory_by_subsystem(self._node, sqlite_bytes)
        return {
            "pressure_active": guard.active,
            "pressure_limit_bytes": guard.limit_bytes,
            "last_rss_bytes": guard.rss_bytes,
            "max_rss_bytes": guard.max_rss_bytes,
            "process": measured,
            "process_breakdown": memory.memory_breakdown(measured, sqlite_bytes),
            "sqlite": sqlite,
            "gc": memory.gc_stats(guard),
            "subsystems": groups,
            "totals": memory.memory_totals(groups),
            "high_water": memory.high_water_marks(guard),
        }

    def _queues(self) -> dict[str, object]:
        node = self._node
        committer, limits = node.context.log.committer, node.context.limits
        pressure = node.sealing.pressure
        return {
            "ingest_queue": {
                "requests": committer.queued_records,
                "bytes": committer.queued_bytes,
                "full": committer.queued_bytes >= limits.append_queue_max_bytes,
            },
            "local_backpressure": {
                "enabled": True,
                "current_bytes": pressure.waiting_bytes,
                "max_bytes": limits.spool_bytes,
                "over_limit": pressure.refusing,
            },
            "uploads": {"pending_segments": node.sealing.queued},
        }

    def _concurrency(self) -> dict[str, object]:
        log = self._node.context.log
        committer, reading = log.committer, log.reader.history.fetching
        syncs = self._node.context.limits.journal_syncs_in_flight
        gate = self._node.search.gate
        return {
            "ingest": {
                "configured_limit": syncs,
                "current_limit": committer.syncs_allowed,
                "active": committer.in_flight,
                "queued": committer.queued_records,
            },
            "read": {
                "configured_limit": HISTORY_THREADS,
                "current_limit": HISTORY_THREADS,
                "active": min(reading, HISTORY_THREADS),
                "queued": max(0, reading - HISTORY_THREADS),
            },
            "search": {
                "configured_limit": gate.running_max,
                "current_limit": gate.running_max,
                "active": gate.running,
                "queued": gate.waiting,
            },
            "async_index": self.async_index(),
        }

    # -- memory ----------------------------------------------------------------------------------------

    def _mem(self) -> dict[str, object]:
        guard, log = self._node.memory, self._node.context.log
        sqlite = memory.sqlite_memory()
        sqlite_bytes = int(str(sqlite["memory_used_bytes"]))
        measured = memory.process_memory(self._node)
        groups = memory.memory_by_subsystem(self._node, sqlite_bytes)
        totals = memory.memory_totals(groups)
        counts = groups.pop("counts")
        return {
            "ts": format_rfc3339(self._node.context.clock.now_ns()),
            "process": measured,
            "process_breakdown": memory.memory_breakdown(measured, sqlite_bytes),
            "sqlite": sqlite,
            "gc": memory.gc_stats(guard),
            "high_water": memory.high_water_marks(guard),
            "counters": {
                "append_entries": log.publisher.entries,
                "append_bytes": log.publisher.bytes,
                "memory_pressures": guard.pressures,
                "live_demoted": self._node.live.demoted,
            },
            "runtime_counts": counts,
            "runtime_bytes": groups,
            "runtime_totals": totals,
            "top_streams": self.top.shown(),
        }


def configured_limits(node: ServerParts) -> dict[str, dict[str, object]]:
    """Every limit, in one of the groups."""
    groups: dict[str, dict[str, object]] = {name: {} for name in LIMIT_GROUPS}
    for setting in SETTINGS_TABLE.values():
        if setting.limit:
            value: object = getattr(node.context.limits, setting.name)
            groups[limit_group(setting)][setting.name] = value
    groups["memory"]["pressure_limit_bytes"] = node.memory.limit_bytes
    return groups


def limit_group(setting: Setting) -> str:
    name = setting.name
    if name.startswith("memory_"):
        return "memory"
    if name.startswith(("search_", "filter_", "tail_index_")):
        return "search"
    if name.startswith(("seal_", "spool_")):
        return "segmenting"
    if setting.unit == "ms":
        return "timeouts"
    if "cache" in name or name == "streams_loaded":
        return "caches"
    if "connections" in name or name.endswith(("_in_flight", "_requests", "_concurrency")):
        return "concurrency"
    return "ingest"
