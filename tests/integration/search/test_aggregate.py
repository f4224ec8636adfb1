"""Aggregates over HTTP and from the command line: what comes back in every state, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.aggregate_model import AggregateModel, rollup_search, rollup_view
from support.cli import tailrace
from support.sealing import SEALING_ENV, wait_sealed
from support.wire import Answer, Wire, fresh

JSON = "application/json"
NOON = 1767225600000
RECORDS: list[Any] = [
    {"at": NOON + 250 * n, "service": ["Checkout", "billing", None][n % 3], "status": n % 4, "ok": n % 2 == 0,
     "message": "checkout failed" if n % 5 == 0 else "fine", "id": "x" if n == 3 else f"r{n}",
     **({"ratio": (n - 7) * 1.5} if n % 2 else {}), "count": n % 3, "sum": n}
    for n in range(40)
]  # fmt: skip
RECORDS += [7, [], None, {"at": [NOON, NOON]}, {"at": NOON, "service": ["a", "b"]}, {"at": "never"}]
BODY = {"rollup": "all", "from": NOON, "to": NOON + 20_000, "interval": "1s"}
BODIES: list[dict[str, Any]] = [
    BODY,
    {**BODY, "group_by": ["service", "ok"]},
    {**BODY, "from": NOON + 300, "to": NOON + 700, "interval": "1h", "group_by": ["status"]},
    {**BODY, "q": "message:checkout OR id:r7", "measures": ["lat"]},
    {**BODY, "rollup": "some", "group_by": ["service"]},
    {**BODY, "rollup": "some", "q": "-status:3", "measures": ["value", "n"]},
]


def stream(http: Wire, *records: Any, search: object = None, name: str = "") -> str:
    name = name or fresh("aggregate")
    assert http.put(name, JSON).status == 201
    answer = http.post(
        f"{name}/_schema", JSON, json.dumps({"schema": {}, "search": search or rollup_search()})
    )
    assert answer.status == 200, answer.body
    if records:
        assert http.post(name, JSON, json.dumps(records)).status == 204
    return name


def ask(http: Wire, name: str, body: object) -> Answer:
    return http.post(f"{name}/_aggregate", JSON, json.dumps(body))


def check_all(http: Wire, name: str, records: list[Any]) -> None:
    model = AggregateModel(records, rollup_view())
    for body in BODIES:
        answer = ask(http, name, body)
        assert answer.status == 200, answer.body
        model.check(body, answer.json)
        assert answer.json["coverage"]["complete"]


@pytest.mark.parametrize("budget", ["0", "100000000"])
def test_a1_a4_aggregates_hold_while_hot_sealed_and_restarted(start_server: StartServer, budget: str) -> None:
    lazy = {"TAILRACE_SEAL_AGE_MS": "3600000", "TAILRACE_SEAL_ENTRIES": "100000"}
    server = start_server(env={**SEALING_ENV, **lazy, "TAILRACE_TAIL_INDEX_MAX_BYTES": budget})
    http = Wire(server.port)
    name = stream(http, *RECORDS)
    check_all(http, name, RECORDS)
    server.restart(kill=True)
    http.close()
    http = Wire(server.port)
    check_all(http, name, RECORDS)
    assert http.call("POST", "/v1/server/_seal").json == {"sealed": True}
    wait_sealed(server.data_dir)
    check_all(http, name, RECORDS)
    more = [{**record, "status": 99} for record in RECORDS[:5]]
    assert http.post(name, JSON, json.dumps(more)).status == 204
    check_all(http, name, RECORDS + more)
    server.restart()
    http.close()
    http = Wire(server.port)
    check_all(http, name, RECORDS + more)
    coverage = ask(http, name, {**BODY, "rollup": "some"}).json["coverage"]
    assert coverage["scanned_segments"] > 0
    http.close()


def test_an_answer_has_windows_groups_measures_and_coverage(http: Wire) -> None:
    name = stream(
        http,
        {"at": "2026-01-01T00:00:00Z", "service": "A", "ratio": 3, "status": 500},
        {"at": "2026-01-01T00:00:00.900Z", "service": "a", "ratio": [5, "9"], "ok": True},
        {"at": "2026-01-01T00:00:07Z", "service": "B"},
    )
    body = {**BODY, "from": "2026-01-01T00:00:00Z", "to": "1767225608000000000", "group_by": ["svc"]}
    answer = ask(http, name, {**body, "measures": ["lat", "n"]})
    assert answer.status == 200
    assert answer["content-type"] == "application/json; charset=utf-8"
    assert answer["cache-control"] == "no-store"
    found = answer.json
    head = {"stream": name, "rollup": "all", "interval": "1s"}
    assert {key: found[key] for key in head} == head
    assert (found["from"], found["to"]) == ("2026-01-01T00:00:00.000Z", "2026-01-01T00:00:08.000Z")
    first, second = found["buckets"]
    assert (first["start"], first["end"]) == ("2026-01-01T00:00:00.000Z", "2026-01-01T00:00:01.000Z")
    [group] = first["groups"]
    assert group["key"] == {"service": "a"}
    assert list(group["measures"]) == ["lat", "n"]
    assert group["measures"]["n"] == {"count": 2}
    lat = group["measures"]["lat"]
    assert (lat["count"], lat["sum"], lat["min"], lat["max"]) == (3, 17, 3, 9)
    assert lat["histogram"] == {"2": 1, "4": 1, "8": 1}
    assert lat["p50"] == pytest.approx(5, rel=0.01)
    [group] = second["groups"]
    assert group["measures"]["lat"]["count"] == group["measures"]["lat"]["sum"] == 0
    assert group["measures"]["lat"]["avg"] is group["measures"]["lat"]["p99"] is None
    coverage = found["coverage"]
    assert (coverage["mode"], coverage["complete"], coverage["used_rollups"]) == ("complete", True, False)
    assert coverage["visible_through_offset"] == coverage["stream_head_offset"]
    assert coverage["visible_through_primary_timestamp_max"] == "2026-01-01T00:00:07.000Z"
    assert coverage["oldest_omitted_append_at"] is None
    for name in ("uploaded_segments", "sealed_rows", "wal_rows"):
        assert coverage[f"possible_missing_{name}"] == 0


def test_nothing_is_an_answer_too(http: Wire) -> None:
    name = stream(http)
    answer = ask(http, name, BODY)
    assert (answer.status, answer.json["buckets"]) == (200, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollup": "no"}, "unknown rollup no"),
        ({"rollup": None}, "missing rollup"),
        ({"rollup": 7}, "rollup must be a string"),
        ({"from": None}, "missing from"),
        ({"interval": "2m"}, "interval 2m is not configured for rollup all"),
        ({"to": NOON}, "to must be greater than from"),
        ({"from": "yesterday"}, "from must be a valid timestamp"),
        ({"from": True}, "from must be a valid timestamp"),
        ({"from": -1e300}, "from must be a valid timestamp"),
        ({"from": [NOON]}, "from must be a valid timestamp"),
        ({"to": "9" * 19}, None),
        ({"to": "9" * 20}, "to must be a valid timestamp"),
        ({"to": "2026-02-30T00:00:00Z"}, "to must be a valid timestamp"),
        ({"to": 10**18}, "to must be a valid timestamp"),
        ({"group_by": ["id"]}, "group_by field id is not configured on rollup all"),
        ({"group_by": ["nope"]}, "group_by field nope is not configured on rollup all"),
        ({"group_by": ["service", "svc"]}, "group_by[1] is duplicated"),
        ({"group_by": "service"}, "group_by must be an array"),
        ({"measures": ["x"]}, "unknown measure x on rollup all"),
        ({"measures": ["n", "n"]}, "measures[1] is duplicated"),
        ({"measures": [1]}, "measures[0] must be a string"),
        ({"q": ""}, "q must not be empty"),
        ({"q": "nope:1"}, "unknown search field nope"),
        ({"q": 1}, "q must be a string"),
        ({"size": 1}, "aggregate.size is not supported"),
    ],
)
def test_what_is_refused(http: Wire, change: dict[str, Any], message: str | None) -> None:
    name = _shared(http)
    answer = ask(http, name, {**BODY, **change})
    if message is None:
        assert answer.status == 200
        return
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert answer.json["error"]["message"] == message


_names: dict[int, str] = {}


def _shared(http: Wire) -> str:
    """One stream for all refusals: none of them changes it."""
    if id(http) not in _names:
        _names[id(http)] = stream(http, *RECORDS)
    return _names[id(http)]


def test_other_refusals(http: Wire) -> None:
    name = _shared(http)
    assert http.post(f"{name}/_aggregate", JSON, "{").code == "invalid_json"
    assert ask(http, name, [1]).json["error"]["message"] == "aggregate must be an object"
    assert http.get(f"{name}/_aggregate").status == 405
    assert ask(http, fresh(), BODY).status == 404
    plain = fresh()
    assert http.put(plain, JSON).status == 201
    answer = ask(http, plain, BODY)
    assert answer.json["error"]["message"] == "search is not configured for this stream"
    assert answer.status == 400


def test_a_profile_brings_a_rollup_of_its_own(http: Wire) -> None:
    name = fresh("aggregate")
    assert http.put(name, JSON).status == 201
    assert http.post(f"{name}/_profile", JSON, json.dumps({"profile": {"kind": "metrics"}})).status == 200
    record = {
        "metric": "m",
        "unit": "ms",
        "windowStart": NOON,
        "windowEnd": NOON + 1000,
        "count": 3,
        "sum": 30,
    }
    record |= {"min": 4, "max": 20, "buckets": {"4": 2, "16": 1}}
    assert http.post(name, JSON, json.dumps([record, {**record, "unit": "s"}])).status == 204
    body = {"rollup": "metrics", "from": NOON, "to": NOON + 1, "interval": "10s", "group_by": ["unit"]}
    answer = ask(http, name, body)
    assert answer.status == 200, answer.body
    one, two = answer.json["buckets"][0]["groups"]
    assert (one["key"], two["key"]) == ({"unit": "ms"}, {"unit": "s"})
    value = one["measures"]["value"]
    assert (value["count"], value["sum"], value["histogram"]) == (3, 30, {"4": 2, "16": 1})
    assert value["percentile_method"] == "histogram"
    assert 4 <= value["p50"] <= 8


def test_the_command_shows_a_chart(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server()
    http = Wire(server.port)
    name = stream(http, *RECORDS, name="chart")
    span = ["--from", "2026-01-01T00:00:00Z", "--to", "2026-01-01T00:00:20Z", "--url", server.base_url]
    done = tailrace("aggregate", name, "all", "--interval", "1h", "--by", "service", "--measure", "n", *span)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["start", "service", "n"]
    assert len(lines) == 4
    assert lines[1].split()[:3] == ["2026-01-01T00:00:00.000Z", "billing", "13"]
    assert "█" in lines[1]
    assert "3 groups in 1 windows" in done.err
    done = tailrace("aggregate", name, "all", "--interval", "1h", "--query", "id:r1", "--json", *span)
    [line] = done.out.splitlines()
    assert json.loads(line)["measures"]["n"] == {"count": 1}
    done = tailrace("aggregate", name, "all", *span)
    assert done.code == 0
    assert {"start", "bad", "lat", "p95"} <= set(done.out.splitlines()[0].split())
    done = tailrace("aggregate", name, "nope", *span)
    assert (done.code, "unknown rollup nope" in done.err) == (1, True)
    http.close()
