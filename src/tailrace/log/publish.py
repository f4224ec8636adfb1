"""Publishing durable changes: shown to readers, answered, observers and live readers notified.

What was appended to which stream since somebody last asked.

Telling those who wait at a stream's tail that there is more.

A few are told at once. Many are told in rounds, some per turn of the loop, so that appends and other readers
are served in between. Somebody whose turn has not come when the next entries are published gets all of them
together: the busier the server, the fewer writes an entry costs.

Publishing: what is durable is shown to readers, answered, and made known to whoever follows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from tailrace.common.errors import TailraceError
from tailrace.log.commit import CommitBatch
from tailrace.log.model import LiveReader, Stream
from tailrace.log.records import Append, Create, Delete, Op, Recorded
from tailrace.log.streams import Streams
from tailrace.log.transaction import Transaction

TRAFFIC_STREAMS_MAX = 4096  # counted one by one; all further streams are one


class StreamTraffic:
    """What one stream got."""

    __slots__ = ("bytes", "entries")

    def __init__(self) -> None:
        self.entries = 0
        self.bytes = 0


class TrafficCounts:
    """Counted when entries are published. The server's own streams do not count."""

    def __init__(self, streams_max: int = TRAFFIC_STREAMS_MAX) -> None:
        self._streams_max = streams_max
        self.shares: dict[Stream, StreamTraffic] = {}
        self._others = StreamTraffic()

    def add(self, stream: Stream, entries: int, size_bytes: int) -> None:
        share = self.shares.get(stream) or self.begin(stream)
        share.entries += entries
        share.bytes += size_bytes

    def begin(self, stream: Stream) -> StreamTraffic:
        """The share of a stream that has none yet."""
        if stream.name.startswith("__"):
            return StreamTraffic()
        if len(self.shares) >= self._streams_max:
            return self._others
        share = self.shares[stream] = StreamTraffic()
        return share

    def take(self) -> tuple[dict[str, StreamTraffic], StreamTraffic]:
        """Shares by name, and that of all further streams; the next ones begin at nothing."""
        shares, others = self.shares, self._others
        self.shares, self._others = {}, StreamTraffic()
        return {stream.name: share for stream, share in shares.items()}, others


logger = logging.getLogger("tailrace.log")

READERS_PER_TURN = 32


class WakeRound:
    """One walk over the readers that a stream had when it began."""

    __slots__ = ("_listed", "_readers", "_told", "again")

    def __init__(self, readers: list[LiveReader]) -> None:
        self._listed = readers  # the stream's own list; it gets another when somebody leaves
        self._readers = readers.copy()
        self._told = 0
        self.again = False  # more was published since: those who were told first have to be told again

    @property
    def over(self) -> bool:
        return self._told >= len(self._readers)

    def next_to_tell(self, stream: Stream) -> list[LiveReader]:
        """The next few who are still there."""
        found = self._readers[self._told : self._told + READERS_PER_TURN]
        self._told += READERS_PER_TURN
        if stream.readers is self._listed:
            return found
        present = set(map(id, stream.readers or ()))
        return [reader for reader in found if id(reader) in present]


