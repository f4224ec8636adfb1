"""Running a source: sessions with back-off, the driver thread, and the initial copy of a database.

A source runs one session after the other until it is cancelled. Any error ends the session. The next one
starts, after a growing pause, at the durable position; changes that are read again are recognized by their
position. Database drivers block, so each connection belongs to a `SourceThread`.
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

from tailrace.common.backoff import Backoff
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.common.logging_setup import log_fields
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
    """Runs calls one after the other. A daemon thread: a hanging driver cannot block shutdown."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[asyncio.Future[Any] | None, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=f"source-{name}", daemon=True)
        self._thread.start()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run a function on the thread; a call that has started cannot be cancelled."""
        settled: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((settled, lambda: function(*args, **kwargs)))
        return settled

    def finish(self, last: Callable[[], object]) -> None:
        """Run a last function, ignore its result, and end the thread."""
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
            except BaseException as error:  # noqa: BLE001 - passed to the caller
                self._settle(_fail, settled, error)
            else:
                self._settle(_succeed, settled, result)

    def _settle(self, settle: Callable[[asyncio.Future[Any], Any], None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(settle, *args)


def _succeed(settled: asyncio.Future[Any], result: Any) -> None:
    if not settled.done():
        settled.set_result(result)


def _fail(settled: asyncio.Future[Any], error: BaseException) -> None:
    if not settled.done():
        settled.set_exception(error)


class SeenKeys:
    """The keys seen by a copy, in a temporary file: there may be many."""

    def __init__(self) -> None:
        self._connection = apsw.Connection("")  # a temporary file, deleted on close
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
        """The keys that were not added."""
        find = "SELECT 1 FROM seen WHERE key=?"
        return [key for key in keys if self._execute(find, (key,)).fetchone() is None]

    def close(self) -> None:
        self._connection.close()


logger = logging.getLogger("tailrace.watch")

RETRY_S_MIN: Final = 1.0
VIEW_ROWS: Final = 500
ERROR_CHARS: Final = 500


class SourceContext(NamedTuple):
    """A source and what its connector needs."""

    registry: CollectionRegistry
    states: SourceLifecycle
    config: SourceConfig
    status: SourceStatus
    limits: Limits
    audit: AuditLog


class SourceRunner(ABC):
    """Runs one source until it is cancelled."""

    def __init__(self, context: SourceContext) -> None:
        self._registry, self._states, self._config, self._status, self._limits, self._audit = context
        self._backoff = Backoff(RETRY_S_MIN, self._limits.watch_source_retry_ms / 1000)

    async def run(self) -> None:
        while True:
            pause_s = await self._run_session()
            if pause_s is None:
                return
            await asyncio.sleep(pause_s)

    @abstractmethod
    async def _session(self) -> None:
        """One session; returns or raises when it ends."""

    async def _on_disconnect(self) -> None:
        """The session ended; another may follow."""
        self._status.connected = False

    def _explain_error(self, error: Exception) -> str | None:
        """A readable text for an error of the driver; None for other errors."""
        return None

    async def _run_session(self) -> float | None:
        """Run one session; the pause before the next one, None to stop."""
        status = self._status
        try:
            await self._states.wait_settled()
            await self._session()
        except GapError as gap:
            logger.warning("source has a gap", extra=self._log_fields(gap.reason))
            status.gaps += 1
            self._audit.event("source.gap", None, {"source": self._config.name, "reason": gap.reason})
            with suppress(TailraceError):
                await self._states.mark_stale(gap.reason, rescan=self._config.on_gap == "rescan")
            status.error = gap.reason
        except SupersededError as error:
            logger.warning("source was taken over by another connector", extra=self._log_fields(error))
            return None
        except (SourceError, TailraceError) as error:
            status.error = str(error)
            logger.warning("source session failed, retrying", extra=self._log_fields(error))
        except Exception as error:
            known = self._explain_error(error)
            status.error = known or _shortened(error)
            logger.warning(
                "source session failed, retrying",
                extra=self._log_fields(status.error),
                exc_info=known is None,
            )
        status.restarts += 1
        await self._on_disconnect()
        return self._backoff.next_s()

    def _log_fields(self, error: object) -> dict[str, object]:
        return log_fields(source=self._config.name, kind=self._config.kind, error=str(error))

    def _reset_backoff(self) -> None:
        """The session works: the next pause is short."""
        self._status.error = None
        self._backoff.reset()

    async def _wait_for_operator(self, reason: str | None) -> None:
        """Changes are missing: wait until an operator changes or resyncs the source."""
        self._status.error = reason
        await asyncio.Event().wait()

    async def _remove_unseen(self, ingest: SourceIngest, collection: Collection, seen: SeenKeys) -> None:
        """Delete documents that the copy did not contain."""
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
    """What database connections have in common. All methods block and run on one thread."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def begin_copy(self, table: Table_contra, /) -> None: ...
    def rows(self, table: Table_contra, rows_max: int, bytes_max: int, /) -> list[tuple[str, bytes]]: ...
    def end_cursor(self) -> None: ...

    def explain_error(self, error: Exception, /) -> str | None:
        """The message of a driver error; None for other errors."""
        ...


class DatabaseConnector(SourceRunner, Generic[Table]):
    """A source that is a database; subclasses read its changes."""

    def __init__(self, context: SourceContext, adapter: DatabaseAdapter[Table]) -> None:
        super().__init__(context)
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
        """The session after the connection is open."""

    async def _on_disconnect(self) -> None:
        await super()._on_disconnect()
        with suppress(Exception):
            await self._call(self._connection.close)

    def _explain_error(self, error: Exception) -> str | None:
        return self._connection.explain_error(error)

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return self._thread.call(function, *args, **kwargs)

    async def _pace(self, changes: int, size_bytes: int, began: float) -> None:
        """Sleep to stay within the configured rates."""
        config = self._config
        due_s = max(changes / config.events_per_s, size_bytes / config.bytes_per_s)
        if (rest_s := due_s - (time.monotonic() - began)) > 0:
            await asyncio.sleep(rest_s)

    # -- copying ---------------------------------------------------------------------------------------

    async def _load(self, ingest: SourceIngest, tables: Iterable[tuple[str, Table]]) -> None:
        """Copy tables, and commit what differs from their collections."""
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
