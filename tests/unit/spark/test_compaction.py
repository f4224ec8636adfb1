"""Joined segments: every entry as it was, and nothing that does not belong together."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.segments import STREAM_ID, Entry, read_all, run_of, write
from tailrace.spark.index.segment_build import worker_stores
from tailrace.spark.jobs import compaction
from tailrace.spark.jobs.compaction import (
    CompactionKernel,
    CompactionTask,
    compact_segments,
    compaction_publish_request,
    compute_checksum,
)
from tailrace.spark.jobs.messages import CompactionWork, PlannedSegment, PlanRef, StreamPlan
from tailrace.storage.segments import reader
from tailrace.storage.segments.model import CorruptSegmentError, stream_prefix
from tailrace.storage.segments.reader import check_segment, file_footer
from tailrace.storage.segments.writer import write_segment

entries = st.lists(
    st.builds(
        Entry,
        st.sampled_from([b"{}", b'"x"', b"[1,2]", b'{"a":"\xf0\x9f\x98\x80"}']),
        st.integers(-(2**62), 2**62),
        st.sampled_from([None, b"", b"k", b"\0"]),
    ),
    min_size=1,
    max_size=8,
)


def _segments(directory: Path, parts: list[list[Entry]], json: bool, epoch: int = 0) -> list[bytes]:
    first, raws = 5, list[bytes]()
    for number, part in enumerate(parts):
        path = directory / f"{number}.parquet"
        write(path, [run_of(first, part, json)], json, epoch)
        raws.append(path.read_bytes())
        first += len(part)
    return raws


@settings(max_examples=30)
@given(st.lists(entries, min_size=1, max_size=5), st.booleans())
def test_every_entry_is_kept(parts: list[list[Entry]], json: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        raws = _segments(directory, parts, json)
        path = directory / "joined.parquet"
        info = compact_segments(raws, path)
        joined = path.read_bytes()
        assert check_segment(joined, info) == []
        whole = [entry for part in parts for entry in part]
        assert (info.first, info.last, info.rows) == (5, 4 + len(whole), len(whole))
        tail = reader.find_tail(joined, len(joined))
        assert isinstance(tail, bytes)
        assert read_all(reader.pack_tail(tail), joined) == whole
        # Once more gives the same bytes, and so the same name.
        assert compact_segments(raws, directory / "again.parquet") == info
        total = sum(compute_checksum(raw).total for raw in raws) % (1 << 128)
        assert compute_checksum(joined) == (total, len(whole))


PART = [Entry(b"{}", 1), Entry(b"[]", 2, b"k")]


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    one, two, three = _segments(tmp_path, [PART, PART, PART], True)
    with pytest.raises(CorruptSegmentError, match="entry 7 is missing"):
        compact_segments([one, three], tmp_path / "gap")
    (tmp_path / "other").mkdir()
    _, other_epoch = _segments(tmp_path / "other", [PART, PART], True, epoch=1)
    with pytest.raises(CorruptSegmentError, match="cannot be merged"):
        compact_segments([one, other_epoch], tmp_path / "epochs")
    damaged = bytearray(two)
    damaged[40] ^= 1
    with pytest.raises(CorruptSegmentError):
        compact_segments([one, bytes(damaged)], tmp_path / "damaged")


def test_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "RAW_BYTES_MAX", 10)
    with pytest.raises(CorruptSegmentError, match="too large"):
        compact_segments(_segments(tmp_path, [PART], True), tmp_path / "joined")


def test_what_was_written_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raws = _segments(tmp_path, [PART, PART], True)
    monkeypatch.setattr(compaction, "compute_checksum", lambda raw: compute_checksum(raw)._replace(total=0))
    with pytest.raises(CorruptSegmentError, match="does not have the entries"):
        compact_segments(raws, tmp_path / "joined")


def test_the_job_puts_one_segment(tmp_path: Path) -> None:
    raws = _segments(tmp_path, [PART, PART], True)
    url = (tmp_path / "store").as_uri()
    keys = [f"{stream_prefix(STREAM_ID)}segments/{number}" for number in range(2)]
    for key, raw in zip(keys, raws, strict=True):
        worker_stores().put(url, key, raw)
    segments = [
        PlannedSegment(key, 5 + 2 * number, 6 + 2 * number, 2, 4, hashlib.sha256(raw).hexdigest())
        for number, (key, raw) in enumerate(zip(keys, raws, strict=True))
    ]
    order = CompactionTask(url, STREAM_ID, tuple((one.object, one.sha256) for one in segments))
    (batch,) = CompactionKernel(order)(iter([None]))
    stream = StreamPlan("s", STREAM_ID, 0, PlanRef(1, "sha256:0", None, ()))
    body = compaction_publish_request(stream, CompactionWork(5, 8, tuple(segments)), batch.to_pylist()[0])
    (added,) = body.add
    assert (added.family, added.first, added.last, added.rows) == ("segment", 5, 8, 4)
    assert body.replace == keys
    assert hashlib.sha256(worker_stores().get(url, added.object)).hexdigest() == added.sha256
    # No two attempts make the same object: one that is left behind is never listed.
    (again,) = CompactionKernel(order)(iter([None]))
    assert again.to_pylist()[0]["object"] != added.object


def test_a_bad_input_is_told_apart(tmp_path: Path) -> None:
    raws = _segments(tmp_path, [PART, PART, PART], True)
    url = (tmp_path / "store").as_uri()
    keys = [f"{stream_prefix(STREAM_ID)}segments/{number}" for number in range(3)]
    for key, raw in zip(keys, raws, strict=True):
        worker_stores().put(url, key, raw)
    inputs = [(key, hashlib.sha256(raw).hexdigest()) for key, raw in zip(keys, raws, strict=True)]
    wrong = [inputs[0], (keys[1], "0" * 64), inputs[2]]
    for chosen, culprit in ((wrong, keys[1]), ([inputs[0], inputs[2]], keys[0])):
        (batch,) = CompactionKernel(CompactionTask(url, STREAM_ID, tuple(chosen)))(iter([None]))
        row = batch.to_pylist()[0]
        segments = tuple(PlannedSegment(key, 1, 2, 2, 4, sha256) for key, sha256 in chosen)
        stream = StreamPlan("s", STREAM_ID, 0, PlanRef(1, "sha256:0", None, ()))
        body = compaction_publish_request(stream, CompactionWork(5, 10, segments), row)
        assert (body.add, body.replace) == ([], [])
        assert [(one.object, one.code) for one in body.quarantine] == [(culprit, "undecodable")]


def test_one_schema_version(tmp_path: Path) -> None:
    def made(first: int, versions: str) -> bytes:
        path = tmp_path / "part"
        write_segment(
            [run_of(first, PART, True)],
            path,
            name="s",
            stream_id=STREAM_ID,
            epoch=0,
            json=True,
            schema_versions=versions,
        )
        return path.read_bytes()

    path = tmp_path / "joined"
    compact_segments([made(1, "[[1,2]]"), made(3, "[[3,2]]")], path)
    assert file_footer(path.read_bytes()).facts["schema_versions"] == "[[1,2]]"
    compact_segments([made(1, ""), made(3, "[[3,0]]")], path)
    assert file_footer(path.read_bytes()).facts["schema_versions"] == "[[1,0]]"
    for versions in ("[[3,1]]", "", "[[3,2],[4,3]]", "{"):
        with pytest.raises(CorruptSegmentError):
            compact_segments([made(1, "[[1,2]]"), made(3, versions)], path)
