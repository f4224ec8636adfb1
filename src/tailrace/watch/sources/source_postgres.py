"""A PostgreSQL source at work: its slot is looked at, written down, and moved only then."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from tailrace.watch.sources.model import GapError, SourceError, SourcePosition
from tailrace.watch.sources.postgres import PostgresConnection, PostgresPage, PostgresTable, primary_keys
from tailrace.watch.sources.source_connector import BUSY_S, DatabaseConnector
from tailrace.watch.sources.source_follower import SourceContext
from tailrace.watch.sources.source_ingest import SourceIngest

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
            await self._hold(ingest.progress.reason)
        else:
            await self._begin(ingest)
        self._worked()
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
                await states.begin_now(ingest, known)
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
        await ingest.note(progress.replaced(making=True))
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
                drained = await self._round(ingest)
                self._drained_at = flushed if drained else -1
                if ingest.progress.position != before:
                    pause_s = BUSY_S if drained else 0.0
            if until is not None and self._drained_at >= until:
                return
            if time.monotonic() - self._checked_s >= self._limits.watch_source_check_ms / 1000:
                await self._check(ingest)
                await self._let_go(ingest)
            self._status.caught_up(self._drained_at >= 0)
            await asyncio.sleep(pause_s)

    async def _round(self, ingest: SourceIngest) -> bool:
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
            await self._call(adapter.done)
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

    async def _let_go(self, ingest: SourceIngest) -> None:
        """Lets the database throw away what has nothing to do with us, as it would otherwise keep it for us.

        Only up to the end of a record that was there at the last look: since then all of it has been read.
        """
        adapter, status = self._adapter, self._status
        boundary, self._boundary = self._boundary, await self._call(adapter.head)
        if boundary <= self._drained_at and boundary - status.confirmed >= MOVE_BYTES:
            await ingest.follow((), boundary)
            await self._call(adapter.advance, boundary)
            status.confirmed = boundary
