"""The server's own pipeline: when it starts, what it says of itself, and machines that cannot run one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller, eventually
from support.offers import FakePipeline, configured, fill, plan, seal, sealed, uncovered
from support.sealing import wait_until
from support.server import ServerProcess
from tailrace.server.java import parse_java_version
from tailrace.spark.jobs.pipeline_client import PipelineClient

PATIENCE_S = 300.0  # a JVM, on a machine that does other things as well
StartServer = Callable[..., ServerProcess]
BEAT: dict[str, Any] = {
    "mode": "external",
    "state": "running",
    "master": "local[2,4]",
    "spark_version": "4.3.0",
    "pid": 4711,
    "started_at": "2026-01-01T00:00:00.000Z",
    "last_error": None,
    "running": [{"job": "companions", "stream": "ev", "segments": 4, "since": "2026-01-01T00:00:00.000Z"}],
    "totals": {"segments": 1, "rows": "3"},
    "seconds": {"col": [0.2, 0.4], "nothing we know": [1.0]},
    "rss_bytes": "1630000000",
    "last_publish_at": None,
}


def pipeline_of(call: Caller) -> dict[str, Any]:
    return call("GET", "/v1/server/_details").body["runtime"]["pipeline"]


def io_class(pid: int) -> str:
    told = subprocess.run(["ionice", "-p", str(pid)], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def async_index_of(call: Caller) -> dict[str, int]:
    return call("GET", "/v1/server/_details").body["runtime"]["concurrency"]["async_index"]


def metrics(call: Caller) -> dict[str, float]:
    lines = call("GET", "/metrics").raw.decode().splitlines()
    rows = [line.rpartition(" ") for line in lines if line.startswith("tailrace_pipeline")]
    return {name: float(value) for name, _, value in rows}


def test_a_pipeline_elsewhere_tells_how_it_is(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_PIPELINE": "external"})
    call = Caller(server)
    idle = pipeline_of(call)
    assert (idle["mode"], idle["state"], idle["pid"]) == ("external", "off", None)
    shown = sealed(call, "ev", 2)
    assert pipeline_of(call)["backlog"]["segments"] == 2
    with closing(PipelineClient(server.base_url)) as owner:
        assert owner.backlog_segments() == 2
    gate = {"configured_limit": 64, "current_limit": 0, "active": 0, "queued": 2}
    assert async_index_of(call) == gate
    assert call("POST", "/v1/pipeline/heartbeat", BEAT).body == {"drain": False}
    assert async_index_of(call) == gate | {"current_limit": 64, "active": 4, "queued": 0}
    found = pipeline_of(call)
    assert (found["state"], found["master"], found["pid"]) == ("external", "local[2,4]", 4711)
    assert found["running"] == BEAT["running"]
    pipeline = FakePipeline(call, server.data_dir)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    found = eventually(lambda: pipeline_of(call), lambda seen: seen["backlog"]["segments"] == 0)
    assert (found["totals"]["segments"], found["totals"]["rows"]) == (2, "6")
    assert found["last_publish_at"] is not None
    seen = metrics(call)
    assert seen['tailrace_pipeline_state{state="external"}'] == 1
    assert seen['tailrace_pipeline_publish_total{job="companions",outcome="published"}'] == 1
    assert seen['tailrace_pipeline_rows_total{job="companions"}'] == 6
    assert seen['tailrace_pipeline_segment_seconds_count{family="col"}'] == 2
    assert seen["tailrace_pipeline_seal_to_published_seconds_count"] == 2
    assert seen["tailrace_pipeline_rss_bytes"] == 1.63e9
    # Asked to end, it is told so with its next heartbeat, and is gone when it says so.
    assert call("POST", "/v1/pipeline/heartbeat", {"drain": True}).body == {"draining": True}
    assert call("POST", "/v1/pipeline/heartbeat", BEAT).body == {"drain": True}
    assert call("POST", "/v1/pipeline/heartbeat", {**BEAT, "state": "stopping"}).body == {"drain": True}
    found = pipeline_of(call)
    assert (found["state"], found["pid"], found["draining"]) == ("off", None, False)
    assert call("POST", "/v1/pipeline/heartbeat", b"[]").code == "invalid_request"
    assert call("GET", "/v1/pipeline/heartbeat").status == 405


def test_p16_without_java_nothing_else_changes(start_server: StartServer, tmp_path: Path) -> None:
    empty = tmp_path / "nothing"
    empty.mkdir()
    path = {"PATH": str(empty), "JAVA_HOME": ""}
    server = start_server(env={"TAILRACE_PIPELINE": "auto", "TAILRACE_PIPELINE_START_AFTER": "1", **path})
    call = Caller(server)
    found = eventually(lambda: pipeline_of(call), lambda seen: seen["state"] == "unavailable")
    assert found["reason"]
    configured(call, "ev")
    fill(call, "ev", 3)
    seal(call, "ev")
    eventually(lambda: pipeline_of(call)["backlog"]["segments"], lambda segments: segments == 1)
    found = call("GET", "ev/_search?q=who:w1").body
    assert (found["total"], found["coverage"]["complete"]) == ({"value": 1, "relation": "eq"}, True)
    assert server.log.count("no Java 17+ found: index files are not built") == 1
    assert pipeline_of(call)["state"] == "unavailable"


def test_p16_a_pipeline_that_fails_is_started_again_later(start_server: StartServer, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"17.0.12\" 2024-07-16' >&2\nexit 1\n")
    java.chmod(0o755)
    path = {"PATH": f"{java.parent}:/usr/bin:/bin", "JAVA_HOME": str(tmp_path)}
    server = start_server(env={"TAILRACE_PIPELINE": "auto", "TAILRACE_PIPELINE_START_AFTER": "1", **path})
    call = Caller(server)
    sealed(call, "ev", 1)
    found = eventually(lambda: pipeline_of(call), lambda seen: seen["restarts"] >= 1)
    assert found["last_error"]
    assert found["state"] in ("backoff", "starting", "off")


@pytest.mark.nightly
def test_p17_a_pipeline_has_a_process_group_and_a_lower_priority(
    start_server: StartServer, tmp_path: Path
) -> None:
    """What it takes is not the server's; how much that is, is measured elsewhere."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    said = 'openjdk version "17.0.12" 2024-07-16'
    java.write_text(f"#!/bin/sh\ncase $* in -version) echo '{said}' >&2;; *) exec sleep 600;; esac\n")
    java.chmod(0o755)
    path = {"PATH": f"{java.parent}:/usr/bin:/bin", "JAVA_HOME": str(tmp_path)}
    server = start_server(env={"TAILRACE_PIPELINE": "auto", "TAILRACE_PIPELINE_START_AFTER": "1", **path})
    call = Caller(server)
    sealed(call, "ev", 1)
    pid = eventually(lambda: pipeline_of(call)["pid"], lambda found: found is not None)
    assert os.getpgid(pid) == pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0) + 10
    assert io_class(pid) == "idle"
    session = Path(f"/proc/{pid}/autogroup")
    if session.exists():  # where sessions are scheduled, niceness alone would mean nothing to the server
        assert session.read_text().split()[-1] == "10"


