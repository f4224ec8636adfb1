"""Followers whose socket does not keep up: they fall behind, and nothing but their own pace holds them up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from support.manifests import segment
from tailrace import __version__
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.log.model import Stream
from tailrace.log.records import Sealed, Trim
from tailrace.routing.context import Context
from tailrace.server.live import PAGES_PER_SLICE, Follower, LiveReaders, PageScheduler

TEXT = "text/plain"


class Socket:
    """A connection whose buffer the test fills and empties."""

    form = "sse-text"

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.unsent_bytes = 0
        self.ended_with: int | None = None

    def encode(
        self, payload: bytes | None, offset: str, cursor: str, up_to_date: bool, closed: bool
    ) -> bytes:
        return (payload or b"-").decode().encode() + (b"!" if closed else b"")

    def send(self, encoded: bytes) -> None:
        self.sent.append(encoded.decode())

    def offer(self, encoded: bytes, unsent_bytes_max: int) -> bool:
        if self.unsent_bytes > unsent_bytes_max:
            return False
        self.send(encoded)
        return True

    def keep_alive(self) -> None:
        self.sent.append(":")

    def end(self, code: int) -> None:
        self.ended_with = code


class Scene:
    """One stream with a slow and a quick follower."""

    def __init__(self, directory: Path) -> None:
        self.log = LogHarness(directory, Limits())
        settings = Settings()
        context = Context(
            settings, self.log.log, self.log.clock, self.log.loop, ServerMetrics(__version__), "id"
        )
        self.live = LiveReaders(context)
        self.log.create("s", TEXT, (None, None), Append([], None), None)
        self.log.settle()
        stream = self.log.find("s")
        assert stream is not None
        self.stream: Stream = stream
        self.slow, self.quick = Socket(), Socket()
        self.slow_follower = self.follow(self.slow)
        self.quick_follower = self.follow(self.quick)

    def follow(self, socket: Socket, key: str = "") -> Follower:
        follower = Follower(self.live, self.stream, self.stream.visible, key, None, 60.0)
        self.live.add(follower)

        async def start() -> None:
            follower.start(socket)

        self.log.run(start())
        return follower

    def append(self, body: bytes, *, closes: bool = False, key: bytes | None = None) -> None:
        self.log.append("s", Append([body], TEXT, closes=closes, key=key))
        self.log.settle()

    def drain(self) -> None:
        self.slow.unsent_bytes = 0

        async def drained() -> None:
            self.slow_follower.on_drain()

        self.log.run(drained())


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.quick_follower.gone()
    scene.slow_follower.gone()
    scene.log.close()


def test_a_demoted_follower_goes_on_from_where_it_was(scene: Scene) -> None:
    scene.append(b"a")
    scene.slow.unsent_bytes = 2**30
    scene.append(b"b")
    scene.append(b"c")
    assert scene.quick.sent == ["-", "a", "b", "c"]
    assert scene.slow.sent == ["-", "a"]
    assert scene.live.demoted
    scene.drain()
    assert scene.slow.sent == ["-", "a", "bc"]


def test_a_step_that_others_took_long_ago_is_not_all_there_is(scene: Scene) -> None:
    scene.slow.unsent_bytes = 2**30
    scene.append(b"a")
    scene.quick_follower.gone()
    scene.append(b"b")
    scene.drain()
    assert "".join(scene.slow.sent) == "-ab"


def test_a_follower_that_retention_has_overtaken_is_sent_away_to_be_told(scene: Scene) -> None:
    scene.append(b"a")
    scene.slow.unsent_bytes = 2**30
    scene.append(b"b")
    scene.append(b"c")
    log, number = scene.log.log, scene.stream.number
    sealed = Sealed(number, 1, 0, [segment(1, 2), segment(3, 3)], [b"", b""])
    for op in (sealed, Trim(number, 2)):
        scene.log.call(log.record_objects, op)
        scene.log.settle()
    scene.append(b"d")
    scene.drain()
    assert scene.slow.sent == ["-", "a"]
    assert scene.slow.ended_with == 1001  # its way back leads to a 410
    assert scene.quick.sent == ["-", "a", "b", "c", "d"]
    assert scene.quick.ended_with is None


def test_a_follower_that_drains_after_the_end_learns_of_it(scene: Scene) -> None:
    scene.slow.unsent_bytes = 2**30
    scene.append(b"a")
    scene.quick_follower.gone()
    scene.append(b"end", closes=True)
    scene.drain()
    assert scene.slow.sent[-1].endswith("!")
    assert scene.slow.ended_with == 1000


def test_a_follower_that_drains_after_a_deletion_ends(scene: Scene) -> None:
    scene.slow.unsent_bytes = 2**30
    scene.append(b"a")
    scene.log.delete("s")
    scene.log.settle()
    scene.drain()
    assert scene.slow.ended_with == 4404


def test_nothing_that_matches_is_said_at_once(scene: Scene) -> None:
    scene.append(b"a", key=b"other")
    socket = Socket()
    follower = Follower(scene.live, scene.stream, 0, "mine", None, 60.0)
    scene.live.add(follower)

    async def start() -> None:
        follower.start(socket)

    scene.log.run(start())
    assert socket.sent == ["-"]
    scene.append(b"b", key=b"other")
    assert socket.sent == ["-"]
    scene.append(b"c", key=b"mine")
    assert socket.sent == ["-", "c"]
    follower.gone()


class BrokenSocket(Socket):
    def send(self, encoded: bytes) -> None:
        if encoded != b"-":
            raise ValueError("a bug")


def test_a_follower_that_fails_keeps_nobody_else_from_being_told(scene: Scene) -> None:
    broken = BrokenSocket()
    scene.quick_follower.gone()
    follower = scene.follow(broken)
    last = scene.follow(scene.quick)
    scene.quick.sent.clear()
    scene.append(b"a")
    scene.append(b"b")
    assert scene.quick.sent == ["a", "b"]
    follower.gone()
    last.gone()


def test_a_page_that_cannot_be_sent_does_not_stop_the_pages_queued_behind_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[int] = []

    def fail() -> None:
        raise ValueError("cannot send")

    async def send_all() -> None:
        pages = PageScheduler(asyncio.get_running_loop())
        pages.schedule(fail)
        for number in range(3 * PAGES_PER_SLICE):
            pages.schedule(partial(sent.append, number))
        async with asyncio.timeout(5):
            await pages.wait()

    asyncio.run(send_all())
    assert sent == list(range(3 * PAGES_PER_SLICE))
    assert [record.message for record in caplog.records] == ["live reader failed"]
