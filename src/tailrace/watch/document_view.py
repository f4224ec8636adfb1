"""The document view: latest state of every document in SQLite, and its published form as Parquet files.

The view is derived from the change streams and stores its position in each: what it lacks after a crash is
read again, and an unusable file is deleted and rebuilt. One connection writes, on the loop thread; readers
that need a consistent snapshot use their own connection.

A published view has the documents of a collection at one position of its changes, on the object store:

    watch/views/<database>/<collection>/<generation>/_head.json
    watch/views/<database>/<collection>/<generation>/_<number, 20 digits>-<part, 5 digits>.parquet

The head names the parts and the position of each partition. It is replaced as a whole after all its parts are
stored; parts never change. No segment of a collection's path begins with an underscore, so these names cannot
collide with those of nested collections.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

import apsw
import msgspec

from tailrace.common import private_files

logger = logging.getLogger("tailrace.watch")

VIEW_VERSION: Final = 3
READERS_MAX: Final = 8

_SCHEMA: Final = """
CREATE TABLE facts(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE collections(
    number INTEGER PRIMARY KEY, database TEXT NOT NULL, name TEXT NOT NULL, generation INTEGER NOT NULL,
    documents INTEGER NOT NULL DEFAULT 0, UNIQUE(database, name));
CREATE TABLE positions(
    collection INTEGER NOT NULL, partition INTEGER NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY(collection, partition)) WITHOUT ROWID;
CREATE TABLE purged(
    collection INTEGER NOT NULL, partition INTEGER NOT NULL, version INTEGER NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY(collection, partition)) WITHOUT ROWID;
CREATE TABLE documents(
    collection INTEGER NOT NULL, id TEXT NOT NULL, partition INTEGER NOT NULL, seq INTEGER NOT NULL,
    version INTEGER NOT NULL, created_ms INTEGER NOT NULL, updated_ms INTEGER NOT NULL,
    deleted INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE(collection, id));
CREATE INDEX documents_by_seq ON documents(collection, partition, seq);
CREATE INDEX tombstones ON documents(collection, updated_ms) WHERE deleted=1;
CREATE TABLE writes(
    collection INTEGER NOT NULL, write_id TEXT NOT NULL, at_ms INTEGER NOT NULL, place INTEGER NOT NULL,
    id TEXT NOT NULL, version INTEGER NOT NULL, op TEXT NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY(collection, write_id, place)) WITHOUT ROWID;
CREATE INDEX writes_by_time ON writes(at_ms);
"""
_FIND: Final = """SELECT id, partition, seq, version, created_ms, updated_ms, deleted, data
FROM documents WHERE collection=? AND id=?"""
IDS_PER_STATEMENT: Final = 50  # shorter lists repeat their last id
_IDS: Final = ", ".join("?" * IDS_PER_STATEMENT)
_FIND_MANY: Final = _FIND.replace("id=?", f"id IN ({_IDS})")
_COUNT: Final = "SELECT count(*) FROM documents WHERE collection=? AND deleted=0 AND id=?"
_LIVING: Final = _COUNT.replace("id=?", f"id IN ({_IDS})")
_PUT: Final = """INSERT INTO documents(
    collection, id, partition, seq, version, created_ms, updated_ms, deleted, data)
VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(collection, id) DO UPDATE SET
    seq=excluded.seq, version=excluded.version, created_ms=excluded.created_ms,
    updated_ms=excluded.updated_ms, deleted=excluded.deleted, data=excluded.data"""
_PUT_WRITE: Final = "INSERT OR REPLACE INTO writes VALUES(?, ?, ?, ?, ?, ?, ?, ?)"
_AFTER: Final = """SELECT id, partition, seq, version, created_ms, updated_ms, deleted, data
FROM documents WHERE collection=? AND id>? AND deleted=0 ORDER BY id LIMIT ?"""
_ALL: Final = """SELECT id, partition, seq, version, created_ms, updated_ms, deleted, data
FROM documents WHERE collection=? AND id>? ORDER BY id LIMIT ?"""
_CHANGED: Final = """SELECT id, seq, updated_ms
FROM documents WHERE collection=? AND partition=? AND seq>? ORDER BY seq LIMIT ?"""
_UP_TO: Final = """SELECT seq, updated_ms
FROM documents WHERE collection=? AND partition=? AND seq<=? ORDER BY seq DESC LIMIT 1"""
_OVER: Final = """SELECT id, partition, version, seq FROM documents
WHERE collection=? AND deleted=1 AND updated_ms<? ORDER BY updated_ms LIMIT ?"""
_FORGET: Final = (
    "DELETE FROM documents WHERE collection=?",
    "DELETE FROM positions WHERE collection=?",
    "DELETE FROM purged WHERE collection=?",
    "DELETE FROM writes WHERE collection=?",
    "DELETE FROM collections WHERE number=?",
)


class _Rows(Protocol):
    def __iter__(self) -> Iterator[tuple[object, ...]]: ...
    def fetchone(self) -> tuple[object, ...] | None: ...
    def fetchall(self) -> list[tuple[object, ...]]: ...


class Execute(Protocol):
    """The part of a connection's `execute` in use; the library's annotation is incomplete."""

    def __call__(self, query: str, bindings: Sequence[object] = ()) -> _Rows: ...


class ExecuteMany(Protocol):
    """The part of `executemany` in use."""

    def __call__(self, query: str, bindings: Iterable[Sequence[object]]) -> object: ...


class DocumentRow(NamedTuple):
    """A row of the view; a tombstone has the last data."""

    id: str
    partition: int
    seq: int
    version: int
    created_ms: int
    updated_ms: int
    deleted: int
    data: bytes


class WriteRow(NamedTuple):
    """The effect of one write with an idempotency key."""

    write_id: str
    at_ms: int
    place: int
    id: str
    version: int
    op: str
    digest: str = ""  # of the request; empty in older versions


class PurgedTombstones(NamedTuple):
    """The highest version and last change of the purged tombstones of a partition."""

    version: int
    seq: int


PIECE_BYTES: Final = 1024 * 1024  # of documents read at once
NOTHING_PURGED: Final = PurgedTombstones(0, 0)


def _document_row(found: tuple[object, ...]) -> DocumentRow:
    return DocumentRow(*cast("tuple[str, int, int, int, int, int, int, bytes]", found))


def _id_chunks(ids: Sequence[str]) -> Iterator[list[str]]:
    """The ids in lists of the size of one statement."""
    for begin in range(0, len(ids), IDS_PER_STATEMENT):
        some = list(ids[begin : begin + IDS_PER_STATEMENT])
        yield some + some[-1:] * (IDS_PER_STATEMENT - len(some))


def _open(path: Path) -> tuple[apsw.Connection, Execute]:
    for suffix in ("", "-wal", "-shm"):
        private_files.restrict_to_owner(path.with_name(path.name + suffix), private_files.FILE_MODE)
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(10_000)
    execute = cast("Execute", connection.execute)  # pyright: ignore[reportUnknownMemberType]
    execute("PRAGMA journal_mode=WAL")
    execute("PRAGMA synchronous=NORMAL")
    execute("PRAGMA cache_size=-8192")
    return connection, execute


class ViewSnapshot:
    """A consistent state of the view."""

    def __init__(self, execute: Execute) -> None:
        self._execute = execute

    def documents_after(
        self, collection: int, after: str, limit: int, bytes_max: int = PIECE_BYTES
    ) -> list[DocumentRow]:
        """Documents in the order of ids up to `bytes_max`, at least one if there is one; no tombstones."""
        rows: list[DocumentRow] = []
        size = 0
        for found in self._execute(_AFTER, (collection, after, limit)):
            row = _document_row(found)
            rows.append(row)
            size += len(row.data)
            if size >= bytes_max:
                break
        return rows

    def rows_after(self, collection: int, after: str, limit: int) -> list[DocumentRow]:
        """All rows in the order of ids, tombstones included."""
        return [_document_row(found) for found in self._execute(_ALL, (collection, after, limit))]

    def documents_by_id(self, collection: int, ids: Iterable[str]) -> list[DocumentRow]:
        found = [self._execute(_FIND, (collection, document_id)).fetchone() for document_id in ids]
        rows = [_document_row(row) for row in found if row is not None]
        return [row for row in rows if not row.deleted]

    def changed_after(
        self, collection: int, partition: int, seq: int, limit: int
    ) -> list[tuple[str, int, int]]:
        """Id, seq and time of documents last changed after `seq`, tombstones included."""
        found = self._execute(_CHANGED, (collection, partition, seq, limit))
        return [cast("tuple[str, int, int]", row) for row in found]

    def last_seq_before(self, collection: int, partition: int, before_ms: int, tail: int) -> int:
        """A seq after which all documents were last changed at `before_ms` or later.

        Found by binary search, since times do not decrease within a partition.
        """
        low, high = 0, tail
        while low < high:
            middle = (low + high + 1) // 2
            found = self._execute(_UP_TO, (collection, partition, middle)).fetchone()
            if found is None or cast("int", found[1]) < before_ms:
                low = middle
            else:
                high = cast("int", found[0]) - 1
        return low

    def positions(self, number: int, partitions: int) -> list[int]:
        """The applied position of each partition."""
        found = [0] * partitions
        for partition, seq in self._execute(
            "SELECT partition, seq FROM positions WHERE collection=?", (number,)
        ):
            found[cast("int", partition)] = cast("int", seq)
        return found

    def purged(self, number: int, partitions: int) -> list[PurgedTombstones]:
        """The purged tombstones by partition."""
        found = [NOTHING_PURGED] * partitions
        for partition, version, seq in self._execute(
            "SELECT partition, version, seq FROM purged WHERE collection=?", (number,)
        ):
            found[cast("int", partition)] = PurgedTombstones(cast("int", version), cast("int", seq))
        return found


class DocumentView:
    """The view of all collections of a server. Written by the loop thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._free: list[tuple[apsw.Connection, Execute]] = []
        self._connection, self._execute = self._open_or_rebuild()
        self._execute_many = cast("ExecuteMany", self._connection.executemany)  # pyright: ignore[reportUnknownMemberType]
        self.current = ViewSnapshot(self._execute)

    def close(self) -> None:
        for connection, _ in self._free:
            connection.close()
        self._free.clear()
        self._connection.close()

    def _open_or_rebuild(self) -> tuple[apsw.Connection, Execute]:
        try:
            return self._open_with_tables()
        except (apsw.Error, OSError) as error:
            logger.warning(
                "view file is unusable, rebuilding it",
                extra={"fields": {"path": str(self._path), "error": str(error)}},
            )
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            return self._open_with_tables()

    def _open_with_tables(self) -> tuple[apsw.Connection, Execute]:
        connection, execute = _open(self._path)
        try:
            if execute("SELECT 1 FROM sqlite_schema WHERE name='facts'").fetchone() is None:
                execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA.split(";\n"):
                    if statement.strip():
                        execute(statement)
                execute("INSERT INTO facts VALUES('version', ?)", (VIEW_VERSION,))
                execute("COMMIT")
            found = execute("SELECT value FROM facts WHERE key='version'").fetchone()
            if found is None or found[0] != VIEW_VERSION:
                raise OSError(f"version {found and found[0]}, expected {VIEW_VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection, execute

    # -- collections -----------------------------------------------------------------------------------

    def number_of(self, database: str, name: str, generation: int) -> int:
        """The collection's number; rows of another generation are deleted."""
        found = self._execute(
            "SELECT number, generation FROM collections WHERE database=? AND name=?", (database, name)
        ).fetchone()
        if found is not None and found[1] == generation:
            return cast("int", found[0])
        with self.write_transaction():
            if found is not None:
                self.delete_collection(cast("int", found[0]))
            self._execute(
                "INSERT INTO collections(database, name, generation) VALUES(?, ?, ?)",
                (database, name, generation),
            )
        return self._connection.last_insert_rowid()

    def delete_collection(self, number: int) -> None:
        """Delete all rows of a collection; call inside `write_transaction`."""
        for statement in _FORGET:
            self._execute(statement, (number,))

    def set_generation(self, number: int, generation: int) -> None:
        """Move the documents to another generation."""
        self._execute("UPDATE collections SET generation=? WHERE number=?", (generation, number))

    def positions(self, number: int, partitions: int) -> list[int]:
        """The applied position of each partition."""
        return self.current.positions(number, partitions)

    def count(self, number: int) -> int:
        """The number of documents without tombstones."""
        found = self._execute("SELECT documents FROM collections WHERE number=?", (number,)).fetchone()
        return 0 if found is None else cast("int", found[0])

    # -- documents -------------------------------------------------------------------------------------

    def find(self, number: int, document_id: str) -> DocumentRow | None:
        found = self._execute(_FIND, (number, document_id)).fetchone()
        return None if found is None else _document_row(found)

    def find_many(self, number: int, ids: Sequence[str]) -> dict[str, DocumentRow]:
        """The existing rows by id, tombstones included."""
        found: dict[str, DocumentRow] = {}
        for some in _id_chunks(ids):
            for row in map(_document_row, self._execute(_FIND_MANY, (number, *some))):
                found[row.id] = row
        return found

    def find_writes(self, number: int, write_id: str, since_ms: int) -> list[WriteRow]:
        """The effects of a write with this key since `since_ms`."""
        rows = self._execute(
            "SELECT write_id, at_ms, place, id, version, op, digest FROM writes"
            " WHERE collection=? AND write_id=? AND at_ms>=? ORDER BY place",
            (number, write_id, since_ms),
        )
        return [WriteRow(*cast("tuple[str, int, int, str, int, str, str]", row)) for row in rows]

    @contextmanager
    def write_transaction(self) -> Generator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._execute("ROLLBACK")
            raise

    def apply(
        self, number: int, rows: Iterable[DocumentRow], writes: Iterable[WriteRow], positions: dict[int, int]
    ) -> None:
        """Apply changes and set the positions; call inside `write_transaction`."""
        execute, last = self._execute, {row.id: row for row in rows}  # intermediate states are not visible
        if last:
            added = sum(not row.deleted for row in last.values())
            for ids in _id_chunks(list(last)):
                added -= cast("tuple[int]", execute(_LIVING, (number, *ids)).fetchone())[0]
            self._execute_many(_PUT, ((number, *row) for row in last.values()))
            execute("UPDATE collections SET documents=documents+? WHERE number=?", (added, number))
        self._execute_many(_PUT_WRITE, ((number, *write) for write in writes))
        for partition, seq in positions.items():
            execute("INSERT OR REPLACE INTO positions VALUES(?, ?, ?)", (number, partition, seq))

    def purge(self, number: int, before_ms: int, limit: int) -> int:
        """Delete old tombstones and record the highest version and seq; returns how many."""
        execute = self._execute
        with self.write_transaction():
            found = execute(_OVER, (number, before_ms, limit)).fetchall()
            for document_id, partition, version, seq in found:
                execute("DELETE FROM documents WHERE collection=? AND id=?", (number, document_id))
                self.record_purged(
                    number, cast("int", partition), PurgedTombstones(cast("int", version), cast("int", seq))
                )
        return len(found)

    def record_purged(self, number: int, partition: int, purged: PurgedTombstones) -> None:
        """Call inside `write_transaction`."""
        self._execute(
            "INSERT INTO purged VALUES(?, ?, ?, ?) ON CONFLICT(collection, partition) DO UPDATE SET"
            " version=max(version, excluded.version), seq=max(seq, excluded.seq)",
            (number, partition, *purged),
        )

    def delete_old_writes(self, before_ms: int) -> None:
        self._execute("DELETE FROM writes WHERE at_ms<?", (before_ms,))

    @contextmanager
    def snapshot(self) -> Generator[ViewSnapshot]:
        """A snapshot of the current view. Keep it short: SQLite retains old pages for it."""
        connection, execute = self._free.pop() if self._free else _open(self._path)
        try:
            execute("BEGIN")
            execute("SELECT 1 FROM collections").fetchone()  # starts the read transaction
            yield ViewSnapshot(execute)
        finally:
            if connection.in_transaction:
                execute("ROLLBACK")
            if len(self._free) < READERS_MAX:
                self._free.append((connection, execute))
            else:
                connection.close()


@contextmanager
def open_snapshot(path: Path) -> Generator[ViewSnapshot]:
    """A snapshot with its own connection, for long copies on another thread."""
    connection, execute = _open(path)
    try:
        execute("BEGIN")
        execute("SELECT 1 FROM collections").fetchone()
        yield ViewSnapshot(execute)
    finally:
        connection.close()


VIEW_FORMAT: Final = 1
PART_ROWS_MAX: Final = 50_000
PART_BYTES_MAX: Final = 32 * 1024 * 1024
PAGE_ROWS: Final = 500
VIEW_COLUMNS: Final = ("id", "partition", "seq", "version", "created_ms", "updated_ms", "deleted", "data")


class PublishedViewHead(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a published view."""

    database: str
    collection: str
    generation: int
    number: int  # increases with each publication
    at_ms: int
    positions: list[int]
    purged: list[PurgedTombstones]  # per partition
    parts: list[str]
    rows: int
    format: int = VIEW_FORMAT


class InvalidViewError(Exception):
    """A head or part on the object store is invalid."""


def view_folder(database: str, collection: str, generation: int) -> str:
    return f"watch/views/{database}/{collection}/{generation}/"


def head_key(folder: str) -> str:
    return f"{folder}_head.json"


def part_name(number: int, part: int) -> str:
    return f"_{number:020}-{part:05}.parquet"


_encode = msgspec.json.Encoder().encode


def encode_head(head: PublishedViewHead) -> bytes:
    return _encode(head)


def decode_head(raw: bytes) -> PublishedViewHead:
    try:
        head = msgspec.json.decode(raw, type=PublishedViewHead)
    except msgspec.MsgspecError as error:
        raise InvalidViewError(f"cannot decode view head: {error}") from None
    if head.format != VIEW_FORMAT or len(head.positions) != len(head.purged):
        raise InvalidViewError(f"view head has format {head.format}, expected {VIEW_FORMAT}")
    return head


def view_parts(snapshot: ViewSnapshot, number: int) -> Iterator[list[DocumentRow]]:
    """All rows of a collection, in lists of one part each."""
    rows: list[DocumentRow] = []
    size = 0
    after = ""
    while page := snapshot.rows_after(number, after, PAGE_ROWS):
        after = page[-1].id
        for row in page:
            if rows and (len(rows) >= PART_ROWS_MAX or size + len(row.data) > PART_BYTES_MAX):
                yield rows
                rows, size = [], 0
            rows.append(row)
            size += len(row.data)
    if rows:
        yield rows


def encode_part(rows: Iterable[DocumentRow]) -> bytes:
    """Rows as a Parquet file; Arrow is imported on first use."""
    from tailrace.storage.segments.parquet import pa, pq

    columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)]
    columns[VIEW_COLUMNS.index("deleted")] = [bool(value) for value in columns[VIEW_COLUMNS.index("deleted")]]
    kinds = (pa.string(), pa.int32(), *[pa.int64()] * 4, pa.bool_(), pa.binary())
    arrays = [pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True)]
    sink = io.BytesIO()
    pq.write_table(pa.table(arrays, names=list(VIEW_COLUMNS)), sink, compression="zstd", row_group_size=4096)
    return sink.getvalue()


def decode_part(raw: bytes) -> list[DocumentRow]:
    from tailrace.storage.segments.parquet import pa, pq

    try:
        table = pq.read_table(io.BytesIO(raw))
        columns: list[list[Any]] = [table.column(name).to_pylist() for name in VIEW_COLUMNS]
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise InvalidViewError(f"cannot decode view part: {error}") from None
    columns[VIEW_COLUMNS.index("deleted")] = [int(value) for value in columns[VIEW_COLUMNS.index("deleted")]]
    return [DocumentRow(*values) for values in zip(*columns, strict=True)]
