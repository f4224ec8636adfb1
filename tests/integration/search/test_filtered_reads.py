"""Reads with a filter, over HTTP: what comes back, how far it goes, how it waits, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from conftest import StartServer
from support.calls import eventually
from support.queries import SEARCH_BODY
from support.server import ServerProcess
from support.waiting import Waiting
from support.wire import Wire, fresh
from tailrace.protocol.offsets import encode_offset

JSON = "application/json"


def stream(http: Wire, *records: Any, search: object = SEARCH_BODY) -> str:
    """A stream with a schema that admits anything, and some records, each appended alone."""
    name = fresh("filter")
    assert http.put(name, JSON).status == 201
    update = {"schema": {}, "search": search} if search else {"schema": {}}
    answer = http.post(f"{name}/_schema", JSON, json.dumps(update))
    assert answer.status == 200, answer.body
    add(http, name, *records)
    return name


def add(http: Wire, name: str, *records: Any, **more: str) -> None:
    for record in records:
        # An array at the top is a batch; one inside it is an entry.
        assert http.post(name, JSON, json.dumps([record]), **more).status == 204


def path(name: str, expression: str, **parameters: str) -> str:
    more = "".join(f"&{key}={value}" for key, value in parameters.items())
    return f"{name}?filter={quote(expression, safe='')}{more}"


def found(http: Wire, name: str, expression: str, **parameters: str) -> list[Any]:
    answer = http.get(path(name, expression, **parameters))
    assert answer.status == 200, answer.body
    return answer.json


A = {"id": "a", "service": "Checkout", "status": 500}
B = {"id": "b", "service": "billing", "status": 200, "ok": True}
C = {"id": ["c", "a"], "status": "404", "at": "2026-01-01T00:00:00Z"}


def test_a_filter_gives_what_matches_in_order_and_moves_past_the_rest(http: Wire) -> None:
    name = stream(http, A, B, 7, C)
    for expression, expected in [
        ("id:a", [A, C]),
        ("service:CHECKOUT", [A]),
        ("svc:checkout OR ok:true", [A, B]),
        ("status:>=404", [A, C]),
        ("-status:500", [B, 7, C]),
        ("-( -id:a status:500 )", [A, B, 7, C]),
        ('at:>"2025-12-31T23:59:59Z" has:at', [C]),
        ("id:nobody", []),
    ]:
        answer = http.get(path(name, expression))
        assert (answer.status, answer.json) == (200, expected), expression
        assert answer["stream-next-offset"] == encode_offset(0, 4), "it has decided everything"
        assert answer["stream-up-to-date"] == "true"
        assert answer["cache-control"] == "no-cache"
        assert "stream-filter-scan-limit-reached" not in answer
    assert found(http, name, "id:a", offset=encode_offset(0, 1)) == [C]
    assert found(http, name, "id:a", offset="now") == []
    assert found(http, name, "id:a", since="2000-01-01T00:00:00Z") == [A, C]
    assert found(http, name, "id:a", format="json") == [A, C]
    raw = http.get(path(name, "id:a", format="raw"))
    assert raw.body == json.dumps(A).encode() + json.dumps(C).encode()


def test_a_filter_goes_with_a_key(http: Wire) -> None:
    name = stream(http)
    add(http, name, A, B, stream_key="k")
    add(http, name, A, C, stream_key="other")
    add(http, name, C, stream_key="k")
    assert found(http, name, "id:a", key="k") == [A, C]
    answer = http.get(f"{name}/pk/k?filter=id:b")
    assert (answer.json, answer["stream-next-offset"]) == ([B], encode_offset(0, 5))


@pytest.mark.parametrize("odd", [1, "x", [], None, True, [[1]], 1e300, {"id": None}])
def test_f2_records_of_any_form_are_no_hindrance(http: Wire, odd: Any) -> None:
    name = stream(http, A, odd, B)
    for expression, expected in [("id:a", [A]), ("-has:id", [odd]), ("has:id", [A, B])]:
        assert found(http, name, expression) == expected
    add(http, name, odd)
    assert found(http, name, "status:>0") == [A, B]


def test_f2_payloads_keep_their_bytes(http: Wire) -> None:
    name = stream(http)
    payloads = [
        rb'{"id":"\ud800", "n":1.0}',
        rb'{"\u0069d" : "a","n":[ 1e2 ]}',
        b'{"id":"x","n":' + b"1" * 400 + b"}",
    ]
    for payload in payloads:
        assert http.post(name, JSON, payload).status == 204
    assert http.get(path(name, 'id:"�"')).body == b"[" + payloads[0] + b"]"
    assert http.get(path(name, "id:a OR id:x")).body == b"[" + payloads[1] + b"," + payloads[2] + b"]"


def test_the_tag_names_the_filter_and_the_registry(http: Wire) -> None:
    name = stream(http, A, B)
    expression = 'id:"a"'
    answer = http.get(path(name, expression))
    tag = answer["etag"]
    assert tag.startswith(f'W/"slice:{encode_offset(0, 0)}:{encode_offset(0, 2)}:key=:fmt=json:')
    assert tag.endswith(':filter=id%3A%22a%22"')
    again = http.get(path(name, expression), {"If-None-Match": tag})
    assert (again.status, again["etag"]) == (304, tag)
    assert http.get(path(name, "id:b"), {"If-None-Match": tag}).status == 200
    # The same entries, another meaning of the field: the tag is another one.
    search = json.loads(json.dumps(SEARCH_BODY))
    search["fields"]["id"]["bindings"] = [{"version": 1, "jsonPointer": "/service"}]
    assert http.post(f"{name}/_schema", JSON, json.dumps({"search": search})).status == 200
    changed = http.get(path(name, expression), {"If-None-Match": tag})
    assert (changed.status, changed.json) == (200, [])


# -- long-polls


def test_a_long_poll_waits_for_a_match(http: Wire) -> None:
    name = stream(http, A)
    with Waiting(http) as waiting:
        poll = waiting.get(path(name, "id:b", offset="-1", live="long-poll"))
        add(http, name, A, 7, C)
        assert not poll.done()
        add(http, name, B)
        answer = poll.result()
    assert (answer.status, answer.json) == (200, [B])
    assert answer["stream-next-offset"] == encode_offset(0, 5)
    assert answer["cache-control"] == "no-store"
    assert "stream-cursor" in answer


@pytest.mark.parametrize(
    "expression", ["id:b", " OR ".join(f"id:v{number}" for number in range(500)) + " OR id:b"]
)
def test_a_long_poll_from_now_on_gives_only_what_is_new(http: Wire, expression: str) -> None:
    name = stream(http, B)
    with Waiting(http) as waiting:
        poll = waiting.get(path(name, expression, offset="now", live="long-poll"))
        add(http, name, A)
        add(http, name, {"id": "b", "n": 1})
        answer = poll.result()
    assert (answer.status, answer.json) == (200, [{"id": "b", "n": 1}])
    assert answer["stream-next-offset"] == encode_offset(0, 3)
    assert found(http, name, expression) == [B, {"id": "b", "n": 1}]


def test_a_long_poll_that_ends_has_moved_past_what_it_decided(http: Wire) -> None:
    name = stream(http, A, A, A)
    answer = http.get(path(name, "id:b", offset="-1", live="true", timeout_ms="0"))
    assert (answer.status, answer["stream-next-offset"]) == (204, encode_offset(0, 3))
    assert answer["stream-up-to-date"] == "true"
    with Waiting(http) as waiting:
        poll = waiting.get(path(name, "id:b", offset=encode_offset(0, 3), live="true", timeout_ms="1500"))
        add(http, name, A, A)
        answer = poll.result()
    assert (answer.status, answer["stream-next-offset"]) == (204, encode_offset(0, 5))
    with Waiting(http) as waiting:
        poll = waiting.get(path(name, "id:b", offset=encode_offset(0, 5), live="true"))
        assert http.post(name, JSON, json.dumps([A]), stream_closed="true").status == 204
        answer = poll.result()
    assert (answer.status, answer["stream-closed"], answer["stream-next-offset"]) == (
        204,
        "true",
        encode_offset(0, 6),
    )


def test_a_long_poll_goes_by_the_registry_of_the_moment(http: Wire) -> None:
    name = stream(http, A)
    search = json.loads(json.dumps(SEARCH_BODY))
    search["fields"]["id"]["bindings"] = [{"version": 1, "jsonPointer": "/service"}]
    with Waiting(http) as waiting:
        poll = waiting.get(path(name, "id:billing", offset="-1", live="long-poll"))
        assert http.post(f"{name}/_schema", JSON, json.dumps({"search": search})).status == 200
        add(http, name, B)
        assert poll.result().json == [B]
        poll = waiting.get(path(name, "id:nobody", offset="-1", live="long-poll"))
        assert http.post(f"{name}/_schema", JSON, json.dumps({"search": None})).status == 200
        add(http, name, B)
        refusal = poll.result()
    assert (refusal.status, refusal.code) == (400, "invalid_filter")


# -- refusals

OTHER = {
    "fields": {
        "id": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/id"}]},
        "n": {"kind": "integer", "bindings": [{"version": 1, "jsonPointer": "/n"}], "exact": True},
        "tag": {"kind": "keyword", "bindings": [{"version": 1, "jsonPointer": "/tag"}], "column": True},
        "text": {
            "kind": "text",
            "analyzer": "unicode_word_v1",
            "bindings": [{"version": 1, "jsonPointer": "/text"}],
        },
    }
}


@pytest.fixture(scope="module")
def other(http: Wire) -> str:
    return stream(http, A, search=OTHER)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "filter must not be empty"),
        ("   ", "filter must not be empty"),
        ("(n:1", "missing ')' in filter"),
        ('tag:"x', "unterminated quoted string in filter"),
        ("tag:", "expected value in filter clause"),
        ("nothing:1", "filter field nothing is not indexed"),
        ("id:1", "filter field id does not support equality filters"),
        ("n:>1", "filter field n does not support comparisons"),
        ("has:id", "filter field id does not support has:"),
        ("tag:>x", "comparison operator not supported for filter field"),
        ("n:one", "invalid value for filter field"),
        ("text:word", "invalid value for filter field"),
        ("word", "expected ':' in filter clause"),
        (" ".join(["n:1"] * 1025), "filter has more than 1024 clauses"),
        ("(" * 65 + "n:1" + ")" * 65, "filter is nested deeper than 64 levels"),
        ("tag:" + "x" * 16384, "filter must not be longer than 16384 bytes"),
    ],
)
@pytest.mark.parametrize("live", ["", "long-poll"])
def test_a_filter_that_breaks_a_rule_is_refused(
    http: Wire, other: str, expression: str, message: str, live: str
) -> None:
    refusal = http.get(path(other, expression, offset="-1", live=live))
    assert (refusal.status, refusal.code, refusal.json["error"]["message"]) == (
        400,
        "invalid_filter",
        message,
    )


def test_filters_need_json_a_search_configuration_and_answers_with_an_end(http: Wire, other: str) -> None:
    for mode in ("sse", "ws"):
        refusal = http.get(path(other, "n:1", offset="-1", live=mode))
        assert refusal.code == "invalid_filter"
        assert refusal.json["error"]["message"] == f"filter does not support live={mode}"
    bytes_stream = fresh("filter")
    http.put(bytes_stream, "text/plain")
    refusal = http.get(path(bytes_stream, "n:1"))
    assert refusal.code == "invalid_filter"
    assert refusal.json["error"]["message"] == "filter is only supported on application/json streams"
    plain = fresh("filter")
    http.put(plain, JSON)
    for name in (plain, stream(http, A, search=None)):
        refusal = http.get(path(name, "n:1"))
        assert refusal.code == "invalid_filter"
        assert refusal.json["error"]["message"] == "search is not configured for this stream"
    assert http.get(path(fresh("filter"), "n:1")).status == 404


# -- the ends of answers


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A server whose answers are small and whose scans are short."""
    process = ServerProcess(
        tmp_path_factory.mktemp("tight") / "data",
        args=("--read-page-entries", "3", "--read-page-bytes", "400", "--filter-scan-bytes", "1000"),
    ).start()
    wire = Wire(process.port)
    yield wire
    wire.close()
    process.stop()


