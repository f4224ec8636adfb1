"""The helpers for background tasks, shared calls and bounded waits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

from tailrace.common.tasks import SingleFlight, TaskSet, run_all, wait_event


def test_a_started_task_is_kept_until_it_ends() -> None:
    async def main() -> None:
        tasks = TaskSet()
        proceed = asyncio.Event()
        task = tasks.start(proceed.wait())
        gc.collect()
        assert len(tasks) == 1
        assert tasks.running
        proceed.set()
        assert await task
        assert not tasks.running
        await asyncio.sleep(0)
        assert len(tasks) == 0

    asyncio.run(main())


def test_close_cancels_tasks_and_waits_for_them() -> None:
    async def main() -> None:
        ended: list[str] = []
        started = asyncio.Event()

        async def work() -> None:
            try:
                started.set()
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append("cleaned up")

        tasks = TaskSet()
        tasks.start(work())
        await started.wait()
        await tasks.close()
        assert ended == ["cleaned up"]
        assert not tasks.running
        await tasks.close()  # again, without tasks

    asyncio.run(main())


def test_the_error_of_a_task_is_reported_and_a_cancellation_is_not() -> None:
    async def main() -> None:
        errors: list[BaseException] = []

        async def fail() -> None:
            raise ValueError("broken")

        tasks = TaskSet(errors.append)
        tasks.start(fail())
        tasks.start(asyncio.Event().wait())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await tasks.close()
        assert [str(error) for error in errors] == ["broken"]

    asyncio.run(main())


def test_concurrent_callers_share_one_call() -> None:
    async def main() -> None:
        calls = 0
        proceed = asyncio.Event()

        async def load() -> int:
            nonlocal calls
            calls += 1
            await proceed.wait()
            return calls

        shared: SingleFlight[str, int] = SingleFlight()
        callers = [asyncio.create_task(shared.run("key", load)) for _ in range(3)]
        await asyncio.sleep(0)
        callers[0].cancel()  # does not cancel the call of the others
        await asyncio.sleep(0)
        proceed.set()
        assert await asyncio.gather(*callers[1:]) == [1, 1]
        assert shared.get("key") is None
        assert await shared.run("key", load) == 2

    asyncio.run(main())


def test_a_call_started_in_place_of_another_stays_after_the_other_ends() -> None:
    async def main() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        shared: SingleFlight[str, bool] = SingleFlight()
        shared.start("key", first.wait())
        newer = shared.start("key", second.wait())
        first.set()
        for _ in range(3):
            await asyncio.sleep(0)
        assert shared.get("key") is newer
        second.set()
        assert await newer

    asyncio.run(main())


def test_wait_event_says_whether_the_event_was_set_in_time() -> None:
    async def main() -> None:
        event = asyncio.Event()
        assert not await wait_event(event, 0)
        event.set()
        assert await wait_event(event, 0)
        assert await wait_event(event, None)

    asyncio.run(main())


async def _numbers() -> AsyncIterator[int]:
    for number in range(10):
        yield number


@pytest.mark.parametrize("kind", ["iterable", "async iterable"])
def test_run_all_processes_a_bounded_number_of_items_at_once(kind: str) -> None:
    async def main() -> None:
        running = most = 0
        done: list[int] = []

        async def work(number: int) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            done.append(number)

        await run_all(range(10) if kind == "iterable" else _numbers(), work, at_once=3)
        assert sorted(done) == list(range(10))
        assert most == 3

    asyncio.run(main())


def test_run_all_raises_the_first_failure_and_cancels_the_rest() -> None:
    async def main() -> None:
        cancelled: list[int] = []

        async def work(number: int) -> None:
            if number == 2:
                raise ValueError("second")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

        with pytest.raises(ValueError, match="second"):
            await run_all(range(10), work, at_once=4)
        assert {0, 1} <= set(cancelled) <= {0, 1, 3}

    asyncio.run(main())
