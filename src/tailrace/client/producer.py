"""The idempotent producer: batching, sequencing, sync and async front ends.

Collecting small appends into batches, within a bounded number of bytes. No I/O, no clock, no locks.

A batch is due when it is full, when it has lingered long enough, or when somebody flushes. While one batch
is on its way the next one grows, so the busier the producer, the larger the batches.

The idempotent producer: every batch takes effect exactly once, however often it has to be sent.

One batch is on its way at a time, with the next sequence number; its retries carry the same number, so the
server can tell them from new batches. The epoch tells incarnations of one producer id apart.

The synchronous idempotent producer: callers queue, one background thread delivers.

The asynchronous idempotent producer: callers queue, one background task delivers.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypedDict, TypeVar

import msgspec

from tailrace.client import model, wire
from tailrace.client.errors import (
    INTEGER_MAX,
    OUTCOME_UNKNOWN,
    PRODUCER_CONFLICT,
    ClientError,
    check_integer,
    check_seconds,
    check_text,
    error_from,
)
from tailrace.client.follow import ATTEMPTS_UNLIMITED
from tailrace.client.model import AppendResult, is_json
from tailrace.client.operations import StreamOperations
from tailrace.client.transport import Backoff, ExchangeResult, Steps, exchange, with_stream_name

Ticket = TypeVar("Ticket")


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a batch is full, how long it may wait for company, how much may wait altogether."""

    batch_bytes_max: int = 1024 * 1024
    batch_count_max: int = 10_000
    linger_s: float = 0.005
    inflight_bytes_max: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("batch_bytes_max", "batch_count_max", "inflight_bytes_max"):
            check_integer(name, getattr(self, name), least=1)
        check_seconds("linger_s", self.linger_s, may_be_zero=True)


class ProducerBatch(Generic[Ticket]):
    """Parts that go out in one request. All of them share one ticket, which the answer redeems."""

    __slots__ = ("key", "number", "opened_s", "parts", "size_bytes", "ticket")

    def __init__(self, number: int, key: str | None, opened_s: float, ticket: Ticket) -> None:
        self.number = number
        self.key = key
        self.opened_s = opened_s
        self.ticket = ticket
        self.parts: list[bytes] = []
        self.size_bytes = 0


