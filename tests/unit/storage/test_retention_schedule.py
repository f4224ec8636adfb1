"""The hot store's book of retention: who forked whom, and when a stream has to be looked at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from support.manifests import CREATED_NS, segment
from tailrace.common.limits import Limits
from tailrace.log.decide import CreateRequest
from tailrace.log.model import Lifetime, Stream
from tailrace.log.records import Sealed, Trim
from tailrace.log.transaction import ignore_reply
from tailrace.storage.hot_store.tables import ForkRow
from tailrace.storage.retention_rules import SECOND_NS, reached_by_forks
from tailrace.storage.retention_service import SCAN_COUNT, scan_due_streams

TEXT = "text/plain"
START = (-(2**63), 0)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits())
    yield harness
    harness.close()


def put(log: LogHarness, name: str, lifetime: Lifetime, source: str | None = None, at: int = 0) -> Stream:
    position = None if source is None else (0, at)
    request = CreateRequest(name, TEXT, lifetime, source=source, fork_position=position)
    log.call(log.log.create, request, ignore_reply, None)
    log.settle()
    return found_again(log, name)


def found_again(log: LogHarness, name: str) -> Stream:
    """Checkpoints put idle streams away."""
    stream = log.find(name)
    assert stream is not None
    return stream


def fold(log: LogHarness) -> None:
    log.call(log.log.rotate_journal)
    log.settle()
    while log.retired:
        log.checkpoint(tell=True)


def append(log: LogHarness, stream: Stream, count: int) -> None:
    for _ in range(count):
        assert log.append(stream.name, Append([b"x" * 12], TEXT)).code is None
    log.settle()


def seal(log: LogHarness, stream: Stream, *ranges: tuple[int, int]) -> None:
    """As if a sealer had reported these segments; entries of 12 bytes, one nanosecond apart."""
    segments = [segment(first, last) for first, last in ranges]
    op = Sealed(stream.number, 1, 0, segments, [b""] * len(segments))
    log.call(log.log.record_objects, op)
    log.settle()


def test_streams_are_due_when_their_oldest_segment_is(log: LogHarness) -> None:
    aged = put(log, "aged", Lifetime(retention_s=60))
    sized = put(log, "sized", Lifetime(retention_bytes=24))
    unbound = put(log, "unbound", Lifetime(ttl_s=60))
    for stream in (aged, sized, unbound):
        append(log, stream, 6)
    fold(log)
    # Nothing is sealed, so nothing can go; what is over a bound has to be.
    (now, first), (over_ns, second) = log.log.store.db.trims.due_after(*START, 10)
    assert (now, first, second) == (0, sized.number, aged.number)
    found = scan_due_streams(log.log.store, START, [], over_ns - 1)
    assert (found.candidates, found.unsealed, found.next_ns) == ([], [sized.number], over_ns)
    found = scan_due_streams(log.log.store, found.seen, [], over_ns)
    assert (found.candidates, found.unsealed, found.next_ns) == ([], [aged.number], None)
    for stream in (aged, sized, unbound):
        seal(log, stream, (1, 2), (3, 4), (5, 6))
    fold(log)
    over_ns = CREATED_NS + 2 + 60 * SECOND_NS
    assert log.log.store.db.trims.due_after(*START, 10) == [(0, sized.number), (over_ns, aged.number)]
    found = scan_due_streams(log.log.store, START, [], over_ns - 1)
    assert [(wanted.number, wanted.trim.earliest) for wanted in found.candidates] == [(sized.number, 4)]
    assert (found.seen, found.next_ns) == ((0, sized.number), over_ns)
    found = scan_due_streams(log.log.store, found.seen, [], over_ns)
    assert [(wanted.number, wanted.trim.earliest) for wanted in found.candidates] == [(aged.number, 2)]
    for trim in (Trim(aged.number, 2, 24), Trim(sized.number, 4, 48)):
        log.call(log.log.record_objects, trim)
    log.settle()
    fold(log)
    aged, sized = found_again(log, "aged"), found_again(log, "sized")
    assert (aged.earliest, sized.earliest, sized.size_bytes) == (2, 4, 24)
    assert log.log.store.db.trims.due_after(*START, 10) == [(over_ns + 2, aged.number)]
    assert [row.first for row in log.log.store.db.cold.segments(sized.number)] == [5]
    assert [number for number, _ in log.log.store.db.trims.pending(0, 10)] == [aged.number, sized.number]


def test_one_look_does_a_bounded_number_of_streams(log: LogHarness) -> None:
    for number in range(SCAN_COUNT + 1):
        stream = put(log, f"s{number}", Lifetime(retention_bytes=0))
        append(log, stream, 1)
        seal(log, stream, (1, 1))
    fold(log)
    first = scan_due_streams(log.log.store, START, [], 5)
    assert (len(first.candidates), first.next_ns) == (SCAN_COUNT, 5)
    second = scan_due_streams(log.log.store, first.seen, [], 5)
    assert (len(second.candidates), second.next_ns) == (1, None)


def test_a_store_of_an_older_version_gets_its_book_of_forks(log: LogHarness) -> None:
    source = put(log, "source", Lifetime(retention_bytes=0))
    append(log, source, 6)
    fork = put(log, "fork", Lifetime(retention_bytes=10**6), "source", 4)
    seal(log, source, (1, 2), (3, 4), (5, 6))
    fold(log)
    for table in ("forks", "due", "trims"):
        log.writer.db.execute(f"DROP TABLE {table}")
    log.reopen()
    stored = log.log.store.db
    assert stored.trims.forks_of(source.number) == []
    found = found_again(log, "source")
    assert reached_by_forks(stored, found) == [(0, 2**62)]  # not knowing better, everything stays
    append(log, found, 1)
    fold(log)
    assert stored.trims.forks_of(source.number) == [ForkRow(fork.number, 4, 0, gone=False, forks=0)]
    assert stored.trims.due_after(*START, 10) == [(0, source.number)]
    found = found_again(log, "source")
    assert reached_by_forks(stored, found) == [(0, 4)]


def test_a_fork_without_sealed_entries_is_looked_at_again(log: LogHarness) -> None:
    """What it inherits may be sealed by its source later, and nothing of the fork changes by that."""
    source = put(log, "source", Lifetime())
    append(log, source, 4)
    fork = put(log, "fork", Lifetime(retention_bytes=0), "source", 4)
    fold(log)
    assert log.log.store.db.trims.due_after(*START, 10) == [(0, fork.number)]
    assert scan_due_streams(log.log.store, START, [], 5).candidates == []
    seal(log, source, (1, 2), (3, 4))
    fold(log)
    (wanted,) = scan_due_streams(log.log.store, START, [], 5).candidates
    # Nothing of it is the fork's own, so it gets no smaller by it.
    assert (wanted.number, wanted.trim.earliest, wanted.trim.payload_bytes) == (fork.number, 4, 0)
