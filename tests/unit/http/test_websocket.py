"""WebSocket connections over real sockets, with the `websockets` client and with raw bytes."""

from __future__ import annotations

import base64
import logging

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedError

from support.http_app import EchoHandler, RawClient, Site, TestApp, get, on_loop, site, until
from support.ws_wire import frame
from tailrace.http import encode_text
from tailrace.protocol import websocket_frames as ws

KEY = base64.b64encode(b"0123456789abcdef").decode()
UPGRADE = ("Connection: keep-alive, Upgrade", "Upgrade: WebSocket", "Sec-WebSocket-Version: 13")
HANDSHAKE = get("/ws", *UPGRADE, f"Sec-WebSocket-Key: {KEY}")


async def _open(here: Site, extra: bytes = b"") -> tuple[RawClient, EchoHandler]:
    client = await here.connect()
    await client.send(HANDSHAKE + extra)
    status, headers = await client.head()
    assert (status, headers["upgrade"]) == (101, "websocket")
    assert headers["x-common"] == "1"
    return client, here.app.sockets[-1]


async def _frame(client: RawClient) -> tuple[int, bytes]:
    """One server frame of at most 65535 bytes."""
    first, size = await client.reader.readexactly(2)
    if size == 126:
        size = int.from_bytes(await client.reader.readexactly(2), "big")
    return first & 0x0F, await client.reader.readexactly(size)


@pytest.mark.parametrize("deflate", [False, True])
def test_a_real_client(deflate: bool) -> None:
    async def main() -> None:
        app = TestApp()
        app.deflate = deflate
        async with site(app) as here:
            async with connect(
                f"ws://127.0.0.1:{here.port}/ws", compression="deflate", max_size=None, proxy=None
            ) as client:
                assert bool(client.protocol.extensions) is deflate
                for message in ("hello", "größer " * 1000, b"\x00\xff" * 50_000, "", b""):
                    await client.send(message)
                    assert await client.recv() == message
                await client.send(["frag", "men", "ts"])
                assert await client.recv() == "fragments"
                await (await client.ping(b"are you there"))
            await until(lambda: here.app.sockets[0].closed == [(1000, "")])
            await until(lambda: here.server.connections_open == 0)

    on_loop(main)


def test_frames_right_behind_the_handshake() -> None:
    async def main() -> None:
        async with site() as here:
            client, _ = await _open(here, frame(ws.TEXT, b"eager") + frame(ws.BINARY, b"\x01"))
            assert await _frame(client) == (ws.TEXT, b"eager")
            assert await _frame(client) == (ws.BINARY, b"\x01")

    on_loop(main)


def test_an_upgrade_decided_later_keeps_the_bytes_that_came_meanwhile() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(HANDSHAKE.replace(b"/ws", b"/hold") + frame(ws.TEXT, b"early"))
            await until(lambda: len(here.app.held) == 1)
            handler = EchoHandler()
            handler.connection = here.app.held[0].upgrade_websocket(handler, subprotocol=b"signal-hub")
            _, headers = await client.head()
            assert headers["sec-websocket-protocol"] == "signal-hub"
            assert await _frame(client) == (ws.TEXT, b"early")
            # The other way: an ordinary answer, and the bytes are the next request.
            client = await here.connect()
            await client.send(HANDSHAKE.replace(b"/ws", b"/hold") + get("/next"))
            await until(lambda: len(here.app.held) == 2)
            assert here.app.held[1].wants_websocket()
            here.app.held[1].respond(403, b"", b"no")
            assert (await client.answer()).body == b"no"
            assert (await client.answer()).json["path"] == "/next"

    on_loop(main)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ((), 426, "upgrade_required"),
        (("Upgrade: websocket",), 426, "upgrade_required"),
        (("Connection: Upgrade", "Upgrade: other"), 426, "upgrade_required"),
        ((*UPGRADE[:2], f"Sec-WebSocket-Key: {KEY}"), 426, "upgrade_required"),
        ((*UPGRADE[:2], "Sec-WebSocket-Version: 8", f"Sec-WebSocket-Key: {KEY}"), 426, "upgrade_required"),
        (UPGRADE, 400, "invalid_header"),
        ((*UPGRADE, "Sec-WebSocket-Key: short"), 400, "invalid_header"),
        ((*UPGRADE, "Sec-WebSocket-Key: !!!!"), 400, "invalid_header"),
        ((*UPGRADE, f"Sec-WebSocket-Key: {KEY}", f"Sec-WebSocket-Key: {KEY}"), 400, "invalid_header"),
    ],
)
def test_bad_handshakes_are_answered_in_http(headers: tuple[str, ...], status: int, code: str) -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/ws", *headers) + get("/next"))
            answer = await client.answer()
            assert (answer.status, answer.code) == (status, code)
            if status == 426:
                assert answer.headers["upgrade"] == "websocket"
            assert (await client.answer()).json["path"] == "/next"

    on_loop(main)


