"""Which databases there are, and which collections: page by page, and only those that the caller may read."""

from __future__ import annotations

import re

import pytest

from conftest import StartServer
from support.calls import Caller, Reply
from support.cli import tailrace
from support.server import ServerProcess
from tailrace.auth import create_token

SECRET = "a secret that is long enough for the server to accept it"
DATABASES = "/v1/databases"


@pytest.fixture(scope="module")
def call(server: ServerProcess) -> Caller:
    made = Caller(server)
    for name in ("shop", "app", "lab"):
        assert made("PUT", f"{DATABASES}/{name}").status == 201
    for name in ("orders", "rooms/1/messages", "carts"):
        assert made("PUT", f"{DATABASES}/shop/docs/{name}/one", {"n": 1}).status == 201
    assert made("PUT", f"{DATABASES}/shop/docs/orders/two", {}).status == 201
    assert made("PUT", f"{DATABASES}/shop/collections/empty", {"partitions": 4}).status == 201
    return made


def following(reply: Reply) -> str | None:
    found = re.fullmatch(r'<([^>]+)>; rel="next"', reply.headers.get("link", ""))
    return None if found is None else found[1]


def pages(call: Caller, path: str | None, key: str) -> list[list[str]]:
    found: list[list[str]] = []
    while path is not None:
        reply = call("GET", path)
        assert reply.status == 200, reply.raw
        found.append([one[key] for one in reply.body])
        path = following(reply)
    return found


def test_databases_are_listed(call: Caller) -> None:
    listed = call("GET", DATABASES)
    assert listed.body == [
        {"database": "app", "collections": 0},
        {"database": "default", "collections": 0},
        {"database": "lab", "collections": 0},
        {"database": "shop", "collections": 4},
    ]
    assert pages(call, f"{DATABASES}?limit=3", "database") == [["app", "default", "lab"], ["shop"]]
    assert pages(call, f"{DATABASES}?limit=2&after=default", "database") == [["lab", "shop"]]
    assert call("HEAD", DATABASES).status == 200


def test_collections_are_listed(call: Caller) -> None:
    path = f"{DATABASES}/shop/collections"
    listed = {one["collection"]: one for one in call("GET", path).body}
    assert list(listed) == ["carts", "empty", "orders", "rooms/1/messages"]
    assert listed["orders"] == {
        "collection": "orders",
        "source": "native",
        "state": "live",
        "partitions": 16,
        "generation": 1,
        "documents": 2,
    }
    assert (listed["empty"]["partitions"], listed["empty"]["documents"]) == (4, 0)
    assert pages(call, f"{path}?limit=1", "collection") == [
        ["carts"],
        ["empty"],
        ["orders"],
        ["rooms/1/messages"],
    ]
    assert call("GET", f"{DATABASES}/lab/collections").body == []


def test_what_was_deleted_is_not_listed(call: Caller) -> None:
    path = f"{DATABASES}/app/collections"
    assert call("PUT", f"{DATABASES}/app/docs/carts/one", {}).status == 201
    assert [one["collection"] for one in call("GET", path).body] == ["carts"]
    assert call("DELETE", f"{path}/carts").status == 204
    assert call("GET", path).body == []


@pytest.mark.parametrize("path", [DATABASES, f"{DATABASES}/shop/collections"])
def test_what_a_listing_refuses(call: Caller, path: str) -> None:
    for limit in ("0", "1001", "x", "-1", "9" * 30):
        assert call("GET", f"{path}?limit={limit}").code == "invalid_request"
    assert call("GET", f"{path}?limit=1000").status == 200
    for method in ("PUT", "POST", "DELETE", "PATCH"):
        refused = call(method, path, {})
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert call("GET", f"{DATABASES}/nowhere/collections").status == 404
    assert call("GET", f"{DATABASES}/NO/collections").code == "invalid_path"


def test_a_caller_sees_only_what_its_token_may_read(start_server: StartServer) -> None:
    process = start_server(env={"TAILRACE_AUTH_JWT_SECRET": SECRET})

    def caller(*scopes: str, dbs: list[str] | None = None) -> Caller:
        return Caller(process, create_token(SECRET, sub="ada", scopes=scopes, dbs=dbs))

    admin = caller("manage")
    for name in ("a", "b", "c"):
        admin("PUT", f"{DATABASES}/{name}")
        admin("PUT", f"{DATABASES}/{name}/docs/things/one", {})
    seen = [
        (admin, ["a", "b", "c", "default"]),
        (caller("manage", dbs=["b"]), ["b"]),
        (caller("read", dbs=["c", "nowhere", "a"]), ["a", "c"]),
        (caller("read", dbs=[]), []),
        (caller("read"), []),
    ]
    for who, names in seen:
        assert [one["database"] for one in who("GET", DATABASES).body] == names
    two = caller("read", dbs=["a", "c"])
    assert pages(two, f"{DATABASES}?limit=1", "database") == [["a"], ["c"]], "no page says what is between"
    assert [one["collection"] for one in two("GET", f"{DATABASES}/a/collections").body] == ["things"]
    for hidden in ("b", "nowhere"):
        assert two("GET", f"{DATABASES}/{hidden}/collections").status == 403, "there or not"
    assert caller("write", dbs=["a"])("GET", DATABASES).status == 403
    assert Caller(process)("GET", DATABASES).status == 401


def test_the_command_line_lists_them(server: ServerProcess, call: Caller) -> None:
    assert call("GET", DATABASES).status == 200
    at = {"TAILRACE_ENDPOINT": server.base_url}
    shown = tailrace("docs", "ls", env=at)
    assert shown.code == 0, shown.err
    assert [line.split() for line in shown.out.splitlines()][::4] == [
        ["database", "collections"],
        ["shop", "4"],
    ]
    collections = tailrace("docs", "ls", "shop", "--json", env=at)
    assert [one["collection"] for one in collections.rows] == ["carts", "empty", "orders", "rooms/1/messages"]
    assert tailrace("docs", "ls", "shop", "--limit", "2", "--json", env=at).rows == collections.rows[:2]
    assert "orders" in tailrace("docs", "ls", "shop", env=at).out
    assert "no collections" in tailrace("docs", "ls", "lab", env=at).out
    assert "database 'nowhere' not found" in tailrace("docs", "ls", "nowhere", env=at).err
