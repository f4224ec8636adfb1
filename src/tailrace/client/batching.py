"""Collecting small appends into batches, within a bounded number of bytes. No I/O, no clock, no locks.

A batch is due when it is full, when it has lingered long enough, or when somebody flushes. While one batch
is on its way the next one grows, so the busier the producer, the larger the batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from tailrace.client.arguments import check_integer, check_seconds

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
        self.settled = 0

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
