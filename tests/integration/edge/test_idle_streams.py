"""E-23: an owner whose streams are followed by edges, and are not written, has nothing to do for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.calls import Caller
from support.edge import EdgeProcess, Follower, all_live
from support.server import ServerProcess
from tailrace.common.limits import Limits
from tailrace.common.settings import Settings
from tailrace.server.process import Server
from tailrace.storage.data_directory import DataDirectory

MIB = 1024 * 1024
STREAMS = 100
ENTRY = {"padding": "x" * 30_000}
PATIENCE_S = 60.0
JSON = {"Content-Type": "application/json"}


class Owner(ServerProcess):
    """The address of the server that runs in this process, for those who call it."""

    def __init__(self, directory: Path, url: str) -> None:
        super().__init__(directory, port=int(url.rpartition(":")[2]))
        self.base_url = url


@asynccontextmanager
async def _owner(directory: Path) -> AsyncIterator[Owner]:
    """Runs on the loop of the test, so that its tasks and timers can be counted."""
    loop = asyncio.get_running_loop()
    data = DataDirectory(directory)
    limits = Limits(journal_file_bytes=4 * MIB)
    server = Server(Settings(data_dir=directory, port=0, pipeline="off", limits=limits), data, loop)
    await server.start()
    try:
        yield Owner(directory, server.url)
    finally:
        await server.stop()
        data.close()


async def _until(look: Callable[[], Awaitable[Any]], wanted: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if wanted(seen := await look()):
                return seen
            await asyncio.sleep(0.05)


async def _work() -> tuple[int, int]:
    """Tasks, and timers that will go off."""
    scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return len(asyncio.all_tasks()), sum(not timer.cancelled() for timer in scheduled)


def test_e23_followed_streams_that_nobody_writes_cost_no_work_and_no_tail(tmp_path: Path) -> None:
    async def main() -> None:
        async with _owner(tmp_path / "data") as owner:
            caller = Caller(owner)

            async def call(method: str, path: str, body: Any = None) -> Any:
                return await asyncio.to_thread(caller, method, path, body, headers=JSON)

            async def memory() -> dict[str, Any]:
                return json.loads((await call("GET", "/v1/server/_mem")).raw)

            async def tail_bytes() -> int:
                return (await memory())["runtime_bytes"]["heap_estimates"]["tail_memory_bytes"]

            names = [f"idle/{number}" for number in range(STREAMS)]
            for name in names:
                assert (await call("PUT", name)).status == 201
                assert (await call("POST", name, ENTRY)).status == 204
            assert await tail_bytes() > STREAMS * 30_000
            edge = EdgeProcess(tmp_path / "cache", owner.base_url)
            await asyncio.to_thread(edge.start)
            followers = [Follower(edge.port, name, "sse") for name in names]
            reading: list[asyncio.Future[None]] = []
            try:
                reading.append(asyncio.ensure_future(followers[0].run()))
                await all_live(followers[:1])
                tasks, timers = await _work()
                reading += [asyncio.ensure_future(follower.run()) for follower in followers[1:]]
                await all_live(followers)
                # Those of the test read; the owner has no more to do for a hundred than for one, but for what
                # comes and goes.
                await _until(_work, lambda work: work[0] < tasks + STREAMS + 10 and work[1] < timers + 10)
                counts = (await memory())["runtime_counts"]
                assert counts["live_connections"] == STREAMS + 1, "one socket each, and the registry"
                # Other streams fill the journal: what the hot store has then leaves memory.
                assert (await call("PUT", "busy")).status == 201
                for _ in range(20):
                    assert (await call("POST", "busy", [ENTRY] * 3)).status == 204
                await _until(tail_bytes, lambda held: held < STREAMS * 30_000 / 2)
                for number, name in enumerate(names):
                    assert (await call("POST", name, {"n": number})).status == 204
                await _until(_all_have(followers), bool)
                assert [follower.entries[-1] for follower in followers] == [{"n": n} for n in range(STREAMS)]
                assert {follower.connections for follower in followers} == {1}
            finally:
                for task in reading:
                    task.cancel()
                await asyncio.gather(*reading, return_exceptions=True)
                await asyncio.to_thread(edge.stop)

    asyncio.run(main())


def _all_have(followers: list[Follower]) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return all(len(follower.entries) == 2 for follower in followers)

    return look
