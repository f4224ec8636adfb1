"""Everything that clients may get wrong about schemas, queries and profiles: a clear 400, and nothing stored.

A request that took longer than the server allows would be a 408, and one that took too much memory would show
in the server's own account of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from support.search_model import search_body
from support.server import ServerProcess
from support.wire import Wire

JSON = "application/json"
NAME = "bad/input"
MIB = 1024 * 1024
GROWTH_BYTES_MAX = 200 * MIB
SCHEMA = {"type": "object", "properties": {"id": {"type": "string"}}, "additionalProperties": True}
ROLLUPS = {"r": {"dimensions": ["service"], "intervals": ["1m"], "measures": {"n": {"kind": "count"}}}}


def nested(levels: int, key: str = "properties") -> Any:
    found: Any = {}
    for _ in range(levels):
        found = {key: {"a": found}} if key == "properties" else {key: found}
    return found


def lens(*ops: Any, **changes: Any) -> dict[str, Any]:
    return {"apiVersion": "durable.lens/v1", "schema": NAME, "from": 1, "to": 2, "ops": list(ops), **changes}


def field(**changes: Any) -> dict[str, Any]:
    bindings = [{"version": 1, "jsonPointer": "/id"}]
    return {"fields": {"id": {"kind": "keyword", "bindings": bindings, "exact": True, **changes}}}


RENAME = {"op": "rename", "from": "/id", "to": "/name"}
UPDATES: dict[str, tuple[Any, str]] = {
    "no object": ([], "schema update must be an object"),
    "nothing": ({}, "schema update must include schema, routingKey, or search"),
    "unknown key": ({"schemas": {}}, "schemaUpdate.schemas is not supported"),
    "profile key": ({"touch": {}}, "schemaUpdate.touch is not supported"),
    "api version": ({"apiVersion": "v0", "schema": {}}, "invalid schema apiVersion"),
    "no lens": ({"schema": {}}, "lens required"),
    "a lens alone": ({"lens": lens(RENAME)}, "schema update lens requires schema"),
    "remote reference": (
        {"schema": {"$ref": "https://example.com/s.json"}, "lens": lens(RENAME)},
        "external $ref is not supported",
    ),
    "file reference": (
        {"schema": {"$ref": "file:///etc/passwd"}, "lens": lens(RENAME)},
        "external $ref is not",
    ),
    "dialect": (
        {"schema": {"$schema": "https://x/y"}, "lens": lens(RENAME)},
        "unsupported $schema https://x/y",
    ),
    "no schema": ({"schema": 5, "lens": lens(RENAME)}, "invalid schema: must be"),
    "meta-schema": ({"schema": {"type": "number!"}, "lens": lens(RENAME)}, "invalid schema: "),
    "look-around": (
        {"schema": {"pattern": "(?=a)b"}, "lens": lens(RENAME)},
        "schema.pattern: pattern not supported",
    ),
    "deep schema": (
        {"schema": nested(40), "lens": lens(RENAME)},
        "schema is nested deeper than 64 levels",
    ),
    "large schema": (
        {"schema": {"description": "x" * (MIB + 1)}, "lens": lens(RENAME)},
        "schema is larger than 1048576 bytes",
    ),
    "unproven lens": ({"schema": SCHEMA, "lens": lens(RENAME)}, "lens proof: 0 "),
    "lens without ops": ({"schema": SCHEMA, "lens": lens()}, "invalid lens: ops "),
    "lens of nothing": ({"schema": SCHEMA, "lens": lens({"op": "explode"})}, "invalid lens: ops[0]"),
    "lens of another": ({"schema": SCHEMA, "lens": lens(RENAME, schema="other")}, "lens schema mismatch"),
    "deep lens": (
        {"schema": SCHEMA, "lens": lens({"op": "in", "path": "/a", "ops": nested(300, "ops")})},
        "invalid lens",
    ),
    "routing key": ({"routingKey": {"jsonPointer": "id"}}, "routingKey."),
    "routing key type": ({"routingKey": 5}, "routingKey must be"),
    "search without fields": ({"search": {}}, "search.fields "),
    "kind of field": ({"search": field(kind="number")}, "search.fields.id.kind "),
    "flag of field": (
        {"search": field(positions=True)},
        "search.fields.id.positions is not supported for keyword",
    ),
    "flag type": ({"search": field(exact=1)}, "search.fields.id.exact must be a boolean"),
    "name of field": ({"search": {"fields": {"a b": field()["fields"]["id"]}}}, "search.fields."),
    "word of the language": ({"search": {"fields": {"NOT": field()["fields"]["id"]}}}, "search.fields.NOT "),
    "too many fields": (
        {"search": {"fields": {f"f{number}": field()["fields"]["id"] for number in range(501)}}},
        "search.fields must have at most 500",
    ),
    "boost": (
        {"search": {**field(), "defaultFields": [{"field": "id", "boost": 0}]}},
        "search.defaultFields[0].boost ",
    ),
    "alias": ({"search": {**field(), "aliases": {"id": "id"}}}, "search.aliases.id "),
    "include": (
        {"search": {**search_body(), "rollups": {"r": {**ROLLUPS["r"], "include": "nope:1"}}}},
        "search.rollups.r.include: unknown search field nope",
    ),
    "interval": (
        {"search": {**search_body(), "rollups": {"r": {**ROLLUPS["r"], "intervals": ["0s"]}}}},
        "search.rollups.r.intervals[0] ",
    ),
}

QUERIES: dict[str, tuple[Any, str]] = {
    "no object": (5, "search must be an object"),
    "no query": ({}, "missing q"),
    "query type": ({"q": ["id:x"]}, "q must be a string"),
    "unknown key": ({"q": "id:x", "from": 0}, "search.from is not supported"),
    "ten thousand clauses": ({"q": " OR ".join(["id:x"] * 10_000)}, "q must not be longer than 16384 bytes"),
    "many clauses": ({"q": "id:x " * 1025}, "search query has more than 1024 clauses"),
    "many short words": ({"q": "a " * 8000}, "search query has more than 1024 clauses"),
    "deep nesting": ({"q": "(" * 8000}, "search query is nested deeper than 64 levels"),
    "deep negation": ({"q": "-" * 16_000 + "id:x"}, "search query is nested deeper than 64 levels"),
    "enormous number": ({"q": "status:" + "9" * 16_000}, "invalid value for search field"),
    "enormous exponent": ({"q": "ratio:>1e999999999"}, "invalid value for search field"),
    "invalid date": ({"q": 'at:>="2026-02-30T00:00:00Z"'}, "invalid value for search field"),
    "invalid day": ({"q": "at:2026-13-01"}, "invalid value for search field"),
    "unknown field": ({"q": "nope:1"}, "unknown search field nope"),
    "huge page": ({"q": "id:x", "size": 10**30}, "size must be an integer between 1 and 500"),
    "page type": ({"q": "id:x", "size": True}, "size must be an integer between 1 and 500"),
    "sort type": ({"q": "id:x", "sort": {"id": 1}}, "sort must be an array"),
    "sort of many": ({"q": "id:x", "sort": ["id"] * 1000}, "sort must have at most"),
    "place type": ({"q": "id:x", "search_after": "x"}, "search_after must be an array"),
    "place of deep things": (
        {"q": "id:x", "search_after": [nested(100)]},
        "search_after[0] has the wrong type",
    ),
    "time": ({"q": "id:x", "timeout_ms": []}, "timeout_ms must be a number"),
}

AGGREGATES: dict[str, tuple[Any, str]] = {
    "no object": ([], "aggregate must be an object"),
    "no rollup": ({}, "missing rollup"),
    "unknown key": ({"size": 5}, "aggregate.size is not supported"),
    "unknown rollup": ({"rollup": "x"}, "unknown rollup x"),
    "no time": ({"from": "yesterday"}, "from must be a valid timestamp"),
    "enormous time": ({"to": 10**300}, "to must be a valid timestamp"),
    "enormous digits": ({"to": "9" * 10_000}, "to must be a valid timestamp"),
    "backwards": ({"from": 5, "to": 5}, "to must be greater than from"),
    "interval": ({"interval": "1ms"}, "interval 1ms is not configured for rollup r"),
    "group": ({"group_by": ["id"]}, "group_by field id is not configured on rollup r"),
    "group type": ({"group_by": "service"}, "group_by must be an array"),
    "measure": ({"measures": ["x"]}, "unknown measure x on rollup r"),
    "query": ({"q": "(" * 8000}, "search query is nested deeper than 64 levels"),
}
WHOLE = {"rollup": "r", "from": 0, "to": 60_000, "interval": "1m"}

PROFILES: dict[str, tuple[Any, str]] = {
    "no object": ([], "profileUpdate must be an object"),
    "nothing": ({}, "profile must be an object"),
    "unknown kind": (
        {"profile": {"kind": "x"}},
        "profile.kind must be evlog|generic|metrics|otel-traces|state-protocol",
    ),
    "kind type": ({"profile": {"kind": ["evlog"]}}, "profile.kind must be "),
    "key of a schema": ({"profile": {"kind": "generic", "search": {}}}, "profile.search is not supported"),
    "touch type": ({"profile": {"kind": "state-protocol", "touch": 5}}, "profile.touch must be an object"),
    "touch number": (
        {"profile": {"kind": "state-protocol", "touch": {"memory": {"filterPow2": 31}}}},
        "profile.touch.memory.filterPow2: ",
    ),
    "too many secrets": (
        {"profile": {"kind": "evlog", "redactKeys": ["x"] * 65}},
        "profile.redactKeys must have at most 64",
    ),
    "limits": (
        {"profile": {"kind": "otel-traces", "otlpLimits": {"maxSpansPerRequest": 10**9}}},
        "profile.otlpLimits.maxSpansPerRequest: ",
    ),
}

FILTERS: dict[str, tuple[str, str]] = {
    "nothing": ("", "filter must not be empty"),
    "many clauses": ("id:x " * 1025, "filter has more than 1024 clauses"),
    "long": ("id:" + "x" * 16_384, "filter must not be longer than 16384 bytes"),
    "deep": ("(" * 100, "filter is nested deeper than 64 levels"),
    "number": ("status:" + "9" * 400, "invalid value for filter field"),
    "date": ("at:2026-02-30", "invalid value for filter field"),
    "word": ("x", "expected "),
    "open quote": ('id:"x', "unterminated quoted string in filter"),
    "open bracket": ("(id:x", "missing ')' in filter"),
    "bytes": ("id:\x00", ""),
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A server with one stream that has a schema, a search configuration and two records."""
    process = ServerProcess(tmp_path_factory.mktemp("bad") / "data").start()
    wire = Wire(process.port)
    assert wire.put(NAME, JSON).status == 201
    body = {"schema": SCHEMA, "search": {**search_body(), "rollups": ROLLUPS}}
    assert wire.post(f"{NAME}/_schema", JSON, json.dumps(body)).status == 200
    assert wire.post(NAME, JSON, json.dumps([{"id": "x"}, {"id": "y"}])).status == 204
    yield wire
    wire.close()
    process.stop()


