"""Replay: snapshots and changes read from the log for subscriptions that are behind.

Deliveries as the gateway uses them: what jobs beside it have examined shortens the way of those behind.

A subscription that reads the log asks here first. Where somebody has examined its partition for it, it reads
only the changes that concern it; everywhere else it reads all of them. Each of these changes is still judged
by the gateway itself, so a delivery decides what is looked at, and never what somebody is sent.

Reading what a subscription lacks: a snapshot from the view, changes from the log, then live, no seam.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from tailrace.common.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.routing.context import Context
from tailrace.watch.collection import Collection, complete_from_cache
from tailrace.watch.document import BeforeUnknownError, Change, decode_change
from tailrace.watch.document_view import DocumentRow
from tailrace.watch.evaluation_cost import CostExceededError
from tailrace.watch.external_matching import (
    DeliveryBatch,
    ExaminedRange,
    ExaminedRanges,
    RelevantRange,
    decode_delivery,
)
from tailrace.watch.query import sort_key, sort_values
from tailrace.watch.query_execution import TimeSlice, flatten_row
from tailrace.watch.realtime import envelopes
from tailrace.watch.realtime.subscription import Subscription

if TYPE_CHECKING:
    from tailrace.watch.realtime.gateway import Gateway


logger = logging.getLogger("tailrace.watch")

DELIVERY_PAGE_BYTES: Final = 4 * 1024 * 1024
DELIVERY_PAGE_ENTRIES: Final = 100
DELIVERIES_BYTES_MAX: Final = 32 * 1024 * 1024
DELIVERY_RETRY_S: Final = 1.0
# Where so many of the changes concern it, a subscription is faster if it reads them all.
DENSE_FACTOR: Final = 4

CollectionKey = tuple[str, str]  # database and collection


class DeliveryReader:
    """Owned by the loop thread."""

    def __init__(self, context: Context, gateway: Gateway) -> None:
        self._context = context
        self._gateway = gateway
        self._examined: dict[CollectionKey, ExaminedRanges] = {}
        self._kept: deque[tuple[CollectionKey, ExaminedRange]] = deque()  # as they came
        self._kept_bytes = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.batches: Counter[str] = Counter()  # by what became of them
        self.skipped = 0  # changes that nobody had to read

    # -- reading ---------------------------------------------------------------------------------------

    def follow(self, name: str) -> None:
        """From now on; what was delivered before was for connections that are no more."""
        stream = self._context.log.find(name)
        if stream is not None and (self._task is None or self._task.done()):
            self._task = self._context.loop.create_task(self._run(stream))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def on_published(self, stream: Stream) -> None:
        self._news.set()

    async def _run(self, stream: Stream) -> None:
        at = stream.visible
        stream.readers = [*(stream.readers or ()), self]
        try:
            while not stream.gone:
                self._news.clear()
                if at < stream.visible:
                    at = await self._page(stream, max(at, stream.earliest))
                else:
                    await self._news.wait()
        finally:
            others = [one for one in stream.readers or () if one is not self]
            stream.readers = others or None

    async def _page(self, stream: Stream, at: int) -> int:
        try:
            page = await self._context.log.reader.read_labelled(
                stream, at, DELIVERY_PAGE_BYTES, DELIVERY_PAGE_ENTRIES
            )
        except TailraceError as error:
            logger.warning("deliveries cannot be read yet: %s", error.message)
            await asyncio.sleep(DELIVERY_RETRY_S)
            return at
        for raw in page.parts:
            self._take(bytes(raw))
        return page.next_entry

    def _take(self, raw: bytes) -> None:
        try:
            batch = decode_delivery(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.batches["malformed"] += 1
            logger.warning("a delivery cannot be understood: %s", error)
            return
        if batch is not None:
            extent = self._extent(batch)
            self.batches["dropped" if extent is None else "taken"] += 1

    def _extent(self, batch: DeliveryBatch) -> ExaminedRange | None:
        """None for a batch that is of no use to anybody here."""
        key = (batch.database, batch.collection)
        watched = self._gateway.watched_named(*key)
        collection = None if watched is None else watched.collection
        if watched is None or collection is None or not 0 <= batch.partition < len(collection.applied):
            return None
        examined = self._examined.get(key)
        if examined is None or examined.generation != watched.generation:
            examined = self._examined[key] = ExaminedRanges(watched.generation)
        extent = examined.take(batch)
        if extent is not None:
            self._kept.append((key, extent))
            self._kept_bytes += extent.size_bytes
            while self._kept_bytes > DELIVERIES_BYTES_MAX:
                self._drop_oldest()
        return extent

    def _drop_oldest(self) -> None:
        key, extent = self._kept.popleft()
        self._kept_bytes -= extent.size_bytes
        examined = self._examined.get(key)
        if examined is not None:
            examined.drop(extent)

    # -- using -----------------------------------------------------------------------------------------

    def ahead(self, subscription: Subscription, partition: int) -> RelevantRange | None:
        """The way on for a subscription that is behind; None: all of the log."""
        watched = subscription.watched
        examined = self._examined.get((watched.database, watched.name))
        if examined is None or not subscription.written or examined.generation != watched.generation:
            return None
        after = subscription.own[partition]
        found = examined.ahead(subscription.key, subscription.written, partition, after)
        if (
            found is not None
            and found.seqs is not None
            and len(found.seqs) * DENSE_FACTOR > found.last - after
        ):
            return None
        return found

    def passed(self, count: int) -> None:
        self.skipped += count

    def doubt(self, subscription: Subscription) -> None:
        """Somebody was told of a change that does not concern it: nothing of this collection is believed."""
        watched = subscription.watched
        self._examined.pop((watched.database, watched.name), None)
        self.batches["wrong"] += 1
        logger.warning("a delivery for %s/%s is wrong, and is not used", watched.database, watched.name)


PAGE_BYTES: Final = 256 * 1024
PAGE_ENTRIES: Final = 500
SCAN_ROWS: Final = 200
NEWER_MAX: Final = 100_000
ORDERED_MAX: Final = 100_000
POLL_S: Final = 0.25
NO_END: Final = 2**62
_READING: Final = ("behind", "snapshot")


class Replayer:
    """All reading on behalf of subscriptions; a few at once, so that live matching is not delayed."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._turns = asyncio.Semaphore(gateway.limits.watch_replays)
        self._snapshot_turns = asyncio.Semaphore(gateway.limits.watch_snapshots)
        self._overflow_s = gateway.limits.watch_overflow_ms / 1000
        self.snapshots = 0
        self.snapshot_documents = 0

    def follow(self, subscription: Subscription) -> None:
        """Reads from the log until there is nothing left to read."""
        self._run(subscription, self._follow(subscription))

    def snapshot(self, subscription: Subscription) -> None:
        """Sends what there is, then what happened meanwhile."""
        subscription.state = "snapshot"
        subscription.own = list(subscription.watched.applied)
        subscription.newer = {}
        self.snapshots += 1
        self._run(subscription, self._snapshot(subscription))

    def _run(self, subscription: Subscription, work: Coroutine[Any, Any, None]) -> None:
        subscription.task = self._gateway.context.loop.create_task(self._guarded(subscription, work))

    async def _guarded(self, subscription: Subscription, work: Coroutine[Any, Any, None]) -> None:
        session = subscription.session
        try:
            await work
        except asyncio.CancelledError:
            raise
        except CostExceededError:
            session.invalidate(subscription, "cost-exceeded")
        except BeforeUnknownError:
            session.invalidate(subscription, "too-far-behind")
        except TailraceError as refusal:
            reason = "retention" if refusal.code == "offset_gone" else "gap"
            if subscription.state == "snapshot" and reason != "retention":
                session.fail(subscription, "snapshot_failed", refusal.message)
            else:
                session.invalidate(subscription, reason)
        except Exception:
            logger.exception("reading for a subscription failed")
            session.invalidate(subscription, "gap")

    # -- the log ---------------------------------------------------------------------------------------

    async def _follow(self, subscription: Subscription) -> None:
        """Ends when the subscription is live, paused, or no more."""
        watched = subscription.watched
        while subscription.state in _READING:
            if not await self._room(subscription):
                return
            if watched.state != "live":
                await asyncio.sleep(POLL_S)  # while it loads nobody is told anything
                continue
            partition = _next_partition_behind(subscription)
            if partition is None:
                self._caught_up(subscription)
                return
            collection = watched.collection
            assert collection is not None, "what does not exist lacks nothing"
            await self._read(subscription, collection, partition)

    async def _read(self, subscription: Subscription, collection: Collection, partition: int) -> None:
        gateway, own = self._gateway, subscription.own
        stream = gateway.book.log.find(collection.stream(partition))
        if stream is None or stream.earliest > own[partition]:
            subscription.session.invalidate(subscription, "retention")
            return
        ahead = gateway.delivered.ahead(subscription, partition) if subscription.state == "behind" else None
        if ahead is not None and ahead.seqs is not None:
            last = min(ahead.last, collection.applied[partition])
            await self._jump(
                subscription, stream, partition, [seq for seq in ahead.seqs if seq <= last], last
            )
            return
        async with self._turns:
            page = await gateway.book.log.reader.read_labelled(
                stream, own[partition], PAGE_BYTES, PAGE_ENTRIES
            )
        assert page.labels is not None
        last = NO_END if ahead is None else ahead.last
        time_slice = TimeSlice()
        for seq, raw, time_ns in zip(page.entries(), page.parts, page.labels.times, strict=True):
            if subscription.state not in _READING or seq > min(last, collection.applied[partition]):
                return  # it is over, or the collection itself has not looked at this yet
            change = decode_change(bytes(raw), partition, seq, time_ns)
            if change is not None and _was_sent(subscription, change.entry.documentKey, seq):
                subscription.watched.tally.dropped["snapshot"] += 1
            elif change is not None:
                complete_from_cache(collection, change)
                _send_change(subscription, stream, change)
            own[partition] = seq
            if subscription.full and subscription.state == "behind":
                subscription.state = "paused"
                return
            if time_slice.is_over:
                await time_slice.give_way()

    async def _jump(
        self, subscription: Subscription, stream: Stream, partition: int, seqs: list[int], last: int
    ) -> None:
        """Reads only what concerns the subscription, as somebody else has found; that is judged again."""
        gateway, own, begun = self._gateway, subscription.own, subscription.own[partition]
        for seq in seqs:
            async with self._turns:
                page = await gateway.book.log.reader.read_labelled(stream, seq - 1, PAGE_BYTES, 1)
            if subscription.state != "behind" or subscription.watched.state != "live":
                return
            assert page.labels is not None
            change = decode_change(bytes(page.parts[0]), partition, seq, page.labels.times[0])
            if change is None or not _send_change(subscription, stream, change):
                gateway.delivered.doubt(subscription)
                return
            own[partition] = seq
            if subscription.full:
                subscription.state = "paused"
                return
            if not await self._room(subscription):
                return
        gateway.delivered.passed(last - begun - len(seqs))
        own[partition] = last

    def _caught_up(self, subscription: Subscription) -> None:
        """Nothing has happened since the last look: this is the same turn of the loop."""
        was_snapshot = subscription.state == "snapshot"
        if not was_snapshot and subscription.full:
            subscription.state = "paused"
            return
        self._gateway.go_live(subscription)
        if was_snapshot:
            subscription.session.end_snapshot(subscription)

    async def _room(self, subscription: Subscription) -> bool:
        """Waits until the client has taken enough; False if the subscription is over.

        One that takes nothing for too long is told that it has to begin again. Time is told by the clock:
        how often somebody is woken says nothing.
        """
        session, loop = subscription.session, self._gateway.context.loop
        progress_at, taken = loop.time(), session.taken_bytes
        while subscription.state in _READING:
            if session.has_room and not self._waits(subscription):
                return True
            session.drained.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(session.drained.wait(), POLL_S)
            if session.taken_bytes != taken or session.has_room:
                progress_at, taken = loop.time(), session.taken_bytes
            elif loop.time() - progress_at >= self._overflow_s:
                session.invalidate(subscription, "overflow", retry_after_ms=1000)
        return False

    def _waits(self, subscription: Subscription) -> bool:
        """Snapshots, and those that can wait, step back while there is too much unsent to everybody."""
        optional = subscription.state == "snapshot" or subscription.options.priority == "low"
        return optional and self._gateway.shedding

    # -- the view --------------------------------------------------------------------------------------

    async def _snapshot(self, subscription: Subscription) -> None:
        gateway, begun = self._gateway, time.monotonic()
        while subscription.watched.state != "live":
            await asyncio.sleep(POLL_S)
            subscription.own = list(subscription.watched.applied)  # where the snapshot begins
        async with self._snapshot_turns:
            pages, count = await self._pages(subscription)
        if subscription.state != "snapshot":
            return
        self.snapshot_documents += count
        subscription.session.snapshot_sizes[subscription.id] = (pages, count)
        await self._follow(subscription)
        gateway.context.telemetry.watch_snapshot_seconds.observe(time.monotonic() - begun)

    async def _pages(self, subscription: Subscription) -> tuple[int, int]:
        """Sends the rows that match, page by page; tells how many pages and rows there were."""
        gateway, session = self._gateway, subscription.session
        collection = subscription.watched.collection
        pages = count = 0
        if collection is not None:
            gateway.book.check_applied(collection)
            rows: list[bytes] = []
            size = 0
            async for row in self._matching(subscription, collection):
                entry = _snapshot_row(collection, row, subscription.options.include_data)
                if rows and (
                    len(rows) >= gateway.limits.watch_snapshot_documents
                    or size + len(entry) > gateway.limits.watch_snapshot_bytes
                ):
                    if not await self._room(subscription):
                        return pages, count
                    session.send_snapshot(subscription, pages, rows)
                    pages, rows, size = pages + 1, [], 0
                rows.append(entry)
                size += len(entry)
                count += 1
                self._note(subscription, row)
            if rows:
                if not await self._room(subscription):
                    return pages, count
                session.send_snapshot(subscription, pages, rows)
                pages += 1
        if pages == 0 and subscription.state == "snapshot":
            session.send_snapshot(subscription, 0, [])
            pages = 1
        return pages, count

    def _note(self, subscription: Subscription, row: DocumentRow) -> None:
        """A row may be newer than where the snapshot began: then its older changes must not follow it."""
        newer = subscription.newer
        assert newer is not None
        if len(subscription.own) <= row.partition:
            return  # the collection came into being meanwhile: all its changes follow
        if row.seq > subscription.own[row.partition]:
            newer[row.id] = row.seq
            if len(newer) > NEWER_MAX:
                raise TailraceError("overloaded", "too much changes while the snapshot is read")

    async def _matching(
        self, subscription: Subscription, collection: Collection
    ) -> AsyncIterator[DocumentRow]:
        """The rows that match, in the order asked for; read in pieces, each as the view is then."""
        now, query = self._gateway.book.view.now, subscription.query
        matches, time_slice = subscription.interest.whole.matches, TimeSlice()
        if query.order:
            ids = await self._ordered_ids(subscription, collection)
        elif query.documents is not None:
            ids = sorted(query.documents)
        else:
            after = ""
            while subscription.state == "snapshot":
                rows = now.documents_after(collection.number, after, SCAN_ROWS)
                for row in rows:
                    if matches(flatten_row(collection, row)):
                        yield row
                    if time_slice.is_over:
                        await time_slice.give_way()
                if not rows:
                    return
                after = rows[-1].id
            return
        for document_id in ids:
            for row in now.documents_named(collection.number, [document_id]):
                if matches(flatten_row(collection, row)):
                    yield row
            if time_slice.is_over:
                await time_slice.give_way()

    async def _ordered_ids(self, subscription: Subscription, collection: Collection) -> list[str]:
        now, order = self._gateway.book.view.now, subscription.query.order
        matches, time_slice = subscription.interest.whole.matches, TimeSlice()
        keys: list[tuple[Any, ...]] = []
        after = ""
        while subscription.state == "snapshot":
            rows = now.documents_after(collection.number, after, SCAN_ROWS)
            for row in rows:
                flat = flatten_row(collection, row)
                if matches(flat):
                    keys.append(sort_key(sort_values(flat, order), row.id, order))
                if time_slice.is_over:
                    await time_slice.give_way()
            if len(keys) > ORDERED_MAX:
                raise TailraceError("overloaded", f"more than {ORDERED_MAX} documents cannot be ordered")
            if not rows:
                break
            after = rows[-1].id
        keys.sort()
        return [key[-1] for key in keys]


