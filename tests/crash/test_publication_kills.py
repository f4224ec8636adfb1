"""The server is killed at each step of sealing and publishing: everything is listed once and told once."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections import Counter
from pathlib import Path

import pytest

from support.calls import Caller, eventually
from support.offers import FAMILIES, FakePipeline, configured, events, fill, plan, seal, uncovered
from support.server import ServerProcess

SEGMENTS = 3


def ordeal(server: ServerProcess) -> None:
    """Seals, publishes and merges, however often that has to be begun again."""
    call = Caller(server)
    pipeline = FakePipeline(call, server.data_dir)
    if call("HEAD", "ev").status == 404:
        configured(call, "ev")
    count = int(call("GET", "ev/_details").body["stream"]["next_offset"])
    for number in range(count // 4, SEGMENTS):
        fill(call, "ev", 4, 4 * number)
        seal(call, "ev")
    seal(call, "ev")
    eventually(lambda: plan(call, "ev")["plan"]["generation"], lambda generation: generation == 1)
    pipeline.do_all("ev")
    eventually(lambda: plan(call, "ev")["work"], lambda work: not work)


NIGHTLY = ("seal.after_upload", "seal.before_trim", "publish.before_manifest", "publish.after_manifest:2")


@pytest.mark.parametrize(
    "failpoint",
    [
        "seal.after_manifest",
        "publish.after_manifest",
        "publish.after_journal",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY),
    ],
)
def test_i3_killed_on_the_way(tmp_path: Path, failpoint: str) -> None:
    settings = {"TAILRACE_INDEX_L0_SPAN": "3"}
    server = ServerProcess(tmp_path / "data", env={**settings, "TAILRACE_FAILPOINT": failpoint})
    server.start()
    with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
        ordeal(server)
    server.wait_exit()
    server.env = settings
    server.start()
    ordeal(server)
    check(server)
    server.restart(kill=True)
    check(server)
    server.stop()


def check(server: ServerProcess) -> None:
    call = Caller(server)
    shown = plan(call, "ev")
    assert shown["work"] == []
    head = json.loads((server.data_dir / "objects" / shown["manifest"]["object"]).read_bytes())
    ranges = Counter((one[0], one[1], one[2]) for one in head["companions"])
    assert set(ranges.values()) == {1}
    assert {family for family, _, _ in ranges} == set(FAMILIES)
    for family in FAMILIES:
        entries = sorted(entries[1:] for entries in ranges if entries[0] == family)
        assert [first for first, _ in entries[1:]] == [last + 1 for _, last in entries[:-1]]
        assert (entries[0][0], entries[-1][1]) == (1, 4 * SEGMENTS)
    told = events(call, shown["stream_id"])
    segments = [one["value"] for one in told if one["type"] == "segment"]
    firsts = [one["first"] for one in segments]
    assert firsts == sorted(set(firsts))
    assert [info[2] for info in head["segments"]] == firsts
    assert len([one for one in told if one["type"] == "plan"]) == 1
    index_files = Counter(one["key"] for one in told if one["type"] == "companion")
    assert max(index_files.values()) <= len(FAMILIES)
    assert uncovered(shown) == []
