"""Following a real server: live, across cut connections, across a killed process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.clients import OpenClient, name, open_client
from support.cutting_proxy import CuttingProxy, at_random
from support.server import ServerProcess
from tailrace.client import Client, ClientError, Page

__all__ = ["name", "open_client"]

JSON = "application/json"
WAIT_S_MAX = 60.0
MODES = pytest.mark.parametrize("mode", ["long-poll", "sse"])


class Reading:
    """A follower in a thread, and what it has got so far."""

    def __init__(self, pages: Any) -> None:
        self.entries: list[Any] = []
        self.pages: list[Page] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(pages,), daemon=True)
        self._thread.start()

    def _read(self, pages: Any) -> None:
        try:
            for page in pages:
                with self._changed:
                    self.pages.append(page)
                    self.entries.extend(page.entries)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.error = error
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        with self._changed:
            while not condition() and self.error is None:
                assert time.monotonic() < deadline, f"still waiting, with {self.entries}"
                # Pages wake this up; the position of a follower can also move without one.
                self._changed.wait(0.01)
        if self.error is not None:
            raise self.error

    def finish(self) -> list[Any]:
        self._thread.join(timeout=WAIT_S_MAX)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.entries


@pytest.fixture
def writer(server: ServerProcess) -> Iterator[Client]:
    with Client(server.base_url) as client:
        yield client


@MODES
def test_catch_up_then_live_until_closed(
    server: ServerProcess, open_client: OpenClient, writer: Client, name: str, mode: str
) -> None:
    stream = writer.stream(name, content_type=JSON)
    stream.create(body=[0, 1])
    reading = Reading(open_client(server.base_url).stream(name).follow(mode=mode))
    reading.wait_for(lambda: len(reading.entries) == 2)
    for number in range(2, 20):
        stream.append(number)
        reading.wait_for(lambda number=number: len(reading.entries) == number + 1)
    final = stream.append([20, 21], close=True)
    assert reading.finish() == list(range(22))
    assert reading.pages[-1].next_offset == final.next_offset


@MODES
def test_now(server: ServerProcess, open_client: OpenClient, writer: Client, name: str, mode: str) -> None:
    stream = writer.stream(name, content_type=JSON)
    stream.create(body=["old"])
    follow = open_client(server.base_url).stream(name).follow("now", mode=mode)
    stream.append("also old")
    reading = Reading(follow)
    # The position is taken with the first request; this is how a test can tell that it was sent.
    reading.wait_for(lambda: follow.offset != "now")
    stream.append("new", close=True)
    assert reading.finish() == ["new"]


@MODES
def test_resume_from_a_stored_offset(
    server: ServerProcess, open_client: OpenClient, writer: Client, name: str, mode: str
) -> None:
    stream = writer.stream(name, content_type=JSON)
    stream.create(body=[1])
    follow = open_client(server.base_url).stream(name).follow(mode=mode)
    page = follow.next_page()
    follow.close()
    stream.append(2, close=True)
    again = open_client(server.base_url).stream(name).follow(page.next_offset, mode=mode)
    assert [entry for page in again for entry in page.entries] == [2]


@MODES
def test_keys_only(
    server: ServerProcess, open_client: OpenClient, writer: Client, name: str, mode: str
) -> None:
    stream = writer.stream(name, content_type=JSON)
    stream.create()
    stream.append(1, key="a")
    reading = Reading(open_client(server.base_url).stream(name).follow(mode=mode, key="a"))
    reading.wait_for(lambda: reading.entries == [1])
    stream.append(2, key="b")
    stream.append(3, key="a")
    stream.append(4, close=True)
    assert reading.finish() == [1, 3]


@MODES
@pytest.mark.parametrize(
    ("content_type", "pieces"),
    [
        ("application/octet-stream", [b"\x00\xff\r\n\r", b"", bytes(range(256))]),
        ("text/plain", [b"line\n\nevent: control\n", b" indented\n", "grüße\n".encode()]),
    ],
)
def test_bytes_arrive_as_they_were(
    server: ServerProcess,
    open_client: OpenClient,
    writer: Client,
    name: str,
    mode: str,
    content_type: str,
    pieces: list[bytes],
) -> None:
    stream = writer.stream(name, content_type=content_type)
    stream.create()
    reading = Reading(open_client(server.base_url).stream(name).follow(mode=mode))
    sent = b""
    for piece in filter(None, pieces):
        stream.append(piece)
        sent += piece
        reading.wait_for(lambda sent=sent: b"".join(reading.entries) == sent)
    stream.close()
    assert b"".join(reading.finish()) == sent


@MODES
def test_a_stream_that_gets_its_type_while_followed(
    server: ServerProcess, open_client: OpenClient, writer: Client, name: str, mode: str
) -> None:
    stream = writer.stream(name)
    stream.create()
    follow = open_client(server.base_url).stream(name).follow(mode=mode)
    reading = Reading(follow)
    reading.wait_for(lambda: follow.up_to_date)
    stream.append({"typed": True})
    reading.wait_for(lambda: len(reading.entries) == 1)
    stream.append([2], close=True)
    assert reading.finish() == [{"typed": True}, 2]


@MODES
def test_a_deleted_stream_is_reported(
    server: ServerProcess, open_client: OpenClient, writer: Client, name: str, mode: str
) -> None:
    stream = writer.stream(name, content_type=JSON)
    stream.create(body=[1])
    reading = Reading(open_client(server.base_url).stream(name).follow(mode=mode))
    reading.wait_for(lambda: reading.entries == [1])
    stream.delete()
    with pytest.raises(ClientError) as caught:
        reading.finish()
    assert caught.value.status == 404


@MODES
def test_a_soft_deleted_stream_is_reported(
    server: ServerProcess, open_client: OpenClient, writer: Client, name: str, mode: str
) -> None:
    stream = writer.stream(name, content_type=JSON)
    stream.create(body=[1])
    stream.fork(f"{name}-fork")
    stream.delete()
    with pytest.raises(ClientError) as caught:
        list(open_client(server.base_url).stream(name).follow(mode=mode))
    assert (caught.value.status, caught.value.code) == (410, "stream_gone")


@MODES
def test_cut_connections_lose_and_repeat_nothing(
    server: ServerProcess, open_client: OpenClient, writer: Client, name: str, mode: str
) -> None:
    stream = writer.stream(name, content_type=JSON)
    stream.create()
    with CuttingProxy(server.port, at_random(seed=7, share=0.1)) as proxy:
        reading = Reading(open_client(proxy.base_url).stream(name).follow(mode=mode))
        for number in range(200):
            stream.append(number)
            if number % 10 == 0:
                # Keep the reader live: a reader far behind would take everything with one plain read.
                reading.wait_for(lambda number=number: len(reading.entries) > number)
            if number % 25 == 0:
                proxy.cut_all()
        stream.close()
        assert reading.finish() == list(range(200))
        assert proxy.cuts > 0


@MODES
def test_a_killed_server_is_waited_for(
    start_server: Callable[..., ServerProcess], open_client: OpenClient, name: str, mode: str
) -> None:
    server = start_server()
    with Client(server.base_url) as writer:
        stream = writer.stream(name, content_type=JSON)
        stream.create(body=[1])
        reading = Reading(open_client(server.base_url).stream(name).follow(mode=mode))
        reading.wait_for(lambda: reading.entries == [1])
        server.restart(kill=True)
        stream.append(2)
        reading.wait_for(lambda: reading.entries == [1, 2])
        server.restart()
        stream.append(3, close=True)
        assert reading.finish() == [1, 2, 3]


@MODES
def test_leaving_the_loop_closes_the_connection(
    server: ServerProcess, open_client: OpenClient, writer: Client, name: str, mode: str
) -> None:
    stream = writer.stream(name, content_type=JSON)
    stream.create(body=[1])
    for page in open_client(server.base_url).stream(name).follow(mode=mode):
        assert page.entries == [1]
        break
    with open_client(server.base_url).stream(name).follow(mode=mode) as follow:
        assert follow.next_page().entries == [1]


@MODES
def test_rotation_and_idle_polls_are_not_seen(
    start_server: Callable[..., ServerProcess], open_client: OpenClient, name: str, mode: str
) -> None:
    server = start_server("--sse-rotation-ms", "100", "--long-poll-default-ms", "50")
    with Client(server.base_url) as writer, CuttingProxy(server.port) as proxy:
        stream = writer.stream(name, content_type=JSON)
        stream.create()
        reading = Reading(open_client(proxy.base_url).stream(name).follow(mode=mode))
        for number in range(2):
            before = proxy.requests
            stream.append(number)
            reading.wait_for(lambda before=before: proxy.requests > before + 3)
        stream.close()
        assert reading.finish() == list(range(2))