def state(http: Wire) -> tuple[bytes, bytes, str]:
    """All that a refused request could have changed."""
    end = http.head(NAME)["stream-next-offset"]
    return http.get(f"{NAME}/_schema").body, http.get(f"{NAME}/_profile").body, end


def check(http: Wire, path: str, body: Any, message: str) -> None:
    before = state(http)
    answer = http.post(f"{NAME}/{path}", JSON, json.dumps(body))
    assert answer.status == 400, answer.body
    error = answer.json["error"]
    assert error["code"] == "invalid_request"
    assert error["message"].startswith(message), error
    assert len(error["message"]) < 600
    assert state(http) == before


@pytest.mark.parametrize(("body", "message"), UPDATES.values(), ids=UPDATES)
def test_bad_schema_updates(http: Wire, body: Any, message: str) -> None:
    check(http, "_schema", body, message)


@pytest.mark.parametrize(("body", "message"), QUERIES.values(), ids=QUERIES)
def test_bad_searches(http: Wire, body: Any, message: str) -> None:
    check(http, "_search", body, message)


@pytest.mark.parametrize(("body", "message"), AGGREGATES.values(), ids=AGGREGATES)
def test_bad_aggregates(http: Wire, body: Any, message: str) -> None:
    check(http, "_aggregate", {**WHOLE, **body} if body else body, message)


