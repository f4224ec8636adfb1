"""The hot store: SQLite as a checkpoint of the journal, and its read-only inspection.

One process writes it (the checkpointer), in one transaction per journal file; the server only reads. This
module handles rows and blobs; the log gives them meaning. The tables are described in docs/formats.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, cast
from urllib.parse import quote

import apsw

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.storage.hot_store.tables import (
    COLD_SCHEMA,
    DOCUMENT_SCHEMA,
    INDEX_FILE_SCHEMA,
    ColdTables,
    DocumentTable,
    IndexFileTables,
    RetentionTables,
)
from tailrace.storage.hot_store.tables import RETENTION_SCHEMA as TRIM_SCHEMA

logger = logging.getLogger("tailrace.store")

HOT_STORE_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS streams(
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, gone INTEGER NOT NULL, deadline_ns INTEGER,
    image BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS streams_by_deadline ON streams(deadline_ns) WHERE deadline_ns IS NOT NULL;
CREATE TABLE IF NOT EXISTS tombstones(
    name TEXT PRIMARY KEY, deleted_ns INTEGER NOT NULL, image BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS producers(
    number INTEGER NOT NULL, id TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY(number, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blocks(
    number INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, last_ns INTEGER NOT NULL,
    ends BLOB NOT NULL, times BLOB NOT NULL, keys BLOB, body BLOB NOT NULL,
    UNIQUE(number, first));
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""
_FULL_SCHEMA = _SCHEMA + COLD_SCHEMA + TRIM_SCHEMA + DOCUMENT_SCHEMA + INDEX_FILE_SCHEMA


_BLOCK_COLUMNS = "first, last, ends, times, keys, body"


class Rows(Protocol):
    def __iter__(self) -> Iterator[tuple[object, ...]]: ...
    def fetchone(self) -> tuple[object, ...] | None: ...


class Execute(Protocol):
    """The part of a connection's `execute` that is used; apsw's own annotation is incomplete."""

    def __call__(self, query: str, bindings: tuple[object, ...] = ()) -> Rows: ...


class FileSpace(NamedTuple):
    """How the pages of the file are used."""

    pages: int
    free_pages: int
    page_bytes: int
    incremental: bool  # free pages can be returned one by one; else the file has to be rebuilt

    @property
    def free_bytes(self) -> int:
        """Room for new rows without growing the file."""
        return self.free_pages * self.page_bytes

    @property
    def used_bytes(self) -> int:
        return (self.pages - self.free_pages) * self.page_bytes


class BlockRow(NamedTuple):
    first: int
    last: int
    ends: bytes
    times: bytes
    keys: bytes | None
    body: bytes


def hot_store_unreadable(error: apsw.Error) -> TailraceError:
    logger.error("cannot read the hot store", extra=log_fields(kind=type(error).__name__, error=str(error)))
    return TailraceError("unavailable", "the hot store cannot be read; see 'tailrace inspect hot'")


class HotDatabase:
    """One connection. Each reader has its own; SQLite's WAL separates them from the writer."""

    def __init__(self, path: Path, *, writer: bool = False, read_only: bool = False) -> None:
        self.cold = ColdTables(self)
        self.trims = RetentionTables(self)
        self.documents = DocumentTable(self)
        self.index_files = IndexFileTables(self)
        try:
            if read_only:
                self._open_read_only(path)
            else:
                self._open(path, writer)
        except apsw.Error as error:
            raise hot_store_unreadable(error) from error

    def _open(self, path: Path, writer: bool) -> None:
        if not path.exists():
            # SQLite would leave it to the umask; its other files get the mode of this one.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        self.connection = apsw.Connection(str(path), flags=flags)
        self.connection.set_busy_timeout(10_000)
        self.execute = execute = cast("Execute", self.connection.execute)  # pyright: ignore[reportUnknownMemberType]
        execute("PRAGMA page_size=8192")
        if path.stat().st_size == 0:
            execute(
                "PRAGMA auto_vacuum=INCREMENTAL"
            )  # a file that has tables would have to be rebuilt for it
        execute("PRAGMA journal_mode=WAL")
        execute("PRAGMA synchronous=FULL")
        execute("PRAGMA mmap_size=0")
        execute(f"PRAGMA cache_size={-16384 if writer else -4096}")
        if self.one("SELECT 1 FROM sqlite_schema WHERE name='facts'") is None:
            self._create_tables()
        self._check_version()

    def _open_read_only(self, path: Path) -> None:
        """For tools, which change nothing. In a directory that cannot be written there must be no WAL."""
        for immutable in (0, 1):
            uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable={immutable}"
            flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
            self.connection = apsw.Connection(uri, flags=flags)
            self.connection.set_busy_timeout(10_000)
            self.execute = cast("Execute", self.connection.execute)  # pyright: ignore[reportUnknownMemberType]
            try:
                self.execute("SELECT 1 FROM sqlite_schema").fetchone()
                break
            except apsw.CantOpenError:
                wal = path.with_name(path.name + "-wal")
                if immutable or (wal.exists() and wal.stat().st_size):
                    raise
        self._check_version()

    def _check_version(self) -> None:
        version = cast("int", self.fact("version", 0))
        if version > HOT_STORE_VERSION:
            raise TailraceError(
                "unavailable", f"hot.db was written by a newer version of Tailrace (format {version})"
            )

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def write(self) -> Generator[None]:
        """One transaction that holds the write lock from its first read to its commit."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:
            # After some errors SQLite has rolled back by itself.
            if self.connection.in_transaction:
                self.execute("ROLLBACK")
            raise

    def _create_tables(self) -> None:
        """Only in a new store: a reader that requests the write lock would collide with the checkpointer."""
        with self.write():
            for statement in _FULL_SCHEMA.split(";\n"):
                if statement.strip():
                    self.execute(statement)
            self.execute("INSERT OR IGNORE INTO facts VALUES('version', ?)", (HOT_STORE_VERSION,))

    def one(self, query: str, *bindings: object) -> tuple[object, ...] | None:
        try:
            return self.execute(query, bindings).fetchone()
        except apsw.Error as error:
            raise hot_store_unreadable(error) from error

    def rows(self, query: str, *bindings: object) -> Iterator[tuple[object, ...]]:
        try:
            yield from self.execute(query, bindings)
        except apsw.Error as error:
            raise hot_store_unreadable(error) from error

    # -- reading ---------------------------------------------------------------------------------------

    def fact(self, key: str, default: object) -> object:
        row = self.one("SELECT value FROM facts WHERE key=?", key)
        return default if row is None else row[0]

    @property
    def journal_seq(self) -> int:
        """The last journal file whose records are all in here."""
        return int(str(self.fact("journal_seq", 0)))

    def image_by_name(self, name: str) -> bytes | None:
        row = self.one("SELECT image FROM streams WHERE name=?", name)
        return None if row is None else cast("bytes", row[0])

    def image_by_number(self, number: int) -> bytes | None:
        row = self.one("SELECT image FROM streams WHERE number=?", number)
        return None if row is None else cast("bytes", row[0])

    def tombstone(self, name: str) -> bytes | None:
        row = self.one("SELECT image FROM tombstones WHERE name=?", name)
        return None if row is None else cast("bytes", row[0])

    def producer(self, number: int, producer_id: str) -> tuple[int, int] | None:
        row = self.one("SELECT epoch, seq FROM producers WHERE number=? AND id=?", number, producer_id)
        return None if row is None else cast("tuple[int, int]", row)

    def producers(self, number: int) -> dict[str, tuple[int, int]]:
        """Every producer of a stream with its epoch and sequence."""
        rows = self.rows("SELECT id, epoch, seq FROM producers WHERE number=?", number)
        return {
            producer_id: (epoch, seq)
            for producer_id, epoch, seq in cast("Iterator[tuple[str, int, int]]", rows)
        }

    def blocks_from(self, number: int, entry: int) -> Iterator[BlockRow]:
        """The block of `entry` and those after it, in order, read lazily.

        Nothing if the entry is in no block: it is in a segment, or does not exist.
        """
        row = self.one(
            "SELECT first, last FROM blocks WHERE number=? AND first<=? ORDER BY first DESC LIMIT 1",
            number,
            entry,
        )
        if row is None or cast("int", row[1]) < entry:
            return
        query = f"SELECT {_BLOCK_COLUMNS} FROM blocks WHERE number=? AND first>=? ORDER BY first"  # noqa: S608
        for found in self.rows(query, number, row[0]):
            yield BlockRow(*cast("tuple[int, int, bytes, bytes, bytes | None, bytes]", found))

    def keys_within(self, number: int, after: int, upto: int) -> Iterator[tuple[int, bytes]]:
        """First entry and keys of the blocks with keyed entries after `after`, up to `upto`."""
        rows = self.rows(
            "SELECT first, keys FROM blocks WHERE number=? AND first<=? AND last>? AND keys IS NOT NULL "
            "ORDER BY first",
            number,
            upto,
            after,
        )
        yield from cast("Iterator[tuple[int, bytes]]", rows)

    def last_block(self, number: int) -> BlockRow | None:
        row = self.one(
            f"SELECT {_BLOCK_COLUMNS} FROM blocks WHERE number=? ORDER BY first DESC LIMIT 1",  # noqa: S608
            number,
        )
        return (
            None
            if row is None
            else BlockRow(*cast("tuple[int, int, bytes, bytes, bytes | None, bytes]", row))
        )

    def first_entry_since(self, number: int, since_ns: int) -> BlockRow | None:
        """The first block with an entry appended at or after the instant; times never decrease."""
        row = self.one(
            f"SELECT {_BLOCK_COLUMNS} FROM blocks WHERE number=? AND last_ns>=? ORDER BY first LIMIT 1",  # noqa: S608
            number,
            since_ns,
        )
        return (
            None
            if row is None
            else BlockRow(*cast("tuple[int, int, bytes, bytes, bytes | None, bytes]", row))
        )

    def images_after(self, name: str, prefix: str, limit: int) -> list[tuple[str, bytes]]:
        """Stream images in name order: a range scan on the name index."""
        query = "SELECT name, image FROM streams WHERE name>? AND name>=? ORDER BY name LIMIT ?"
        rows = self.rows(query, name, prefix, limit)
        return [cast("tuple[str, bytes]", row) for row in rows]

    def deadlines_after(self, deadline_ns: int, number: int, limit: int) -> list[tuple[int, int]]:
        """Deadlines and numbers of streams with a lifetime, soonest first, after the given one."""
        rows = self.rows(
            "SELECT deadline_ns, number FROM streams WHERE deadline_ns IS NOT NULL "
            "AND (deadline_ns, number)>(?, ?) ORDER BY deadline_ns, number LIMIT ?",
            deadline_ns,
            number,
            limit,
        )
        return [cast("tuple[int, int]", row) for row in rows]

    def meta(self) -> dict[str, bytes]:
        rows = self.rows("SELECT key, value FROM meta")
        return dict(cast("tuple[str, bytes]", row) for row in rows)

    def newest_numbers(self, limit: int) -> list[int]:
        """Numbers of the streams that were created last."""
        rows = self.rows("SELECT number FROM streams ORDER BY number DESC LIMIT ?", limit)
        return [cast("int", row[0]) for row in rows]

    def space(self) -> FileSpace:
        def number(pragma: str) -> int:
            row = self.one(f"PRAGMA {pragma}")
            assert row is not None
            return cast("int", row[0])

        incremental = number("auto_vacuum") == 2
        return FileSpace(number("page_count"), number("freelist_count"), number("page_size"), incremental)

    def count_streams(self) -> int:
        row = self.one("SELECT count(*) FROM streams")
        assert row is not None
        return cast("int", row[0])

    # -- writing (checkpointer only) ---------------------------------------------------------------------

    def set_fact(self, key: str, value: int | str) -> None:
        self.execute("INSERT OR REPLACE INTO facts VALUES(?, ?)", (key, value))

    def put_stream(self, number: int, name: str, gone: bool, deadline_ns: int | None, image: bytes) -> None:
        self.execute(
            "INSERT OR REPLACE INTO streams VALUES(?, ?, ?, ?, ?)",
            (number, name, int(gone), deadline_ns, image),
        )

    def delete_stream(self, number: int) -> None:
        self.cold.delete_stream(number)
        self.trims.delete_stream(number)
        self.documents.delete_stream(number)
        self.index_files.delete_stream(number)
        for table in ("streams", "producers"):
            self.execute(f"DELETE FROM {table} WHERE number=?", (number,))  # noqa: S608 - names of ours

    def put_tombstone(self, name: str, deleted_ns: int, image: bytes) -> None:
        self.execute("INSERT OR REPLACE INTO tombstones VALUES(?, ?, ?)", (name, deleted_ns, image))

    def delete_tombstone(self, name: str) -> None:
        self.execute("DELETE FROM tombstones WHERE name=?", (name,))

    def expire_tombstones(self, before_ns: int) -> None:
        self.execute("DELETE FROM tombstones WHERE deleted_ns<?", (before_ns,))

    def put_producer(self, number: int, producer_id: str, epoch: int, seq: int) -> None:
        self.execute("INSERT OR REPLACE INTO producers VALUES(?, ?, ?, ?)", (number, producer_id, epoch, seq))

    def put_block(self, number: int, row: BlockRow, last_ns: int) -> None:
        self.execute(
            "INSERT OR REPLACE INTO blocks VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
            (number, row.first, row.last, last_ns, row.ends, row.times, row.keys, row.body),
        )

    def put_meta(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.execute("DELETE FROM meta WHERE key=?", (key,))
        else:
            self.execute("INSERT OR REPLACE INTO meta VALUES(?, ?)", (key, value))


INSPECTED_TABLES = (
    "streams", "tombstones", "producers", "blocks", "meta", "segments", "heads", "graves", "forks", "due",
    "trims", "documents",
)  # fmt: skip
SAMPLE_COUNT = 20

_COUNT = {table: f"SELECT count(*) FROM {table}" for table in INSPECTED_TABLES}  # noqa: S608
_SAMPLE = """
SELECT s.number, s.name, s.gone, s.deadline_ns, length(s.image),
    (SELECT count(*) FROM producers p WHERE p.number = s.number),
    count(b.first), min(b.first), max(b.last), coalesce(sum(length(b.body)), 0)
