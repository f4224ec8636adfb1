"""Running a source: driver thread, retries, initial copy; the base of the database connectors.

A thread that a source's connection belongs to: the driver blocks, the loop must not.

Which keys a copy has shown: kept in a file that nobody else sees, however many they are.

A source at work, whatever its kind: one session after the other, until somebody ends it.

Whatever goes wrong ends the session. The next one, after a pause that grows, finds out from what is durable
where the source was; what it reads again it knows by its position.

A database outside that is followed: what all kinds have in common is how it is reached and copied.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import apsw

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.watch.audit import AuditLog
from tailrace.watch.collection import Collection
from tailrace.watch.collection_registry import CollectionRegistry
from tailrace.watch.document_view import Execute
from tailrace.watch.sources.config import SourceConfig
from tailrace.watch.sources.ingest import SourceIngest, SourceLifecycle, SupersededError
from tailrace.watch.sources.model import GapError, SourceError, SourceStatus

P = ParamSpec("P")
T = TypeVar("T")


class SourceThread:
    """Does one thing after the other. A daemon: nothing that hangs keeps the server from stopping."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[asyncio.Future[Any] | None, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=f"source-{name}", daemon=True)
        self._thread.start()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """The result, when it is there; nothing is taken back that has begun."""
        settled: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((settled, lambda: function(*args, **kwargs)))
        return settled

    def finish(self, last: Callable[[], object]) -> None:
        """Does one more thing, whose outcome nobody waits for, and ends."""
        self._jobs.put((None, last))
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            settled, function = job
            if settled is None:
                with suppress(Exception):
                    function()
                continue
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - given to whoever waits
                self._settle(_fail, settled, error)
            else:
                self._settle(_succeed, settled, result)

    def _settle(self, settle: Callable[[asyncio.Future[Any], Any], None], *given: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(settle, *given)


def _succeed(settled: asyncio.Future[Any], result: Any) -> None:
    if not settled.done():
        settled.set_result(result)


def _fail(settled: asyncio.Future[Any], error: BaseException) -> None:
    if not settled.done():
        settled.set_exception(error)


class SeenKeys:
    def __init__(self) -> None:
        self._connection = apsw.Connection("")  # a temporary file, gone when it is closed
        self._execute = cast("Execute", self._connection.execute)  # pyright: ignore[reportUnknownMemberType]
        self._execute("PRAGMA journal_mode=OFF")
        self._execute("PRAGMA cache_size=-4096")
        self._execute("CREATE TABLE seen(key TEXT PRIMARY KEY) WITHOUT ROWID")

    def add(self, keys: Iterable[str]) -> None:
        self._execute("BEGIN")
        for key in keys:
            self._execute("INSERT OR IGNORE INTO seen VALUES(?)", (key,))
        self._execute("COMMIT")

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those that were not shown."""
        find = "SELECT 1 FROM seen WHERE key=?"
        return [key for key in keys if self._execute(find, (key,)).fetchone() is None]

    def close(self) -> None:
        self._connection.close()


logger = logging.getLogger("tailrace.watch")

RETRY_S_MIN: Final = 1.0
VIEW_ROWS: Final = 500
ERROR_CHARS: Final = 500


class SourceContext(NamedTuple):
    """A source, and all that whoever follows it has to do with."""

    registry: CollectionRegistry
    states: SourceLifecycle
    config: SourceConfig
    status: SourceStatus
    limits: Limits
    audit: AuditLog


class SourceRunner(ABC):
    """Runs one source until it is cancelled."""

    def __init__(self, followed: SourceContext) -> None:
        self._registry, self._states, self._config, self._status, self._limits, self._audit = followed
        self._retry_s = RETRY_S_MIN

    async def run(self) -> None:
        while True:
            pause_s = await self._run_session()
            if pause_s is None:
                return
            await asyncio.sleep(pause_s)

    @abstractmethod
    async def _session(self) -> None:
        """Until something is wrong."""

    async def _on_disconnect(self) -> None:
        """The session is over, and another may follow."""
        self._status.connected = False

    def _explain_error(self, error: Exception) -> str | None:
        """What an error means that is not ours; None if that is not known."""
        return None

    async def _run_session(self) -> float | None:
        """One session; for how long to wait before the next, None if there is to be none."""
        status = self._status
        try:
            await self._states.wait_settled()
            await self._session()
        except GapError as gap:
            logger.warning("the source %s has a gap: %s", self._config.name, gap.reason)
            status.gaps += 1
            self._audit.event("source.gap", None, {"source": self._config.name, "reason": gap.reason})
            with suppress(TailraceError):
                await self._states.mark_stale(gap.reason, rescan=self._config.on_gap == "rescan")
            status.error = gap.reason
        except SupersededError as error:
            logger.warning("the source %s: %s", self._config.name, error)
            return None
        except (SourceError, TailraceError) as error:
            status.error = str(error)
            logger.warning("the source %s: %s", self._config.name, error)
        except Exception as error:
            known = self._explain_error(error)
            status.error = known or _shortened(error)
            logger.warning("the source %s: %s", self._config.name, status.error, exc_info=known is None)
        status.restarts += 1
        await self._on_disconnect()
        pause_s = self._retry_s
        self._retry_s = min(2 * self._retry_s, self._limits.watch_source_retry_ms / 1000)
        return pause_s

    def _reset_backoff(self) -> None:
        """It is in order: the next pause is short."""
        self._status.error = None
        self._retry_s = RETRY_S_MIN

    async def _wait_for_operator(self, reason: str | None) -> None:
        """Something is missing, and an operator decides."""
        self._status.error = reason
        await asyncio.Event().wait()

    async def _remove_unseen(self, ingest: SourceIngest, collection: Collection, seen: SeenKeys) -> None:
        """Documents that were not mentioned are gone."""
        after = ""
        while rows := self._registry.view.current.documents_after(collection.number, after, VIEW_ROWS):
            after = rows[-1].id
            if gone := seen.missing([row.id for row in rows]):
                await ingest.remove(collection, gone)
            await asyncio.sleep(0)


def _shortened(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:ERROR_CHARS] or type(error).__name__


BUSY_S: Final = 0.02


Table = TypeVar("Table")
Table_contra = TypeVar("Table_contra", contravariant=True)


class DatabaseAdapter(Protocol[Table_contra]):
    """A database as far as all of them are alike. Everything blocks, and belongs to one thread."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def begin_copy(self, table: Table_contra, /) -> None: ...
    def rows(self, table: Table_contra, rows_max: int, bytes_max: int, /) -> list[tuple[str, bytes]]: ...
    def end_cursor(self) -> None: ...

    def explain_error(self, error: Exception, /) -> str | None:
        """What the driver's own error says, in the database's words; None if it is not the driver's."""
        ...


class DatabaseConnector(SourceRunner, Generic[Table]):
    """Runs one database. Which changes there are is up to its kind."""

    def __init__(self, followed: SourceContext, adapter: DatabaseAdapter[Table]) -> None:
        super().__init__(followed)
        self._thread = SourceThread(self._config.name)
        self._connection = adapter

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._thread.finish(self._connection.close)

    async def _session(self) -> None:
        await self._call(self._connection.open)
        self._status.connected = True
        await self._connected()

    @abstractmethod
    async def _connected(self) -> None:
        """Until something is wrong. The connection is open."""

    async def _on_disconnect(self) -> None:
        await super()._on_disconnect()
        with suppress(Exception):
            await self._call(self._connection.close)

    def _explain_error(self, error: Exception) -> str | None:
        return self._connection.explain_error(error)

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return self._thread.call(function, *args, **kwargs)

    async def _pace(self, changes: int, size_bytes: int, began: float) -> None:
        """No faster than is allowed."""
        config = self._config
        due_s = max(changes / config.events_per_s, size_bytes / config.bytes_per_s)
        if (rest_s := due_s - (time.monotonic() - began)) > 0:
            await asyncio.sleep(rest_s)

    # -- copying ---------------------------------------------------------------------------------------

    async def _load(self, ingest: SourceIngest, tables: Iterable[tuple[str, Table]]) -> None:
        """Copies tables, and writes down what differs from what there is in the collection of each."""
        self._status.loaded = 0
        for name, table in tables:
            collection = self._states.collections[name]
            seen = SeenKeys()
            try:
                await self._copy(ingest, table, collection, seen)
                await self._remove_unseen(ingest, collection, seen)
            finally:
                seen.close()

    async def _copy(self, ingest: SourceIngest, table: Table, collection: Collection, seen: SeenKeys) -> None:
        adapter, config = self._connection, self._config
        await self._call(adapter.begin_copy, table)
        try:
            while rows := await self._call(adapter.rows, table, config.batch_changes, config.batch_bytes):
                began = time.monotonic()
                seen.add(key for key, _ in rows)
                await ingest.load(collection, rows)
                self._status.loaded = (self._status.loaded or 0) + len(rows)
                await self._pace(len(rows), sum(len(data) for _, data in rows), began)
        finally:
            await self._call(adapter.end_cursor)