def test_only_the_newest_of_many_pings_is_answered() -> None:
    async def main() -> None:
        async with site() as here:
            client, _ = await _open(here)
            await client.send(frame(ws.PING, b"1") + frame(ws.PING, b"2") + frame(ws.PING, b"3"))
            assert await _frame(client) == (ws.PONG, b"3")

    on_loop(main)


def test_too_large_is_told_and_the_session_goes_on() -> None:
    async def main() -> None:
        async with site(ws_message_bytes=1000, ws_discard_bytes=10_000) as here:
            client, handler = await _open(here)
            await client.send(frame(ws.TEXT, b"x" * 2000) + frame(ws.TEXT, b"small"))
            assert await _frame(client) == (ws.TEXT, b"too large")
            assert await _frame(client) == (ws.TEXT, b"small")
            assert handler.too_large == [(b"x" * 1000, 2000)]
            await client.send(frame(ws.TEXT, b"x" * 20_000))
            assert await _frame(client) == (ws.TEXT, b"too large")
            opcode, payload = await _frame(client)
            assert (opcode, payload[:2]) == (ws.CLOSE, (1009).to_bytes(2, "big"))
            assert await client.rest() == b""
            await client.close()
            await until(lambda: handler.closed != [])
            assert handler.closed == [(1009, "message too large")]

    on_loop(main)


def test_a_broken_frame_closes_with_1002() -> None:
    async def main() -> None:
        async with site() as here:
            client, handler = await _open(here)
            await client.send(
                frame(ws.TEXT, b"ok") + frame(ws.TEXT, b"no mask", mask=None) + frame(ws.TEXT, b"x")
            )
            assert await _frame(client) == (ws.TEXT, b"ok")
            opcode, payload = await _frame(client)
            assert (opcode, payload[:2]) == (ws.CLOSE, (1002).to_bytes(2, "big"))
            assert await client.rest() == b""
            assert handler.messages == [(b"ok", True)]

    on_loop(main)


def test_closing_from_either_side() -> None:
    async def main() -> None:
        async with site() as here:
            async with connect(f"ws://127.0.0.1:{here.port}/ws", proxy=None) as client:
                handler = here.app.sockets[-1]
                assert handler.connection is not None
                handler.connection.close(4404, "stream gone")
                handler.connection.send_text(b"after our close")
                with pytest.raises(ConnectionClosedError) as caught:
                    await client.recv()
                assert caught.value.rcvd is not None
                assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (4404, "stream gone")
            await until(lambda: handler.closed == [(4404, "stream gone")])
            raw, handler = await _open(here)
            await raw.send(frame(ws.CLOSE, b"\x0f\xa1see you"))
            assert await _frame(raw) == (ws.CLOSE, b"\x0f\xa1")
            assert await raw.rest() == b""
            await until(lambda: handler.closed == [(4001, "see you")])
            lost, handler = await _open(here)
            lost.writer.transport.abort()
            await until(lambda: handler.closed == [(1006, "")])

    on_loop(main)


