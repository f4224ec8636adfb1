"""Ingest: commits the changes of a source with its progress, and manages the state of its collections.

A batch of changes and the position after it are one commit. Changes that the source sends again are
recognized by their position and dropped. The source is the only writer of its collections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec
import orjson

from tailrace.common.errors import TailraceError
from tailrace.common.timestamps import format_rfc3339
from tailrace.log.log import append_to_streams
from tailrace.log.transaction import Transaction
from tailrace.watch import names
from tailrace.watch.collection import Collection, CollectionState, encode_config_entry, encode_control_entry
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document import (
    IMAGE_MISSING,
    RAW_NULL,
    ChangeEntry,
    ChangeImages,
    ChangeOp,
    ChangeSource,
    Document,
    PreviousVersion,
    TransactionRef,
    encode_change,
)
from tailrace.watch.document_view import DocumentRow
from tailrace.watch.document_writer import DocumentState
from tailrace.watch.realtime.gateway import Gateway
from tailrace.watch.sources.config import SourceConfig
from tailrace.watch.sources.model import (
    SourceChange,
    SourceError,
    SourcePosition,
    SourceProgress,
    decode_progress,
    format_lsn,
    progress_fact,
    source_stream_name,
)

TRUNCATE_DOCUMENTS = 500
SLICE_CHANGES = 64  # then the loop runs other callbacks
LOAD = "load"
CHANGE_OPS = ("insert", "update", "replace", "delete")


class SupersededError(TailraceError):
    """Another connector has taken over the source: this one must stop."""

    def __init__(self) -> None:
        super().__init__("stale_epoch", "another connector follows the source")


class _IngestPlan:
    """The entries of a batch before the commit."""

    def __init__(self, now_ns: int, position: SourcePosition, marked: str = "", token: str = "") -> None:
        self.now_ns = now_ns
        self.time = format_rfc3339(now_ns)
        self.position = position
        self.marked = marked  # the collection, if it has its own change log and position
        self.token = token  # the resume token of that log
        self.states: dict[tuple[Collection, str], DocumentState] = {}
        self.prefetched: dict[tuple[Collection, str], DocumentRow | None] = {}  # rows of the view
        self.entries: dict[str, list[bytes]] = {}

    def next_index(self, lsn: int) -> int:
        return self.position.change + 1 if lsn == self.position.lsn else 0


class SourceIngest:
    """Writes the changes of one source to the log. `progress` is the durable progress."""

    def __init__(
        self,
        registry: CollectionRegistry,
        database: str,
        config: SourceConfig,
        collections: Mapping[str, Collection],
        progress: SourceProgress,
        document_bytes: int,
    ) -> None:
        self._registry = registry
        self._log = registry.log
        self._fact = progress_fact(database, config.name)
        self._source = (config.kind, config.name)
        self._collections = collections
        self._bytes_max = document_bytes
        self.progress = progress
        self.counts: dict[str, int] = dict.fromkeys(CHANGE_OPS, 0)
        self.repeats = 0  # duplicates that were dropped
        # The position of the last change, and its documents.
        self._last_change: tuple[tuple[int, int], set[tuple[str, str]]] = ((0, -1), set())
        self.offset: Callable[[int], str] | None = None  # formats positions of a stream source

    # -- following -------------------------------------------------------------------------------------

    async def follow(self, changes: Sequence[SourceChange], safe: int = 0) -> None:
        """Commit changes, and `safe`, up to which the source may discard its log; returns when durable."""
        await self._commit(await self._consume(self._plan(), changes), safe)

    async def follow_one(self, collection: str, changes: Sequence[SourceChange], token: str) -> None:
        """Commit changes of one collection whose own log was read up to the token."""
        plan = await self._consume(self._plan(collection), changes)
        plan.token = token
        await self._commit(plan)

    async def _consume(self, plan: _IngestPlan, changes: Sequence[SourceChange]) -> _IngestPlan:
        """The plan with the changes; a truncate commits what precedes it and starts a new plan."""
        for name, keys in _keys_of(changes).items():
            self._prefetch(plan, self._collections[name], list(keys))
        for number, change in enumerate(changes):
            if self._is_duplicate(plan.position.place, change):
                self.repeats += 1
                self._registry.counters.for_collection(self._collections[change.collection]).dropped[
                    "source"
                ] += 1
                continue
            if change.op == "clear":
                await self._commit(plan)
                await self._truncate(change)
                plan = self._plan()
                continue
            collection = self._collections[change.collection]
            if change.image == IMAGE_MISSING:
                self._record_missing_image(plan, collection, change)
                continue
            data = None if change.op == "delete" else self._fill_unchanged(plan, collection, change)
            self._decide(plan, collection, change.key, data, change)
            if number % SLICE_CHANGES == SLICE_CHANGES - 1:
                await asyncio.sleep(0)
        return plan

    def _is_duplicate(self, position: tuple[int, int], change: SourceChange) -> bool:
        """Whether the change was ingested before, by position.

        One message may hold changes of several documents at the same position, so keys are compared too.
        """
        at, key = (change.lsn, change.ordinal), (change.collection, change.key)
        if at > position:
            self._last_change = (at, {key})
            return False
        here, keys = self._last_change
        if at != here or at != position or key in keys:
            return True
        keys.add(key)
        return False

    def _fill_unchanged(self, plan: _IngestPlan, collection: Collection, change: SourceChange) -> bytes:
        """The complete document; unchanged large values that the source omits come from the view."""
        if not change.unchanged:
            return change.data
        state = self._state(plan, collection, change.was or change.key)
        before: Document = {} if state is None else orjson.loads(state.data)
        row = orjson.loads(change.data)
        for name in change.unchanged:
            if name in before:
                row[name] = before[name]
            else:
                del row[name]  # unknown: the source was not copied
        return orjson.dumps(row)

    async def _truncate(self, change: SourceChange) -> None:
        """Delete all documents in batches; after an interruption the message is read again."""
        collection = self._collections[change.collection]
        view, after = self._registry.view.current, ""
        begun = change._replace(ordinal=change.ordinal - 1)
        while True:
            self._registry.check_applied(collection)
            rows = view.documents_after(collection.number, after, TRUNCATE_DOCUMENTS)
            plan = self._plan()
            for row in rows:
                self._decide(plan, collection, row.id, None, begun)
            if not rows:
                plan.position = SourcePosition(change.lsn, change.ordinal, self._index_in(plan, change.lsn))
                await self._commit(plan)
                return
            after = rows[-1].id
            await self._commit(plan)

    def _index_in(self, plan: _IngestPlan, lsn: int) -> int:
        return plan.position.change if plan.position.lsn == lsn else -1

    # -- loading ---------------------------------------------------------------------------------------

    async def load(self, collection: Collection, rows: Sequence[tuple[str, bytes]]) -> int:
        """Commit copied rows that differ from the view; returns how many."""
        plan = self._plan(collection.name)
        differing = 0
        self._prefetch(plan, collection, [key for key, _ in rows])
        for number, (key, data) in enumerate(rows):
            state = self._state(plan, collection, key)
            if state is None or state.deleted or state.data != data:
                differing += 1
                self._decide(plan, collection, key, data, self._load_change(plan, collection))
            if number % SLICE_CHANGES == SLICE_CHANGES - 1:
                await asyncio.sleep(0)
        await self._commit(plan)
        return differing

    async def remove(self, collection: Collection, keys: Sequence[str]) -> None:
        """Delete documents that the source does not have."""
        plan = self._plan(collection.name)
        for key in keys:
            self._decide(plan, collection, key, None, self._load_change(plan, collection))
        await self._commit(plan)

    def _load_change(self, plan: _IngestPlan, collection: Collection) -> SourceChange:
        """A copied row has no position in the source's log: it gets the position at the start of the copy."""
        at = plan.position
        return SourceChange(at.lsn, at.ordinal, LOAD, plan.time, "put", collection.name, token=plan.token)

    def set_position(self, lsn: int) -> None:
        """The position of the following removals."""
        if lsn > self.progress.lsn:
            self.progress = self.progress.with_position(SourcePosition(lsn, 0, -1))

    # -- deciding --------------------------------------------------------------------------------------

    def _plan(self, collection: str = "") -> _IngestPlan:
        now_ns, mark = self._log.clock.now_ns(), self.progress.marks.get(collection)
        if mark is None:
            return _IngestPlan(now_ns, self.progress.position)
        return _IngestPlan(now_ns, mark.position, collection, mark.token)

    def _prefetch(self, plan: _IngestPlan, collection: Collection, keys: Sequence[str]) -> None:
        """Read the documents of a batch at once; there is no other writer."""
        self._registry.check_applied(collection)
        found = self._registry.view.find_many(collection.number, keys)
        plan.prefetched.update({(collection, key): found.get(key) for key in keys})

    def _state(self, plan: _IngestPlan, collection: Collection, key: str) -> DocumentState | None:
        planned = plan.states.get((collection, key))
        if planned is not None:
            return planned
        if (collection, key) in plan.prefetched:
            row = plan.prefetched[collection, key]
        else:
            self._registry.check_applied(collection)
            row = self._registry.view.find(collection.number, key)
        if row is None:
            return None
        return DocumentState(row.version, row.created_ms, row.updated_ms, bool(row.deleted), row.data)

    def _decide(
        self, plan: _IngestPlan, collection: Collection, key: str, data: bytes | None, change: SourceChange
    ) -> None:
        state = self._state(plan, collection, key)
        lives = state is not None and not state.deleted
        index = plan.next_index(change.lsn)
        if data is None and not lives:
            # Unknown or deleted already: only the position moves.
            plan.position = SourcePosition(change.lsn, change.ordinal, index - 1)
            return
        if data is not None and len(data) > self._bytes_max:
            raise SourceError(
                f"document {collection.name}/{key} has {len(data)} bytes,"
                f" TAILRACE_WATCH_DOCUMENT_BYTES allows {self._bytes_max}"
            )
        partition = names.partition_for_key(key, collection.config.partitions)
        stream = collection.stream(partition)
        found = self._log.find(stream)
        updated_ms = max(0 if found is None else found.last_ns, plan.now_ns) // 1_000_000
        after = DocumentState(
            (collection.purged[partition] if state is None else state.version) + 1,
            state.created_ms if state is not None and lives else updated_ms,
            updated_ms,
            data is None,
            data if data is not None else state.data if state is not None else b"{}",
        )
        position = SourcePosition(change.lsn, change.ordinal, index)
        changed: ChangeOp = "replace" if change.replaces else "update"
        op: ChangeOp = "delete" if data is None else changed if lives else "insert"
        entry = self._entry(collection, key, op, state if lives else None, after, change, position)
        plan.entries.setdefault(stream, []).append(encode_change(entry))
        plan.states[collection, key] = after
        plan.position = position
        self.counts[op] += 1

    def _record_missing_image(self, plan: _IngestPlan, collection: Collection, change: SourceChange) -> None:
        """The image of the change is unavailable: record an update without it; the document stays."""
        state = self._state(plan, collection, change.key)
        index = plan.next_index(change.lsn)
        if state is None or state.deleted:
            plan.position = SourcePosition(change.lsn, change.ordinal, index - 1)
            return
        position = SourcePosition(change.lsn, change.ordinal, index)
        entry = self._entry(collection, change.key, "update", state, state, change, position)
        partition = names.partition_for_key(change.key, collection.config.partitions)
        plan.entries.setdefault(collection.stream(partition), []).append(encode_change(entry))
        plan.position = position

    def _entry(
        self,
        collection: Collection,
        key: str,
        op: ChangeOp,
        before: DocumentState | None,
        after: DocumentState,
        change: SourceChange,
        position: SourcePosition,
    ) -> ChangeEntry:
        kind, name = self._source
        stored = after.deleted or collection.effective_config.store_before
        # Subscribers have seen the view's version. The source's before-image may differ if an earlier
        # image was looked up later than its change.
        confirmed = before is not None and stored and change.before == before.data
        image = "none" if after.deleted else change.image
        if self.offset is None:
            lsn, token = format_lsn(position.lsn), change.token or position.token
        else:
            lsn = token = self.offset(position.lsn)
        return ChangeEntry(
            database=collection.database,
            collection=collection.name,
            documentKey=key,
            op=op,
            before=msgspec.Raw(before.data) if before is not None and stored else RAW_NULL,
            after=RAW_NULL if image in ("none", IMAGE_MISSING) else msgspec.Raw(after.data),
            images=ChangeImages("none" if before is None else "full" if confirmed else "view", image),
            version=after.version,
            createdAt=after.created_ms,
            prev=None if before is None else PreviousVersion(before.version, before.updated_ms),
            txn=TransactionRef(change.txn, position.change),
            commitTime=change.time,
            source=ChangeSource(kind, name, token),
            lsn=lsn,
        )

    # -- committing ------------------------------------------------------------------------------------

    async def _commit(self, plan: _IngestPlan, safe: int = 0) -> None:
        progress = self.progress
        if plan.marked:
            progress = progress.with_mark(plan.marked, plan.position, plan.token, ended=False)
            progress = progress.with_position(max(progress.position, plan.position))
        else:
            progress = progress.with_position(plan.position)
        if safe > progress.safe:
            progress = progress.with_changes(safe=safe)
        if plan.entries or progress.safe != self.progress.safe:
            await self.commit(list(plan.entries.items()), progress, plan.now_ns)
        else:
            # Nothing to commit; after a restart it is read again.
            self.progress = progress

    async def commit_progress(self, progress: SourceProgress) -> None:
        """Commit only the progress."""
        await self.commit([], progress, self._log.clock.now_ns())

    async def commit(
        self, parts: Sequence[tuple[str, Sequence[bytes]]], progress: SourceProgress, now_ns: int
    ) -> None:
        """Commit entries and progress in one record; returns when it is durable.

        Raises SupersededError unless this is the newest connector of the source.
        """
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def reply(_: Transaction, error: TailraceError | None) -> None:
            if settled.done():
                return
            if error is None:
                settled.set_result(None)
            else:
                settled.set_exception(error)

        facts = [(self._fact, progress.encode())]

        def submit() -> None:
            if decode_progress(self._log.streams.meta.get(self._fact)).epoch > self.progress.epoch:
                raise SupersededError
            append_to_streams(self._log, parts, now_ns, reply, None, facts)

        await self._log.backpressure_queue.submit(submit)
        await settled
        self.progress = progress


