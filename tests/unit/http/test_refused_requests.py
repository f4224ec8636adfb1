"""Requests that must not be served: each gets a clear refusal, and the connection ends."""

from __future__ import annotations

import logging

import pytest

from support.http_app import HOST, TestApp, chunked, get, on_loop, post, site, until
from tailrace.common.errors import TailraceError
from tailrace.http import Exchange

POST = b"POST / HTTP/1.1\r\n" + HOST
GET = b"GET / HTTP/1.1\r\n" + HOST

MALFORMED = {
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "conflicting lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "length and chunks": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "signed length": POST + b"Content-Length: +1\r\n\r\nx",
    "hex length": POST + b"Content-Length: 0x1\r\n\r\nx",
    "empty length": POST + b"Content-Length:\r\n\r\n",
    "overflowing length": POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "length of 5000 digits": POST + b"Content-Length: " + b"0" * 4999 + b"3\r\n\r\nabc",
    "length of 5000 digits, with a wait for 100": POST
    + b"Expect: 100-continue\r\nContent-Length: "
    + b"0" * 4999
    + b"3\r\n\r\nabc",
    "space before colon": POST + b"Content-Length : 3\r\n\r\nabc",
    "two codings": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": POST + b"Transfer-Encoding: gzip\r\n\r\nabc",
    "coding look-alike": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked then identity": POST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "chunked in 1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\nabc\r\n0\r\n\r\n",
    "prefixed chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "spaced chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n",
    "huge chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc\r\n",
    "chunk longer than said": POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n",
    "chunk with bare LF": POST + b"Transfer-Encoding: chunked\r\n\r\n3\nabc\n0\n\n",
    "NUL in value": GET + b"X: a\x00b\r\n\r\n",
    "NUL in name": GET + b"X\x00Y: a\r\n\r\n",
    "NUL in target": b"GET /a\x00b HTTP/1.1\r\n" + HOST + b"\r\n",
    "bare CR in value": GET + b"X: a\rb\r\n\r\n",
    "bare LF line ends": b"GET / HTTP/1.1\nHost: a\n\n",
    "folded header": GET + b"X: a\r\n b\r\n\r\n",
    "tab-folded header": GET + b"X: a\r\n\tb\r\n\r\n",
    "space in name": GET + b"X Y: a\r\n\r\n",
    "no name": GET + b": a\r\n\r\n",
    "no colon": GET + b"just words\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "bad host": b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "host with user": b"GET / HTTP/1.1\r\nHost: u@b\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n",
    "HTTP/0.9 with an empty line": b"GET /\r\n\r\n",
    "HTTP/0.9 by name": b"GET / HTTP/0.9\r\n" + HOST + b"\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\n" + HOST + b"\r\n",
    "HTTP/3.0": b"GET / HTTP/3.0\r\n" + HOST + b"\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "unknown method": b"BREW / HTTP/1.1\r\n" + HOST + b"\r\n",
    "lower-case method": b"get / HTTP/1.1\r\n" + HOST + b"\r\n",
    "tunnel": b"CONNECT a:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "relative target": b"GET x HTTP/1.1\r\n" + HOST + b"\r\n",
    "foreign scheme": b"GET ftp://a/b HTTP/1.1\r\n" + HOST + b"\r\n",
    "star for GET": b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
    "upgrade with a body": POST
    + b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 3\r\n\r\nabc",
    "upgrade with chunks": POST
    + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "many repeats": GET + b"X: a\r\n" * 200 + b"\r\n",
    "long header": GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "many headers": GET + b"".join(b"X-%d: a\r\n" % n for n in range(9000)) + b"\r\n",
    "long target": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "long trailers": POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    "long chunk extension": POST
    + b"Transfer-Encoding: chunked\r\n\r\n1;"
    + b"a" * 200_000
    + b"\r\nx\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_refused_and_the_connection_ends(name: str) -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            # A request smuggled behind must never be seen.
            await client.send(get("/before") + MALFORMED[name] + get("/smuggled"))
            assert (await client.answer()).json["path"] == "/before"
            refused = await client.answer()
            assert refused.status == 400
            assert refused.code in ("invalid_request", "invalid_header")
            assert refused.headers["connection"] == "close"
            assert refused.headers["x-common"] == "1"
            assert await client.rest() == b""
            assert here.app.seen == [b"/before"]
            assert here.server.parse_errors == 1
            assert here.server.body_bytes_held == 0
            await client.close()
            await until(lambda: here.server.connections_open == 0)

    on_loop(main)


@pytest.mark.parametrize("name", ["two lengths", "chunk longer than said", "no host", "HTTP/2 preface"])
def test_a_refusal_waits_for_the_answers_in_front(name: str) -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/hold") + get("/queued") + MALFORMED[name])
            await until(lambda: len(here.app.held) == 1 and here.server.parse_errors == 1)
            here.app.held[0].respond(200, b"", b"held")
            assert (await client.answer()).body == b"held"
            assert (await client.answer()).json["path"] == "/queued"
            assert (await client.answer()).status == 400
            assert await client.rest() == b""

    on_loop(main)


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    async def main() -> None:
        async with site(append_body_bytes=1000) as here:
            client = await here.connect()
            await client.send(
                post("/ok", b"x" * 1000) + get("/", "Content-Length: 1001").replace(b"GET", b"PUT")
            )
            assert (await client.answer()).status == 200
            refused = await client.answer()
            assert (refused.status, refused.code) == (413, "payload_too_large")
            assert refused.json["error"]["limit_bytes"] == 1000
            # The client is not reset while it goes on sending: it can read why.
            await client.send(b"y" * 100_000)
            assert await client.rest() == b""

    on_loop(main)


def test_a_chunked_body_over_the_limit_is_refused() -> None:
    async def main() -> None:
        async with site(append_body_bytes=1000) as here:
            assert (await here.exchange(chunked("/", b"x" * 600, b"y" * 400))).status == 200
            assert (await here.exchange(chunked("/", b"x" * 1001))).code == "payload_too_large"
            assert (await here.exchange(chunked("/", b"x" * 600, b"y" * 401))).code == "payload_too_large"
            assert here.server.body_bytes_held == 0

    on_loop(main)


@pytest.mark.parametrize("step", [100, 1000, 4096, 10**6])
def test_the_header_limit_does_not_depend_on_how_the_head_is_cut(step: int) -> None:
    async def send(padding: int) -> int:
        async with site(header_bytes=4096) as here:
            client = await here.connect()
            request = get("/x", "X: " + "a" * padding)
            for start in range(0, len(request), step):
                before = here.server.bytes_in
                await client.send(request[start : start + step])
                await until(lambda: here.server.bytes_in > before)  # noqa: B023 - awaited at once
                if here.server.parse_errors:
                    break
            return (await client.answer()).status

    async def main() -> None:
        # The head counts as target, names and values with four bytes each for the colon and line end.
        fits = 4096 - len("/x") - len("host") - len("tailrace.test") - 4 - len("X") - 4
        assert await send(fits - 60) == 200
        assert await send(fits + 60) == 400

    on_loop(main)


def test_a_refusal_of_head_has_no_body() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(b"HEAD / HTTP/1.1\r\nHost: a/b\r\n\r\n")
            status, headers = await client.head()
            assert (status, headers["connection"]) == (400, "close")
            assert await client.rest() == b""

    on_loop(main)


def test_an_application_that_cannot_refuse_is_covered(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TestApp):
        __test__ = False

        def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
            raise ValueError("broken")

    async def main() -> None:
        async with site(Broken()) as here:
            answer = await here.exchange(get("/refuse"))
            assert (answer.status, answer.code) == (500, "internal")

    with caplog.at_level(logging.ERROR, "tailrace.http"):
        on_loop(main)
    assert [record.message for record in caplog.records] == ["error response failed"]
