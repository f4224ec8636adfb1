"""What watch does on its own: changes and tombstones go, views are published, keys change."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from conftest import StartServer
from support.calls import Caller
from support.server import ServerProcess
from support.watch_client import Live

BASE = "/v1/databases/default"
BUSY = {
    "TAILRACE_WATCH_PARTITIONS": "2",
    "TAILRACE_WATCH_CARE_MS": "100",
    "TAILRACE_WATCH_VIEW_MS": "100",
    "TAILRACE_SEAL_AGE_MS": "100",
    "TAILRACE_SEAL_INTERVAL_MS": "100",
    "TAILRACE_PIPELINE": "off",
}


T = TypeVar("T")
PATIENCE_S = 90.0  # sealing, publishing and trimming follow each other, on a machine that may be loaded


def eventually(look: Callable[[], T], wanted: Callable[[T], object]) -> T:
    """What `look` sees as soon as it is what is wanted."""
    deadline = time.monotonic() + PATIENCE_S
    while not wanted(seen := look()):
        assert time.monotonic() < deadline, f"still {seen!r}"
        time.sleep(0.05)
    return seen


def metric(call: Caller, name: str) -> float:
    text = call("GET", "/metrics").raw.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def documents(call: Caller, name: str) -> dict[str, Any]:
    found = call("POST", f"{BASE}/query", {"collection": name, "limit": 1000}).body["documents"]
    return {one["id"]: (one["version"], one["data"]) for one in found}


def trimmed(call: Caller, name: str) -> int:
    """How many partitions have lost their first change."""
    reads = [call("GET", f"/v1/stream/__changes__/default/{name}/{number}?offset=-1") for number in (0, 1)]
    heads = [call("HEAD", f"/v1/stream/__changes__/default/{name}/{number}") for number in (0, 1)]
    assert all(read.status == 200 for read in reads)
    return sum(not head.headers["stream-earliest-offset"].endswith("0" * 16) for head in heads)


def test_w8_w28_old_changes_go_and_what_they_came_to_stays(start_server: StartServer) -> None:
    process = start_server(env=BUSY)
    call = Caller(process)
    call("PUT", f"{BASE}/collections/orders", {"retention": "1s"})
    query = {"collection": "orders", "where": "doc.n >= 0"}
    live = Live(process)
    live.send("subscribe", "s", query=query)
    token = live.take()["payload"]["token"]
    live.close()
    for number in range(40):
        call("PUT", f"{BASE}/docs/orders/d{number % 10}", {"n": number})
    call("DELETE", f"{BASE}/docs/orders/d3")
    expected = documents(call, "orders")

    def poke() -> int:
        # Segments are looked at when the journal moves on, and something has to move it.
        call("PUT", f"{BASE}/docs/other/a", {"n": 1})
        return trimmed(call, "orders")

    eventually(poke, lambda count: count == 2)
    assert metric(call, "tailrace_watch_published_views_total") > 0
    live = Live(process)
    live.send("resume", "r", subId="s", token=token, query=query)
    assert [live.take()["payload"]["reason"] for _ in range(2)] == ["retention", "retention"]
    live.send("resume", "r", subId="t", token=token, query=query, autoResync=True)
    end = live.take_until("snapshot-end")[-1]["payload"]
    assert end["count"] == len(expected)
    live.close()
    _, version = call("GET", f"{BASE}/docs/orders/d1").status, expected["d1"][0]
    for kept in (True, False):
        process.kill()
        if not kept:
            for path in process.data_dir.glob("watch.db*"):
                path.unlink()
        process.start()
        assert documents(call, "orders") == expected, "from the view on the disk, or a published one"
    assert call("PUT", f"{BASE}/docs/orders/d1", {"n": 5}).body["version"] == version + 1
    assert call("PUT", f"{BASE}/docs/orders/d3", {"n": 5}).body["version"] > 4, "the tombstone is known"


def test_w8_a_bootstrap_finds_a_published_view_and_the_changes_behind_it(
    start_server: StartServer, tmp_path: Path
) -> None:
    bucket = (tmp_path / "bucket").as_uri()
    process = start_server(env={**BUSY, "TAILRACE_OBJECT_STORE": bucket})
    call = Caller(process)
    call("PUT", f"{BASE}/collections/orders", {"retention": "1s"})
    for number in range(30):
        call("PUT", f"{BASE}/docs/orders/d{number % 7}", {"n": number})

    def poke() -> int:
        call("PUT", f"{BASE}/docs/other/a", {"n": 1})
        return trimmed(call, "orders")

    eventually(poke, lambda count: count == 2)
    for number in range(3):
        call("PUT", f"{BASE}/docs/orders/late{number}", {"n": number})
    expected = documents(call, "orders")
    generation = call("GET", f"{BASE}/collections/orders").body["generation"]
    assert call("POST", "/v1/server/_seal", {}).status == 200
    process.stop()
    fresh = start_server(
        "--bootstrap", env={**BUSY, "TAILRACE_OBJECT_STORE": bucket, "TAILRACE_BOOTSTRAP_SETTLE_MS": "1"}
    )
    again = Caller(fresh)
    assert documents(again, "orders") == expected
    assert again("GET", f"{BASE}/collections/orders").body["generation"] > generation


def test_tombstones_are_forgotten_and_versions_are_not_used_twice(start_server: StartServer) -> None:
    process = start_server(env={**BUSY, "TAILRACE_WATCH_PARTITIONS": "1"})
    call = Caller(process)
    call("PUT", f"{BASE}/collections/orders", {"tombstoneTtl": "3s", "retention": "0"})
    for _ in range(5):
        call("PUT", f"{BASE}/docs/orders/a", {"n": 1})
    call("DELETE", f"{BASE}/docs/orders/a")
    assert call("DELETE", f"{BASE}/docs/orders/a").status == 204, "it is remembered"
    eventually(lambda: metric(call, "tailrace_watch_purged_tombstones_total"), lambda count: count == 1)
    assert call("DELETE", f"{BASE}/docs/orders/a").status == 404
    assert call("PUT", f"{BASE}/docs/orders/b", {}).body["version"] == 7, "above all that were forgotten"
    process.kill()
    process.start()
    assert call("PUT", f"{BASE}/docs/orders/a", {}).body["version"] == 7


def _rotated(process: ServerProcess) -> tuple[str, str]:
    """A token, and the reason why it cannot be used any more after the key has changed, if there is one."""
    live = Live(process)
    query = {"collection": "c"}
    live.send("subscribe", "s", query=query)
    token = first = live.take()["payload"]["token"]
    live.close()

    def fresh() -> str:
        one = Live(process)
        one.send("subscribe", "s", query=query)
        found = one.take()["payload"]["token"]
        one.close()
        return found

    eventually(fresh, lambda found: found != first)
    live = Live(process)
    live.send("resume", "r", subId="s", token=token, query=query)
    answer = live.take()["payload"]
    live.close()
    return answer["status"], answer.get("reason", "")


@pytest.mark.parametrize(
    ("verify_ms", "answer"), [("600000", ("ok", "")), ("1", ("resync-required", "token-invalid"))]
)
def test_w27_w28_tokens_of_an_older_key(
    start_server: StartServer, verify_ms: str, answer: tuple[str, str]
) -> None:
    env = {
        "TAILRACE_WATCH_CARE_MS": "50",
        "TAILRACE_WATCH_KEY_MS": "1000",
        "TAILRACE_WATCH_KEY_VERIFY_MS": verify_ms,
    }
    assert _rotated(start_server(env=env)) == answer


def test_a_quiet_stream_of_events_says_that_it_lives(start_server: StartServer) -> None:
    process = start_server(env={"TAILRACE_SSE_KEEP_ALIVE_MS": "200"})
    with socket.create_connection(("127.0.0.1", process.port), timeout=30) as connection:
        connection.sendall(b"GET /realtime/sse?collection=c HTTP/1.1\r\nHost: x\r\n\r\n")
        seen = b""
        while seen.partition(b'"subscribe_ack"')[2].count(b": heartbeat\n\n") < 2:
            piece = connection.recv(4096)
            assert piece, f"the server left after {seen!r}"
            seen += piece
    assert seen.index(b": connected\nretry: ") < seen.index(b'"subscribe_ack"')


def test_an_event_source_that_comes_back_to_nothing_is_told_to_stop(start_server: StartServer) -> None:
    call = Caller(start_server())
    path = "/realtime/sse?database=nowhere&collection=c"
    assert call("GET", path).status == 404
    assert call("GET", path, headers={"Last-Event-ID": "7b7d"}).status == 204
