"""Companions follow their streams: through plans, retention, deletion, lost disks, checks and sweeps."""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller, eventually
from support.described import Described
from support.offers import (
    FAMILIES,
    SEARCH,
    FakePipeline,
    configured,
    events,
    fill,
    head_of,
    plan,
    planned,
    seal,
    sealed,
    uncovered,
)
from support.server import ServerProcess
from tailrace.common.clock import FakeClock
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.sweep import Orphan, Sweeper
from tailrace.storage.verify import Verifier, VerifyFinding

DAY_NS = 24 * 3600 * 10**9


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(
        tmp_path_factory.mktemp("care") / "data", env={"TAILRACE_SEAL_INTERVAL_MS": "100"}
    )
    process.start()
    yield process
    process.stop()


def operations(found: list[dict[str, Any]], kind: str) -> list[str]:
    return [one["headers"]["operation"] for one in found if one["type"] == kind]


def test_every_fact_is_told_once(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 2)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    found = events(call, shown["stream_id"])
    segments = [one["value"] for one in found if one["type"] == "segment"]
    assert [(one["first"], one["last"], one["epoch"]) for one in segments] == [(1, 3, 0), (4, 6, 0)]
    assert {one["object"] for one in segments} == {one["object"] for one in uncovered(shown)}
    assert operations(found, "plan") == ["update"]
    companions = [one for one in found if one["type"] == "companion"]
    assert [one["value"]["families"] for one in companions] == [FAMILIES, FAMILIES]
    assert call("POST", "__segments__", [{}]).status == 405
    assert call("DELETE", ev).status == 204
    found = events(call, shown["stream_id"])
    assert operations(found, "segment") == ["insert", "insert", "delete", "delete"]
    assert [one["headers"].get("reason") for one in found if one["type"] == "plan"] == [None, "deleted"]


def test_a_new_plan_takes_over_bit_by_bit(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 2)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    old = {one[4] for one in head_of(pipeline, shown)["companions"]}
    search = copy.deepcopy(SEARCH)
    search["fields"]["what"]["positions"] = True
    assert call("POST", f"{ev}/_schema", {"search": search}).status == 200
    shown = planned(call, ev, 2)
    assert shown["plan"]["generation"] == 2
    # Only what the change concerns is built again.
    assert [one["families"] for one in uncovered(shown)] == [["fts"], ["fts"]]
    newest, oldest = uncovered(shown)
    assert pipeline.publish(pipeline.offer(shown, [newest])).status == 200
    head = head_of(pipeline, shown)
    listed = {one[4] for one in head["companions"]}
    # The old file of the segment that is covered is retired, the other one is still in use.
    assert len(listed & old) == len(old) - 1
    assert [key for key, _, _ in head["retired"]] == list(old - listed)
    assert pipeline.publish(pipeline.offer(shown, [oldest])).status == 200
    fts = [one for one in head_of(pipeline, shown)["companions"] if one[0] == "fts"]
    assert {one[8] for one in fts} == {shown["plan"]["hash"]}
    assert plan(call, ev)["work"] == []


def test_what_no_plan_wants_is_unlisted(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 1)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    search = {name: value for name, value in SEARCH.items() if name != "rollups"}
    assert call("POST", f"{ev}/_schema", {"search": search}).status == 200
    head = eventually(lambda: head_of(pipeline, shown), lambda found: len(found["companions"]) == 3)
    assert "agg" not in {one[0] for one in head["companions"]}


def test_asked_for_again(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 1)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    answer = call("POST", "/v1/pipeline/plan", {"stream": ev, "family": "col"})
    assert (answer.status, answer.body["scheduled"]) == (200, 1)
    shown = planned(call, ev, 1)
    assert uncovered(shown)[0]["families"] == ["col"]
    # The same bytes under the same name: retired before, and listed again.
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    assert head_of(pipeline, shown)["retired"] == []
    assert call("POST", "/v1/pipeline/plan", {"stream": ev, "family": "dance"}).code == "invalid_request"
    assert call("POST", "/v1/pipeline/plan", {"stream": "none"}).status == 404


