"""Document writes: conditions, idempotency keys, and one committed record per request.

Writes are decided one after the other against planned state, which may not be durable yet. A request that is
repeated under its idempotency key gets the result of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import orjson
import xxhash
from msgspec import UNSET

from tailrace.common.errors import TailraceError
from tailrace.common.timestamps import format_rfc3339
from tailrace.log.log import append_to_streams
from tailrace.log.transaction import Transaction
from tailrace.routing.openapi import Count, JsonObject
from tailrace.watch import document, names
from tailrace.watch.collection import NATIVE, Collection, encode_config_entry
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document import (
    RAW_NULL,
    Change,
    ChangeEntry,
    ChangeImages,
    ChangeOp,
    Document,
    PreviousVersion,
    TransactionRef,
    encode_change,
)
from tailrace.watch.document_view import WriteRow
from tailrace.watch.names import DocumentPath

# Called when the write is decided, with the current document: a result completes the write, None continues.
WriteDecider = Callable[[Collection, "DocumentState | None"], "WriteResult | None"]


class DocumentWrite(NamedTuple):
    """One requested write."""

    op: Literal["put", "patch", "delete"]
    path: DocumentPath
    data: Document | None = None
    if_version: int | None = None
    if_present: bool = False
    if_absent: bool = False
    decider: WriteDecider | None = None
    creates_tombstone: bool = False  # a delete of a missing document creates a tombstone with `data`


class DocumentResult(TypedDict):
    """The outcome of one write of a batch."""

    path: str
    status: Count
    version: NotRequired[Count]
    error: NotRequired[JsonObject]


class DocumentResults(TypedDict):
    results: list[DocumentResult]


class WriteResult(msgspec.Struct):
    """The outcome of one write."""

    path: str
    status: int
    version: int | None = None
    updated_ms: int | None = None
    error: TailraceError | None = None

    def to_json(self) -> DocumentResult:
        found: DocumentResult = {"path": self.path, "status": self.status}
        if self.version is not None:
            found["version"] = self.version
        if self.error is not None:
            found["error"] = orjson.loads(self.error.body())["error"]
        return found


class DocumentState(NamedTuple):
    """A document including planned writes, possibly not durable yet."""

    version: int
    created_ms: int
    updated_ms: int
    deleted: bool
    data: bytes


_STATUSES: Final = {"insert": 201, "delete": 204}
# Operation in the log by requested operation.
_OPS: Final = {"put": ("insert", "replace"), "patch": ("update",), "delete": ("delete",)}


def idempotency_conflict() -> TailraceError:
    """A client with the result of another request would assume that its own write was made."""
    return TailraceError("conflict", "this Idempotency-Key was used for another request")


def write_digest(write: DocumentWrite) -> str:
    """A hash of the parsed content; empty if there is none."""
    if write.data is None:
        return ""
    try:
        content = orjson.dumps(write.data, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        raise TailraceError("invalid_json", "the document has strings that are not valid Unicode") from None
    return xxhash.xxh3_128_hexdigest(content)


def is_same_request(writes: Sequence[DocumentWrite], others: Sequence[DocumentWrite]) -> bool:
    """Whether both requests have the same writes."""
    request, known = ([(one.op, one.path, write_digest(one)) for one in some] for some in (writes, others))
    return request == known


def repeated_results(writes: Sequence[DocumentWrite], made: Sequence[WriteRow]) -> list[WriteResult]:
    """The results of the first request; only effective writes are in the log."""
    rows, results = list(reversed(made)), list[WriteResult]()
    for write in writes:
        path = f"{write.path.collection}/{write.path.id}"
        if rows and rows[-1].id == write.path.id and rows[-1].op in _OPS[write.op]:
            row = rows.pop()
            if row.digest and row.digest != write_digest(write):
                raise idempotency_conflict()
            results.append(WriteResult(path, _STATUSES.get(row.op, 200), row.version, row.at_ms))
        else:
            error = TailraceError(
                "conflict", "this write had no effect in the first request with this Idempotency-Key"
            )
            results.append(WriteResult(path, error.status, error=error))
    if rows:
        raise idempotency_conflict()
    return results


WRITE_ID_RETENTION_MS = 10 * 60 * 1000
FORGET_EVERY = 10_000

WriteCallback = Callable[[list[WriteResult], TailraceError | None], None]


class Correction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The correct state of a document, and the seq that the view has of it."""

    id: str
    seen: Count | None
    version: Count
    created_ms: Count
    deleted: bool
    data: Document  # of a tombstone: the last data


# Called before each write with collection, method, and the flat document before and after; raises if the
# rules deny it.
WriteCheck = Callable[[Collection, str, Document | None, Document | None], None]