@pytest.mark.parametrize(("body", "message"), PROFILES.values(), ids=PROFILES)
def test_bad_profiles(http: Wire, body: Any, message: str) -> None:
    check(http, "_profile", body, message)


@pytest.mark.parametrize(("text", "message"), FILTERS.values(), ids=FILTERS)
def test_bad_filters(http: Wire, text: str, message: str) -> None:
    answer = http.get(f"{NAME}?offset=-1&filter={quote(text)}")
    if message:
        assert answer.json["error"]["code"] == "invalid_filter"
        assert answer.json["error"]["message"].startswith(message)
    else:
        assert (answer.status, answer.json) == (200, [])


@pytest.mark.parametrize("path", ["_schema", "_search", "_aggregate", "_profile"])
@pytest.mark.parametrize("body", ["", "{", '{"a":' * 5000, "nul", '{"q":"\\ud800"}x', "\ufeff{}"])
def test_bodies_that_are_no_json(http: Wire, path: str, body: str) -> None:
    before = state(http)
    answer = http.post(f"{NAME}/{path}", JSON, body)
    assert (answer.status, answer.code) == (400, "invalid_json")
    assert state(http) == before


RECORDS: dict[str, str] = {
    "one of many": '[{"id":"z"},{"id":5}]',
    "wrong kind": "5",
    "deep": "[" * 600 + "]" * 600,
    "number": '{"id":"z","n":1e999999}',
}


@pytest.mark.parametrize("body", RECORDS.values(), ids=RECORDS)
def test_bad_records_leave_the_stream_as_it_was(http: Wire, body: str) -> None:
    before = state(http)
    assert http.post(NAME, JSON, body).status == 400
    assert state(http) == before


def test_none_of_it_costs_much_memory(http: Wire) -> None:
    def high() -> int:
        return http.get("/v1/server/_mem").json["process"]["rss_bytes"]

    before = high()
    for body, _ in UPDATES.values():
        http.post(f"{NAME}/_schema", JSON, json.dumps(body))
    for body, _ in QUERIES.values():
        http.post(f"{NAME}/_search", JSON, json.dumps(body))
    assert high() - before < GROWTH_BYTES_MAX
