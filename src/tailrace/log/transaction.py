"""Transactions: operations that share one journal record, with one reply; and awaiting a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.log.records import Append, Op
from tailrace.log.streams import Streams


class Transaction(msgspec.Struct, eq=False):
    """Operations that share one journal record, and the callback for their outcome.

    `reply(transaction, error)` is called exactly once. `context` belongs to the caller; `subject` is the
    stream of the request; `duplicate` is set if the request changed nothing.
    """

    subject: Stream | None
    reply: Reply
    context: object
    append: Append | None = None  # the only operation, on the subject; otherwise operations are in `ops`
    ops: tuple[Op, ...] = ()
    streams: tuple[Stream | None, ...] = ()
    duplicate: bool = False
    size: int = 0
    producer: tuple[int, int] | None = None  # of a duplicate: the last accepted epoch and sequence number

    def steps(self) -> Iterable[tuple[Op, Stream | None]]:
        """Every operation with the stream it changed."""
        if self.append is not None:
            return ((self.append, self.subject),)
        return zip(self.ops, self.streams, strict=True)

    def add(self, streams: Streams, op: Op) -> Stream | None:
        """Applies the operation to the assigned state; the next decision sees it."""
        stream = streams.assign(op)
        self.ops = (*self.ops, op)
        self.streams = (*self.streams, stream)
        return stream

    def add_entries(self, streams: Streams, stream: Stream, entries: Sequence[bytes], now_ns: int) -> None:
        """Appends to a JSON stream; if the clock was set back, with the time of the previous entry."""
        assert entries
        lengths = None if len(entries) == 1 else [len(entry) for entry in entries]
        time_ns = max(stream.last_ns, now_ns)
        op = Append(stream.number, stream.tail + 1, len(entries), b",".join(entries), lengths, time_ns)
        self.add(streams, op)


Reply = Callable[[Transaction, TailraceError | None], None]


def ignore_reply(transaction: Transaction, error: TailraceError | None) -> None:
    """The reply of changes that need none. Losing one is harmless: it is decided again when needed."""


async def await_commit(change: Callable[[Reply], object]) -> None:
    """Returns when the change is durable; raises if it was refused or failed.

    `change` calls a method of the log with the given reply, e.g. `partial(log.put_meta, key, value)`.
    """
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def reply(_: Transaction, error: TailraceError | None) -> None:
        if settled.done():
            return  # the waiting task was cancelled
        if error is None:
            settled.set_result(None)
        else:
            settled.set_exception(error)

    change(reply)
    await settled
