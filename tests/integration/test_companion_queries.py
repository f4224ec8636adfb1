"""Queries over HTTP, before and after companions are published, and after these are damaged or lost."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller, eventually
from support.offers import SEARCH, FakePipeline, fill, plan, planned, seal, uncovered
from support.server import ServerProcess
from tailrace.pipeline.kernels.parquet import Built
from tailrace.pipeline.kernels.segment import BuildRequest, build_segment
from tailrace.query.family_format import companion_name
from tailrace.query.index_plan import load_plan

ROWS = 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "data", env={"TAILRACE_TAIL_INDEX_MAX_BYTES": "0"})
    process.start()
    yield process
    process.stop()


class Builder(FakePipeline):
    """Publishes what the kernels build."""

    def publish_all(self, name: str) -> list[Path]:
        """Builds and publishes companions of every segment that lacks them; answers their files."""
        shown, made = plan(self.call, name), list[Path]()
        stored = load_plan((self.objects / shown["plan"]["object"]).read_bytes())
        prefix = shown["manifest"]["object"].removesuffix("manifest.json")
        for one in uncovered(shown):
            with tempfile.TemporaryDirectory() as directory:
                request = BuildRequest(
                    shown["stream_id"],
                    one["first"],
                    one["last"],
                    one["rows"],
                    one["sha256"],
                    frozenset(one["families"]),
                    stored,
                    Path(directory),
                )
                built = build_segment((self.objects / one["object"]).read_bytes(), request)
            added: list[dict[str, Any]] = []
            for file in built:
                sha256 = hashlib.sha256(file.data).hexdigest()
                key = prefix + companion_name(
                    stored.plan.hash, file.family, one["first"], one["last"], sha256
                )
                path = self.objects / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.data)
                made.append(path)
                added.append(self.added(file, key, sha256, one))
            body = {
                "stream_id": shown["stream_id"],
                "job": "companions",
                "plan_hash": shown["plan"]["hash"],
                "inputs": [{"object": one["object"], "sha256": one["sha256"]}],
                "add": added,
            }
            reply = self.publish(body)
            assert reply.status == 200, reply.body
        return made

    def added(self, file: Built, key: str, sha256: str, segment: dict[str, Any]) -> dict[str, Any]:
        return {
            "family": file.family,
            "first": segment["first"],
            "last": segment["last"],
            "rows": file.rows,
            "object": key,
            "bytes": len(file.data),
            "sha256": sha256,
            "stats": dict(file.stats),
        }


SEARCHES: list[dict[str, Any]] = [
    {"q": "who:w1"},
    {"q": "what:word7"},
    {"q": "word7 OR word8"},
    {"q": "at:>=20000 -who:w0", "size": 3},
    {"q": "has:who", "sort": ["at:asc"], "size": 7},
]
SUMS = {"rollup": "all", "from": 0, "to": 60_000, "interval": "1m", "group_by": ["who"]}


def answers(call: Caller) -> list[Any]:
    """Everything that can be asked, without what the answers cost."""
    found: list[Any] = []
    for body in SEARCHES:
        reply = call("POST", "ev/_search", body)
        assert reply.status == 200, reply.body
        assert reply.body["coverage"]["complete"]
        found.append((reply.body["total"], reply.body["hits"], reply.body["next_search_after"]))
    found.append(call("POST", "ev/_aggregate", SUMS).body["buckets"])
    found.append(call("GET", "ev?offset=-1&filter=who:w2").body)
    found += [call("GET", f"ev?offset=-1&key=w{number}").body for number in range(4)]
    found.append(call("GET", "ev/_routing_keys?limit=2").body["keys"])
    return found


def test_p8_m3_answers_do_not_change_when_companions_come_and_go(server: ServerProcess) -> None:
    call = Caller(server)
    assert call("PUT", "ev", headers={"Content-Type": "application/json"}).status == 201
    key = {"jsonPointer": "/who", "required": False}
    body = {"schema": {"type": "object"}, "search": SEARCH, "routingKey": key}
    assert call("POST", "ev/_schema", body).status == 200
    for number in range(3):
        fill(call, "ev", ROWS, number * ROWS)
        seal(call, "ev")
    fill(call, "ev", 5, 3 * ROWS)
    planned(call, "ev", 3)
    before = answers(call)
    assert call("POST", "ev/_search", {"q": "who:w1"}).body["coverage"]["indexed_segments"] == 0

    files = Builder(call, server.data_dir).publish_all("ev")
    assert eventually(lambda: plan(call, "ev"), lambda shown: not uncovered(shown))
    assert answers(call) == before
    reply = call("POST", "ev/_search", {"q": "word7 who:w1"})
    coverage = reply.body["coverage"]
    assert (coverage["indexed_segments"], coverage["scanned_segments"]) == (3, 0)
    assert coverage["index_families_used"] == ["col", "exact", "fts"]
    assert reply.headers["search-indexed-segments"] == "3"
    sums = call("POST", "ev/_aggregate", SUMS).body["coverage"]
    assert (sums["used_rollups"], sums["indexed_segments"]) == (True, 3)
    listed = call("GET", "ev/_routing_keys?limit=2").body["coverage"]
    assert listed["indexed_segments"] >= 2, "the hot store may not have heard of the last one yet"
    assert listed["scanned_uploaded_segments"] == 0

    server.stop()
    for place, path in enumerate(files):
        path.unlink() if place % 2 else path.write_bytes(b"\0" * path.stat().st_size)
    server.start()
    assert answers(Caller(server)) == before