def _next_partition_behind(subscription: Subscription) -> int | None:
    """A partition with changes that the client does not have."""
    applied = subscription.watched.applied
    if len(subscription.own) != len(applied):
        # The collection came into being meanwhile, with a number of partitions that nobody could know.
        subscription.own = [0] * len(applied)
    for partition, seq in enumerate(subscription.own):
        if seq < applied[partition]:
            return partition
    return None


def _send_change(subscription: Subscription, stream: Stream, change: Change) -> bool:
    """Sends what a change is to the subscription; False if it is nothing to it."""
    event = subscription.interest.event(change)
    if event is None:
        return False
    op, reason = event
    content = envelopes.encode_delta(change, op, reason, subscription.options.include_data)
    lsn = change.lsn or stream.offset(change.seq)
    subscription.session.replayed(subscription, change, lsn, op, content)
    return True


def _was_sent(subscription: Subscription, document_id: str, seq: int) -> bool:
    return subscription.newer is not None and subscription.newer.get(document_id, 0) >= seq


def _snapshot_row(collection: Collection, row: DocumentRow, include_data: bool) -> bytes:
    found: dict[str, Any] = {"path": f"{collection.name}/{row.id}", "id": row.id}
    if include_data:
        found["data"] = orjson.Fragment(row.data)
    found |= {"version": row.version, "updatedAt": row.updated_ms, "partition": row.partition, "seq": row.seq}
    return orjson.dumps(found)