def walk(http: Wire, name: str, expression: str, **parameters: str) -> tuple[list[Any], int]:
    """Everything that following the offsets gives, and how many answers reached the scan's limit."""
    records: list[Any] = []
    at, limited = "-1", 0
    while True:
        answer = http.get(path(name, expression, offset=at, **parameters))
        assert answer.status == 200
        assert answer["stream-next-offset"] > at or answer["stream-up-to-date"]
        assert len(answer.json) <= 3
        if "stream-filter-scan-limit-reached" in answer:
            limited += 1
            assert answer["stream-filter-scan-limit-reached"] == "true"
            assert answer["stream-filter-scan-limit-bytes"] == "1000"
            assert 1000 <= int(answer["stream-filter-scanned-bytes"]) < 1400
        records += answer.json
        at = answer["stream-next-offset"]
        if "stream-up-to-date" in answer:
            return records, limited


def test_f1_following_the_offsets_gives_every_match_once(tight: Wire) -> None:
    records = [{"id": "x" if number % 3 else "y", "status": number, "pad": "p" * 50} for number in range(60)]
    name = stream(tight)
    assert tight.post(name, JSON, json.dumps(records)).status == 204
    for expression in ("id:x", "id:y", "has:id", "status:>=57", "status:59", "id:z"):
        at_once = [record for record in records if _matches(record, expression)]
        assert walk(tight, name, expression)[0] == at_once, expression


