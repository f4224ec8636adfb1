from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from support.ports import free_port
from tailrace.subscriptions import ssrf, webhooks

LOOPBACK = ssrf.UrlRules(loopback=True)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def request_of(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")
    )
    return head, await reader.readexactly(length)


def exchange(answer: bytes, *, close: bool = True, answer_bytes_max: int = 65536) -> webhooks.WebhookResponse:
    """Posts to a server that answers with exactly these bytes."""

    async def run() -> webhooks.WebhookResponse:
        released = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head, body = await request_of(reader)
            assert head.startswith(b"POST /hook?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")
            assert b"X-Test: yes\r\n" in head
            assert body == b"body"
            writer.write(answer)
            if not close:
                await released.wait()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = ssrf.check_url(f"http://127.0.0.1:{port}/hook?x=1", LOOPBACK)
        try:
            return await webhooks.post_webhook(
                target,
                ["127.0.0.1"],
                [("X-Test", "yes")],
                b"body",
                answer_bytes_max=answer_bytes_max,
                tls=None,
            )
        finally:
            released.set()
            server.close()
            await server.wait_closed()

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("answer", "status", "done"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n" + b'{"done":true}', 200, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n" + b'{"done":false}', 200, False),
        (b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n", 202, False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, False),
        (
            b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n{"done\r\n7\r\n":true}\r\n0\r\n\r\n',
            200,
            True,
        ),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n" + b'{"done":true}',
            200,
            True,
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", 200, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + b'{"done":1}', 200, False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\xff\xff\xff\xff", 200, False),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 13\r\n\r\n" + b'{"done":true}', 302, False),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 13\r\n\r\n" + b'{"done":true}', 500, False),
    ],
)
def test_answers(answer: bytes, status: int, done: bool) -> None:
    # The connection stays open: the end of the message is what counts.
    response = exchange(answer, close=False)
    assert response.status == status
    assert response.done == done
    assert response.accepted == (200 <= status < 300)


def test_an_answer_that_ends_with_the_connection() -> None:
    response = exchange(b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"done":true}')
    assert response.done


def test_a_cut_answer_is_not_done() -> None:
    assert not exchange(b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"done":tr').done


def test_no_more_is_read_than_allowed() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"
    response = exchange(head + b"x" * 100_000, close=False, answer_bytes_max=1000)
    assert response.accepted
    assert not response.complete
    assert len(response.body) == 1000


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
def test_what_is_no_answer(answer: bytes) -> None:
    with pytest.raises(webhooks.DeliveryError):
        exchange(answer)


def test_addresses_are_tried_in_turn() -> None:
    async def run() -> webhooks.WebhookResponse:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = ssrf.check_url(f"http://localhost:{port}/", LOOPBACK)
        async with server:
            # Nobody listens on the first; the second is this machine as well.
            return await webhooks.post_webhook(
                target, ["127.0.0.2", "127.0.0.1"], [], b"", answer_bytes_max=10, tls=None
            )

    assert asyncio.run(run()).status == 204


def test_nobody_there() -> None:
    async def run() -> None:
        target = ssrf.check_url(f"http://127.0.0.1:{free_port()}/", LOOPBACK)
        await webhooks.post_webhook(target, ["127.0.0.1"], [], b"", answer_bytes_max=10, tls=None)

    with pytest.raises(webhooks.DeliveryError, match="cannot connect"):
        asyncio.run(run())
