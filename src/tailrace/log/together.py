"""Entries for several streams of the server itself, as one change: all of them are durable, or none is."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.log.decide import CreateRequest, decide_create
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.records import Append, Meta
from tailrace.log.transaction import Reply, Transaction

JSON = "application/json"


def append_together(
    log: Log,
    parts: Sequence[tuple[str, Sequence[bytes]]],
    now_ns: int,
    reply: Reply,
    context: object,
    facts: Sequence[tuple[str, bytes | None]] = (),
    removed: Sequence[Stream] = (),
) -> None:
    """Appends to JSON streams, by name; those that are missing are made in the same record.

    Facts of the server are set, and streams removed, in the same record. An entry's time is `now_ns`, or that
    of the entry before it if the clock was set back.
    """
    found = [log.find(name) for name, _ in parts]  # one that has expired goes before, in a record of its own
    transaction = log.begin(sum(len(entry) for _, entries in parts for entry in entries), reply, context)
    for (name, entries), stream in zip(parts, found, strict=True):
        assert entries
        stream = stream or _create(log, transaction, name, now_ns)
        lengths = None if len(entries) == 1 else [len(entry) for entry in entries]
        time_ns = max(stream.last_ns, now_ns)
        op = Append(stream.number, stream.tail + 1, len(entries), b",".join(entries), lengths, time_ns)
        transaction.add(log.streams, op)
    for key, value in facts:
        transaction.add(log.streams, Meta(key, value))
    for stream in removed:
        log.add_removal(transaction, stream, "deleted", now_ns)
    log.commit(transaction)


def _create(log: Log, transaction: Transaction, name: str, now_ns: int) -> Stream:
    streams = log.streams
    create = decide_create(
        CreateRequest(name, JSON),
        streams.next_number,
        streams.tombstone(name),
        None,
        now_ns,
        streams.first_epoch,
    )
    created = transaction.add(streams, create)
    assert created is not None
    return created