def _matches(record: dict[str, Any], expression: str) -> bool:
    match expression:
        case "has:id":
            return True
        case "status:>=57":
            return record["status"] >= 57
        case "status:59":
            return record["status"] == 59
        case _:
            return record["id"] == expression.removeprefix("id:")


def test_f3_a_scan_that_costs_too_much_says_so_and_goes_on(tight: Wire) -> None:
    records = [{"id": "no", "pad": "p" * 100}] * 50 + [{"id": "yes"}]
    name = stream(tight)
    assert tight.post(name, JSON, json.dumps(records)).status == 204
    given, limited = walk(tight, name, "id:yes")
    assert (given, limited) == ([{"id": "yes"}], 5)
    # A long-poll does not wait behind entries that it has not decided: it says how far it came.
    answer = tight.get(path(name, "id:yes", offset="-1", live="long-poll"))
    assert (answer.status, answer.json, answer["stream-filter-scan-limit-reached"]) == (200, [], "true")
    assert "stream-up-to-date" not in answer


def test_f3_one_record_larger_than_the_limit_is_decided_and_given(tight: Wire) -> None:
    large = {"id": "x", "pad": "p" * 5000}
    name = stream(tight, large, large)
    for offset in ("-1", encode_offset(0, 1)):
        answer = tight.get(path(name, "id:x", offset=offset))
        assert answer.json == [large]
        assert answer["stream-filter-scanned-bytes"] == str(len(json.dumps(large)))