def _keys_of(changes: Sequence[SourceChange]) -> dict[str, dict[str, None]]:
    """The keys of a batch by collection, without duplicates."""
    found: dict[str, dict[str, None]] = {}
    for change in changes:
        if change.op != "clear":
            keys = found.setdefault(change.collection, {})
            keys[change.key] = None
            if change.was is not None:
                keys[change.was] = None
    return found


StreamEntries = list[tuple[str, list[bytes]]]


class SourceLifecycle:
    """State of a source's collections; a transition is one commit of controls, configuration and progress."""

    def __init__(
        self,
        registry: CollectionRegistry,
        gateway: Gateway,
        database: str,
        config: SourceConfig,
        collections: Mapping[str, Collection],
        document_bytes: int,
        on_changed: Callable[[Collection], None],
    ) -> None:
        self._registry = registry
        self._gateway = gateway
        self._on_changed = on_changed
        self._database = database
        self._config = config
        self._document_bytes = document_bytes
        self.collections = collections
        self._ingest: SourceIngest | None = None
        self._epoch = self.progress.epoch

    @property
    def progress(self) -> SourceProgress:
        """The newest submitted progress; later commits cannot become durable without it."""
        return decode_progress(
            self._registry.log.streams.meta.get(progress_fact(self._database, self._config.name))
        )

    @property
    def counts(self) -> dict[str, int]:
        return {} if self._ingest is None else dict(self._ingest.counts)

    @property
    def repeats(self) -> int:
        return 0 if self._ingest is None else self._ingest.repeats

    def ingest(self) -> SourceIngest:
        """A new ingest at the current progress."""
        before, progress = self._ingest, self.progress
        if progress.epoch > self._epoch:
            raise SupersededError
        fresh = SourceIngest(
            self._registry, self._database, self._config, self.collections, progress, self._document_bytes
        )
        if before is not None:
            fresh.counts, fresh.repeats = before.counts, before.repeats
        self._ingest = fresh
        return fresh

    async def wait_settled(self) -> None:
        """Wait until all submitted commits are durable or failed: only then the view is correct."""
        newest = self._registry.log.committer.newest
        if newest is None:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_settled(_: TailraceError | None) -> None:
            if not done.done():
                done.set_result(None)

        newest.waiting.append(on_settled)
        await done

    def apply(self) -> None:
        """After a start: set the collections' state from the progress."""
        phase = self.progress.phase
        for collection in self.collections.values():
            collection.state = "loading" if phase == "new" else phase

    # -- transitions -----------------------------------------------------------------------------------

    async def raise_epoch(self) -> None:
        """Fence off connectors that were started earlier."""
        self._epoch = self.progress.epoch
        ingest = self.ingest()
        before = self._epoch
        # Set before the commit: if this is cancelled meanwhile, the next connector continues from it.
        self._epoch = ingest.progress.epoch + 1
        try:
            await ingest.commit([], ingest.progress.with_changes(epoch=self._epoch), self._now_ns())
        except TailraceError:
            self._epoch = before
            raise

    async def mark_stale(self, reason: str, *, rescan: bool) -> None:
        """Changes are missing: stop delivery until the source was loaded again."""
        ingest = self.ingest()
        progress = ingest.progress.with_changes(phase="stale", reason=reason, rescan=rescan)
        now_ns = self._now_ns()
        parts = self._controls("stale", reason=reason)
        await ingest.commit([*parts, self._progress_entry(progress, now_ns)], progress, now_ns)
        self._set_state("stale", reason)

    async def begin_load(self, ingest: SourceIngest, progress: SourceProgress) -> None:
        """Start a copy, in a new generation."""
        await self._begin(ingest, progress.with_changes(phase="loading"), "load-begin")

    async def begin_without_load(self, ingest: SourceIngest, progress: SourceProgress) -> None:
        """Follow the source without a copy of its existing documents."""
        await self._begin(ingest, progress.with_changes(phase="live"), "live")

    async def reset(self, ingest: SourceIngest) -> None:
        """The source was reset: load it again in a new generation."""
        await self._begin(ingest, ingest.progress.with_changes(phase="loading"), "load-begin")

    async def end_load(self, ingest: SourceIngest) -> None:
        """The copy is complete: the collections are live."""
        progress = ingest.progress.with_changes(phase="live")
        now_ns = self._now_ns()
        parts = self._controls("load-end", "live")
        await ingest.commit([*parts, self._progress_entry(progress, now_ns)], progress, now_ns)
        self._set_state("live")

    async def _begin(self, ingest: SourceIngest, progress: SourceProgress, control: str) -> None:
        now_ns = self._now_ns()
        # Collections without changes keep their generation: there are no positions to invalidate.
        older = [one for one in self.collections.values() if any(one.applied)]
        raised = {
            one: one.effective_config.with_changes(generation=one.config.generation + 1) for one in older
        }
        for collection, config in raised.items():
            collection.pending = config  # concurrent configuration changes build on this
        parts: StreamEntries = []
        if raised:
            entries = [
                encode_config_entry(one.name, config, "update", now_ns) for one, config in raised.items()
            ]
            parts.append((names.collections_stream_name(self._database), entries))
        for collection in self.collections.values():
            generation = self._registry.generation(collection) + (collection in raised)
            entries = [encode_control_entry(control, generation)]
            if collection in raised:
                entries.insert(0, encode_control_entry("generation", generation, reason="source"))
            parts += [(stream, entries) for stream in collection.streams()]
        try:
            await ingest.commit([*parts, self._progress_entry(progress, now_ns)], progress, now_ns)
        finally:
            for collection, config in raised.items():
                if collection.pending is config:
                    collection.pending = None
        for collection, config in raised.items():
            collection.config = config
            self._registry.view.set_generation(collection.number, self._registry.generation(collection))
        self._set_state("live" if progress.phase == "live" else "loading")
        for collection in raised:
            self._gateway.invalidate_all(collection, "generation")

    # -- helpers ---------------------------------------------------------------------------------------

    def _now_ns(self) -> int:
        return self._registry.log.clock.now_ns()

    def _progress_entry(self, progress: SourceProgress, now_ns: int) -> tuple[str, list[bytes]]:
        return source_stream_name(self._database, self._config.name), [progress.entry(now_ns)]

    def _controls(self, *controls: str, **more: str) -> StreamEntries:
        parts: StreamEntries = []
        for collection in self.collections.values():
            generation = self._registry.generation(collection)
            entries = [encode_control_entry(control, generation, **more) for control in controls]
            parts += [(stream, entries) for stream in collection.streams()]
        return parts

    def _set_state(self, state: CollectionState, reason: str = "") -> None:
        for collection in self.collections.values():
            collection.state = state
            self._gateway.on_state(collection, reason)
            self._on_changed(collection)
