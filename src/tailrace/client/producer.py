"""The idempotent producer: batching, sequencing, and its sync and async front ends.

Every batch takes effect exactly once, however often it is sent. One batch is in flight at a time, with the
next sequence number; retries have the same number, so that the server recognises them. The epoch
distinguishes incarnations of one producer id.

A batch is due when it is full, when it has lingered long enough, or on a flush. While one batch is in flight
the next one grows, so a busier producer sends larger batches. Callers queue; one background thread or task
delivers.
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
from typing import Any, Generic, Self, TypedDict, TypeVar

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
from tailrace.client.transport import (
    AsyncTransport,
    Backoff,
    ExchangeResult,
    Steps,
    SyncTransport,
    exchange,
    with_stream_name,
)
from tailrace.common.tasks import wait_event

Ticket = TypeVar("Ticket")


class BatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a batch is full, how long it may wait for more, and how much may wait altogether."""

    batch_bytes_max: int = 1024 * 1024
    batch_count_max: int = 10_000
    linger_s: float = 0.005
    inflight_bytes_max: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        for name in ("batch_bytes_max", "batch_count_max", "inflight_bytes_max"):
            check_integer(name, getattr(self, name), least=1)
        check_seconds("linger_s", self.linger_s, may_be_zero=True)


class ProducerBatch(Generic[Ticket]):
    """Parts that are sent in one request. They share one ticket, which the response completes."""

    __slots__ = ("key", "number", "opened_s", "parts", "size_bytes", "ticket")

    def __init__(self, number: int, key: str | None, opened_s: float, ticket: Ticket) -> None:
        self.number = number
        self.key = key
        self.opened_s = opened_s
        self.ticket = ticket
        self.parts: list[bytes] = []
        self.size_bytes = 0


