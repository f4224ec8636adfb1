"""Changes that wait for room in the log: made in order, refused in time, and each only once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from tailrace.common.errors import TailraceError
from tailrace.common.limits import MIB, Limits
from tailrace.log.commit_path import LogBackpressureError
from tailrace.log.decide import CreateRequest
from tailrace.log.transaction import ignore_reply

WAIT_S = 30.0
LIMITS = Limits(
    tail_memory_max_bytes=MIB,
    append_queue_stream_bytes=4 * MIB,
    append_queue_max_bytes=4 * MIB,
    append_wait_ms=20_000,
)


@pytest.fixture
def full(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LogHarness]:
    """A log with no room until its journal is checkpointed."""
    harness = LogHarness(tmp_path, getattr(request, "param", LIMITS))
    harness.call(harness.log.create, CreateRequest("filled", "text/plain"), ignore_reply, None)
    harness.log.checkpoint_pending = True  # a file is with the checkpointer, and it takes its time
    while harness.log.streams.memory_bytes <= 2 * MIB:
        assert harness.append("filled", Append([b"x" * MIB], "text/plain")).code is None
        harness.settle()
    yield harness
    harness.close()


def make_room(harness: LogHarness) -> None:
    harness.call(harness.log.rotate_journal)
    harness.settle()
    while harness.retired:
        harness.checkpoint(tell=True)


def create(harness: LogHarness, name: str) -> str:
    harness.log.create(CreateRequest(name, "text/plain"), ignore_reply, None)
    return name


def start(harness: LogHarness, name: str) -> asyncio.Task[str]:
    """A task that waits for room to create a stream."""

    async def begin() -> asyncio.Task[str]:
        count = harness.log.backpressure_queue.count
        task = asyncio.ensure_future(harness.log.backpressure_queue.submit(partial(create, harness, name)))
        await asyncio.sleep(0)
        assert harness.log.backpressure_queue.count == count + 1
        return task

    return harness.run(begin())


def test_changes_are_made_in_order_when_there_is_room(full: LogHarness) -> None:
    tasks = [start(full, name) for name in ("a", "b", "c")]
    assert full.log.find("a") is None
    make_room(full)
    full.run(asyncio.wait_for(asyncio.gather(*tasks), WAIT_S))
    numbers = [full.log.existing(name).number for name in ("a", "b", "c")]
    assert numbers == sorted(numbers)
    assert not full.log.must_queue
    assert (
        full.log.backpressure_queue.count,
        full.log.backpressure_queue.bytes,
        full.log.backpressure_queue.waited,
    ) == (0, 0, 3)


def test_a_change_with_room_is_made_without_a_pause(full: LogHarness) -> None:
    make_room(full)

    async def submit() -> bool:
        task = asyncio.ensure_future(full.log.backpressure_queue.submit(partial(create, full, "a")))
        await asyncio.sleep(0)
        return task.done()

    assert full.run(submit())


def test_a_change_goes_behind_those_that_wait(full: LogHarness) -> None:
    waiting = start(full, "a")
    with pytest.raises(LogBackpressureError) as refused:
        full.call(create, full, "b")
    assert refused.value.message == "other changes are waiting for room"
    waiting.cancel()


def test_a_cancelled_task_changes_nothing_and_holds_up_no_others(full: LogHarness) -> None:
    cancelled, other = start(full, "a"), start(full, "b")
    full.call(cancelled.cancel)
    make_room(full)
    assert full.run(asyncio.wait_for(other, WAIT_S)) == "b"
    assert full.log.find("a") is None


def test_an_error_of_a_waiting_change_is_raised_in_its_task(full: LogHarness) -> None:
    async def fail() -> None:
        def make() -> None:
            create(full, "a")
            raise ValueError("a defect")

        await full.log.backpressure_queue.submit(make)

    async def begin() -> asyncio.Task[None]:
        task = asyncio.ensure_future(fail())
        await asyncio.sleep(0)
        return task

    failing = full.run(begin())
    other = start(full, "b")
    make_room(full)
    with pytest.raises(ValueError, match="a defect"):
        full.run(asyncio.wait_for(failing, WAIT_S))
    assert full.run(asyncio.wait_for(other, WAIT_S)) == "b"


@pytest.mark.parametrize(
    "full",
    [
        Limits(tail_memory_max_bytes=MIB, append_wait_ms=0),
        Limits(tail_memory_max_bytes=MIB, append_wait_ms=1),
    ],
    indirect=True,
)
def test_a_change_is_refused_when_it_waited_too_long(full: LogHarness) -> None:
    with pytest.raises(TailraceError) as refused:
        full.run(asyncio.wait_for(full.log.backpressure_queue.submit(partial(create, full, "a")), WAIT_S))
    assert (refused.value.code, refused.value.retry_after_s) == ("overloaded", 1)
    assert full.log.find("a") is None
    assert not full.log.must_queue


def test_a_change_that_can_never_have_room_is_refused_at_once(full: LogHarness) -> None:
    refused: list[TailraceError] = []
    size = LIMITS.append_queue_max_bytes + 1
    full.call(
        full.log.backpressure_queue.call, lambda: full.log.begin(size, ignore_reply, None), refused.append
    )
    assert [error.code for error in refused] == ["overloaded"]
    assert full.log.backpressure_queue.count == 0
