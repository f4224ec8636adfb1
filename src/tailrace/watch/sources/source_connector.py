"""A database outside that is followed: what all kinds have in common is how it is reached and copied."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, Generic, ParamSpec, Protocol, TypeVar

from tailrace.watch.collection import Collection
from tailrace.watch.sources.source_follower import SourceContext, SourceRunner
from tailrace.watch.sources.source_ingest import SourceIngest
from tailrace.watch.sources.source_seen import SeenKeys
from tailrace.watch.sources.source_thread import SourceThread

BUSY_S: Final = 0.02

P = ParamSpec("P")
T = TypeVar("T")
Table = TypeVar("Table")
Table_contra = TypeVar("Table_contra", contravariant=True)


class DatabaseAdapter(Protocol[Table_contra]):
    """A database as far as all of them are alike. Everything blocks, and belongs to one thread."""

    def open(self) -> None: ...
    def close(self) -> None: ...
    def copy(self, table: Table_contra, /) -> None: ...
    def rows(self, table: Table_contra, rows_max: int, bytes_max: int, /) -> list[tuple[str, bytes]]: ...
    def done(self) -> None: ...

    def explained(self, error: Exception, /) -> str | None:
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

    async def _left(self) -> None:
        await super()._left()
        with suppress(Exception):
            await self._call(self._connection.close)

    def _explained(self, error: Exception) -> str | None:
        return self._connection.explained(error)

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
        await self._call(adapter.copy, table)
        try:
            while rows := await self._call(adapter.rows, table, config.batch_changes, config.batch_bytes):
                began = time.monotonic()
                seen.add(key for key, _ in rows)
                await ingest.load(collection, rows)
                self._status.loaded = (self._status.loaded or 0) + len(rows)
                await self._pace(len(rows), sum(len(data) for _, data in rows), began)
        finally:
            await self._call(adapter.done)
