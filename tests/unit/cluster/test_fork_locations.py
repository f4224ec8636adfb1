"""Where forks live: what a worker has noted about a name is known to it, however long the disk takes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest

from support.http_app import TestApp, on_loop, until
from support.workers import names_of
from tailrace.cluster.fork_locations import ForkLocation, ForkLocations
from tailrace.cluster.peers import Peers, Placement
from tailrace.common.clock import SYSTEM_CLOCK
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.http import Exchange, HttpServer
from tailrace.http.relay import PeerClient
from tailrace.log import commit_path
from tailrace.log.decide import CreateRequest
from tailrace.log.log import Log
from tailrace.log.transaction import ignore_reply

FORK = next(names_of(0, 2, "fork/"))
SOURCE = next(names_of(1, 2, "source/"))


class SourceApp(TestApp):
    """Another worker, which has every source."""

    __test__ = False

    def handle(self, exchange: Exchange) -> None:
        exchange.respond(200, b"", msgspec.json.encode(ForkLocation(1, exists=True)))


@asynccontextmanager
async def log_in(directory: Path) -> AsyncIterator[Log]:
    log = Log(directory, Limits(append_ms=1), SYSTEM_CLOCK, asyncio.get_running_loop())
    log.open()
    await log.committer.drain()
    yield log
    await log.close()


@asynccontextmanager
async def homes_of(log: Log, directory: Path) -> AsyncIterator[ForkLocations]:
    loop, path = asyncio.get_running_loop(), str(directory / "other")
    server = HttpServer(SourceApp(), Limits())
    await server.start_unix(path)
    peer = PeerClient(path, loop, 10_000, 1024)
    yield ForkLocations(log, Peers(0, Placement(2), {1: peer}, {}))
    peer.close()
    await server.close()


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No sync returns before it is told to."""
    going_on, sync = threading.Event(), os.fdatasync

    def held(descriptor: int) -> None:
        going_on.wait(60)
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", held)
        patch.setattr(commit_path, "STALL_CHECK_S", 0.001)
        try:
            yield going_on
        finally:
            going_on.set()


def test_a_note_that_took_too_long_is_known_when_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with log_in(tmp_path) as log, homes_of(log, tmp_path) as homes:
            moved: list[int] = []
            homes.notify_moves(lambda: moved.append(homes.location(FORK)))
            with slow_disk(monkeypatch) as going_on:
                with pytest.raises(TailraceError, match="outcome is unknown"):
                    await homes.place_fork(FORK, SOURCE)
                # Nobody makes a stream of this name here, which the note would hide later.
                assert homes.is_being_placed(FORK)
                with pytest.raises(TailraceError, match="not decided yet"):
                    await homes.await_placement(FORK)
                going_on.set()
                await until(lambda: not homes.is_being_placed(FORK))
            assert moved == [1]
            assert await homes.place_fork(FORK, SOURCE) == 1
            assert homes.is_elsewhere(FORK)

    on_loop(main)


def test_a_note_that_could_not_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "no")

    async def main() -> None:
        async with log_in(tmp_path) as log, homes_of(log, tmp_path) as homes:
            with monkeypatch.context() as patch:
                patch.setattr(os, "fdatasync", broken)
                with pytest.raises(TailraceError, match="cannot be written"):
                    await homes.place_fork(FORK, SOURCE)
            assert not homes.is_being_placed(FORK)
            assert homes.location(FORK) == 0

    on_loop(main)


def test_a_stream_that_is_here_is_here_whatever_is_noted(tmp_path: Path) -> None:
    async def main() -> None:
        async with log_in(tmp_path) as log, homes_of(log, tmp_path) as homes:
            assert await homes.place_fork(FORK, SOURCE) == 1
            log.create(CreateRequest(FORK, "text/plain"), ignore_reply, None)
            await log.committer.drain()
        async with log_in(tmp_path) as log, homes_of(log, tmp_path) as homes:
            assert homes.location(FORK) == 0
            assert not homes.is_elsewhere(FORK)
            assert homes.is_elsewhere(SOURCE)

    on_loop(main)
