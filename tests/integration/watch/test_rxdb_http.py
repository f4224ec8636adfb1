"""Replication over HTTP: pages, pushes, streams, and what is refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jwt
import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.replica import Replica, Stream
from support.server import ServerProcess
from support.sources import QUICK, wait_phase
from tailrace.auth import create_token

BASE = "/v1/databases/default"
SECRET = "a secret that is long enough for the server to accept it"
FORGETFUL = {
    "TAILRACE_WATCH_TOMBSTONE_MS": "1000",
    "TAILRACE_WATCH_CARE_MS": "50",
    "TAILRACE_WATCH_RETENTION_MS": "0",
}
_numbers = itertools.count(1)


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def replica(call: Caller) -> Replica:
    """Of a collection that no other test uses."""
    return Replica(call, f"copied{next(_numbers)}")


def put(call: Caller, path: str, data: Any) -> None:
    assert call("PUT", f"{BASE}/docs/{path}", data).status in (200, 201)


def content(document: dict[str, Any]) -> dict[str, Any]:
    stamps = ("id", "collection", "version", "createdAt", "updatedAt", "_deleted")
    return {name: value for name, value in document.items() if name not in stamps}


def test_a_page_has_flat_documents_and_tombstones(call: Caller, replica: Replica) -> None:
    name = replica.collection
    assert replica.pull() == ([], None), "there is no collection yet"
    put(call, f"{name}/a", {"n": 1})
    put(call, f"{name}/b", {"n": 2})
    assert call("DELETE", f"{BASE}/docs/{name}/b").status == 204
    documents, checkpoint = replica.pull()
    by_id = {one["id"]: one for one in documents}
    assert {name: content(one) for name, one in by_id.items()} == {"a": {"n": 1}, "b": {"n": 2}}
    assert (by_id["a"]["_deleted"], by_id["b"]["_deleted"]) == (False, True)
    assert (by_id["a"]["collection"], by_id["a"]["version"], by_id["b"]["version"]) == (name, 1, 2)
    assert by_id["a"]["createdAt"] <= by_id["a"]["updatedAt"]
    assert set(checkpoint) == {"updatedAt", "id", "pos"}
    assert checkpoint["id"] == documents[-1]["id"]
    assert replica.pull(checkpoint) == ([], checkpoint), "an empty page leaves it as it was"
    put(call, f"{name}/a", {"n": 3})
    again, later = replica.pull(checkpoint)
    assert [content(one) for one in again] == [{"n": 3}]
    assert replica.pull(checkpoint)[0] == again, "asking again is harmless"
    assert replica.pull(later)[0] == []
    bare, _ = replica.pull(deletedField="gone", stamps="0")
    assert sorted(bare, key=lambda one: one["id"]) == [
        {"id": "a", "n": 3, "gone": False},
        {"id": "b", "n": 2, "gone": True},
    ]


@pytest.mark.parametrize("limit", [1, 2, 7, 100, 1000])
def test_w42_a_walk_ends_and_finds_everything(call: Caller, replica: Replica, limit: int) -> None:
    """Many documents per millisecond, and writes between the pages."""
    name = replica.collection
    writes = [{"op": "put", "path": f"{name}/d{i}", "data": {"n": i}} for i in range(60)]
    assert call("POST", f"{BASE}/batch", {"atomic": True, "writes": writes}).status == 200
    held: dict[str, dict[str, Any]] = {}
    checkpoint: Any = None
    for step in itertools.count():
        page, checkpoint = replica.pull(checkpoint, limit=limit)
        assert len({one["id"] for one in page}) == len(page) <= limit
        held |= {one["id"]: one for one in page}
        if len(page) < limit:
            break
        if step < 5:
            put(call, f"{name}/d{step}", {"n": -step})
            put(call, f"{name}/new{step}", {"n": step})
    view = call("POST", f"{BASE}/query", {"collection": name, "limit": 1000}).body["documents"]
    assert {one["id"]: (one["version"], one["data"]) for one in view} == {
        name: (one["version"], content(one)) for name, one in held.items()
    }


def test_pushes(call: Caller, replica: Replica) -> None:
    new = {"id": "a", "n": 1, "_deleted": False}
    assert replica.push((new, None)) == []
    assert replica.push((new, None)) == [], "a repeat has no effect"
    edited = {**new, "n": 2}
    assert replica.push((edited, new)) == []
    assert replica.push((edited, new)) == []
    (current,) = replica.push(({**new, "n": 3}, new))
    assert (current["id"], content(current), current["version"], current["_deleted"]) == (
        "a",
        {"n": 2},
        2,
        False,
    )
    # With the server's stamps, old ones, and a client's own fields.
    stamped = {**current, "version": 1, "updatedAt": 5, "_rev": "1-x", "_meta": {"lwt": 1}}
    assert replica.push(({**stamped, "n": 4}, stamped)) == []
    assert call("GET", f"{BASE}/docs/{replica.collection}/a").body["data"] == {"n": 4}
    gone = {"id": "a", "n": 4, "_deleted": True}
    assert replica.push((gone, {"id": "a", "n": 4})) == []
    assert replica.push((gone, {"id": "a", "n": 4})) == []
    assert call("GET", f"{BASE}/docs/{replica.collection}/a").status == 404
    (tombstone,) = replica.push(({"id": "a", "n": 9}, {"id": "a", "n": 8}))
    assert (content(tombstone), tombstone["_deleted"]) == ({"n": 4}, True)
    assert replica.push(({"id": "a", "n": 9}, tombstone)) == []
    assert call("GET", f"{BASE}/docs/{replica.collection}/a").body["version"] == 5


def test_a_document_that_never_was_is_deleted(call: Caller, replica: Replica) -> None:
    """Made and deleted while the client was away."""
    gone = {"id": "a", "n": 1, "_deleted": True}
    assert replica.push((gone, None), ({"id": "b", "n": 2}, None)) == []
    documents, _ = replica.pull()
    assert {one["id"]: (content(one), one["_deleted"]) for one in documents} == {
        "a": ({"n": 1}, True),
        "b": ({"n": 2}, False),
    }
    assert replica.push((gone, None)) == []
    assert len(replica.pull()[0]) == 2
    (answer,) = replica.push(({"id": "c", "n": 1}, {"id": "c", "n": 0}))
    assert (answer["id"], answer["_deleted"]) == ("c", True), "the client believes in what is not there"


def test_twenty_documents_in_quick_succession(call: Caller, replica: Replica) -> None:
    """A client that assumes what it sent last never has a conflict with itself."""
    held: dict[str, dict[str, Any]] = {}
    for edit, name in itertools.product(range(5), range(20)):
        state = {"id": f"d{name}", "edit": edit, "_deleted": False}
        assert replica.push((state, held.get(f"d{name}"))) == []
        held[f"d{name}"] = state
    view = call("POST", f"{BASE}/query", {"collection": replica.collection}).body["documents"]
    assert [(one["data"], one["version"]) for one in view] == [({"edit": 4}, 5)] * 20


def test_rows_of_one_push_are_one_after_the_other(replica: Replica) -> None:
    first, second = {"id": "a", "n": 1}, {"id": "a", "n": 2}
    assert replica.push((first, None), (second, first)) == []
    (lost,) = replica.push((first, None), ({"id": "b"}, None))
    assert content(lost) == {"n": 2}
    assert {one["id"] for one in replica.pull()[0]} == {"a", "b"}, "conflicts do not hold up the others"


def test_bad_pushes(call: Caller, replica: Replica) -> None:
    url = f"{replica.base}/push"
    good = {"collection": replica.collection, "rows": []}
    assert call("POST", url, good).body == {"conflicts": []}
    for body, code in (
        (b"{", "invalid_json"),
        ([], "invalid_request"),
        ({}, "invalid_request"),
        ({**good, "more": 1}, "invalid_request"),
        ({**good, "collection": "a/b"}, "invalid_path"),
        ({**good, "collection": 7}, "invalid_request"),
        ({**good, "rows": {}}, "invalid_request"),
        ({**good, "rows": [{"newDocumentState": {"id": "a/b"}}]}, "invalid_path"),
        ({**good, "rows": [{"newDocumentState": {"id": ""}}]}, "invalid_path"),
        ({**good, "deletedField": "version"}, "invalid_request"),
        (b'{"collection":"c","rows":[{"newDocumentState":{"id":"a","n":1,"n":2}}]}', "invalid_json"),
    ):
        answer = call("POST", url, body)
        assert (answer.status, answer.code) == (400, code), body
    row = {"newDocumentState": {"id": "a"}}
    assert call("POST", url, {**good, "rows": [row] * 500}).status == 200
    assert call("POST", url, {**good, "rows": [row] * 501}).code == "payload_too_large"
    assert (
        call("POST", url, {**good, "rows": [{"newDocumentState": {"id": "big", "t": "x" * 2**20}}]}).status
        == 413
    )
    assert call("POST", url, b"{}", headers={"Content-Type": "text/plain"}).code == "unsupported_media_type"
    assert call("GET", url).status == 405
    assert call("POST", f"{replica.base}/pull").status == 405
    assert call("GET", f"{replica.base}/nothing").status == 404
    assert call("POST", "/replication/v1/databases/nowhere/push", good).status == 404


def test_bad_pulls(call: Caller, replica: Replica) -> None:
    put(call, f"{replica.collection}/a", {})
    _, checkpoint = replica.pull()
    for wrong in (
        "{",
        "7",
        "[]",
        '{"id":"a"}',
        json.dumps({**checkpoint, "pos": "x"}),
        json.dumps({**checkpoint, "updatedAt": None}),
    ):
        assert replica.ask(wrong).code == "invalid_checkpoint", wrong
    put(call, f"{replica.collection}other/a", {})
    other = Replica(call, f"{replica.collection}other")
    assert other.ask(checkpoint).code == "invalid_checkpoint", "it is of another collection"
    for limit in ("0", "1001", "-1", "x", ""):
        assert replica.ask(limit=limit).code == "invalid_request", limit
    assert replica.ask(token="x").code == "invalid_request"
    assert replica.ask(stamps="maybe").code == "invalid_request"
    assert Replica(call, "a/b").ask().code == "invalid_path"
    assert call("GET", f"{replica.base}/pull").code == "invalid_request"


def test_a_client_that_knows_a_time_only(call: Caller, replica: Replica) -> None:
    name = replica.collection
    for i in range(30):
        put(call, f"{name}/d{i}", {"n": i})
    documents, checkpoint = replica.pull()
    since = checkpoint["updatedAt"]
    late, _ = replica.pull({"updatedAt": since, "id": "d1"})
    # What was stamped within five seconds may have come later.
    recent = {one["id"] for one in documents if one["updatedAt"] >= since - 5000}
    assert {one["id"] for one in late} == recent
    assert replica.pull({"updatedAt": checkpoint["updatedAt"] + 60_000, "id": ""})[0] == []
    assert len(replica.pull({"updatedAt": 0, "id": ""})[0]) == 30
    _, full = replica.pull({"updatedAt": 0, "id": ""})
    assert replica.pull(full)[0] == []


def test_a_page_of_large_documents_is_whole(call: Caller, replica: Replica) -> None:
    text = "x" * 400_000
    for i in range(12):
        put(call, f"{replica.collection}/d{i}", {"t": text})
    documents, checkpoint = replica.pull(limit=12)
    assert {one["id"] for one in documents} == {f"d{i}" for i in range(12)}
    assert all(one["t"] == text for one in documents)
    assert replica.pull(checkpoint)[0] == []


def test_a_stream_goes_on_where_it_was(server: ServerProcess, call: Caller, replica: Replica) -> None:
    name = replica.collection
    stream = Stream(server, name)
    stream.begin()
    put(call, f"{name}/a", {"n": 1})
    page = stream.take()
    assert [content(one) for one in page["documents"]] == [{"n": 1}]
    assert stream.id == page["checkpoint"]["pos"]
    assert replica.pull(page["checkpoint"])[0] == []
    stream.close()
    put(call, f"{name}/b", {"n": 2})
    for given in ({"Last_Event_ID": stream.id}, {"checkpoint": json.dumps(page["checkpoint"])}):
        again = Stream(server, name, **given)
        assert [one["id"] for one in again.take()["documents"]] == ["b"]
        again.close()
    fresh = Stream(server, name)
    place = fresh.begin()
    fresh.close()
    put(call, f"{name}/c", {"n": 3})
    back = Stream(server, name, Last_Event_ID=place)
    assert [one["id"] for one in back.take()["documents"]] == ["c"], "nothing had happened when it was cut"
    back.close()
    lost = Stream(server, name, Last_Event_ID="something else")
    assert lost.take() == "RESYNC"
    put(call, f"{name}/d", {"n": 4})
    assert [one["id"] for one in lost.take()["documents"]] == ["d"]
    lost.close()
    answer = call("GET", f"{replica.base}/stream?collection={name}&checkpoint=7")
    assert answer.code == "invalid_checkpoint"
    assert call("HEAD", f"{replica.base}/stream?collection={name}").status == 200


def test_other_rules_send_clients_back_to_pulling(
    server: ServerProcess, call: Caller, replica: Replica
) -> None:
    name = replica.collection
    for i in range(10):
        put(call, f"{name}/d{i}", {"n": i, "open": i % 2 == 0})
    _, checkpoint = replica.walk()
    stream = Stream(server, name)
    stream.begin()
    url = f"{BASE}/collections/{name}"
    fields = {"tombstoneFields": {"open": False}}
    assert call("PUT", url, {"readRule": "doc.open == true", "replication": fields}).status == 200
    assert stream.take() == "RESYNC"
    documents, checkpoint = replica.walk(checkpoint, limit=3)
    assert {one["id"]: one["_deleted"] for one in documents} == {f"d{i}": i % 2 == 1 for i in range(10)}
    hidden = next(one for one in documents if one["id"] == "d1")
    assert hidden == {"id": "d1", "open": False, "_deleted": True}, "its content is not for this reader"
    assert replica.pull(checkpoint)[0] == []
    assert {one["id"] for one in replica.walk()[0]} == {f"d{i}" for i in range(0, 10, 2)}, "a new client"
    put(call, f"{name}/d2", {"n": 2, "open": False})
    assert stream.take()["documents"] == [{"id": "d2", "open": False, "_deleted": True}]
    assert replica.pull(checkpoint)[0] == [{"id": "d2", "open": False, "_deleted": True}]
    (current,) = replica.push(({"id": "d2", "mine": 1}, {"id": "d2", "mine": 0}))
    assert current == {"id": "d2", "mine": 1, "_deleted": True}, "nor is it in a conflict"
    assert call("PUT", url, {"readRule": None}).status == 200
    assert stream.take() == "RESYNC"
    again, _ = replica.walk(checkpoint, limit=4)
    assert {one["id"] for one in again if not one["_deleted"]} == {f"d{i}" for i in range(10)}
    stream.close()


def test_a_collection_that_was_made_anew(server: ServerProcess, call: Caller, replica: Replica) -> None:
    name = replica.collection
    put(call, f"{name}/a", {"n": 1})
    _, checkpoint = replica.pull()
    stream = Stream(server, name)
    stream.begin()
    assert call("DELETE", f"{BASE}/collections/{name}").status == 204
    assert stream.take() == "RESYNC"
    refused = replica.ask(checkpoint)
    assert (refused.status, refused.code) == (410, "checkpoint_expired")
    put(call, f"{name}/b", {"n": 2})
    assert replica.ask(checkpoint).code == "checkpoint_expired"
    assert [one["id"] for one in replica.pull()[0]] == ["b"]
    stream.close()


def test_w44_forgotten_tombstones(start_server: StartServer) -> None:
    """A client that was away for too long is told so; one that begins is not."""
    server = start_server(env=FORGETFUL)
    call = Caller(server)
    replica = Replica(call, "copied")
    for i in range(40):
        put(call, f"copied/d{i}", {"n": i})
    _, checkpoint = replica.walk()
    for i in range(0, 40, 2):
        assert call("DELETE", f"{BASE}/docs/copied/d{i}").status == 204
    eventually(lambda: replica.walk()[0], lambda found: len(found) == 20)
    refused = replica.ask(checkpoint)
    assert (refused.status, refused.code) == (410, "checkpoint_expired")
    assert replica.ask({"updatedAt": 0, "id": ""}).code == "checkpoint_expired"
    documents, checkpoint = replica.walk(limit=3)
    assert {one["id"] for one in documents} == {f"d{i}" for i in range(1, 40, 2)}
    server.restart(kill=True)
    put(call, "copied/d0", {"n": 100})
    assert [content(one) for one in replica.walk(checkpoint)[0]] == [{"n": 100}]


def test_checkpoints_are_good_after_a_crash(start_server: StartServer) -> None:
    server = start_server()
    replica = Replica(Caller(server), "copied")
    rows: list[tuple[dict[str, Any], None]] = [({"id": f"d{i}"}, None) for i in range(50)]
    assert replica.push(*rows) == []
    page, checkpoint = replica.pull(limit=20)
    server.restart(kill=True)
    assert replica.push(*rows) == [], "a push whose answer was lost"
    rest, checkpoint = replica.walk(checkpoint, limit=20)
    assert sorted(one["id"] for one in [*page, *rest]) == sorted(f"d{i}" for i in range(50))
    assert {one["version"] for one in rest} == {1}


def _token(**claims: Any) -> str:
    return jwt.encode({"exp": 4_000_000_000, **claims}, SECRET, "HS256")


def test_who_may_do_what(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})
    manage = Caller(server, create_token(SECRET, sub="m", scopes=("manage",)))
    assert manage("PUT", "/v1/databases/app").status == 201
    rules = {
        "readRule": "doc.org == request.auth.claims.org",
        "writeRule": "doc.org == request.auth.claims.org",
    }
    assert manage("PUT", "/v1/databases/app/collections/orders", rules).status == 201

    def of(**claims: Any) -> Replica:
        return Replica(Caller(server, _token(**claims)), "orders", database="app")

    mine = of(sub="u", scope="read write", db=["app"], org="x")
    theirs = of(sub="v", scope="read write", db=["app"], org="y")
    reader = of(sub="r", scope="read", db=["app"], org="x")
    writer = of(sub="w", scope="write", db=["app"], org="x")
    for outside in (of(sub="o", scope="read write", db=["other"]), of(sub="o", scope="read write")):
        assert outside.ask().status == outside.send().status == 403
    assert Replica(Caller(server), "orders", database="app").ask().status == 401
    assert of(sub="e", scope="read", db=["app"], exp=1).ask().status == 401
    assert mine.push(({"id": "a", "org": "x"}, None)) == []
    assert theirs.push(({"id": "b", "org": "y"}, None)) == []
    assert reader.send(({"id": "c", "org": "x"}, None)).status == 403
    assert writer.push(({"id": "c", "org": "x"}, None)) == []
    assert writer.ask().status == 403
    assert {one["id"] for one in mine.pull()[0]} == {"a", "c"}
    refused = mine.send(({"id": "d", "org": "x"}, None), ({"id": "e", "org": "y"}, None))
    assert (refused.status, refused.code) == (403, "forbidden")
    assert "d" not in {one["id"] for one in mine.pull()[0]}, "nothing of it was done"
    # Somebody else's document: neither by assuming nor by guessing does one learn what is in it.
    assert mine.send(({"id": "b", "org": "x"}, None)).status == 403
    assert mine.send(({"id": "b", "org": "y"}, None)).status == 403
    renewed = of(sub="u", scope="read write", db=["app"], org="x", iat=7)
    _, checkpoint = mine.walk()
    assert renewed.pull(checkpoint) == ([], checkpoint), "a new token of the same person goes on"


def test_a_collection_that_follows_a_source(start_server: StartServer) -> None:
    """It is replicated to clients, and not written by them."""
    server = start_server(env=QUICK)
    call = Caller(server)
    assert call("PUT", "orders", headers={"Content-Type": "application/json"}).status == 201
    assert call("POST", "orders/_profile", {"profile": {"kind": "state-protocol"}}).status == 200

    def say(*records: dict[str, Any]) -> None:
        assert call("POST", "orders", list(records)).status in (200, 204)

    def order(key: str, value: dict[str, Any]) -> dict[str, Any]:
        return {"type": "order", "key": key, "value": value, "headers": {"operation": "insert"}}

    say(order("a", {"n": 1, "version": "x", "_rev": "y"}), order("b/ü", {"n": 2}))
    source = {"kind": "stream", "stream": "orders", "collections": {"order": {"collection": "orders"}}}
    assert call("PUT", f"{BASE}/sources/orders", source).status == 201
    wait_phase(call, "orders", "live")
    replica = Replica(call, "orders")
    documents, checkpoint = eventually(replica.walk, lambda found: len(found[0]) == 2)
    found = {one["id"]: content(one) for one in documents}
    assert found == {"a": {"n": 1, "src_version": "x", "src__rev": "y"}, "b/ü": {"n": 2}}
    stream = Stream(server, "orders")
    stream.begin()
    say(order("a", {"n": 3}))
    assert [content(one) for one in stream.take()["documents"]] == [{"n": 3}]
    refused = replica.send(({"id": "a", "n": 4}, {"id": "a", "n": 3}))
    assert (refused.status, refused.code) == (405, "read_only_collection")
    say({"headers": {"control": "reset"}}, order("z", {"n": 26}))
    assert stream.take() == "RESYNC"
    assert replica.ask(checkpoint).code in ("checkpoint_expired", "unavailable")

    def living() -> list[str]:
        answer = replica.ask()
        documents = answer.body["documents"] if answer.status == 200 else []
        return [one["id"] for one in documents if not one["_deleted"]]

    eventually(living, lambda found: found == ["z"])
    stream.close()
