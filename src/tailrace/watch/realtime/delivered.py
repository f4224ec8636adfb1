"""Deliveries as the gateway uses them: what jobs beside it have examined shortens the way of those behind.

A subscription that reads the log asks here first. Where somebody has examined its partition for it, it reads
only the changes that concern it; everywhere else it reads all of them. Each of these changes is still judged
by the gateway itself, so a delivery decides what is looked at, and never what somebody is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.api.context import Context
from tailrace.common.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.watch.deliveries import (
    DeliveryBatch,
    ExaminedRange,
    ExaminedRanges,
    RelevantRange,
    decode_delivery,
)

if TYPE_CHECKING:
    from tailrace.watch.realtime.gateway import Gateway
    from tailrace.watch.realtime.subscription import Subscription

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
