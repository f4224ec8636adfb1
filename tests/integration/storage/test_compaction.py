"""Small segments become one, and nobody who reads notices: pages, keys, times, forks, crashes and all."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller, eventually
from support.offers import FakePipeline, configured, events, fill, head_of, plan, seal, sealed
from support.server import ServerProcess
from tailrace.common.clock import FakeClock
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.sweep import Orphan, Sweeper
from tailrace.storage.verify import Verifier, VerifyFinding

DAY_NS = 24 * 3600 * 10**9
SETTINGS = {
    "TAILRACE_COMPACT_SEGMENTS": "3",
    "TAILRACE_COMPACT_AGE_MS": "0",
    "TAILRACE_SEAL_INTERVAL_MS": "100",
    "TAILRACE_PIPELINE": "off",
    "TAILRACE_READ_PAGE_ENTRIES": "3",
}
TEXT = {"Content-Type": "text/plain"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("compaction") / "data", env=SETTINGS)
    process.start()
    yield process
    process.stop()


def small(call: Caller, name: str, segments: int = 3, rows: int = 3) -> None:
    """A stream of text with keys, in small segments, of which nothing is indexed but the keys."""
    assert call("PUT", name, headers=TEXT).status == 201
    for number in range(segments):
        for row in range(rows):
            key = {"Stream-Key": f"k{(number + row) % 3}"}
            body = f"{number}.{row} {'x' * 20}\n".encode()
            assert call("POST", name, body, headers={**TEXT, **key}).status == 204
        seal(call, name)


def compactions(call: Caller, name: str) -> list[dict[str, Any]]:
    return [work for work in plan(call, name)["work"] if work["job"] == "compact"]


def joined(pipeline: FakePipeline, name: str) -> dict[str, Any]:
    """Everything that is to be done, once there is something to be joined; the plan from before."""
    call = pipeline.call
    shown = eventually(lambda: plan(call, name), lambda found: found["work"])
    if not any(work["job"] == "compact" for work in shown["work"]):
        for work in shown["work"]:
            assert pipeline.publish(pipeline.offer(shown, work["segments"])).status == 200
        shown = eventually(lambda: plan(call, name), lambda found: found["work"])
    (work,) = [work for work in shown["work"] if work["job"] == "compact"]
    reply = pipeline.publish(pipeline.join(shown, work, "one"))
    assert (reply.status, reply.body["result"]) == (200, "published"), reply.body
    return shown


def everything(call: Caller, name: str) -> str:
    """A hash of every kind of read: pages with their offsets and tags, keys, single entries."""
    seen = hashlib.sha256()
    offsets: list[str] = []
    for path in (name, f"{name}/pk/k1"):
        offset = "-1"
        while True:
            reply = call("GET", f"{path}?offset={offset}")
            assert reply.status == 200, reply.body
            shown = (reply.headers["stream-next-offset"], reply.headers.get("etag"), reply.raw)
            seen.update(repr(shown).encode())
            offsets.append(offset)
            if reply.headers.get("stream-up-to-date") == "true":
                break
            offset = reply.headers["stream-next-offset"]
    for reply in (call("GET", f"{name}?offset={offset}") for offset in offsets):
        seen.update(reply.raw)
    details = call("GET", f"{name}/_details").body["stream"]
    seen.update(repr((details["next_offset"], details["epoch"])).encode())
    return seen.hexdigest()


def test_p15_every_read_is_the_same(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    small(call, ev)
    before = everything(call, ev)
    shown = joined(pipeline, ev)
    assert everything(call, ev) == before
    head = head_of(pipeline, shown)
    assert [(info[2], info[3]) for info in head["segments"]] == [(1, 9)]
    assert [(one[0], one[1]) for one in head["replaced"]] == [(1, 9)]
    assert compactions(call, ev) == []
    counts = call("GET", f"{ev}/_details").body["storage"]["object_storage"]
    assert counts["segment_object_count"] == 1
    told = [one for one in events(call, shown["stream_id"]) if one["type"] == "segment"]
    assert [one["headers"].get("reason") for one in told] == [None] * 3 + ["compacted"] * 3 + [None]
    assert (told[-1]["value"]["first"], told[-1]["value"]["last"]) == (1, 9)
    # The old objects are still there for those who know their names; without them nothing changes.
    folder = (pipeline.objects / shown["manifest"]["object"]).parent / "segments"
    assert len(list(folder.iterdir())) == 4
    for path in folder.iterdir():
        if not path.name.startswith("0000000000-00000000000000000001-00000000000000000009."):
            path.unlink()
    assert everything(call, ev) == before
    metrics = call("GET", "/metrics").raw.decode()
    assert 'tailrace_pipeline_publish_total{job="compact",outcome="published"}' in metrics
    assert "tailrace_compacted_segments_total " in metrics


def test_offered_again_and_by_others(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    small(call, ev)
    shown = eventually(lambda: plan(call, ev), lambda found: found["work"])
    keys = [work for work in shown["work"] if work["job"] == "companions"]
    for work in keys:
        assert pipeline.publish(pipeline.offer(shown, work["segments"])).status == 200
    shown = eventually(lambda: plan(call, ev), lambda _: compactions(call, ev))
    (work,) = compactions(call, ev)
    one, other = pipeline.join(shown, work, "one"), pipeline.join(shown, work, "other")
    damaged = pipeline.objects / other["add"][0]["object"]
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-100] + bytes(100))
    assert pipeline.publish(other).code == "object_missing"
    damaged.unlink()
    assert pipeline.publish(other).code == "object_missing"
    damaged.write_bytes(data)
    first = pipeline.publish(one)
    assert first.body["result"] == "published"
    again = pipeline.publish(one)
    assert again.body == {**first.body, "result": "already_published"}
    assert pipeline.publish(other).body["result"] == "already_published"
    half = {**one, "inputs": one["inputs"][:2], "replace": one["replace"][:2]}
    assert pipeline.publish(half).status in (200, 409)
    assert [info[3] for info in head_of(pipeline, shown)["segments"]] == [9]


def test_streams_without_indexes_and_of_the_server_are_joined_too(
    call: Caller, pipeline: FakePipeline, ev: str
) -> None:
    assert call("PUT", ev, headers=TEXT).status == 201
    for number in range(3):
        assert call("POST", ev, f"{number}".encode(), headers=TEXT).status == 204
        seal(call)
    for name in (ev, "__segments__"):
        before = call("GET", f"{name}?offset=-1").raw
        shown = eventually(lambda name=name: plan(call, name), lambda found: found["work"])
        assert shown["plan"]["families"] == []
        assert pipeline.publish(pipeline.join(shown, shown["work"][0])).body["result"] == "published"
        assert call("GET", f"{name}?offset=-1").raw == before


def test_searches_and_coverage(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 3)
    assert compactions(call, ev) == [], "they lack companions"
    for work in shown["work"]:
        assert pipeline.publish(pipeline.offer(shown, work["segments"])).status == 200
    status = eventually(
        lambda: call("GET", f"{ev}/_index_status").body,
        lambda found: found["bundled_companions"]["fully_indexed_uploaded_segments"],
    )
    assert status["segments"]["total_count"] == 3
    stamp = status["search_families"][0]["updated_at"]
    joined(pipeline, ev)
    status = eventually(
        lambda: call("GET", f"{ev}/_index_status").body,
        lambda found: found["segments"]["total_count"] == 1,
    )
    assert {one["lag_segments"] for one in status["search_families"]} == {0}
    assert {one["covered_segment_count"] for one in status["search_families"]} == {1}
    assert {one["updated_at"] for one in status["search_families"]} == {stamp}
    # Companions of the small ones go on to serve; nothing is to be built again.
    assert plan(call, ev)["work"] == []
    fill(call, ev, 3, 9)
    seal(call, ev)
    eventually(lambda: plan(call, ev)["work"], lambda work: [one["job"] for one in work] == ["companions"])


def test_when_things_were_built_is_known_after_a_restart(
    server: ServerProcess, call: Caller, pipeline: FakePipeline, ev: str
) -> None:
    shown = sealed(call, ev, 1)
    assert pipeline.publish(pipeline.offer(shown, shown["work"][0]["segments"])).status == 200

    def stamps() -> set[str | None]:
        return {one["updated_at"] for one in call("GET", f"{ev}/_index_status").body["search_families"]}

    (stamp,) = eventually(stamps, lambda found: None not in found)
    seal(call)
    server.restart(kill=True)
    assert eventually(stamps, lambda found: None not in found) == {stamp}


def test_forks_and_schema_versions_are_not_crossed(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    small(call, ev, 6, 1)
    fork = f"{ev}-fork"
    offset = call("GET", f"{ev}?offset=-1").headers["stream-next-offset"]
    headers = {"Stream-Forked-From": f"/v1/stream/{ev}", "Stream-Fork-Offset": offset, **TEXT}
    assert call("PUT", fork, headers=headers).status == 201
    seal(call)
    before = everything(call, ev), everything(call, fork)
    pipeline.do_all(ev)
    shown = plan(call, ev)
    entries = [(info[2], info[3]) for info in head_of(pipeline, shown)["segments"]]
    assert entries == [(1, 3), (4, 6)]
    assert (everything(call, ev), everything(call, fork)) == before
    assert call("DELETE", ev).status == 204
    assert everything(call, fork) == before[1]


def test_retention_takes_whole_segments(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    assert call("PUT", ev, headers={**TEXT, "Stream-Retention-Bytes": "3000"}).status == 201
    for _ in range(3):
        assert call("POST", ev, b"x" * 20, headers=TEXT).status == 204
        seal(call, ev)
    pipeline.do_all(ev)
    shown = plan(call, ev)
    assert [(info[2], info[3]) for info in head_of(pipeline, shown)["segments"]] == [(1, 3)]
    assert call("POST", ev, b"y" * 3000, headers=TEXT).status == 204
    seal(call, ev)
    head = eventually(lambda: head_of(pipeline, shown), lambda found: found["earliest"])
    assert head["earliest"] == 3
    assert call("GET", f"{ev}?offset=-1").raw == b"y" * 3000


def test_verification_and_the_sweep_know_what_was_replaced(
    call: Caller, pipeline: FakePipeline, ev: str
) -> None:
    small(call, ev)
    shown = joined(pipeline, ev)
    objects = open_object_store(pipeline.objects.as_uri())
    findings: list[VerifyFinding] = []
    asyncio.run(Verifier(objects, findings.append).stream(shown["stream_id"]))
    assert findings == []
    prefix = shown["manifest"]["object"].removesuffix("manifest.json") + "segments/"

    def swept(days: float) -> int:
        found: list[Orphan] = []
        (_, _, at_ns) = head_of(pipeline, shown)["replaced"][0]
        clock = FakeClock(at_ns + int(days * DAY_NS))
        sweeper = Sweeper(objects, found.append, tombstone_ns=DAY_NS, dry_run=True, clock=clock)
        asyncio.run(sweeper.bucket())
        return len([one for one in found if one.key.startswith(prefix)])

    assert (swept(0.9), swept(1.1)) == (0, 3)


@pytest.mark.nightly
def test_a_bootstrap_has_the_joined_segment(tmp_path: Path) -> None:
    bucket = ["--object-store", (tmp_path / "bucket").as_uri()]
    first = ServerProcess(tmp_path / "first", args=bucket, env=SETTINGS)
    first.start()
    pipeline = FakePipeline(Caller(first), tmp_path / "first")
    pipeline.objects = tmp_path / "bucket"
    small(pipeline.call, "ev")
    joined(pipeline, "ev")
    before = pipeline.call("GET", "ev?offset=-1").raw
    seal(pipeline.call)
    first.stop()
    second = ServerProcess(tmp_path / "second", args=[*bucket, "--bootstrap", "--take-over"], env=SETTINGS)
    second.start()
    try:
        call = Caller(second)
        assert call("GET", "ev?offset=-1").raw == before
        assert call("GET", "ev/_details").body["storage"]["object_storage"]["segment_object_count"] == 1
    finally:
        second.stop()


def test_a_segment_that_cannot_be_joined_is_left_out(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    configured(call, ev)
    for number in range(4):
        fill(call, ev, 1, number)
        seal(call, ev)
    shown = eventually(lambda: plan(call, ev), lambda found: len(found["work"]) == 1)
    assert pipeline.publish(pipeline.offer(shown, shown["work"][0]["segments"])).status == 200
    (work,) = eventually(lambda: compactions(call, ev), lambda found: found)
    bad = work["segments"][0]
    body = {
        "stream_id": shown["stream_id"],
        "job": "compact",
        "plan_hash": shown["plan"]["hash"],
        "inputs": [{"object": one["object"], "sha256": one["sha256"]} for one in work["segments"]],
        "quarantine": [{"object": bad["object"], "code": "undecodable", "message": "page header corrupt"}],
    }
    assert pipeline.publish(body).body["result"] == "published"
    (work,) = eventually(lambda: compactions(call, ev), lambda found: found)
    assert (work["first"], work["last"]) == (2, 4)
    assert pipeline.publish(pipeline.join(shown, work)).body["result"] == "published"