class ProducerBatcher(Generic[Ticket]):
    """The queue of a producer. `bytes_held` counts what waits and what is in flight."""

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
        # The number of the last finished batch. One batch is in flight at a time, so they finish in order.
        self.settled: int = 0

    @property
    def last_number(self) -> int:
        """The number of the newest batch, 0 if there never was one."""
        return self._next_number - 1

    def has_room(self, size_bytes: int) -> bool:
        """Whether a part may be queued now. One larger than the whole limit is queued alone."""
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
        """Make everything queued so far due; returns the number of its last batch."""
        self._flush_through = self.last_number
        return self._flush_through

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until the oldest batch is due, 0 if it is, None if there is none."""
        if not self._queue:
            return None
        batch = self._queue[0]
        # A batch that has a successor cannot grow.
        if len(self._queue) > 1 or batch.number <= self._flush_through or self._is_full(batch):
            return 0.0
        return max(0.0, batch.opened_s + self._limits.linger_s - now_s)

    def pop_due(self, now_s: float) -> ProducerBatch[Ticket] | None:
        """Remove and return the oldest batch if it is due."""
        return self._queue.popleft() if self.due_in_s(now_s) == 0.0 else None

    def settle(self, batch: ProducerBatch[Ticket]) -> None:
        """The batch is finished: release its bytes."""
        assert batch.number == self.settled + 1, "batches settle in order"
        self.bytes_held -= batch.size_bytes
        self.settled = batch.number
        assert self.bytes_held >= 0

    def drop_all(self) -> list[Ticket]:
        """Empty the queue after a fatal failure; returns the tickets of the dropped batches."""
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
    """Identity and limits of a producer. `delivery_s_max` bounds the retries of one batch."""

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
    """Epoch and sequence number of one producer on one stream; delivers batches with them."""

    __slots__ = ("_auto_claim", "_claimed", "_delivery_s_max", "_operations", "epoch", "producer_id", "seq")

    def __init__(self, operations: StreamOperations, options: ProducerOptions) -> None:
        self._operations = operations
        self.producer_id = options.producer_id or f"py-{secrets.token_hex(12)}"
        wire.header_value("Producer-Id", self.producer_id)
        self.epoch = options.epoch
        self.seq = 0
        self._delivery_s_max = options.delivery_s_max
        self._auto_claim = options.auto_claim
        # A random id has no history, and without auto_claim the caller must know the epoch: no probe needed.
        self._claimed = options.producer_id is None or not options.auto_claim

    @with_stream_name
    def content_type_for(self, data: model.Data) -> Steps[str]:
        content_type = yield from self._operations.type_for(data)
        self._operations.content_type = content_type
        return content_type

    @property
    def name(self) -> str:
        """The name of the stream."""
        return self._operations.name

    @with_stream_name
    def deliver(self, parts: list[bytes], key: str | None, *, close: bool = False) -> Steps[AppendResult]:
        """Commit one batch exactly once; with `close` it closes the stream, and may be empty."""
        content_type = self._operations.content_type
        if content_type is None:
            assert not parts, "the type is known before the first part is queued"
            content_type = yield from self.content_type_for(b"")
        if not self._claimed:
            yield from self._claim(content_type)
        body = model.join_parts(parts, content_type) if parts else b""
        while True:
            outcome = yield from self._send(body, content_type if parts else None, key, self.seq, close=close)
            response = outcome.response
            if (
                response.status == 403
                and self._may_claim(outcome)
                and (epoch := _epoch(response)) is not None
            ):
                self.epoch = epoch + 1
                continue
            result = wire.parse_append(response) if response.status in (200, 204) else None
            # For a close without content 204 is the normal success, and the stream is closed then.
            is_closed = not parts and result is not None and result.closed
            if response.status == 204 and not is_closed and (not parts or self._is_foreign(outcome)):
                # Another writer used this number: nothing of ours was stored.
                if self._may_claim(outcome):
                    self.epoch += 1
                    continue
                raise self._conflict(outcome)
            if result is None:
                raise error_from(
                    response.status, response.headers, response.body, unknown=outcome.maybe_applied
                )
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
        """Find an unused epoch before any data is sent.

        An append with an unreachable sequence number is always refused, and the error returns the state of
        this producer id. Sending the first batch directly would be wrong: for a producer with a history in
        the same epoch, (epoch, 0) is a duplicate, and the batch would be dropped with a success.
        """
        probe = b"0" if is_json(content_type) else b"\0"
        response = (yield from self._send(probe, content_type, None, SEQ_MAX)).response
        error = error_from(response.status, response.headers, response.body)
        if response.status == 403 and (epoch := _epoch(response)) is not None:
            self.epoch = epoch + 1
        elif (
            response.status == 409 and (expected := response.headers.get("producer-expected-seq")) is not None
        ):
            # 0: unknown to this stream. More: there is a history in this epoch.
            self.epoch += 1 if expected != "0" else 0
        elif not (response.status == 400 and error.code in ("invalid_header", "http_400")):
            # 400 means that the epoch is newer than the known one and must start at 0, as it will.
            raise error
        self._claimed = True

    def _may_claim(self, outcome: ExchangeResult) -> bool:
        # Only before anything was written in this epoch, and only if nothing of ours can be stored already.
        # Later, a newer epoch means that this producer was replaced, and it must not take over again.
        return self._auto_claim and self.seq == 0 and not outcome.maybe_applied

    def _is_foreign(self, outcome: ExchangeResult) -> bool:
        """Whether a duplicate cannot be a retry of this producer."""
        highest = outcome.response.headers.get("producer-seq")
        return not outcome.maybe_applied or (highest is not None and highest != str(self.seq))

    def _conflict(self, outcome: ExchangeResult) -> ClientError:
        return ClientError(
            OUTCOME_UNKNOWN if outcome.maybe_applied else PRODUCER_CONFLICT,
            f"another writer uses producer id {self.producer_id!r} in epoch {self.epoch}",
            status=outcome.response.status,
            headers=outcome.response.headers,
            outcome_unknown=outcome.maybe_applied,
        )


def _epoch(response: wire.HttpResponse) -> int | None:
    return wire.parse_number(response.headers.get("producer-epoch"))


class ProducerState(Generic[Ticket]):
    """What both producers share: the queue, the sequencer, and how the producer ended. Never waits."""

    def __init__(
        self, operations: StreamOperations, options: ProducerOptions, new_ticket: Callable[[], Ticket]
    ) -> None:
        self._sequencer = BatchSequencer(operations, options)
        self._batcher = ProducerBatcher(options, new_ticket)
        self._content_type: str | None = None
        self._failure: BaseException | None = None
        self._closing = False

    @property
    def producer_id(self) -> str:
        return self._sequencer.producer_id

    @property
    def epoch(self) -> int:
        """The current epoch; final once the first batch is committed."""
        return self._sequencer.epoch

    def _encode(self, data: model.Data, key: str | None) -> list[bytes]:
        """The parts to queue. Rejects what would otherwise fail the producer when its batch is sent."""
        assert self._content_type is not None, "the type is known before the first part is encoded"
        parts = model.encode_parts(data, self._content_type)
        if not parts:
            raise ValueError("data must not be an empty list")
        if key is not None:
            wire.header_value("Stream-Key", key)
        return parts

    def _has_room(self, part: bytes) -> bool:
        self._check_usable()
        return self._batcher.has_room(len(part))

    def _is_settled(self, number: int) -> bool:
        """Whether the batch with this number is finished, or the producer has failed."""
        return self._failure is not None or self._batcher.settled >= number

    def _record_failure(self, batch: ProducerBatch[Ticket], error: BaseException) -> list[Ticket]:
        """End the producer with an error; returns the tickets of all batches that fail with it."""
        self._failure = error
        self._batcher.settle(batch)
        return [batch.ticket, *self._batcher.drop_all()]

    def _check_usable(self) -> None:
        self._raise_failure()
        if self._closing:
            raise RuntimeError("the producer is closed")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class Producer(ProducerState[Future[AppendResult]]):
    """Appends in batches, each exactly once, in order. Can be shared between threads.

    The first permanent failure ends the producer: what was queued after it is not sent, and every later call
    raises it.
    """

    def __init__(
        self, transport: SyncTransport, operations: StreamOperations, options: ProducerOptions
    ) -> None:
        super().__init__(operations, options, _new_future)
        self._transport = transport
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def append(self, data: model.Data, *, key: str | None = None) -> Future[AppendResult]:
        """Queue data; on a JSON stream a list is several messages. Blocks while the producer is full.

        The future is done when the last batch of the data is committed. Waiting for it is optional: `flush`
        and `close` raise any failure.
        """
        if self._content_type is None:
            self._content_type = self._transport.run(self._sequencer.content_type_for(data))
        parts = self._encode(data, key)
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
        """Wait until everything queued so far is committed."""
        with self._changed:
            last = self._batcher.flush()
            self._changed.notify_all()
            while not self._is_settled(last):
                self._changed.wait()
            self._raise_failure()

    def close(self) -> None:
        """Flush and end the producer. The stream stays open."""
        try:
            self.flush()
        finally:
            self._end()

    def close_stream(self, data: model.Data = None, *, key: str | None = None) -> AppendResult:
        """Deliver what is queued, then close the stream permanently, and end the producer.

        The close has this producer's id, epoch and next number: it takes effect once, after everything queued
        before it, and a replaced producer cannot do it. `data` is committed with it.
        """
        if data is not None and self._content_type is None:
            self._content_type = self._transport.run(self._sequencer.content_type_for(data))
        parts = [] if data is None else self._encode(data, key)
        with self._changed:
            self._check_usable()
        self._end()
        self._raise_failure()
        return self._transport.run(self._sequencer.deliver(parts, key, close=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # Queued data is still sent; the caller's own error is the one to raise.
            self._end()

    def _queue(self, part: bytes, key: str | None) -> Future[AppendResult]:
        while not self._has_room(part):
            self._changed.notify_all()
            self._changed.wait()
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver_all, name="tailrace-producer", daemon=True)
            self._thread.start()
        return self._batcher.add(part, key, time.monotonic())

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
                result = self._transport.run(self._sequencer.deliver(batch.parts, batch.key))
            except BaseException as error:  # noqa: BLE001 - passed to all waiting callers
                with self._changed:
                    tickets = self._record_failure(batch, error)
                    self._changed.notify_all()
                for ticket in tickets:
                    ticket.set_exception(error)
                return
            with self._changed:
                self._batcher.settle(batch)
                self._changed.notify_all()
            batch.ticket.set_result(result)

    def _next_batch(self) -> ProducerBatch[Future[AppendResult]] | None:
        with self._changed:
            while (batch := self._batcher.pop_due(time.monotonic())) is None:
                due_in_s = self._batcher.due_in_s(time.monotonic())
                if due_in_s is None and self._closing:
                    return None
                self._changed.wait(due_in_s)
            return batch


def _new_future() -> Future[AppendResult]:
    future: Future[AppendResult] = Future()
    # Shared by all appends of a batch, so it must not be cancelled: a running future cannot be.
    future.set_running_or_notify_cancel()
    return future


class Receipt:
    """Await it to wait for the commit. Cancelling one does not affect others of the same batch."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[AppendResult]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def __await__(self) -> Generator[Any, None, AppendResult]:
        return asyncio.shield(self._future).__await__()


