"""A server is stopped while its pipeline starts, works or idles: a readable log, and no process is left."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller, eventually
from support.offers import sealed
from support.server import ServerProcess
from support.spark import quick_start
from tailrace.server.pipeline_process import STOP_S

PATIENCE_S = 300.0  # a JVM, on a machine that does other things as well
BANNER = ("tailrace ready", "data directory", "try ")
StartServer = Callable[..., ServerProcess]


def _pipeline(call: Caller) -> dict[str, Any]:
    return call("GET", "/v1/server/_details").body["runtime"]["pipeline"]


def _session_members(session: int) -> list[str]:
    """The processes of a session that still run, by their command lines."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _, _, member_of = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile
        if int(member_of) == session and state != "Z":
            found.append(command)
    return found


def _started(start_server: StartServer, directory: Path) -> tuple[ServerProcess, Caller, int]:
    """A server whose pipeline is starting, and the process id of that."""
    server = start_server(
        env={
            "TAILRACE_PIPELINE": "auto",
            "TAILRACE_PIPELINE_START_AFTER": "1",
            "TAILRACE_PIPELINE_NICE": "0",
            **quick_start(directory),
        }
    )
    call = Caller(server)
    sealed(call, "ev", 3)
    child = eventually(lambda: _child_of(server.pid), lambda pid: pid is not None, PATIENCE_S)
    assert child is not None
    return server, call, child


def _child_of(server: int) -> int | None:
    """The pipeline of a server: its child that leads a session of its own."""
    for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"--supervised" in words and os.getsid(int(child)) == int(child):
            return int(child)
    return None


def _stop_and_check(server: ServerProcess, pipeline: int, number: signal.Signals) -> None:
    begin_s = time.monotonic()
    server.signal(number)
    assert server.wait_exit(60) == 0
    took_s = time.monotonic() - begin_s
    assert eventually(lambda: _session_members(pipeline), lambda left: left == []) == []
    log = server.log
    for line in log.splitlines():
        if line.startswith(BANNER):
            continue
        assert isinstance(json.loads(line), dict), f"not in the log format: {line!r}\n{log}"
    assert "Traceback" not in log
    assert "Py4J" not in log
    after = log[log.index('"event":"stopping"') :].splitlines()[1:]
    assert [line for line in after if '"logger":"tailrace.pipeline"' in line] == [], log
    assert took_s < STOP_S, f"the pipeline was ended by force: {took_s:.1f} s\n{log}"


@pytest.mark.parametrize(
    ("state", "number"), [("idle", signal.SIGTERM), ("running", signal.SIGINT)], ids=["idle", "running"]
)
def test_a_stopped_server_leaves_no_traceback(
    start_server: StartServer, tmp_path: Path, state: str, number: signal.Signals
) -> None:
    server, call, pipeline = _started(start_server, tmp_path)
    eventually(lambda: _pipeline(call)["state"], lambda seen: seen == state, PATIENCE_S)
    _stop_and_check(server, pipeline, number)
    assert '"logger":"tailrace.spark"' in server.log, "what Spark says is in the log, in its format"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_server_that_stops_while_spark_starts_leaves_no_traceback(
    start_server: StartServer, tmp_path: Path, number: signal.Signals
) -> None:
    server, _call, pipeline = _started(start_server, tmp_path)
    eventually(
        lambda: _session_members(pipeline), lambda seen: any("java" in one for one in seen), PATIENCE_S
    )
    _stop_and_check(server, pipeline, number)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12))
def test_a_server_may_stop_at_any_moment_of_its_pipeline(
    start_server: StartServer, tmp_path: Path, seed: int
) -> None:
    choose = random.Random(seed)
    server, _call, pipeline = _started(start_server, tmp_path)
    time.sleep(choose.uniform(0, 25))  # the moment is the point: from the start over the work to idleness
    _stop_and_check(server, pipeline, choose.choice((signal.SIGTERM, signal.SIGINT)))
