"""The pipeline as people run it, beside a real server: killed anywhere, doubled, and run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import eventually
from support.pipeline_process import Station, content, corpus, fill, listed, segments


@pytest.fixture
def station(start_server: StartServer, tmp_path: Path) -> Iterator[Station]:
    settings = {"TAILRACE_COMPACT_SEGMENTS": "3", "TAILRACE_COMPACT_AGE_MS": "0"}
    server = start_server(env={"TAILRACE_PIPELINE": "off", **settings})
    found = Station(server.base_url, tmp_path)
    yield found
    found.close()


TASK_STEPS = ("after_fetch", "mid_build", "after_write", "after_put")
STEPS = (*TASK_STEPS, "before_publish", "after_publish")
OFTEN = "driver:after_publish"  # the others take long
KILLS = (
    *(f"worker:{step}" for step in TASK_STEPS),
    *(f"{part}:{step}" for part in ("jvm", "driver") for step in STEPS),
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kill", [kill if kill == OFTEN else pytest.param(kill, marks=pytest.mark.nightly) for kill in KILLS]
)
def test_p1_p2_i3_killed_and_run_again_and_then_nothing(station: Station, tmp_path: Path, kill: str) -> None:
    """Companions, and one segment of all when they are there; whoever dies on the way."""
    fill(station, "events")
    before, pages = corpus(station, "events"), content(station, "events")
    assert station.plan("events")["work"]
    died = tmp_path / "died"
    code, output = station.start(env={"TAILRACE_PIPELINE_FAILPOINT": f"{kill}:{died}"}).finish()
    assert died.exists(), output
    assert (code == 0) == kill.startswith("worker"), output
    assert corpus(station, "events") == before
    station.run()
    eventually(lambda: station.plan("events")["work"], lambda work: not work)
    assert corpus(station, "events") == before
    assert content(station, "events") == pages
    assert segments(station, "events") == 1
    listed(station, "events", 3)
    # Nothing to do: no Spark is started.
    assert "starting Spark" not in station.run()
    listed(station, "events", 3)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p3_i4_two_pipelines_at_once(station: Station) -> None:
    fill(station, "events", 4)
    before = corpus(station, "events")
    racing = [station.start() for _ in range(2)]
    for process in racing:
        code, output = process.finish()
        assert code == 0, output
    listed(station, "events", 4)
    assert corpus(station, "events") == before


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p7_by_the_reference_path(station: Station) -> None:
    fill(station, "events", 2)
    before = corpus(station, "events")
    station.run("--reference")
    assert corpus(station, "events") == before
