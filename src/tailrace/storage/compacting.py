"""Compactions carried out: written down as begun, put into the manifest, written down as done.

A crash before the manifest leaves an object that nobody names. After it, the owner would go on with segments
whose objects are deleted some day. So what was begun is a fact of the log, and whoever starts finishes it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from tailrace.common import failpoints
from tailrace.common.errors import TailraceError
from tailrace.log import compaction
from tailrace.log.compaction import CompactionIntent
from tailrace.log.durable import await_commit
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.storage.manifests.stream_locks import StreamLocks
from tailrace.storage.seal import SealingService
from tailrace.storage.seal_job import ManifestPublication
from tailrace.storage.segments.segments import make_stream_id

logger = logging.getLogger("tailrace.pipeline")

COMPACTION_RETRY_S: Final = 10.0
_REFUSAL_CODES: Final = {"missing": "object_missing", "changed": "inputs_changed", "buried": "stream_gone"}


class CompactionService:
    """Owned by the loop thread. Whoever calls holds the lock of the stream."""

    def __init__(
        self, log: Log, sealing: SealingService, locks: StreamLocks, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._log = log
        self._sealing = sealing
        self._locks = locks
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self.segments = self.rows = 0  # that became part of others, since the start

    def start(self) -> None:
        """Finishes what an earlier life of the server began."""
        self._finish_later()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def begin(self, stream: Stream, intent: CompactionIntent) -> int:
        """The generation of the manifest that lists the new segment. TailraceError if it is not listed."""
        await self._note(stream.number, intent)
        failpoints.reached("compact.after_intent")
        if intent.segment.first <= stream.earliest:
            # Retention had decided before it could know of this.
            await self._note(stream.number, None)
            raise TailraceError("inputs_changed", "retention has taken some of the entries")
        try:
            return await self._carry_out(stream, intent)
        except TailraceError:
            self._finish_later()
            raise

    async def finish(self, stream: Stream) -> None:
        """What was begun before and is not known to be done."""
        raw = self._log.streams.meta.get(compaction.compaction_fact_key(stream.number))
        if raw is not None:
            try:
                await self._carry_out(stream, compaction.decode_intent(raw))
            except TailraceError as error:
                if compaction.compaction_fact_key(stream.number) in self._log.streams.meta:
                    raise
                logger.info("a compaction of %s was given up: %s", stream.name, error)

    async def _carry_out(self, stream: Stream, intent: CompactionIntent) -> int:
        publication = ManifestPublication(
            stream_id=make_stream_id(stream.name, stream.incarnation),
            segment=intent.segment,
            replaced=list(intent.replaced),
        )
        if not self._sealing.standing.owned:
            raise TailraceError("unavailable", "the object store cannot be used just now")
        report = await self._sealing.ask("compact", [stream.number], publication=publication)
        if report.error:
            raise TailraceError("unavailable", f"the manifest cannot be written: {report.error}")
        if report.refused or stream.removed:
            await self._note(stream.number, None)
            raise TailraceError(
                _REFUSAL_CODES.get(report.refused, "stream_gone"), report.detail or "it was deleted"
            )
        now_ns = self._log.clock.now_ns()
        await self._sealing.journal(intent.done(stream.number, report.generation, report.footers[0], now_ns))
        failpoints.reached("compact.after_journal")
        self.segments += len(intent.replaced)
        self.rows += intent.segment.rows
        return report.generation

    async def _note(self, number: int, intent: CompactionIntent | None) -> None:
        """Returns when it is durable."""
        value = None if intent is None else compaction.encode_intent(intent)
        await await_commit(partial(self._log.put_meta, compaction.compaction_fact_key(number), value))

    # -- what was not finished -----------------------------------------------------------------------------

    def _finish_later(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._finish_all())

    async def _finish_all(self) -> None:
        """Until nothing is left that was begun."""
        while numbers := [number for number, _ in compaction.pending_compactions(self._log.streams)]:
            for number in numbers:
                try:
                    await self._finish_one(number)
                except TailraceError as error:
                    logger.warning("a compaction of stream %d is not finished yet: %s", number, error)
                except Exception:
                    logger.exception("a compaction of stream %d cannot be finished", number)
            if any(True for _ in compaction.pending_compactions(self._log.streams)):
                await asyncio.sleep(COMPACTION_RETRY_S)

    async def _finish_one(self, number: int) -> None:
        stream = self._log.streams.get(number)
        if stream is None or stream.removed:
            await self._note(number, None)
            return
        async with self._locks.hold(make_stream_id(stream.name, stream.incarnation)):
            await self.finish(stream)