class ProducerBatcher(Generic[Ticket]):
    """The queue of a producer. `bytes_held` counts what waits and what is on its way."""

    __slots__ = (
        "_flush_through",
        "_limits",
        "_new_ticket",
        "_next_number",
        "_queue",
        "bytes_held",
        "settled",
    )

    def __init__(self, limits: BatchLimits, new_ticket: Callable[[], Ticket]) -> None:
        self._limits = limits
        self._new_ticket = new_ticket
        self._queue: deque[ProducerBatch[Ticket]] = deque()
        self._next_number = 1
        self._flush_through = 0
        self.bytes_held = 0
        # The number of the last batch that was answered. One batch is on its way at a time, so they settle
        # in order.
        self.settled: int = 0

    @property
    def last_number(self) -> int:
        """The number of the newest batch, 0 if there never was one."""
        return self._next_number - 1

    def has_room(self, size_bytes: int) -> bool:
        """Whether a part may enter now. One that is larger than the whole bound enters alone."""
        return self.bytes_held == 0 or self.bytes_held + size_bytes < self._limits.inflight_bytes_max

    def add(self, part: bytes, key: str | None, now_s: float) -> Ticket:
        batch = self._queue[-1] if self._queue else None
        if batch is None or batch.key != key or not self._fits(batch, len(part)):
            batch = ProducerBatch(self._next_number, key, now_s, self._new_ticket())
            self._next_number += 1
            self._queue.append(batch)
        batch.parts.append(part)
        batch.size_bytes += len(part) + 1
        self.bytes_held += len(part) + 1
        return batch.ticket

    def flush(self) -> int:
        """Make everything due that is queued by now; the number of the last batch of it."""
        self._flush_through = self.last_number
        return self._flush_through

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until the oldest batch is due, 0 if it is, None if there is none."""
        if not self._queue:
            return None
        batch = self._queue[0]
        # A batch that has a successor cannot grow any more.
        if len(self._queue) > 1 or batch.number <= self._flush_through or self._is_full(batch):
            return 0.0
        return max(0.0, batch.opened_s + self._limits.linger_s - now_s)

    def take(self, now_s: float) -> ProducerBatch[Ticket] | None:
        """Remove and return the oldest batch if it is due."""
        return self._queue.popleft() if self.due_in_s(now_s) == 0.0 else None

    def settle(self, batch: ProducerBatch[Ticket]) -> None:
        """The batch was answered: its bytes make room for others."""
        assert batch.number == self.settled + 1, "batches settle in order"
        self.bytes_held -= batch.size_bytes
        self.settled = batch.number
        assert self.bytes_held >= 0

    def drop_all(self) -> list[Ticket]:
        """Empty the queue after a failure that ends the producer; the tickets that will not be redeemed."""
        tickets = [batch.ticket for batch in self._queue]
        for batch in tuple(self._queue):
            self.settle(batch)
        self._queue.clear()
        return tickets

    def _fits(self, batch: ProducerBatch[Ticket], size_bytes: int) -> bool:
        limits = self._limits
        return (
            len(batch.parts) < limits.batch_count_max
            and batch.size_bytes + size_bytes < limits.batch_bytes_max
        )

    def _is_full(self, batch: ProducerBatch[Ticket]) -> bool:
        return not self._fits(batch, 0)


SEQ_MAX = INTEGER_MAX
PRODUCER_ID_BYTES_MAX = 256


class ProducerOptions(BatchLimits, frozen=True, kw_only=True):
    """Who a producer is and how patient. `delivery_s_max` bounds the retries of one batch."""

    producer_id: str | None = None
    epoch: int = 0
    auto_claim: bool = True
    delivery_s_max: float = 120.0

    def __post_init__(self) -> None:
        BatchLimits.__post_init__(self)
        check_integer("epoch", self.epoch)
        check_seconds("delivery_s_max", self.delivery_s_max)
        if self.producer_id is not None:
            check_text("producer_id", self.producer_id, PRODUCER_ID_BYTES_MAX)


class ProducerTuning(TypedDict, total=False):
    """The optional arguments of `producer`; `ProducerOptions` has their defaults."""

    auto_claim: bool
    delivery_s_max: float
    batch_bytes_max: int
    batch_count_max: int
    linger_s: float
    inflight_bytes_max: int


class BatchSequencer:
    """Epoch and sequence number of one producer on one stream, and how a batch is delivered with them."""

    __slots__ = ("_auto_claim", "_claimed", "_delivery_s_max", "_operations", "epoch", "producer_id", "seq")

    def __init__(self, operations: StreamOperations, options: ProducerOptions) -> None:
        self._operations = operations
        self.producer_id = options.producer_id or f"py-{secrets.token_hex(12)}"
        wire.header_value("Producer-Id", self.producer_id)
        self.epoch = options.epoch
        self.seq = 0
        self._delivery_s_max = options.delivery_s_max
        self._auto_claim = options.auto_claim
        # A made-up id has no history, and who refuses to claim has to know the epoch: no need to ask.
        self._claimed = options.producer_id is None or not options.auto_claim

    @with_stream_name
    def content_type_for(self, data: model.Data) -> Steps[str]:
        content_type = yield from self._operations.type_for(data)
        self._operations.content_type = content_type
        return content_type

    @property
    def name(self) -> str:
        """Of the stream."""
        return self._operations.name

    @with_stream_name
    def deliver(self, parts: list[bytes], key: str | None, *, close: bool = False) -> Steps[AppendResult]:
        """Commit one batch, exactly once; with `close` it is the last one of the stream, and may be empty."""
        content_type = self._operations.content_type
        if content_type is None:
            assert not parts, "the type is known before the first part is queued"
            content_type = yield from self.content_type_for(b"")
        if not self._claimed:
            yield from self._claim(content_type)
        body = model.join_parts(parts, content_type) if parts else b""
        while True:
            outcome = yield from self._send(body, content_type if parts else None, key, self.seq, close=close)
            answer = outcome.answer
            if answer.status == 403 and self._may_claim(outcome) and (epoch := _epoch(answer)) is not None:
                self.epoch = epoch + 1
                continue
            result = wire.parse_append(answer) if answer.status in (200, 204) else None
            # To a close without content 204 is the plain success, and the stream is closed then.
            is_closed = not parts and result is not None and result.closed
            if answer.status == 204 and not is_closed and (not parts or self._is_foreign(outcome)):
                # Somebody else wrote under this number: nothing of ours has been stored.
                if self._may_claim(outcome):
                    self.epoch += 1
                    continue
                raise self._conflict(outcome)
            if result is None:
                raise error_from(answer.status, answer.headers, answer.body, unknown=outcome.doubtful)
            self.seq += 1
            return AppendResult(next_offset=result.next_offset, closed=True) if is_closed else result

    def _send(
        self, body: bytes, content_type: str | None, key: str | None, seq: int, *, close: bool = False
    ) -> Steps[ExchangeResult]:
        producing = wire.ProducerFields(self.producer_id, self.epoch, seq)
        request = wire.append(
            self.name, body, content_type=content_type, key=key, producing=producing, close=close
        )
        backoff = Backoff(
            self._operations.retries, attempts_max=ATTEMPTS_UNLIMITED, elapsed_s_max=self._delivery_s_max
        )
        return (yield from exchange(request, backoff))

    def _claim(self, content_type: str) -> Steps[None]:
        """Find an epoch that nobody has used, before any data is sent.

        An append with a sequence number out of reach is always refused, and the refusal tells the state of
        this producer id. Sending the first batch on the off chance would not do: to a producer with a
        history in the same epoch, (epoch, 0) is a duplicate, and the batch would be dropped with a success.
        """
        probe = b"0" if is_json(content_type) else b"\0"
        answer = (yield from self._send(probe, content_type, None, SEQ_MAX)).answer
        error = error_from(answer.status, answer.headers, answer.body)
        if answer.status == 403 and (epoch := _epoch(answer)) is not None:
            self.epoch = epoch + 1
        elif answer.status == 409 and (expected := answer.headers.get("producer-expected-seq")) is not None:
            # 0: unknown to this stream. More: there is a history in this very epoch.
            self.epoch += 1 if expected != "0" else 0
        elif not (answer.status == 400 and error.code in ("invalid_header", "http_400")):
            # 400 says that the epoch is newer than the known one, and has to begin at 0: as it will.
            raise error
        self._claimed = True

    def _may_claim(self, outcome: ExchangeResult) -> bool:
        # Only before anything was written in this epoch, and only if nothing of ours can be stored already.
        # Later, a newer epoch means that this producer has been replaced, and it must not fight back.
        return self._auto_claim and self.seq == 0 and not outcome.doubtful

    def _is_foreign(self, outcome: ExchangeResult) -> bool:
        """Whether a duplicate cannot be a retry of ours."""
        highest = outcome.answer.headers.get("producer-seq")
        return not outcome.doubtful or (highest is not None and highest != str(self.seq))

    def _conflict(self, outcome: ExchangeResult) -> ClientError:
        return ClientError(
            OUTCOME_UNKNOWN if outcome.doubtful else PRODUCER_CONFLICT,
            f"another writer uses producer id {self.producer_id!r} in epoch {self.epoch}",
            status=outcome.answer.status,
            headers=outcome.answer.headers,
            outcome_unknown=outcome.doubtful,
        )


def _epoch(answer: wire.HttpResponse) -> int | None:
    return wire.parse_number(answer.headers.get("producer-epoch"))


def check_parts(parts: list[bytes], key: str | None) -> None:
    """What would end the producer when its batch is sent is refused when it is queued."""
    if not parts:
        raise ValueError("an empty list appends nothing")
    if key is not None:
        wire.header_value("Stream-Key", key)


T = TypeVar("T")


class StepRunner(Protocol):
    def run(self, steps: Steps[T]) -> T: ...


class Producer:
    """Appends in batches, each exactly once. Safe to share between threads; every item keeps its order.

    The first failure that cannot be repaired ends the producer: what was queued after it is not sent, and
    every later call raises it.
    """

    def __init__(self, port: StepRunner, operations: StreamOperations, options: ProducerOptions) -> None:
        self._port = port
        self._sequencer = BatchSequencer(operations, options)
        self._batcher: ProducerBatcher[Future[AppendResult]] = ProducerBatcher(options, _new_future)
        self._changed = threading.Condition()
        self._content_type: str | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def producer_id(self) -> str:
        return self._sequencer.producer_id

    @property
    def epoch(self) -> int:
        """The epoch in use; settled once the first batch is committed."""
        return self._sequencer.epoch

    def append(self, data: model.Data, *, key: str | None = None) -> Future[AppendResult]:
        """Queue data; on a JSON stream a list is several messages. Waits while the producer is full.

        The future is done when the batch with the last of it is committed. Nobody has to wait for it:
        `flush` and `close` raise what went wrong.
        """
        parts = model.encode_parts(data, self._type_for(data))
        check_parts(parts, key)
        with self._changed:
            for part in parts[:-1]:
                self._queue(part, key)
            ticket = self._queue(parts[-1], key)
            self._changed.notify_all()
        return ticket

    def append_many(self, items: Iterable[model.Data], *, key: str | None = None) -> None:
        for item in items:
            self.append(item, key=key)

    def flush(self) -> None:
        """Wait until everything queued by now is committed."""
        with self._changed:
            last = self._batcher.flush()
            self._changed.notify_all()
            while self._failure is None and self._batcher.settled < last:
                self._changed.wait()
            self._raise_failure()

    def close(self) -> None:
        """Flush and end the producer. The stream stays open."""
        try:
            self.flush()
        finally:
            self._end()

    def close_stream(self, data: model.Data = None, *, key: str | None = None) -> AppendResult:
        """Deliver what is queued, then close the stream for good, and end the producer.

        The close carries this producer's id, epoch and next number: it takes effect once, after everything
        that was queued before it, and a replaced producer cannot do it. `data` is committed with it.
        """
        parts: list[bytes] = []
        if data is not None:
            parts = model.encode_parts(data, self._type_for(data))
            check_parts(parts, key)
        with self._changed:
            self._check_usable()
        self._end()
        self._raise_failure()
        return self._port.run(self._sequencer.deliver(parts, key, close=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # What was queued still goes out; the caller's own error is the one to see.
            self._end()

    def _type_for(self, data: model.Data) -> str:
        if self._content_type is None:
            self._content_type = self._port.run(self._sequencer.content_type_for(data))
        return self._content_type

    def _queue(self, part: bytes, key: str | None) -> Future[AppendResult]:
        self._check_usable()
        while not self._batcher.has_room(len(part)):
            self._changed.notify_all()
            self._changed.wait()
            self._check_usable()
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver_all, name="tailrace-producer", daemon=True)
            self._thread.start()
        return self._batcher.add(part, key, time.monotonic())

    def _check_usable(self) -> None:
        self._raise_failure()
        if self._closing:
            raise RuntimeError("the producer is closed")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            self._batcher.flush()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _deliver_all(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                result = self._port.run(self._sequencer.deliver(batch.parts, batch.key))
            except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
                self._fail(batch, error)
                return
            with self._changed:
                self._batcher.settle(batch)
                self._changed.notify_all()
            batch.ticket.set_result(result)

    def _next_batch(self) -> ProducerBatch[Future[AppendResult]] | None:
        with self._changed:
            while (batch := self._batcher.take(time.monotonic())) is None:
                due_in_s = self._batcher.due_in_s(time.monotonic())
                if due_in_s is None and self._closing:
                    return None
                self._changed.wait(due_in_s)
            return batch

    def _fail(self, batch: ProducerBatch[Future[AppendResult]], error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._batcher.settle(batch)
            tickets = [batch.ticket, *self._batcher.drop_all()]
            self._changed.notify_all()
        for ticket in tickets:
            ticket.set_exception(error)


def _new_future() -> Future[AppendResult]:
    future: Future[AppendResult] = Future()
    # Shared by all appends of a batch, so none of them may cancel it: a running future cannot be.
    future.set_running_or_notify_cancel()
    return future


class AsyncStepRunner(Protocol):
    async def run(self, steps: Steps[T]) -> T: ...


class Receipt:
    """Await it to wait for the commit. Giving up on one does not disturb the others of the same batch."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[AppendResult]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def __await__(self) -> Generator[Any, None, AppendResult]:
        return asyncio.shield(self._future).__await__()


