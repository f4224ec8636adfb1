"""The MongoDB source: change streams, initial copy and change capture.

Each collection has its own change stream and resume token. The token is committed together with the changes
before it, so the stream continues exactly there. When a stream ends because its collection was dropped or
renamed, the next one starts: the collection is copied, compared, and followed again.

`MongoConnection` blocks and is used by one thread. The driver resumes a stream itself when a connection
breaks; what it cannot resume ends here as a gap or an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tailrace.watch.sources.config import SourceConfig, TableMapping
from tailrace.watch.sources.connector import BUSY_S, DatabaseConnector, SourceContext
from tailrace.watch.sources.ingest import SourceIngest
from tailrace.watch.sources.model import (
    CollectionProgress,
    GapError,
    SourceChange,
    SourceError,
    SourcePosition,
    SourceProgress,
)

if TYPE_CHECKING:
    from bson.raw_bson import RawBSONDocument
    from pymongo import MongoClient
    from pymongo.collection import Collection
    from pymongo.cursor import Cursor
    from pymongo.errors import OperationFailure

    from tailrace.watch.sources.mongo_decoder import MongoDecoder

    Raw = RawBSONDocument
    Stream = Any  # the driver's types are private

CONNECT_MS: Final = 10_000
# How long the server waits for changes of all collections together.
AWAIT_MS: Final = 10
AWAIT_MS_ALL: Final = 250
BATCH_EVENTS: Final = 1000
WIRE_MIN: Final = 9  # MongoDB 4.4
WIRE_BEFORE_IMAGES: Final = 17  # MongoDB 6.0
NO_OPLOG: Final = "MongoDB has no oplog: start it with --replSet and run rs.initiate()"
_SCHEMES: Final = ("mongodb://", "mongodb+srv://")
_CONNECTION: Final = {
    "appname": "tailrace",
    "connectTimeoutMS": CONNECT_MS,
    "serverSelectionTimeoutMS": CONNECT_MS,
}
# The position is gone, the token is unknown to this server, or an event is too large.
_LOST: Final = frozenset({136, 260, 280, 286, 10334, 40576, 40585, 40615})
_NO_RESUME: Final = "NonResumableChangeStreamError"
_MAY_PASS: Final = ("ResumableChangeStreamError", "RetryableError", "SystemOverloadedError")
# Not caused by the token: permissions, configuration, a busy or stepped-down server.
_NO_GAP: Final = frozenset(
    {6, 7, 13, 18, 24, 43, 46, 50, 63, 89, 91, 112, 133, 134, 150, 189, 202, 211, 216, 234, 237, 246, 262}
    | {8000, 9001, 10107, 11600, 11601, 11602, 13388, 13435, 13436, 40573}
)


class MongoPage(NamedTuple):
    """A part of a collection's change stream, and the token after it.

    `last`: there was nothing more, and everything up to the time `read_to` was read. `ended`: the collection
    was dropped or renamed.
    """

    changes: list[SourceChange]
    token: str
    last: bool
    read_to: int
    ended: bool
    size_bytes: int


class _OpenChangeStream(NamedTuple):
    stream: Stream
    decoder: MongoDecoder
    began: int  # time of the token it started with


def import_driver() -> Any:
    try:
        import pymongo
    except ImportError:
        raise SourceError(
            "a MongoDB source requires the extra mongo: pip install 'tailrace[mongo]'"
        ) from None
    return pymongo


class MongoConnection:
    """One client; not thread-safe."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._client: MongoClient[Raw] | None = None
        self._logs: dict[str, _OpenChangeStream] = {}
        self._copying: Cursor[Raw] | None = None
        self._rows: Iterator[Raw] | None = None
        self._more: dict[str, Any] = {}

    # -- the connection --------------------------------------------------------------------------------

    def open(self) -> None:
        pymongo = import_driver()
        from bson.raw_bson import RawBSONDocument

        assert self._config.dsn is not None
        dsn = self._config.dsn.read()
        if not dsn.startswith(_SCHEMES):
            # The driver would take it for a host name and repeat it, with secrets, in its errors.
            raise SourceError("the connection string must begin with mongodb:// or mongodb+srv://")
        try:
            self._client = pymongo.MongoClient(dsn, document_class=RawBSONDocument, **_CONNECTION)
        except Exception:  # noqa: BLE001
            # The driver's message would contain the connection string, which may hold a secret.
            raise SourceError("invalid connection string, or unknown host") from None
        hello = self._command("hello")
        if not hello.get("setName") and hello.get("msg") != "isdbgrid":
            raise SourceError(NO_OPLOG)
        wire_version = int(hello.get("maxWireVersion", 0))
        if wire_version < WIRE_MIN:
            raise SourceError("a source requires MongoDB 4.4 or newer")
        self._more = (
            {"full_document_before_change": "whenAvailable"} if wire_version >= WIRE_BEFORE_IMAGES else {}
        )

    def close(self) -> None:
        client, self._client = self._client, None
        self._logs.clear()
        self._copying = self._rows = None
        if client is not None:
            client.close()

    def explain_error(self, error: Exception) -> str | None:
        if not type(error).__module__.startswith(("pymongo", "bson")):
            return None
        from pymongo.errors import OperationFailure

        if isinstance(error, OperationFailure):
            return explain_error(error)
        return " ".join(str(error).split())[:500] or type(error).__name__

    @property
    def client(self) -> MongoClient[Raw]:
        assert self._client is not None, "the connection is open"
        return self._client

    def _command(self, name: str) -> Mapping[str, Any]:
        return self.client.get_database("admin").command(name)

    def _collection(self, mapped: TableMapping) -> Collection[Raw]:
        from pymongo.read_concern import ReadConcern

        database, _, name = mapped.table.partition(".")
        # Do not read changes that may be rolled back.
        return self.client.get_database(database).get_collection(name, read_concern=ReadConcern("majority"))

    # -- inspection -----------------------------------------------------------------------------------

    def state(self) -> tuple[str, int]:
        """The identifier of the cluster, to detect that it was replaced, and its time."""
        return str(self._command("hello").get("setName", "sharded")), self.head()

    def head(self) -> int:
        """The newest cluster time: not below the time of anything seen before."""
        from tailrace.watch.sources.mongo_decoder import timestamp_lsn

        reply = self._command("ping")
        cluster, time = reply.get("$clusterTime"), reply.get("operationTime")
        if cluster is not None:
            time = cluster["clusterTime"]
        if time is None:
            raise SourceError(NO_OPLOG)
        return timestamp_lsn(time)

    def check(self, *, must_exist: bool) -> None:
        """Check that the collections can be followed; missing ones are probably misspelled."""
        for mapped in self._config.tables:
            database, _, name = mapped.table.partition(".")
            found = list(self.client.get_database(database).list_collections(filter={"name": name}))
            if not found and must_exist:
                raise SourceError(f"collection {mapped.table} not found")
            kind = found[0].get("type", "collection") if found else "collection"
            if kind != "collection":
                raise SourceError(f"{mapped.table} is a {kind}, which has no change stream")

    def now(self, mapped: TableMapping) -> tuple[int, str]:
        """The time and token of a position after all changes of a collection so far."""
        from tailrace.watch.sources.mongo_decoder import encode_resume_token, is_event_token, token_lsn

        with self._collection(mapped).watch(batch_size=0) as stream:
            token = stream.resume_token
        if token is None:
            raise SourceError("MongoDB returned no resume token, version 4.4 or newer is required")
        text = encode_resume_token(token)
        # A token that is only a time (nothing was read) precedes the events of that time.
        return token_lsn(text) - (not is_event_token(text)), text

    # -- the log ---------------------------------------------------------------------------------------

    def follow(self, mapped: TableMapping, token: str, *, ended: bool, position: SourcePosition) -> None:
        """Open a change stream after a token, also after the token of a stream's end."""
        from pymongo.errors import OperationFailure

        from tailrace.watch.sources.mongo_decoder import MongoDecoder, decode_resume_token, token_lsn

        if mapped.table in self._logs:
            return
        begin = {"start_after" if ended else "resume_after": decode_resume_token(token)}
        try:
            stream = self._collection(mapped).watch(
                full_document="updateLookup",
                batch_size=min(self._config.batch_changes, BATCH_EVENTS),
                max_await_time_ms=max(1, min(AWAIT_MS, AWAIT_MS_ALL // len(self._config.tables))),
                **begin,
                **self._more,
            )
        except OperationFailure as error:
            if _is_lost(error) or not _is_transient(error):
                raise GapError(f"{mapped.table} cannot be resumed: {explain_error(error)}") from None
            raise
        decoder = MongoDecoder(mapped.collection, position.lsn, position.ordinal)
        self._logs[mapped.table] = _OpenChangeStream(stream, decoder, token_lsn(token))

    def page(self, mapped: TableMapping, changes_max: int, bytes_max: int) -> MongoPage:
        """The next changes that are available."""
        from tailrace.watch.sources.mongo_decoder import encode_resume_token, is_event_token, token_lsn

        stream, decoder, began = self._logs[mapped.table]
        changes: list[SourceChange] = []
        size, last = 0, False
        while not last and not decoder.end_token and len(changes) < changes_max and size < bytes_max:
            event = self._next(mapped, stream)
            if event is None:
                last = True
                continue
            size += len(event.raw)
            change = decoder.feed(bytes(event.raw))
            if change is not None:
                changes.append(change)
        # Nothing follows the end: its token is the last.
        text = decoder.end_token or encode_resume_token(stream.resume_token)
        # A token that is only a time precedes the events of that time, unless it was reached by reading.
        reached = token_lsn(text)
        read_to = reached if reached > began or is_event_token(text) else reached - 1
        return MongoPage(changes, text, last, read_to, bool(decoder.end_token), size)

    def _next(self, mapped: TableMapping, stream: Stream) -> Raw | None:
        from pymongo.errors import OperationFailure

        try:
            return stream.try_next()
        except OperationFailure as error:
            if _is_lost(error):
                raise GapError(f"{mapped.table} cannot be read any further: {explain_error(error)}") from None
            raise

    def close_stream(self, mapped: TableMapping) -> None:
        """Close a change stream; another may be opened."""
        self._logs.pop(mapped.table).stream.close()

    # -- copying ---------------------------------------------------------------------------------------

    def begin_copy(self, mapped: TableMapping) -> None:
        """Start copying a collection."""
        batch = min(self._config.batch_changes, BATCH_EVENTS)
        self._copying = self._collection(mapped).find(batch_size=batch)
        self._rows = iter(self._copying)

    def rows(self, mapped: TableMapping, rows_max: int, bytes_max: int) -> list[tuple[str, bytes]]:
        """The next documents of the copied collection; empty at the end."""
        from tailrace.watch.sources.mongo_decoder import decode_bson, document_row

        assert self._rows is not None
        found: list[tuple[str, bytes]] = []
        size = 0
        for document in self._rows:
            one = document_row(decode_bson(bytes(document.raw)))
            found.append(one)
            size += len(one[1])
            if len(found) >= rows_max or size >= bytes_max:
                break
        return found

    def end_cursor(self) -> None:
        cursor, self._copying = self._copying, None
        self._rows = None
        if cursor is not None:
            cursor.close()


def explain_error(error: OperationFailure) -> str:
    """The server's error message."""
    message = (error.details or {}).get("errmsg") or "no reason given"
    return f"{' '.join(str(message).split())[:400]} (error {error.code})"


def _is_lost(error: OperationFailure) -> bool:
    return error.code in _LOST or error.has_error_label(_NO_RESUME)


def _is_transient(error: OperationFailure) -> bool:
    return error.code in _NO_GAP or any(error.has_error_label(label) for label in _MAY_PASS)


class MongoConnector(DatabaseConnector[TableMapping]):
    """Runs one MongoDB source until it is cancelled."""

    def __init__(self, context: SourceContext) -> None:
        self._adapter = MongoConnection(context.config)
        super().__init__(context, self._adapter)
        self._checked_s = 0.0

    # -- a session -------------------------------------------------------------------------------------

    async def _connected(self) -> None:
        ingest, states = self._states.ingest(), self._states
        phase = ingest.progress.phase
        if phase == "stale" and not ingest.progress.rescan:
            await self._wait_for_operator(ingest.progress.reason)
        if phase in ("live", "loading"):
            await self._check(ingest)
        else:
            await self._begin(ingest)
        copied = self._config.tables if ingest.progress.phase == "loading" else ()
        until: int | None = None
        while True:
            if copied:
                await self._load(ingest, ((one.collection, one) for one in copied))
                until = await self._call(self._adapter.head)
            elif until is None:
                self._reset_backoff()
            ended = await self._follow(ingest, until)
            if ended is not None:
                copied = (ended,)
                continue
            await states.end_load(ingest)
            copied, until = (), None

    async def _begin(self, ingest: SourceIngest) -> None:
        """Store the start of each change stream before anything is copied."""
        adapter, progress = self._adapter, ingest.progress
        await self._call(adapter.check, must_exist=progress.phase == "new")
        marks: dict[str, CollectionProgress] = {}
        for mapped in self._config.tables:
            lsn, token = await self._call(adapter.now, mapped)
            marks[mapped.collection] = CollectionProgress(token=token, lsn=lsn)
        system, _ = await self._call(adapter.state)
        newest = max(mark.lsn for mark in marks.values())
        known = progress.with_position(SourcePosition(newest, -1, -1)).with_changes(
            system=system, marks=marks, reason=None, rescan=False
        )
        if self._config.initial == "now" and progress.phase == "new":
            await self._states.begin_without_load(ingest, known)
        else:
            await self._states.begin_load(ingest, known)

    # -- following -------------------------------------------------------------------------------------

    async def _follow(self, ingest: SourceIngest, until: int | None) -> TableMapping | None:
        """Follow all change streams; returns when one ends, or when everything before `until` was read."""
        behind = {one.collection for one in self._config.tables}
        idle_s = self._limits.watch_source_idle_ms / 1000
        pause_s = BUSY_S
        while True:
            found, drained = 0, True
            for mapped in self._config.tables:
                page = await self._page(ingest, mapped)
                if page.ended:
                    await self._end(ingest, mapped, page)
                    return mapped
                found, drained = found + len(page.changes), drained and page.last
                if until is not None and page.last and page.read_to >= until:
                    behind.discard(mapped.collection)
            if until is not None and not behind:
                return None
            self._status.set_caught_up(drained)
            if time.monotonic() - self._checked_s >= self._limits.watch_source_check_ms / 1000:
                await self._check(ingest)
            pause_s = min(2 * pause_s, idle_s) if not found else BUSY_S
            await asyncio.sleep(pause_s if drained else 0)

    async def _page(self, ingest: SourceIngest, mapped: TableMapping) -> MongoPage:
        """Read and commit the next page of one collection."""
        config, mark = self._config, ingest.progress.marks[mapped.collection]
        adapter, began = self._adapter, time.monotonic()
        await self._call(adapter.follow, mapped, mark.token, ended=mark.ended, position=mark.position)
        page = await self._call(adapter.page, mapped, config.batch_changes, config.batch_bytes)
        self._status.lag_changes = len(page.changes)
        await ingest.follow_one(mapped.collection, page.changes, page.token)
        if page.changes:
            self._status.record_change(page.changes[-1].time)
        await self._pace(len(page.changes), page.size_bytes, began)
        return page

    async def _end(self, ingest: SourceIngest, mapped: TableMapping, page: MongoPage) -> None:
        """The collection was dropped, renamed or replaced: load it again."""
        known = ingest.progress.with_mark(
            mapped.collection, ingest.progress.position_in(mapped.collection), page.token, ended=True
        )
        if known.phase == "loading":
            await ingest.commit_progress(known)  # nothing was delivered yet
        else:
            await self._states.begin_load(ingest, known)
        await self._call(self._adapter.close_stream, mapped)

    # -- checks ---------------------------------------------------------------------------------------

    async def _check(self, ingest: SourceIngest) -> None:
        """Check the cluster, and commit the tokens even without changes.

        MongoDB's log has limited retention: a token that never moves would expire.
        """
        self._checked_s = time.monotonic()
        progress = ingest.progress
        system, head = await self._call(self._adapter.state)
        if system != progress.system:
            raise GapError("the database was replaced by another one")
        if head < _newest(progress):
            raise GapError("the database is older than the position of the source")
        if progress.tokens != self._states.progress.tokens:
            await ingest.commit_progress(progress)


def _newest(progress: SourceProgress) -> int:
    return max((mark.lsn for mark in progress.marks.values() if mark.ordinal >= 0), default=0)
