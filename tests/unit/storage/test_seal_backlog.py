"""The bound on entries that wait for the object store, kept by every single append."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from tailrace.common.limits import Limits
from tailrace.log.decide import CreateRequest
from tailrace.log.transaction import ignore_reply
from tailrace.storage.seal_schedule import SealBacklog

BOUND = 100_000
ENTRY = b"x" * 1000


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits(spool_bytes=BOUND))
    harness.call(harness.log.create, CreateRequest("a", "text/plain"), ignore_reply, None)
    harness.settle()
    yield harness
    harness.close()


def fill(log: LogHarness, *, settle: bool) -> int:
    """Appends as fast as it goes, until one is refused; how many were not."""
    taken = 0
    while (pending := log.append("a", Append([ENTRY], "text/plain"))).code is None:
        taken += 1
        assert taken < 1000, "nothing stops it"
        if settle:
            log.settle()
    assert pending.code == "unavailable"
    log.settle()
    return taken


@pytest.mark.parametrize("settle", [False, True])
def test_no_append_goes_beyond_the_bound_though_nobody_looks(log: LogHarness, settle: bool) -> None:
    pressure = SealBacklog(log.log)
    pressure.start()
    taken = fill(log, settle=settle)
    assert 0.7 * BOUND < taken * len(ENTRY) <= BOUND
    assert pressure.refusing
    pressure.update("")
    assert pressure.refusing
    # Moved to the hot store they are still only here.
    log.call(log.log.rotate_journal)
    log.settle()
    while log.retired:
        log.checkpoint(tell=True)
        pressure.checkpointed(log.log.streams.file - 1)
    assert taken * len(ENTRY) <= pressure.stored_bytes <= pressure.waiting_bytes <= BOUND
    # On the object store they are not.
    stream = log.find("a")
    assert stream is not None
    log.seal(stream)
    pressure.sealed(taken * len(ENTRY))
    pressure.update("")
    assert not pressure.refusing
    assert fill(log, settle=settle) * len(ENTRY) <= BOUND
