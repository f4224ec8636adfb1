"""The contract with the pipeline: what the plan tells, and every answer that a publication can get."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller, eventually
from support.offers import (
    FAMILIES,
    SEARCH,
    FakePipeline,
    configured,
    fill,
    head_of,
    plan,
    planned,
    seal,
    sealed,
    uncovered,
)
from support.server import ServerProcess
from tailrace.search.index_files.index_plan import load_plan


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("pipeline") / "data", env={"TAILRACE_INDEX_L0_SPAN": "2"})
    process.start()
    yield process
    process.stop()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[FakePipeline]:
    """On a server that has no other streams."""
    process = ServerProcess(tmp_path / "data")
    process.start()
    yield FakePipeline(Caller(process), process.data_dir)
    process.stop()


def test_a_plan_tells_all_that_is_needed_to_build(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 2)
    prefix = shown["manifest"]["object"].removesuffix("manifest.json")
    assert shown["stream"] == ev
    assert prefix == f"streams/{shown['stream_id'][:2]}/{shown['stream_id']}/"
    assert (shown["epoch"], shown["earliest"], shown["content_type"]) == (0, 1, "application/json")
    assert shown["plan"]["generation"] == 1
    assert shown["plan"]["families"] == FAMILIES
    # The newest come first.
    assert [(one["first"], one["last"]) for one in uncovered(shown)] == [(4, 6), (1, 3)]
    assert all(one["families"] == FAMILIES for one in uncovered(shown))
    stored = load_plan((pipeline.objects / shown["plan"]["object"]).read_bytes())
    assert stored.plan.hash == shown["plan"]["hash"]
    assert stored.families == tuple(FAMILIES)
    for one in uncovered(shown):
        assert (pipeline.objects / one["object"]).stat().st_size == one["bytes"]


def test_a_stream_without_families_has_a_place_and_no_work(call: Caller) -> None:
    assert call("PUT", "plain", b"x", headers={"Content-Type": "text/plain"}).status == 201
    seal(call, "plain")
    shown = plan(call, "plain")
    assert (shown["work"], shown["plan"]["families"]) == ([], [])
    assert shown["plan"]["object"] is None
    assert shown["manifest"]["generation"] > 0
    assert call("GET", "/v1/pipeline/plan?stream=none").status == 404


def test_keys_are_indexed_wherever_they_come_from(call: Caller) -> None:
    assert call("PUT", "keyed", headers={"Content-Type": "text/plain"}).status == 201
    assert (
        call("POST", "keyed", b"x", headers={"Content-Type": "text/plain", "Stream-Key": "k"}).status == 204
    )
    seal(call, "keyed")
    shown = planned(call, "keyed", 1)
    assert shown["plan"]["families"] == ["routing_key_index"]


def test_pages_begin_with_what_waits_longest(alone: FakePipeline) -> None:
    call = alone.call
    for name in ("c", "a", "b"):
        sealed(call, name, 1)

    def page(query: str = "") -> dict[str, Any]:
        return call("GET", f"/v1/pipeline/plan{query}").body

    whole = eventually(page, lambda body: len(body["streams"]) == 3)
    assert [one["stream"] for one in whole["streams"]] == ["c", "a", "b"]
    assert whole["next_after"] is None
    assert whole["store"] == alone.objects.as_uri()
    names: list[str] = []
    after = ""
    while True:
        body = page(f"?limit=1{after}")
        names += [one["stream"] for one in body["streams"]]
        if body["next_after"] is None:
            break
        after = f"&after={body['next_after']}"
    assert names == ["c", "a", "b"]
    assert page("?jobs=merge")["streams"] == []
    for query in ("?limit=0", "?limit=501", "?jobs=dance", "?after=x", "?live=sse"):
        assert call("GET", f"/v1/pipeline/plan{query}").code == "invalid_request"
    assert call("POST", "/v1/pipeline/publish", b"{").code == "invalid_request"
    assert call("GET", "/v1/pipeline/publish").status == 405
    assert call("DELETE", "/v1/pipeline/plan").status == 405
    assert call("GET", "/v1/pipeline/else").status == 404


def test_a_long_poll_is_answered_when_there_is_work(alone: FakePipeline) -> None:
    call, ev = alone.call, "ev"
    assert call("GET", "/v1/pipeline/plan?live=long-poll").body["streams"] == []
    configured(call, ev)
    fill(call, ev, 3)
    seal(call, ev)
    body = call("GET", "/v1/pipeline/plan?live=long-poll").body
    assert [one["stream"] for one in body["streams"]] == [ev]


def test_p4_published_once_whatever_is_repeated(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 1)
    body = pipeline.offer(shown, uncovered(shown))
    first = pipeline.publish(body)
    assert (first.status, first.body["result"]) == (200, "published")
    assert first.body["manifest_generation"] == shown["manifest"]["generation"] + 1
    again = pipeline.publish(body)
    assert (again.status, again.body["result"]) == (200, "already_published")
    assert again.body["manifest_generation"] == first.body["manifest_generation"]
    # Another run may have made other bytes of the same: the first one counts.
    other = pipeline.publish(pipeline.offer(shown, uncovered(shown), "other bytes"))
    assert other.body["result"] == "already_published"
    assert plan(call, ev)["work"] == []
    head = json.loads((pipeline.objects / shown["manifest"]["object"]).read_bytes())
    assert [one[0] for one in head["companions"]] == FAMILIES


def test_p6_a_plan_that_is_no_longer_wanted(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 1)
    body = pipeline.offer(shown, uncovered(shown))
    search = copy.deepcopy(SEARCH)
    search["fields"]["who"]["prefix"] = True
    assert call("POST", f"{ev}/_schema", {"search": search}).status == 200
    eventually(lambda: plan(call, ev)["plan"]["generation"], lambda generation: generation == 2)
    assert pipeline.publish(body).code == "plan_superseded"


def test_p6_inputs_that_are_not_listed(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 1)
    body = pipeline.offer(shown, uncovered(shown))
    other = copy.deepcopy(body)
    other["inputs"][0]["sha256"] = "0" * 64
    assert pipeline.publish(other).code == "inputs_changed"
    other["inputs"][0]["object"] = other["inputs"][0]["object"].replace("0000003.", "0000004.")
    assert pipeline.publish(other).code == "inputs_changed"
    assert pipeline.publish(body).status == 200


def test_ranges_that_do_not_fit(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 2)
    segments = uncovered(shown)
    body = pipeline.offer(shown, segments)
    hole = {**body, "add": [one for one in body["add"] if one["family"] != "fts"]}
    assert pipeline.publish(hole).code == "range_conflict"
    beyond = {**pipeline.offer(shown, segments[:1]), "add": body["add"]}
    assert pipeline.publish(beyond).code == "range_conflict"
    assert pipeline.publish(pipeline.offer(shown, segments[:1])).status == 200
    wide = [pipeline.put(shown, family, 1, 6) for family in FAMILIES]
    assert pipeline.publish({**body, "add": wide}).code == "range_conflict"
    # What is listed already is left as it is; the rest is published.
    assert pipeline.publish(body).body["result"] == "published"
    assert pipeline.publish(body).body["result"] == "already_published"


def test_objects_that_are_not_there(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 1)
    body = pipeline.offer(shown, uncovered(shown))
    path = pipeline.objects / body["add"][2]["object"]
    data = path.read_bytes()
    path.unlink()
    assert pipeline.publish(body).code == "object_missing"
    path.write_bytes(data + b"more")
    assert pipeline.publish(body).code == "object_missing"
    path.write_bytes(data)
    assert pipeline.publish(body).body["result"] == "published"
    named = copy.deepcopy(body)
    named["add"][0]["object"] = "../../elsewhere"
    assert pipeline.publish(named).code == "invalid_request"


def test_p6_streams_that_are_not_there(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 1)
    body = pipeline.offer(shown, uncovered(shown))
    assert pipeline.publish({**body, "stream_id": "0" * 32}).code == "not_found"
    assert pipeline.publish({**body, "stream_id": "x"}).code == "invalid_request"
    assert call("DELETE", ev).status == 204
    assert pipeline.publish(body).code == "stream_gone"
    again = sealed(call, ev, 1)
    assert again["stream_id"] != shown["stream_id"]
    assert pipeline.publish(body).code == "stream_gone"
    assert len(uncovered(plan(call, ev))) == 1


def test_a_store_that_is_down_changes_nothing(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 1)
    body = pipeline.offer(shown, uncovered(shown))
    aside = pipeline.objects.with_name("aside")
    pipeline.objects.rename(aside)
    pipeline.objects.write_text("in the way")
    try:
        assert pipeline.publish(body).status in (400, 503)
    finally:
        pipeline.objects.unlink()
        aside.rename(pipeline.objects)
    eventually(lambda: pipeline.publish(body).status, lambda status: status == 200)


def test_too_large_a_body(call: Caller) -> None:
    assert call("POST", "/v1/pipeline/publish", b" " * (1024 * 1024 + 1)).status == 413


def test_a_merge_takes_the_place_of_its_inputs(call: Caller, pipeline: FakePipeline, ev: str) -> None:
    shown = sealed(call, ev, 2)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    shown = eventually(lambda: plan(call, ev), lambda found: found["work"])
    families = [work["family"] for work in shown["work"]]
    assert families == ["agg", "exact", "fts"]
    work = shown["work"][1]
    assert (work["job"], work["level"], work["first"], work["last"]) == ("merge", 1, 1, 6)
    body = pipeline.merge(shown, work)
    short = {**body, "add": [pipeline.put(shown, "exact", 1, 5)]}
    assert pipeline.publish(short).code == "range_conflict"
    assert pipeline.publish(body).body["result"] == "published"
    assert pipeline.publish(body).body["result"] == "already_published"
    # Another merge of the same inputs, which are gone.
    other = pipeline.merge(shown, work, "otherwise")
    assert pipeline.publish(other).body["result"] == "already_published"
    head = json.loads((pipeline.objects / shown["manifest"]["object"]).read_bytes())
    exact = [one for one in head["companions"] if one[0] == "exact"]
    assert [(one[1], one[2], one[9]) for one in exact] == [(1, 6, 1)]
    assert len(head["retired"]) == 2
    # Those who looked at the manifest before still find them.
    folder = (pipeline.objects / shown["manifest"]["object"]).parent
    assert all((folder / retired[0]).exists() for retired in head["retired"])


def test_p19_a_segment_that_cannot_be_read_delays_only_itself(
    call: Caller, pipeline: FakePipeline, ev: str
) -> None:
    shown = sealed(call, ev, 2)
    good, bad = uncovered(shown)
    body = pipeline.offer(shown, [good])
    body["inputs"].append({"object": bad["object"], "sha256": bad["sha256"]})
    body["quarantine"] = [{"object": bad["object"], "code": "undecodable", "message": "page header corrupt"}]
    assert pipeline.publish(body).body["result"] == "published"
    assert pipeline.publish(body).body["result"] == "already_published"
    assert uncovered(plan(call, ev)) == []
    # It is tried again under the next plan, and may turn out well.
    search = copy.deepcopy(SEARCH)
    search["fields"]["who"]["column"] = True
    assert call("POST", f"{ev}/_schema", {"search": search}).status == 200
    shown = planned(call, ev, 2)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).body["result"] == "published"


def test_i3_what_is_published_outlives_a_crash(
    server: ServerProcess, call: Caller, pipeline: FakePipeline, ev: str
) -> None:
    shown = sealed(call, ev, 3)
    segments = uncovered(shown)
    body = pipeline.offer(shown, segments[:2])
    assert pipeline.publish(body).status == 200
    server.restart(kill=True)
    assert [one["first"] for one in uncovered(planned(call, ev, 1))] == [segments[2]["first"]]
    assert pipeline.publish(body).body["result"] == "already_published"
    seal(call, ev)
    server.restart()
    assert [one["first"] for one in uncovered(planned(call, ev, 1))] == [segments[2]["first"]]


def test_rollups_are_taken_apart_before_retention_comes_to_them(
    call: Caller, pipeline: FakePipeline, ev: str
) -> None:
    configured(call, ev, {"Stream-Retention-Bytes": "10000"})
    for number in range(2):
        fill(call, ev, 3, 3 * number)
        seal(call, ev)
    shown = planned(call, ev, 2)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    shown = eventually(lambda: plan(call, ev), lambda found: found["work"])
    (work,) = [work for work in shown["work"] if work["family"] == "agg"]
    assert pipeline.publish(pipeline.merge(shown, work)).status == 200

    def listed() -> list[tuple[int, int]]:
        companions = head_of(pipeline, shown)["companions"]
        return sorted((one[1], one[2]) for one in companions if one[0] == "agg")

    def add(size: int) -> None:
        """One entry of so many bytes."""
        bare = len(json.dumps({"at": 0, "who": "w", "what": ""}))
        assert call("POST", ev, [{"at": 0, "who": "w", "what": "x" * (size - bare)}]).status == 204
        seal(call, ev)

    assert listed() == [(1, 6)]
    add(9300)  # nine tenths of what is retained: the oldest will go soon

    def rewrites() -> list[dict[str, Any]]:
        return [work for work in plan(call, ev)["work"] if "replace" in work]

    (work,) = eventually(rewrites, lambda found: found)
    assert [(one["first"], one["last"], one["families"]) for one in work["segments"]] == [
        (1, 3, ["agg"]),
        (4, 6, ["agg"]),
    ]
    body = {**pipeline.offer(shown, work["segments"]), "replace": work["replace"]}
    half = {**pipeline.offer(shown, work["segments"][:1]), "replace": work["replace"]}
    assert pipeline.publish(half).code == "range_conflict"
    assert pipeline.publish(body).body["result"] == "published"
    assert pipeline.publish(body).body["result"] == "already_published"
    assert listed() == [(1, 3), (4, 6)]
    merged = [work["family"] for work in plan(call, ev)["work"] if work["job"] == "merge"]
    assert "agg" not in merged, "they would have to be taken apart again"
    add(600)

    def trimmed() -> int:
        seal(call, ev)  # retention takes objects away after a checkpoint
        return head_of(pipeline, shown)["earliest"]

    eventually(trimmed, lambda earliest: earliest == 3)
    assert listed() == [(4, 6)], "what is left is still summed up"


def test_what_retention_has_left_of_a_merged_file_is_built_again(
    call: Caller, pipeline: FakePipeline, ev: str
) -> None:
    configured(call, ev, {"Stream-Retention-Bytes": "1000"})
    for number in range(2):
        fill(call, ev, 3, 3 * number)
        seal(call, ev)
    shown = planned(call, ev, 2)
    assert pipeline.publish(pipeline.offer(shown, uncovered(shown))).status == 200
    shown = eventually(lambda: plan(call, ev), lambda found: found["work"])
    (work,) = [work for work in shown["work"] if work.get("family") == "fts"]
    assert pipeline.publish(pipeline.merge(shown, work)).status == 200

    def listed() -> list[tuple[int, int]]:
        companions = head_of(pipeline, shown)["companions"]
        return sorted((one[1], one[2]) for one in companions if one[0] == "fts")

    assert listed() == [(1, 6)]
    assert call("POST", ev, [{"at": 0, "who": "w", "what": "x" * 915}]).status == 204

    def trimmed() -> int:
        seal(call, ev)  # retention takes objects away after a checkpoint
        return head_of(pipeline, shown)["earliest"]

    eventually(trimmed, lambda earliest: earliest == 3)

    def rewrites() -> list[dict[str, Any]]:
        return [work for work in plan(call, ev)["work"] if "replace" in work]

    (work,) = eventually(rewrites, lambda found: found)
    assert [(one["first"], one["last"], one["families"]) for one in work["segments"]] == [(4, 6, ["fts"])]
    body = {**pipeline.offer(shown, work["segments"]), "replace": work["replace"]}
    assert pipeline.publish(body).body["result"] == "published"
    assert pipeline.publish(body).body["result"] == "already_published"
    assert listed() == [(4, 6)]
    assert rewrites() == []
