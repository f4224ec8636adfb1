"""Not only local mode: executors in processes of their own, and a bucket as the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import StartServer
from support.pipeline_process import Station, corpus, fill, listed
from support.s3 import S3Server
from support.spark_cluster import SparkCluster

CONF = "spark.driver.host=127.0.0.1,spark.executor.memory=512m,spark.cores.max=2"


def _run_on_a_cluster(station: Station, directory: Path, env: dict[str, str]) -> None:
    fill(station, "events", 4)
    before = corpus(station, "events")
    with SparkCluster(directory / "cluster", env=env) as cluster:
        env = {"SPARK_LOCAL_IP": "127.0.0.1", **env}
        station.run("--conf", CONF, env=env, master=cluster.master)
    listed(station, "events", 4)
    assert not station.plan("events")["work"]
    assert corpus(station, "events") == before


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_cluster_on_loopback(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(env={"TAILRACE_PIPELINE": "off"})
    station = Station(server.base_url, tmp_path)
    _run_on_a_cluster(station, tmp_path, {})
    station.close()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_cluster_with_a_bucket(start_server: StartServer, tmp_path: Path, s3: S3Server) -> None:
    env = s3.env()
    url = s3.url("pipeline-cluster")
    server = start_server(env={"TAILRACE_PIPELINE": "off", "TAILRACE_OBJECT_STORE": url, **env})
    station = Station(server.base_url, tmp_path)
    _run_on_a_cluster(station, tmp_path, env)
    station.close()