def test_a_stream_without_families_starts_nothing(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_PIPELINE": "auto", "TAILRACE_PIPELINE_START_AFTER": "1"})
    call = Caller(server)
    assert call("PUT", "plain", b"x", headers={"Content-Type": "text/plain"}).status == 201
    seal(call, "plain")
    assert plan(call, "plain")["work"] == []
    assert pipeline_of(call)["backlog"]["segments"] == 0
    assert '"state":"starting"' not in server.log


@pytest.mark.parametrize(
    ("said", "version"),
    [
        (b'openjdk version "17.0.12" 2024-07-16', 17),
        (b'java version "1.8.0_392"', 8),
        (b'openjdk version "21" 2023-09-19', 21),
        (b"not java", None),
    ],
)
def test_versions_of_java(said: bytes, version: int | None) -> None:
    assert parse_java_version(said) == version


@pytest.mark.nightly
def test_work_starts_a_pipeline_and_idleness_ends_it(start_server: StartServer) -> None:
    server = start_server(
        env={
            "TAILRACE_PIPELINE": "auto",
            "TAILRACE_PIPELINE_START_AFTER": "1",
            "TAILRACE_PIPELINE_IDLE_STOP": "1s",
            "TAILRACE_PIPELINE_NICE": "0",
        }
    )
    call = Caller(server)
    sealed(call, "ev", 2)
    wait_until(lambda: plan(call, "ev")["work"] == [], "everything built", PATIENCE_S)
    assert pipeline_of(call)["totals"]["segments"] == 2
    wait_until(lambda: pipeline_of(call)["state"] == "off", "an idle pipeline stopped", PATIENCE_S)
    assert pipeline_of(call)["pid"] is None
