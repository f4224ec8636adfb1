"""The sources of a server: configuration, start and stop of their connectors, status and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

import orjson

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import split_list
from tailrace.common.timestamps import format_rfc3339
from tailrace.log.listing import list_streams
from tailrace.log.log import append_to_streams
from tailrace.log.model import Stream
from tailrace.log.transaction import Transaction
from tailrace.routing.context import Context
from tailrace.watch import names
from tailrace.watch.collection import NATIVE, Collection, encode_config_entry
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.sources import mongo, postgres
from tailrace.watch.sources.config import SecretPolicy, SourceConfig, read_source_config
from tailrace.watch.sources.connector import SourceContext, SourceThread
from tailrace.watch.sources.ingest import CHANGE_OPS, SourceLifecycle
from tailrace.watch.sources.model import SourceError, SourceStatus, progress_fact
from tailrace.watch.sources.mongo import MongoConnector
from tailrace.watch.sources.postgres import PostgresConnector
from tailrace.watch.sources.stream import OpenRemoteOrigin, StreamConnector

logger = logging.getLogger("tailrace.watch")

PAGE_BYTES: Final = 4 * 1024 * 1024
PAGE_ENTRIES: Final = 2000
DROP_S_MAX: Final = 15.0
HALT_S_MAX: Final = 5.0
SOURCE_PHASES: Final = ("new", "loading", "live", "stale")

Json = dict[str, Any]


class ManagedSource:
    """One source and its connector task."""

    def __init__(
        self, database: str, config: SourceConfig, states: SourceLifecycle, status: SourceStatus
    ) -> None:
        self.database = database
        self.config = config
        self.states = states
        self.status = status
        self.task: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            # Do not wait for a database that does not respond: its thread ends with the connection.
            await asyncio.wait([task], timeout=HALT_S_MAX)

    def to_json(self) -> Json:
        progress = self.states.progress
        state = {
            "phase": progress.phase,
            "reason": progress.reason,
            "epoch": progress.epoch,
            "token": progress.position.token,
            **({"tokens": progress.tokens} if progress.marks else {}),
            **self.status.to_json(),
            "changes": sum(self.states.counts.values()),
        }
        return {"database": self.database, **self.config.value(), "status": state}


class SourceManager:
    """All sources of the process. Owned by the loop thread."""

    def __init__(
        self,
        context: Context,
        registry: CollectionRegistry,
        gateway: Gateway,
        on_changed: Callable[[Collection], None],
        open_remote: OpenRemoteOrigin | None = None,
    ) -> None:
        """`on_changed` is called with a collection whose state changed; `open_remote` opens streams of other
        workers.
        """
        self._context = context
        self._registry = registry
        self._gateway = gateway
        self._log = context.log
        self._limits = context.limits
        settings = context.settings
        self._secrets = SecretPolicy(
            split_list(settings.source_variables), split_list(settings.source_directories)
        )
        self._sources: dict[tuple[str, str], ManagedSource] = {}
        self._lock = asyncio.Lock()  # serializes changes of sources
        self._on_changed = on_changed
        self._past_counters: Counter[str] = Counter()  # of removed sources
        self._open_remote = open_remote
        registry.has_source = lambda collection: self._owner(collection) is not None
        gateway.objectives.lag_ms = self._lag_ms
        gateway.objectives.lag_changes = self._lag_changes

    # -- start and stop --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load and start all sources; the collection registry must have started."""
        for stream in self._streams():
            database = stream.name.removeprefix(names.COLLECTIONS_PREFIX)
            for config in (await self._load(stream)).values():
                await self._restore(database, config)
        # Collections of removed sources are no longer updated.
        for collection in self._registry.collections():
            if collection.config.source != NATIVE and self._owner(collection) is None:
                collection.state = "stale"

    def stop(self) -> None:
        for source in self._sources.values():
            if source.task is not None:
                source.task.cancel()

    def connect(self, telemetry: ServerMetrics) -> None:
        """Register metrics, which are read on scrape."""
        telemetry.watch_sources.each = self._by_phase
        telemetry.watch_source_changes.each = self._by_op
        telemetry.watch_source_repeats.read = lambda: self._sum("repeats")
        telemetry.watch_source_restarts.read = lambda: self._sum("restarts")
        telemetry.watch_source_gaps.read = lambda: self._sum("gaps")
        telemetry.watch_source_retained_bytes.read = lambda: max(
            (one.status.retained_bytes or 0 for one in self._sources.values()), default=0
        )

    def _lag_ms(self, collection: Collection) -> float:
        owner = self._owner(collection)
        return 0.0 if owner is None else owner.status.lag_s * 1000

    def _lag_changes(self, collection: Collection) -> int:
        owner = self._owner(collection)
        return 0 if owner is None else owner.status.lag_changes

    def _by_phase(self) -> list[tuple[list[str], float]]:
        counts: Counter[str] = Counter(one.states.progress.phase for one in self._sources.values())
        return [([phase], counts[phase]) for phase in SOURCE_PHASES]

    def _by_op(self) -> list[tuple[list[str], float]]:
        counts = Counter(self._past_counters)
        for one in self._sources.values():
            counts.update(one.states.counts)
        return [([op], counts[op]) for op in CHANGE_OPS]

    def _sum(self, what: str) -> int:
        found = self._past_counters[what]
        for one in self._sources.values():
            found += one.states.repeats if what == "repeats" else getattr(one.status, what)
        return found

    # -- lookup ----------------------------------------------------------------------------------------

    def list_sources(self, database: str) -> list[ManagedSource]:
        self._registry.database(database)
        return [one for (owner, _), one in sorted(self._sources.items()) if owner == database]

    def find(self, database: str, name: str) -> ManagedSource:
        self._registry.database(database)
        found = self._sources.get((database, name))
        if found is None:
            raise TailraceError("not_found", f"source {name!r} not found")
        return found

    def _owner(self, collection: Collection) -> ManagedSource | None:
        source = self._sources.get((collection.database, collection.config.source))
        return source if source is not None and collection.name in source.states.collections else None

    # -- changing --------------------------------------------------------------------------------------

    async def put(self, database: str, name: str, value: Json) -> tuple[ManagedSource, bool]:
        """Create or change a source; True if it is new."""
        config = read_source_config(database, name, value)
        self._secrets.check(config.dsn)
        _check_driver(config.kind)
        async with self._lock:
            self._registry.database(database)
            known = self._sources.get((database, name))
            if known is not None:
                return await self._change(known, config), False
            if len(self._sources) >= self._limits.watch_sources:
                raise TailraceError(
                    "overloaded", f"a server may have at most {self._limits.watch_sources} sources"
                )
            collections, fresh, settled = await self._log.backpressure_queue.submit(
                partial(self._submit_new, database, config)
            )
            try:
                await settled
            except TailraceError:
                self._registry.drop_uncommitted()
                raise
            for collection in fresh:
                collection.durable = True
            source = self._build(database, config, collections)
            source.states.apply()
            for collection in collections.values():
                self._gateway.on_state(collection)
            self._begin(source)
            self._gateway.audit.event("source.created", None, {"source": name, "kind": config.kind})
            return source, True

    def _submit_new(
        self, database: str, config: SourceConfig
    ) -> tuple[dict[str, Collection], list[Collection], asyncio.Future[None]]:
        """Submit a new source; returns its collections, those of them that are new, and the commit."""
        collections = self._plan_collections(database, config)
        now_ns = self._context.clock.now_ns()
        entries = [encode_source_entry(config, "insert", now_ns)]
        fresh = [one for one in collections.values() if not one.durable]
        entries += [encode_config_entry(one.name, one.config, "insert", now_ns) for one in fresh]
        settled = self._submit(database, entries, now_ns, [(progress_fact(database, config.name), None)])
        for collection in fresh:
            self._registry.add(collection)  # reserves the name
        return collections, fresh, settled

    async def _change(self, source: ManagedSource, config: SourceConfig) -> ManagedSource:
        if config.identity() != source.config.identity():
            raise TailraceError(
                "conflict",
                "kind, place, collections and numeric of a source cannot change, remove it first",
            )
        if config == source.config:
            return source
        now_ns = self._context.clock.now_ns()
        entry = encode_source_entry(config, "update", now_ns)
        await self._commit(source.database, [entry], now_ns)
        await source.stop()
        changed = self._build(source.database, config, dict(source.states.collections))
        self._add_past_counters(source)
        self._begin(changed)
        return changed

    async def remove(self, database: str, name: str, *, keep_slot: bool) -> Json:
        """Remove a source and its replication slot; its documents stay, read-only."""
        async with self._lock:
            source = self.find(database, name)
            await source.stop()
            has_slot = source.config.kind == "postgres" and not keep_slot
            try:
                await source.states.wait_settled()
                await source.states.mark_stale("the source was removed", rescan=False)
                now_ns = self._context.clock.now_ns()
                entry = encode_source_entry(source.config, "delete", now_ns)
                await self._commit(database, [entry], now_ns, [(progress_fact(database, name), None)])
            except TailraceError:
                self._begin(source)  # not removed
                raise
            dropped, reason = await self._drop_slot(source) if has_slot else (False, None)
            self._add_past_counters(source)
            del self._sources[database, name]
            slot = source.config.slot if has_slot else None
            return {"removed": name, "slot": slot, "slotDropped": dropped, "reason": reason}

    async def resync(self, database: str, name: str) -> ManagedSource:
        """Copy everything again."""
        async with self._lock:
            source = self.find(database, name)
            await source.stop()
            await source.states.wait_settled()
            try:
                if source.states.progress.phase != "new":
                    await source.states.mark_stale("resync was requested", rescan=True)
            finally:
                self._begin(source)
            return source

    async def _drop_slot(self, source: ManagedSource) -> tuple[bool, str | None]:
        thread, adapter = SourceThread(source.config.name), postgres.PostgresConnection(source.config)

        def drop() -> None:
            self._secrets.check(source.config.dsn)
            adapter.open()
            adapter.drop_slot()

        try:
            async with asyncio.timeout(DROP_S_MAX):
                await thread.call(drop)
        except Exception as error:  # noqa: BLE001 - returned to the client
            return False, " ".join(str(error).split())[:500] or "the database does not respond"
        finally:
            thread.finish(adapter.close)
        return True, None

    # -- helpers ---------------------------------------------------------------------------------------

    def _plan_collections(self, database: str, config: SourceConfig) -> dict[str, Collection]:
        """The collections of a source, including new ones; they have no other writer."""
        found: dict[str, Collection] = {}
        for mapped in config.tables:
            known = self._registry.writable(database, mapped.collection)
            if known is None:
                partitions = mapped.partitions or self._registry.partitions_for(mapped.collection)
                known = self._registry.plan(database, mapped.collection, partitions)
                known.config = known.config.with_changes(source=config.name)
            elif known.config.source != config.name:
                raise TailraceError(
                    "collection_exists",
                    f"collection {mapped.collection!r} belongs to another source or to clients",
                )
            elif mapped.partitions not in (None, known.config.partitions):
                raise TailraceError(
                    "collection_exists", "the number of partitions of a collection cannot change"
                )
            found[mapped.collection] = known
        return found

    def _build(
        self, database: str, config: SourceConfig, collections: dict[str, Collection]
    ) -> ManagedSource:
        states = SourceLifecycle(
            self._registry,
            self._gateway,
            database,
            config,
            collections,
            self._limits.watch_document_bytes,
            self._notify_changed,
        )
        source = ManagedSource(database, config, states, SourceStatus(clock=self._context.clock))
        self._sources[database, config.name] = source
        return source

    def _notify_changed(self, collection: Collection) -> None:
        self._on_changed(collection)

    def _begin(self, source: ManagedSource, lost: str | None = None) -> None:
        async def work() -> None:
            try:
                self._secrets.check(source.config.dsn)  # the settings may have changed since
            except TailraceError as error:
                source.status.error = error.message
                logger.error(
                    "cannot start source", extra=log_fields(source=source.config.name, error=error.message)
                )
                return
            with suppress(TailraceError):
                await source.states.wait_settled()
                await source.states.raise_epoch()
                if lost is not None and source.states.progress.phase != "new":
                    await source.states.mark_stale(lost, rescan=source.config.on_gap == "rescan")
            limits, audit = self._limits, self._gateway.audit
            context = SourceContext(
                self._registry, source.states, source.config, source.status, limits, audit
            )
            if source.config.kind == "postgres":
                await PostgresConnector(context).run()
            elif source.config.kind == "mongo":
                await MongoConnector(context).run()
            else:
                await StreamConnector(context, self._open_remote).run()

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                source.status.error = f"internal error: {type(error).__name__}"
                logger.error("source failed", extra=log_fields(source=source.config.name), exc_info=error)

        source.task = self._context.loop.create_task(work())
        source.task.add_done_callback(ended)

    async def _restore(self, database: str, config: SourceConfig) -> None:
        found = self._registry.database(database)
        collections = {
            one.collection: found[one.collection] for one in config.tables if one.collection in found
        }
        if len(collections) < len(config.tables):
            logger.error(
                "cannot start source, a collection is missing",
                extra=log_fields(database=database, source=config.name),
            )
            return
        broken = any(one.state == "stale" for one in collections.values())  # set when the registry started
        source = self._build(database, config, collections)
        source.states.apply()
        self._begin(source, "the view of a collection cannot be rebuilt" if broken else None)

    def _add_past_counters(self, source: ManagedSource) -> None:
        self._past_counters.update(source.states.counts)
        self._past_counters["repeats"] += source.states.repeats
        self._past_counters["restarts"] += source.status.restarts
        self._past_counters["gaps"] += source.status.gaps

    def _streams(self) -> Iterator[Stream]:
        after = ""
        while page := list_streams(self._log, after, names.COLLECTIONS_PREFIX, 1000, system=True):
            yield from page
            after = page[-1].name

    async def _load(self, stream: Stream) -> dict[str, SourceConfig]:
        """The latest configuration of each source of a database."""
        database = stream.name.removeprefix(names.COLLECTIONS_PREFIX)
        found: dict[str, SourceConfig] = {}
        position = stream.earliest
        while position < stream.visible:
            page = await self._log.reader.read_labelled(stream, position, PAGE_BYTES, PAGE_ENTRIES)
            position = page.next_entry
            for raw in page.parts:
                message = orjson.loads(raw)
                if message["type"] != "source":
                    continue
                name = message["key"]
                if message["headers"]["operation"] == "delete":
                    found.pop(name, None)
                else:
                    found[name] = read_source_config(database, name, message["value"])
        return found

    async def _commit(
        self,
        database: str,
        entries: list[bytes],
        now_ns: int,
        facts: list[tuple[str, bytes | None]] | None = None,
    ) -> None:
        submit = partial(self._submit, database, entries, now_ns, facts)
        await (await self._log.backpressure_queue.submit(submit))

    def _submit(
        self,
        database: str,
        entries: list[bytes],
        now_ns: int,
        facts: list[tuple[str, bytes | None]] | None = None,
    ) -> asyncio.Future[None]:
        settled: asyncio.Future[None] = self._context.loop.create_future()

        def reply(_: Transaction, error: TailraceError | None) -> None:
            if settled.done():
                return
            if error is None:
                settled.set_result(None)
            else:
                settled.set_exception(error)

        parts = [(names.collections_stream_name(database), entries)]
        append_to_streams(self._log, parts, now_ns, reply, None, facts or ())
        return settled


def encode_source_entry(config: SourceConfig, operation: str, now_ns: int) -> bytes:
    """A state message of `__collections__/<database>`."""
    headers = {"operation": operation, "timestamp": format_rfc3339(now_ns)}
    return orjson.dumps({"type": "source", "key": config.name, "value": config.value(), "headers": headers})


def _check_driver(kind: str) -> None:
    try:
        if kind == "postgres":
            postgres.import_driver()
        elif kind == "mongo":
            mongo.import_driver()
    except SourceError as error:
        raise TailraceError("not_installed", str(error)) from None
