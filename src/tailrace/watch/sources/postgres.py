"""The PostgreSQL source: replication slot, initial copy and change capture.

A PostgreSQL database that is followed: its slot, its tables, its log.

The driver does not speak the replication protocol, so the log is read with SQL: looked at through a cursor
(`pg_logical_slot_peek_binary_changes`), and let go (`pg_replication_slot_advance`) when it is safe elsewhere.
Everything here blocks, and is called from the one thread that owns the connection.

A PostgreSQL source at work: its slot is looked at, written down, and moved only then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple, cast

from tailrace.watch.sources.config import SourceConfig, TableMapping
from tailrace.watch.sources.connector import BUSY_S, DatabaseConnector, SourceContext
from tailrace.watch.sources.ingest import SourceIngest
from tailrace.watch.sources.model import GapError, SourceChange, SourceError, SourcePosition
from tailrace.watch.sources.postgres_decoder import PostgresDecoder, TableTarget, TypeConverters, document_row

if TYPE_CHECKING:
    import psycopg


CONNECT_S: Final = 10
FETCH_ROWS: Final = 500
FETCH_ROWS_FIRST: Final = 50
FETCH_BYTES: Final = 1024 * 1024
VERSION_MIN: Final = 130_000
# A peer that is gone is noticed within a minute.
_CONNECTION: Final = {
    "application_name": "tailrace",
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
_SESSION: Final = (
    # What is printed must not depend on anybody's settings.
    "SET client_encoding = 'UTF8'",
    "SET datestyle = 'ISO, YMD'",
    "SET timezone = 'UTC'",
    "SET intervalstyle = 'iso_8601'",
    "SET extra_float_digits = 1",
    "SET bytea_output = 'hex'",
    "SET statement_timeout = 0",
    "SET idle_in_transaction_session_timeout = 0",
    # For our own marks: safe there, whatever its standbys do.
    "SET synchronous_commit = 'local'",
)
_TYPES: Final = """SELECT t.oid::int8, t.typtype = 'd',
    CASE WHEN t.typtype = 'd' THEN t.typbasetype WHEN e.oid IS NOT NULL THEN t.typelem END::int8
FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem AND e.typarray = t.oid AND e.typdelim = ','
WHERE t.oid >= 16384 OR t.typtype = 'd' OR e.oid IS NOT NULL"""
_TABLE: Final = """SELECT c.oid::int8, c.relreplident::text,
    COALESCE((SELECT array_agg(a.attname::text ORDER BY k.place) FROM pg_index i,
        unnest(i.indkey) WITH ORDINALITY k(attnum, place), pg_attribute a
        WHERE i.indrelid = c.oid AND i.indisprimary AND k.place <= i.indnkeyatts
        AND a.attrelid = c.oid AND a.attnum = k.attnum), '{}'),
    COALESCE((SELECT array_agg(a.attname::text) FROM pg_index i, unnest(i.indkey) k(attnum), pg_attribute a
        WHERE i.indrelid = c.oid AND i.indisreplident AND a.attrelid = c.oid AND a.attnum = k.attnum), '{}'),
    has_table_privilege(c.oid, 'SELECT')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')"""
_COLUMNS: Final = """SELECT attname::text, atttypid::int8 FROM pg_attribute
WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum"""
# Hosted databases grant by a role of their own what is otherwise an attribute.
_ROLE: Final = """SELECT r.rolname::text, r.rolsuper OR r.rolreplication OR EXISTS(SELECT 1 FROM pg_roles h
    WHERE h.rolname IN ('rds_replication', 'cloudsqlsuperuser') AND pg_has_role(r.oid, h.oid, 'MEMBER'))
FROM pg_roles r WHERE r.rolname = current_user"""
_PUBLISHED: Final = """SELECT attnames::text[], rowfilter FROM pg_publication_tables
WHERE pubname = %s AND schemaname = %s AND tablename = %s"""
_PUBLISHED_WHOLE: Final = """SELECT NULL, NULL FROM pg_publication_tables
WHERE pubname = %s AND schemaname = %s AND tablename = %s"""
_MARK: Final = "SELECT (pg_logical_emit_message(true, 'tailrace', 'mark') - '0/0')::int8"
_SLOT: Final = """SELECT plugin::text, database::text = current_database(), wal_status,
    (confirmed_flush_lsn - '0/0')::int8, (pg_current_wal_lsn() - restart_lsn)::int8
FROM pg_replication_slots WHERE slot_name = %s"""


