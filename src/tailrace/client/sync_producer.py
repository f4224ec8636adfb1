"""The synchronous idempotent producer: callers queue, one background thread delivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self, TypeVar

from tailrace.client import encode
from tailrace.client.batching import ProducerBatch, ProducerBatcher
from tailrace.client.model import AppendResult
from tailrace.client.operations import StreamOperations
from tailrace.client.producing import BatchSequencer, ProducerOptions, check_parts
from tailrace.client.steps import Steps

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

    def append(self, data: encode.Data, *, key: str | None = None) -> Future[AppendResult]:
        """Queue data; on a JSON stream a list is several messages. Waits while the producer is full.

        The future is done when the batch with the last of it is committed. Nobody has to wait for it:
        `flush` and `close` raise what went wrong.
        """
        parts = encode.encode_parts(data, self._type_for(data))
        check_parts(parts, key)
        with self._changed:
            for part in parts[:-1]:
                self._queue(part, key)
            ticket = self._queue(parts[-1], key)
            self._changed.notify_all()
        return ticket

    def append_many(self, items: Iterable[encode.Data], *, key: str | None = None) -> None:
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

    def close_stream(self, data: encode.Data = None, *, key: str | None = None) -> AppendResult:
        """Deliver what is queued, then close the stream for good, and end the producer.

        The close carries this producer's id, epoch and next number: it takes effect once, after everything
        that was queued before it, and a replaced producer cannot do it. `data` is committed with it.
        """
        parts: list[bytes] = []
        if data is not None:
            parts = encode.encode_parts(data, self._type_for(data))
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

    def _type_for(self, data: encode.Data) -> str:
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
