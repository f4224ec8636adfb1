"""Back to the last durable state: what happened without being written down has happened all the same."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from tailrace.common.limits import Limits

TEXT = "text/plain"
TTL_S = 100


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits())
    yield harness
    harness.close()


def fail_a_commit(log: LogHarness, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One append whose sync fails; then the journal is well again."""

    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        pending = log.append(name, Append([b"lost"], TEXT))
        log.settle()
    assert pending.code == "unavailable"
    log.call(log.log.journal.open_next)
    log.call(log.log.resume)
    assert log.log.refusal is None


@pytest.mark.parametrize("which", ["its own", "another's"])
def test_renewals_by_readers_outlive_a_commit_that_failed(
    log: LogHarness, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    log.create("window", TEXT, (TTL_S, None), Append([b"x"], TEXT), None)
    log.create("other", TEXT, (None, None), Append([], None), None)
    log.settle()
    # A read soon after: too soon to be written down, but the window starts anew.
    log.clock.advance(TTL_S / 20)
    stream = log.find("window")
    assert stream is not None
    log.call(log.log.touch, stream)
    assert log.log.committer.idle, "the renewal is not in the journal"
    fail_a_commit(log, monkeypatch, "window" if which == "its own" else "other")
    log.clock.advance(TTL_S - 1)
    assert log.find("window") is stream, "within a window of the read"
    log.clock.advance(1)
    assert log.find("window") is None


def test_what_is_saved_of_a_window_is_what_is_durable(
    log: LogHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create("window", TEXT, (TTL_S, None), Append([b"x"], TEXT), None)
    log.settle()
    fail_a_commit(log, monkeypatch, "window")
    stream = log.find("window")
    assert stream is not None
    assert (stream.tail, stream.visible) == (1, 1)
    assert stream.touched_saved_ns == stream.created_ns