class ReplicationSlot(NamedTuple):
    """The place that the database keeps for us: all of its log from there on is kept."""

    plugin: str | None
    here: bool | None
    wal_status: str | None
    confirmed: int | None
    retained_bytes: int | None


class PostgresTable(NamedTuple):
    """A table as it is now."""

    mapped: TableMapping
    key: tuple[str, ...]
    columns: tuple[tuple[str, int], ...]
    row_filter: str | None


class PostgresPage(NamedTuple):
    """A stretch of the log. `end` is that of the last whole commit so far; `last`: no more follows."""

    changes: list[SourceChange]
    end: int
    last: bool
    size_bytes: int


def import_driver() -> Any:
    try:
        import psycopg
    except ImportError:
        raise SourceError(
            "a PostgreSQL source needs the extra postgres: pip install 'tailrace[postgres]'"
        ) from None
    return psycopg


class PostgresConnection:
    """One connection. Not for several threads at once."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._types = TypeConverters({}, {}, ())
        self._collections: dict[str, TableTarget] = {}
        self._version = 0
        self._reading: ExitStack | None = None
        self._rows: Iterator[tuple[Any, ...]] | None = None
        self._decoder: PostgresDecoder | None = None
        self._seen = 0
        self._asked = 0

    # -- the connection --------------------------------------------------------------------------------

    def open(self) -> None:
        psycopg = import_driver()
        assert self._config.dsn is not None
        dsn = self._config.dsn.read()
        try:
            from psycopg.conninfo import make_conninfo

            whole = make_conninfo(dsn, **_CONNECTION)
        except psycopg.ProgrammingError:
            # The message would repeat what it could not read, which may be a secret.
            raise SourceError("the connection string cannot be read") from None
        self._connection = psycopg.connect(whole, autocommit=True, prepare_threshold=None)
        for statement in _SESSION:
            self._run(statement)
        self._version = self.connection.info.server_version
        if self._version < VERSION_MIN:
            raise SourceError("a source needs PostgreSQL 13 or newer")
        self._load_types()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._reading = self._rows = None
            connection.close()

    def explain_error(self, error: Exception) -> str | None:
        if not type(error).__module__.startswith("psycopg"):
            return None
        return " ".join(str(error).split())[:500] or type(error).__name__

    @property
    def connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        assert self._connection is not None, "it is open"
        return self._connection

    def _run(self, query: LiteralString, *values: object) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(query, values or None)
        return cursor.fetchall() if cursor.description is not None else []

    def _load_types(self) -> TypeConverters:
        arrays: dict[int, int] = {}
        domains: dict[int, int] = {}
        plain: set[int] = set()
        for oid, is_domain, other in self._run(_TYPES):
            if other is None:
                plain.add(oid)
            else:
                (domains if is_domain else arrays)[oid] = other
        self._types = TypeConverters(arrays, domains, plain, numeric=self._config.numeric)
        return self._types

    # -- what there is ---------------------------------------------------------------------------------

    def system(self) -> str | None:
        """What tells this database from another one that was put in its place."""
        psycopg = import_driver()
        try:
            found = self._run("SELECT system_identifier::text FROM pg_control_system()")
        except psycopg.errors.InsufficientPrivilege:
            return None
        return str(found[0][0])

    def head(self) -> int:
        """The end of the log. Nothing before it is part of a record that is still being written."""
        return int(self._run("SELECT (pg_current_wal_insert_lsn() - '0/0')::int8")[0][0])

    def flushed(self) -> int:
        """How much of the log is safe there, and can be read."""
        return int(self._run("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8")[0][0])

    def mark(self) -> int:
        """A place in the log that can be read at once: whatever was seen before it is in front of it."""
        psycopg = import_driver()
        try:
            return int(self._run(_MARK)[0][0])
        except psycopg.errors.InsufficientPrivilege:
            return self.head()  # which can be read soon

    def check(self) -> dict[str, PostgresTable]:
        """The tables, by name; refuses with the statement that puts things right."""
        level = self._run("SHOW wal_level")[0][0]
        if level != "logical":
            raise SourceError("run: ALTER SYSTEM SET wal_level = 'logical'; then restart PostgreSQL")
        user, replicates = self._run(_ROLE)[0]
        if not replicates:
            raise SourceError(f'run: ALTER ROLE "{user}" REPLICATION')
        publication = self._config.publication
        if not self._run("SELECT 1 FROM pg_publication WHERE pubname = %s", publication):
            tables = ", ".join(one.table for one in self._config.tables)
            raise SourceError(f'run: CREATE PUBLICATION "{publication}" FOR TABLE {tables}')
        found = {one.table: self._table(one, str(user)) for one in self._config.tables}
        self._collections = {name: TableTarget(one.mapped.collection, one.key) for name, one in found.items()}
        self._load_types()
        return found

    def _table(self, mapped: TableMapping, user: str) -> PostgresTable:
        schema, _, name = mapped.table.partition(".")
        rows = self._run(_TABLE, schema, name)
        if not rows:
            raise SourceError(f"there is no table {mapped.table}")
        oid, identity, primary, by_index, readable = rows[0]
        if not readable:
            raise SourceError(f'run: GRANT SELECT ON {mapped.table} TO "{user}"')
        key = mapped.key or tuple(primary)
        if not key:
            raise SourceError(f"{mapped.table} has no primary key: name the columns of its key")
        columns: list[tuple[str, int]] = [(name, oid) for name, oid in self._run(_COLUMNS, oid)]
        published = self._published(schema, name)
        if published is None:
            raise SourceError(f'run: ALTER PUBLICATION "{self._config.publication}" ADD TABLE {mapped.table}')
        chosen, row_filter = published
        if chosen is not None:
            columns = [(name, oid) for name, oid in columns if name in chosen]
        if not set(key) <= {name for name, _ in columns}:
            raise SourceError(f"{mapped.table}: not all of {', '.join(key)} is published")
        told = {"d": primary, "i": by_index}.get(identity, [])
        if identity != "f" and not set(key) <= set(told):
            raise SourceError(f"run: ALTER TABLE {mapped.table} REPLICA IDENTITY FULL")
        return PostgresTable(mapped, key, tuple(columns), row_filter)

    def _published(self, schema: str, name: str) -> tuple[set[str] | None, str | None] | None:
        """The columns and the rows that are published; None if the table is not."""
        # Both came with version 15.
        query = _PUBLISHED if self._version >= 150_000 else _PUBLISHED_WHOLE
        rows = self._run(query, self._config.publication, schema, name)
        if not rows:
            return None
        chosen, row_filter = rows[0]
        return (None if chosen is None else set(chosen)), row_filter

    # -- the slot --------------------------------------------------------------------------------------

    def slot(self) -> ReplicationSlot | None:
        rows = self._run(_SLOT, self._config.slot)
        return ReplicationSlot(*rows[0]) if rows else None

    def create_slot(self) -> int:
        """Where it begins: all that is committed from there on is kept."""
        rows = self._run(
            "SELECT (lsn - '0/0')::int8 FROM pg_create_logical_replication_slot(%s, 'pgoutput')",
            self._config.slot,
        )
        return int(rows[0][0])

    def drop_slot(self) -> None:
        if self.slot() is not None:
            self._run("SELECT pg_drop_replication_slot(%s)", self._config.slot)

    def advance(self, end: int) -> None:
        """What lies before may go. Only ever the end of a record, or a commit could be passed over."""
        text = f"{end >> 32:X}/{end & 0xFFFFFFFF:X}"
        self._run("SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", self._config.slot, text)

    # -- the log ---------------------------------------------------------------------------------------

    def peek(self, changes_max: int) -> None:
        """Begins to look at what the slot has; a transaction is never cut off in the middle."""
        assert self._reading is None
        stack = ExitStack()
        try:
            stack.enter_context(self.connection.transaction())
            cursor = stack.enter_context(self.connection.cursor("tailrace", binary=True))
            publication = '"' + self._config.publication.replace('"', '""') + '"'
            cursor.execute(
                "SELECT data FROM pg_logical_slot_peek_binary_changes("
                "%s, NULL, %s, 'proto_version', '1', 'publication_names', %s)",
                (self._config.slot, changes_max, publication),
            )
            self._rows = _fetch_rows(cursor)
        except BaseException:
            stack.close()
            raise
        self._reading, self._decoder = (
            stack,
            PostgresDecoder(self._collections, self._types, self._load_types),
        )
        self._seen, self._asked = 0, changes_max

    def page(self, changes_max: int, bytes_max: int) -> PostgresPage:
        """The next of what is looked at. A message with several changes is not torn apart."""
        assert self._rows is not None
        assert self._decoder is not None
        decoder, changes, size = self._decoder, list[SourceChange](), 0
        for (raw,) in self._rows:
            self._seen += 1
            size += len(raw)
            changes.extend(decoder.feed(raw))
            if len(changes) >= changes_max or size >= bytes_max:
                return PostgresPage(changes, decoder.end, False, size)
        return PostgresPage(changes, decoder.end, True, size)

    @property
    def drained(self) -> bool:
        """After the last page: nothing was left for the next time."""
        return self._seen < self._asked

    def end_cursor(self) -> None:
        """Ends looking at the log, or copying."""
        stack, self._reading = self._reading, None
        self._rows = None
        if stack is not None:
            stack.close()

    # -- copying ---------------------------------------------------------------------------------------

    def begin_copy(self, table: PostgresTable) -> None:
        """Begins to copy a table as it is now."""
        from psycopg import sql

        assert self._reading is None
        schema, _, name = table.mapped.table.partition(".")
        filtered = "" if table.row_filter is None else f" WHERE {table.row_filter}"
        query = sql.SQL("COPY (SELECT {} FROM {}{}) TO STDOUT").format(
            sql.SQL(", ").join(sql.Identifier(column) for column, _ in table.columns),
            sql.Identifier(schema, name),
            # As the database itself prints it.
            sql.SQL(cast("LiteralString", filtered)),
        )
        stack = ExitStack()
        try:
            cursor = stack.enter_context(self.connection.cursor())
            copying = stack.enter_context(cursor.copy(query))
            self._rows = copying.rows()
        except BaseException:
            stack.close()
            raise
        self._reading = stack

    def rows(self, table: PostgresTable, rows_max: int, bytes_max: int) -> list[tuple[str, bytes]]:
        """The next documents of the table that is copied; none when all have been given."""
        assert self._rows is not None
        names = [name for name, _ in table.columns]
        converts = [self._types.converter(oid) for _, oid in table.columns]
        key = [names.index(column) for column in table.key]
        found: list[tuple[str, bytes]] = []
        size = 0
        for texts in self._rows:
            one = document_row(names, converts, key, texts)
            found.append(one)
            size += len(one[1])
            if len(found) >= rows_max or size >= bytes_max:
                break
        return found


def _fetch_rows(cursor: psycopg.ServerCursor[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """All rows, fetched in pieces of about the same size, however large a row is."""
    count = FETCH_ROWS_FIRST
    while rows := cursor.fetchmany(count):
        size = 0
        for row in rows:
            size += len(row[0])
            yield row
        if len(rows) < count:
            return
        count = min(FETCH_ROWS, max(1, FETCH_BYTES * len(rows) // max(1, size)))


def primary_keys(tables: Mapping[str, PostgresTable]) -> dict[str, list[str]]:
    """The keys as they are written down, to see whether they change."""
    return {name: list(table.key) for name, table in tables.items()}


logger = logging.getLogger("tailrace.watch")

# Every look reads the log again from where the database keeps it, so that few long ones cost less than many.
PEEK_CHANGES: Final = 20_000
PEEK_CHANGES_MAX: Final = 200_000
PEEK_BYTES: Final = 64 * 1024 * 1024  # about what the database puts aside for one
MOVE_BYTES: Final = 1024 * 1024


class PostgresConnector(DatabaseConnector[PostgresTable]):
    """Runs one PostgreSQL source until it is cancelled."""

    def __init__(self, followed: SourceContext) -> None:
        self._adapter = PostgresConnection(followed.config)
        super().__init__(followed, self._adapter)
        self._tables: dict[str, PostgresTable] = {}
        self._drained_at = -1  # how much of the log had been written when all of it was read
        self._boundary = 0  # an end of a record that was seen before
        self._checked_s = 0.0
        self._peek_changes = PEEK_CHANGES

    # -- a session -------------------------------------------------------------------------------------

    async def _connected(self) -> None:
        adapter, states = self._adapter, self._states
        self._drained_at, self._boundary = -1, 0
        self._tables = await self._call(adapter.check)
        ingest = states.ingest()
        phase = ingest.progress.phase
        if phase == "live":
            await self._check(ingest)
        elif phase == "stale" and not ingest.progress.rescan:
            await self._wait_for_operator(ingest.progress.reason)
        else:
            await self._begin(ingest)
        self._reset_backoff()
        await self._follow(ingest, None)

    async def _begin(self, ingest: SourceIngest) -> None:
        """From nothing, or from what is left, to a source that is followed."""
        adapter, states = self._adapter, self._states
        progress = ingest.progress
        if progress.phase != "loading":
            start = await self._fresh_slot(ingest)
            self._status.confirmed = start
            known = progress.at(SourcePosition(start, -1, -1)).replaced(
                safe=start,
                system=await self._call(adapter.system),
                keys=primary_keys(self._tables),
                reason=None,
                rescan=False,
                making=False,
            )
            if self._config.initial == "now" and progress.phase == "new":
                await states.begin_without_load(ingest, known)
                return
            await states.begin_load(ingest, known)
        else:
            await self._check(ingest)
        await self._load(ingest, ((one.mapped.collection, one) for one in self._tables.values()))
        until = await self._call(adapter.mark)
        await self._follow(ingest, until)
        await states.end_load(ingest)

    async def _fresh_slot(self, ingest: SourceIngest) -> int:
        """A slot that begins now. One that exists is ours only if we have said so, or have read from it."""
        adapter, progress, name = self._adapter, ingest.progress, self._config.slot
        if await self._call(adapter.slot) is not None:
            known = any(any(one.applied) for one in self._states.collections.values())
            if progress.phase == "new" and not progress.making and not known:
                raise SourceError(f"there is a slot {name} already: name another one, or drop it")
            await self._call(adapter.drop_slot)
        await ingest.commit_progress(progress.replaced(making=True))
        return await self._call(adapter.create_slot)

    # -- following -------------------------------------------------------------------------------------

    async def _follow(self, ingest: SourceIngest, until: int | None) -> None:
        """For ever, or until everything before a place in the log has been read."""
        pause_s = BUSY_S
        idle_s = self._limits.watch_source_idle_ms / 1000
        while True:
            flushed = await self._call(self._adapter.flushed)
            pause_s = min(2 * pause_s, idle_s)
            if flushed != self._drained_at:
                before = ingest.progress.position
                drained = await self._read_once(ingest)
                self._drained_at = flushed if drained else -1
                if ingest.progress.position != before:
                    pause_s = BUSY_S if drained else 0.0
            if until is not None and self._drained_at >= until:
                return
            if time.monotonic() - self._checked_s >= self._limits.watch_source_check_ms / 1000:
                await self._check(ingest)
                await self._advance_slot(ingest)
            self._status.caught_up(self._drained_at >= 0)
            await asyncio.sleep(pause_s)

    async def _read_once(self, ingest: SourceIngest) -> bool:
        """Reads what the log has now; True if nothing was left."""
        adapter, end, size_bytes = self._adapter, 0, 0
        asked = self._peek_changes
        await self._call(adapter.peek, asked)
        try:
            # The next page is decoded while this one is written down.
            ahead: asyncio.Future[PostgresPage] | None = self._page()
            while ahead is not None:
                page = await ahead
                ahead = None if page.last else self._page()
                began = time.monotonic()
                self._status.lag_changes = len(page.changes)
                await ingest.follow(page.changes, page.end)
                if page.changes:
                    self._status.changed(page.changes[-1].time)
                await self._pace(len(page.changes), page.size_bytes, began)
                end, size_bytes = page.end, size_bytes + page.size_bytes
        finally:
            await self._call(adapter.end_cursor)
        if end > self._status.confirmed:
            await self._call(adapter.advance, end)
            self._status.confirmed = end
        # There is a backlog: more at once, if it is not too large.
        fitting = min(PEEK_CHANGES_MAX, asked * PEEK_BYTES // max(1, size_bytes))
        self._peek_changes = PEEK_CHANGES if adapter.drained else max(PEEK_CHANGES, fitting)
        return adapter.drained

    def _page(self) -> asyncio.Future[PostgresPage]:
        return self._call(self._adapter.page, self._config.batch_changes, self._config.batch_bytes)

    # -- looking after the slot ------------------------------------------------------------------------

    async def _check(self, ingest: SourceIngest) -> None:
        """Whether the source can go on from where it is, and what is kept for it there."""
        adapter, progress, status = self._adapter, ingest.progress, self._status
        self._checked_s = time.monotonic()
        slot = await self._call(adapter.slot)
        status.wal_status = None if slot is None else slot.wal_status
        status.retained_bytes = None if slot is None else slot.retained_bytes
        if slot is None:
            raise GapError(f"the slot {self._config.slot} is gone")
        if slot.wal_status == "lost" or slot.confirmed is None:
            raise GapError(f"the slot {self._config.slot} is lost: the database has thrown away its log")
        if slot.wal_status == "unreserved":
            logger.warning("the slot %s will be lost soon if it is not read", self._config.slot)
        if slot.confirmed > progress.safe:
            raise GapError(f"somebody else has moved the slot {self._config.slot}")
        status.confirmed = slot.confirmed
        system = await self._call(adapter.system)
        if None not in (system, progress.system) and system != progress.system:
            raise GapError("it is another database")
        head = await self._call(adapter.head)
        if head < progress.lsn:
            raise GapError("the database is older than what was read from it")
        status.lag_bytes = max(0, head - max(progress.safe, slot.confirmed))
        self._tables = await self._call(adapter.check)
        if primary_keys(self._tables) != progress.keys:
            raise GapError("the key of a table has changed")

    async def _advance_slot(self, ingest: SourceIngest) -> None:
        """Lets the database throw away what has nothing to do with us, as it would otherwise keep it for us.

        Only up to the end of a record that was there at the last look: since then all of it has been read.
        """
        adapter, status = self._adapter, self._status
        boundary, self._boundary = self._boundary, await self._call(adapter.head)
        if boundary <= self._drained_at and boundary - status.confirmed >= MOVE_BYTES:
            await ingest.follow((), boundary)
            await self._call(adapter.advance, boundary)
            status.confirmed = boundary