def test_companions_go_with_their_entries(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    configured(call, ev, {"Stream-Retention-Bytes": "1"})
    fill(call, ev, 3)
    seal(call, ev)
    shown = plan(call, ev)
    if uncovered(shown):
        pipeline.publish(pipeline.offer(shown, uncovered(shown)))
    fill(call, ev, 3, 3)
    seal(call, ev)
    head = eventually(lambda: head_of(pipeline, shown), lambda found: found["earliest"] >= 3)
    assert all(one[2] > head["earliest"] for one in head["companions"])
    eventually(lambda: plan(call, ev)["earliest"], lambda earliest: earliest > 3)
    found = events(call, shown["stream_id"])
    assert "retention" in {one["headers"].get("reason") for one in found if one["type"] == "segment"}


def test_verification_and_the_sweep_know_them(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 1)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    stray = pipeline.objects / pipeline.put(shown, "col", 1, 3, "nobody offers this")["object"]
    objects = open_object_store(pipeline.objects.as_uri())

    def verify() -> list[VerifyFinding]:
        findings: list[VerifyFinding] = []
        asyncio.run(Verifier(objects, findings.append).stream(shown["stream_id"]))
        return findings

    def sweep(*, after_ns: int = 2 * DAY_NS, **options: Any) -> list[str]:
        found: list[Orphan] = []
        clock = FakeClock(stray.stat().st_mtime_ns + after_ns)
        sweeper = Sweeper(objects, found.append, tombstone_ns=DAY_NS, dry_run=True, clock=clock, **options)
        asyncio.run(sweeper.bucket())
        return [one.key for one in found if one.key.startswith(stray_prefix)]

    stray_prefix = shown["manifest"]["object"].removesuffix("manifest.json") + "companions/"
    assert verify() == []
    orphan = str(stray.relative_to(pipeline.objects))
    assert sweep() == [], "only the owner knows that nobody is about to publish it"
    assert sweep(offline=True) == [orphan]
    owner = ManifestStore(objects, 0)
    assert sweep(owner=owner) == [orphan]
    assert sweep(owner=owner, after_ns=DAY_NS // 2) == []
    assert sweep(owner=owner, after_ns=DAY_NS // 2, orphan_age_ns=DAY_NS // 4) == [orphan]
    listed = (
        pipeline.objects
        / stray_prefix.removesuffix("companions/")
        / head_of(pipeline, shown)["companions"][0][4]
    )
    data = listed.read_bytes()
    listed.write_bytes(data[:-1] + b"?")
    assert ["SHA-256" in one.problem for one in verify()] == [True]
    listed.unlink()
    assert [one.problem for one in verify()] == ["it does not exist"]
    listed.write_bytes(data)


def test_a_plan_that_is_wanted_again_is_in_the_store_again(
    call: Caller, pipeline: FakePipeline, ev: str
) -> None:
    """It may have been swept, since another took its place."""
    first = sealed(call, ev, 1)["plan"]
    other = copy.deepcopy(SEARCH)
    other["fields"]["what"]["positions"] = True
    for search, generation in ((other, 2), (SEARCH, 3)):
        (pipeline.objects / first["object"]).unlink(missing_ok=True)
        assert call("POST", f"{ev}/_schema", {"search": search}).status == 200
        shown = eventually(lambda: plan(call, ev), lambda found: found["plan"]["generation"] == generation)  # noqa: B023
        assert (pipeline.objects / shown["plan"]["object"]).is_file()
    assert shown["plan"]["hash"] == first["hash"]


def test_the_server_sweeps_plans_that_others_replaced(tmp_path: Path) -> None:
    env = {"TAILRACE_SEAL_INTERVAL_MS": "100", "TAILRACE_SWEEP_INTERVAL_MS": "200"}
    server = ServerProcess(tmp_path / "data", env=env).start()
    try:
        call = Caller(server)
        pipeline = FakePipeline(call, server.data_dir)
        wanted = pipeline.objects / sealed(call, "ev", 1)["plan"]["object"]
        forgotten = wanted.with_name(f"{'0' * 64}.json")
        forgotten.write_bytes(wanted.read_bytes())
        then_s = time.time() - 2 * DAY_NS / 1e9
        for path in (wanted, forgotten):
            os.utime(path, (then_s, then_s))
        eventually(forgotten.exists, lambda there: not there)
        assert wanted.is_file()
    finally:
        server.stop()


def test_a_bootstrap_brings_them_back(tmp_path: Path) -> None:
    first = ServerProcess(tmp_path / "first", args=["--object-store", (tmp_path / "bucket").as_uri()])
    first.start()
    call = Caller(first)
    pipeline = FakePipeline(call, tmp_path / "first")
    pipeline.objects = tmp_path / "bucket"
    shown = sealed(call, "ev", 2)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown)[:1])).status == 200
    seal(call)
    first.stop()
    shutil.rmtree(tmp_path / "first")
    args = ["--object-store", (tmp_path / "bucket").as_uri(), "--bootstrap", "--take-over"]
    second = ServerProcess(tmp_path / "second", args=args)
    second.start()
    try:
        again = planned(Caller(second), "ev", 1)
        assert again["plan"]["hash"] == shown["plan"]["hash"]
        assert uncovered(again)[0]["first"] == uncovered(shown)[1]["first"]
        other = FakePipeline(Caller(second), tmp_path / "second")
        other.objects = tmp_path / "bucket"
        assert other.publish(other.offer(again, uncovered(again))).body["result"] == "published"
    finally:
        second.stop()


