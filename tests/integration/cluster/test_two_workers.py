"""A server of two workers is one server: whoever is asked, every stream is there, once."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.calls import Caller, Reply, eventually
from support.server import ServerProcess
from support.workers import names_of

WORKERS = 2
# Connections are spread by the kernel: so many reach both workers.
MANY = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("workers")
    process = ServerProcess(directory / "data", args=("--workers", str(WORKERS))).start()
    yield process
    process.stop()


@pytest.fixture
def call(server: ServerProcess) -> Caller:
    return Caller(server)


def both(prefix: str) -> list[str]:
    """A name of each worker."""
    return [next(names_of(worker, WORKERS, prefix)) for worker in range(WORKERS)]


def often(call: Caller, *args: Any, **kwargs: Any) -> list[Reply]:
    """The same request on connections of their own."""
    return [call(*args, **kwargs) for _ in range(MANY)]


def test_every_stream_is_reached_through_every_worker(call: Caller) -> None:
    for name in both("reach/"):
        assert call("PUT", name, headers={"Content-Type": "application/json"}).status == 201
        for number in range(MANY):
            assert call("POST", name, number).status == 204
        for reply in often(call, "GET", f"{name}?offset=-1"):
            assert reply.body == list(range(MANY))
        heads = often(call, "HEAD", name)
        assert {reply.status for reply in heads} == {200}
        assert len({reply.headers["stream-next-offset"] for reply in heads}) == 1
        assert {reply.code for reply in often(call, "PUT", name, headers={"Content-Type": "text/plain"})} == {
            "stream_exists"
        }
        assert {reply.code for reply in often(call, "POST", name, b"{", headers={})} == {"invalid_json"}


def test_one_connection_may_ask_for_streams_of_all_workers(server: ServerProcess, call: Caller) -> None:
    names = both("mixed/")
    for name in names:
        call("PUT", name, headers={"Content-Type": "application/json"})
    for _ in range(4):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        try:
            for number in range(30):
                path = f"/v1/stream/{names[number % 2]}"
                connection.request("POST", path, str(number), {"Content-Type": "application/json"})
                response = connection.getresponse()
                assert (response.status, response.read()) == (204, b"")
                connection.request("GET", f"{path}?offset=-1")
                response = connection.getresponse()
                assert json.loads(response.read())[-1] == number
        finally:
            connection.close()


def test_a_refused_name_does_not_hide_what_a_stream_has_under_it(server: ServerProcess, call: Caller) -> None:
    """Only a request that makes a stream takes all of a path for its name: where that would live is nobody's
    business but its own."""
    paths: list[str] = []
    for name in both("hidden/a") + both("hidden/b"):
        call("PUT", name, headers={"Content-Type": "application/json"})
        assert call("POST", name, 1, headers={"Stream-Key": "k"}).status == 204
        paths += [f"/v1/stream/{name}/{rest}" for rest in ("_schema", "_profile", "_details", "pk/k")]
    for _ in range(4):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        try:
            for path in paths:
                answers: list[int] = []
                for method in ("PUT", "GET"):
                    connection.request(method, path)
                    response = connection.getresponse()
                    response.read()
                    answers.append(response.status)
                assert answers == [400, 200], path
        finally:
            connection.close()


def test_large_bodies_and_pages_pass_unchanged(call: Caller) -> None:
    body = bytes(range(256)) * 4 * 1024
    for name in both("large/"):
        call("PUT", name, headers={"Content-Type": "application/octet-stream"})
        for _ in range(4):
            assert (
                call("POST", name, body, headers={"Content-Type": "application/octet-stream"}).status == 204
            )
        for reply in often(call, "GET", f"{name}?offset=-1")[:4]:
            read, offset = reply.raw, reply.headers["stream-next-offset"]
            while "stream-up-to-date" not in reply.headers:
                reply = call("GET", f"{name}?offset={offset}")
                read, offset = read + reply.raw, reply.headers["stream-next-offset"]
            assert read == body * 4


def test_a_head_that_is_just_short_enough_passes(call: Caller) -> None:
    for name in both("head/"):
        call("PUT", name, [1])
        for reply in often(call, "GET", name, headers={"X-Large": "x" * 65_400}):
            assert reply.status == 200, reply.raw
        assert call("GET", name, headers={"X-Large": "x" * 65_536}).status == 400


def test_live_readers_hear_of_appends_wherever_they_are(server: ServerProcess, call: Caller) -> None:
    for name in both("live/"):
        call("PUT", name, headers={"Content-Type": "application/json"})

        def wait(name: str = name) -> Any:
            return call("GET", f"{name}?offset=-1&live=long-poll").body

        with ThreadPoolExecutor(MANY) as readers:
            waiting = [readers.submit(wait) for _ in range(MANY)]
            streams = [_events(server.port, name) for _ in range(MANY)]
            assert call("POST", name, {"n": 1}).status == 204
            assert [reader.result() for reader in waiting] == [[{"n": 1}]] * MANY
        for connection, response in streams:
            seen = b""
            while b'[{"n":1}]' not in seen.replace(b" ", b""):
                seen += response.readline()
            connection.close()


def _events(port: int, name: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/v1/stream/{name}?offset=-1&live=sse")
    response = connection.getresponse()
    assert response.status == 200
    return connection, response


def test_forks_live_with_their_source_whatever_they_are_called(call: Caller) -> None:
    here, there = (names_of(worker, WORKERS, "fork/") for worker in range(WORKERS))
    for sources, forks in ((here, there), (there, here)):
        source, fork, second = next(sources), next(forks), next(sources)
        call("PUT", source, [1, 2])
        made = call("PUT", fork, headers={"Stream-Forked-From": f"/v1/stream/{source}"})
        assert made.status == 201, made
        assert call("POST", fork, 3).status == 204
        assert call("POST", source, 4).status == 204
        again = call("PUT", second, headers={"Stream-Forked-From": f"/v1/stream/{fork}"})
        assert again.status == 201, again
        for reply in often(call, "GET", f"{fork}?offset=-1"):
            assert reply.body == [1, 2, 3]
        assert call("GET", f"{second}?offset=-1").body == [1, 2, 3]
        assert call("GET", f"{source}?offset=-1").body == [1, 2, 4]
        assert {one.status for one in often(call, "PUT", fork, headers={"Stream-Forked-From": source})} == {
            200
        }
        assert call("DELETE", source).status == 204
        assert call("GET", f"{fork}?offset=-1").body == [1, 2, 3]
        for name in (second, fork):
            assert call("DELETE", name).status == 204
        assert {one.status for one in often(call, "GET", fork)} == {404}
        assert call("PUT", fork, [5]).status == 201
        assert call("GET", f"{fork}?offset=-1").body == [5]
    missing = call("PUT", next(here), headers={"Stream-Forked-From": f"/v1/stream/{next(there)}"})
    assert missing.code == "not_found"


def test_a_fork_does_not_take_the_name_of_a_stream_that_died_on_another_worker(call: Caller) -> None:
    source, fork = both("grave/")
    call("PUT", source, [1])
    call("PUT", fork, [2])
    call("DELETE", fork)
    refused = call("PUT", fork, headers={"Stream-Forked-From": f"/v1/stream/{source}"})
    assert (refused.status, refused.code) == (409, "conflict")


def test_pages_of_the_listing_are_in_order_and_whole(call: Caller) -> None:
    wanted = sorted(f"list/{number:02}" for number in range(9))
    for name in wanted:
        call("PUT", name)
    for limit in (1, 2, 3, 9, 100):
        found: list[str] = []
        path: str | None = f"/v1/streams?prefix=list/&limit={limit}"
        while path:
            reply = call("GET", path)
            found += [one["name"] for one in reply.body]
            assert len(reply.body) <= limit
            link = reply.headers.get("link")
            path = link[1 : link.index(">")] if link else None
        assert found == wanted, limit
    assert call("GET", "/v1/streams?limit=0").code == "invalid_request"
    assert call("POST", "/v1/streams").code == "method_not_allowed"


def test_the_registry_tells_of_the_streams_of_all(call: Caller) -> None:
    names = both("told/")
    for name in names:
        call("PUT", name)

    def told() -> list[str]:
        events = call("GET", "__registry__?offset=-1").body
        return [event["key"] for event in events if event.get("key") in names]

    eventually(told, lambda seen: sorted(seen) == sorted(names))
    assert call("POST", "__registry__", {}).code == "read_only_stream"


def test_metrics_and_details_are_those_of_all(call: Caller) -> None:
    for name in both("count/"):
        call("PUT", name, [1, 2, 3])
    text = call("GET", "/metrics").raw.decode()
    for worker in range(WORKERS):
        assert f'tailrace_worker_up{{worker="{worker}"}} 1' in text
        line = next(
            one
            for one in text.splitlines()
            if one.startswith(f'tailrace_append_entries_total{{worker="{worker}"')
        )
        assert float(line.split()[-1]) >= 3
    assert text.count("# TYPE tailrace_append_entries_total") == 1
    ready = call("GET", "/readyz").body
    assert [one["status"] for one in ready["workers"]] == ["ready"] * WORKERS
    mem = call("GET", "/v1/server/_mem").body
    parts = [one["counters"]["append_entries"] for one in mem["workers"]]
    assert mem["counters"]["append_entries"] == sum(parts)
    details = call("GET", "/v1/server/_details").body
    assert details["configured_limits"] == details["workers"][0]["configured_limits"]
    assert call("POST", "/v1/server/_seal").body == {"sealed": True}
    for name in both("count/"):
        assert call("POST", f"/v1/server/_seal?stream={name}").body == {"sealed": True}
        assert call("GET", f"{name}?offset=-1").body == [1, 2, 3]


def test_documents_of_streams_are_found_wherever_they_live(call: Caller) -> None:
    schema = {"schema": {"type": "object", "required": ["id"]}}
    for name in both("schema/"):
        call("PUT", name, headers={"Content-Type": "application/json"})
        assert call("POST", f"{name}/_schema", schema).status == 200
        assert {reply.status for reply in often(call, "GET", f"{name}/_schema")} == {200}
        assert call("POST", name, {"no": 1}).status == 400
        assert call("POST", name, {"id": 1}).status == 204


def test_a_subscription_hears_of_streams_of_all_workers(call: Caller) -> None:
    names, wake = both("jobs/"), both("wake-")[1]
    call("PUT", wake, headers={"Content-Type": "application/json"})
    call("PUT", names[0], [1])
    config = {"type": "pull-wake", "pattern": "jobs/*", "wake_stream": wake}
    assert call("PUT", "__ds/subscriptions/all", config).status == 201
    call("PUT", names[1], headers={"Content-Type": "application/json"})
    for generation, name in enumerate(names, 1):
        assert call("POST", name, {"n": 1}).status == 204
        eventually(lambda: call("GET", f"{wake}?offset=-1").body, lambda seen, n=generation: len(seen) == n)
        claimed = call("POST", "__ds/subscriptions/all/claim", {"worker": "w"})
        assert claimed.status == 200, claimed
        acks = [
            {"stream": one["path"], "offset": one["tail_offset"]}
            for one in claimed.body["streams"]
            if one.get("has_pending", True)
        ]
        answer = {"wake_id": claimed.body["wake_id"], "generation": claimed.body["generation"], "acks": acks}
        done = call(
            "POST", "__ds/subscriptions/all/ack", {**answer, "done": True}, token=claimed.body["token"]
        )
        assert done.status == 200, done
    assert call("DELETE", "__ds/subscriptions/all").status == 204


def test_documents_and_the_hub_are_one(call: Caller) -> None:
    assert call("PUT", "/v1/databases/shop").status in (200, 201)
    assert call("PUT", "/v1/databases/shop/collections/orders", {}).status in (200, 201)
    assert call("PUT", "/v1/databases/shop/docs/orders/1", {"total": 3}).status in (200, 201)
    for reply in often(call, "GET", "/v1/databases"):
        assert {"database": "shop", "collections": 1} in reply.body
    for reply in often(call, "GET", "/v1/databases/shop/docs/orders/1"):
        assert reply.status == 200, reply
    assert {reply.status for reply in often(call, "GET", "/hub/health")} == {200}
