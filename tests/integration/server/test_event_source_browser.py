"""A plain `EventSource` in Chromium: each message once, over rotations, restarts and a lost upstream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.browser import BrowserSources
from support.calls import Caller
from support.edge import StartEdge, Writer
from support.server import ServerProcess

ROTATION = {"TAILRACE_SSE_ROTATION_MS": "1000"}
BEFORE = 5  # entries that are there before a reader comes


def _urls(server: ServerProcess, name: str) -> list[str]:
    return [f"{server.base_url}/v1/stream/{name}?live=sse&offset={offset}" for offset in ("-1", "now")]


def _opened(times: int) -> Any:
    return lambda one: one["opened"] >= times


def _up_to(last: int) -> Any:
    return lambda one: last in one["entries"]


@pytest.mark.parametrize("way", ["directly", "behind an edge"])
def test_each_message_comes_once(
    start_server: StartServer, start_edge: StartEdge, tmp_path: Path, way: str
) -> None:
    server = start_server(env=ROTATION)
    front = server if way == "directly" else start_edge(server.base_url, sse_rotation_ms="1000")
    writer = Writer(server, "plain")
    writer.append(BEFORE)
    with BrowserSources.open(tmp_path / "profile", _urls(front, "plain")) as sources:
        found = sources.wait(lambda one: one["controls"] > 0)
        for end in (server.stop, server.kill):
            opened = max(one["opened"] for one in found)
            writer.append(2)
            sources.wait(_up_to(writer.count - 1))
            writer.append()  # may come while they reconnect after a rotation
            found = sources.wait(_opened(opened + 1))
            found = sources.wait(_up_to(writer.count - 1))
            end()
            if way == "behind an edge":
                # They reconnect while there is no server: to the channel that waits for it, or to be held.
                opened = max(one["opened"] for one in found)
                sources.wait(_opened(opened + 2))
            server.start()
            writer.append(3)
            found = sources.wait(_up_to(writer.count - 1))
        writer.close()
        found = sources.wait(lambda one: one["ended"])
    from_start, from_now = (one["entries"] for one in found)
    assert from_start == writer.numbers()
    assert from_now == writer.numbers(BEFORE)


def test_sources_of_documents_stay_alive_behind_an_edge(
    start_server: StartServer, start_edge: StartEdge, tmp_path: Path
) -> None:
    """`/realtime/sse` and the stream of a replication, with the server away while they come back."""
    server = start_server()
    edge = start_edge(server.base_url, edge_hold_ms="1000")
    call = Caller(server)
    base = "/v1/databases/default/docs/things"
    assert call("PUT", f"{base}/first", {"n": 0}).status == 201
    urls = [
        f"{edge.base_url}/realtime/sse?database=default&collection=things",
        f"{edge.base_url}/replication/v1/databases/default/stream?collection=things",
    ]

    def has(number: int) -> Any:
        return lambda one: f'"n": {number}' in str(one["messages"]).replace("'", '"')

    with BrowserSources.open(tmp_path / "profile", urls) as sources:
        sources.wait(_opened(1))
        assert call("PUT", f"{base}/second", {"n": 1}).status == 201
        opened = max(one["opened"] for one in sources.wait(has(1)))
        server.kill()
        sources.wait(_opened(opened + 2))
        server.start()
        assert call("PUT", f"{base}/third", {"n": 2}).status == 201
        found = sources.wait(has(2))
    for one in found:
        text = str(one["messages"])
        assert [text.count(f"'n': {number}") for number in (1, 2)] == [1, 1], text
