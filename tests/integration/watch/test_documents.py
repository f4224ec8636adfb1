"""Documents over HTTP: versions, conditions, batches, queries, rules; and all of it again after a SIGKILL."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jwt
import pytest

from conftest import StartServer
from support.calls import Caller, Reply
from support.server import ServerProcess
from support.watch_jobs import metric
from tailrace.auth import create_token

BASE = "/v1/databases/default"
SECRET = "a secret that is long enough for the server to accept it"
_numbers = itertools.count(1)


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def place() -> str:
    """A collection that no other test uses."""
    return f"things{next(_numbers)}"


def put(call: Caller, path: str, data: Any, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return call("PUT", f"{BASE}/docs/{path}", data, headers=named)


def found(call: Caller, collection: str, **query: Any) -> list[str]:
    answer = call("POST", f"{BASE}/query", {"collection": collection, **query})
    assert answer.status == 200, answer.raw
    return [document["id"] for document in answer.body["documents"]]


def test_the_life_of_a_document(call: Caller, place: str) -> None:
    path = f"{place}/one"
    assert call("GET", f"{BASE}/docs/{path}").status == 404
    first = put(call, path, {"n": 1, "id": "one"})
    assert (first.status, first.headers["etag"], first.body["version"]) == (201, '"1"', 1)
    assert put(call, path, {"n": 2}).status == 200
    patched = call("PATCH", f"{BASE}/docs/{path}", {"m": {"a": 1}, "n": None})
    assert (patched.status, patched.body["version"]) == (200, 3)
    read = call("GET", f"{BASE}/docs/{path}").body
    assert read["data"] == {"m": {"a": 1}}
    assert (read["path"], read["id"], read["collection"], read["version"]) == (path, "one", place, 3)
    assert read["createdAt"] <= read["updatedAt"]
    assert call("DELETE", f"{BASE}/docs/{path}").status == 204
    assert call("DELETE", f"{BASE}/docs/{path}").status == 204, "it is deleted already"
    assert call("GET", f"{BASE}/docs/{path}").status == 404
    assert call("PATCH", f"{BASE}/docs/{path}", {}).status == 404
    again = put(call, path, {"n": 3})
    assert (again.status, again.body["version"]) == (201, 5), "versions go on over a delete"


def test_conditions(call: Caller, place: str) -> None:
    path = f"{place}/one"
    assert put(call, path, {}, If_Match="*").code == "version_mismatch"
    assert put(call, path, {}, If_None_Match="*").status == 201
    refused = put(call, path, {}, If_None_Match="*")
    assert (refused.status, refused.body["error"]["current_version"]) == (412, 1)
    assert put(call, path, {}, If_Match='"2"').status == 412
    assert put(call, path, {}, If_Match='"1"').body["version"] == 2
    assert call("DELETE", f"{BASE}/docs/{path}", headers={"If-Match": '"1"'}).status == 412


def test_a_reader_who_has_the_document_gets_no_second_copy(call: Caller, place: str) -> None:
    path = f"{BASE}/docs/{place}/one"
    put(call, f"{place}/one", {"n": 1})
    tag = call("GET", path).headers["etag"]
    for known in (tag, f"W/{tag}", f'"9", {tag}', "*"):
        for method in ("GET", "HEAD"):
            same = call(method, path, headers={"If-None-Match": known})
            assert (same.status, same.raw, same.headers["etag"]) == (304, b"", tag), known
    put(call, f"{place}/one", {"n": 2})
    newer = call("GET", path, headers={"If-None-Match": tag})
    assert (newer.status, newer.body["version"], newer.headers["etag"]) == (200, 2, '"2"')
    call("DELETE", path)
    assert call("GET", path, headers={"If-None-Match": '"2"'}).status == 404
    assert call("GET", path, headers={"If-None-Match": "*"}).status == 404


def test_writers_of_one_version_are_told_apart(call: Caller, place: str) -> None:
    path = f"{place}/counter"
    put(call, path, {"n": 0})

    def add(_: int) -> None:
        while True:
            read = call("GET", f"{BASE}/docs/{path}").body
            data = {"n": read["data"]["n"] + 1}
            if put(call, path, data, If_Match=f'"{read["version"]}"').status == 200:
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(24)))
    assert call("GET", f"{BASE}/docs/{path}").body["data"] == {"n": 24}


def test_a_repeat_gets_the_first_answer(call: Caller, place: str) -> None:
    first = put(call, f"{place}/one", {"n": 1}, Idempotency_Key="k")
    again = put(call, f"{place}/one", {"n": 1}, Idempotency_Key="k")
    assert (first.status, first.raw) == (again.status, again.raw)
    assert put(call, f"{place}/one", {"n": 1}, Idempotency_Key="other").body["version"] == 2
    assert put(call, f"{place}/one", {}, Idempotency_Key="k" * 129).code == "invalid_header"
    labels = f'collection="{place}",database="default",stage="write"'
    assert metric(call, f"tailrace_watch_dedup_dropped_total{{{labels}}}") == 1


def test_a_key_is_good_for_one_request(call: Caller, place: str) -> None:
    put(call, f"{place}/one", {"n": 1}, Idempotency_Key="k")
    other = put(call, f"{place}/two", {"n": 2}, Idempotency_Key="k")
    assert (other.status, other.code) == (409, "conflict"), (
        "a write that is not made must not look as if it was"
    )
    assert call("GET", f"{BASE}/docs/{place}/two").status == 404
    removed = call("DELETE", f"{BASE}/docs/{place}/one", headers={"Idempotency-Key": "k"})
    assert (removed.status, removed.code) == (409, "conflict")
    assert call("GET", f"{BASE}/docs/{place}/one").body["version"] == 1


def test_a_key_is_good_for_one_content(call: Caller, place: str) -> None:
    """Whoever sends something else under the same key would take it for written."""
    put(call, f"{place}/one", {"a": 1, "b": True}, Idempotency_Key="k")
    for other in ({"a": 2, "b": True}, {"a": 1}, {"a": 1, "b": 1}, {"a": True, "b": True}):
        refused = put(call, f"{place}/one", other, Idempotency_Key="k")
        assert (refused.status, refused.code) == (409, "conflict"), other
    spelled = put(call, f"{place}/one", b' {"b":true, "a":1} ', Idempotency_Key="k")
    assert (spelled.status, spelled.body["version"]) == (201, 1), "the same content, written otherwise"
    put(call, f"{place}/two", {"n": 1})
    patched = [
        call("PATCH", f"{BASE}/docs/{place}/two", {"n": n}, headers={"Idempotency-Key": "p"}).status
        for n in (2, 2, 3)
    ]
    assert patched == [200, 200, 409]
    assert call("GET", f"{BASE}/docs/{place}/one").body["data"] == {"a": 1, "b": True}
    writes: list[dict[str, Any]] = [
        {"op": "put", "path": f"{place}/b{n}", "data": {"n": n}} for n in range(3)
    ]
    batch = {"writes": writes}
    assert call("POST", f"{BASE}/batch", batch, headers={"Idempotency-Key": "b"}).status == 200
    writes[1]["data"] = {"n": 7}
    refused = call("POST", f"{BASE}/batch", batch, headers={"Idempotency-Key": "b"})
    assert (refused.status, refused.code) == (409, "conflict")
    assert found(call, place, where="doc.n == 7") == []


def test_two_contents_at_once_with_one_key(call: Caller, place: str) -> None:
    def write(number: int) -> int:
        return put(call, f"{place}/one", {"n": number % 2}, Idempotency_Key="k").status

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(write, range(16)))
    made = call("GET", f"{BASE}/docs/{place}/one").body
    assert made["version"] == 1
    assert statuses == [201 if number % 2 == made["data"]["n"] else 409 for number in range(16)]


def test_two_requests_at_once_with_one_key(call: Caller, place: str) -> None:
    def write(number: int) -> int:
        return put(call, f"{place}/d{number % 2}", {"n": 1}, Idempotency_Key="k").status

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(write, range(16)))
    made = [number for number in (0, 1) if call("GET", f"{BASE}/docs/{place}/d{number}").status == 200]
    assert len(made) == 1
    assert statuses == [201 if number % 2 == made[0] else 409 for number in range(16)]


def test_a_repeated_batch_has_a_result_for_each_write(call: Caller, place: str) -> None:
    writes = [
        {"op": "put", "path": f"{place}/a", "data": {}, "ifVersion": 9},
        {"op": "put", "path": f"{place}/b", "data": {}},
        {"op": "patch", "path": f"{place}/b", "data": {"n": 1}},
    ]
    answers = [
        call("POST", f"{BASE}/batch", {"writes": writes}, headers={"Idempotency-Key": "k"}) for _ in range(2)
    ]
    first, again = ([(one["path"], one["status"]) for one in answer.body["results"]] for answer in answers)
    assert first == [(f"{place}/a", 412), (f"{place}/b", 201), (f"{place}/b", 200)]
    assert again == [(f"{place}/a", 409), *first[1:]]
    fewer = call("POST", f"{BASE}/batch", {"writes": writes[1:2]}, headers={"Idempotency-Key": "k"})
    assert (fewer.status, fewer.code) == (409, "conflict")


def test_batches(call: Caller, place: str) -> None:
    writes = [
        {"op": "put", "path": f"{place}/a", "data": {"n": 1}},
        {"op": "patch", "path": f"{place}/a", "data": {"m": 2}},
        {"op": "put", "path": f"{place}/b", "data": {}, "ifAbsent": True},
        {"op": "delete", "path": f"{place}/b", "ifVersion": 1},
    ]
    answer = call("POST", f"{BASE}/batch", {"atomic": True, "writes": writes})
    assert [(one["status"], one["version"]) for one in answer.body["results"]] == [
        (201, 1),
        (200, 2),
        (201, 1),
        (204, 2),
    ]
    assert call("GET", f"{BASE}/docs/{place}/a").body["data"] == {"n": 1, "m": 2}
    failing = [
        {"op": "put", "path": f"{place}/c", "data": {}},
        {"op": "put", "path": f"{place}/a", "data": {}, "ifVersion": 7},
    ]
    refused = call("POST", f"{BASE}/batch", {"atomic": True, "writes": failing})
    assert (refused.status, refused.code) == (409, "batch_failed")
    assert call("GET", f"{BASE}/docs/{place}/c").status == 404, "all or nothing"
    loose = call("POST", f"{BASE}/batch", {"writes": failing})
    assert [one["status"] for one in loose.body["results"]] == [201, 412]
    apart = [
        {"op": "put", "path": f"{place}/d", "data": {}},
        {"op": "put", "path": "elsewhere/d", "data": {}},
    ]
    assert call("POST", f"{BASE}/batch", {"atomic": True, "writes": apart}).code == "batch_not_atomic"
    many = [{"op": "put", "path": f"{place}/x{i}", "data": {}} for i in range(501)]
    assert call("POST", f"{BASE}/batch", {"writes": many}).status == 413
    assert call("POST", f"{BASE}/batch", {"writes": many[:500]}).status == 200


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("orders", "invalid_path"),
        ("orders/../x", "invalid_path"),
        ("orders/a/b", "invalid_path"),
        ("_x/a", "invalid_path"),
        ("pk/a", "invalid_path"),
        ("orders/" + "x" * 65, "invalid_path"),
        ("orders/%20", "invalid_path"),
        ("/".join(["a"] * 18), "invalid_path"),
    ],
)
def test_paths_that_no_document_has(call: Caller, path: str, code: str) -> None:
    assert put(call, path, {}).code == code


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[]", "invalid_request"),
        (b"{", "invalid_json"),
        (b'{"a":1,"a":2}', "invalid_json"),
        (b'{"a":NaN}', "invalid_json"),
        (b'{"a":"\\ud800"}', "invalid_json"),
        (b'{"version":1}', "reserved_field"),
        (b'{"_x":1}', "reserved_field"),
        (b'{"id":"other"}', "reserved_field"),
        (b'{"a":' + b"[" * 65 + b"]" * 65 + b"}", "invalid_json"),
        (b'{"a":"' + b"x" * (1 << 20) + b'"}', "payload_too_large"),
    ],
)
def test_bodies_that_no_document_is(call: Caller, place: str, body: bytes, code: str) -> None:
    assert put(call, f"{place}/a", body).code == code


def test_numbers_keep_one_of_two_forms(call: Caller, place: str) -> None:
    put(call, f"{place}/a", b'{"big":9223372036854775808,"small":-9223372036854775808,"x":1.0}')
    assert call("GET", f"{BASE}/docs/{place}/a").raw.count(b"9.223372036854776e+18") == 1
    assert found(call, place, where="doc.small == -9223372036854775808 && doc.x == 1") == ["a"]
    put(call, f"{place}/b", b'{"most":9223372036854775807,"beyond":9223372036854775809}')
    read = call("GET", f"{BASE}/docs/{place}/b")
    assert b'"most":9223372036854775807' in read.raw, "exact as far as 64 bits go"
    assert read.body["data"]["beyond"] == 2.0**63, "and the nearest double beyond"
    assert put(call, f"{place}/c", b'{"n":1' + b"0" * 400 + b"}").code == "invalid_json"


def test_queries(call: Caller, place: str) -> None:
    for number in range(30):
        put(call, f"{place}/d{number:02}", {"n": number, "odd": number % 2 == 1, "tags": [str(number)]})
    assert found(call, place, filters=[{"field": "n", "op": ">=", "value": 28}]) == ["d28", "d29"]
    assert found(call, place, where="doc.odd && doc.n < 4") == ["d01", "d03"]
    assert found(call, place, filters=[{"field": "tags", "op": "contains", "value": "7"}]) == ["d07"]
    assert found(call, place, documents=["d05", "nope"], where="doc.n > 1") == ["d05"]
    assert found(call, place, orderBy=[{"field": "n", "direction": "desc"}], limit=2) == ["d29", "d28"]
    for order in ([], [{"field": "odd"}, {"field": "n", "direction": "desc"}]):
        ids: list[str] = []
        query: dict[str, Any] = {"collection": place, "orderBy": order, "limit": 7}
        while True:
            page = call("POST", f"{BASE}/query", query).body
            ids += [document["id"] for document in page["documents"]]
            if page["cursor"] is None:
                break
            query["cursor"] = page["cursor"]
        assert sorted(ids) == [f"d{number:02}" for number in range(30)]
        if order:
            assert ids[:2] == ["d28", "d26"]
    refused = call("POST", f"{BASE}/query", {"collection": place, "where": "doc.n +"})
    assert refused.code == "invalid_query"
    assert refused.body["error"]["message"].startswith("where:1:8:")
    assert call("POST", f"{BASE}/query", {"collection": place, "startAfter": 1}).code == "unsupported_query"
    assert call("POST", f"{BASE}/query", {"collection": place, "cursor": "x"}).code == "invalid_query"


def test_databases_and_collections(call: Caller, place: str) -> None:
    assert call("GET", "/v1/databases/nowhere/docs/a/b").status == 404
    assert call("PUT", "/v1/databases/Nope").code == "invalid_path"
    assert [call("PUT", f"/v1/databases/{place}").status for _ in range(2)] == [201, 200]
    where = f"/v1/databases/{place}/collections/orders"
    assert call("GET", where).status == 404
    made = call("PUT", where, {"partitions": 2})
    assert (made.status, made.body["partitions"], made.body["positions"]) == (201, 2, [0, 0])
    assert call("PUT", where, {"partitions": 3}).code == "collection_exists"
    assert call("PUT", where, {"readRule": "doc.x +"}).code == "invalid_query"
    call("PUT", f"/v1/databases/{place}/docs/orders/a", {})
    assert sum(call("GET", where).body["positions"]) == 1
    assert call("GET", where).body["documents"] == 1
    changes = call("GET", f"/v1/stream/__changes__/{place}/orders/0?offset=-1")
    others = call("GET", f"/v1/stream/__changes__/{place}/orders/1?offset=-1")
    (change,) = changes.body if changes.status == 200 and changes.body else others.body
    assert (change["kind"], change["op"], change["documentKey"], change["version"]) == (
        "change",
        "insert",
        "a",
        1,
    )
    assert call("POST", f"/v1/stream/__changes__/{place}/orders/0", {"x": 1}).status == 405


def test_all_of_it_is_there_after_a_kill(tmp_path: Path) -> None:
    process = ServerProcess(tmp_path / "data").start()
    call = Caller(process)
    for number in range(40):
        put(call, f"kept/d{number % 10}", {"n": number}, Idempotency_Key=f"k{number}")
    call("DELETE", f"{BASE}/docs/kept/d3")
    call("PUT", f"{BASE}/collections/kept", {"readRule": "doc.n < 1000"})
    before = [call("GET", f"{BASE}/docs/kept/d{number}").raw for number in range(10)]
    for file in ("", "watch.db"):
        process.kill()
        if file:
            for path in (tmp_path / "data").glob("watch.db*"):
                path.unlink()
        process.start()
        assert [call("GET", f"{BASE}/docs/kept/d{number}").raw for number in range(10)] == before
        described = call("GET", f"{BASE}/collections/kept").body
        assert (described["documents"], described["readRule"]) == (9, "doc.n < 1000")
        assert put(call, "kept/d3", {"n": 3}, Idempotency_Key="k3").body["version"] == 1, "it is remembered"
        other = put(call, "kept/d3", {"n": 4}, Idempotency_Key="k3")
        assert (other.status, other.code) == (409, "conflict"), "and what it wrote"
    assert put(call, "kept/d3", {}).body["version"] == 6, "the tombstone is remembered too"
    process.stop()


def token(scopes: tuple[str, ...], dbs: list[str] | None, **claims: Any) -> str:
    made = create_token(SECRET, sub="ada", scopes=scopes, dbs=dbs)
    payload = jwt.decode(made, options={"verify_signature": False})
    return jwt.encode({**payload, **claims}, SECRET, algorithm="HS256")


def test_rules_decide_what_is_seen_and_written(start_server: StartServer) -> None:
    process = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    admin = Caller(process, token(("manage",), None))
    rules = {"readRule": "doc.org == request.auth.claims.org", "writeRule": "'editor' in request.auth.roles"}
    assert admin("PUT", "/v1/databases/app").status == 201
    assert admin("PUT", "/v1/databases/app/collections/orders", rules).status == 201
    one = Caller(process, token(("read", "write"), ["app"], org="one", roles=["editor"]))
    two = Caller(process, token(("read", "write"), ["app"], org="two", roles=[]))
    other = Caller(process, token(("read", "write"), ["other"], org="one"))
    reader = Caller(process, token(("read",), ["app"], org="one", roles=["editor"]))
    path = "/v1/databases/app/docs/orders/a"
    assert other("GET", path).status == 403
    assert reader("PUT", path, {"org": "one"}).status == 403
    assert two("PUT", path, {"org": "two"}).code == "forbidden"
    assert one("PUT", path, {"org": "one"}).status == 201
    assert one("GET", path).status == 200
    assert two("GET", path).status == 404, "what one may not read does not exist"
    query = {"collection": "orders"}
    assert [len(who("POST", "/v1/databases/app/query", query).body["documents"]) for who in (one, two)] == [
        1,
        0,
    ]
    assert one("GET", "/v1/stream/__changes__/app/orders/0?offset=-1").status == 403, "changes bypass rules"


def slowest_answer_s(call: Caller, work: Callable[[], Reply]) -> tuple[Reply, float]:
    """What `work` is answered, and how long the slowest of many small requests beside it took."""
    slowest = 0.0
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(work)
        while not running.done():
            begun = time.monotonic()
            assert call("GET", "/health").status == 200
            slowest = max(slowest, time.monotonic() - begun)
        return running.result(), slowest


def test_a_costly_query_does_not_hold_up_other_requests(server: ServerProcess, place: str) -> None:
    call, other = Caller(server), Caller(server)
    large = {"s": "a" * 400_000, "t": "a" * 100_000 + "b" + "a" * 100_000, "l": list(range(1_500)), "n": 1}
    for number in range(150):
        data = large if number < 20 else {"s": "", "l": list(range(1_500)), "n": 1}
        assert put(call, f"{place}/d{number:03}", data).status == 201
    hostile = "doc.l.exists(x, doc.s.contains(doc.t))"
    ask = {"collection": place, "where": hostile}
    refused, slowest = slowest_answer_s(other, lambda: call("POST", f"{BASE}/query", ask))
    assert (refused.status, refused.body["error"]["code"]) == (400, "query_too_complex")
    assert slowest < 1.0
    ask = {
        "collection": place,
        "where": "doc.l.exists(x, x == -1) || doc.n == 2",
        "orderBy": [{"field": "n"}],
    }
    answer, slowest = slowest_answer_s(other, lambda: call("POST", f"{BASE}/query", ask))
    assert (answer.status, answer.body["documents"]) == (200, [])
    assert slowest < 1.0


def test_a_page_of_large_documents_is_cut_and_continued(call: Caller, place: str) -> None:
    names = [f"d{number:02}" for number in range(14)]
    for number, name in enumerate(names):
        assert put(call, f"{place}/{name}", {"s": "x" * 900_000, "n": -number}).status == 201
    for order, wanted in (([], names), ([{"field": "n"}], names[::-1])):
        found: list[str] = []
        pages, cursor = 0, None
        while pages == 0 or cursor is not None:
            ask = {"collection": place, "orderBy": order, "limit": 1000} | (
                {"cursor": cursor} if cursor else {}
            )
            answer = call("POST", f"{BASE}/query", ask)
            assert answer.status == 200
            assert len(answer.raw) < 9 * 1024 * 1024
            found += [document["id"] for document in answer.body["documents"]]
            pages, cursor = pages + 1, answer.body["cursor"]
        assert (found, pages) == (wanted, 2)
