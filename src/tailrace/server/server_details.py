"""GET /v1/server/_details and _mem, POST /v1/server/_seal: limits, queues, memory and sealing of the server.

All numbers are counted by their owners and only read here. The cost of a response does not depend on the
number of streams: `TopStreams` updates its candidates a few at a time.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import re
import sys
from collections.abc import Callable
from heapq import nlargest
from typing import Any, Final, NamedTuple, TypedDict

import apsw
import orjson

from tailrace.auth import Action, Identity, authorise
from tailrace.common import memory as allocator
from tailrace.common import memory as auto_tune
from tailrace.common.settings import SETTINGS_TABLE, Setting
from tailrace.common.timestamps import format_rfc3339
from tailrace.http.exchange import Exchange
from tailrace.log.history import HISTORY_THREADS
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses, Response
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    INSTANT,
    OBJECT,
    STRING,
    Component,
    Json,
    answer,
    array,
    counts,
    obj,
    query,
)
from tailrace.routing.table import Auth, Route, route_group
from tailrace.schema.stream_schema import CACHE_BYTES
from tailrace.search.index_files.catalogue import IndexFileService
from tailrace.search.routes import SearchRoutes
from tailrace.server.live import LiveReaders
from tailrace.server.pipeline_process import PipelineState
from tailrace.server.resource_guards import MemoryGuard, mapped_file_bytes
from tailrace.server.stream_details import cached_bytes_by_artifact, unsealed_bytes
from tailrace.server.touch_routes import TouchRoutes
from tailrace.storage.checkpoint_service import CheckpointService
from tailrace.storage.object_store.cache import ObjectCache
from tailrace.storage.sealing import SealingService
from tailrace.storage.segments.cold_reader import ColdReader

_USED: Final = re.compile(r"bytes in allocated blocks\s*=\s*([\d,]+)")
_RESERVED: Final = re.compile(r"bytes/arena\s*=\s*([\d,]+)")


class HeapUsage(NamedTuple):
    used_bytes: int
    total_bytes: int


def measure_heap() -> HeapUsage:
    """The heap of small objects; the interpreter allocates larger ones from the C library.

    The allocator only prints its statistics to a file, so it gets one in memory. It walks its pools for that,
    about ten milliseconds for each 400 MB.
    """
    text = _read_allocator_stats()
    used, reserved = _USED.search(text), _RESERVED.search(text)
    if used is None or reserved is None:
        return HeapUsage(0, 0)
    return HeapUsage(_parse_grouped_int(used[1]), _parse_grouped_int(reserved[1]))


def _parse_grouped_int(text: str) -> int:
    return int(text.replace(",", ""))


def _read_allocator_stats() -> str:
    libc = ctypes.CDLL(None)
    print_stats = getattr(ctypes.pythonapi, "_PyObject_DebugMallocStats", None)
    open_memstream = getattr(libc, "open_memstream", None)
    if print_stats is None or open_memstream is None:
        return ""
    open_memstream.restype = ctypes.c_void_p
    print_stats.argtypes = libc.fclose.argtypes = libc.free.argtypes = [ctypes.c_void_p]
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    file = open_memstream(ctypes.byref(text), ctypes.byref(size))
    if not file:
        return ""
    print_stats(file)
    libc.fclose(file)
    try:
        return ctypes.string_at(text.value or 0, size.value).decode() if text.value else ""
    finally:
        libc.free(text)


ByteCounts = dict[str, int]


class ServerParts(NamedTuple):
    """The parts of a server that are inspected."""

    context: Context
    live: LiveReaders
    memory: MemoryGuard
    sealing: SealingService
    checkpoints: CheckpointService
    cold: ColdReader
    search: SearchRoutes
    touch: TouchRoutes
    index_files: IndexFileService
    pipeline: PipelineState

    @property
    def readers(self) -> tuple[ObjectCache, ...]:
        """The caches that fetch from the object store for queries."""
        return self.cold.parts, self.index_files.parts, self.index_files.lexicons


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
    """Bytes in Arrow's memory pool, if Arrow is loaded."""
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
            "companion_opened_bytes": node.index_files.files.bytes,
            "tail_index_bytes": node.search.tail.bytes,
            "document_bytes": log.streams.document_bytes,
            "contract_bytes": node.live.contracts.bytes,
            "touch_journal_bytes": sum(size for size, _ in node.touch.journals()),
        },
        # Caches are read, not mapped: mapped files are the program and its libraries.
        "mapped_files": {"resident_bytes": mapped_file_bytes()},
        "disk_caches": {
            "segment_cache_bytes": node.cold.parts.cached_bytes,
            "companion_cache_bytes": node.index_files.parts.cached_bytes,
            "lexicon_cache_bytes": node.index_files.lexicons.cached_bytes,
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


TOP_SHOWN = 10
CANDIDATES_MAX = 64  # each of them may have to be read from the hot store for a response
STREAMS_PER_POLL = 1000

TopStreamRow = dict[str, object]


class TopStreams:
    """The streams that use most. `poll`, called twice a second, checks some of the changed streams."""

    def __init__(
        self,
        log: Log,
        live: LiveReaders,
        cached_bytes_of: Callable[[Stream], int],
        touch_journals: Callable[[], list[tuple[int, str]]],
    ) -> None:
        self._log = log
        self._live = live
        self._cached_bytes_of = cached_bytes_of
        self._touch_journals = touch_journals
        self._pending: dict[int, int] = {}  # number to bytes, of the largest
        self._file = 0
        self._polled = 0

    def poll(self) -> None:
        streams = self._log.streams
        touched = streams.touched.get(streams.file, ())
        if streams.file != self._file or self._polled >= len(touched):
            self._file, self._polled = streams.file, 0
        for stream in touched[self._polled : self._polled + STREAMS_PER_POLL]:
            if not stream.removed:
                self._pending[stream.number] = unsealed_bytes(stream)
        self._polled += STREAMS_PER_POLL
        if len(self._pending) > CANDIDATES_MAX:
            self._pending = dict(
                nlargest(CANDIDATES_MAX // 2, self._pending.items(), key=lambda item: item[1])
            )

    def to_json(self) -> dict[str, list[TopStreamRow]]:
        waiting = nlargest(TOP_SHOWN, self._live.by_stream.items(), key=lambda item: item[1])
        current = [stream for number in list(self._pending) if (stream := self._find(number)) is not None]
        pending = nlargest(TOP_SHOWN, [(unsealed_bytes(stream), stream.name) for stream in current])
        local = nlargest(
            TOP_SHOWN,
            [(unsealed_bytes(stream) + self._cached_bytes_of(stream), stream.name) for stream in current],
        )
        return {
            "local_storage_bytes": [{"stream": name, "bytes": size} for size, name in local if size],
            "pending_wal_bytes": [{"stream": name, "bytes": size} for size, name in pending if size],
            "touch_journal_filter_bytes": [
                {"stream": name, "bytes": size}
                for size, name in nlargest(TOP_SHOWN, self._touch_journals())
                if size
            ],
            "notifier_waiters": [{"stream": stream.name, "waiters": count} for stream, count in waiting],
        }

    def _find(self, number: int) -> Stream | None:
        """The current state of a stream, read from the hot store without loading it into memory."""
        streams = self._log.streams
        stream = streams.by_number.get(number)
        if stream is None and number not in streams.removed:
            stream = self._log.store.stream_by_number(number)
        if stream is None:
            del self._pending[number]
        return stream


DETAILS_PATH, MEMORY_PATH = b"/v1/server/_details", b"/v1/server/_mem"
LIMIT_GROUPS = ("caches", "concurrency", "ingest", "search", "segmenting", "timeouts", "memory")


class ServerRoutes:
    """Serves `/v1/server/_details` and `/v1/server/_mem`."""

    def __init__(self, node: ServerParts) -> None:
        self._node = node
        self.top = TopStreams(
            node.context.log,
            node.live,
            lambda stream: sum(cached_bytes_by_artifact(node.readers, stream).values()),
            node.touch.journals,
        )
        node.memory.on_tick.append(self.top.poll)
        node.memory.evictors.append(node.live.contracts.clear)
        node.memory.bound_sqlite()
        allocator.limit_malloc_arenas()
        log = node.context.log
        node.memory.gauges["tail_memory_bytes"] = lambda: log.streams.memory_bytes
        node.memory.gauges["tail_index_bytes"] = lambda: node.search.tail.bytes
        node.memory.gauges["ingest_queue_bytes"] = lambda: log.committer.queued_bytes
        node.memory.gauges["document_bytes"] = lambda: log.streams.document_bytes
        node.memory.gauges["streams_loaded"] = lambda: len(log.streams.by_number)

    def details(self, exchange: Exchange, _: Identity) -> None:
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(self._details()))

    def memory(self, exchange: Exchange, _: Identity) -> None:
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(self._mem()))

    # -- details ---------------------------------------------------------------------------------------

    def _details(self) -> dict[str, object]:
        return {
            "auto_tune": self._auto_tune(),
            "configured_limits": configured_limits(self._node),
            "runtime": {
                "memory": self._memory(),
                **self._queues(),
                "concurrency": self._concurrency(),
                "top_streams": self.top.to_json(),
                "pipeline": self._node.pipeline.details(),
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
        sqlite = sqlite_memory()
        sqlite_bytes = int(str(sqlite["memory_used_bytes"]))
        measured = process_memory(self._node)
        groups = memory_by_subsystem(self._node, sqlite_bytes)
        return {
            "pressure_active": guard.active,
            "pressure_limit_bytes": guard.limit_bytes,
            "last_rss_bytes": guard.rss_bytes,
            "max_rss_bytes": guard.max_rss_bytes,
            "process": measured,
            "process_breakdown": memory_breakdown(measured, sqlite_bytes),
            "sqlite": sqlite,
            "gc": gc_stats(guard),
            "subsystems": groups,
            "totals": memory_totals(groups),
            "high_water": high_water_marks(guard),
        }

    def _queues(self) -> dict[str, object]:
        node = self._node
        committer, limits = node.context.log.committer, node.context.limits
        pressure = node.sealing.backlog
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
            "async_index": self._node.pipeline.concurrency(),
        }

    # -- memory ----------------------------------------------------------------------------------------

    def _mem(self) -> dict[str, object]:
        guard, log = self._node.memory, self._node.context.log
        sqlite = sqlite_memory()
        sqlite_bytes = int(str(sqlite["memory_used_bytes"]))
        measured = process_memory(self._node)
        groups = memory_by_subsystem(self._node, sqlite_bytes)
        totals = memory_totals(groups)
        counts = groups.pop("counts")
        return {
            "ts": format_rfc3339(self._node.context.clock.now_ns()),
            "process": measured,
            "process_breakdown": memory_breakdown(measured, sqlite_bytes),
            "sqlite": sqlite,
            "gc": gc_stats(guard),
            "high_water": high_water_marks(guard),
            "counters": {
                "append_entries": log.publisher.entries,
                "append_bytes": log.publisher.bytes,
                "memory_pressures": guard.pressures,
                "live_demoted": self._node.live.demoted,
            },
            "runtime_counts": counts,
            "runtime_bytes": groups,
            "runtime_totals": totals,
            "top_streams": self.top.to_json(),
        }


def configured_limits(node: ServerParts) -> dict[str, dict[str, object]]:
    """All limits by group."""
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


SEAL_PATH = b"/v1/server/_seal"


class SealRoute:
    """Seals everything, or one stream: 200 when it is done, 202 after the request timeout (then retry)."""

    def __init__(self, context: Context, sealing: SealingService) -> None:
        self._context = context
        self._sealing = sealing
        self._deferred = DeferredResponses()

    def seal(self, exchange: Exchange, identity: Identity) -> None:
        name = parse_query(exchange.query).get("stream") or None
        authorise(identity, Action.SEAL, stream=name)
        if name is not None:
            self._context.log.readable(name)
        self._deferred.respond(exchange, self._seal(name))

    async def _seal(self, name: str | None) -> Response:
        status, body = 200, Sealed(sealed=True)
        try:
            async with asyncio.timeout(self._context.limits.request_ms / 1000):
                await self._sealing.seal_now(name)
        except TimeoutError:
            status, body = 202, Sealed(sealed=False)
        return status, responses.JSON_TYPE + responses.NO_STORE, orjson.dumps(body)


class Sealed(TypedDict):
    sealed: bool


_TOP: Final[Json] = {"type": "object", "additionalProperties": array(obj({"stream": STRING}))}
_QUEUE: Final[Json] = obj(counts("configured_limit", "current_limit", "active", "queued"))
_SERVER_DETAILS: Final = Component(
    "ServerDetails",
    obj(
        {
            "auto_tune": obj({"enabled": BOOLEAN}),
            "configured_limits": {"type": "object", "additionalProperties": OBJECT},
            "runtime": obj(
                {
                    "memory": obj(
                        {"pressure_active": BOOLEAN, "last_rss_bytes": COUNT, "max_rss_bytes": COUNT}
                    ),
                    "ingest_queue": obj({**counts("requests", "bytes"), "full": BOOLEAN}),
                    "local_backpressure": obj(
                        {"enabled": BOOLEAN, **counts("current_bytes", "max_bytes"), "over_limit": BOOLEAN}
                    ),
                    "uploads": obj(counts("pending_segments")),
                    "concurrency": {"type": "object", "additionalProperties": _QUEUE},
                    "top_streams": _TOP,
                }
            ),
        }
    ),
)
_SERVER_MEMORY: Final = Component(
    "ServerMemory",
    obj(
        {
            "ts": INSTANT,
            "process": obj(counts("rss_bytes", "heap_total_bytes", "heap_used_bytes")),
            "process_breakdown": obj(counts("managed_bytes", "unattributed_rss_bytes")),
            "sqlite": OBJECT,
            "gc": OBJECT,
            "high_water": {"type": "object", "additionalProperties": obj({"value": COUNT, "at": INSTANT})},
            "counters": {"type": "object", "additionalProperties": COUNT},
            "runtime_counts": {"type": "object", "additionalProperties": COUNT},
            "runtime_bytes": OBJECT,
            "runtime_totals": {"type": "object", "additionalProperties": COUNT},
            "top_streams": _TOP,
        }
    ),
)
ROUTES: Final = route_group(
    "server",
    Route(
        *("GET", "/v1/server/_details", Action.INSPECT_SERVER, ServerRoutes.details, "readServerDetails"),
        "Limits, queues and memory",
        {200: answer("As it is now.", _SERVER_DETAILS)},
    ),
    Route(
        *("GET", "/v1/server/_mem", Action.INSPECT_SERVER, ServerRoutes.memory, "readServerMemory"),
        "Memory by subsystem",
        {200: answer("As it is now.", _SERVER_MEMORY)},
    ),
    Route(
        *("POST", "/v1/server/_seal", Action.SEAL, SealRoute.seal, "seal"),
        "Move everything, or one stream, to the object store",
        {
            200: answer("Everything is in the object store.", Sealed, example={"sealed": True}),
            202: answer("Sealing continues after the request timeout: repeat the request.", Sealed),
        },
        errors=(404, 409, 410, 507),
        parameters=[query("stream", "Only this stream.")],
        auth=Auth.IDENTIFIED,
    ),
    place="all",
)