FROM (SELECT * FROM streams ORDER BY name LIMIT ?) s LEFT JOIN blocks b ON b.number = s.number
GROUP BY s.number ORDER BY s.name
"""
_SAMPLE_COLUMNS = (
    "number",
    "name",
    "gone",
    "deadline_ns",
    "image_bytes",
    "producers",
    "blocks",
    "first_entry",
    "last_entry",
    "payload_bytes",
)


def inspect_hot_store(data_dir: Path) -> dict[str, object]:
    """Facts, rows per table, sizes and the first streams by name; or the `problem` of reading them."""
    path = data_dir / "hot.db"
    described: dict[str, object] = {"file": str(path)}
    if not path.exists():
        return {**described, "problem": "there is no hot store yet; everything is in the journal"}
    try:
        for suffix, name in (("", "bytes"), ("-wal", "wal_bytes")):
            file = path.with_name(path.name + suffix)
            described[name] = file.stat().st_size if file.exists() else 0
        described.update(_read_summary(path))
    except (apsw.Error, OSError) as error:
        described["problem"] = f"cannot be read: {type(error).__name__}: {error}"
    return described


def _read_summary(path: Path) -> dict[str, object]:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        connection.set_busy_timeout(5_000)
        execute = cast("Execute", connection.execute)  # pyright: ignore[reportUnknownMemberType]
        execute("BEGIN")  # a snapshot
        facts = {str(key): value for key, value in execute("SELECT key, value FROM facts ORDER BY key")}
        rows: dict[str, object] = {}
        present = {name for (name,) in execute("SELECT name FROM sqlite_schema WHERE type='table'")}
        for table, query in _COUNT.items():
            if table not in present:
                rows[table] = 0  # a store of an older version
                continue
            found = execute(query).fetchone()
            rows[table] = None if found is None else found[0]
        sample = [dict(zip(_SAMPLE_COLUMNS, row, strict=True)) for row in execute(_SAMPLE, (SAMPLE_COUNT,))]
        pages = {
            name: found[0]
            for name in ("page_count", "freelist_count", "page_size")
            if (found := execute(f"PRAGMA {name}").fetchone()) is not None
        }
        execute("COMMIT")
    finally:
        connection.close()
    return {"pages": pages, "facts": facts, "rows": rows, "streams": sample}
