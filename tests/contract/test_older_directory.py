"""A data directory that is older than its bucket: what it acknowledged is never taken for what lies there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support.log_harness import LogHarness
from support.log_model import Append, Lifetime
from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.log.records import Trim
from tailrace.storage.bucket_ownership import BucketOwner, RolledBackError
from tailrace.storage.manifests.model import FencedError
from tailrace.storage.segments.model import SegmentInfo

TEXT, JSON = "text/plain", "application/json"
KEPT: Lifetime = (None, None)
_INFO = msgspec.msgpack.Decoder(SegmentInfo)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits(journal_file_bytes=16_384, seal_entries=3, block_cache_bytes=0))
    yield harness
    harness.close()


def create(real: LogHarness, name: str = "a", kind: str = TEXT) -> None:
    real.create(name, kind, KEPT, Append([], None), None)


def append(real: LogHarness, *entries: bytes, name: str = "a", key: bytes | None = None) -> None:
    for entry in entries:
        kind = stream_of(real, name).content_type or TEXT
        assert real.append(name, Append([entry], kind, key=key)).code is None
    fold(real)


def fold(real: LogHarness) -> None:
    """Everything so far into the hot store."""
    real.settle()
    real.call(real.log.retire_active_file)
    real.put_meta("turn", b"")
    while real.retired:
        real.checkpoint(tell=True)


def stream_of(real: LogHarness, name: str = "a") -> Stream:
    stream = real.find(name)
    assert stream is not None
    return stream


def seal(real: LogHarness, name: str = "a") -> None:
    """All of it, in as many jobs as it takes."""
    while (stream := stream_of(real, name)).sealed < stream.stored:
        real.seal(stream)
        fold(real)


def text_of(real: LogHarness, name: str = "a") -> bytes:
    """All that readers see; the commas of JSON left out."""
    stream = stream_of(real, name)
    parts = real.read(stream, stream.earliest, 2**20, 1000, None).parts
    return b"".join(map(bytes, parts)).replace(b",", b"")


def refused(real: LogHarness, name: str = "a") -> str:
    """Why the sealer takes nothing; the stream is as it was before."""
    before, sealed = text_of(real, name), stream_of(real, name).sealed
    report = real.ask_to_seal(stream_of(real, name))
    assert (report.trouble, report.segments) == ("conflict", []), report
    fold(real)
    assert text_of(real, name) == before
    assert stream_of(real, name).sealed == sealed
    return report.error


def objects_of(real: LogHarness) -> dict[str, bytes]:
    bucket = real.directory.parent / "objects"
    found = (path for path in bucket.rglob("*") if path.is_file() and ".tailrace" not in path.parts)
    return {path.name: path.read_bytes() for path in found}


def began(real: LogHarness, kind: str = TEXT) -> Path:
    """Three entries are sealed and a fourth is not: so it is backed up."""
    create(real, kind=kind)
    append(real, b"1", b"2", b"3")
    seal(real)
    append(real, b"4")
    return real.back_up()


def test_other_entries_with_the_same_numbers_stay_with_who_acknowledged_them(real: LogHarness) -> None:
    backup = began(real)
    append(real, b"5", b"6", b"7")
    seal(real)
    real.restore(backup)
    append(real, b"a", b"b", b"c", b"d")  # at the same instant and as long as those in the bucket
    assert "'a'" in refused(real)
    assert text_of(real) == b"1234abcd"


def test_a_bucket_that_is_further_than_the_stream_is_not_believed(real: LogHarness) -> None:
    backup = began(real)
    append(real, b"5", b"6", b"7")
    seal(real)
    real.restore(backup)
    append(real, b"5")  # the same as in the bucket, but two more are there
    refused(real)


def test_entries_that_differ_by_their_key_only_differ(real: LogHarness) -> None:
    backup = began(real, JSON)
    append(real, b"5", b"6", key=b"one")
    seal(real)
    real.restore(backup)
    append(real, b"5", b"6", key=b"two")
    refused(real)


def test_entries_that_differ_by_their_time_only_differ(real: LogHarness) -> None:
    backup = began(real)
    append(real, b"5", b"6")
    seal(real)
    real.restore(backup)
    real.clock.advance(1)
    append(real, b"5", b"6")
    refused(real)


@pytest.mark.parametrize("kind", [TEXT, JSON])
@pytest.mark.parametrize("key", [None, b"key"])
def test_what_a_killed_server_sealed_is_ours(real: LogHarness, kind: str, key: bytes | None) -> None:
    create(real, kind=kind)
    append(real, b"1", b"22", b"3", key=key)
    append(real, b"4", b"55")
    assert len(real.ask_to_seal(stream_of(real)).segments) == 2
    real.crash(turns=0)
    # It has grown meanwhile, so the hot store would be cut into other segments now.
    append(real, b"6", b"7", key=key)
    seal(real)
    assert text_of(real) == b"122345567"
    assert stream_of(real).sealed == 7
    assert stream_of(real).cold.segments == 3


def test_a_backup_that_was_sealed_as_it_is_goes_on(real: LogHarness) -> None:
    """What the bucket has beyond the backup's segments is exactly what the backup has beyond them."""
    backup = began(real)
    seal(real)
    real.restore(backup)
    append(real, b"a", b"b")
    seal(real)
    assert text_of(real) == b"1234ab"


