"""The pipeline that a server with several workers starts by itself, for whoever of them has work."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.offers import configured, fill, seal
from support.sealing import wait_until
from support.workers import names_of
from tailrace.auth import create_token

PATIENCE_S = 300.0  # a JVM, on a machine that does other things as well
SECRET = "a secret that is long enough for HS256, 32 bytes"


def pipeline_of(call: Caller) -> dict[str, Any]:
    return call("GET", "/v1/server/_details").body["runtime"]["pipeline"]


@pytest.mark.nightly
def test_work_on_any_worker_starts_the_one_pipeline(start_server: StartServer) -> None:
    """With tokens: the one that the pipeline gets is known to the worker that started it, and to no other."""
    env = {
        "TAILRACE_AUTH_JWT_SECRET": SECRET,
        "TAILRACE_PIPELINE": "auto",
        "TAILRACE_PIPELINE_START_AFTER": "1",
        "TAILRACE_PIPELINE_IDLE_STOP": "1s",
        "TAILRACE_PIPELINE_NICE": "0",
    }
    server = start_server("--workers", "2", env=env)
    call = Caller(server, create_token(SECRET, sub="m", scopes=["manage"]))
    last, first = (next(names_of(worker, 2, "ev")) for worker in (1, 0))

    def indexed(name: str) -> int:
        return call("GET", f"{name}/_search?q=who:w1").body["coverage"]["indexed_segments"]

    for name in (last, first):
        configured(call, name)
        fill(call, name, 3)
        seal(call, name)
        # A pipeline that runs may build it before anybody sees that it is planned.
        wait_until(lambda name=name: indexed(name) == 1, "everything built", PATIENCE_S)
    assert pipeline_of(call)["totals"]["segments"] == 2
    wait_until(lambda: pipeline_of(call)["state"] == "off", "an idle pipeline stopped", PATIENCE_S)
    eventually(lambda: pipeline_of(call)["pid"], lambda pid: pid is None)
