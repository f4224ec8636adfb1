"""The asynchronous idempotent producer: callers queue, one background task delivers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from tailrace.client import encode
from tailrace.client.batching import ProducerBatch, ProducerBatcher
from tailrace.client.model import AppendResult
from tailrace.client.operations import StreamOperations
from tailrace.client.producing import BatchSequencer, ProducerOptions, check_parts
from tailrace.client.steps import Steps

T = TypeVar("T")


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

    async def append(self, data: encode.Data, *, key: str | None = None) -> Receipt:
        """Queue data, waiting while the producer is full. Await the receipt to wait for the commit."""
        parts = encode.encode_parts(data, await self._type_for(data))
        check_parts(parts, key)
        for part in parts[:-1]:
            await self._queue(part, key)
        ticket = await self._queue(parts[-1], key)
        self._notify()
        return Receipt(ticket)

    async def append_many(self, items: Iterable[encode.Data], *, key: str | None = None) -> None:
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

    async def close_stream(self, data: encode.Data = None, *, key: str | None = None) -> AppendResult:
        """Deliver what is queued, then close the stream for good, and end the producer.

        The close carries this producer's id, epoch and next number: it takes effect once, after everything
        that was queued before it, and a replaced producer cannot do it. `data` is committed with it.
        """
        parts: list[bytes] = []
        if data is not None:
            parts = encode.encode_parts(data, await self._type_for(data))
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

    async def _type_for(self, data: encode.Data) -> str:
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
