"""Requests passed on to another server over a unix socket: clients cannot tell, and nothing piles up."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import pytest

from support.http_app import HOST, Site, TestApp, chunked, get, on_loop, post, site, until
from tailrace.cluster.proxy import PeerApp, ProxyApp
from tailrace.common.limits import Limits
from tailrace.http import Exchange, HttpServer, relay
from tailrace.http.handover import HandoverReceiver, HandoverSender
from tailrace.http.relay import PeerClient, restore_relayed_request

UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
PAGE_BYTES = 200_000
BODIES_BYTES_MAX = 1_000_000


class OwnerApp(TestApp):
    """Answers what was passed on, as it was asked."""

    __test__ = False

    def handle(self, exchange: Exchange) -> None:
        restore_relayed_request(exchange)
        if exchange.path == b"/no-length":
            exchange.respond(200, b"X-Length: none\r\n")
        elif exchange.path == b"/page":
            exchange.respond(200, b"", b"x" * PAGE_BYTES)
        else:
            super().handle(exchange)


class DoorApp(TestApp):
    """Passes everything on."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        self.pass_on: Callable[[Exchange], None] = lambda _: None

    def handle(self, exchange: Exchange) -> None:
        self.pass_on(exchange)


class Pair:
    """A door that clients know, and the owner behind it."""

    def __init__(self, door: Site, owner: TestApp, server: HttpServer, peer: PeerClient) -> None:
        self.door = door
        self.owner = owner
        self.server = server
        self.peer = peer


@asynccontextmanager
async def pair(**limits: int) -> AsyncIterator[Pair]:
    app, owner = DoorApp(), OwnerApp()
    server = HttpServer(owner, Limits(**limits))
    loop = asyncio.get_running_loop()
    with TemporaryDirectory() as directory:
        path = str(Path(directory) / "owner")
        await server.start_unix(path)
        peer = PeerClient(path, loop, 60_000, BODIES_BYTES_MAX)
        app.pass_on = peer.relay
        async with site(app, **limits) as door:
            yield Pair(door, owner, server, peer)
        peer.close()
        await server.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        get("/plain?a=b&c"),
        get("/plain", "X-One: 1", "X-Two: 2", "X-One: 3"),
        post("/plain", b"body" * 50_000),
        chunked("/plain", b"one", b"two"),
        get("/empty"),
        get("/refuse"),
        get("/big"),
        b"GET /plain HTTP/1.0\r\n\r\n",
        get("/plain", "Connection: close"),
    ],
    ids=["query", "headers", "large", "chunked", "empty", "refusal", "big", "legacy", "close"],
)
def test_the_answer_is_that_of_the_owner(request_bytes: bytes) -> None:
    async def main() -> None:
        async with pair() as both, site(OwnerApp()) as alone:
            expected = await alone.exchange(request_bytes)
            answer = await both.door.exchange(request_bytes)
            assert answer.status == expected.status
            drop = {"date"}
            assert {k: v for k, v in answer.headers.items() if k not in drop | {"content-length"}} == {
                k: v for k, v in expected.headers.items() if k not in drop | {"content-length"}
            }
            if answer.headers.get("content-type") == "application/json" and answer.status == 200:
                seen, wanted = answer.json, expected.json
                for said in (seen, wanted):
                    for name in [name for name in said["headers"] if name.startswith("tailrace-")]:
                        del said["headers"][name]
                    for name in ("content-length", "transfer-encoding"):
                        said["headers"].pop(name, None)
                assert seen == wanted
            else:
                assert answer.body == expected.body

    on_loop(main)


def test_one_connection_carries_many_requests_in_order() -> None:
    async def main() -> None:
        async with pair() as both:
            client = await both.door.connect()
            await client.send(b"".join(post(f"/echo/{n}", b"%d" % n) for n in range(40)))
            for number in range(40):
                assert (await client.answer()).json["body"] == str(number)
            await client.send(b"HEAD /plain HTTP/1.1\r\n" + HOST + b"\r\n" + get("/after"))
            assert (await client.answer(is_head=True)).status == 200
            assert (await client.answer()).json["path"] == "/after"
            for _ in range(2):
                await client.send(b"HEAD /no-length HTTP/1.1\r\n" + HOST + b"\r\n")
                assert "content-length" not in (await client.answer(is_head=True)).headers
            await client.send(b"HEAD /no-length HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n")
            assert (await client.answer(is_head=True)).headers["connection"] == "close"
            assert await client.rest() == b""
            await until(lambda: both.server.connections_open == 0)
            client = await both.door.connect()
            await client.send(get("/again"))
            await client.answer()
            assert both.server.connections_open == 1

    on_loop(main)


def test_what_only_workers_may_say_is_not_taken_from_clients() -> None:
    async def main() -> None:
        async with pair() as both:
            answer = await both.door.exchange(get("/x", "Tailrace-Peer: 9.9.9.9:1", "Tailrace-Alone: 1"))
            assert answer.json["headers"]["tailrace-peer"].startswith("127.0.0.1:")
            assert "tailrace-alone" not in answer.json["headers"]

    on_loop(main)


