"""Compaction as people run it: a real server, a real Spark, and every answer as it was before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import StartServer
from support.calls import eventually
from support.pipeline_process import EVENTS, Station, content, corpus, fill, segments

SETTINGS = {
    "TAILRACE_PIPELINE": "off",
    "TAILRACE_COMPACT_SEGMENTS": "4",
    "TAILRACE_COMPACT_AGE_MS": "0",
    "TAILRACE_INDEX_L0_SPAN": "4",
}


@pytest.fixture
def station(start_server: StartServer, tmp_path: Path) -> Iterator[Station]:
    found = Station(start_server(env=SETTINGS).base_url, tmp_path)
    yield found
    found.close()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_p8_p15_small_segments_become_one(station: Station) -> None:
    """As many as a compaction takes: with one more, whichever four are through first may be joined alone."""
    fill(station, "events", 4)
    before = corpus(station, "events"), content(station, "events")
    station.run("--jobs", "companions,merge,compact")
    eventually(lambda: station.plan("events")["work"], lambda work: not work)
    assert segments(station, "events") == 1
    assert (corpus(station, "events"), content(station, "events")) == before
    answer = station.search("events", "service:svc1")
    assert answer["coverage"]["scanned_segments"] == 0
    assert answer["coverage"]["indexed_segments"] == 1
    assert len(station.call("GET", "/v1/stream/events?offset=-1")) == 4 * EVENTS


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kill", ["worker:after_fetch", "worker:after_write", "worker:after_put", "driver:after_publish"]
)
def test_p1_killed_and_run_again(station: Station, tmp_path: Path, kill: str) -> None:
    fill(station, "events", 4)
    station.run("--jobs", "companions,merge")
    before = corpus(station, "events"), content(station, "events")
    died = tmp_path / "died"
    environment = {"TAILRACE_PIPELINE_FAILPOINT": f"{kill}:{died}"}
    _, output = station.start("--jobs", "compact", env=environment).finish()
    assert died.exists(), output
    station.run("--jobs", "compact")
    eventually(lambda: station.plan("events")["work"], lambda work: not work)
    assert segments(station, "events") == 1
    assert (corpus(station, "events"), content(station, "events")) == before
