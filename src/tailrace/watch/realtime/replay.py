"""Replay: snapshots, and changes read from the log, for subscriptions that are behind.

`Replayer` sends a snapshot from the view, then changes from the log, and makes the subscription live when
nothing is missing. External jobs may examine a partition in advance and write deliveries: `DeliveryReader`
collects them, so that a subscription reads only the changes that concern it. Every such change is still
matched here: a delivery decides what is read, never what a client is sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet, wait_event
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
# If at least 1 in this many changes is relevant, reading all of them is faster.
DENSE_FACTOR: Final = 4

CollectionKey = tuple[str, str]  # database and collection


class DeliveryReader:
    """The deliveries of external jobs, in memory. Owned by the loop thread."""

    def __init__(self, context: Context, gateway: Gateway) -> None:
        self._context = context
        self._gateway = gateway
        self._examined: dict[CollectionKey, ExaminedRanges] = {}
        self._retained: deque[tuple[CollectionKey, ExaminedRange]] = deque()  # oldest first
        self._retained_bytes = 0
        self._published = asyncio.Event()
        self._tasks = TaskSet()
        self.batches: Counter[str] = Counter()  # by outcome
        self.skipped = 0  # changes that were not read

    # -- reading ---------------------------------------------------------------------------------------

    def follow(self, name: str) -> None:
        """Read new entries; earlier deliveries were for connections that are gone."""
        stream = self._context.log.find(name)
        if stream is not None and not self._tasks.running:
            self._tasks.start(self._run(stream))

    def stop(self) -> None:
        self._tasks.cancel()

    def on_published(self, stream: Stream) -> None:
        self._published.set()

    async def _run(self, stream: Stream) -> None:
        at = stream.visible
        stream.add_reader(self)
        try:
            while not stream.gone:
                self._published.clear()
                if at < stream.visible:
                    at = await self._page(stream, max(at, stream.earliest))
                else:
                    await self._published.wait()
        finally:
            stream.remove_reader(self)

    async def _page(self, stream: Stream, at: int) -> int:
        try:
            page = await self._context.log.reader.read_labelled(
                stream, at, DELIVERY_PAGE_BYTES, DELIVERY_PAGE_ENTRIES
            )
        except TailraceError as error:
            logger.warning("cannot read deliveries, retrying", extra=log_fields(error=error.message))
            await asyncio.sleep(DELIVERY_RETRY_S)
            return at
        for raw in page.parts:
            self._consume(bytes(raw))
        return page.next_entry

    def _consume(self, raw: bytes) -> None:
        try:
            batch = decode_delivery(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.batches["malformed"] += 1
            logger.warning("invalid delivery ignored", extra=log_fields(error=str(error)))
            return
        if batch is not None:
            extent = self._extent(batch)
            self.batches["dropped" if extent is None else "taken"] += 1

    def _extent(self, batch: DeliveryBatch) -> ExaminedRange | None:
        """None for a batch that no subscription here can use."""
        key = (batch.database, batch.collection)
        watched = self._gateway.watched_named(*key)
        collection = None if watched is None else watched.collection
        if watched is None or collection is None or not 0 <= batch.partition < len(collection.applied):
            return None
        examined = self._examined.get(key)
        if examined is None or examined.generation != watched.generation:
            examined = self._examined[key] = ExaminedRanges(watched.generation)
        extent = examined.add_batch(batch)
        if extent is not None:
            self._retained.append((key, extent))
            self._retained_bytes += extent.size_bytes
            while self._retained_bytes > DELIVERIES_BYTES_MAX:
                self._drop_oldest()
        return extent

    def _drop_oldest(self) -> None:
        key, extent = self._retained.popleft()
        self._retained_bytes -= extent.size_bytes
        examined = self._examined.get(key)
        if examined is not None:
            examined.evict(extent)

    # -- using -----------------------------------------------------------------------------------------

    def relevant_after(self, subscription: Subscription, partition: int) -> RelevantRange | None:
        """What to read next for a subscription that is behind; None: all of the log."""
        watched = subscription.watched
        examined = self._examined.get((watched.database, watched.name))
        if examined is None or not subscription.summary_entry or examined.generation != watched.generation:
            return None
        after = subscription.client_positions[partition]
        found = examined.relevant_after(subscription.key, subscription.summary_entry, partition, after)
        if (
            found is not None
            and found.seqs is not None
            and len(found.seqs) * DENSE_FACTOR > found.last - after
        ):
            return None
        return found

    def count_skipped(self, count: int) -> None:
        self.skipped += count

    def distrust(self, subscription: Subscription) -> None:
        """A delivery named a change that does not match: drop all deliveries of this collection."""
        watched = subscription.watched
        self._examined.pop((watched.database, watched.name), None)
        self.batches["wrong"] += 1
        logger.warning(
            "wrong delivery, ignoring deliveries of the collection",
            extra=log_fields(database=watched.database, collection=watched.name),
        )


PAGE_BYTES: Final = 256 * 1024
PAGE_ENTRIES: Final = 500
SCAN_ROWS: Final = 200
NEWER_MAX: Final = 100_000
ORDERED_MAX: Final = 100_000
POLL_S: Final = 0.25
NO_END: Final = 2**62
_READING: Final = ("behind", "snapshot")


class Replayer:
    """Reads for subscriptions that are behind; few at a time, so that live matching is not delayed."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._read_slots = asyncio.Semaphore(gateway.limits.watch_replays)
        self._snapshot_slots = asyncio.Semaphore(gateway.limits.watch_snapshots)
        self._overflow_s = gateway.limits.watch_overflow_ms / 1000
        self.snapshots = 0
        self.snapshot_documents = 0

    def follow(self, subscription: Subscription) -> None:
        """Read from the log until the subscription has caught up."""
        self._run(subscription, self._follow(subscription))

    def snapshot(self, subscription: Subscription) -> None:
        """Send the matching documents, then the changes since."""
        subscription.state = "snapshot"
        subscription.client_positions = list(subscription.watched.applied)
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
        except TailraceError as error:
            reason = "retention" if error.code == "offset_gone" else "gap"
            if subscription.state == "snapshot" and reason != "retention":
                session.fail(subscription, "snapshot_failed", error.message)
            else:
                session.invalidate(subscription, reason)
        except Exception:
            logger.exception("replay failed")
            session.invalidate(subscription, "gap")

    # -- the log ---------------------------------------------------------------------------------------

    async def _follow(self, subscription: Subscription) -> None:
        """Ends when the subscription is live, paused or released."""
        watched = subscription.watched
        while subscription.state in _READING:
            if not await self._wait_for_room(subscription):
                return
            if watched.state != "live":
                await asyncio.sleep(POLL_S)  # nothing is delivered while it loads
                continue
            partition = _next_partition_behind(subscription)
            if partition is None:
                self._go_live(subscription)
                return
            collection = watched.collection
            assert collection is not None, "a missing collection has no changes"
            await self._read(subscription, collection, partition)

    async def _read(self, subscription: Subscription, collection: Collection, partition: int) -> None:
        gateway, own = self._gateway, subscription.client_positions
        stream = gateway.registry.log.find(collection.stream(partition))
        if stream is None or stream.earliest > own[partition]:
            subscription.session.invalidate(subscription, "retention")
            return
        ahead = (
            gateway.delivered.relevant_after(subscription, partition)
            if subscription.state == "behind"
            else None
        )
        if ahead is not None and ahead.seqs is not None:
            last = min(ahead.last, collection.applied[partition])
            await self._read_relevant(
                subscription, stream, partition, [seq for seq in ahead.seqs if seq <= last], last
            )
            return
        async with self._read_slots:
            page = await gateway.registry.log.reader.read_labelled(
                stream, own[partition], PAGE_BYTES, PAGE_ENTRIES
            )
        assert page.labels is not None
        last = NO_END if ahead is None else ahead.last
        time_slice = TimeSlice()
        for seq, raw, time_ns in zip(page.entries(), page.parts, page.labels.times, strict=True):
            if subscription.state not in _READING or seq > min(last, collection.applied[partition]):
                return  # released, or not yet applied to the collection
            change = decode_change(bytes(raw), partition, seq, time_ns)
            if change is not None and _was_sent(subscription, change.entry.documentKey, seq):
                subscription.watched.counters.dropped["snapshot"] += 1
            elif change is not None:
                complete_from_cache(collection, change)
                _send_change(subscription, stream, change)
            own[partition] = seq
            if subscription.is_unacked_full and subscription.state == "behind":
                subscription.state = "paused"
                return
            if time_slice.is_over:
                await time_slice.yield_to_loop()

    async def _read_relevant(
        self, subscription: Subscription, stream: Stream, partition: int, seqs: list[int], last: int
    ) -> None:
        """Read only the changes that a delivery named as relevant; each is matched again."""
        gateway, own, begun = (
            self._gateway,
            subscription.client_positions,
            subscription.client_positions[partition],
        )
        for seq in seqs:
            async with self._read_slots:
                page = await gateway.registry.log.reader.read_labelled(stream, seq - 1, PAGE_BYTES, 1)
            if subscription.state != "behind" or subscription.watched.state != "live":
                return
            assert page.labels is not None
            change = decode_change(bytes(page.parts[0]), partition, seq, page.labels.times[0])
            if change is None or not _send_change(subscription, stream, change):
                gateway.delivered.distrust(subscription)
                return
            own[partition] = seq
            if subscription.is_unacked_full:
                subscription.state = "paused"
                return
            if not await self._wait_for_room(subscription):
                return
        gateway.delivered.count_skipped(last - begun - len(seqs))
        own[partition] = last

    def _go_live(self, subscription: Subscription) -> None:
        """Must run in the same loop iteration as the check that nothing is missing."""
        was_snapshot = subscription.state == "snapshot"
        if not was_snapshot and subscription.is_unacked_full:
            subscription.state = "paused"
            return
        self._gateway.go_live(subscription)
        if was_snapshot:
            subscription.session.end_snapshot(subscription)

    async def _wait_for_room(self, subscription: Subscription) -> bool:
        """Wait until the connection has room; False if the subscription ended.

        A client that reads nothing for too long must resync. This is measured by the clock, since wake-ups
        are irregular.
        """
        session, loop = subscription.session, self._gateway.context.loop
        progress_at, drained = loop.time(), session.drained_bytes
        while subscription.state in _READING:
            if session.has_room and not self._must_wait(subscription):
                return True
            session.drained.clear()
            await wait_event(session.drained, POLL_S)
            if session.drained_bytes != drained or session.has_room:
                progress_at, drained = loop.time(), session.drained_bytes
            elif loop.time() - progress_at >= self._overflow_s:
                session.invalidate(subscription, "overflow", retry_after_ms=1000)
        return False

    def _must_wait(self, subscription: Subscription) -> bool:
        """Snapshots and low priority wait while the gateway has too many unsent bytes."""
        optional = subscription.state == "snapshot" or subscription.options.priority == "low"
        return optional and self._gateway.shedding

    # -- the view --------------------------------------------------------------------------------------

    async def _snapshot(self, subscription: Subscription) -> None:
        gateway, begun = self._gateway, time.monotonic()
        while subscription.watched.state != "live":
            await asyncio.sleep(POLL_S)
            subscription.client_positions = list(subscription.watched.applied)  # start of the snapshot
        async with self._snapshot_slots:
            pages, count = await self._pages(subscription)
        if subscription.state != "snapshot":
            return
        self.snapshot_documents += count
        subscription.session.snapshot_sizes[subscription.id] = (pages, count)
        await self._follow(subscription)
        gateway.context.telemetry.watch_snapshot_seconds.observe(time.monotonic() - begun)

    async def _pages(self, subscription: Subscription) -> tuple[int, int]:
        """Send the matching rows in pages; returns the number of pages and rows."""
        gateway, session = self._gateway, subscription.session
        collection = subscription.watched.collection
        pages = count = 0
        if collection is not None:
            gateway.registry.check_applied(collection)
            rows: list[bytes] = []
            size = 0
            async for row in self._matching(subscription, collection):
                entry = _snapshot_row(collection, row, subscription.options.include_data)
                if rows and (
                    len(rows) >= gateway.limits.watch_snapshot_documents
                    or size + len(entry) > gateway.limits.watch_snapshot_bytes
                ):
                    if not await self._wait_for_room(subscription):
                        return pages, count
                    session.send_snapshot(subscription, pages, rows)
                    pages, rows, size = pages + 1, [], 0
                rows.append(entry)
                size += len(entry)
                count += 1
                self._track_newer_row(subscription, row)
            if rows:
                if not await self._wait_for_room(subscription):
                    return pages, count
                session.send_snapshot(subscription, pages, rows)
                pages += 1
        if pages == 0 and subscription.state == "snapshot":
            session.send_snapshot(subscription, 0, [])
            pages = 1
        return pages, count

    def _track_newer_row(self, subscription: Subscription, row: DocumentRow) -> None:
        """A row may be newer than the start of the snapshot: its older changes must not follow it."""
        newer = subscription.newer
        assert newer is not None
        if len(subscription.client_positions) <= row.partition:
            return  # created meanwhile: all its changes follow
        if row.seq > subscription.client_positions[row.partition]:
            newer[row.id] = row.seq
            if len(newer) > NEWER_MAX:
                raise TailraceError(
                    "overloaded", f"more than {NEWER_MAX} documents changed while the snapshot was read"
                )

    async def _matching(
        self, subscription: Subscription, collection: Collection
    ) -> AsyncIterator[DocumentRow]:
        """The matching rows in the order of the query; each piece is read from the current view."""
        now, query = self._gateway.registry.view.current, subscription.query
        matches, time_slice = subscription.interest.predicate.matches, TimeSlice()
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
                        await time_slice.yield_to_loop()
                if not rows:
                    return
                after = rows[-1].id
            return
        for document_id in ids:
            for row in now.documents_by_id(collection.number, [document_id]):
                if matches(flatten_row(collection, row)):
                    yield row
            if time_slice.is_over:
                await time_slice.yield_to_loop()

    async def _ordered_ids(self, subscription: Subscription, collection: Collection) -> list[str]:
        now, order = self._gateway.registry.view.current, subscription.query.order
        matches, time_slice = subscription.interest.predicate.matches, TimeSlice()
        keys: list[tuple[Any, ...]] = []
        after = ""
        while subscription.state == "snapshot":
            rows = now.documents_after(collection.number, after, SCAN_ROWS)
            for row in rows:
                flat = flatten_row(collection, row)
                if matches(flat):
                    keys.append(sort_key(sort_values(flat, order), row.id, order))
                if time_slice.is_over:
                    await time_slice.yield_to_loop()
            if len(keys) > ORDERED_MAX:
                raise TailraceError(
                    "overloaded", f"an ordered snapshot must have at most {ORDERED_MAX} documents"
                )
            if not rows:
                break
            after = rows[-1].id
        keys.sort()
        return [key[-1] for key in keys]


