"""Heads that were seen before are recognised, and recognising one never changes what a request is."""

from __future__ import annotations

import pytest

from support.http_app import Site, on_loop, post, site, until

APPEND = post("/a", b"12345")


async def teach(here: Site, data: bytes = APPEND) -> None:
    """Repeats a request until its head is known."""
    client = await here.connect()
    for _ in range(16):
        await client.send(data)
        assert (await client.answer()).status == 200
    await client.close()
    assert data[: data.index(b"\r\n\r\n") + 4] in here.server.cached_heads


def test_a_known_head_gives_the_same_request() -> None:
    async def main() -> None:
        async with site() as here:
            first = await here.exchange(APPEND)
            await teach(here)
            again = await here.exchange(APPEND.replace(b"12345", b"abcde"))
            assert again.json == first.json | {"body": "abcde"}

    on_loop(main)


@pytest.mark.parametrize("extra", [b"P", b"PO", b"POST /a HTTP/1.1\r\n", b"\r\n"])
def test_a_request_with_the_beginning_of_the_next_is_not_learnt_with_it(extra: bytes) -> None:
    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            for _ in range(16):
                await client.send(APPEND + extra)
                assert (await client.answer()).json["body"] == "12345"
                await client.send(APPEND.removeprefix(extra))
                assert (await client.answer()).json["body"] == "12345"
            assert all(known.body_bytes == 5 for known in here.server.cached_heads.values())

    on_loop(main)


def test_a_known_head_inside_an_unfinished_request_is_part_of_that_request() -> None:
    async def main() -> None:
        async with site() as here:
            await teach(here)
            client = await here.connect()
            before = here.server.bytes_in
            await client.send(b"P")
            await until(lambda: here.server.bytes_in > before)
            await client.send(APPEND)
            assert (await client.answer()).status == 400, "the method is PPOST"

    on_loop(main)


def test_a_body_that_comes_later_is_waited_for() -> None:
    async def main() -> None:
        async with site() as here:
            await teach(here)
            client = await here.connect()
            before = here.server.bytes_in
            await client.send(APPEND[:-2])
            await until(lambda: here.server.bytes_in > before)
            await client.send(APPEND[-2:])
            assert (await client.answer()).json["body"] == "12345"
            await client.send(APPEND + APPEND)
            assert [(await client.answer()).json["body"] for _ in range(2)] == ["12345", "12345"]

    on_loop(main)


@pytest.mark.parametrize("streams", [2, 8, 24, 100])
def test_all_heads_of_a_writer_that_takes_turns_are_learnt(streams: int) -> None:
    appends = [post(f"/{number}", b"12345") for number in range(streams)]

    async def main() -> None:
        async with site() as here:
            client = await here.connect()
            for _ in range(60):
                for append in appends:
                    await client.send(append)
                    await client.answer()
            assert len(here.server.cached_heads) == streams

    on_loop(main)
