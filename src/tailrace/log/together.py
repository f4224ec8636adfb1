"""Entries for several streams of the server itself, as one change: all of them are durable, or none is."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.own_streams import create_system_stream
from tailrace.log.records import Meta
from tailrace.log.transaction import Reply


def append_to_streams(
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
        stream = stream or create_system_stream(log.streams, transaction, name, now_ns)
        transaction.add_entries(log.streams, stream, entries, now_ns)
    for key, value in facts:
        transaction.add(log.streams, Meta(key, value))
    for stream in removed:
        log.add_removal(transaction, stream, "deleted", now_ns)
    log.commit(transaction)
