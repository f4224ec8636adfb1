"""Hostile bytes against a real server: it answers or refuses, the same however they are cut, and forgets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from support.http_app import RawClient, Site, TestApp, chunked, get, post, until
from tailrace.common.limits import Limits
from tailrace.http import HttpServer

CORPUS = sorted((Path(__file__).parents[2] / "corpus" / "http").glob("*.bin"))
REPEATABLE = settings(derandomize=True, max_examples=80, deadline=None, database=None)

_paths = st.sampled_from(["/a", "/b?q=1", "/c%20d", "/raise", "/refuse", "/empty"])
_bodies = st.binary(max_size=200)
_requests = st.one_of(
    st.builds(get, _paths),
    st.builds(lambda path: get(path).replace(b"GET", b"HEAD"), _paths),
    st.builds(post, _paths, _bodies),
    st.builds(
        lambda path, pieces: chunked(path, *pieces), _paths, st.lists(_bodies.filter(bool), max_size=4)
    ),
)
_pipelines = st.lists(_requests, min_size=1, max_size=8).map(b"".join)
_cuts = st.lists(st.integers(0, 1500), max_size=5)
_noise = st.sampled_from(
    [b"\r\n", b"\n", b"\x00", b" ", b":", b"\r\n\r\n", b"0", b"chunked", b"\xff", b"HTTP/1.1"]
)


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(_pipelines))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(data)))
        removed = draw(st.integers(0, 4))
        data[position : position + removed] = draw(_noise)
    return bytes(data)


class Laboratory:
    """A loop and a server that live through many examples."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.site = self.runner.run(self._open())

    async def _open(self) -> Site:
        app = TestApp()
        server = HttpServer(app, Limits())
        return Site(app, server, await server.start())

    def answers(self, data: bytes, cuts: list[int]) -> bytes:
        """Everything the server says to `data` sent in pieces, up to its close."""
        return self.runner.run(
            self._answers(data, sorted({min(cut, len(data)) for cut in cuts} - {0, len(data)}))
        )

    async def _answers(self, data: bytes, cuts: list[int]) -> bytes:
        server = self.site.server
        client = await self.site.connect()
        start = server.bytes_in
        try:
            for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                await client.send(data[begin:end])
                await until(lambda: server.bytes_in >= start + end or client.reader.at_eof())  # noqa: B023
            client.writer.write_eof()
            said = await client.rest()
        finally:
            await client.close()
        await until(lambda: server.connections_open == 0)
        assert server.body_bytes_held == 0
        self.site.app.seen.clear()
        self.site._clients.clear()
        return re.sub(rb"Date: [^\r]*\r\n", b"", said)

    def close(self) -> None:
        self.runner.run(self.site.close())
        self.runner.close()


@pytest.fixture(scope="module")
def laboratory() -> Iterator[Laboratory]:
    opened = Laboratory()
    yield opened
    opened.close()


def _check_shape(said: bytes) -> list[int]:
    """What a server says is a row of whole answers; at most the last one refuses and closes."""

    async def read() -> list[tuple[int, bool]]:
        reader = asyncio.StreamReader()
        reader.feed_data(said)
        reader.feed_eof()
        client = RawClient(reader, None)  # type: ignore[arg-type]
        found: list[tuple[int, bool]] = []
        while not reader.at_eof():
            status, headers = await client.head()
            found.append((status, "connection" in headers))
            size = int(headers.get("content-length", 0))
            # A HEAD answer names a length and has no body: the next answer follows at once.
            if size and not said[len(said) - _left(reader) :].startswith(b"HTTP/1.1 ") and _left(reader):
                await reader.readexactly(size)
        return found

    answers = asyncio.run(read())
    assert all(not closes for _, closes in answers[:-1])
    return [status for status, _ in answers]


def _left(reader: asyncio.StreamReader) -> int:
    return len(reader._buffer)  # type: ignore[attr-defined]


@REPEATABLE
@given(_pipelines, _cuts)
def test_good_pipelines_are_answered_whole(laboratory: Laboratory, data: bytes, cuts: list[int]) -> None:
    before = laboratory.site.server.requests
    said = laboratory.answers(data, cuts)
    statuses = _check_shape(said)
    assert len(statuses) == laboratory.site.server.requests - before
    assert set(statuses) <= {200, 204, 404, 500}
    assert laboratory.answers(data, []) == said


@REPEATABLE
@given(_mutated(), _cuts)
def test_mutations_are_answered_or_refused_alike(
    laboratory: Laboratory, data: bytes, cuts: list[int]
) -> None:
    said = laboratory.answers(data, cuts)
    assert set(_check_shape(said)) <= {200, 204, 400, 404, 413, 500}
    assert laboratory.answers(data, []) == said


@REPEATABLE
@given(st.binary(max_size=300), _cuts)
def test_random_bytes_are_refused_alike(laboratory: Laboratory, data: bytes, cuts: list[int]) -> None:
    said = laboratory.answers(data, cuts)
    assert _check_shape(said) in ([], [400])
    assert laboratory.answers(data, []) == said


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus(laboratory: Laboratory, path: Path) -> None:
    data = path.read_bytes()
    whole = laboratory.answers(data, [])
    statuses = _check_shape(whole)
    if path.stem.startswith("refused-"):
        assert statuses == [400]
    for step in (1, 3, 17):
        assert laboratory.answers(data, list(range(0, len(data), step))) == whole


def test_the_corpus_is_there() -> None:
    assert len(CORPUS) >= 40
