"""Not only local mode: executors in processes of their own, a bucket as the store, and Spark Connect."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import eventually
from support.pipeline_process import Station, corpus, fill
from support.s3 import S3Server
from support.spark_cluster import ConnectServer, SparkCluster

CONF = "spark.driver.host=127.0.0.1,spark.executor.memory=512m,spark.cores.max=2"
SETTINGS = {"TAILRACE_PIPELINE": "off", "TAILRACE_INDEX_L0_SPAN": "4"}
JOBS = ("--jobs", "companions,merge")


def _built_and_merged(station: Station, before: object) -> None:
    """All four segments have all families, and those that are merged are in one file."""
    eventually(lambda: station.plan("events")["work"], lambda work: not work)
    status = station.call("GET", "/v1/stream/events/_index_status")
    assert status["bundled_companions"]["fully_indexed_uploaded_segments"]
    assert [one["object_count"] for one in status["exact_indexes"][:1]] == [1]
    assert corpus(station, "events") == before


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p21_a_cluster_on_loopback(start_server: StartServer, tmp_path: Path) -> None:
    station = Station(start_server(env=SETTINGS).base_url, tmp_path)
    fill(station, "events", 4)
    before = corpus(station, "events")
    with SparkCluster(tmp_path / "cluster") as cluster:
        station.run("--conf", CONF, *JOBS, env={"SPARK_LOCAL_IP": "127.0.0.1"}, master=cluster.master)
    _built_and_merged(station, before)
    station.close()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p21_a_cluster_with_a_bucket(start_server: StartServer, tmp_path: Path, s3: S3Server) -> None:
    """Driver and executors share nothing else."""
    env = s3.env()
    url = s3.url("pipeline-cluster")
    server = start_server(env={**SETTINGS, "TAILRACE_OBJECT_STORE": url, **env})
    station = Station(server.base_url, tmp_path)
    fill(station, "events", 4)
    before = corpus(station, "events")
    env = {"SPARK_LOCAL_IP": "127.0.0.1", **env}
    with SparkCluster(tmp_path / "cluster", env=env) as cluster:
        station.run("--conf", CONF, *JOBS, env=env, master=cluster.master)
    _built_and_merged(station, before)
    station.close()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p21_spark_connect(start_server: StartServer, tmp_path: Path) -> None:
    station = Station(start_server(env=SETTINGS).base_url, tmp_path)
    fill(station, "events", 4)
    before = corpus(station, "events")
    with ConnectServer(tmp_path / "connect") as connect:
        station.run(*JOBS, master=connect.master)
    _built_and_merged(station, before)
    station.close()
