"""Reads that are narrowed by key, time and filter: both clients and the command line, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from support.cli import tailrace
from support.clients import OpenClient, name, open_client
from support.server import ServerProcess
from support.wire import Wire
from tailrace.client import ClientError

__all__ = ["name", "open_client"]

JSON = "application/json"
SEARCH = {
    "fields": {
        "status": {
            "kind": "integer",
            "bindings": [{"version": 1, "jsonPointer": "/status"}],
            "exact": True,
            "column": True,
        }
    }
}
NOON, LATER = "2026-01-01T12:00:00Z", "2026-01-01T13:00:00Z"


@pytest.fixture
def client(server: ServerProcess, open_client: OpenClient) -> Any:
    return open_client(server.base_url)


@pytest.fixture
def filled(server: ServerProcess, name: str) -> Iterator[str]:
    """A stream with two keys at two times."""
    http = Wire(server.port)
    assert http.put(name, JSON).status == 201
    assert http.post(f"{name}/_schema", JSON, json.dumps({"schema": {}, "search": SEARCH})).status == 200
    for key, at, statuses in (("a", NOON, [200, 500]), ("b", NOON, [503]), ("a", LATER, [501, 204])):
        body = json.dumps([{"status": status} for status in statuses])
        assert http.post(name, JSON, body, stream_key=key, stream_timestamp=at).status == 204
    yield name
    http.close()


def statuses(pages: Any) -> list[int]:
    return [entry["status"] for page in pages for entry in page.entries]


def test_reads_may_be_narrowed(client: Any, filled: str) -> None:
    stream = client.stream(filled)
    assert statuses([stream.read(filter="status:>=500")]) == [500, 503, 501]
    assert [entry["status"] for entry in stream.entries(filter="status:>=500", key="a")] == [500, 501]
    later = datetime.fromisoformat(LATER)
    assert statuses(stream.pages(since=later, filter="-status:204")) == [501]
    assert statuses(stream.pages(filter="status:1")) == []
    with pytest.raises(ClientError) as caught:
        stream.read(filter="nope:1")
    assert caught.value.code == "invalid_filter"


def test_following_may_be_narrowed(client: Any, filled: str) -> None:
    stream = client.stream(filled)
    stream.append([{"status": 1}, {"status": 599}], close=True)
    assert statuses(stream.follow(filter="status:>=500", since=LATER)) == [501, 599]
    with pytest.raises(ValueError, match="long-poll"):
        stream.follow(filter="status:1", mode="sse")


def test_the_command_line_narrows_too(server: ServerProcess, filled: str) -> None:
    at = ("--url", server.base_url)
    read = tailrace("read", filled, "--filter", "status:>=500", "--since", LATER, *at)
    assert (read.code, read.out) == (0, '{"status": 501}\n')
    keyed = tailrace("read", filled, "--filter", "status:>=500", "--key", "b", *at)
    assert keyed.out == '{"status": 503}\n'
    refused = tailrace("read", filled, "--filter", "nope:1", *at)
    assert (refused.code, "nope is not indexed" in refused.err) == (1, True)
    http = Wire(server.port)
    assert http.post(filled, JSON, '{"status": 999}', stream_closed="true").status == 204
    http.close()
    tail = tailrace("tail", filled, "--from-start", "--filter", "status:>=503", *at)
    assert (tail.code, tail.out) == (0, '{"status": 503}\n{"status": 999}\n')
    odd = tailrace("tail", filled, "--mode", "sse", "--filter", "status:1", *at)
    assert (odd.code, "long-poll" in odd.err) == (2, True)
