"""Documents of streams: decided, durable, shown, and there again after all that can happen to a log."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.decide import AppendRequest
from tailrace.log.journal_check import inspect_journal
from tailrace.log.model import Stream
from tailrace.log.records import Append as AppendOp
from tailrace.log.records import Describe, decode_record, encode_record
from tailrace.log.transaction import ignore_reply

JSON = "application/json"
KEYS = [b"a", None, b"b", b"a"]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits(journal_file_bytes=1))
    harness.create("s", JSON, (None, None), Append([], None), None)
    harness.settle()
    yield harness
    harness.close()


def found(log: LogHarness, name: str = "s") -> Stream:
    stream = log.find(name)
    assert stream is not None
    return stream


def describe(log: LogHarness, key: str, value: bytes | None) -> None:
    log.call(log.log.describe, found(log), key, value)
    log.settle()


def checkpoint_all(log: LogHarness) -> None:
    log.call(log.log.rotate_journal)
    log.settle()
    while log.retired:
        log.checkpoint(tell=True)


def test_operations_come_back_from_their_bytes() -> None:
    op = AppendOp(7, 3, 4, b"1,2,3,4", [1, 1, 1, 1], 5, keys=KEYS)
    again, described, removed = decode_record(
        encode_record([op, Describe(7, "schema", b"{}"), Describe(7, "touch", None)])
    )
    assert isinstance(again, AppendOp)
    assert (again.keys, again.key, again.body, again.first) == (KEYS, None, b"1,2,3,4", 3)
    assert (described, removed) == (Describe(7, "schema", b"{}"), Describe(7, "touch", None))


def test_a_document_is_shown_when_it_is_durable(log: LogHarness) -> None:
    stream = found(log)
    assert stream.documents is None
    told: list[dict[str, bytes] | None] = []

    def decide() -> None:
        log.log.describe(stream, "schema", b"1")
        log.log.settled(stream, lambda *_: told.append(stream.visible_documents))
        assert stream.documents == {"schema": b"1"}
        assert stream.visible_documents is None
        assert told == []

    log.call(decide)
    log.settle()
    assert told == [{"schema": b"1"}]
    held = stream.visible_documents
    describe(log, "profile", b"2")
    describe(log, "schema", None)
    assert stream.visible_documents == stream.documents == {"profile": b"2"}
    assert held == {"schema": b"1"}, "whoever looks keeps what he saw"
    describe(log, "profile", None)
    assert stream.documents is stream.visible_documents is None


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("crash", [False, True])
def test_documents_outlive_restarts_and_eviction(log: LogHarness, folded: bool, crash: bool) -> None:
    describe(log, "schema", b"old")
    describe(log, "profile", b"p")
    if folded:
        checkpoint_all(log)
        assert "s" not in log.log.streams.by_name, "put away"
        assert found(log).visible_documents == {"schema": b"old", "profile": b"p"}
    describe(log, "schema", b"new")
    describe(log, "profile", None)
    log.append("s", Append([b"1"], JSON))
    log.settle()
    if crash:
        log.crash(turns=0)
    else:
        log.reopen()
    assert found(log).documents == found(log).visible_documents == {"schema": b"new"}
    checkpoint_all(log)
    log.reopen()
    assert found(log).visible_documents == {"schema": b"new"}
    log.delete("s")
    log.settle()
    checkpoint_all(log)
    assert log.writer.db.documents.documents_of(2) == {}
    log.create("s", JSON, (None, None), Append([], None), None)
    log.settle()
    assert found(log).documents is None


def test_a_commit_that_failed_takes_its_document_back(
    log: LogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(log, "schema", b"old")
    stream = found(log)

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    refusals: list[TailraceError | None] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        log.call(log.log.describe, stream, "schema", b"new", lambda _, error: refusals.append(error))
        log.settle()
    assert [None if error is None else error.code for error in refusals] == ["unavailable"]
    assert stream.documents == stream.visible_documents == {"schema": b"old"}


@pytest.mark.parametrize("folded", [False, True])
def test_entries_of_one_append_may_have_keys_of_their_own(log: LogHarness, folded: bool) -> None:
    describe(log, "schema", b"{}")
    stream = found(log)
    asked: list[bytes] = []

    def check(_: AppendRequest, subject: Stream) -> Sequence[bytes | None]:
        asked.append((subject.documents or {})["schema"])
        return KEYS

    request = AppendRequest(b"1,2,3,4", JSON, [1, 1, 1, 1])
    request.check = check
    log.call(log.log.append, stream, request, ignore_reply, None)
    log.settle()
    assert asked == [b"{}"]
    if folded:
        checkpoint_all(log)
        log.reopen()
        stream = found(log)

    def keyed(key: bytes) -> list[tuple[int, bytes]]:
        page = log.read(stream, 0, 100, 100, key, apart=True)
        return list(zip(page.entries(), map(bytes, page.parts), strict=True))

    assert keyed(b"a") == [(1, b"1"), (4, b"4")]
    assert keyed(b"b") == [(3, b"3")]
    assert keyed(b"c") == []
    page = log.read(stream, 0, 100, 1, b"a", apart=True)
    assert (page.count, bytes(page.parts[0])) == (1, b"1")
    page = log.read(stream, page.next_entry, 100, 1, b"a", apart=True)
    assert (page.count, bytes(page.parts[0])) == (1, b"4")


def test_a_refused_entry_changes_nothing_and_a_retry_is_not_looked_at(log: LogHarness) -> None:
    describe(log, "schema", b"{}")
    stream = found(log)

    def refuse(_: AppendRequest, __: Stream) -> Sequence[bytes | None]:
        raise TailraceError("invalid_request", "no")

    def send(check: bool) -> str:
        request = AppendRequest(b"1", JSON, producer=("p", 0, 0))
        request.check = refuse if check else None
        try:
            log.call(log.log.append, stream, request, ignore_reply, None)
        except TailraceError as refusal:
            return refusal.code
        log.settle()
        return ""

    assert send(check=True) == "invalid_request"
    assert (stream.tail, stream.producers) == (0, None)
    assert send(check=False) == ""
    assert send(check=True) == "", "a duplicate succeeds, whatever the schema says by now"
    assert stream.tail == 1


def test_what_inspect_shows(log: LogHarness) -> None:
    describe(log, "schema", b"{}")
    ops = [op for row in inspect_journal(log.directory) for op in row.get("ops", [])]  # type: ignore[attr-defined]
    assert {"kind": "describe", "stream": 2, "key": "schema", "value": "2 bytes"} in ops


def test_documents_in_memory_are_counted(log: LogHarness) -> None:
    streams = log.log.streams
    assert streams.document_bytes == 0
    describe(log, "schema", b"12345")
    describe(log, "profile", b"123")
    assert streams.document_bytes == 8
    describe(log, "schema", b"1")
    assert streams.document_bytes == 4
    checkpoint_all(log)
    log.call(streams.forget, found(log))
    assert streams.document_bytes == 0
    found(log)
    assert streams.document_bytes == 4
    log.reopen()
    found(log)
    assert log.log.streams.document_bytes == 4
    log.call(log.log.remove, found(log), "deleted", ignore_reply, None)
    log.settle()
    assert log.log.streams.document_bytes == 0
