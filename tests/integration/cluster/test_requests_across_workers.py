"""What concerns streams of all workers works from any of them: queries, waits, wakes, the hub, the pipeline.

The kernel spreads connections over the workers. What a test does on several connections of its own has
reached both; what it does for a name of each worker has crossed from one to the other.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from support.calls import Caller, eventually
from support.hooks import Hook
from support.hub_client import registered
from support.offers import FAMILIES, FakePipeline, configured, fill, planned, seal, uncovered
from support.server import ServerProcess
from support.sources import BASE, documents, wait_phase, wait_until
from support.watch_client import Live
from support.workers import names_of, pid_of
from tailrace.cluster.layout import read_layout
from tailrace.schema.profiles import touch_keys

WORKERS = 2
FIRST, SECOND = range(WORKERS)
MANY = 8  # connections that reach both workers
JSON = {"Content-Type": "application/json"}
ENTITY = "public.todos"
DECLARED = {"entity": ENTITY, "fields": [{"name": "tenant", "encoding": "string"}]}
WATCHED = touch_keys.format_key(touch_keys.watch_key(touch_keys.template_id(ENTITY, ["tenant"]), ["t1"]))
ENV = {"TAILRACE_METRICS_FLUSH_MS": "200", "TAILRACE_PIPELINE": "external"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("across")
    process = ServerProcess(directory / "data", args=("--workers", str(WORKERS)), env=ENV).start()
    yield process
    process.stop()


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


@pytest.fixture
def hook() -> Iterator[Hook]:
    receiver = Hook()
    yield receiver
    receiver.close()


def both(prefix: str) -> list[str]:
    """A name of each worker."""
    return [next(names_of(worker, WORKERS, prefix)) for worker in range(WORKERS)]


def kill(server: ServerProcess, worker: int) -> None:
    """And wait until it is back."""
    pid = pid_of(server, worker)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pid_of(server, worker), lambda found: found not in (None, pid))
    eventually(lambda: server.status("/readyz"), lambda status: status == 200)


@contextmanager
def away(server: ServerProcess, worker: int) -> Iterator[None]:
    """Killed, and kept from coming back: somebody else has its directory."""
    with (read_layout(server.data_dir).path(server.data_dir, worker) / "lock").open("r+") as lock:
        while True:
            if (pid := pid_of(server, worker)) is not None:
                os.kill(pid, signal.SIGKILL)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
        yield
    eventually(lambda: server.status("/readyz"), lambda status: status == 200)


# -- queries and inspection --------------------------------------------------------------------------------


def test_every_query_finds_its_stream(call: Caller) -> None:
    for name in both("query/"):
        configured(call, name)
        fill(call, name, 6)
        for number in range(2):
            row = {"at": 0, "who": "keyed", "what": "x"}
            assert call("POST", name, row, headers={**JSON, "Stream-Key": f"k{number}"}).status == 204
        for _ in range(MANY):
            found = call("GET", f"{name}/_search?q=who:w1").body
            assert [hit["source"]["what"] for hit in found["hits"]] == ["word4", "word1"], found
        span = {"rollup": "all", "from": 0, "to": 60_000, "interval": "1m", "group_by": ["who"]}
        for _ in range(MANY):
            answer = call("POST", f"{name}/_aggregate", span)
            assert answer.status == 200, answer.raw
        for _ in range(MANY):
            assert len(call("GET", f"{name}/pk/k1?offset=-1").body) == 1
            assert call("GET", f"{name}/_details").body["stream"]["name"] == name
            assert call("GET", f"{name}/_index_status").status == 200


def test_a_wait_for_a_change_hears_of_it_wherever_it_waits(call: Caller) -> None:
    for name in both("details/"):
        call("PUT", name, headers=JSON)
        tag = call("GET", f"{name}/_details").headers["etag"]

        def wait(name: str = name, tag: str = tag) -> Any:
            while True:
                headers = {"If-None-Match": tag}
                answer = call("GET", f"{name}/_details?live=long-poll&timeout_ms=4000", headers=headers)
                if answer.status != 304:
                    return answer.body["stream"]["name"]

        with ThreadPoolExecutor(MANY) as waiting:
            waits = [waiting.submit(wait) for _ in range(MANY)]
            assert call("POST", name, [1]).status == 204
            assert [one.result(60) for one in waits] == [name] * MANY


def test_touches_wake_whoever_waits_for_them(call: Caller) -> None:
    for name in both("touch/"):
        call("PUT", name, headers=JSON)
        touch = {"enabled": True, "touchCoalesceWindowMs": 5}
        profile = {"profile": {"kind": "state-protocol", "touch": touch}}
        assert call("POST", f"{name}/_profile", profile).status == 200
        assert call("POST", f"{name}/touch/templates/activate", {"templates": [DECLARED]}).status == 200
        cursor = call("GET", f"{name}/touch/meta?settle=flush").body["cursor"]
        body = {"cursor": cursor, "keys": [WATCHED], "timeoutMs": 60_000}

        def wait(name: str = name, body: dict[str, Any] = body) -> Any:
            return call("POST", f"{name}/touch/wait", body)

        with ThreadPoolExecutor(MANY) as waiting:
            waits = [waiting.submit(wait) for _ in range(MANY)]
            eventually(
                lambda name=name: call("GET", f"{name}/touch/meta").body["activeWaiters"],
                lambda count: count == MANY,
            )
            value, operation = {"tenant": "t1"}, {"operation": "insert"}
            record = {"type": ENTITY, "key": "1", "value": value, "headers": operation}
            assert call("POST", name, [record]).status == 204
            for one in waits:
                answer = one.result(60)
                assert (answer.status, answer.body["touched"]) == (200, True), answer


def test_metrics_of_streams_are_in_one_stream(call: Caller) -> None:
    names = both("measured/")
    begin = eventually(lambda: call("HEAD", "__stream_metrics__"), lambda head: head.status == 200)
    offset = begin.headers["stream-next-offset"]
    for name in names:
        assert call("PUT", name, [1, 2, 3]).status == 201
    seen: set[tuple[str, str]] = set()

    def told() -> set[tuple[str, str]]:
        nonlocal offset
        page = call("GET", f"__stream_metrics__?offset={offset}")
        offset = page.headers["stream-next-offset"]
        rows = [row for row in page.body if row["stream"] in names]
        seen.update((row["stream"], row["instance"].partition("/")[2]) for row in rows)
        return seen

    eventually(told, lambda found: found == {(names[FIRST], ""), (names[SECOND], str(SECOND))})
    details = call("GET", "__stream_metrics__/_details").body
    assert details["stream"]["profile"] == "metrics"


# -- the pipeline ------------------------------------------------------------------------------------------


def test_one_pipeline_builds_for_the_streams_of_all(server: ServerProcess, call: Caller) -> None:
    names = both("built/")
    pipeline = FakePipeline(call, server.data_dir)
    for name in names:
        configured(call, name)
        fill(call, name, 3)
        seal(call, name)
        planned(call, name, 1)

    def listed() -> list[str]:
        body = call("GET", "/v1/pipeline/plan?live=long-poll").body
        assert all("place" not in one for one in body["streams"])
        return [one["stream"] for one in body["streams"] if one["stream"] in names]

    eventually(listed, lambda found: found == names)
    by_page: list[str] = []
    after = ""
    while True:
        body = call("GET", f"/v1/pipeline/plan?limit=1{after}").body
        by_page += [one["stream"] for one in body["streams"]]
        if body["next_after"] is None:
            break
        after = f"&after={body['next_after']}"
    assert [one for one in by_page if one in names] == names
    backlog = call("GET", "/v1/server/_details").body["runtime"]["pipeline"]["backlog"]
    assert backlog["segments"] >= WORKERS
    for name in names:
        shown = planned(call, name, 1)
        offer = pipeline.offer(shown, uncovered(shown))
        replies = [pipeline.publish(offer) for _ in range(MANY)]
        assert [reply.status for reply in replies] == [200] * MANY
        assert [reply.body["result"] for reply in replies] == ["published"] + ["already_published"] * 7
        assert planned(call, name, 0)["work"] == []
        again = call("POST", "/v1/pipeline/plan", {"stream": name})
        assert again.body == {"stream": name, "scheduled": len(FAMILIES)}
        planned(call, name, 1)
    told = {
        event["key"].split("/")[0]
        for event in call("GET", "__segments__?offset=-1").body
        if event["type"] == "segment"
    }
    assert {planned(call, name, 1)["stream_id"] for name in names} <= told


def test_what_the_pipeline_asks_wrongly_is_refused_as_ever(call: Caller) -> None:
    for query in ("?limit=0", "?limit=501", "?jobs=dance", "?after=x", "?after=1.2", "?live=sse"):
        assert call("GET", f"/v1/pipeline/plan{query}").code == "invalid_request", query
    assert call("GET", "/v1/pipeline/plan?stream=none").status == 404
    assert call("POST", "/v1/pipeline/publish", b"{").code == "invalid_request"
    assert call("GET", "/v1/pipeline/publish").status == 405
    assert call("GET", "/v1/pipeline/else").status == 404
    for _ in range(MANY):
        assert call("POST", "/v1/pipeline/heartbeat", {"state": "idle", "pid": 1}).body == {"drain": False}
    assert call("GET", "/v1/server/_details").body["runtime"]["pipeline"]["state"] == "external"


@pytest.mark.nightly
def test_a_publication_waits_for_a_worker_that_died(server: ServerProcess, call: Caller) -> None:
    (name,) = both("late/")[SECOND:]
    pipeline = FakePipeline(call, server.data_dir)
    configured(call, name)
    fill(call, name, 3)
    seal(call, name)
    shown = planned(call, name, 1)
    offer = pipeline.offer(shown, uncovered(shown))
    kill(server, SECOND)
    reply = eventually(lambda: pipeline.publish(offer), lambda reply: reply.status != 503)
    assert (reply.status, reply.body["result"]) == (200, "published")
    assert planned(call, name, 0)["work"] == []


# -- wakes -------------------------------------------------------------------------------------------------


def test_a_hook_is_called_for_streams_of_all_workers(server: ServerProcess, call: Caller, hook: Hook) -> None:
    names = both("hooked/")
    for name in names:
        call("PUT", name, headers=JSON)
    config = {"type": "webhook", "pattern": "hooked/*", "webhook": {"url": hook.url}}
    assert call("PUT", "__ds/subscriptions/hooked", config).status == 201
    hook.answer = b'{"done":true}'
    for name in (*names, *reversed(names)):
        offset = call("POST", name, [1]).headers["stream-next-offset"]
        assert hook.next().tails() == {name: offset}
    kill(server, SECOND)
    offset = call("POST", names[SECOND], [2]).headers["stream-next-offset"]
    assert hook.next().tails() == {names[SECOND]: offset}
    kill(server, FIRST)
    reply = eventually(lambda: call("POST", names[SECOND], [3]), lambda reply: reply.status == 204)
    wanted = {names[SECOND]: reply.headers["stream-next-offset"]}
    eventually(lambda: hook.next().tails(), lambda tails: tails == wanted)  # the one before may be repeated
    links = call("GET", "__ds/subscriptions/hooked").body["streams"]
    assert sorted(one["path"] for one in links) == sorted(names)
    assert call("DELETE", "__ds/subscriptions/hooked").status == 204


# -- documents and the hub ---------------------------------------------------------------------------------


def test_live_queries_are_answered_wherever_the_client_is(server: ServerProcess, call: Caller) -> None:
    assert call("PUT", f"{BASE}/collections/seen", {}).status in (200, 201)
    with ExitStack() as open_sockets:
        clients = [Live(server) for _ in range(MANY)]
        for client in clients:
            open_sockets.callback(client.close)
            client.send("subscribe", "s", query={"collection": "seen"}, sendSnapshot=True)
            client.take_until("snapshot-end")
        assert call("PUT", f"{BASE}/docs/seen/1", {"n": 1}).status in (200, 201)
        for client in clients:
            assert client.take_until("event")[-1]["payload"]["delta"]["doc"]["id"] == "1"


def test_a_live_query_goes_on_behind_its_token_after_the_first_worker_died(
    server: ServerProcess, call: Caller
) -> None:
    assert call("PUT", f"{BASE}/collections/kept", {}).status in (200, 201)
    query = {"collection": "kept"}
    live = Live(server)
    live.send("auth", "a", tokens="each")
    live.send("subscribe", "s", query=query)
    live.take_until("subscribe_ack")
    assert call("PUT", f"{BASE}/docs/kept/a", {"n": 1}).status in (200, 201)
    token = live.take_until("event")[-1]["payload"]["token"]
    assert call("PUT", f"{BASE}/docs/kept/b", {"n": 2}).status in (200, 201)
    kill(server, FIRST)
    live.close()
    assert call("PUT", f"{BASE}/docs/kept/c", {"n": 3}).status in (200, 201)
    for _ in range(MANY):
        live = Live(server)
        live.send("resume", "r", subId="s", token=token, query=query)
        assert live.take()["payload"]["status"] == "ok"
        seen = [live.take_until("event")[-1]["payload"]["delta"]["doc"]["id"] for _ in range(2)]
        assert sorted(seen) == ["b", "c"], "what was missed, once"
        live.close()


def test_h43_a_dead_worker_takes_no_accepted_message_along(server: ServerProcess) -> None:
    """Sessions are on the first worker, wherever the client was let in. The death of another is not noticed;
    its own ends them, and what was accepted is there when they come back."""
    with ExitStack() as open_sockets:
        sender = registered(server, "@(across/s)")
        receiver = registered(server, "@(across/r)", words=["mailbox"], durable=True, commit="manual")
        open_sockets.callback(sender.cut)
        open_sockets.callback(receiver.cut)

        def say(data: int) -> None:
            message = {"to": "@(across/r)", "type": "t", "data": data, "ack": "accepted"}
            assert sender.ask("hub:send", message)["payload"]["status"] == "accepted"

        say(0)
        kill(server, SECOND)
        say(1)
        assert [receiver.of("t")["payload"] for _ in range(2)] == [0, 1]
        receiver.cut()
        say(2)
        kill(server, FIRST)
        back = registered(server, "@(across/r)", words=["mailbox"], durable=True, commit="manual")
        open_sockets.callback(back.cut)
        assert [back.of("t")["payload"] for _ in range(3)] == [0, 1, 2]


def test_what_the_first_worker_has_waits_for_it(server: ServerProcess, call: Caller) -> None:
    here, there = both("waits/")
    for name in (here, there):
        assert call("PUT", name, [1]).status == 201
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    with away(server, FIRST):
        for method, path, headers in (
            ("GET", "/hub/ws", upgrade),
            ("POST", "/hub/messages", JSON),
            ("GET", "/v1/databases", {}),
            ("GET", "__ds/subscriptions/none", {}),
            ("GET", here, {}),
            ("GET", "/readyz", {}),
        ):
            refused = call(method, path, headers=headers)
            assert (refused.status, "retry-after" in refused.headers) == (503, True), path
        assert call("GET", there).body == [1]
    assert call("GET", here).body == [1]
    assert call("GET", "/hub/health").status == 200


def test_a_source_reads_streams_of_all_workers(server: ServerProcess, call: Caller) -> None:
    def say(name: str, key: str, number: int) -> None:
        record = {"type": "order", "key": key, "value": {"n": number}, "headers": {"operation": "insert"}}
        reply = eventually(lambda: call("POST", name, [record]), lambda reply: reply.status != 503)
        assert reply.status == 204

    names = both("orders")
    for name in names:
        call("PUT", name, headers=JSON)
        assert call("POST", f"{name}/_profile", {"profile": {"kind": "state-protocol"}}).status == 200
        say(name, "a", 1)
        source = {"kind": "stream", "stream": name, "collections": {"order": {"collection": name}}}
        made = call("PUT", f"{BASE}/sources/{name}", source)
        assert made.status == 201, made.raw
        wait_phase(call, name, "live")
        assert documents(call, name) == {"a": {"n": 1}}
        say(name, "b", 2)
        wait_until(lambda name=name: documents(call, name), lambda seen: "b" in seen)
    far = names[SECOND]
    kill(server, SECOND)
    say(far, "a", 3)
    wait_until(lambda: documents(call, far), lambda seen: seen == {"a": {"n": 3}, "b": {"n": 2}})
    assert call("DELETE", far).status == 204
    wait_until(
        lambda: call("GET", f"{BASE}/sources/{far}").body["status"]["error"], lambda error: error is not None
    )
