"""`tailrace pipeline status`, `rebuild` and `drain`, beside a pipeline that is played by the test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.cli import tailrace
from support.offers import FakePipeline, plan, sealed, uncovered
from support.server import ServerProcess

BEAT: dict[str, Any] = {
    "mode": "local",
    "state": "running",
    "master": "local[2,4]",
    "spark_version": "4.3.0",
    "pid": 4711,
    "started_at": "2026-01-01T00:00:00Z",
    "last_error": "unavailable: the store does not answer",
    "running": [{"job": "companions", "stream": "ev", "segments": 2, "since": "2026-01-01T00:00:00Z"}],
    "totals": {
        "segments": 9,
        "rows": "90",
        "bytes_in": "1",
        "bytes_out": "1",
        "quarantined": 1,
        "published": 3,
    },
    "seconds": {},
    "rss_bytes": "1630000000",
    "last_publish_at": None,
}


@pytest.fixture
def server(start_server: StartServer) -> ServerProcess:
    return start_server(env={"TAILRACE_PIPELINE": "external"})


def lines(server: ServerProcess, *words: str) -> list[str]:
    done = tailrace("pipeline", *words, "--url", server.base_url)
    assert done.code == 0, done.err
    return done.out.splitlines()


def test_status_says_what_waits_and_what_runs(server: ServerProcess) -> None:
    call = Caller(server)
    assert lines(server, "status") == [
        "state      off",
        "waiting    nothing",
        "published  0 segments, 0 entries since the start",
    ]
    sealed(call, "ev", 2)
    assert call("POST", "/v1/pipeline/heartbeat", BEAT).status == 200
    state, process, memory, waiting, running, *rest = lines(server, "status")
    assert state == "state      external"
    assert process == "process    4711 since 2026-01-01T00:00:00Z, local[2,4]"
    assert memory == "memory     1554 MiB"
    assert waiting.startswith("waiting    2 segments, 0 MiB, the oldest for ")
    assert running == "running    companions of ev, 2 segments"
    assert rest[-1] == "last error unavailable: the store does not answer"
    (told,) = tailrace("pipeline", "status", "--json", "--url", server.base_url).rows
    assert told["backlog"]["segments"] == 2
    assert told["running"] == BEAT["running"]


def test_rebuild_asks_for_a_stream_or_one_family(server: ServerProcess) -> None:
    call = Caller(server)
    shown = sealed(call, "ev", 2)
    pipeline = FakePipeline(call, server.data_dir)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    eventually(lambda: plan(call, "ev")["work"], lambda work: not work)
    assert lines(server, "rebuild", "--stream", "ev", "--family", "col") == [
        "2 objects of ev are built again"
    ]
    again = eventually(lambda: plan(call, "ev")["work"], bool)
    assert [one["families"] for one in again[0]["segments"]] == [["col"], ["col"]]
    assert lines(server, "rebuild", "--stream", "ev") == ["6 objects of ev are built again"]
    refused = tailrace("pipeline", "rebuild", "--stream", "nothing", "--url", server.base_url)
    assert refused.code == 1
    assert "nothing" in refused.err


def test_drain_returns_when_the_pipeline_is_gone(server: ServerProcess) -> None:
    call = Caller(server)
    assert call("POST", "/v1/pipeline/heartbeat", BEAT).body == {"drain": False}
    with ThreadPoolExecutor(1) as pool:
        draining = pool.submit(lines, server, "drain")
        eventually(lambda: call("POST", "/v1/pipeline/heartbeat", BEAT).body, lambda told: told["drain"])
        assert not draining.done()
        assert "draining" in lines(server, "status")[0]
        call("POST", "/v1/pipeline/heartbeat", {**BEAT, "state": "stopping"})
        assert draining.result() == ["the pipeline has ended"]
    # Nobody is there any more: nothing to wait for, and the next one may run.
    assert lines(server, "drain") == ["the pipeline has ended"]
    assert call("POST", "/v1/pipeline/heartbeat", BEAT).body == {"drain": False}


def test_drain_gives_up(server: ServerProcess) -> None:
    assert Caller(server)("POST", "/v1/pipeline/heartbeat", BEAT).status == 200
    done = tailrace("pipeline", "drain", "--timeout", "0", "--url", server.base_url)
    assert done.code == 1
    assert "still external after 0 s" in done.err
