"""Ids of requests: sent back, made for refusals, and found again in the log."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from conftest import StartServer
from support.calls import Caller, eventually
from support.edge import EdgeProcess
from support.server import ServerProcess
from support.wire import Wire

JSON = {"Content-Type": "application/json"}
MADE = re.compile(r"[0-9a-f]{16}")


def lines(server: ServerProcess, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]


def test_an_id_comes_back_on_every_kind_of_answer(server: ServerProcess) -> None:
    call = Caller(server)
    named = {"X-Request-Id": "deploy-17/step 3".replace(" ", "_")}
    assert call("PUT", "ids", headers={**JSON, **named}).headers["x-request-id"] == "deploy-17/step_3"
    for method, path, body in (("POST", "ids", [1]), ("GET", "ids", None), ("HEAD", "ids", None)):
        reply = call(method, path, body, headers=named)
        assert reply.headers["x-request-id"] == "deploy-17/step_3", method
    assert call("GET", "missing", headers=named).headers["x-request-id"] == "deploy-17/step_3"
    live = call("GET", "ids?live=long-poll&offset=now&timeout_ms=10", headers=named)
    assert live.headers["x-request-id"] == "deploy-17/step_3"
    assert "X-Request-Id" in call("GET", "ids", headers=named).headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "unusable", ["a" * 129, "with space", "ümlaut".encode("latin-1").decode("latin-1"), ""]
)
def test_an_unusable_id_is_replaced(server: ServerProcess, unusable: str) -> None:
    reply = Caller(server)("GET", "/healthz", headers={"X-Request-Id": unusable})
    assert MADE.fullmatch(reply.headers["x-request-id"])


def test_live_readers_get_theirs_back(server: ServerProcess) -> None:
    named = {"X-Request-Id": "mine"}
    with closing(Wire(server.port)) as wire:
        wire.put("live-ids", "application/json", "[1]")
        with wire.events("live-ids?offset=-1&live=sse", named) as events:
            assert events.head["x-request-id"] == "mine"
    url = f"ws://127.0.0.1:{server.port}/v1/stream/live-ids?offset=-1&live=ws"
    with connect(url, additional_headers=named) as socket:
        assert socket.response is not None
        assert socket.response.headers["X-Request-Id"] == "mine"


def test_refusals_have_one_and_other_answers_are_spared(server: ServerProcess) -> None:
    call = Caller(server)
    ids = {call("GET", "missing").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(MADE.fullmatch(one) for one in ids)
    call("PUT", "spared", headers=JSON)
    assert "x-request-id" not in call("POST", "spared", [1]).headers
    assert "x-request-id" not in call("GET", "spared").headers


def test_writers_that_repeat_their_head_get_the_id_each_time(server: ServerProcess) -> None:
    """Such heads are remembered; one with an id must not be, or be answered with it all the same."""
    with closing(Wire(server.port)) as wire:
        wire.put("repeated", "application/json")
        answers = [wire.post("repeated", "application/json", "[1]", x_request_id="same") for _ in range(40)]
    assert [answer["x-request-id"] for answer in answers] == ["same"] * 40


def test_all_answers_have_one_if_that_is_set(start_server: StartServer) -> None:
    call = Caller(start_server("--request-ids"))
    assert MADE.fullmatch(call("PUT", "a", headers=JSON).headers["x-request-id"])
    made = {call("POST", "a", [1]).headers["x-request-id"] for _ in range(20)}
    assert len(made) == 20
    assert call("POST", "a", [1], headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"


def test_an_edge_gives_everybody_their_own(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--request-ids")
    edge = EdgeProcess(tmp_path / "edge", server.base_url).start()
    call = Caller(edge)
    call("PUT", "a", [1])
    assert call("POST", "a", [2], headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    for number in range(3):  # what is kept has the id of nobody
        reply = call("GET", "a?offset=-1", headers={"X-Request-Id": f"mine-{number}"})
        assert reply.headers["x-request-id"] == f"mine-{number}"
    assert "x-request-id" not in call("GET", "a?offset=-1").headers
    assert call("GET", "missing", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert MADE.fullmatch(call("GET", "missing").headers["x-request-id"])
    edge.stop()


def test_every_request_has_a_line_if_that_is_set(start_server: StartServer) -> None:
    server = start_server("--log-requests", "all", "--log-format", "json")
    call = Caller(server)
    call("PUT", "a", headers=JSON)
    call(
        "POST",
        "a",
        [{"private": "payload"}],
        headers={"X-Request-Id": "mine", "Authorization": "Bearer hush"},
    )
    call("GET", "a?offset=-1&hint=hush")
    call("GET", "missing")
    server.stop()
    told = lines(server, "request")
    assert [
        (line["method"], line["path"], line["status"]) for line in told if "readyz" not in line["path"]
    ] == [
        ("PUT", "/v1/stream/a", 201),
        ("POST", "/v1/stream/a", 204),
        ("GET", "/v1/stream/a", 200),
        ("GET", "/v1/stream/missing", 404),
    ]
    (mine,) = [line for line in told if line["request_id"] == "mine"]
    assert mine["ms"] >= 0
    assert mine["peer"].startswith("127.0.0.1:")
    assert "hush" not in server.log
    assert "payload" not in server.log


def starved(directory: Path) -> ServerProcess:
    """A server without room: it refuses what would need some, and is never ready."""
    args = ["--disk-reserve-bytes", "1000000GiB", "--log-format", "json"]
    server = ServerProcess(directory / "data", args=args).start(ready=False)
    eventually(lambda: server.log, lambda log: "tailrace ready" in log)
    return server


def test_failures_of_the_server_are_in_its_log(tmp_path: Path) -> None:
    server = starved(tmp_path)
    call = Caller(server)
    refused = eventually(lambda: call("PUT", "a", headers=JSON), lambda reply: reply.status == 507)
    call("GET", "missing")
    server.stop()
    told = lines(server, "request failed")
    (line,) = [line for line in told if line["request_id"] == refused.headers["x-request-id"]]
    assert (line["status"], line["code"], line["level"]) == (507, "insufficient_storage", "warning")
    assert lines(server, "request") == []
    assert 404 not in {line["status"] for line in told}


def test_the_log_of_a_server_in_trouble_stays_small(tmp_path: Path) -> None:
    server = starved(tmp_path)
    with closing(Wire(server.port)) as wire:
        eventually(lambda: wire.put("a").status, lambda status: status == 507)
        for _ in range(500):
            wire.put("a")
    server.stop()
    told = lines(server, "request failed")
    assert len(told) < 500
