"""The pipeline as people run it, beside a real server: killed anywhere, doubled, and run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.calls import eventually
from support.pipeline_process import Station, finish

EVENTS = 20


def _events(first: int) -> list[dict[str, Any]]:
    return [
        {
            "timestamp": 1767225600000 + 1000 * number,
            "service": f"svc{number % 3}",
            "level": "error" if number % 4 == 0 else "info",
            "status": 500 if number % 4 == 0 else 200,
            "duration": number / 3,
            "requestId": f"req-{number}",
            "message": f"request {number} of customer {number % 7} is through",
        }
        for number in range(first, first + EVENTS)
    ]


@pytest.fixture
def station(start_server: StartServer, tmp_path: Path) -> Iterator[Station]:
    server = start_server(env={"TAILRACE_PIPELINE": "off"})
    found = Station(server.base_url, tmp_path)
    yield found
    found.close()


def _fill(station: Station, name: str, segments: int = 3) -> None:
    station.stream(name, profile="evlog")
    for number in range(segments):
        station.seal(name, _events(number * EVENTS))


def _corpus(station: Station, name: str) -> list[Any]:
    """What queries answer, without how they came by it."""
    asked: list[Any] = []
    for q in (
        "service:svc1",
        "message:customer",
        'message:"customer 3"',
        "status:>=500",
        "NOT level:error",
        "req*",
    ):
        answer = station.search(name, q, sort=["offset:asc"])
        asked.append([(hit["offset"], hit["fields"]) for hit in answer["hits"]])
        assert answer["coverage"]["complete"]
    body = {"rollup": "requests", "from": 1767225600000, "to": 1767226600000, "interval": "1m"}
    asked.append(
        station.call("POST", f"/v1/stream/{name}/_aggregate", {**body, "group_by": ["service"]})["buckets"]
    )
    return asked


def _listed(station: Station, name: str, segments: int) -> None:
    """Every segment has got its companions, all at once and only once."""
    folder = station.plan(name)["stream_id"]

    def published() -> list[Any]:
        found = station.call("GET", "/v1/stream/__segments__?offset=-1")
        return [one for one in found if one["type"] == "companion" and one["key"].startswith(folder)]

    found = eventually(published, lambda seen: len(seen) >= segments)
    assert len({one["key"] for one in found}) == len(found) == segments
    families = {tuple(sorted(one["value"]["families"])) for one in found}
    assert families == {("agg", "col", "exact", "fts", "routing_key_index")}


@pytest.mark.timeout(900)
def test_everything_once_and_then_nothing(station: Station) -> None:
    _fill(station, "events")
    before = _corpus(station, "events")
    assert station.plan("events")["work"]
    station.run()
    assert not station.plan("events")["work"]
    assert _corpus(station, "events") == before
    _listed(station, "events", 3)
    # Nothing to do: no Spark is started.
    assert "starting Spark" not in station.run()
    _listed(station, "events", 3)


KILLS = (
    "worker:after_fetch",
    "worker:mid_build",
    "worker:after_write",
    "worker:after_put",
    "driver:before_publish",
    "jvm:after_fetch",
    "jvm:after_write",
    "jvm:after_put",
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kill", ["driver:after_publish", *[pytest.param(kill, marks=pytest.mark.nightly) for kill in KILLS]]
)
def test_killed_and_run_again(station: Station, tmp_path: Path, kill: str) -> None:
    _fill(station, "events", 2)
    before = _corpus(station, "events")
    died = tmp_path / "died"
    code, output = finish(station.start(env={"TAILRACE_PIPELINE_FAILPOINT": f"{kill}:{died}"}))
    assert died.exists(), output
    assert (code == 0) == kill.startswith("worker"), output
    assert _corpus(station, "events") == before
    station.run()
    assert not station.plan("events")["work"]
    assert _corpus(station, "events") == before
    _listed(station, "events", 2)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_two_pipelines_at_once(station: Station) -> None:
    _fill(station, "events", 4)
    before = _corpus(station, "events")
    racing = [station.start() for _ in range(2)]
    for process in racing:
        code, output = finish(process)
        assert code == 0, output
    _listed(station, "events", 4)
    assert _corpus(station, "events") == before


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_by_the_reference_path(station: Station) -> None:
    _fill(station, "events", 2)
    before = _corpus(station, "events")
    station.run("--reference")
    assert _corpus(station, "events") == before
