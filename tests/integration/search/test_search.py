"""Searches over HTTP: what comes back, what is refused, and that nothing acknowledged is missed."""

from __future__ import annotations

import json
import threading
from typing import Any
from urllib.parse import quote

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.search_model import RENAMED, search_body
from support.wire import Answer, Wire, fresh
from tailrace.protocol.http_headers import RESPONSE_HEADERS, SEARCH_HEADERS
from tailrace.protocol.offsets import encode_offset

JSON = "application/json"
A = {
    "id": "a",
    "service": "Checkout",
    "status": 500,
    "message": "the payment failed badly",
    "at": 1767225600000,
}
B = {"id": "b", "service": "billing", "status": 200, "message": "payment fine", "at": 1767225700000}
C = {"id": ["c", "a"], "service": "failed", "status": [404, 7]}


def stream(http: Wire, *records: Any, search: object = None) -> str:
    name = fresh("search")
    assert http.put(name, JSON).status == 201
    update = {"schema": {}, "search": search or search_body()}
    answer = http.post(f"{name}/_schema", JSON, json.dumps(update))
    assert answer.status == 200, answer.body
    if records:
        assert http.post(name, JSON, json.dumps(records)).status == 204
    return name


def ask(http: Wire, name: str, **body: Any) -> Answer:
    return http.post(f"{name}/_search", JSON, json.dumps(body))


def ids(answer: Answer) -> list[Any]:
    assert answer.status == 200, answer.body
    return [hit["source"]["id"] for hit in answer.json["hits"]]


def test_a_search_by_get_and_by_post_is_the_same_search(http: Wire) -> None:
    name = stream(http, A, B, C)
    parameters = f"q={quote('has:id')}&size=2&sort=status:asc,offset&timeout_ms=2000"
    by_get = http.get(f"{name}/_search?{parameters}").json
    by_post = ask(http, name, q="has:id", size=2, sort=["status:asc", "offset"], timeout_ms=2000).json
    for body in (by_get, by_post):
        body.pop("took_ms")
        body.pop("coverage")
    assert by_get == by_post
    assert [hit["sort"] for hit in by_post["hits"]] == [[7, encode_offset(0, 3)], [200, encode_offset(0, 2)]]
    after = quote(json.dumps(by_post["next_search_after"]))
    rest = http.get(f"{name}/_search?{parameters}&search_after={after}").json
    assert [hit["source"] for hit in rest["hits"]] == [A]
    assert rest["next_search_after"] is None
    assert rest["total"] == {"value": 3, "relation": "eq"}
    again = http.get(f"{name}/_search?q=has:id&size=2&sort=status:asc&sort=offset").json
    assert again["hits"] == by_post["hits"]


def test_the_answer_has_every_field_and_its_headers(http: Wire) -> None:
    name = stream(http, A, B, C, 7)
    answer = ask(http, name, q="failed")
    body = answer.json
    assert list(body) == [
        "stream",
        "snapshot_end_offset",
        "took_ms",
        "timed_out",
        "timeout_ms",
        "coverage",
        "total",
        "hits",
        "next_search_after",
    ]
    assert (body["stream"], body["snapshot_end_offset"], body["timeout_ms"]) == (
        name,
        encode_offset(0, 4),
        3000,
    )
    text, keyword = body["hits"]
    assert (keyword["source"], keyword["score"], keyword["sort"]) == (
        C,
        1.0,
        [1.0, None, encode_offset(0, 3)],
    )
    assert (text["source"], text["offset"]) == (A, encode_offset(0, 1))
    assert text["fields"] == {name: A[name] for name in ("id", "service", "status", "at", "message")}
    coverage = body["coverage"]
    assert (coverage["mode"], coverage["complete"]) == ("complete", True)
    assert coverage["stream_head_offset"] == coverage["visible_through_offset"] == encode_offset(0, 4)
    assert coverage["visible_through_primary_timestamp_max"] == "2026-01-01T00:01:40.000Z"
    assert coverage["oldest_omitted_append_at"] is None
    assert coverage["possible_missing_events_upper_bound"] == 0
    assert coverage["index_families_used"] == []
    assert answer["cache-control"] == "no-store"
    assert answer["search-timed-out"] == "false"
    assert answer["search-total-relation"] == "eq"
    assert answer["search-coverage-complete"] == "true"
    for counter in (
        "indexed-segments",
        "indexed-segment-time-ms",
        "fts-section-get-ms",
        "fts-decode-ms",
        "fts-clause-estimate-ms",
        "scanned-segments",
        "scanned-segment-time-ms",
        "scanned-tail-docs",
        "scanned-tail-time-ms",
        "exact-candidate-time-ms",
        "candidate-doc-ids",
        "decoded-records",
        "json-parse-time-ms",
        "segment-payload-bytes-fetched",
        "sort-time-ms",
        "peak-hits-held",
    ):
        assert answer[f"search-{counter}"] == str(coverage[counter.replace("-", "_")])


