"""Several users of one object store whose operations happen one at a time, in an order the test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hypothesis import strategies as st

from tailrace.storage.object_store.interface import ObjectStore


class Turns:
    """The store as one user sees it: each operation waits for its turn. `done` hears of what succeeds."""

    def __init__(
        self, objects: ObjectStore, done: Callable[[str, tuple[Any, ...]], None] | None = None
    ) -> None:
        self._objects = objects
        self._done = done
        self._may_go = asyncio.Semaphore(0)
        self._parked = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._objects, name)
        if not asyncio.iscoroutinefunction(operation):
            return operation

        async def in_turn(*args: Any) -> Any:
            self._parked.set()
            await self._may_go.acquire()
            answer = await operation(*args)
            if self._done is not None:
                self._done(name, args)
            return answer

        return in_turn

    async def rest(self, task: asyncio.Task[None]) -> None:
        """Until the user asks for its next operation, or has ended."""
        parked = asyncio.ensure_future(self._parked.wait())
        await asyncio.wait([parked, task], return_when=asyncio.FIRST_COMPLETED)
        parked.cancel()

    async def let_go(self, task: asyncio.Task[None]) -> None:
        """One operation, and everything its user does up to the next."""
        self._parked.clear()
        self._may_go.release()
        await self.rest(task)


async def interleave(data: st.DataObject, runs: Sequence[tuple[Turns, Coroutine[Any, Any, None]]]) -> None:
    """Run all of them to their end; whenever several could go on, the test's data say which."""
    tasks = [(turns, asyncio.ensure_future(run)) for turns, run in runs]
    for turns, task in tasks:
        await turns.rest(task)
    while running := [(turns, task) for turns, task in tasks if not task.done()]:
        index = data.draw(st.integers(0, len(running) - 1)) if len(running) > 1 else 0
        await running[index][0].let_go(running[index][1])
    for _turns, task in tasks:
        task.result()