def test_streams_and_sockets_are_tunnelled_both_ways() -> None:
    async def main() -> None:
        async with pair() as both:
            client = await both.door.connect()
            await client.send(get("/stream"))
            assert (await client.head())[0] == 200
            await until(lambda: bool(both.owner.outlets))
            for number in range(3):
                both.owner.outlets[0].write(b"%d" % number)
                assert await client.chunk() == b"%d" % number
            both.owner.outlets[0].end()
            assert await client.chunk() == b""
            await client.send(get("/ws", *UPGRADE))
            assert (await client.head())[0] == 101
            mask = b"\x00\x00\x00\x00"
            await client.send(b"\x81\x82" + mask + b"hi")
            assert await client.reader.readexactly(4) == b"\x81\x02hi"
            await client.close()
            await until(lambda: bool(both.owner.sockets[0].closed))
            await until(lambda: both.door.server.connections_open == 0)

    on_loop(main)


def test_a_client_that_leaves_is_gone_for_the_owner_too() -> None:
    async def main() -> None:
        async with pair() as both:
            client = await both.door.connect()
            await client.send(get("/hold/wait?live=long-poll"))
            await until(lambda: bool(both.owner.held))
            await client.close()
            await until(lambda: both.owner.gone == [b"/hold/wait"])
            client = await both.door.connect()
            await client.send(get("/stream"))
            await until(lambda: bool(both.owner.outlets))
            await client.head()
            await client.close()
            await until(lambda: both.owner.outlets[0].closed)

    on_loop(main)


def test_a_slow_client_holds_the_owner_back() -> None:
    async def main() -> None:
        async with pair() as both:
            client = await both.door.connect(read_limit=1024)
            await client.send(get("/stream"))
            await until(lambda: bool(both.owner.outlets))
            outlet, piece = both.owner.outlets[0], b"x" * 65_536
            for _ in range(400):
                outlet.write(piece)
            for _ in range(50):
                await asyncio.sleep(0)
            connections = tuple(both.door.server._swept)
            assert all(one.transport.get_write_buffer_size() < 4 * 2**20 for one in connections)
            assert outlet.unsent_bytes > 8 * 2**20
            outlet.end()
            await client.head()
            assert sum([len(chunk) async for chunk in client.chunks()]) == 400 * len(piece)

    on_loop(main)


def test_an_owner_that_is_gone_is_told_from_one_that_may_have_done_it() -> None:
    async def main() -> None:
        async with pair() as both:
            client = await both.door.connect()
            for method in ("GET", "POST"):
                await client.send(
                    f"{method} /hold HTTP/1.1\r\n".encode() + HOST + b"Content-Length: 0\r\n\r\n"
                )
                await until(lambda: bool(both.owner.held))
                both.owner.held.pop().connection.transport.abort()
                if method == "GET":
                    answer = await client.answer()
                    assert (answer.status, answer.code) == (503, "unavailable")
                else:
                    assert await client.rest() == b""
            await both.server.close()
            answer = await both.door.exchange(post("/x", b"1"))
            assert (answer.status, answer.code) == (503, "unavailable")

    on_loop(main)


def test_an_event_source_whose_owner_is_gone_is_left_to_reconnect() -> None:
    """It would give up for good if it were answered with 503."""

    async def main() -> None:
        async with pair() as both:
            client = await both.door.connect()
            await client.send(get("/hold", "Accept: text/event-stream"))
            await until(lambda: bool(both.owner.held))
            both.owner.held.pop().connection.transport.abort()
            assert await client.rest() == b""
            await both.server.close()
            client = await both.door.connect()
            await client.send(get("/x", "Accept: text/event-stream"))
            assert await client.rest() == b""
            assert (await both.door.exchange(get("/x", "Accept: */*"))).status == 503

    on_loop(main)


def test_a_connection_moves_with_its_request_and_stays() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        app, handover = DoorApp(), HandoverSender()
        with TemporaryDirectory() as directory:
            path = f"{directory}/door"
            async with site() as owner, site(app) as door:
                adoption = HandoverReceiver(owner.server, path, loop)
                refused: list[bytes] = []

                def move(exchange: Exchange) -> None:
                    def give() -> None:
                        if not handover.hand_over(exchange, path):
                            refused.append(exchange.path)
                            exchange.respond(200)

                    loop.call_soon(give)

                app.pass_on = move
                client = await door.connect()
                for number in range(3):
                    await client.send(post(f"/{number}", b"%d" % number, "X-Kept: yes"))
                    answer = await client.answer()
                    assert (answer.json["body"], answer.json["headers"]["x-kept"]) == (str(number), "yes")
                assert owner.app.seen == [b"/0", b"/1", b"/2"]
                await until(lambda: door.server.connections_open == 0)
                client = await door.connect()
                await client.send(post("/a", b"1") + post("/b", b"2"))
                assert [(await client.answer()).status for _ in range(2)] == [200, 200]
                assert refused[0] == b"/a", "what follows a request must not be lost"
                client = await door.connect()
                await client.send(get("/ws", *UPGRADE))
                assert (await client.head())[0] == 101
                assert len(owner.app.sockets) == 1
                adoption.close()
                client = await door.connect()
                await client.send(get("/nobody"))
                assert (await client.answer()).status == 200
                assert refused[-1] == b"/nobody"
        handover.close()

    on_loop(main)