class _WritePlan:
    """The decided writes of a request, not submitted yet."""

    def __init__(self, now_ns: int, txn_id: str, write_id: str | None) -> None:
        self.now_ns = now_ns
        self.txn_id = txn_id
        self.write_id = write_id
        self.states: dict[tuple[Collection, str], DocumentState] = {}
        self.entries: dict[str, list[bytes]] = {}
        self.made: dict[tuple[str, str], Collection] = {}
        self.index = 0


class _SubmittedWrites(msgspec.Struct, eq=False):
    """The callbacks of a submitted record."""

    writes: Sequence[DocumentWrite]
    results: list[WriteResult]
    answer: WriteCallback
    remembered: tuple[Collection, str] | None = None
    repeats: list[WriteCallback] = msgspec.field(
        default_factory=list[WriteCallback]
    )  # repeats that arrived meanwhile


class DocumentWriter:
    """Sequences the writes of all native collections. Owned by the loop thread."""

    def __init__(self, registry: CollectionRegistry, *, document_bytes: int) -> None:
        self._registry = registry
        self._log = registry.log
        self._bytes_max = document_bytes
        self._planned: dict[tuple[Collection, str], DocumentState] = {}
        self._in_flight: dict[tuple[Collection, str], _SubmittedWrites] = {}
        self._failures = self._log.failures
        self._count = 0

    def on_applied(self, collection: Collection, change: Change) -> None:
        """A change is durable and in the view: drop its planned state."""
        key = (collection, change.entry.documentKey)
        planned = self._planned.get(key)
        if planned is not None and planned.version <= change.entry.version:
            del self._planned[key]

    def forget(self, collection: Collection) -> None:
        """The collection was deleted: drop its planned state."""
        self._planned = {key: state for key, state in self._planned.items() if key[0] is not collection}

    def write(
        self,
        database: str,
        writes: Sequence[DocumentWrite],
        allowed: WriteCheck,
        callback: WriteCallback,
        *,
        atomic: bool = False,
        write_id: str | None = None,
    ) -> None:
        """Decide and submit writes; `callback` is called when the result is durable."""
        self._forget_failed()
        self._registry.database(database)
        if write_id is not None and self._respond_to_repeat(database, writes, write_id, callback):
            return
        self._count += 1
        if self._count % FORGET_EVERY == 0:
            self._registry.view.delete_old_writes(
                self._log.clock.now_ns() // 1_000_000 - WRITE_ID_RETENTION_MS
            )
        now_ns = self._log.clock.now_ns()
        plan = _WritePlan(now_ns, f"{now_ns:x}-{self._count:x}", write_id)
        results = [self._decide_write(database, write, plan, allowed) for write in writes]
        failed = any(result.error is not None for result in results)
        if not plan.entries or (atomic and failed):
            self._respond_when_durable(results, callback)
            return
        self._submit(database, plan, _SubmittedWrites(writes, results, callback))

    def apply_corrections(
        self, collection: Collection, corrections: Sequence[Correction], name: str, callback: WriteCallback
    ) -> None:
        """Write corrected documents where the view differs; a repeat has no effect."""
        self._forget_failed()
        writes = [
            DocumentWrite("delete" if one.deleted else "put", DocumentPath(collection.name, one.id))
            for one in corrections
        ]
        if self._respond_to_repeat(collection.database, writes, name, callback):
            return
        self._count += 1
        now_ns = self._log.clock.now_ns()
        plan = _WritePlan(now_ns, f"{now_ns:x}-{self._count:x}", name)
        results = [self._apply_correction(collection, one, plan) for one in corrections]
        if plan.entries:
            self._submit(collection.database, plan, _SubmittedWrites(writes, results, callback))
        else:
            self._respond_when_durable(results, callback)

    def _apply_correction(self, collection: Collection, one: Correction, plan: _WritePlan) -> WriteResult:
        path, key = f"{collection.name}/{one.id}", (collection, one.id)
        self._registry.check_applied(collection)
        row = self._registry.view.find(collection.number, one.id)
        if key in self._planned or key in plan.states or (None if row is None else row.seq) != one.seen:
            error = _mismatch("the document was changed meanwhile", None if row is None else row.version)
            return WriteResult(path, error.status, error=error)
        lives = row is not None and not row.deleted
        before: DocumentState | None = None
        if row is not None and lives:
            before = DocumentState(row.version, row.created_ms, row.updated_ms, deleted=False, data=row.data)
        partition = names.partition_for_key(one.id, collection.config.partitions)
        stream = collection.stream(partition)
        updated_ms = max(self._last_ns(stream), plan.now_ns) // 1_000_000
        # Of purged tombstones only the highest version is known.
        known = collection.purged[partition] if row is None else row.version
        version = max(one.version, known) + 1
        raw = document.dump(one.data, self._bytes_max)
        after = DocumentState(version, one.created_ms, updated_ms, one.deleted, raw)
        entry = self._entry(
            collection, DocumentWrite("put", DocumentPath(collection.name, one.id)), plan, before, after
        )
        if one.deleted and before is None:
            # Not visible to subscribers, but restores content and version of the tombstone.
            entry = msgspec.structs.replace(entry, op="delete", before=msgspec.Raw(raw))
        plan.index += 1
        plan.entries.setdefault(stream, []).append(encode_change(entry))
        plan.states[key] = after
        return WriteResult(path, 200, version, updated_ms)

    # -- deciding --------------------------------------------------------------------------------------

    def _decide_write(
        self,
        database: str,
        write: DocumentWrite,
        plan: _WritePlan,
        allowed: WriteCheck,
    ) -> WriteResult:
        path = f"{write.path.collection}/{write.path.id}"
        try:
            return self._plan_write(database, write, plan, allowed, path)
        except TailraceError as error:
            return WriteResult(path, error.status, error=error)

    def _plan_write(
        self,
        database: str,
        write: DocumentWrite,
        plan: _WritePlan,
        allowed: WriteCheck,
        path: str,
    ) -> WriteResult:
        collection = self._collection(database, write.path.collection, plan)
        key = (collection, write.path.id)
        state = plan.states.get(key) or self._state(collection, write.path.id)
        if write.decider is not None and (settled := write.decider(collection, state)) is not None:
            return settled
        lives = state is not None and not state.deleted
        buried = write.data if write.creates_tombstone and state is None else None
        old = buried
        if state is not None and lives:
            old = orjson.loads(state.data)
        new = self._new_data(write, old)
        method = "delete" if write.op == "delete" else "update" if lives else "create"
        allowed(
            collection,
            method,
            None if old is None else self._flat(collection, write.path.id, old, state),
            None if new is None else self._flat(collection, write.path.id, new, state),
        )
        _check_conditions(write, state, lives)
        if not lives and write.op != "put" and buried is None:
            if write.op == "delete" and state is not None:
                return WriteResult(path, 204, state.version, state.updated_ms)
            raise TailraceError("not_found", f"document {path!r} not found")
        partition = names.partition_for_key(write.path.id, collection.config.partitions)
        stream = collection.stream(partition)
        last_ns = self._last_ns(stream)
        updated_ms = max(last_ns, plan.now_ns) // 1_000_000
        retained = buried if new is None else new
        raw = b"" if retained is None else document.dump(retained, self._bytes_max)
        next_state = DocumentState(
            1 + (collection.purged[partition] if state is None else state.version),
            state.created_ms if state is not None and lives else updated_ms,
            updated_ms,
            new is None,
            raw if retained is not None or state is None else state.data,
        )
        entry = self._entry(collection, write, plan, state if lives else None, next_state)
        if buried is not None:
            # Not visible to subscribers, but replicating clients learn that it does not exist.
            entry = msgspec.structs.replace(entry, op="delete", before=msgspec.Raw(raw))
        plan.index += 1
        plan.entries.setdefault(stream, []).append(encode_change(entry))
        plan.states[key] = next_state
        status = 204 if write.op == "delete" else 200 if lives else 201
        return WriteResult(path, status, next_state.version, updated_ms)

    def _new_data(self, write: DocumentWrite, old: Document | None) -> Document | None:
        if write.op == "delete":
            return None
        assert write.data is not None
        if write.op == "put":
            return document.check_fields(write.data, write.path.id)
        merged = document.merge_patch(old or {}, write.data)
        return document.check_fields(document.check(merged), write.path.id)

    def _flat(
        self, collection: Collection, document_id: str, data: Document, state: DocumentState | None
    ) -> Document:
        known = state or DocumentState(0, 0, 0, deleted=True, data=b"")
        return document.flatten_document(
            data, document_id, collection.name, known.version, known.created_ms, known.updated_ms
        )

    def _entry(
        self,
        collection: Collection,
        write: DocumentWrite,
        plan: _WritePlan,
        before: DocumentState | None,
        after: DocumentState,
    ) -> ChangeEntry:
        op: ChangeOp = "insert" if before is None else "delete" if after.deleted else "replace"
        if write.op == "patch":
            op = "update"
        # The before-image of a delete is the data of the tombstone.
        stored = after.deleted or collection.effective_config.store_before
        image = "none" if before is None else "full" if stored else "view"
        return ChangeEntry(
            database=collection.database,
            collection=write.path.collection,
            documentKey=write.path.id,
            op=op,
            before=msgspec.Raw(before.data) if before is not None and stored else RAW_NULL,
            after=RAW_NULL if after.deleted else msgspec.Raw(after.data),
            images=ChangeImages(image, "none" if after.deleted else "full"),
            version=after.version,
            createdAt=after.created_ms,
            prev=None if before is None else PreviousVersion(before.version, before.updated_ms),
            txn=TransactionRef(plan.txn_id, plan.index),
            commitTime=format_rfc3339(plan.now_ns),
            writeId=plan.write_id,
            writeDigest=UNSET if plan.write_id is None else write_digest(write) or UNSET,
        )

    def _collection(self, database: str, name: str, plan: _WritePlan) -> Collection:
        found = self._registry.writable(database, name) or plan.made.get((database, name))
        if found is None:
            expected = self._registry.partitions_for(name)
            found = plan.made[database, name] = self._registry.plan(database, name, expected)
        if found.config.source != NATIVE:
            raise TailraceError(
                "read_only_collection",
                f"the collection follows the source {found.config.source!r} and is read-only",
                headers=(("Allow", "GET, HEAD, OPTIONS"),),
            )
        return found

    def _state(self, collection: Collection, document_id: str) -> DocumentState | None:
        planned = self._planned.get((collection, document_id))
        if planned is not None:
            return planned
        self._registry.check_applied(collection)
        row = self._registry.view.find(collection.number, document_id)
        if row is None:
            return None
        return DocumentState(row.version, row.created_ms, row.updated_ms, bool(row.deleted), row.data)

    def _last_ns(self, name: str) -> int:
        stream = self._log.find(name)
        return 0 if stream is None else stream.last_ns

    # -- committing ------------------------------------------------------------------------------------

    def _submit(self, database: str, plan: _WritePlan, submitted: _SubmittedWrites) -> None:
        configs: dict[str, list[bytes]] = {}
        used = {collection.name for collection, _ in plan.states}
        for (owner, name), collection in plan.made.items():
            if name in used:
                entry = encode_config_entry(name, collection.config, "insert", plan.now_ns)
                configs.setdefault(names.collections_stream_name(owner), []).append(entry)
        parts = [*configs.items(), *plan.entries.items()]
        append_to_streams(self._log, parts, plan.now_ns, self._settled, submitted)
        for (_, name), collection in plan.made.items():
            if name in used:
                self._registry.add(collection)
        self._planned.update(plan.states)
        if plan.write_id is not None:
            first = submitted.writes[0].path.collection
            submitted.remembered = (self._registry.databases[database][first], plan.write_id)
            self._in_flight[submitted.remembered] = submitted

    def _settled(self, transaction: Transaction, error: TailraceError | None) -> None:
        submitted = transaction.context
        assert isinstance(submitted, _SubmittedWrites)
        if submitted.remembered is not None:
            self._in_flight.pop(submitted.remembered, None)
        for tell in (submitted.answer, *submitted.repeats):
            tell(submitted.results, error)

    def _respond_when_durable(self, results: list[WriteResult], callback: WriteCallback) -> None:
        """An error may depend on writes that are not durable yet: wait for these."""
        newest = self._log.committer.newest
        if newest is None or not self._planned:
            callback(results, None)
        else:
            newest.waiting.append(lambda error: callback(results, error))

    def _respond_to_repeat(
        self, database: str, writes: Sequence[DocumentWrite], write_id: str, callback: WriteCallback
    ) -> bool:
        """Answer a request whose key was used before; False if it is new."""
        collection = self._registry.find(database, writes[0].path.collection)
        if collection is None:
            return False
        first = self._in_flight.get((collection, write_id))
        if first is not None:
            if not is_same_request(writes, first.writes):
                raise idempotency_conflict()
            first.repeats.append(callback)
            self.count_repeats(database, collection.name, "write", 1)
            return True
        self._registry.check_applied(collection)
        since_ms = self._log.clock.now_ns() // 1_000_000 - WRITE_ID_RETENTION_MS
        found = self._registry.view.find_writes(collection.number, write_id, since_ms)
        if not found:
            return False
        callback(repeated_results(writes, found), None)
        self.count_repeats(database, collection.name, "write", 1)
        return True

    def count_repeats(self, database: str, name: str, stage: str, count: int) -> None:
        """Count repeated requests or rows that had no effect."""
        self._registry.counters.for_collection(self._registry.find(database, name)).dropped[stage] += count

    def _forget_failed(self) -> None:
        """After a failed commit: drop all planned state."""
        if self._log.failures != self._failures:
            self._failures = self._log.failures
            self._planned.clear()
            self._in_flight.clear()
            self._registry.drop_uncommitted()


def _check_conditions(write: DocumentWrite, state: DocumentState | None, lives: bool) -> None:
    current = state.version if state is not None and lives else None
    if write.if_absent and lives:
        raise _mismatch("the document already exists", current)
    if write.if_present and not lives:
        raise _mismatch("the document does not exist", current)
    if write.if_version is not None and write.if_version != current:
        raise _mismatch("the document has another version", current)


def _mismatch(message: str, current: int | None) -> TailraceError:
    return TailraceError("version_mismatch", message, current_version=current)