def _next_partition_behind(subscription: Subscription) -> int | None:
    """A partition with changes that were not sent to the client."""
    applied = subscription.watched.applied
    if len(subscription.client_positions) != len(applied):
        # The collection was created meanwhile, possibly with another number of partitions.
        subscription.client_positions = [0] * len(applied)
    for partition, seq in enumerate(subscription.client_positions):
        if seq < applied[partition]:
            return partition
    return None


def _send_change(subscription: Subscription, stream: Stream, change: Change) -> bool:
    """Send a change if it matches; False if it does not."""
    event = subscription.interest.classify(change)
    if event is None:
        return False
    op, reason = event
    content = envelopes.encode_delta(change, op, reason, subscription.options.include_data)
    lsn = change.lsn or stream.offset(change.seq)
    subscription.session.send_replayed(subscription, change, lsn, op, content)
    return True


def _was_sent(subscription: Subscription, document_id: str, seq: int) -> bool:
    return subscription.newer is not None and subscription.newer.get(document_id, 0) >= seq


def _snapshot_row(collection: Collection, row: DocumentRow, include_data: bool) -> bytes:
    found: dict[str, Any] = {"path": f"{collection.name}/{row.id}", "id": row.id}
    if include_data:
        found["data"] = orjson.Fragment(row.data)
    found |= {"version": row.version, "updatedAt": row.updated_ms, "partition": row.partition, "seq": row.seq}
    return orjson.dumps(found)
