"""Queries over HTTP, before and after companions are published, and after these are damaged or lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from support.builder import Builder
from support.calls import Caller, eventually
from support.described import Described
from support.offers import SEARCH, fill, head_of, plan, planned, seal, uncovered
from support.server import ServerProcess

ROWS = 40
SEGMENTS, BUILDERS = 4, 3
KEY = {"jsonPointer": "/who", "required": False}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "data", env={"TAILRACE_TAIL_INDEX_MAX_BYTES": "0"})
    process.start()
    yield process
    process.stop()


SEARCHES: list[dict[str, Any]] = [
    {"q": "who:w1"},
    {"q": "what:word7"},
    {"q": "word7 OR word8"},
    {"q": "at:>=20000 -who:w0", "size": 3},
    {"q": "has:who", "sort": ["at:asc"], "size": 7},
]
SUMS = {"rollup": "all", "from": 0, "to": 60_000, "interval": "1m", "group_by": ["who"]}


def answers(call: Caller, name: str = "ev") -> list[Any]:
    """Everything that can be asked, without what the answers cost."""
    found: list[Any] = []
    for body in SEARCHES:
        # A search has three seconds, which a busy machine may need to bring its libraries.
        reply = eventually(
            lambda body=body: call("POST", f"{name}/_search", body), lambda found: found.status != 408
        )
        assert reply.status == 200, reply.body
        assert reply.body["coverage"]["complete"]
        found.append((reply.body["total"], reply.body["hits"], reply.body["next_search_after"]))
    found.append(call("POST", f"{name}/_aggregate", SUMS).body["buckets"])
    found.append(call("GET", f"{name}?offset=-1&filter=who:w2").body)
    found += [call("GET", f"{name}?offset=-1&key=w{number}").body for number in range(4)]
    found.append(call("GET", f"{name}/_routing_keys?limit=2").body["keys"])
    return found


def test_p8_m3_answers_do_not_change_when_companions_come_and_go(server: ServerProcess) -> None:
    call = Caller(server)
    assert call("PUT", "ev", headers={"Content-Type": "application/json"}).status == 201
    body = {"schema": {"type": "object"}, "search": SEARCH, "routingKey": KEY}
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
    page = call("GET", "ev/_routing_keys?limit=2").body
    listed = page["coverage"]
    assert listed["indexed_segments"] >= 2, "the hot store may not have heard of the last one yet"
    assert listed["scanned_uploaded_segments"] == 0
    for step in ("run_get", "decode", "enumerate", "merge"):
        assert page["timing"][f"lexicon_{step}_ms"] > 0, page["timing"]
    described = Described(server.port)
    for body in SEARCHES:
        described.call("POST /v1/stream/{name}/_search", body, name="ev")
    described.call("POST /v1/stream/{name}/_aggregate", SUMS, name="ev")
    for route in ("_routing_keys", "_details", "_index_status"):
        described.call(f"GET /v1/stream/{{name}}/{route}", name="ev")
    for path in ("/v1/pipeline/plan", "/v1/server/_details", "/v1/server/_mem"):
        described.call(f"GET {path}")
    described.close()
    asked = call("GET", "ev/_details").body["object_store_requests"]["by_artifact"]
    made = {row["artifact"]: row for row in asked}
    for kind in ("routing_index", "routing_key_lexicon", "exact_index", "bundled_companion"):
        assert int(made[kind]["heads"]) > 0, "what is published is looked at"
    for kind in ("routing_key_lexicon", "exact_index", "bundled_companion"):
        assert int(made[kind]["gets"]) > 0, "queries fetch it"
    memory = call("GET", "/v1/server/_mem").body["runtime_bytes"]
    assert memory["heap_estimates"]["companion_opened_bytes"] > 0
    assert set(memory["disk_caches"].values()) == {0}, "a local store"

    server.stop()
    for place, path in enumerate(files):
        path.unlink() if place % 2 else path.write_bytes(b"\0" * path.stat().st_size)
    server.start()
    assert answers(Caller(server)) == before


def test_p3_i4_those_who_build_the_same_at_once_end_in_one_state(server: ServerProcess) -> None:
    """Each of them builds every segment by itself, and most of what they publish is there already."""
    call = Caller(server)
    assert call("PUT", "ev", headers={"Content-Type": "application/json"}).status == 201
    body = {"schema": {"type": "object"}, "search": SEARCH, "routingKey": KEY}
    assert call("POST", "ev/_schema", body).status == 200
    for number in range(SEGMENTS):
        fill(call, "ev", 8, number * 8)
        seal(call, "ev")
    shown = planned(call, "ev", SEGMENTS)
    before = answers(call)
    together = Barrier(BUILDERS)

    def build(_: int) -> list[Path]:
        builder = Builder(Caller(server), server.data_dir)
        together.wait()
        return builder.publish_all("ev")

    with ThreadPoolExecutor(BUILDERS) as threads:
        made = [{*paths} for paths in threads.map(build, range(BUILDERS))]
    assert eventually(lambda: plan(call, "ev"), lambda left: not uncovered(left))["plan"] == shown["plan"]
    builder = Builder(call, server.data_dir)
    listed = head_of(builder, shown)["companions"]
    spans = sorted((family, first, last) for family, first, last, *_ in listed)
    whole = [(one["first"], one["last"]) for one in uncovered(shown)]
    assert spans == sorted((family, *span) for family in shown["plan"]["families"] for span in whole)
    offered = set[Path]().union(*made)
    assert {
        builder.objects / shown["manifest"]["object"].replace("manifest.json", one[4]) for one in listed
    } <= (offered)
    assert answers(call) == before


def test_p8_a_fork_is_answered_from_the_companions_of_its_source(server: ServerProcess) -> None:
    call = Caller(server)
    assert call("PUT", "ev", headers={"Content-Type": "application/json"}).status == 201
    key = {"jsonPointer": "/who", "required": False}
    body = {"schema": {"type": "object"}, "search": SEARCH, "routingKey": key}
    assert call("POST", "ev/_schema", body).status == 200
    offsets: list[str] = []
    for number in range(3):
        fill(call, "ev", ROWS, number * ROWS)
        seal(call, "ev")
        offsets.append(call("HEAD", "ev").headers["stream-next-offset"])
    fill(call, "ev", 5, 3 * ROWS)
    forks = {"all": call("HEAD", "ev").headers["stream-next-offset"], "two": offsets[1]}
    for name, offset in forks.items():
        headers = {"Stream-Forked-From": "/v1/stream/ev", "Stream-Fork-Offset": offset}
        assert call("PUT", name, headers=headers).status == 201
        fill(call, name, 7, 1000)
    planned(call, "ev", 3)
    before = {name: answers(call, name) for name in forks}

    def used(name: str) -> tuple[list[str], bool]:
        found = call("POST", f"{name}/_search", {"q": "word7 who:w1"}).body["coverage"]
        sums = call("POST", f"{name}/_aggregate", SUMS).body["coverage"]
        return found["index_families_used"], sums["used_rollups"]

    assert used("all") == used("two") == ([], False)
    Builder(call, server.data_dir).publish_all("ev")
    assert eventually(lambda: plan(call, "ev"), lambda shown: not uncovered(shown))
    assert {name: answers(call, name) for name in forks} == before
    assert used("all") == used("two") == (["col", "exact", "fts"], True)
    # One that asks for other things than its source is answered by what is left.
    search = {**SEARCH, "fields": {**SEARCH["fields"]}}
    search["fields"]["who"] = {**SEARCH["fields"]["who"], "normalizer": "lowercase_v1"}
    assert call("POST", "two/_schema", {"search": search}).status == 200
    assert answers(call, "two")[:-1] == before["two"][:-1]
    assert "exact" not in used("two")[0]
    assert call("DELETE", "ev").status == 204
    assert answers(call, "all") == before["all"]


def test_a5_a_changed_rollup_counts_at_once_and_from_rollups_when_it_is_built(server: ServerProcess) -> None:
    call = Caller(server)
    assert call("PUT", "ev", headers={"Content-Type": "application/json"}).status == 201
    assert call("POST", "ev/_schema", {"schema": {"type": "object"}, "search": SEARCH}).status == 200
    fill(call, "ev", ROWS)
    seal(call, "ev")
    builder = Builder(call, server.data_dir)

    def asked() -> tuple[dict[str, int], bool]:
        found = call("POST", "ev/_aggregate", SUMS).body
        groups = [group for bucket in found["buckets"] for group in bucket["groups"]]
        counts = {group["key"]["who"]: group["measures"]["n"]["count"] for group in groups}
        return counts, found["coverage"]["used_rollups"]

    def built() -> None:
        planned(call, "ev", 1)  # a changed configuration shows in the plan a moment after its answer
        builder.publish_all("ev")
        eventually(lambda: plan(call, "ev"), lambda shown: not uncovered(shown))

    counts = {f"w{number}": len(range(number, ROWS, 3)) for number in range(3)}
    built()
    assert asked() == (counts, True)
    for change in ({"include": "who:w1"}, {"measures": {"n": {"kind": "count", "include": "what:word4"}}}):
        rollup = {**SEARCH["rollups"]["all"], **change}
        assert call("POST", "ev/_schema", {"search": {**SEARCH, "rollups": {"all": rollup}}}).status == 200
        expected = {"w1": counts["w1"]} if "include" in change else {"w0": 0, "w1": 1, "w2": 0}
        assert asked() == (expected, False)
        built()
        assert asked() == (expected, True)
