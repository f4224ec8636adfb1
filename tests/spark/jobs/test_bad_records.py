"""Records and configurations that nobody hoped for: the job finishes, says what it skipped, answers stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.calls import eventually
from support.offers import SEARCH
from support.pipeline import run_once
from support.pipeline_process import Station
from support.server import ServerProcess
from tailrace.spark.jobs.pipeline import Pipeline
from tailrace.spark.jobs.pipeline_client import PipelineClient

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOON = 1767225600000
BAD: dict[str, list[Any]] = {
    "poison": [1, "x", [], None, [[]], {"at": NOON, "who": "w0", "what": "one word"}],
    "types": [
        {"at": "2026-01-01T00:00:00Z", "who": 5, "what": {"a": "word"}},
        {"at": [NOON, 7], "who": ["w0", ["w1"]], "what": ["word", 7, None]},
        {"at": True, "who": {"w0": "w0"}, "what": 5},
    ],
    "strings": [{"at": NOON, "who": "é" * 500_000, "what": "word " * 2000}],
    "keys": [
        {**{f"key{number}": number for number in range(10_000)}, "at": NOON, "who": "w1", "what": "word"}
    ],
}
QUESTIONS = ("who:w0", "what:word", "-who:w1", "at:>=7")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Nothing is kept in memory for searches: answers come from companions, or from records."""
    process = ServerProcess(
        tmp_path_factory.mktemp("bad") / "data", env={"TAILRACE_TAIL_INDEX_MAX_BYTES": "0"}
    ).start()
    yield process
    process.stop()


@pytest.fixture
def station(server: ServerProcess, tmp_path: Path) -> Iterator[Station]:
    found = Station(server.base_url, tmp_path)
    yield found
    found.close()


def run(station: Station, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    owner = PipelineClient(station.url)
    try:
        return run_once(
            owner, spark, monkeypatch, jobs=("companions",), directory=station.directory / "pipeline"
        )
    finally:
        owner.close()


def answers(station: Station, name: str) -> list[Any]:
    """What is found, and the sums over everything; each answer looked at all there is."""
    found: list[Any] = []
    for q in QUESTIONS:
        answer = station.search(name, q, sort=["offset:asc"])
        assert answer["coverage"]["complete"]
        found.append([(hit["offset"], hit["fields"]) for hit in answer["hits"]])
    body = {"rollup": "all", "from": NOON - 60_000, "to": NOON + 60_000, "interval": "1m"}
    found.append(station.call("POST", f"/v1/stream/{name}/_aggregate", body)["buckets"])
    return found


def test_s2_p19_whatever_records_are_like_everything_is_built(
    spark: SparkSession, station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    station.stream("bad", schema={"schema": True, "search": SEARCH})
    for records in BAD.values():
        station.seal("bad", records)
    before = answers(station, "bad")
    assert any(before[0])
    pipeline = run(station, spark, monkeypatch)
    assert (pipeline.status.totals.segments, pipeline.status.totals.quarantined) == (len(BAD), 0)
    assert answers(station, "bad") == before
    status = eventually(
        lambda: station.call("GET", "/v1/stream/bad/_index_status"),
        lambda found: found["bundled_companions"]["fully_indexed_uploaded_segments"],
    )
    assert status["last_error"] is None
    assert station.search("bad", "who:w0")["coverage"]["indexed_segments"] == len(BAD)


def test_p19_an_include_that_is_no_query_is_told(
    spark: SparkSession, station: Station, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can install one; an older version may have stored it."""
    search = json.loads(json.dumps(SEARCH))
    search["rollups"]["all"]["include"] = "who:w0"
    station.stream("odd", schema={"schema": True, "search": search})
    station.seal("odd", BAD["poison"])
    before = answers(station, "odd")
    path = server.data_dir / "objects" / station.plan("odd")["plan"]["object"]
    stored = path.read_bytes()
    assert stored.count(b'"who:w0"') >= 1
    path.write_bytes(stored.replace(b'"who:w0"', b'"who:(w0"'))
    pipeline = run(station, spark, monkeypatch)
    assert pipeline.status.totals.quarantined == 1
    status = eventually(
        lambda: station.call("GET", "/v1/stream/odd/_index_status"), lambda found: found["quarantined"]
    )
    assert status["last_error"].startswith("failed: search.rollups.all.include: ")
    (given_up,) = status["quarantined"]
    assert (given_up["first"], given_up["last"], given_up["code"]) == (1, len(BAD["poison"]), "failed")
    assert answers(station, "odd") == before
    assert station.search("odd", "who:w0")["coverage"]["scanned_segments"] == 1
