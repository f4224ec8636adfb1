"""Publishing durable changes: makes them visible, sends replies, notifies observers and live readers.

Up to `READERS_PER_BATCH` live readers of a stream are notified at once. More are notified in batches, one per
loop iteration, so that appends and other readers are served in between. A reader that has not been notified
when the next entries are published gets all of them together: the busier the server, the fewer writes per
entry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.log.group_commit import CommitBatch
from tailrace.log.model import LiveReader, Stream
from tailrace.log.records import Append, Create, Delete, Op, Recorded
from tailrace.log.streams import Streams
from tailrace.log.transaction import Transaction

TRAFFIC_STREAMS_MAX = 4096  # counted separately; all further streams are counted together


class StreamTraffic:
    __slots__ = ("bytes", "entries")

    def __init__(self) -> None:
        self.entries = 0
        self.bytes = 0


class TrafficCounts:
    """Entries and bytes per stream since the last `drain`. System streams are not counted."""

    def __init__(self, streams_max: int = TRAFFIC_STREAMS_MAX) -> None:
        self._streams_max = streams_max
        self.by_stream: dict[Stream, StreamTraffic] = {}
        self._others = StreamTraffic()

    def add(self, stream: Stream, entries: int, size_bytes: int) -> None:
        counted = self.by_stream.get(stream) or self.start_stream(stream)
        counted.entries += entries
        counted.bytes += size_bytes

    def start_stream(self, stream: Stream) -> StreamTraffic:
        """Starts counting a stream; one that is not counted separately shares a count."""
        if stream.name.startswith("__"):
            return StreamTraffic()
        if len(self.by_stream) >= self._streams_max:
            return self._others
        counted = self.by_stream[stream] = StreamTraffic()
        return counted

    def drain(self) -> tuple[dict[str, StreamTraffic], StreamTraffic]:
        """Returns the counts by stream name and those of all further streams, and resets them."""
        by_stream, others = self.by_stream, self._others
        self.by_stream, self._others = {}, StreamTraffic()
        return {stream.name: counted for stream, counted in by_stream.items()}, others


logger = logging.getLogger("tailrace.log")

READERS_PER_BATCH = 32


class WakeRound:
    """One pass over the readers that a stream had when it started."""

    __slots__ = ("_listed", "_notified", "_readers", "again")

    def __init__(self, readers: list[LiveReader]) -> None:
        self._listed = readers  # the stream's list, which is replaced when a reader leaves
        self._readers = readers.copy()
        self._notified = 0
        self.again = False  # more was published since: another round has to follow

    @property
    def is_done(self) -> bool:
        return self._notified >= len(self._readers)

    def next_readers(self, stream: Stream) -> list[LiveReader]:
        """The next readers that are still registered."""
        found = self._readers[self._notified : self._notified + READERS_PER_BATCH]
        self._notified += READERS_PER_BATCH
        if stream.readers is self._listed:
            return found
        present = set(map(id, stream.readers or ()))
        return [reader for reader in found if id(reader) in present]


class Waker:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._rounds: dict[Stream, WakeRound] = {}

    def wake(self, stream: Stream) -> None:
        """Notifies all live readers, which may unregister or register again in the callback."""
        readers = stream.readers
        if readers is None:
            return
        running = self._rounds.get(stream)
        if running is not None:
            running.again = True
        elif len(readers) <= READERS_PER_BATCH:
            notify_readers(stream, readers.copy())
        else:
            self._rounds[stream] = WakeRound(readers)
            self._continue_round(stream)

    def _continue_round(self, stream: Stream) -> None:
        found = self._rounds[stream]
        notify_readers(stream, found.next_readers(stream))
        if not found.is_done:
            self._loop.call_soon(self._continue_round, stream)
            return
        del self._rounds[stream]
        if found.again:
            # In the next loop iteration: other work comes first.
            self._loop.call_soon(self.wake, stream)


def notify_readers(stream: Stream, readers: list[LiveReader]) -> None:
    for reader in readers:
        try:
            reader.on_published(stream)
        except Exception:
            logger.exception("live reader failed")  # the other readers are notified all the same


class StreamObserver(Protocol):
    """Follows all streams; used by subscriptions."""

    def on_created(self, stream: Stream) -> None: ...
    def on_published(self, stream: Stream) -> None: ...
    def on_removed(self, stream: Stream) -> None: ...


class Publisher:
    """The last of the three steps: decide, commit, publish. Runs on the loop thread, in log order."""

    def __init__(self, streams: Streams, loop: asyncio.AbstractEventLoop) -> None:
        self._streams = streams
        self.waker = Waker(loop)
        self.observers: list[StreamObserver] = []
        # Called for appends to system streams only, so that other appends pay nothing for it.
        self.on_system_append: list[Callable[[Stream], None]] = []
        self.on_change: list[Callable[[Op, Stream], None]] = []  # durable operations other than appends
        self.traffic: TrafficCounts | None = None
        self.entries = 0
        self.bytes = 0

    def publish(self, batch: CommitBatch) -> None:
        """Makes a durable batch visible, sends its replies, then notifies the readers of changed streams."""
        publish_append, traffic = self._streams.publish_append, self.traffic
        to_wake: dict[Stream, None] = {}
        system: dict[Stream, None] = {}
        for item in batch.items:
            assert type(item) is Transaction
            subject, op = item.subject, item.append
            if op is None or subject is None or subject.removed:
                self._publish_steps(item, batch, to_wake, system)
            else:
                publish_append(op, subject)
                size_bytes = len(op.body)
                self.entries += op.count
                self.bytes += size_bytes
                if traffic is not None:
                    # `TrafficCounts.add` inlined: this runs for every append.
                    counted = traffic.by_stream.get(subject) or traffic.start_stream(subject)
                    counted.entries += op.count
                    counted.bytes += size_bytes
                if subject.batch is batch:
                    subject.batch = None
                if subject.readers is not None:
                    to_wake[subject] = None
                if subject.is_system:
                    system[subject] = None
            if subject is not None:
                subject.queued_bytes -= item.size
            try:
                item.reply(item, None)
            except Exception:
                logger.exception("commit reply failed")  # later replies of the batch are sent all the same
        for callback in batch.waiting:
            callback(None)
        if self.observers:
            try:
                self._notify_observers(batch)
            except Exception:
                logger.exception("stream observer failed")  # the batch is published all the same
        for stream in system:
            for callback in self.on_system_append:
                _notify_safely(callback, stream)
        for stream in to_wake:
            self.waker.wake(stream)

    def _publish_steps(
        self, item: Transaction, batch: CommitBatch, to_wake: dict[Stream, None], system: dict[Stream, None]
    ) -> None:
        for op, stream in item.steps():
            self._streams.publish(op, stream)
            if stream is None:
                if isinstance(op, Recorded):
                    self._recorded(op, to_wake)
                continue
            if isinstance(op, Append):
                if stream.is_system:
                    system[stream] = None
                self.entries += op.count
                self.bytes += len(op.body)
                if self.traffic is not None:
                    self.traffic.add(stream, op.count, len(op.body))
            else:
                for callback in self.on_change:
                    callback(op, stream)
            if stream.batch is batch:
                stream.batch = None
            if stream.readers is not None:
                to_wake[stream] = None

    def _recorded(self, op: Recorded, to_wake: dict[Stream, None]) -> None:
        """Wakes readers that follow the state of a stream's manifest."""
        for number, _ in op.heads:
            stream = self._streams.by_number.get(number)
            if stream is not None and stream.readers is not None:
                to_wake[stream] = None

    def _notify_observers(self, batch: CommitBatch) -> None:
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


def _notify_safely(callback: Callable[[Stream], None], stream: Stream) -> None:
    try:
        callback(stream)
    except Exception:
        logger.exception("system stream observer failed", extra=log_fields(stream=stream.name))


def send_reply(transaction: Transaction, error: TailraceError | None) -> None:
    """Calls the reply; an exception in it must not prevent later replies of the batch."""
    try:
        transaction.reply(transaction, error)
    except Exception:
        logger.exception("commit reply failed")
