"""`tailrace pipeline match` killed wherever it hurts, and run again: all are told, nobody twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.calls import Caller
from support.server import ServerProcess
from support.watch_jobs import BASE, QUERIES, Held, change, deliveries, metric, tuples, watch
from tailrace.spark.failpoints import FAILPOINT_VARIABLE

RUN_S_MAX = 300.0


def match(server: ServerProcess, directory: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    flags = ["--url", server.base_url, "--checkpoint", str(directory / "checkpoint"), "--json"]
    return subprocess.run(
        [sys.executable, "-m", "tailrace", "pipeline", "match", "--master", "local[2]", *flags],
        env={**os.environ, FAILPOINT_VARIABLE: f"{failpoint}:{directory / 'reached'}"}
        if failpoint
        else os.environ,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "failpoint", ["driver:after_checkpoint", "worker:mid_build", "jvm:mid_build", "driver:after_publish"]
)
def test_w38_a_killed_match_is_run_again(failpoint: str, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        call = Caller(server)
        assert call("PUT", f"{BASE}/collections/things", {"partitions": 3}).status == 201
        held = Held(server, "things", {"large": {"where": "doc.n > 50 || doc.id == 'held'"}})
        watching = watch(server, "things", QUERIES)
        call("PUT", f"{BASE}/docs/things/held", {"n": 1})
        held.take_first()
        change(call, "things", 150)
        events = watching.events()
        expected = {one for one in events if one[2].endswith("/large")}
        first = match(server, tmp_path, failpoint)
        assert (tmp_path / "reached").exists(), first.stderr
        if not failpoint.startswith("worker"):
            assert first.returncode != 0, "it was killed"
        again = match(server, tmp_path)
        assert again.returncode == 0, again.stderr
        report = json.loads(again.stdout)
        found = tuples(deliveries(call, report["deliveries"]))
        assert len(found) == len(set(found))
        assert {one for one in found if one[2].startswith(watching.connection)} == events
        told = held.catch_up(len(expected))
        assert len(set(told)) == len(told)
        assert {one[:2] for one in told} == {one[:2] for one in expected}
        assert metric(call, "tailrace_watch_delivered_batches_total") > 0
        held.live.close()
        watching.live.close()
    finally:
        server.stop()
