"""Source, sink and SQL outside local mode: executors that share nothing with the driver, and Connect."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.cli import command
from support.s3 import S3Server
from support.spark_cluster import SparkCluster
from support.spark_jobs import assert_same_rows, environment, job
from support.spark_rows import JSON, Filled, served
from support.wire import fresh
from tailrace.client import Client

LOOPBACK = {"SPARK_LOCAL_IP": "127.0.0.1"}
PATIENCE_S = 1500  # a busy machine is not a failure


def run_job(
    master: str,
    seamed: Filled,
    directory: Path,
    *,
    source: str = "ev",
    staging: str | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Reads a stream, copies it with a query, and compares both with what the server tells."""
    target = fresh("anywhere")
    done = subprocess.run(
        job(master, seamed, source, target, directory, staging),
        env=environment(env or {}),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    truth = [row["entry"] for row in served(seamed.server, source)]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"entries": truth, "history": len(truth), "copied": len(truth)}
    assert_same_rows(seamed, source, target)


def fill_wide(seamed: Filled, count: int = 90) -> None:
    """Rows so large that those of one task do not fit into what it hands over without a file."""
    with Client(seamed.url) as client:
        wide = client.stream("wide", content_type=JSON)
        wide.create()
        for number in range(count):
            wide.append([{"n": number, "pad": secrets.token_hex(16_000)}])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_p21_a_standalone_cluster(seamed: Filled, tmp_path: Path) -> None:
    with SparkCluster(tmp_path / "cluster") as cluster:
        run_job(cluster.master, seamed, tmp_path)
        counted = _sql("select count(*) as n from ev", seamed, cluster, {}, "--json")
        assert json.loads(counted) == {"n": len(served(seamed.server, "ev"))}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_p21_a_standalone_cluster_with_a_bucket(seamed_bucket: Filled, tmp_path: Path, s3: S3Server) -> None:
    """Driver and executors have the bucket in common, and no directory: rows are staged there, too."""
    fill_wide(seamed_bucket)
    staging = s3.url(f"staging/{tmp_path.name}")
    with SparkCluster(tmp_path / "cluster", env=s3.env()) as cluster:
        run_job(cluster.master, seamed_bucket, tmp_path, source="wide", staging=staging, env=s3.env())
        assert not (tmp_path / "checkpoint" / "tailrace-staging").exists()
        # What is written is written here, and not where the executors are.
        out = tmp_path / "out"
        query = "select key, count(*) as n, min(entry) as least from ev group by key"
        _sql(query, seamed_bucket, cluster, s3.env(), "--out", str(out))
    expected: dict[bytes | None, list[int]] = {}
    for row in served(seamed_bucket.server, "ev"):
        expected.setdefault(row["key"], []).append(row["entry"])
    found = {row["key"]: (row["n"], row["least"]) for row in pq.read_table(out).to_pylist()}
    assert found == {key: (len(entries), min(entries)) for key, entries in expected.items()}


def _sql(query: str, seamed: Filled, cluster: SparkCluster, env: Mapping[str, str], *flags: str) -> str:
    given = ("--url", seamed.url, "--master", cluster.master, *flags)
    done = subprocess.run(
        command("sql", query, *given),
        env=environment({**LOOPBACK, **env}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_p21_connect(seamed: Filled, tmp_path: Path) -> None:
    run_job("connect", seamed, tmp_path)