def test_segments_that_became_one_since_are_not_taken_apart(real: LogHarness) -> None:
    backup = began(real)
    append(real, b"5", b"6")
    seal(real)
    infos = [_INFO.decode(raw) for raw in real.log.store.db.cold.infos_from(stream_of(real).number, 1)]
    real.compact(stream_of(real), infos)
    real.restore(backup)
    append(real, b"a", b"b", b"c")
    real.clock.advance(1)
    number = stream_of(real).number
    report = real.ask_to_seal(stream_of(real))
    assert (report.trouble, report.segments) == ("conflict", []), (number, report)


def test_what_was_trimmed_in_the_bucket_is_not_taken_for_sealed(real: LogHarness) -> None:
    backup = began(real)
    append(real, b"5", b"6")
    seal(real)
    stream = stream_of(real)
    real.call(real.log.record_objects, Trim(stream.number, 6, 6, 2, 0))
    fold(real)
    real.trim(stream_of(real))
    real.restore(backup)
    append(real, b"a")
    report = real.ask_to_seal(stream_of(real))
    assert (report.trouble, report.segments) == ("conflict", []), report


def test_a_name_that_was_made_after_the_backup_is_not_gone_on_with(real: LogHarness) -> None:
    backup = real.back_up()
    create(real)
    append(real, b"1", b"2")
    seal(real)
    real.restore(backup)
    real.clock.advance(1)
    create(real)
    append(real, b"a", b"b", b"c")
    assert "created" in refused(real)


def test_an_empty_stream_of_that_name_is_not_gone_on_with_either(real: LogHarness) -> None:
    backup = real.back_up()
    create(real)
    fold(real)
    real.tidy()
    real.restore(backup)
    real.clock.advance(1)
    create(real)
    append(real, b"a")
    refused(real)


def test_deleting_a_stream_takes_nothing_of_another_one_of_its_name(real: LogHarness) -> None:
    backup = real.back_up()
    create(real)
    append(real, b"1", b"2")
    seal(real)
    bucket = objects_of(real)
    assert any(name.endswith(".parquet") for name in bucket)
    real.restore(backup)
    real.clock.advance(1)
    create(real)
    append(real, b"a")
    real.delete("a")
    fold(real)
    with pytest.raises(AssertionError, match="created elsewhere"):
        real.tidy()
    assert objects_of(real) == bucket


def test_a_stream_that_was_deleted_since_is_told_of(real: LogHarness) -> None:
    backup = began(real)
    real.delete("a")
    fold(real)
    real.tidy()
    real.restore(backup)
    append(real, b"a")
    report = real.ask_to_seal(stream_of(real))
    assert (report.refused, report.segments) == ("buried", []), report


def test_forks_of_a_stream_keep_their_own_entries(real: LogHarness) -> None:
    began(real)
    real.create("f", TEXT, KEPT, Append([], None), ("a", (0, 2), 0))
    append(real, b"x", name="f")
    backup = real.back_up()
    append(real, b"y", name="f")
    seal(real, "f")
    real.restore(backup)
    append(real, b"z", name="f")
    refused(real, "f")
    assert text_of(real, "f") == b"12xz"


def owner_of(real: LogHarness) -> BucketOwner:
    return BucketOwner((real.directory.parent / "objects").as_uri(), "model", take_over=False, log=real.log)


def test_the_bucket_of_a_server_that_went_on_is_not_claimed(real: LogHarness) -> None:
    backup = began(real)
    append(real, b"5")
    seal(real)
    real.restore(backup)
    with pytest.raises(RolledBackError, match="'a'"):
        real.run(owner_of(real).claim())
    # It may have been out of reach when the server started: then no more entries are taken from now on.
    with pytest.raises(FencedError, match="older than the object store"):
        real.run(owner_of(real).confirm())


def test_what_was_changed_but_not_sealed_since_counts_too(real: LogHarness) -> None:
    create(real)
    fold(real)
    real.tidy()
    backup = real.back_up()
    fold(real)
    assert real.append("a", Append([], None, closes=True)).code is None
    fold(real)
    real.tidy()
    real.restore(backup)
    with pytest.raises(RolledBackError):
        real.run(owner_of(real).claim())


def test_a_server_that_was_killed_gets_its_bucket_back(real: LogHarness) -> None:
    began(real)
    append(real, b"5")
    assert real.ask_to_seal(stream_of(real)).segments
    real.crash(turns=0)
    real.run(owner_of(real).claim())
    seal(real)
    real.run(owner_of(real).claim())
    assert text_of(real) == b"12345"
