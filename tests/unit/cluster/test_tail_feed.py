"""What the first worker hears of streams that another owns: all of it, also after the other was away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.http_app import TestApp, on_loop, until
from tailrace.cluster.subscriptions import (
    FOLLOW_PATH,
    INTEREST_PATH,
    PAGE_COUNT,
    SILENCE_S_MAX,
    ClusterTails,
    PeerTails,
    TailFeed,
)
from tailrace.cluster.worker import peer_limits
from tailrace.common.clock import SYSTEM_CLOCK
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.http import Exchange, HttpServer
from tailrace.http.relay import PeerClient
from tailrace.log.decide import AppendRequest, CreateRequest
from tailrace.log.log import Log
from tailrace.log.transaction import ignore_reply


class FeedApp(TestApp):
    """The questions of the first worker."""

    __test__ = False

    def __init__(self, feed: TailFeed) -> None:
        super().__init__()
        self.feed = feed

    def handle(self, exchange: Exchange) -> None:
        if exchange.path == FOLLOW_PATH.encode():
            self.feed.follow(exchange)
        else:
            assert exchange.path == INTEREST_PATH.encode()
            self.feed.interest(exchange)


class Room:
    """A log, its feed on a socket, and a mirror of it."""

    def __init__(self, directory: Path) -> None:
        loop = asyncio.get_running_loop()
        self.log = Log(directory, Limits(), SYSTEM_CLOCK, loop)
        self.log.open()
        self.feed = TailFeed(self.log, loop, lambda _request, _stream: None)
        self.path = str(directory / "socket")
        self.peer = PeerClient(self.path, loop, 10_000, 1024)
        self.heard: list[tuple[str, ...]] = []
        self.wanted: tuple[list[str], list[str]] = ([], [])
        self.mirrors = ClusterTails(
            [self.peer],
            lambda: self.wanted,
            lambda name: self.heard.append(("created", name)),
            lambda name, _offset: self.heard.append(("moved", name)),
            lambda name: self.heard.append(("gone", name)),
        )
        self._server: HttpServer | None = None

    async def open(self) -> None:
        # What clients may send is less than what workers have to tell each other.
        limits = peer_limits(Limits(append_body_bytes=1024))
        self._server = HttpServer(FeedApp(self.feed), limits)
        await self._server.start_unix(self.path)

    async def shut(self) -> None:
        assert self._server is not None
        await self._server.close()

    async def subscribe(self, *patterns: str) -> None:
        self.wanted = ([*self.wanted[0], *patterns], [])
        await self.mirrors.subscribe(patterns, [])

    async def create(self, name: str, entries: int = 0) -> None:
        initial = AppendRequest(b"x", "text/plain") if entries else None
        self.log.create(CreateRequest(name, "text/plain", initial=initial), ignore_reply, None)
        await self.log.committer.drain()

    async def append(self, name: str) -> None:
        self.log.append(self.log.existing(name), AppendRequest(b"y", "text/plain"), ignore_reply, None)
        await self.log.committer.drain()

    async def remove(self, name: str) -> None:
        self.log.remove(self.log.existing(name), "deleted", ignore_reply, None)
        await self.log.committer.drain()


@asynccontextmanager
async def room() -> AsyncIterator[Room]:
    with TemporaryDirectory() as directory:
        opened = Room(Path(directory))
        opened.mirrors.start()
        try:
            yield opened
        finally:
            await opened.mirrors.stop()
            opened.feed.end()
            opened.peer.close()
            await opened.log.close()


def test_what_there_is_comes_first_and_then_every_change() -> None:
    async def main() -> None:
        async with room() as here:
            await here.open()
            for number in range(1200):
                await here.create(f"a/{number}", entries=number % 2)
            await here.create("b/0")
            await here.subscribe("a/*")
            assert len(list(here.mirrors.scan(""))) == 1200
            assert here.mirrors.tail("b/0") is None
            before = here.mirrors.tail("a/1")
            await here.append("a/1")
            await here.create("a/new")
            await here.create("b/new")
            await here.remove("a/2")
            await here.mirrors.synchronise()
            assert here.heard == [("moved", "a/1"), ("created", "a/new"), ("gone", "a/2")]
            assert here.mirrors.tail("a/1") != before
            assert here.mirrors.tail("a/2") is None
            await here.shut()

    on_loop(main)


def test_what_happened_while_nobody_listened_is_found() -> None:
    async def main() -> None:
        async with room() as here:
            await here.open()
            for name in ("a/stays", "a/moves", "a/goes"):
                await here.create(name)
            await here.subscribe("a/*")
            await here.shut()
            here.feed.end()
            await here.append("a/moves")
            await here.remove("a/goes")
            await here.create("a/comes")
            assert here.mirrors.tail("a/goes") is not None
            await here.open()
            await until(lambda: here.mirrors.tail("a/comes") is not None)
            assert sorted(here.heard) == [("created", "a/comes"), ("gone", "a/goes"), ("moved", "a/moves")]
            await here.shut()

    on_loop(main)


def test_any_number_of_names_can_be_asked_for() -> None:
    async def main() -> None:
        async with room() as here:
            names = [f"named/{number}" for number in range(2 * PAGE_COUNT + 1)]
            here.wanted = ([f"a/{number}/*" for number in range(PAGE_COUNT + 1)], names)
            for name in (names[0], names[-1], f"a/{PAGE_COUNT}/last", "b"):
                await here.create(name)
            await here.open()
            await here.mirrors.complete()
            assert {name for name, _ in here.mirrors.scan("")} == {
                *(names[0], names[-1], f"a/{PAGE_COUNT}/last")
            }
            await here.shut()

    on_loop(main)


def test_only_a_worker_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come, the mark only after many waits: that is no silence."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        mirrors = ClusterTails([], lambda: ([], []), nothing, nothing, nothing)
        one = PeerTails(PeerClient("nobody", loop, 1, 1), mirrors)
        told: asyncio.Future[bool] = loop.create_future()
        lines = 20

        async def wait(_: object, **how: float) -> None:
            nonlocal lines
            assert how == {"timeout": SILENCE_S_MAX}
            if lines:
                lines -= 1
                one._on_line(b'["found","a","1"]')
            else:
                told.set_result(True)

        monkeypatch.setattr(asyncio, "wait", wait)
        assert await one._await_mark(told)
        told, lines = loop.create_future(), 3
        silent: asyncio.Future[bool] = loop.create_future()
        assert not await one._await_mark(silent)

    on_loop(main)


def nothing(*_: str) -> None:
    return


def test_whoever_asks_before_a_worker_is_there_waits_for_it() -> None:
    async def main() -> None:
        async with room() as here:
            await here.create("a/1")
            asking = asyncio.create_task(here.subscribe("a/*"))
            await asyncio.sleep(0)
            await here.open()
            await asking
            assert here.mirrors.tail("a/1") is not None
            await here.shut()
            with pytest.raises(TailraceError):
                await here.mirrors._peer_tails[0].mark()

    on_loop(main)