def test_a_slow_client_leaves_the_way_free_for_the_next_one() -> None:
    """The end of an answer may wait for its client; the connection it came over does not."""

    async def main() -> None:
        async with pair(live_unsent_bytes=1024) as both:
            client = await both.door.connect(read_limit=1024)
            await client.send(get("/plain"))
            await client.answer()
            (connection,) = both.door.server._swept
            taken: socket.socket = connection.transport.get_extra_info("socket")
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            for number in range(3):
                await client.send(get("/page"))
                assert len((await client.answer()).body) == PAGE_BYTES
                answer = await both.door.exchange(get(f"/after/{number}"))
                assert answer.json["path"] == f"/after/{number}"
            assert both.server.connections_total == 1, "there was one way, and it was used again"

    on_loop(main)


class ShortWay:
    """A front that answers everything itself."""

    def __init__(self, handle: Callable[[Exchange], None]) -> None:
        self._handle = handle

    def handler_for_relayed(self, exchange: Exchange) -> Callable[[Exchange], None]:
        return self._handle


def test_a_request_whose_head_is_known_is_its_own_client_s() -> None:
    """Between workers the requests of many clients follow each other on one connection."""

    async def main() -> None:
        peers: list[str] = []

        def answer(exchange: Exchange) -> None:
            peers.append(exchange.peer)
            exchange.respond(204)

        app = TestApp()
        inner = PeerApp(cast("ProxyApp", ShortWay(answer)), app, {})
        app.handle = lambda exchange: inner.handler_for(exchange)(exchange)
        async with site(app) as here:
            client = await here.connect()
            for number in range(3):
                await client.send(post("/v1/stream/a", b"1", f"tailrace-peer: 10.0.0.{number}:80"))
                assert (await client.answer()).status == 204
        assert peers == [f"10.0.0.{number}:80" for number in range(3)]

    on_loop(main)


def test_what_waits_for_an_owner_is_bounded() -> None:
    async def main() -> None:
        async with pair() as both:
            clients = [await both.door.connect() for _ in range(5)]
            body = b"x" * (BODIES_BYTES_MAX // 4)
            for client in clients[:4]:
                await client.send(post("/hold", body))
            await until(lambda: len(both.owner.held) == 4)
            await clients[4].send(post("/hold", body))
            refused = await clients[4].answer()
            assert (refused.status, refused.code) == (429, "overloaded")
            await clients[4].send(get("/plain"))
            assert (await clients[4].answer()).status == 200, "what has no body is passed on"
            await clients[0].close()
            both.owner.held[1].connection.transport.abort()
            for held in (both.owner.held[0], *both.owner.held[2:]):
                held.respond(200)
            await until(lambda: both.peer.body_bytes == 0)
            await clients[4].send(post("/plain", body))
            assert (await clients[4].answer()).status == 200

    on_loop(main)


def test_a_question_that_is_given_up_leaves_no_connection() -> None:
    async def main() -> None:
        async with pair() as both:
            asking = asyncio.create_task(both.peer.ask("GET", "/hold/wait"))
            await until(lambda: bool(both.owner.held))
            asking.cancel()
            await until(lambda: both.owner.gone == [b"/hold/wait"])

    on_loop(main)


def test_what_may_wait_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pair() as both:
            monkeypatch.setattr(relay, "GRACE_S", 0.0)
            hasty = PeerClient(both.peer.path, asyncio.get_running_loop(), 1, BODIES_BYTES_MAX)
            assert isinstance(both.door.app, DoorApp)
            both.door.app.pass_on = hasty.relay
            refused = await both.door.exchange(post("/hold", b"{}"))
            assert (refused.status, refused.code) == (408, "append_timeout")
            for waits_s, path in ((60.0, "/hold"), (60.0, "/hold/wait"), (inf, "/hold")):
                both.door.app.pass_on = partial(hasty.relay, hops=1, waits_s=waits_s)
                both.owner.held.clear()
                client = await both.door.connect()
                await client.send(post(path, b"{}"))
                await until(lambda: bool(both.owner.held))
                both.door.server.sweep(asyncio.get_running_loop().time() + 30)
                if path == "/hold":
                    both.owner.held[0].respond(200)
                    assert (await client.answer()).status == 200
                else:
                    await client.close()
                    await until(lambda: both.owner.gone == [b"/hold/wait"])
            hasty.close()

    on_loop(main)
