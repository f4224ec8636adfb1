"""A bound on bytes for coroutines: never exceeded, first come first served, nothing lost by leaving."""

from __future__ import annotations

import asyncio
import random

import pytest

from tailrace.storage.object_store.cache import ByteBudget


def test_it_is_never_exceeded_and_everybody_gets_in() -> None:
    async def crowd() -> None:
        budget = ByteBudget(100)
        draw = random.Random(1)
        inside = 0
        entered = 0

        async def visit(size: int) -> None:
            nonlocal inside, entered
            async with budget.hold(size):
                inside += min(size, 100)
                entered += 1
                assert inside == budget.held <= 100
                await asyncio.sleep(0)
                inside -= min(size, 100)

        visits = [asyncio.ensure_future(visit(draw.choice([0, 1, 30, 60, 100, 1000]))) for _ in range(200)]
        leaving = draw.sample(visits, 50)
        await asyncio.sleep(0)
        for visit_of_one in leaving:
            visit_of_one.cancel()
        await asyncio.gather(*visits, return_exceptions=True)
        assert entered >= 150
        assert budget.held == 0

    asyncio.run(crowd())


def test_a_large_one_is_not_passed_by_small_ones() -> None:
    async def queue() -> None:
        budget = ByteBudget(10)
        order: list[str] = []

        async def visit(name: str, size: int) -> None:
            async with budget.hold(size):
                order.append(name)
                await asyncio.sleep(0)

        await asyncio.gather(visit("first", 5), visit("large", 10), visit("small", 1))
        assert order == ["first", "large", "small"]

    asyncio.run(queue())


def test_what_failed_inside_gives_its_bytes_back() -> None:
    async def fail() -> None:
        budget = ByteBudget(10)
        with pytest.raises(RuntimeError):
            async with budget.hold(7):
                raise RuntimeError
        assert budget.held == 0

    asyncio.run(fail())
