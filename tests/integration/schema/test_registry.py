"""`_schema` on a real server: updates, validation, routing keys, promotion, races and restarts."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from conftest import StartServer
from support.server import ServerProcess
from support.wire import PATIENCE_S, Answer, Wire, fresh

JSON = "application/json"
V1 = {
    "type": "object",
    "properties": {"ts": {"type": "string"}, "user": {"type": "string"}},
    "required": ["ts"],
    "additionalProperties": False,
}
V2 = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "user": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["at", "n"],
    "additionalProperties": False,
}


def lens(name: str) -> dict[str, Any]:
    ops = [
        {"op": "rename", "from": "/ts", "to": "/at"},
        {"op": "add", "path": "/n", "schema": {"type": "integer"}, "default": 0},
    ]
    return {"apiVersion": "durable.lens/v1", "schema": name, "from": 1, "to": 2, "ops": ops}


def update(http: Wire, name: str, body: Any) -> Answer:
    raw = body if isinstance(body, bytes | str) else json.dumps(body)
    return http.post(f"{name}/_schema", JSON, raw)


def registry(http: Wire, name: str) -> bytes:
    answer = http.get(f"{name}/_schema")
    assert answer.status == 200
    assert answer["content-type"] == "application/json; charset=utf-8"
    assert answer["cache-control"] == "no-store"
    return answer.body


def append(http: Wire, name: str, *records: Any, **more: str) -> Answer:
    return http.post(name, JSON, json.dumps(records), **more)


def message(answer: Answer) -> tuple[int, str, str]:
    error = answer.json["error"]
    return answer.status, error["code"], error["message"]


def stream(http: Wire, schema: Any = None, **more: Any) -> str:
    name = fresh("schema")
    assert http.put(name, JSON).status == 201
    if schema is not None:
        assert update(http, name, {"schema": schema, **more}).status == 200
    return name


def evolved(http: Wire, records: int = 3) -> str:
    """A stream with entries under both versions."""
    name = stream(http, V1)
    for number in range(records):
        assert append(http, name, {"ts": str(number)}).status == 204
    assert update(http, name, {"schema": V2, "lens": lens(name)}).status == 200
    assert append(http, name, {"at": "new", "n": 7}).status == 204
    return name


OLD = [{"at": str(number), "n": 0} for number in range(3)]
NEW = {"at": "new", "n": 7}


def test_a_stream_without_a_schema_has_an_empty_registry(http: Wire) -> None:
    name = stream(http)
    assert json.loads(registry(http, name)) == {
        "apiVersion": "durable.streams/schema-registry/v1",
        "schema": name,
        "currentVersion": 0,
        "boundaries": [],
        "schemas": {},
        "lenses": {},
    }
    assert http.get("schema/absent/_schema").code == "not_found"
    assert update(http, "schema/absent", {"schema": V1}).code == "not_found"
    assert http.head(f"{name}/_schema").status == 200
    for method in ("PATCH", "DELETE"):
        assert http.call(method, f"{name}/_schema").status == 405


def test_an_update_answers_with_the_whole_registry(http: Wire) -> None:
    name = stream(http)
    answer = update(http, name, {"schema": V1, "routingKey": {"jsonPointer": "/user", "required": False}})
    assert (answer.status, answer["cache-control"]) == (200, "no-store")
    assert answer.body == registry(http, name)
    shown = answer.json
    assert (shown["currentVersion"], shown["boundaries"]) == (1, [{"offset": 0, "version": 1}])
    assert (shown["schemas"], shown["lenses"]) == ({"1": V1}, {})
    assert shown["routingKey"] == {"jsonPointer": "/user", "required": False}
    append(http, name, {"ts": "a"}, {"ts": "b"})
    shown = update(http, name, {"schema": V2, "lens": lens(name)}).json
    assert shown["boundaries"] == [{"offset": 0, "version": 1}, {"offset": 2, "version": 2}]
    assert shown["lenses"] == {"1": lens(name)}
    again = update(http, name, {"schema": V2, "lens": lens(name)})
    assert (again.status, again.json) == (200, shown)


def files_of(server: ServerProcess) -> dict[str, str]:
    paths: list[Path] = [*(server.data_dir / "journal").iterdir(), server.data_dir / "hot.db"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_s1_a_refused_update_changes_nothing(server: ServerProcess) -> None:
    http = Wire(server.port)
    name = stream(http, V1)
    append(http, name, {"ts": "x"})
    before, files = registry(http, name), files_of(server)
    refused: list[Any] = [
        "not json",
        "[]",
        "{}",
        '{"a":"\\ud800"}',
        {"profile": {}},
        {"schema": V2},
        {"schema": V2, "lens": {**lens(name), "from": 2, "to": 3}},
        {"schema": V2, "lens": {**lens(name), "schema": "other"}},
        {"schema": {**V2, "properties": {}}, "lens": lens(name)},
        {"schema": {"$ref": "http://127.0.0.1:1/x"}, "lens": lens(name)},
        {"search": {"fields": {}}},
        {"routingKey": {"jsonPointer": "x", "required": True}},
        {"search": search(rollup="nope:1"), "routingKey": {"jsonPointer": "/user", "required": True}},
    ]
    codes = {update(http, name, body).code for body in refused}
    assert codes == {"invalid_request", "invalid_json", "conflict"}
    assert registry(http, name) == before
    assert files_of(server) == files
    http.close()


def search(rollup: str) -> dict[str, Any]:
    bound = [{"version": 1, "jsonPointer": "/ts"}]
    fields = {
        "ts": {"kind": "date", "bindings": bound},
        "user": {"kind": "keyword", "bindings": bound, "exact": True},
    }
    measures = {"n": {"kind": "count"}}
    rollups = {"r": {"timestampField": "ts", "include": rollup, "intervals": ["1m"], "measures": measures}}
    return {"fields": fields, "rollups": rollups}


def test_includes_of_rollups_are_checked_at_install(http: Wire) -> None:
    name = stream(http, V1)
    assert message(update(http, name, {"search": search("nope:1")}))[2].startswith(
        "search.rollups.r.include: "
    )
    assert update(http, name, {"search": search("user:x")}).status == 200
    assert update(http, name, {"search": None}).status == 200


MUST_BE_ADOPTED = (
    "first schema requires empty stream; with ?adopt=true (--adopt) the existing entries are "
    "checked, and the schema applies from the first one on"
)


def test_a_schema_needs_a_json_stream_without_entries(http: Wire) -> None:
    name = stream(http)
    append(http, name, 1)
    assert message(update(http, name, {"schema": V1})) == (
        400,
        "invalid_request",
        MUST_BE_ADOPTED,
    )
    text = fresh("schema")
    http.put(text, "text/plain")
    assert message(update(http, text, {"schema": V1}))[2] == (
        "schema requires application/json stream content-type"
    )
    assert update(http, "__registry__", {"schema": V1}).code == "read_only_stream"


def test_records_that_do_not_fit_are_refused_as_a_whole(http: Wire) -> None:
    name = stream(http, V1)
    assert message(append(http, name, {"ts": 5})) == (
        400,
        "invalid_request",
        '/ts value is not of type "string"',
    )
    answer = append(http, name, {"ts": "a"}, {"user": 5, "x": 1})
    assert message(answer)[2].startswith("record 1: ")
    assert '(root) "ts" is a required property' in message(answer)[2]
    assert message(http.post(name, JSON, '{"ts":1e999}'))[2] == "(root) record has a number out of range"
    assert http.get(f"{name}?offset=-1").body == b"[]"
    assert http.post(name, JSON, '{ "ts" : "\\u0061" }').status == 204
    assert http.get(f"{name}?offset=-1").body == b'[{ "ts" : "\\u0061" }]', "stored byte for byte"


def test_a_retry_is_answered_before_it_is_validated(http: Wire) -> None:
    name = stream(http, V1)
    first = {"producer_id": "p", "producer_epoch": "0", "producer_seq": "0"}
    assert append(http, name, {"ts": "x"}, **first).status == 200
    assert update(http, name, {"schema": V2, "lens": lens(name)}).status == 200
    assert append(http, name, {"ts": "x"}, **first).status == 204
    second = {**first, "producer_seq": "1"}
    assert append(http, name, {"ts": "x"}, **second).code == "invalid_request"
    assert append(http, name, NEW, **second).status == 200, "a refusal changed no producer state"
    http.post(name, stream_closed="true")
    assert append(http, name, {"bad": 1}).code == "stream_closed"


def test_routing_keys_come_out_of_the_records(http: Wire) -> None:
    name = stream(http)
    assert append(http, name, {"user": "before"}, stream_key="own").status == 204
    assert update(http, name, {"routingKey": {"jsonPointer": "/user", "required": False}}).status == 200
    records = [{"user": "ä"}, {"user": "b"}, {}, {"user": ""}, {"user": None}, 5, {"user": "b"}]
    assert append(http, name, *records).status == 204
    assert append(http, name, {"user": "b", "n": 1}).status == 204
    assert http.get(f"{name}?offset=-1&key=b").json == [{"user": "b"}, {"user": "b"}, {"user": "b", "n": 1}]
    assert http.get(f"{name}/pk/%C3%A4?offset=-1").json == [{"user": "ä"}]
    assert http.get(f"{name}?offset=-1&key=own").json == [{"user": "before"}]
    assert message(append(http, name, {"user": "x"}, stream_key="k")) == (
        400,
        "key_not_allowed",
        "Stream-Key not allowed when routingKey is configured",
    )
    assert message(append(http, name, {"user": 5}))[1:] == ("invalid_request", "routing key must be string")
    update(http, name, {"routingKey": {"jsonPointer": "/user", "required": True}})
    assert message(append(http, name, {}))[1:] == ("invalid_request", "routing key missing")
    assert update(http, name, {"routingKey": None}).status == 200
    assert append(http, name, {}, stream_key="k").status == 204


def test_every_way_of_reading_shows_the_current_version(http: Wire) -> None:
    name = evolved(http)
    whole = [*OLD, NEW]
    assert http.get(f"{name}?offset=-1").json == whole
    assert http.get(
        f"{name}?offset=-1&format=raw"
    ).body == b'{"at":"0","n":0}{"at":"1","n":0}{"at":"2","n":0}' + (b'{"at": "new", "n": 7}')
    assert http.get(f"{name}?offset=-1&live=long-poll").json == whole
    with http.events(f"{name}?offset=-1&live=sse") as events:
        assert json.loads(events.data()) == whole
        events.control()
        append(http, name, NEW)
        assert json.loads(events.data()) == [NEW]
    with connect(f"ws://127.0.0.1:{http.port}/v1/stream/{name}?offset=-1&live=ws") as socket:
        assert json.loads(json.loads(socket.recv())["payload"]) == [*whole, NEW]
    offset = http.get(f"{name}?offset=-1")["stream-next-offset"]
    assert http.get(f"{name}?offset={offset}").json == []


def test_a_reader_who_waits_gets_entries_of_the_version_it_was_told_of(http: Wire) -> None:
    name = stream(http, V1)
    with http.events(f"{name}?offset=-1&live=sse") as events:
        events.control()
        append(http, name, {"ts": "x"})
        assert json.loads(events.data()) == [{"ts": "x"}]
        events.control()
        assert update(http, name, {"schema": V2, "lens": lens(name)}).status == 200
        append(http, name, NEW)
        assert json.loads(events.data()) == [NEW]


def test_evolution_changes_the_tag_and_pages_are_asked_for_again(http: Wire) -> None:
    name = stream(http, V1)
    append(http, name, {"ts": "x"}, {"ts": "y"})
    http.post(name, stream_closed="true")
    before = http.get(f"{name}?offset=-1")
    assert before["cache-control"] == "no-cache", "it may look different tomorrow"
    tag = {"If-None-Match": before["etag"]}
    assert http.get(f"{name}?offset=-1", tag).status == 304
    assert update(http, name, {"schema": V2, "lens": lens(name)}).status == 200
    after = http.get(f"{name}?offset=-1", tag)
    assert (after.status, after.json) == (200, [{"at": "x", "n": 0}, {"at": "y", "n": 0}])
    assert after["etag"] != before["etag"]
    assert after["cache-control"] == "no-cache"
    plain = stream(http)
    append(http, plain, 1)
    update(http, plain, {"routingKey": {"jsonPointer": "/a", "required": False}})
    http.post(plain, stream_closed="true")
    assert "immutable" in http.get(f"{plain}?offset=-1")["cache-control"], "nothing can change these bytes"


def test_keyed_reads_are_promoted_as_well(http: Wire) -> None:
    name = stream(http, V1, routingKey={"jsonPointer": "/user", "required": True})
    append(http, name, *({"ts": str(number), "user": f"u{number % 2}"} for number in range(6)))
    assert update(http, name, {"schema": V2, "lens": lens(name)}).status == 200
    found = http.get(f"{name}?offset=-1&key=u1").json
    assert found == [{"user": "u1", "at": str(number), "n": 0} for number in (1, 3, 5)]


def test_large_pages_of_old_entries_come_in_parts(http: Wire) -> None:
    name = stream(http, V1)
    append(http, name, *({"ts": f"{number:05}" + "x" * 300} for number in range(2500)))
    assert update(http, name, {"schema": V2, "lens": lens(name)}).status == 200
    found: list[Any] = []
    offset = "-1"
    while len(found) < 2500:
        page = http.get(f"{name}?offset={offset}")
        assert page.json
        found += page.json
        offset = page["stream-next-offset"]
    assert [int(record["at"][:5]) for record in found] == list(range(2500))


def test_s3_entries_are_of_the_version_they_land_under(server: ServerProcess) -> None:
    """Writers alternate between both forms while the schema evolves; what was taken fits its version."""
    first = Wire(server.port)
    name = stream(first, V1)
    begun, done = threading.Barrier(5), threading.Event()
    accepted = threading.Semaphore(0)
    taken: list[bool] = []

    def write() -> None:
        http = Wire(server.port)
        begun.wait()
        old = True
        while not done.is_set():
            old = not old
            answer = append(http, name, {"ts": "x"} if old else NEW)
            if answer.status == 204:
                taken.append(old)
                accepted.release()
            else:
                assert answer.code == "invalid_request"
        http.close()

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    begun.wait()
    for _ in range(40):
        assert accepted.acquire(timeout=PATIENCE_S)
    assert update(first, name, {"schema": V2, "lens": lens(name)}).status == 200
    for _ in range(40):
        assert accepted.acquire(timeout=PATIENCE_S)
    done.set()
    for writer in writers:
        writer.join()
    boundary = json.loads(registry(first, name))["boundaries"][1]["offset"]
    assert boundary > 0
    found: list[Any] = []
    offset = "-1"
    while (page := first.get(f"{name}?offset={offset}")).json:
        found += page.json
        offset = page["stream-next-offset"]
    assert (len(found), boundary) == (len(taken), taken.count(True))
    assert [record["n"] for record in found] == [0] * boundary + [7] * (len(found) - boundary)
    first.close()


def test_of_two_updates_at_once_one_wins(server: ServerProcess) -> None:
    wires = [Wire(server.port) for _ in range(6)]
    name = stream(wires[0], V1)
    begun = threading.Barrier(len(wires))
    answers: list[Answer] = []

    def post(http: Wire, number: int) -> None:
        schema = {**V2, "title": f"made by {number}"}
        begun.wait()
        answers.append(update(http, name, {"schema": schema, "lens": lens(name)}))

    threads = [threading.Thread(target=post, args=(http, number)) for number, http in enumerate(wires)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status for answer in answers].count(200) == 1
    lost = {message(answer)[1:] for answer in answers if answer.status != 200}
    assert lost <= {
        ("conflict", "schema registry changed concurrently"),
        ("conflict", "lens version mismatch"),
    }
    shown = json.loads(registry(wires[0], name))
    assert shown["currentVersion"] == 2
    for http in wires:
        http.close()


def fork(http: Wire, source: str, body: str | None = None, **more: str) -> tuple[str, Answer]:
    name = fresh("schema")
    path = f"/v1/stream/{source}"
    return name, http.put(name, JSON if body else None, body, stream_forked_from=path, **more)


def test_a_fork_goes_on_under_the_registry_of_its_source(http: Wire) -> None:
    source = evolved(http)
    name, made = fork(http, source)
    assert made.status == 201
    shown = json.loads(registry(http, name))
    assert shown == {**json.loads(registry(http, source)), "schema": name, "lenses": {"1": lens(name)}}
    assert http.get(f"{name}?offset=-1").json == [*OLD, NEW]
    assert append(http, name, {"ts": "old form"}).code == "invalid_request"
    assert append(http, name, NEW).status == 204
    assert update(http, name, {"routingKey": {"jsonPointer": "/at", "required": True}}).status == 200
    assert "routingKey" not in json.loads(registry(http, source)), "each has its own"
    # From within the first version: what it inherits is old, what it takes is new.
    early, made = fork(http, source, json.dumps([NEW]), stream_fork_offset="-1", stream_fork_sub_offset="2")
    assert made.status == 201
    assert json.loads(registry(http, early))["boundaries"] == [
        {"offset": 0, "version": 1},
        {"offset": 2, "version": 2},
    ]
    assert http.get(f"{early}?offset=-1").json == [*OLD[:2], NEW]
    refused, answer = fork(http, source, json.dumps([{"ts": "old form"}]))
    assert answer.code == "invalid_request"
    assert http.head(refused).status == 404
    assert fork(http, source, json.dumps([NEW]))[1].status == 201


@pytest.mark.parametrize("kill", [False, True])
def test_the_registry_outlives_the_process(start_server: StartServer, kill: bool) -> None:
    process = start_server("--journal-file-bytes", "4096")
    http = Wire(process.port)
    name = evolved(http)
    keyed = stream(http, V1, routingKey={"jsonPointer": "/user", "required": False})
    append(http, keyed, {"ts": "1", "user": "a"}, {"ts": "2", "user": "b"})
    gone = evolved(http)
    http.delete(gone)
    shown = registry(http, name)
    for _ in range(2):
        filler = fresh("schema")
        http.put(filler, JSON)
        for _ in range(20):
            append(http, filler, "x" * 1000)
        http.close()
        process.restart(kill=kill)
        http = Wire(process.port)
        assert registry(http, name) == shown
        assert http.get(f"{name}?offset=-1").json == [*OLD, NEW]
        assert append(http, name, {"ts": "old form"}).code == "invalid_request"
        assert http.get(f"{keyed}?offset=-1&key=b").json == [{"ts": "2", "user": "b"}]
        assert http.get(f"{gone}/_schema").code == "not_found"
    assert http.put(gone, JSON).status == 201
    assert json.loads(registry(http, gone))["currentVersion"] == 0
    http.close()
