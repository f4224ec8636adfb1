"""Steps that are waited for."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.storage.object_store.interface import BlockingRunner


class _Large:
    """Something that knows whether it was written as a text."""

    written = 0

    def __repr__(self) -> str:
        self.written += 1
        return "large"


def test_what_a_step_comes_to_is_never_written_as_a_text() -> None:
    large = _Large()

    async def step() -> _Large:
        await asyncio.sleep(0)
        return large

    steps = BlockingRunner()
    try:
        assert steps.run(step()) is large
        assert steps.run(step()) is large
    finally:
        steps.close()
    assert not large.written


def test_an_error_of_a_step_is_raised_and_the_next_one_runs() -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def works() -> int:
        return 1

    steps = BlockingRunner()
    with pytest.raises(ValueError, match="no"):
        steps.run(fails())
    assert steps.run(works()) == 1
    steps.close()