class AsyncProducer:
    """As `Producer`, on an event loop. Belongs to the loop in which it is first used."""

    def __init__(self, port: AsyncStepRunner, operations: StreamOperations, options: ProducerOptions) -> None:
        self._port = port
        self._sequencer = BatchSequencer(operations, options)
        self._batcher: ProducerBatcher[asyncio.Future[AppendResult]] = ProducerBatcher(
            options, _new_async_future
        )
        self._changed = asyncio.Event()
        self._content_type: str | None = None
        self._failure: Exception | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def producer_id(self) -> str:
        return self._sequencer.producer_id

    @property
    def epoch(self) -> int:
        """The epoch in use; settled once the first batch is committed."""
        return self._sequencer.epoch

    async def append(self, data: model.Data, *, key: str | None = None) -> Receipt:
        """Queue data, waiting while the producer is full. Await the receipt to wait for the commit."""
        parts = model.encode_parts(data, await self._type_for(data))
        check_parts(parts, key)
        for part in parts[:-1]:
            await self._queue(part, key)
        ticket = await self._queue(parts[-1], key)
        self._notify()
        return Receipt(ticket)

    async def append_many(self, items: Iterable[model.Data], *, key: str | None = None) -> None:
        for item in items:
            await self.append(item, key=key)

    async def flush(self) -> None:
        """Wait until everything queued by now is committed."""
        last = self._batcher.flush()
        self._notify()
        while self._failure is None and self._batcher.settled < last:
            await self._changed.wait()
        self._raise_failure()

    async def close(self) -> None:
        """Flush and end the producer. The stream stays open."""
        try:
            await self.flush()
        finally:
            await self._end()

    async def close_stream(self, data: model.Data = None, *, key: str | None = None) -> AppendResult:
        """Deliver what is queued, then close the stream for good, and end the producer.

        The close carries this producer's id, epoch and next number: it takes effect once, after everything
        that was queued before it, and a replaced producer cannot do it. `data` is committed with it.
        """
        parts: list[bytes] = []
        if data is not None:
            parts = model.encode_parts(data, await self._type_for(data))
            check_parts(parts, key)
        self._check_usable()
        await self._end()
        self._raise_failure()
        return await self._port.run(self._sequencer.deliver(parts, key, close=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        else:
            # What was queued still goes out; the caller's own error is the one to see.
            await self._end()

    async def _type_for(self, data: model.Data) -> str:
        if self._content_type is None:
            self._content_type = await self._port.run(self._sequencer.content_type_for(data))
        return self._content_type

    async def _queue(self, part: bytes, key: str | None) -> asyncio.Future[AppendResult]:
        self._check_usable()
        while not self._batcher.has_room(len(part)):
            self._notify()
            await self._changed.wait()
            self._check_usable()
        if self._task is None:
            self._task = asyncio.create_task(self._deliver_all(), name="tailrace-producer")
        return self._batcher.add(part, key, time.monotonic())

    def _notify(self) -> None:
        """Wake everybody who waits; each looks for itself whether it was meant."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _check_usable(self) -> None:
        self._raise_failure()
        if self._closing:
            raise RuntimeError("the producer is closed")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _end(self) -> None:
        self._closing = True
        self._batcher.flush()
        self._notify()
        if self._task is not None:
            await self._task

    async def _deliver_all(self) -> None:
        while (batch := await self._next_batch()) is not None:
            try:
                result = await self._port.run(self._sequencer.deliver(batch.parts, batch.key))
            except asyncio.CancelledError:
                self._fail(batch, RuntimeError("the producer was cancelled"))
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
                self._fail(batch, error)
                return
            self._batcher.settle(batch)
            batch.ticket.set_result(result)
            self._notify()

    async def _next_batch(self) -> ProducerBatch[asyncio.Future[AppendResult]] | None:
        while (batch := self._batcher.take(time.monotonic())) is None:
            due_in_s = self._batcher.due_in_s(time.monotonic())
            if due_in_s is None and self._closing:
                return None
            try:
                async with asyncio.timeout(due_in_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return batch

    def _fail(self, batch: ProducerBatch[asyncio.Future[AppendResult]], error: Exception) -> None:
        self._failure = error
        self._batcher.settle(batch)
        for ticket in [batch.ticket, *self._batcher.drop_all()]:
            ticket.set_exception(error)
            # Looked at here, so that asyncio does not complain of those that nobody awaits.
            ticket.exception()
        self._notify()


def _new_async_future() -> asyncio.Future[AppendResult]:
    return asyncio.get_running_loop().create_future()
