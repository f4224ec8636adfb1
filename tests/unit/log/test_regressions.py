"""Rules of the log that are easy to break: each of these was broken once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.log_harness import LogHarness, Pending
from support.log_model import Append, Lifetime
from tailrace.common.limits import Limits
from tailrace.log.commit_path import evict_idle

JSON, TEXT = "application/json", "text/plain"
EMPTY = Append([], None)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits(journal_file_bytes=4096, block_cache_bytes=0))
    yield harness
    harness.close()


def create(
    log: LogHarness,
    name: str,
    *payloads: bytes,
    content_type: str = TEXT,
    lifetime: Lifetime = (None, None),
    fork: tuple[str, tuple[int, int] | None, int] | None = None,
) -> None:
    answered(log, log.create(name, content_type, lifetime, Append(list(payloads), content_type), fork))


def append(log: LogHarness, name: str, *payloads: bytes, hint_ns: int | None = None) -> None:
    for payload in payloads:
        answered(log, log.append(name, Append([payload], TEXT, hint_ns=hint_ns)))


def answered(log: LogHarness, pending: Pending) -> None:
    log.settle()
    assert pending.settled
    assert pending.code is None


def everything(log: LogHarness, name: str) -> bytes:
    stream = log.find(name)
    assert stream is not None
    return b"".join(log.read(stream, 0, 2**20, 2**20, None).parts)


def checkpoint(log: LogHarness) -> None:
    """Everything that is in the journal goes to the hot store and leaves memory."""
    log.log.retire_active_file()
    create(log, f"marker/{log.clock.now_ns()}/{len(log.retired)}")
    while log.retired:
        log.checkpoint(tell=True)


def test_a_fork_reads_its_own_entries_from_the_store_not_its_sources(log: LogHarness) -> None:
    create(log, "source", b"s1")
    append(log, "source", b"s2", b"s3", b"s4")
    create(log, "fork", fork=("source", (0, 2), 0))
    append(log, "fork", b"f3", b"f4")
    checkpoint(log)
    assert everything(log, "fork") == b"s1s2f3f4"
    assert everything(log, "source") == b"s1s2s3s4"


def test_a_deadline_does_not_bring_a_deleted_stream_back_from_the_store(log: LogHarness) -> None:
    create(log, "short", b"old", lifetime=(10, None))
    checkpoint(log)
    assert log.find("short") is not None
    answered(log, log.delete("short"))
    create(log, "short", b"new")
    log.clock.advance(60)
    log.sweep()
    assert everything(log, "short") == b"new"


@pytest.mark.parametrize("hint_s", [-3600, 200])
def test_an_append_renews_the_window_by_the_clock_not_by_its_timestamp(log: LogHarness, hint_s: int) -> None:
    create(log, "window", lifetime=(100, None))
    log.clock.advance(90)
    append(log, "window", b"x", hint_ns=log.clock.now_ns() + hint_s * 10**9)
    log.clock.advance(99)
    assert log.find("window") is not None
    log.reopen()
    assert log.find("window") is not None
    log.clock.advance(12)
    assert log.find("window") is None


def test_times_never_decrease_across_a_fork_point(log: LogHarness) -> None:
    now_ns = log.clock.now_ns()
    create(log, "source")
    append(log, "source", b"1", hint_ns=now_ns + 200 * 10**9)
    append(log, "source", b"2", hint_ns=now_ns + 300 * 10**9)
    checkpoint(log)
    create(log, "fork", fork=("source", (0, 1), 0))
    append(log, "fork", b"f")
    log.reopen()
    append(log, "fork", b"g")
    stream = log.find("fork")
    assert stream is not None
    assert [log.log.reader.time_of(stream, entry) for entry in (1, 2, 3)] == [now_ns + 200 * 10**9] * 3


def test_a_source_that_expired_under_its_forks_is_remembered_as_expired(log: LogHarness) -> None:
    create(log, "source", b"1", lifetime=(10, None))
    create(log, "fork", lifetime=(1000, None), fork=("source", None, 0))
    log.clock.advance(20)
    source = log.find("source")
    assert source is not None
    assert source.gone
    checkpoint(log)
    answered(log, log.delete("fork"))
    assert log.find("source") is None
    assert log.delete("source").code == "not_found"
    assert log.delete("fork").code is None


def test_numbers_of_removed_streams_are_not_kept_for_ever(log: LogHarness) -> None:
    for number in range(20):
        create(log, f"brief/{number}")
        answered(log, log.delete(f"brief/{number}"))
    checkpoint(log)
    assert not log.log.streams.removed


def test_a_source_is_not_put_away_while_its_last_fork_is_leaving(log: LogHarness) -> None:
    create(log, "source", b"1")
    create(log, "fork", fork=("source", None, 0))
    checkpoint(log)
    log.log.committer.sync_concurrency.permitted = (
        4  # a slow disk: the commit is under way while streams are put away
    )
    pending = log.delete("fork")
    evict_idle(log.log.streams, log.log.store.db.journal_seq)
    answered(log, pending)
    source = log.find("source")
    assert source is not None
    assert source.forks == 0


def test_stored_streams_that_were_removed_do_not_hide_those_that_expire_later(
    log: LogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.log.expiry.SWEEP_COUNT_MAX", 2)
    for number in range(5):
        create(log, f"brief/{number}", lifetime=(10, None))
    create(log, "longer", lifetime=(20, None))
    create(log, "renewed", lifetime=(30, None))
    checkpoint(log)
    log.reopen()
    log.clock.advance(25)
    for _ in range(4):
        log.sweep()
    assert sorted(name for kind, name, *_ in log.registry() if kind == "delete") == [
        *(f"brief/{number}" for number in range(5)),
        "longer",
    ]


@pytest.mark.parametrize("lifetime", [(2**53, None), (None, 2**63 - 1), (None, -(10**18))])
def test_lifetimes_of_any_length_can_be_kept(log: LogHarness, lifetime: Lifetime) -> None:
    create(log, "long", lifetime=lifetime)
    checkpoint(log)
    log.reopen()
    stream = log.find("long")
    assert (stream is None) is (lifetime[1] is not None and lifetime[1] < 0)
    if stream is not None:
        assert (stream.lifetime.ttl_s, stream.lifetime.expires_ns) == lifetime


def test_since_sees_of_an_ancestor_only_what_the_fork_shows(log: LogHarness) -> None:
    create(log, "source")
    for second in range(1, 6):
        append(log, "source", b"s", hint_ns=second * 10**9)
    create(log, "middle", fork=("source", None, 0))
    create(log, "inner", fork=("middle", (0, 2), 0))
    append(log, "inner", b"i")
    stream = log.find("inner")
    assert stream is not None
    found = [log.log.reader.entry_before(stream, second * 10**9) for second in (1, 2, 3, 4, 6)]
    assert found == [0, 1, 2, 2, 2]