def test_a_silent_peer_is_pinged_and_then_given_up() -> None:
    async def main() -> None:
        async with site(ws_ping_ms=15_000, ws_dead_ms=45_000) as here:
            client, handler = await _open(here)
            now = here.server.loop.time()
            here.server.sweep(now + 16)
            assert await _frame(client) == (ws.PING, b"")
            before = here.server.bytes_in
            pong = frame(ws.PONG)
            await client.send(pong)
            await until(lambda: here.server.bytes_in == before + len(pong))
            for ahead in (32, 48, 59):
                here.server.sweep(now + ahead)
            assert await _frame(client) == (ws.PING, b"")
            assert await _frame(client) == (ws.PING, b"")
            here.server.sweep(now + 62)
            assert await _frame(client) == (ws.TEXT, b"are you gone"), "the endpoint has the last word"
            opcode, payload = await _frame(client)
            assert (opcode, payload[:2]) == (ws.CLOSE, (1001).to_bytes(2, "big"))
            # No answer to our close either: two seconds later TCP ends.
            here.server.sweep(now + 65)
            await until(lambda: here.server.connections_open == 0)
            assert handler.closed == [(1001, "ping timeout")]

    on_loop(main)


def test_a_frame_that_is_never_finished_is_given_up() -> None:
    async def main() -> None:
        async with site(ws_ping_ms=100_000, ws_dead_ms=300_000) as here:
            client, handler = await _open(here)
            before = here.server.bytes_in
            await client.send(frame(ws.TEXT, b"never finished")[:-1])
            await until(lambda: here.server.bytes_in > before)
            now = here.server.loop.time()
            here.server.sweep(now + 20)
            assert here.server.connections_open == 1
            here.server.sweep(now + 31)
            assert (await _frame(client))[1][:2] == (1002).to_bytes(2, "big")
            assert await client.rest() == b""
            assert handler.messages == []

    on_loop(main)


def test_one_encoding_for_many_and_back_pressure() -> None:
    async def main() -> None:
        async with site() as here:
            fast, fast_handler = await _open(here)
            slow, slow_handler = await _open(here)
            shared = encode_text(b"x" * 60_000)
            assert fast_handler.connection is not None
            assert slow_handler.connection is not None
            count = 0
            while slow_handler.connection.unsent_bytes < 1_000_000:
                slow_handler.connection.send_encoded(shared)
                fast_handler.connection.send_encoded(shared)
                assert len((await _frame(fast))[1]) == 60_000
                count += 1
            for _ in range(count):
                assert len((await _frame(slow))[1]) == 60_000
            await until(lambda: slow_handler.drained == 1)
            # Reading can be held back too.
            slow_handler.connection.pause_reading()
            await slow.send(frame(ws.TEXT, b"later"))
            await fast.send(frame(ws.TEXT, b"now"))
            assert await _frame(fast) == (ws.TEXT, b"now")
            assert slow_handler.messages == []
            slow_handler.connection.resume_reading()
            assert await _frame(slow) == (ws.TEXT, b"later")

    on_loop(main)


def test_shutdown_says_goodbye_and_a_failing_handler_says_1011(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with site() as here:
            async with connect(f"ws://127.0.0.1:{here.port}/ws", proxy=None) as client:
                await client.send("raise")
                with pytest.raises(ConnectionClosed) as caught:
                    await client.recv()
                assert caught.value.rcvd is not None
                assert caught.value.rcvd.code == 1011
            async with connect(f"ws://127.0.0.1:{here.port}/ws", proxy=None) as client:
                await client.send("hello")
                assert await client.recv() == "hello"
                assert await here.server.drain(10_000)
                with pytest.raises(ConnectionClosed) as caught:
                    await client.recv()
                assert caught.value.rcvd is not None
                assert caught.value.rcvd.code == 1001

    with caplog.at_level(logging.ERROR, "tailrace.http"):
        on_loop(main)
    assert [r.message for r in caplog.records if r.name == "tailrace.http"] == ["WebSocket handler failed"]
