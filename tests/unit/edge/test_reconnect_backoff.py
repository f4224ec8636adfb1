"""Followers of an edge that get nowhere: how long they wait, and that nothing ends them for good."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tailrace.common import backoff
from tailrace.common.errors import TailraceError
from tailrace.edge import upstreams
from tailrace.edge.context import EdgeContext
from tailrace.edge.invalidation import UpstreamRegistry
from tailrace.edge.live import close_interval_s
from tailrace.edge.reconnect import SETTLED_S, ReconnectBackoff
from tailrace.edge.upstream_pool import UpstreamPool, parse_upstreams
from tailrace.edge.upstreams import Upstream
from tailrace.http import client
from tailrace.http.client import UpstreamLostError, UpstreamResponse


def test_pauses_grow_until_a_socket_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[float] = []

    async def note(seconds: float) -> None:
        longest.append(seconds)

    monkeypatch.setattr(backoff.random, "random", lambda: 0.0)  # the longest pause
    monkeypatch.setattr(upstreams.asyncio, "sleep", note)

    async def fail_and_recover() -> list[bool]:
        row, first = ReconnectBackoff(), list[bool]()
        for _ in range(10):
            first.append(row.record_close(0.1))
            await row.pause()
        first.append(row.record_close(SETTLED_S))
        await row.pause()
        row.record_refusal()
        await row.pause()
        return first

    assert asyncio.run(fail_and_recover()) == [True, *[False] * 9, True]
    assert longest == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0, 0.2]


@pytest.mark.parametrize(("readers", "all_s"), [(0, 0.0), (1000, 0.5), (10_000, 5.0), (50_000, 5.0)])
def test_readers_of_a_stopping_edge_leave_evenly(readers: int, all_s: float) -> None:
    assert readers * close_interval_s(readers) == pytest.approx(all_s)


def test_an_answer_that_breaks_off_in_silence_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the rest of it, and its place among the connections is free again."""
    monkeypatch.setattr(client, "SILENCE_S_MAX", 0.05)
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"

    async def request() -> None:
        over = asyncio.Event()

        async def say_half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(half)
            await over.wait()
            writer.close()

        owner = await asyncio.start_server(say_half, "127.0.0.1", 0)
        port = owner.sockets[0].getsockname()[1]
        pool = UpstreamPool(parse_upstreams(f"http://127.0.0.1:{port}")[0], 1, 1, 30.0)
        async with asyncio.timeout(30):
            for _ in range(2):
                reply = await pool.request(b"GET / HTTP/1.1\r\nHost: owner\r\n\r\n")
                with pytest.raises(UpstreamLostError):
                    await reply.body(100)
        over.set()
        pool.close()
        owner.close()

    asyncio.run(request())


class CrowdedPool:
    """Has no room for a request at first, and no upstream after that."""

    def __init__(self) -> None:
        self.asked = 0
        self.asked_again = asyncio.Event()

    async def request(self, request: bytes, **_: Any) -> UpstreamResponse:
        self.asked += 1
        if self.asked < 3:
            raise TailraceError("overloaded", "too many requests wait for the upstream")
        self.asked_again.set()
        raise UpstreamLostError("away", sent=False)


def test_the_registry_is_looked_at_again_after_a_crowd() -> None:
    async def watch() -> None:
        pool = CrowdedPool()
        origin = SimpleNamespace(host_header=b"owner:1")
        upstream = SimpleNamespace(
            origin=origin, pool=pool, record_failed=lambda _now: None, pause=asyncio.Event().wait
        )
        context = SimpleNamespace(edge_id=b"edge", token=None, loop=asyncio.get_running_loop())
        followed = UpstreamRegistry(
            cast("EdgeContext", context), cast("Upstream", upstream), lambda _name, _operation: None
        )
        task = asyncio.ensure_future(followed.run())
        async with asyncio.timeout(30):
            await pool.asked_again.wait()
        task.cancel()

    asyncio.run(watch())
