"""Well-formed requests over a real socket: what the application sees, and what the client gets."""

from __future__ import annotations

import logging

import pytest

from support.http_app import BIG_BYTES, HOST, chunked, get, on_loop, post, site, until


def test_a_request_reaches_the_application_as_it_was_sent() -> None:
    async def main() -> None:
        async with site() as here:
            answer = await here.exchange(
                b"POST /a%20b?x=1&y=?2 HTTP/1.1\r\n"
                + HOST
                + b"X-One:  spaced \t\r\nx-TWO:\r\nContent-Length: 3\r\n\r\nabc"
            )
            assert answer.status == 200
            assert answer.json == {
                "method": "POST",
                "path": "/a%20b",
                "query": "x=1&y=?2",
                "headers": {"host": "tailrace.test", "x-one": "spaced", "x-two": "", "content-length": "3"},
                "repeated": [],
                "body": "abc",
            }
            assert answer.headers["x-common"] == "1"
            assert answer.headers["date"].endswith(" GMT")
            assert "connection" not in answer.headers

    on_loop(main)


def test_repeated_headers_are_joined_and_named() -> None:
    async def main() -> None:
        async with site() as here:
            answer = await here.exchange(get("/", "X-A: 1", "x-a: 2", "X-B: 3", "X-A: 4"))
            assert answer.json["headers"]["x-a"] == "1, 2, 4"
            assert answer.json["repeated"] == ["x-a"]

    on_loop(main)


def test_one_connection_serves_many_requests() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            for number in range(50):
                await client.send(post(f"/{number}", b"x" * number))
                answer = await client.answer()
                assert (answer.json["path"], len(answer.json["body"])) == (f"/{number}", number)
            assert here.server.connections_total == 1
            assert here.server.requests == 50

    on_loop(main)


def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(
                get("/hold/1")
                + post("/2", b"two")
                + chunked("/3", b"th", b"ree")
                + get("/hold/4")
                + get("/5")
            )
            await until(lambda: len(here.app.held) == 1)
            assert here.app.seen == [b"/hold/1"]
            here.app.held[0].respond(200, b"", b"first")
            assert (await client.answer()).body == b"first"
            assert (await client.answer()).json["body"] == "two"
            assert (await client.answer()).json["body"] == "three"
            await until(lambda: len(here.app.held) == 2)
            assert here.app.seen == [b"/hold/1", b"/2", b"/3", b"/hold/4"]
            here.app.held[1].respond(200, b"", b"fourth")
            assert (await client.answer()).body == b"fourth"
            assert (await client.answer()).json["path"] == "/5"

    on_loop(main)


def test_a_long_pipeline_is_held_back_and_then_served_whole() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            count = 20_000
            client.writer.write(get("/hold") + b"".join(get(f"/{number}") for number in range(count)))
            await until(lambda: len(here.app.held) == 1)
            # What is parsed ahead is one slice of a read at most, not everything that was sent.
            assert here.server.requests < 64 * 1024 / len(get("/0"))
            here.app.held[0].respond(200)
            await client.answer()
            for number in range(count):
                assert (await client.answer()).json["path"] == f"/{number}"

    on_loop(main)


def test_every_cut_of_a_byte_stream_gives_the_same_answers() -> None:
    stream = (
        get("/first", "X-A: 1", "X-A: 2")
        + post("/second?q", b"body of the second")
        + chunked("/third", b"abc", b"defghij", trailers=b"X-Trailer: not a header\r\n")
        + b"HEAD /fourth HTTP/1.1\r\nHost: h\r\n\r\n"
        + get("/last", "Connection: close")
    )

    async def main() -> None:
        async with site() as here:
            whole: bytes | None = None
            for cut in range(len(stream)):
                client = await here.connect()
                before = here.server.bytes_in
                await client.send(stream[:cut])
                await until(lambda: here.server.bytes_in == before + cut)  # noqa: B023 - awaited at once
                await client.send(stream[cut:])
                got = _undated(await client.rest())
                await client.close()
                whole = whole or got
                assert got == whole, cut
            assert whole is not None
            assert whole.count(b"HTTP/1.1 200 OK") == 5
            assert b"x-trailer" not in whole.lower()

    on_loop(main)


def _undated(answers: bytes) -> bytes:
    return b"\r\n".join(line for line in answers.split(b"\r\n") if not line.startswith(b"Date: "))


def test_byte_by_byte() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            for byte in chunked("/slow", b"a", b"bc") + get("/next"):
                before = here.server.bytes_in
                await client.send(bytes((byte,)))
                await until(lambda: here.server.bytes_in > before)  # noqa: B023 - awaited at once
            assert (await client.answer()).json["body"] == "abc"
            assert (await client.answer()).json["path"] == "/next"

    on_loop(main)


def test_large_bodies_in_both_directions() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            body = bytes(range(256)) * 4096 * 8
            await client.send(post("/hold", body))
            await until(lambda: len(here.app.held) == 1)
            assert here.app.held[0].body == body
            here.app.held[0].respond(200, b"", [body, memoryview(body)[:5]])
            assert (await client.answer()).body == body + body[:5]
            await client.send(chunked("/hold", *[body[:100_000]] * 30))
            await until(lambda: len(here.app.held) == 2)
            assert here.app.held[1].body == body[:100_000] * 30
            assert here.server.body_bytes_held == 0
            here.app.held[1].respond(204)
            assert (await client.answer()).status == 204

    on_loop(main)