class Waker:
    """Runs on the loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rounds: dict[Stream, WakeRound] = {}

    def wake(self, stream: Stream) -> None:
        """Tells everybody who waits. They may leave or come back while being told."""
        readers = stream.readers
        if readers is None:
            return
        under_way = self._rounds.get(stream)
        if under_way is not None:
            under_way.again = True
        elif len(readers) <= READERS_PER_TURN:
            notify_readers(stream, readers.copy())
        else:
            self._rounds[stream] = WakeRound(readers)
            self._go_on(stream)

    def _go_on(self, stream: Stream) -> None:
        found = self._rounds[stream]
        notify_readers(stream, found.next_to_tell(stream))
        if not found.over:
            self._loop.call_soon(self._go_on, stream)
            return
        del self._rounds[stream]
        if found.again:
            # Not now: whatever else waits for the loop comes first.
            self._loop.call_soon(self.wake, stream)


def notify_readers(stream: Stream, readers: list[LiveReader]) -> None:
    for reader in readers:
        try:
            reader.on_published(stream)
        except Exception:
            logger.exception("a live reader failed")  # the others are told all the same


class StreamObserver(Protocol):
    """Somebody who follows all streams: subscriptions."""

    def on_created(self, stream: Stream) -> None: ...
    def on_published(self, stream: Stream) -> None: ...
    def on_removed(self, stream: Stream) -> None: ...


class Publisher:
    """The last of the three steps: decide, commit, publish. Runs on the loop thread, in log order."""

    def __init__(self, streams: Streams, loop: asyncio.AbstractEventLoop) -> None:
        self._streams = streams
        self.waker = Waker(loop)
        self.observers: list[StreamObserver] = []
        # Told when one of the server's own streams has news. Following those costs other appends nothing.
        self.on_own_streams: list[Callable[[Stream], None]] = []
        self.on_change: list[Callable[[Op, Stream], None]] = []  # of anything but entries, when it is durable
        self.traffic: TrafficCounts | None = None
        self.entries = 0
        self.bytes = 0

    def publish(self, batch: CommitBatch) -> None:
        """Shows a durable batch, answers, then wakes the readers of every stream it changed."""
        publish_append, traffic = self._streams.publish_append, self.traffic
        woken: dict[Stream, None] = {}
        own: dict[Stream, None] = {}
        for item in batch.items:
            assert type(item) is Transaction
            subject, op = item.subject, item.append
            if op is None or subject is None or subject.removed:
                self._publish_steps(item, batch, woken, own)
            else:
                publish_append(op, subject)
                size_bytes = len(op.body)
                self.entries += op.count
                self.bytes += size_bytes
                if traffic is not None:
                    # `Traffic.add`, written out: this runs for every append.
                    share = traffic.shares.get(subject) or traffic.begin(subject)
                    share.entries += op.count
                    share.bytes += size_bytes
                if subject.batch is batch:
                    subject.batch = None
                if subject.readers is not None:
                    woken[subject] = None
                if subject.own:
                    own[subject] = None
            if subject is not None:
                subject.queued_bytes -= item.size
            try:
                item.reply(item, None)
            except Exception:
                logger.exception("an answer failed")  # those behind it in the batch get theirs
        for settled in batch.waiting:
            settled(None)
        if self.observers:
            try:
                self._tell_observers(batch)
            except Exception:
                logger.exception("an observer failed")  # what is durable is published, whoever follows it
        for stream in own:
            for tell in self.on_own_streams:
                _notify_safely(tell, stream)
        for stream in woken:
            self.waker.wake(stream)

    def _publish_steps(
        self, item: Transaction, batch: CommitBatch, woken: dict[Stream, None], own: dict[Stream, None]
    ) -> None:
        for op, stream in item.steps():
            self._streams.publish(op, stream)
            if stream is None:
                if isinstance(op, Recorded):
                    self._recorded(op, woken)
                continue
            if isinstance(op, Append):
                if stream.own:
                    own[stream] = None
                self.entries += op.count
                self.bytes += len(op.body)
                if self.traffic is not None:
                    self.traffic.add(stream, op.count, len(op.body))
            else:
                for tell in self.on_change:
                    tell(op, stream)
            if stream.batch is batch:
                stream.batch = None
            if stream.readers is not None:
                woken[stream] = None

    def _recorded(self, op: Recorded, woken: dict[Stream, None]) -> None:
        """A new manifest is news to those who watch a stream rather than read it."""
        for number, _ in op.heads:
            stream = self._streams.by_number.get(number)
            if stream is not None and stream.readers is not None:
                woken[stream] = None

    def _tell_observers(self, batch: CommitBatch) -> None:
        changed: dict[Stream, None] = {}
        for item in batch.items:
            assert isinstance(item, Transaction)
            for op, stream in item.steps():
                if stream is None:
                    continue
                if isinstance(op, Create):
                    for observer in self.observers:
                        observer.on_created(stream)
                elif isinstance(op, Delete):
                    for observer in self.observers:
                        observer.on_removed(stream)
                elif isinstance(op, Append):
                    changed[stream] = None
        for stream in changed:
            for observer in self.observers:
                observer.on_published(stream)


def _notify_safely(tell: Callable[[Stream], None], stream: Stream) -> None:
    try:
        tell(stream)
    except Exception:
        logger.exception("a follower of %s failed", stream.name)  # it is durable and published all the same


def send_reply(transaction: Transaction, error: TailraceError | None) -> None:
    """One requester's trouble must not swallow the answers of those behind it in the batch."""
    try:
        transaction.reply(transaction, error)
    except Exception:
        logger.exception("an answer failed")