def test_l3_filters_see_every_entry_through_the_newest_version(start_server: StartServer) -> None:
    process = start_server()
    http = Wire(process.port)
    name = fresh("filter")
    http.put(name, JSON)
    versions = [
        {"type": "object", "required": [member], "properties": {member: {"type": "string"}}}
        for member in ("old", "new")
    ]
    bindings = [{"version": 1, "jsonPointer": "/old"}, {"version": 2, "jsonPointer": "/new"}]
    search = {"fields": {"id": {"kind": "keyword", "exact": True, "bindings": bindings}}}
    install = {"schema": versions[0], "search": search}
    assert http.post(f"{name}/_schema", JSON, json.dumps(install)).status == 200
    assert (
        http.post(name, JSON, json.dumps([{"old": "x" if i % 2 else "y"} for i in range(100)])).status == 204
    )
    assert len(found(http, name, "id:x")) == 50
    lens = {"apiVersion": "durable.lens/v1", "schema": name, "from": 1, "to": 2}
    lens["ops"] = [{"op": "rename", "from": "/old", "to": "/new"}]
    evolve = {"schema": versions[1], "lens": lens}
    assert http.post(f"{name}/_schema", JSON, json.dumps(evolve)).status == 200
    assert http.post(name, JSON, json.dumps([{"new": "x"}] * 100)).status == 204
    for _ in range(2):
        assert found(http, name, "id:x") == [{"new": "x"}] * 150
        assert found(http, name, "-id:x") == [{"new": "y"}] * 50
        assert found(http, name, "id:x", offset=encode_offset(0, 99)) == [{"new": "x"}] * 101
        seal(http, name)
    http.close()


def seal(http: Wire, name: str) -> None:
    """Moves the stream to the object store."""
    eventually(lambda: http.post(f"/v1/server/_seal?stream={quote(name, safe='')}").status, (200).__eq__)


def test_f1_sealed_entries_are_filtered_like_any_other(start_server: StartServer) -> None:
    process = start_server("--seal-entries", "20")
    http = Wire(process.port)
    records = [{"id": "x" if number % 7 == 0 else "y", "n": number, "pad": "p" * 20} for number in range(100)]
    name = stream(http)
    for begin in range(0, 80, 20):
        assert http.post(name, JSON, json.dumps(records[begin : begin + 20])).status == 204
    seal(http, name)
    assert http.post(name, JSON, json.dumps(records[80:])).status == 204
    assert found(http, name, "id:x") == [record for record in records if record["id"] == "x"]
    http.close()