def test_large_answers_wait_for_their_reader() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/big") * 4)
            await until(lambda: len(here.app.seen) == 1)
            # The second is not made while the first is above the write buffer's mark.
            (connection,) = here.server._swept
            await until(lambda: connection.transport.get_write_buffer_size() > 0)
            assert here.app.seen == [b"/big"]
            for _ in range(4):
                assert len((await client.answer()).body) == BIG_BYTES

    on_loop(main)


def test_head_and_bodiless_answers() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(b"HEAD /x HTTP/1.1\r\n" + HOST + b"\r\n" + get("/empty") + get("/after"))
            head = await client.answer(is_head=True)
            assert int(head.headers["content-length"]) > 0
            empty = await client.answer()
            assert (empty.status, empty.headers["x-empty"]) == (204, "yes")
            assert "content-length" not in empty.headers
            assert (await client.answer()).json["path"] == "/after"

    on_loop(main)


def test_expect_continue() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            request = post("/up", b"payload", "Expect: 100-continue")
            await client.send(get("/hold") + request[:-7])
            await until(lambda: len(here.app.held) == 1)
            here.app.held[0].respond(200, b"", b"in front")
            # The interim answer comes after the one in front of it.
            assert (await client.answer()).body == b"in front"
            assert await client.head() == (100, {})
            await client.send(request[-7:])
            assert (await client.answer()).json["body"] == "payload"
            await client.send(request[:-7])
            assert await client.head() == (100, {})
            await client.send(request[-7:])
            assert (await client.answer()).json["body"] == "payload"
            too_big = "Content-Length: 99999999", "Expect: 100-continue"
            await client.send(get("/", *too_big).replace(b"GET", b"PUT"))
            assert (await client.answer()).code == "payload_too_large"

    on_loop(main)


def test_http_1_0() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (await client.answer()).headers["connection"] == "keep-alive"
            await client.send(b"GET /b HTTP/1.0\r\n\r\n")
            answer = await client.answer()
            assert (answer.json["path"], answer.headers["connection"]) == ("/b", "close")
            assert await client.rest() == b""

    on_loop(main)


def test_close_is_honoured_and_what_follows_is_ignored() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/bye", "Connection: close") + get("/never"))
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await client.rest() == b""
            assert here.app.seen == [b"/bye"]
            assert here.server.parse_errors == 0

    on_loop(main)


def test_targets() -> None:
    async def main() -> None:
        async with site() as here:
            absolute = await here.exchange(b"GET http://other:81/p?q=1 HTTP/1.1\r\nHost: ignored\r\n\r\n")
            assert (absolute.json["path"], absolute.json["query"]) == ("/p", "q=1")
            assert absolute.json["headers"]["host"] == "other:81"
            star = await here.exchange(b"OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n")
            assert star.json["path"] == "*"
            # An upgrade nobody knows is ignored, and the connection goes on.
            client = await here.connect()
            await client.send(get("/h2c", "Connection: Upgrade", "Upgrade: h2c") + get("/next"))
            assert (await client.answer()).json["path"] == "/h2c"
            assert (await client.answer()).json["path"] == "/next"

    on_loop(main)


def test_a_half_closed_client_still_gets_its_answers() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/hold") + get("/second"))
            client.writer.write_eof()
            await until(lambda: len(here.app.held) == 1)
            here.app.held[0].respond(200, b"", b"done")
            assert (await client.answer()).body == b"done"
            assert (await client.answer()).json["path"] == "/second"
            assert await client.rest() == b""
            await until(lambda: here.server.connections_open == 0)

    on_loop(main)


def test_a_client_that_leaves_is_noticed_once_and_late_answers_do_nothing() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/hold/wait") + get("/behind"))
            await until(lambda: len(here.app.held) == 1)
            client.writer.transport.abort()
            await until(lambda: here.server.connections_open == 0)
            assert here.app.gone == [b"/hold/wait"]
            exchange = here.app.held[0]
            assert exchange.answered
            exchange.respond(200, b"", b"too late")
            assert exchange.open_stream(200, b"").closed
            assert here.app.seen == [b"/hold/wait"]

    on_loop(main)


def test_answering_twice_is_harmless() -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/hold"))
            await until(lambda: len(here.app.held) == 1)
            here.app.held[0].respond(200, b"", b"one")
            here.app.held[0].respond(500, b"", b"two")
            await client.send(get("/next"))
            assert (await client.answer()).body == b"one"
            assert (await client.answer()).json["path"] == "/next"

    on_loop(main)


def test_what_a_handler_raises_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            await client.send(get("/raise") + get("/refuse") + get("/fine"))
            failed = await client.answer()
            assert (failed.status, failed.code) == (500, "internal")
            assert b"secret" not in failed.body
            refused = await client.answer()
            assert (refused.status, refused.code, refused.headers["x-why"]) == (404, "not_found", "because")
            assert (await client.answer()).json["path"] == "/fine"

    with caplog.at_level(logging.ERROR, "tailrace.http"):
        on_loop(main)
    assert [record.message for record in caplog.records] == ["request handler failed"]
