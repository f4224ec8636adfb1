"""A source outside at work: connects, copies, follows, and begins again when it has to.

Whatever goes wrong ends the session. The next one, after a pause that grows, finds out from what is durable
where the source was; what it reads again it knows by its position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Generic, ParamSpec, Protocol, TypeVar

from tailrace.api.watch.audit import Audit
from tailrace.api.watch.book import Book, Collection
from tailrace.api.watch.source_ingest import Ingest, SupersededError
from tailrace.api.watch.source_seen import SeenKeys
from tailrace.api.watch.source_states import SourceStates
from tailrace.api.watch.source_status import SourceStatus
from tailrace.api.watch.source_thread import SourceThread
from tailrace.errors import TailraceError
from tailrace.limits import Limits
from tailrace.watch.sources.config import SourceConfig
from tailrace.watch.sources.model import GapError, SourceError

logger = logging.getLogger("tailrace.watch")

BUSY_S: Final = 0.02
RETRY_S_MIN: Final = 1.0
VIEW_ROWS: Final = 500

P = ParamSpec("P")
T = TypeVar("T")
Table = TypeVar("Table")
Table_contra = TypeVar("Table_contra", contravariant=True)


class Adapter(Protocol[Table_contra]):
    """A database as far as all of them are alike. Everything blocks, and belongs to one thread."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def copy(self, table: Table_contra, /) -> None: ...
    def rows(self, table: Table_contra, rows_max: int, bytes_max: int, /) -> list[tuple[str, bytes]]: ...
    def done(self) -> None: ...

    def explained(self, error: Exception, /) -> str | None:
        """What the driver's own error says, in the database's words; None if it is not the driver's."""
        ...


class Connector(ABC, Generic[Table]):
    """Runs one source until it is cancelled. Which changes there are is up to the kind of database."""

    def __init__(
        self,
        book: Book,
        states: SourceStates,
        config: SourceConfig,
        status: SourceStatus,
        limits: Limits,
        audit: Audit,
        adapter: Adapter[Table],
    ) -> None:
        self._book = book
        self._states = states
        self._config = config
        self._status = status
        self._limits = limits
        self._audit = audit
        self._thread = SourceThread(config.name)
        self._connection = adapter
        self._retry_s = RETRY_S_MIN

    async def run(self) -> None:
        try:
            while True:
                pause_s = await self._once()
                if pause_s is None:
                    return
                await asyncio.sleep(pause_s)
        finally:
            self._thread.finish(self._connection.close)

    async def _once(self) -> float | None:
        """One session; for how long to wait before the next, None if there is to be none."""
        status = self._status
        try:
            await self._states.settled()
            await self._call(self._connection.open)
            status.connected = True
            await self._session()
        except GapError as gap:
            logger.warning("the source %s has a gap: %s", self._config.name, gap.reason)
            status.gaps += 1
            self._audit.event("source.gap", None, {"source": self._config.name, "reason": gap.reason})
            with suppress(TailraceError):
                await self._states.lose(gap.reason, rescan=self._config.on_gap == "rescan")
            status.error = gap.reason
        except SupersededError as error:
            logger.warning("the source %s: %s", self._config.name, error)
            return None
        except (SourceError, TailraceError) as error:
            status.error = str(error)
            logger.warning("the source %s: %s", self._config.name, error)
        except Exception as error:
            known = self._connection.explained(error)
            status.error = known or _shortened(error)
            logger.warning("the source %s: %s", self._config.name, status.error, exc_info=known is None)
        status.connected = False
        status.restarts += 1
        with suppress(Exception):
            await self._call(self._connection.close)
        pause_s = self._retry_s
        self._retry_s = min(2 * self._retry_s, self._limits.watch_source_retry_ms / 1000)
        return pause_s

    @abstractmethod
    async def _session(self) -> None:
        """Until something is wrong. The connection is open."""

    def _worked(self) -> None:
        """It is in order: the next pause is short."""
        self._status.error = None
        self._retry_s = RETRY_S_MIN

    async def _hold(self, reason: str | None) -> None:
        """Something is missing, and an operator decides."""
        self._status.error = reason
        await asyncio.Event().wait()

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return self._thread.call(function, *args, **kwargs)

    async def _pace(self, changes: int, size_bytes: int, began: float) -> None:
        """No faster than is allowed."""
        config = self._config
        due_s = max(changes / config.events_per_s, size_bytes / config.bytes_per_s)
        if (rest_s := due_s - (time.monotonic() - began)) > 0:
            await asyncio.sleep(rest_s)

    # -- copying ---------------------------------------------------------------------------------------

    async def _load(self, ingest: Ingest, tables: Iterable[tuple[str, Table]]) -> None:
        """Copies tables, and writes down what differs from what there is in the collection of each."""
        self._status.loaded = 0
        for name, table in tables:
            collection = self._states.collections[name]
            seen = SeenKeys()
            try:
                await self._copy(ingest, table, collection, seen)
                await self._remove_others(ingest, collection, seen)
            finally:
                seen.close()

    async def _copy(self, ingest: Ingest, table: Table, collection: Collection, seen: SeenKeys) -> None:
        adapter, config = self._connection, self._config
        await self._call(adapter.copy, table)
        try:
            while rows := await self._call(adapter.rows, table, config.batch_changes, config.batch_bytes):
                began = time.monotonic()
                seen.add(key for key, _ in rows)
                await ingest.load(collection, rows)
                self._status.loaded += len(rows)
                await self._pace(len(rows), sum(len(data) for _, data in rows), began)
        finally:
            await self._call(adapter.done)

    async def _remove_others(self, ingest: Ingest, collection: Collection, seen: SeenKeys) -> None:
        after = ""
        while rows := self._book.view.now.documents_after(collection.number, after, VIEW_ROWS):
            after = rows[-1].id
            if gone := seen.lacks([row.id for row in rows]):
                await ingest.remove(collection, gone)
            await asyncio.sleep(0)


def _shortened(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:500] or type(error).__name__
