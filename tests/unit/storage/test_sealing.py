"""What is sealed is written down once, whatever happens between the object store and the journal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.log.records import Sealed, decode_record, encode_record
from tailrace.storage.segments.model import SegmentInfo

TEXT = "text/plain"


@pytest.fixture
def real(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits(journal_file_bytes=16_384, seal_entries=3, block_cache_bytes=0))
    yield harness
    harness.close()


def fill(real: LogHarness, count: int) -> Stream:
    real.create("a", TEXT, (None, None), Append([], None), None)
    for number in range(count):
        real.append("a", Append([b"%d;" % number], TEXT))
    fold(real)
    stream = real.find("a")
    assert stream is not None
    return stream


def fold(real: LogHarness) -> None:
    """Everything so far into the hot store."""
    real.settle()
    real.call(real.log.retire_active_file)
    real.put_meta("turn", b"")
    while real.retired:
        real.checkpoint(tell=True)


def text_of(real: LogHarness, stream: Stream) -> bytes:
    return b"".join(real.read(stream, 0, 2**20, 1000, None).parts)


def segments(real: LogHarness) -> list[str]:
    return sorted(path.name for path in real.directory.parent.rglob("*.parquet"))


def test_the_record_is_read_back_as_it_was_written() -> None:
    info = SegmentInfo("segments/x", 2, 5, 9, 5, 100, 50, "ab" * 32, 7, 8)
    op = Sealed(3, 4, 6, [info], [b"\x00footer"])
    (found,) = decode_record(encode_record([op]))
    assert found == op


def test_a_report_that_was_lost_is_taken_up_from_the_manifest(
    real: LogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = fill(real, 8)
    with monkeypatch.context() as lost:
        lost.setattr(real.log, "record_objects", lambda _: None)
        real.seal(stream)
    uploaded = segments(real)
    assert (stream.sealed, len(uploaded)) == (0, 3)
    real.seal(stream)
    assert stream.sealed == 8
    fold(real)
    assert segments(real) == uploaded
    assert [row.first for row in real.log.store.db.cold.segments(stream.number)] == [1, 4, 7]
    assert list(real.log.store.db.blocks_from(stream.number, 8)) == []
    assert text_of(real, stream) == b"0;1;2;3;4;5;6;7;"


def test_more_than_a_job_takes_is_sealed_in_several(real: LogHarness) -> None:
    stream = fill(real, 30)
    real.seal(stream)
    assert stream.sealed == 24
    real.seal(stream)
    assert stream.sealed == 30
    fold(real)
    assert text_of(real, stream) == b"".join(b"%d;" % number for number in range(30))


@pytest.mark.parametrize("turns", [0, 3])
def test_a_crash_right_after_the_report(real: LogHarness, turns: int) -> None:
    stream = fill(real, 8)
    settle, real.settle = real.settle, lambda: None
    real.seal(stream)
    assert stream.sealed == 8
    real.settle = settle
    real.crash(turns=turns)
    found = real.find("a")
    assert found is not None
    assert found.sealed in (0, 8)
    real.seal(found)
    assert found.sealed == 8
    fold(real)
    assert len(segments(real)) == 3
    assert text_of(real, found) == b"0;1;2;3;4;5;6;7;"


def test_a_failed_commit_takes_it_back(real: LogHarness) -> None:
    stream = fill(real, 8)
    active = real.log.journal.active
    assert active is not None
    # From here on the file can be read only, as on a disk that has had enough.
    for fd in active.fds:
        os.close(fd)
    active.fds = [os.open(active.path, os.O_RDONLY) for _ in active.fds]
    real.seal(stream)
    assert real.log.refusal is not None
    assert (stream.sealed, stream.sealed_bytes) == (0, 0)
    assert text_of(real, stream) == b"0;1;2;3;4;5;6;7;"
    real.log.journal.open_next()
    real.call(real.log.resume)
    real.seal(stream)
    assert (stream.sealed, stream.sealed_bytes) == (8, 16)
    fold(real)
    assert len(segments(real)) == 3
    assert text_of(real, stream) == b"0;1;2;3;4;5;6;7;"