class AsyncProducer(ProducerState[asyncio.Future[AppendResult]]):
    """As `Producer`, on an event loop. Belongs to the loop of its first use."""

    def __init__(
        self, transport: AsyncTransport, operations: StreamOperations, options: ProducerOptions
    ) -> None:
        super().__init__(operations, options, _new_async_future)
        self._transport = transport
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def append(self, data: model.Data, *, key: str | None = None) -> Receipt:
        """Queue data, waiting while the producer is full. Await the receipt to wait for the commit."""
        if self._content_type is None:
            self._content_type = await self._transport.run(self._sequencer.content_type_for(data))
        parts = self._encode(data, key)
        for part in parts[:-1]:
            await self._queue(part, key)
        ticket = await self._queue(parts[-1], key)
        self._notify()
        return Receipt(ticket)

    async def append_many(self, items: Iterable[model.Data], *, key: str | None = None) -> None:
        for item in items:
            await self.append(item, key=key)

    async def flush(self) -> None:
        """Wait until everything queued so far is committed."""
        last = self._batcher.flush()
        self._notify()
        while not self._is_settled(last):
            await self._changed.wait()
        self._raise_failure()

    async def close(self) -> None:
        """Flush and end the producer. The stream stays open."""
        try:
            await self.flush()
        finally:
            await self._end()

    async def close_stream(self, data: model.Data = None, *, key: str | None = None) -> AppendResult:
        """Deliver what is queued, then close the stream permanently, and end the producer.

        The close has this producer's id, epoch and next number: it takes effect once, after everything queued
        before it, and a replaced producer cannot do it. `data` is committed with it.
        """
        if data is not None and self._content_type is None:
            self._content_type = await self._transport.run(self._sequencer.content_type_for(data))
        parts = [] if data is None else self._encode(data, key)
        self._check_usable()
        await self._end()
        self._raise_failure()
        return await self._transport.run(self._sequencer.deliver(parts, key, close=True))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        else:
            # Queued data is still sent; the caller's own error is the one to raise.
            await self._end()

    async def _queue(self, part: bytes, key: str | None) -> asyncio.Future[AppendResult]:
        while not self._has_room(part):
            self._notify()
            await self._changed.wait()
        if self._task is None:
            self._task = asyncio.create_task(self._deliver_all(), name="tailrace-producer")
        return self._batcher.add(part, key, time.monotonic())

    def _notify(self) -> None:
        """Wake all waiters; each checks its own condition."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _end(self) -> None:
        self._closing = True
        self._batcher.flush()
        self._notify()
        if self._task is not None:
            await self._task

    async def _deliver_all(self) -> None:
        while (batch := await self._next_batch()) is not None:
            try:
                result = await self._transport.run(self._sequencer.deliver(batch.parts, batch.key))
            except asyncio.CancelledError:
                self._fail(batch, RuntimeError("the producer was cancelled"))
                raise
            except Exception as error:  # noqa: BLE001 - passed to all waiting callers
                self._fail(batch, error)
                return
            self._batcher.settle(batch)
            batch.ticket.set_result(result)
            self._notify()

    async def _next_batch(self) -> ProducerBatch[asyncio.Future[AppendResult]] | None:
        while (batch := self._batcher.pop_due(time.monotonic())) is None:
            due_in_s = self._batcher.due_in_s(time.monotonic())
            if due_in_s is None and self._closing:
                return None
            await wait_event(self._changed, due_in_s)
        return batch

    def _fail(self, batch: ProducerBatch[asyncio.Future[AppendResult]], error: Exception) -> None:
        for ticket in self._record_failure(batch, error):
            ticket.set_exception(error)
            # Retrieved here, so that asyncio does not warn about futures that are not awaited.
            ticket.exception()
        self._notify()


def _new_async_future() -> asyncio.Future[AppendResult]:
    return asyncio.get_running_loop().create_future()
