"""The memory guard: what is shed, what is refused, and when it is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append, Lifetime
from tailrace.common.limits import Limits
from tailrace.log.commit_path import LARGE_CHANGE_BYTES
from tailrace.server.resource_guards import MemoryGuard, memory_limit_bytes, resident_bytes

MIB = 1 << 20
LIMIT = 100 * MIB
TEXT = "text/plain"


class Process:
    """The size of a process, as a test wants it."""

    def __init__(self) -> None:
        self.rss = 50 * MIB

    def read(self) -> int:
        return self.rss


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[LogHarness]:
    harness = LogHarness(tmp_path, Limits())
    harness.create("s", TEXT, Lifetime(), Append([], None), None)
    harness.settle()
    yield harness
    harness.close()


def code(harness: LogHarness, size: int) -> str | None:
    pending = harness.append("s", Append([b"x" * size], TEXT))
    harness.settle()
    return pending.code


def test_large_work_is_refused_first_and_then_everything(harness: LogHarness) -> None:
    process, shed = Process(), list[int]()
    guard = MemoryGuard(harness.log, harness.clock, harness.loop, LIMIT, process.read)
    guard.evictors.append(lambda: shed.append(process.rss))
    harness.call(guard.poll)
    assert (guard.active, shed, code(harness, LARGE_CHANGE_BYTES + 1)) == (False, [], None)
    process.rss = LIMIT + MIB
    harness.call(guard.poll)
    assert (guard.active, len(shed)) == (True, 1)
    assert code(harness, LARGE_CHANGE_BYTES + 1) == "overloaded"
    assert code(harness, LARGE_CHANGE_BYTES) is None
    process.rss = int(1.2 * LIMIT)
    harness.call(guard.poll)
    assert code(harness, 1) == "overloaded"
    assert harness.delete("s").code is None
    process.rss = int(1.1 * LIMIT)
    harness.call(guard.poll)
    assert guard.refusing, "not let in again at once, to be sent away again"
    process.rss = int(0.95 * LIMIT)
    harness.call(guard.poll)
    assert (guard.active, guard.refusing, harness.log.shortage) == (True, False, None)
    process.rss = int(0.8 * LIMIT)
    harness.call(guard.poll)
    assert (guard.active, harness.log.pressure, guard.pressures) == (False, None, 1)
    assert guard.high_water["rss_bytes"].value == int(1.2 * LIMIT)


def test_recent_entries_leave_memory_early(harness: LogHarness) -> None:
    process = Process()
    process.rss = LIMIT + 1
    for _ in range(40):
        assert code(harness, 50_000) is None
    guard = MemoryGuard(harness.log, harness.clock, harness.loop, LIMIT, process.read)
    assert not harness.retired
    harness.call(guard.poll)
    harness.settle()
    assert harness.retired, "the journal has moved on, so that a checkpoint can follow"


def test_without_a_limit_nothing_is_refused(harness: LogHarness) -> None:
    process = Process()
    process.rss = 1 << 50
    guard = MemoryGuard(harness.log, harness.clock, harness.loop, 0, process.read)
    harness.call(guard.poll)
    assert (guard.active, code(harness, LARGE_CHANGE_BYTES + 1)) == (False, None)


def test_the_size_of_this_process() -> None:
    assert 5 * MIB < resident_bytes() < 1 << 45
    assert memory_limit_bytes(Limits(memory_limit_bytes=7)) == 7


def test_freed_memory_goes_back_even_without_a_limit(harness: LogHarness) -> None:
    process, given = Process(), list[int]()
    guard = MemoryGuard(
        harness.log, harness.clock, harness.loop, 0, process.read, lambda: given.append(process.rss)
    )

    def look(rss: int) -> int:
        process.rss = rss
        harness.call(guard.poll)
        if guard.trimming is not None:
            harness.run(guard.trimming)
        return len(given)

    assert look(50 * MIB) == 0
    assert look(80 * MIB) == 0, "not worth it"
    assert look(200 * MIB) == 1
    assert look(210 * MIB) == 1, "not twice in a row"
