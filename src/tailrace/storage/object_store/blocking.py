"""Steps of an object store, one at a time, for programs without a loop of their own: workers of Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BlockingRunner:
    """A loop that runs while somebody waits. It does not survive a fork, so it is made where it is needed."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        """What a step comes to.

        Not by `Runner.run`: around each step it puts a handler for interrupts in place and takes it away, for
        which the library writes the handler as a text, and with it what the step came to. That took longer
        for a segment than reading it does.
        """
        return self._runner.get_loop().run_until_complete(step)

    def close(self) -> None:
        self._runner.close()
