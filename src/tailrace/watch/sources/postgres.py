"""The PostgreSQL source: replication slot, initial copy and change capture.

The driver does not implement the replication protocol, so the log is read with SQL: peeked through a cursor
(`pg_logical_slot_peek_binary_changes`), and released (`pg_replication_slot_advance`) once the changes are
durable here. `PostgresConnection` blocks and is used by one thread; `PostgresConnector` runs on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple, cast

from tailrace.common.logging_setup import log_fields
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
# A dead peer is detected within a minute.
_CONNECTION: Final = {
    "application_name": "tailrace",
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
_SESSION: Final = (
    # Output must not depend on the database's settings.
    "SET client_encoding = 'UTF8'",
    "SET datestyle = 'ISO, YMD'",
    "SET timezone = 'UTC'",
    "SET intervalstyle = 'iso_8601'",
    "SET extra_float_digits = 1",
    "SET bytea_output = 'hex'",
    "SET statement_timeout = 0",
    "SET idle_in_transaction_session_timeout = 0",
    # For our own marks: do not wait for standbys.
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
# Hosted databases grant replication by a role instead of an attribute.
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
    """A replication slot: the database retains its log from there on."""

    plugin: str | None
    is_this_database: bool | None
    wal_status: str | None
    confirmed: int | None
    retained_bytes: int | None


class PostgresTable(NamedTuple):
    """The current definition of a table."""

    mapped: TableMapping
    key: tuple[str, ...]
    columns: tuple[tuple[str, int], ...]
    row_filter: str | None


class PostgresPage(NamedTuple):
    """A part of the log. `end`: after the last complete commit; `last`: nothing follows."""

    changes: list[SourceChange]
    end: int
    last: bool
    size_bytes: int


def import_driver() -> Any:
    try:
        import psycopg
    except ImportError:
        raise SourceError(
            "a PostgreSQL source requires the extra postgres: pip install 'tailrace[postgres]'"
        ) from None
    return psycopg


class PostgresConnection:
    """One connection; not thread-safe."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._types = TypeConverters({}, {}, ())
        self._targets: dict[str, TableTarget] = {}
        self._version = 0
        self._cursor_stack: ExitStack | None = None
        self._rows: Iterator[tuple[Any, ...]] | None = None
        self._decoder: PostgresDecoder | None = None
        self._seen = 0
        self._limit = 0

    # -- the connection --------------------------------------------------------------------------------

    def open(self) -> None:
        psycopg = import_driver()
        assert self._config.dsn is not None
        dsn = self._config.dsn.read()
        try:
            from psycopg.conninfo import make_conninfo

            whole = make_conninfo(dsn, **_CONNECTION)
        except psycopg.ProgrammingError:
            # The driver's message would contain the connection string, which may hold a secret.
            raise SourceError("invalid connection string") from None
        self._connection = psycopg.connect(whole, autocommit=True, prepare_threshold=None)
        for statement in _SESSION:
            self._run(statement)
        self._version = self.connection.info.server_version
        if self._version < VERSION_MIN:
            raise SourceError("a source requires PostgreSQL 13 or newer")
        self._load_types()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._cursor_stack = self._rows = None
            connection.close()

    def explain_error(self, error: Exception) -> str | None:
        if not type(error).__module__.startswith("psycopg"):
            return None
        return " ".join(str(error).split())[:500] or type(error).__name__

    @property
    def connection(self) -> psycopg.Connection[tuple[Any, ...]]:
        assert self._connection is not None, "the connection is open"
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

    # -- inspection -----------------------------------------------------------------------------------

    def system(self) -> str | None:
        """The identifier of the database cluster, to detect that it was replaced."""
        psycopg = import_driver()
        try:
            found = self._run("SELECT system_identifier::text FROM pg_control_system()")
        except psycopg.errors.InsufficientPrivilege:
            return None
        return str(found[0][0])

    def head(self) -> int:
        """The end of the log; no record before it is still being written."""
        return int(self._run("SELECT (pg_current_wal_insert_lsn() - '0/0')::int8")[0][0])

    def flushed(self) -> int:
        """The flushed end of the log, up to which it can be read."""
        return int(self._run("SELECT (pg_current_wal_flush_lsn() - '0/0')::int8")[0][0])

    def mark(self) -> int:
        """A readable position in the log after everything that was seen before."""
        psycopg = import_driver()
        try:
            return int(self._run(_MARK)[0][0])
        except psycopg.errors.InsufficientPrivilege:
            return self.head()  # readable soon

    def check(self) -> dict[str, PostgresTable]:
        """The tables by name; errors contain the SQL statement that fixes the setup."""
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
        self._targets = {name: TableTarget(one.mapped.collection, one.key) for name, one in found.items()}
        self._load_types()
        return found

    def _table(self, mapped: TableMapping, user: str) -> PostgresTable:
        schema, _, name = mapped.table.partition(".")
        rows = self._run(_TABLE, schema, name)
        if not rows:
            raise SourceError(f"table {mapped.table} not found")
        oid, identity, primary, by_index, readable = rows[0]
        if not readable:
            raise SourceError(f'run: GRANT SELECT ON {mapped.table} TO "{user}"')
        key = mapped.key or tuple(primary)
        if not key:
            raise SourceError(f"{mapped.table} has no primary key, set the key columns of the table")
        columns: list[tuple[str, int]] = [(name, oid) for name, oid in self._run(_COLUMNS, oid)]
        published = self._published(schema, name)
        if published is None:
            raise SourceError(f'run: ALTER PUBLICATION "{self._config.publication}" ADD TABLE {mapped.table}')
        chosen, row_filter = published
        if chosen is not None:
            columns = [(name, oid) for name, oid in columns if name in chosen]
        if not set(key) <= {name for name, _ in columns}:
            raise SourceError(f"{mapped.table}: the key columns {', '.join(key)} must all be published")
        logged = {"d": primary, "i": by_index}.get(identity, [])
        if identity != "f" and not set(key) <= set(logged):
            raise SourceError(f"run: ALTER TABLE {mapped.table} REPLICA IDENTITY FULL")
        return PostgresTable(mapped, key, tuple(columns), row_filter)

    def _published(self, schema: str, name: str) -> tuple[set[str] | None, str | None] | None:
        """The published columns and row filter; None if the table is not published."""
        # Since version 15.
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
        """Create the slot; returns its start, from where on commits are retained."""
        rows = self._run(
            "SELECT (lsn - '0/0')::int8 FROM pg_create_logical_replication_slot(%s, 'pgoutput')",
            self._config.slot,
        )
        return int(rows[0][0])

    def drop_slot(self) -> None:
        if self.slot() is not None:
            self._run("SELECT pg_drop_replication_slot(%s)", self._config.slot)

    def advance(self, end: int) -> None:
        """Release the log before `end`, which must be the end of a record, or a commit could be skipped."""
        text = f"{end >> 32:X}/{end & 0xFFFFFFFF:X}"
        self._run("SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", self._config.slot, text)

    # -- the log ---------------------------------------------------------------------------------------

    def peek(self, changes_max: int) -> None:
        """Start reading the slot; transactions are never split."""
        assert self._cursor_stack is None
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
        self._cursor_stack, self._decoder = (
            stack,
            PostgresDecoder(self._targets, self._types, self._load_types),
        )
        self._seen, self._limit = 0, changes_max

    def page(self, changes_max: int, bytes_max: int) -> PostgresPage:
        """The next page; the changes of one message are not split."""
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
        """After the last page: whether the slot had no more changes."""
        return self._seen < self._limit

    def end_cursor(self) -> None:
        """End reading the log or copying."""
        stack, self._cursor_stack = self._cursor_stack, None
        self._rows = None
        if stack is not None:
            stack.close()

    # -- copying ---------------------------------------------------------------------------------------

    def begin_copy(self, table: PostgresTable) -> None:
        """Start copying a table."""
        from psycopg import sql

        assert self._cursor_stack is None
        schema, _, name = table.mapped.table.partition(".")
        filtered = "" if table.row_filter is None else f" WHERE {table.row_filter}"
        query = sql.SQL("COPY (SELECT {} FROM {}{}) TO STDOUT").format(
            sql.SQL(", ").join(sql.Identifier(column) for column, _ in table.columns),
            sql.Identifier(schema, name),
            # As printed by the database.
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
        self._cursor_stack = stack

    def rows(self, table: PostgresTable, rows_max: int, bytes_max: int) -> list[tuple[str, bytes]]:
        """The next documents of the copied table; empty at the end."""
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
    """All rows, fetched in chunks of about equal bytes."""
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
    """The keys as stored in the progress, to detect changes."""
    return {name: list(table.key) for name, table in tables.items()}


logger = logging.getLogger("tailrace.watch")

# Every peek reads the log from the slot's start, so few large peeks are cheaper than many.
PEEK_CHANGES: Final = 20_000
PEEK_CHANGES_MAX: Final = 200_000
PEEK_BYTES: Final = 64 * 1024 * 1024  # about what the database buffers for one peek
MOVE_BYTES: Final = 1024 * 1024


class PostgresConnector(DatabaseConnector[PostgresTable]):
    """Runs one PostgreSQL source until it is cancelled."""

    def __init__(self, context: SourceContext) -> None:
        self._adapter = PostgresConnection(context.config)
        super().__init__(context, self._adapter)
        self._tables: dict[str, PostgresTable] = {}
        self._drained_at = -1  # flushed end of the log when all of it was read
        self._boundary = 0  # end of a record at the last check
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
        """Create the slot and load the tables, or continue an interrupted load."""
        adapter, states = self._adapter, self._states
        progress = ingest.progress
        if progress.phase != "loading":
            start = await self._fresh_slot(ingest)
            self._status.confirmed = start
            known = progress.with_position(SourcePosition(start, -1, -1)).with_changes(
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
        """Create the slot; an existing one is replaced only if this source created or has read it."""
        adapter, progress, name = self._adapter, ingest.progress, self._config.slot
        if await self._call(adapter.slot) is not None:
            known = any(any(one.applied) for one in self._states.collections.values())
            if progress.phase == "new" and not progress.making and not known:
                raise SourceError(f"slot {name} already exists, choose another name or drop it")
            await self._call(adapter.drop_slot)
        await ingest.commit_progress(progress.with_changes(making=True))
        return await self._call(adapter.create_slot)

    # -- following -------------------------------------------------------------------------------------

    async def _follow(self, ingest: SourceIngest, until: int | None) -> None:
        """Follow the log; returns when everything before `until` was read."""
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
            self._status.set_caught_up(self._drained_at >= 0)
            await asyncio.sleep(pause_s)

    async def _read_once(self, ingest: SourceIngest) -> bool:
        """Read what the log has now; True if nothing is left."""
        adapter, end, size_bytes = self._adapter, 0, 0
        limit = self._peek_changes
        await self._call(adapter.peek, limit)
        try:
            # The next page is decoded while this one is committed.
            ahead: asyncio.Future[PostgresPage] | None = self._page()
            while ahead is not None:
                page = await ahead
                ahead = None if page.last else self._page()
                began = time.monotonic()
                self._status.lag_changes = len(page.changes)
                await ingest.follow(page.changes, page.end)
                if page.changes:
                    self._status.record_change(page.changes[-1].time)
                await self._pace(len(page.changes), page.size_bytes, began)
                end, size_bytes = page.end, size_bytes + page.size_bytes
        finally:
            await self._call(adapter.end_cursor)
        if end > self._status.confirmed:
            await self._call(adapter.advance, end)
            self._status.confirmed = end
        # With a backlog, peek more at once, within PEEK_BYTES.
        fitting = min(PEEK_CHANGES_MAX, limit * PEEK_BYTES // max(1, size_bytes))
        self._peek_changes = PEEK_CHANGES if adapter.drained else max(PEEK_CHANGES, fitting)
        return adapter.drained

    def _page(self) -> asyncio.Future[PostgresPage]:
        return self._call(self._adapter.page, self._config.batch_changes, self._config.batch_bytes)

    # -- slot checks -----------------------------------------------------------------------------------

    async def _check(self, ingest: SourceIngest) -> None:
        """Check that the source can continue at its position, and update the status; raises GapError."""
        adapter, progress, status = self._adapter, ingest.progress, self._status
        self._checked_s = time.monotonic()
        slot = await self._call(adapter.slot)
        status.wal_status = None if slot is None else slot.wal_status
        status.retained_bytes = None if slot is None else slot.retained_bytes
        if slot is None:
            raise GapError(f"slot {self._config.slot} does not exist")
        if slot.wal_status == "lost" or slot.confirmed is None:
            raise GapError(f"slot {self._config.slot} is lost: the database has removed its log")
        if slot.wal_status == "unreserved":
            logger.warning(
                "replication slot is close to being lost",
                extra=log_fields(
                    source=self._config.name, slot=self._config.slot, retained_bytes=slot.retained_bytes
                ),
            )
        if slot.confirmed > progress.safe:
            raise GapError(f"slot {self._config.slot} was advanced by another client")
        status.confirmed = slot.confirmed
        system = await self._call(adapter.system)
        if None not in (system, progress.system) and system != progress.system:
            raise GapError("the database was replaced by another one")
        head = await self._call(adapter.head)
        if head < progress.lsn:
            raise GapError("the database is older than the position of the source")
        status.lag_bytes = max(0, head - max(progress.safe, slot.confirmed))
        self._tables = await self._call(adapter.check)
        if primary_keys(self._tables) != progress.keys:
            raise GapError("the primary key of a table has changed")

    async def _advance_slot(self, ingest: SourceIngest) -> None:
        """Release log that has no changes of our tables, which the slot would otherwise retain.

        Only up to the end of a record seen at the last check: everything before it was read since.
        """
        adapter, status = self._adapter, self._status
        boundary, self._boundary = self._boundary, await self._call(adapter.head)
        if boundary <= self._drained_at and boundary - status.confirmed >= MOVE_BYTES:
            await ingest.follow((), boundary)
            await self._call(adapter.advance, boundary)
            status.confirmed = boundary
