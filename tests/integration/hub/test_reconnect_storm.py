"""A herd: all clients lose their server at once, and all come back. The limit on new connections is off."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from support.calls import Caller, eventually
from support.server import ServerProcess
from tailrace.client import ClientError, Retries
from tailrace.client.hub import AsyncHub, Timeouts

AT_ONCE = 100
T = TypeVar("T")


def serve(tmp_path: Path, count: int) -> ServerProcess:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    env = {
        # All clients share one loop here, and on a busy machine they are late.
        "TAILRACE_HUB_CONNECT_MS": "60s",
        "TAILRACE_HUB_CONNECTS_PER_S": "0",
        "TAILRACE_HUB_CONNECTIONS": str(2 * count),
        "TAILRACE_HUB_SENDS_PER_S": str(10 * count),
    }
    return ServerProcess(tmp_path / "data", env=env).start()


async def each(items: Sequence[T], work: Callable[[T], Awaitable[Any]]) -> None:
    """Some at a time. The first failure ends the others."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> None:
        async with turns:
            await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def close_all(hubs: Sequence[AsyncHub]) -> None:
    """Closes every socket, whatever happens to one of them: those left open would fail later tests."""

    async def close(hub: AsyncHub) -> None:
        with suppress(ClientError):
            await hub.close()

    await each(hubs, close)


async def herd(server: ServerProcess, count: int, *, kill: bool) -> None:
    retries = Retries(delay_s_first=0.05, delay_s_max=2.0 if kill else 30.0, attempts_max=100)
    timeouts = Timeouts(connect_s=60.0, register_s=60.0, heartbeat_s=60.0, ask_s=300.0)

    def actor(number: int) -> AsyncHub:
        address = f"@(herd/{number})"
        return AsyncHub(server.base_url, address=address, retries=retries, timeouts=timeouts)

    async def come(hub: AsyncHub) -> None:
        await hub.connect()
        await hub.register(durable=True, ttl_s=3600)

    hubs = [actor(number) for number in range(count)]
    sender = actor(count)
    try:
        await each([sender, *hubs], come)
        for word in ("before", "after"):
            await each(hubs, lambda hub, word=word: sender.send(hub.identity, word, ack="accepted"))
            heard = [await first_of(hub, word) for hub in hubs]
            # What was handed over a moment before the kill may come again, and says so.
            assert all(message.redelivered for messages in heard for message in messages)
            if word == "before":
                await asyncio.to_thread(server.restart, kill=kill)
        await each(
            [*zip(hubs, [*hubs[1:], hubs[0]], strict=True)],
            lambda pair: pair[0].send(pair[1].identity, "each"),
        )
        for hub in hubs:
            await first_of(hub, "each")
        found = [found.address async for found in sender.discover("herd/*")]
        assert len(found) == count + 1
    finally:
        await close_all([sender, *hubs])


async def first_of(hub: AsyncHub, word: str) -> list[Any]:
    """What came before a message of this type."""
    before: list[Any] = []
    while True:
        message = await hub.next_message(300.0)
        assert message is not None
        if message.type == word:
            return before
        before.append(message)


def sessions(server: ServerProcess) -> float:
    lines = Caller(server)("GET", "/metrics").raw.decode().splitlines()
    (found,) = (line for line in lines if line.startswith("tailrace_hub_sessions "))
    return float(found.split()[1])


def rss_bytes(server: ServerProcess) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_small_herd_comes_back_after_a_kill(tmp_path: Path) -> None:
    server = serve(tmp_path, 100)
    try:
        asyncio.run(herd(server, 100, kill=True))
        eventually(lambda: sessions(server), lambda count: count == 0)
    finally:
        server.stop()


@pytest.mark.nightly
def test_ten_thousand_come_back_when_they_were_asked_to(tmp_path: Path) -> None:
    server = serve(tmp_path, 10_000)
    try:
        asyncio.run(herd(server, 10_000, kill=False))
        eventually(lambda: sessions(server), lambda count: count == 0)
        once = rss_bytes(server)
        asyncio.run(herd(server, 10_000, kill=False))
        eventually(lambda: sessions(server), lambda count: count == 0)
        assert rss_bytes(server) < 1.5 * once, "a second herd finds the room of the first"
    finally:
        server.stop()