def test_the_index_status_tells_how_far_things_are(
    server: ServerProcess, call: Caller, pipeline: FakePipeline, ev: str
) -> None:
    def status() -> dict[str, Any]:
        return call("GET", f"{ev}/_index_status").body

    shown = sealed(call, ev, 3)
    before = status()
    assert before["desired_index_plan_generation"] == 1
    assert [one["family"] for one in before["search_families"]] == ["col", "fts", "agg"]
    assert {one["lag_segments"] for one in before["search_families"]} == {3}
    assert {one["lag_ms"] for one in before["search_families"]} == {None}
    newest, middle, oldest = uncovered(shown)
    body = pipeline.offer(shown, [newest, oldest])
    body["inputs"].append({"object": middle["object"], "sha256": middle["sha256"]})
    body["quarantine"] = [{"object": middle["object"], "code": "undecodable", "message": "no page"}]
    assert pipeline.publish(body).status == 200
    found = eventually(status, lambda seen: seen["bundled_companions"]["object_count"])
    for one in found["search_families"]:
        assert (one["covered_segment_count"], one["contiguous_covered_segment_count"]) == (2, 1)
        assert (one["lag_segments"], one["object_count"], one["plan_generation"]) == (1, 2, 1)
        assert int(one["lag_ms"]) >= 0
        assert one["updated_at"] is not None
        assert one["fully_indexed_uploaded_segments"] is False
    (exact,) = found["exact_indexes"]
    assert (exact["name"], exact["indexed_segment_count"], exact["stale_configuration"]) == ("who", 1, False)
    assert found["last_error"] == "undecodable: no page"
    assert [(one["first"], one["last"]) for one in found["quarantined"]] == [
        (middle["first"], middle["last"])
    ]
    assert found["bundled_companions"]["object_count"] == 6
    described = Described(server.port)
    for route in ("_index_status", "_details"):
        described.call(f"GET /v1/stream/{{name}}/{route}", name=ev)
    described.close()
    search = copy.deepcopy(SEARCH)
    search["fields"]["who"]["normalizer"] = "lowercase_v1"
    assert call("POST", f"{ev}/_schema", {"search": search}).status == 200
    found = eventually(status, lambda seen: seen["desired_index_plan_generation"] == 2)
    found = eventually(status, lambda seen: seen["exact_indexes"][0]["stale_configuration"])
    assert [one["family"] for one in found["search_families"] if one["stale_segment_count"]] == ["agg"]
    pipeline.do_all(ev)
    found = eventually(status, lambda seen: seen["bundled_companions"]["fully_indexed_uploaded_segments"])
    assert (found["last_error"], found["exact_indexes"][0]["stale_configuration"]) == (None, False)
    storage = call("GET", f"{ev}/_details").body["storage"]
    assert storage["object_storage"]["bundled_companion_object_count"] == 9
    assert int(storage["companion_families"]["col_bytes"]) > 0