def test_browsers_may_read_every_header_of_a_search(http: Wire) -> None:
    answer = ask(http, stream(http, A), q="failed")
    own = [header for header, _ in answer.headers if header.startswith("search-")]
    assert own == list(SEARCH_HEADERS)
    exposed = answer["access-control-expose-headers"].split(", ")
    assert set(exposed) == {*RESPONSE_HEADERS, *SEARCH_HEADERS}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "missing q"),
        ({"q": 5}, "q must be a string"),
        ({"q": "  "}, "q must not be empty"),
        ({"q": "x", "size": 0}, "size must be an integer between 1 and 500"),
        ({"q": "x", "size": 501}, "size must be an integer between 1 and 500"),
        ({"q": "x", "size": "5"}, "size must be an integer between 1 and 500"),
        ({"q": "x", "timeout_ms": -1}, "timeout_ms must be a number of at least 0"),
        ({"q": "x", "track_total_hits": True}, "track_total_hits is no longer supported"),
        ({"q": "x", "from": 5}, "search.from is not supported"),
        ({"q": "x", "sort": "id"}, "sort must be an array"),
        ({"q": "x", "sort": ["nobody"]}, "unknown sort field nobody"),
        ({"q": "x", "sort": ["message"]}, "search field message is not sortable"),
        ({"q": "x", "sort": ["id:up"]}, "invalid sort direction for id"),
        ({"q": "id:a", "search_after": 5}, "search_after must be an array"),
        ({"q": "id:a", "search_after": []}, "search_after must have 1 values, one for each sort key"),
        ({"q": "id:a", "search_after": [5]}, "search_after[0] has the wrong type"),
        ({"q": "id:a", "search_after": ["nowhere"]}, "search_after[0] has the wrong type"),
        ({"q": "id:a", "sort": ["id"], "search_after": [5, None]}, "search_after[0] has the wrong type"),
        (
            {"q": "id:a", "sort": ["status"], "search_after": ["5", None]},
            "search_after[0] has the wrong type",
        ),
        ({"q": "nobody:x"}, "unknown search field nobody"),
        ({"q": "(x"}, "missing ')' in search query"),
        ({"q": '"x'}, "unterminated quoted string in search query"),
        ({"q": "id:"}, "expected value in fielded search clause"),
        ({"q": "status:abc"}, "invalid value for search field"),
        ({"q": "plan:x*"}, "search field plan does not support prefix queries"),
        ({"q": "ratio:>x"}, "invalid value for search field"),
        ({"q": "ok:>1"}, "search field ok does not support comparisons"),
        ({"q": "has:note"}, None),
        ({"q": 'note:"a b"'}, "search field note does not support phrase queries"),
        ({"q": "message:!!!"}, "search text clause did not produce any searchable tokens"),
        ({"q": "contains:x"}, "contains: is not supported on _search yet"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(http: Wire, body: Any, message: str | None) -> None:
    name = stream(http)
    answer = http.post(f"{name}/_search", JSON, json.dumps(body))
    if message is None:
        assert answer.status == 200
        return
    assert (answer.status, answer.code) == (400, "invalid_request")
    assert answer.json["error"]["message"] == message


def test_other_refusals(http: Wire) -> None:
    assert http.get("nobody/at/all/_search?q=x").status == 404
    plain = fresh("search")
    http.put(plain, JSON)
    answer = http.get(f"{plain}/_search?q=x")
    assert (answer.status, answer.json["error"]["message"]) == (
        400,
        "search is not configured for this stream",
    )
    name = stream(http, A)
    assert http.get(f"{name}/_search").json["error"]["message"] == "missing q"
    assert http.get(f"{name}/_search?q=x&size=many").status == 400
    assert http.get(f"{name}/_search?q=x&search_after=1").json["error"]["message"] == (
        "search_after must be an array"
    )
    assert http.post(f"{name}/_search", JSON, "{").code == "invalid_json"
    assert http.post(f"{name}/_search", JSON, "[]").status == 400
    assert http.delete(f"{name}/_search").status == 405


def test_no_time_is_408_with_a_body(start_server: StartServer) -> None:
    call = Caller(start_server())
    assert call("PUT", "ev", headers={"Content-Type": JSON}).status == 201
    assert call("POST", "ev/_schema", {"schema": {}, "search": search_body()}).status == 200
    assert call("POST", "ev/_search", {"q": "payment", "timeout_ms": 0}).status == 408
    assert call("POST", "ev", [A, B]).status == 204
    answer = call("POST", "ev/_search", {"q": "payment", "timeout_ms": 0})
    assert answer.status == 408
    assert answer.headers["search-timed-out"] == "true"
    body = answer.body
    assert body["timed_out"] is True
    assert body["coverage"]["complete"] is False
    assert body["coverage"]["possible_missing_wal_rows"] == 2
    assert body["coverage"]["possible_missing_events_upper_bound"] == 2
    assert body["coverage"]["visible_through_offset"] == encode_offset(0, 0)
    assert body["coverage"]["oldest_omitted_append_at"] is not None
    assert body["total"] == {"value": 0, "relation": "gte"}


def test_odd_records_come_back_as_they_are(http: Wire) -> None:
    odd = '{"id":"odd","big":123456789012345678901234567890,"half":"\\ud800","deep":%s}'
    nested = "[" * 300 + "]" * 300
    name = stream(http)
    assert http.post(name, JSON, odd % nested).status == 204
    answer = ask(http, name, q="id:odd")
    assert answer.status == 200
    assert b'"big":123456789012345678901234567890' in answer.body
    assert nested.encode() in answer.body


def test_l3_old_entries_are_found_through_a_renamed_field(http: Wire) -> None:
    search = {
        "fields": {
            "f": {
                "kind": "keyword",
                "exact": True,
                "bindings": [{"version": 1, "jsonPointer": "/a"}, {"version": 2, "jsonPointer": RENAMED}],
            }
        }
    }
    name = fresh("search")
    http.put(name, JSON)
    shape = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert http.post(f"{name}/_schema", JSON, json.dumps({"schema": shape, "search": search})).status == 200
    assert http.post(name, JSON, json.dumps([{"a": "x", "n": n} for n in range(100)])).status == 204
    assert ask(http, name, q="f:x").json["total"]["value"] == 100
    newer = {"type": "object", "properties": {"renamed": {"type": "string"}}, "required": ["renamed"]}
    ops = [{"op": "rename", "from": "/a", "to": RENAMED}]
    lens = {"apiVersion": "durable.lens/v1", "schema": name, "from": 1, "to": 2, "ops": ops}
    answer = http.post(f"{name}/_schema", JSON, json.dumps({"schema": newer, "lens": lens}))
    assert answer.status == 200, answer.body
    assert http.post(name, JSON, json.dumps([{"renamed": "x", "n": n} for n in range(100)])).status == 204
    body = ask(http, name, q="f:x", size=500).json
    assert body["total"] == {"value": 200, "relation": "eq"}
    assert {hit["source"]["renamed"] for hit in body["hits"]} == {"x"}
    assert body["hits"][-1]["source"] == {"n": 0, "renamed": "x"}


def test_r2_m2_what_was_acknowledged_is_found_at_once_while_others_append(http: Wire) -> None:
    name = stream(http)
    stop = threading.Event()

    def write() -> None:
        other = Wire(http.port)
        number = 0
        while not stop.is_set():
            batch = [{"id": f"noise-{number}-{n}", "message": "noise"} for n in range(20)]
            assert other.post(name, JSON, json.dumps(batch)).status == 204
            number += 1
        other.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(40):
            acknowledged = http.post(name, JSON, json.dumps({"id": f"own-{number}"}))
            answer = ask(http, name, q=f"id:own-{number}")
            assert ids(answer) == [f"own-{number}"]
            assert answer.json["coverage"]["complete"] is True
            assert answer.json["snapshot_end_offset"] >= acknowledged["stream-next-offset"]
    finally:
        stop.set()
        writer.join()


def test_rows_are_indexed_as_they_arrive(http: Wire) -> None:
    """A search would have to scan what nothing has indexed, and of much it cannot scan all in its time."""
    name = stream(http)
    for batch in range(20):
        records = [{**A, "id": f"id{1000 * batch + number}"} for number in range(1000)]
        assert http.post(name, JSON, json.dumps(records)).status == 204

    def indexed() -> int:
        return http.get(f"{name}/_index_status").json["tail_index"]["rows"]

    assert eventually(indexed, lambda rows: rows > 20_000 - 8192) <= 20_000
    answer = ask(http, name, q="id:id777")
    assert (ids(answer), answer.json["total"]) == (["id777"], {"value": 1, "relation": "eq"})
    assert answer.json["coverage"]["complete"] is True
    assert answer.json["coverage"]["decoded_records"] <= 8192, "the others are in the index"


def test_r5_q2_wide_prefixes_phrases_and_every_sort(http: Wire) -> None:
    records = [{"id": f"req_{n:05}", "status": n, "message": f"word{n} shared tail"} for n in range(5000)]
    name = stream(http, *records)
    body = ask(http, name, q="id:req_*", size=500).json
    assert (body["total"], len(body["hits"])) == ({"value": 5000, "relation": "eq"}, 500)
    assert ask(http, name, q="id:req_0123*").json["total"]["value"] == 10
    assert ask(http, name, q="message:word12*").json["total"]["value"] == 111
    assert ids(ask(http, name, q='"word4999 shared"')) == ["req_04999"]
    for key in ("_score", "offset", "id", "service", "status", "ratio", "ok", "at"):
        for way in ("asc", "desc"):
            assert ask(http, name, q="shared", sort=[f"{key}:{way}"], size=500).status == 200


def test_sealed_and_restarted_streams_are_searched_as_before(start_server: StartServer) -> None:
    server = start_server("--seal-entries", "100")
    call = Caller(server)
    assert call("PUT", "ev", headers={"Content-Type": JSON}).status == 201
    assert call("POST", "ev/_schema", {"schema": {}, "search": search_body()}).status == 200
    records = [{"id": f"r{n}", "message": f"common word{n % 7}", "status": n} for n in range(3000)]
    assert call("POST", "ev", records).status == 204
    questions = [
        {"q": "word3", "size": 5},
        {"q": "id:r17"},
        {"q": "status:>=2990", "sort": ["status:asc"]},
        {"q": "-word3 -word4", "size": 3},
    ]

    def answers() -> list[Any]:
        found = [call("POST", "ev/_search", body).body for body in questions]
        return [(body["hits"], body["total"], body["coverage"]["complete"]) for body in found]

    before = answers()
    assert all(complete for _, _, complete in before)
    assert call("POST", "/v1/server/_seal").status in (200, 202)
    eventually(lambda: int(call("GET", "ev/_details").body["stream"]["sealed_through"]), lambda n: n >= 2999)
    assert answers() == before
    server.stop()
    server.start()
    assert answers() == before
    server.stop()
    server.env["TAILRACE_TAIL_INDEX_MAX_BYTES"] = "0"
    server.start()
    assert answers() == before
    scanned = call("POST", "ev/_search", questions[0]).body["coverage"]
    assert scanned["segment_payload_bytes_fetched"] > 0
