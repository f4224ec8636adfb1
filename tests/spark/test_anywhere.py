"""Source and sink outside local mode: executors that share nothing with the driver, and Spark Connect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import tailrace
from support.spark_cluster import SparkCluster
from support.spark_rows import Filled, served
from support.wire import fresh

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "spark_anywhere.py"


def run_job(master: str, seamed: Filled, directory: Path) -> None:
    target = fresh("anywhere")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), master, seamed.url, "ev", target, str(directory)],
        env=env,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    truth = [row["entry"] for row in served(seamed.server, "ev")]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"entries": truth, "history": len(truth), "copied": len(truth)}
    copied = served(seamed.server, target)
    wanted = [(row["payload"], row["key"]) for row in served(seamed.server, "ev")]
    assert sorted(((row["payload"], row["key"]) for row in copied), key=str) == sorted(wanted, key=str)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p21_a_standalone_cluster(seamed: Filled, tmp_path: Path) -> None:
    with SparkCluster(tmp_path / "cluster") as cluster:
        run_job(cluster.master, seamed, tmp_path)
        done = tailrace(
            "sql", "select count(*) as n from ev", "--json", "--url", seamed.url, "--master", cluster.master
        )
        assert done.rows == [{"n": len(served(seamed.server, "ev"))}]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p21_connect(seamed: Filled, tmp_path: Path) -> None:
    run_job("connect", seamed, tmp_path)
