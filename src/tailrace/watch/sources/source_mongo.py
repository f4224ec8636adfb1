"""A MongoDB source at work: every collection has a change stream, and a token of its own.

The token behind what was read is written down with it, so that a stream goes on exactly there. A stream that
ends, because its collection was dropped or has become another one, is followed by the next: what is there is
copied, compared, and followed on.
"""

from __future__ import annotations

import asyncio
import time

from tailrace.watch.sources.config import TableMapping
from tailrace.watch.sources.model import GapError, SourcePosition
from tailrace.watch.sources.mongo import MongoConnection, MongoPage
from tailrace.watch.sources.source_connector import BUSY_S, DatabaseConnector
from tailrace.watch.sources.source_follower import SourceContext
from tailrace.watch.sources.source_ingest import SourceIngest
from tailrace.watch.sources.source_progress import CollectionProgress, SourceProgress


class MongoConnector(DatabaseConnector[TableMapping]):
    """Runs one MongoDB source until it is cancelled."""

    def __init__(self, followed: SourceContext) -> None:
        self._adapter = MongoConnection(followed.config)
        super().__init__(followed, self._adapter)
        self._checked_s = 0.0

    # -- a session -------------------------------------------------------------------------------------

    async def _connected(self) -> None:
        ingest, states = self._states.ingest(), self._states
        phase = ingest.progress.phase
        if phase == "stale" and not ingest.progress.rescan:
            await self._hold(ingest.progress.reason)
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
                self._worked()
            ended = await self._follow(ingest, until)
            if ended is not None:
                copied = (ended,)
                continue
            await states.end_load(ingest)
            copied, until = (), None

    async def _begin(self, ingest: SourceIngest) -> None:
        """Fixes where the log of each collection is read from, before anything is copied."""
        adapter, progress = self._adapter, ingest.progress
        await self._call(adapter.check, must_exist=progress.phase == "new")
        marks: dict[str, CollectionProgress] = {}
        for mapped in self._config.tables:
            lsn, token = await self._call(adapter.now, mapped)
            marks[mapped.collection] = CollectionProgress(token=token, lsn=lsn)
        system, _ = await self._call(adapter.state)
        newest = max(mark.lsn for mark in marks.values())
        known = progress.at(SourcePosition(newest, -1, -1)).replaced(
            system=system, marks=marks, reason=None, rescan=False
        )
        if self._config.initial == "now" and progress.phase == "new":
            await self._states.begin_now(ingest, known)
        else:
            await self._states.begin_load(ingest, known)

    # -- following -------------------------------------------------------------------------------------

    async def _follow(self, ingest: SourceIngest, until: int | None) -> TableMapping | None:
        """Until the stream of a collection ends, which is told, or all is read that is older than `until`."""
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
            self._status.caught_up(drained)
            if time.monotonic() - self._checked_s >= self._limits.watch_source_check_ms / 1000:
                await self._check(ingest)
            pause_s = min(2 * pause_s, idle_s) if not found else BUSY_S
            await asyncio.sleep(pause_s if drained else 0)

    async def _page(self, ingest: SourceIngest, mapped: TableMapping) -> MongoPage:
        """Reads on in one collection, and writes it down."""
        config, mark = self._config, ingest.progress.marks[mapped.collection]
        adapter, began = self._adapter, time.monotonic()
        await self._call(adapter.follow, mapped, mark.token, ended=mark.ended, position=mark.position)
        page = await self._call(adapter.page, mapped, config.batch_changes, config.batch_bytes)
        self._status.lag_changes = len(page.changes)
        await ingest.follow_one(mapped.collection, page.changes, page.token)
        if page.changes:
            self._status.changed(page.changes[-1].time)
        await self._pace(len(page.changes), page.size_bytes, began)
        return page

    async def _end(self, ingest: SourceIngest, mapped: TableMapping, page: MongoPage) -> None:
        """Its collection was dropped or renamed, or another one has taken its name."""
        known = ingest.progress.marked(
            mapped.collection, ingest.progress.position_in(mapped.collection), page.token, ended=True
        )
        if known.phase == "loading":
            await ingest.note(known)  # nobody has been told anything yet
        else:
            await self._states.begin_load(ingest, known)
        await self._call(self._adapter.leave, mapped)

    # -- looking after it ------------------------------------------------------------------------------

    async def _check(self, ingest: SourceIngest) -> None:
        """Whether it is what it was; and that nothing has happened for long is written down as well.

        MongoDB keeps its log for some time and for nobody: a token that is never moved would be lost.
        """
        self._checked_s = time.monotonic()
        progress = ingest.progress
        system, head = await self._call(self._adapter.state)
        if system != progress.system:
            raise GapError("it is another database")
        if head < _newest(progress):
            raise GapError("the database is older than what was read from it")
        if progress.tokens != self._states.progress.tokens:
            await ingest.note(progress)


def _newest(progress: SourceProgress) -> int:
    return max((mark.lsn for mark in progress.marks.values() if mark.ordinal >= 0), default=0)
