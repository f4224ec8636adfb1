"""Sources in tests: how they are made, how one waits for them, and what the log says about them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from support.calls import Caller
from support.postgres import PostgresServer

BASE = "/v1/databases/default"
PATIENCE_S = 60.0

Json = dict[str, Any]
# Short enough that tests wait for what happens, not for the time until somebody looks.
QUICK = {"TAILRACE_WATCH_SOURCE_CHECK_MS": "200", "TAILRACE_WATCH_SOURCE_RETRY_MS": "1000"}


def wait_until(look: Callable[[], Any], wanted: Callable[[Any], object]) -> Any:
    """As `eventually`, with more patience and no haste: two servers have to do something."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(seen := look()):
        assert time.monotonic() < deadline, f"still {seen!r}"
        time.sleep(0.1)
    return seen


def add_source(call: Caller, name: str, tables: dict[str, Json], **more: Any) -> Json:
    given = {"kind": "postgres", "dsn": {"env": "PG_DSN"}, "publication": name, **more}
    return _put(call, name, {**given, "collections": tables})


def add_mongo(call: Caller, name: str, tables: dict[str, Json], **more: Any) -> Json:
    given = {"kind": "mongo", "dsn": {"env": "MONGO_DSN"}, **more}
    return _put(call, name, {**given, "collections": tables})


def _put(call: Caller, name: str, given: Json) -> Json:
    answer = call("PUT", f"{BASE}/sources/{name}", given)
    assert answer.status == 201, answer.raw
    return answer.body


def status(call: Caller, name: str) -> Json:
    return call("GET", f"{BASE}/sources/{name}").body["status"]


def wait_phase(call: Caller, name: str, phase: str) -> Json:
    return wait_until(lambda: status(call, name), lambda seen: seen["phase"] == phase)


def documents(call: Caller, collection: str) -> dict[str, Json]:
    found: dict[str, Json] = {}
    cursor = None
    while True:
        asked: Json = {"collection": collection, "limit": 1000}
        if cursor is not None:
            asked["cursor"] = cursor
        page = call("POST", f"{BASE}/query", asked).body
        found |= {one["id"]: one["data"] for one in page["documents"]}
        cursor = page["cursor"]
        if cursor is None:
            return found


def count(call: Caller, collection: str) -> int:
    return call("GET", f"{BASE}/collections/{collection}").body["documents"]


def rows(postgres: PostgresServer, table: str, key: str = "id") -> dict[str, Json]:
    """What the table has, as documents."""
    with postgres.connect() as connection:
        found = connection.execute(f"SELECT {key}::text, row_to_json(t) FROM {table} t".encode())
        return dict(found.fetchall())


def changes(call: Caller, collection: str, partitions: int = 16) -> list[list[Json]]:
    """Every entry of the log, control entries included, by partition."""
    found: list[list[Json]] = []
    for partition in range(partitions):
        entries: list[Json] = []
        offset = "-1"
        while True:
            page = call("GET", f"__changes__/default/{collection}/{partition}?offset={offset}")
            if page.status == 404:
                break
            assert page.status == 200, page.raw
            entries += json.loads(page.raw)
            offset = page.headers["stream-next-offset"]
            if page.headers.get("stream-up-to-date") == "true":
                break
        found.append(entries)
    return found


def check_log(partitions: list[list[Json]]) -> None:
    """What must hold of any log: positions only grow, versions go up by one, images fit together."""
    for entries in partitions:
        last: tuple[str, int] | None = None
        known: dict[str, Json] = {}
        for entry in entries:
            if entry["kind"] != "change":
                continue
            place = (entry["lsn"], entry["txn"]["index"])
            assert last is None or place > last, (last, place)
            last = place
            before = known.get(entry["documentKey"])
            version = 0 if before is None else before["version"]
            grown = entry["images"]["after"] != "missing"  # nothing is known that could be a version
            assert entry["version"] == version + grown, (before, entry)
            after = None if before is None else before["after"]
            assert entry["before"] == after, (before, entry)
            if entry["images"]["after"] == "missing":
                continue
            assert (entry["op"] == "insert") == (after is None)
            known[entry["documentKey"]] = entry
