"""An edge whose owner is away for a while, says nothing, or has to open everything at once again."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from websockets.asyncio.client import connect

from conftest import StartServer
from support.calls import Caller, eventually
from support.cutting_proxy import CuttingProxy, Direction, Hold
from support.edge import EdgeProcess, Follower, Writer, all_live, metrics
from support.server import ServerProcess

LIVE = ("sse", "ws")
KEEP_ALIVE = b"e\r\n: keep-alive\n\n\r\n"
CHANNELS = 200
HANDSHAKES_MAX = 64


def _nightly(*cuts_s: int) -> list[object]:
    return [pytest.param(cut_s, marks=pytest.mark.nightly) for cut_s in cuts_s]


async def _follow_over(
    writer: Writer,
    followers: list[Follower],
    loss: Callable[[], None],
    end: Callable[[], None],
    loss_s: float,
) -> None:
    """Everybody follows while the owner is lost for so long, and is written in the meantime."""
    tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
    await all_live(followers)
    await asyncio.to_thread(writer.append, 3)
    await asyncio.to_thread(loss)
    await asyncio.sleep(loss_s)
    await asyncio.to_thread(end)
    for _ in range(5):
        await asyncio.to_thread(writer.append)
    await asyncio.to_thread(writer.close)
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("cut_s", [1, *_nightly(10, 29)])
def test_e17_nobody_is_let_go_while_the_owner_cannot_be_reached(
    start_server: StartServer, tmp_path: Path, cut_s: int
) -> None:
    """E-17: nothing gets through; what was written meanwhile comes afterwards, on the same connections."""
    server = start_server()
    writer = Writer(server, "away")
    with CuttingProxy(server.port) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url)
        edge.start()
        followers = [Follower(edge.port, "away", mode) for mode in LIVE for _ in range(5)]

        def shut() -> None:
            proxy.shut()
            writer.append(5)

        asyncio.run(_follow_over(writer, followers, shut, proxy.open, cut_s))
        edge.stop()
    assert all(follower.entries == writer.numbers() for follower in followers)
    assert {follower.connections for follower in followers} == {1}


class HealthChecks:
    """Cuts everything while it is shut, and counts the health checks of an edge."""

    def __init__(self) -> None:
        self.shut = False
        self.seen = 0

    def decide(self, direction: Direction, piece: bytes) -> bool:
        self.seen += direction == "request" and piece.startswith(b"GET /readyz ")
        return self.shut

    def wait_next(self) -> None:
        seen = self.seen
        eventually(lambda: self.seen, lambda now: now > seen)


def test_e17_an_owner_that_is_back_just_before_the_end_of_the_hold_keeps_its_readers(
    start_server: StartServer, tmp_path: Path
) -> None:
    """E-17: neither the next health check nor the next attempt, which has backed off, comes in time."""
    server = start_server()
    writer = Writer(server, "late")
    checks = HealthChecks()
    with CuttingProxy(server.port, checks.decide) as proxy:
        # Health checks come every 2 s: of those after the loss the third is late for this hold.
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url, env={"TAILRACE_EDGE_HOLD_MS": "4700"})
        edge.start()
        followers = [Follower(edge.port, "late", mode) for mode in LIVE]

        def shut() -> None:
            checks.wait_next()
            checks.shut = True
            proxy.cut_all()
            for number in range(20):  # failures raise the back-off to its maximum of 10 s
                assert Caller(edge)("GET", f"other/{number}").status == 503
            checks.wait_next()
            checks.wait_next()

        def come_back() -> None:
            checks.shut = False

        asyncio.run(_follow_over(writer, followers, shut, come_back, 0))
        edge.stop()
    assert all(follower.entries == writer.numbers() for follower in followers)
    assert {follower.connections for follower in followers} == {1}


def test_e17_nobody_is_let_go_while_the_owner_stands_still(start_server: StartServer, tmp_path: Path) -> None:
    """E-17: its kernel takes connections, and it answers none; sockets that were cut wait for it."""
    server = start_server()
    writer = Writer(server, "still")
    with CuttingProxy(server.port) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url)
        edge.start()
        followers = [Follower(edge.port, "still", mode) for mode in LIVE for _ in range(5)]

        def stand_still() -> None:
            server.signal(signal.SIGSTOP)
            proxy.cut_all()

        def go_on() -> None:
            server.signal(signal.SIGCONT)

        try:
            asyncio.run(_follow_over(writer, followers, stand_still, go_on, 0.5))
        finally:
            go_on()
        edge.stop()
    assert all(follower.entries == writer.numbers() for follower in followers)
    assert {follower.connections for follower in followers} == {1}


def test_e17_readers_are_let_go_when_the_owner_stays_silent(
    start_server: StartServer, tmp_path: Path
) -> None:
    """E-17: connections are taken and nothing comes back; that is no reason to keep readers for ever."""
    server = start_server()
    with CuttingProxy(server.port) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url, env={"TAILRACE_EDGE_HOLD_MS": "500"})
        edge.start()
        hold = Hold("answer")

        def fall_silent() -> None:
            proxy.before = hold
            proxy.cut_all()

        try:
            rest, code = asyncio.run(_let_go(server, edge, fall_silent))
        finally:
            hold.let_go()
        edge.stop()
    assert (rest, code) == (b"0\r\n\r\n", 1013)


@pytest.mark.nightly
def test_e17_after_31_seconds_all_are_let_go(start_server: StartServer, tmp_path: Path) -> None:
    """E-17: with the hold that users have; an owner that is back by then finds nobody."""
    server = start_server()
    with CuttingProxy(server.port) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url)
        edge.start()
        back = threading.Timer(31, proxy.open)

        def shut() -> None:
            proxy.shut()
            back.start()

        rest, code = asyncio.run(_let_go(server, edge, shut))
        back.cancel()
        edge.stop()
    assert (rest.replace(KEEP_ALIVE, b""), code) == (b"0\r\n\r\n", 1013)


async def _let_go(server: ServerProcess, edge: EdgeProcess, loss: Callable[[], None]) -> tuple[bytes, int]:
    """What an SSE and a WebSocket reader see from the loss of their owner on."""
    writer = Writer(server, "lost")
    await asyncio.to_thread(writer.append, 3)
    reader, sender = await asyncio.open_connection("127.0.0.1", edge.port)
    try:
        sender.write(b"GET /v1/stream/lost?offset=-1&live=sse HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b'"upToDate":true}\n')
        await reader.readuntil(b"\n\n\r\n")
        url = f"ws://127.0.0.1:{edge.port}/v1/stream/lost?offset=now&live=ws"
        async with connect(url, proxy=None) as socket:
            await socket.recv()
            await asyncio.to_thread(loss)
            async with asyncio.timeout(60):
                rest = await reader.readuntil(b"0\r\n\r\n")
                await socket.wait_closed()
    finally:
        sender.close()
    assert socket.close_code is not None
    return rest, socket.close_code


@pytest.mark.nightly
def test_e17_a_socket_that_is_silent_for_too_long_is_opened_anew(
    start_server: StartServer, tmp_path: Path
) -> None:
    """E-17: nothing is cut, and nothing comes through any more: not even the answer to a ping."""
    server = start_server()
    writer = Writer(server, "mute")
    hold = Hold("answer")
    with CuttingProxy(server.port) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url)
        edge.start()
        followers = [Follower(edge.port, "mute", mode) for mode in LIVE for _ in range(5)]

        def fall_silent() -> None:
            proxy.before = hold
            writer.append(5)

        def pass_new_ones() -> None:
            proxy.before = lambda _direction, _piece: None
            lost = 'tailrace_edge_reconnects_total{reason="lost"}'
            eventually(lambda: metrics(edge).get(lost, 0), bool)

        asyncio.run(_follow_over(writer, followers, fall_silent, pass_new_ones, 10))
        hold.let_go()
        edge.stop()
    assert all(follower.entries == writer.numbers() for follower in followers)


class Handshakes:
    """Sockets that an edge opens: how many have been asked for, and their answers once they may pass."""

    def __init__(self) -> None:
        self.asked = 0
        self.gate = threading.Event()

    def before(self, direction: Direction, piece: bytes) -> None:
        if direction == "answer" and piece.startswith(b"HTTP/1.1 101 "):
            assert self.gate.wait(60)

    def decide(self, direction: Direction, piece: bytes) -> bool:
        line = piece.partition(b"\r\n")[0]
        self.asked += direction == "request" and b"/many/" in line and b"live=ws" in line
        return False


def test_e17_many_channels_come_back_a_few_at_a_time(start_server: StartServer, tmp_path: Path) -> None:
    """E-17: as many handshakes as are allowed, and not one more until one of them is done."""
    server = start_server()
    writers = [Writer(server, f"many/{number}") for number in range(CHANNELS)]
    seen = Handshakes()
    with CuttingProxy(server.port) as proxy:
        edge = EdgeProcess(tmp_path / "cache", proxy.base_url)
        edge.start()
        followers = [Follower(edge.port, f"many/{number}", "sse") for number in range(CHANNELS)]

        def come_back() -> None:
            proxy.decide, proxy.before = seen.decide, seen.before
            proxy.cut_all()
            eventually(lambda: seen.asked, lambda asked: asked >= HANDSHAKES_MAX)

        async def watch() -> None:
            tasks = [asyncio.ensure_future(follower.run()) for follower in followers]
            await all_live(followers)
            await asyncio.to_thread(come_back)
            await asyncio.sleep(0.5)
            assert seen.asked == HANDSHAKES_MAX
            seen.gate.set()
            for writer in writers:
                await asyncio.to_thread(writer.append)
                await asyncio.to_thread(writer.close)
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)

        try:
            asyncio.run(watch())
        finally:
            seen.gate.set()
        edge.stop()
    assert seen.asked >= CHANNELS
    assert all(follower.entries == [0] for follower in followers)
    assert {follower.connections for follower in followers} == {1}
