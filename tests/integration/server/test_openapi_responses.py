"""The answers that need a story to be seen, each held against the description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.described import JSON, SHORT_WAITS, Described, example_of, prepare
from support.server import ServerProcess
from support.wire import Wire, fresh

STREAM = "/v1/stream/{name}"
SUBSCRIPTION = "/v1/stream/__ds/subscriptions/{id}"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    process = ServerProcess(tmp_path_factory.mktemp("openapi") / "data", env=SHORT_WAITS).start()
    wire = Wire(process.port)
    yield wire
    wire.close()
    process.stop()


@pytest.fixture
def described(http: Wire) -> Iterator[Described]:
    caller = Described(http.port)
    yield caller
    caller.close()


@pytest.fixture
def base(http: Wire) -> str:
    name = fresh("walk").replace("/", "-")
    prepare(http, name)
    return name


def statuses(*answers: Any) -> list[int]:
    return [answer.status_code for answer in answers]


def test_creating_and_appending(described: Described, base: str) -> None:
    put, post, name = f"PUT {STREAM}", f"POST {STREAM}", f"{base}/new"
    lifetime = {"Stream-TTL": "7d", "Stream-Retention": "1h", "Stream-Retention-Bytes": "1000"}
    producer = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0"}
    assert statuses(
        described.call(put, [1], lifetime, name=name),
        described.call(put, [1], lifetime, name=name),
        described.call(put, [1], {"Stream-TTL": "8d"}, name=name),
        described.call(post, [1, 2], name=name),
        described.call(post, [1, 2], {"Prefer": "return=representation"}, name=name),
        described.call(post, [3], producer, name=name),
        described.call(post, [3], producer, name=name),
        described.call(post, [3], producer | {"Producer-Seq": "5"}, name=name),
        described.call(post, [3], producer | {"Producer-Epoch": "1"}, name=name),
        described.call(post, [3], producer, name=name),
        described.call(post, [4], {"Stream-Seq": "2"}, name=name),
        described.call(post, [4], {"Stream-Seq": "1"}, name=name),
        described.call(post, [4], {"Content-Encoding": "gzip"}, name=name),
        described.call(post, [5], {"Stream-Closed": "true"}, name=name),
        described.call(post, [6], name=name),
        described.call(post, [6], name="__registry__"),
        described.call(f"HEAD {STREAM}", name=name),
    ) == [201, 200, 409, 204, 200, 200, 204, 409, 200, 403, 204, 409, 415, 204, 409, 405, 200]


def test_reading(described: Described, base: str) -> None:
    get, name = f"GET {STREAM}", f"{base}/json"
    page = described.call(get, name=name)
    tail = page.headers["stream-next-offset"][0]
    assert statuses(
        page,
        described.call(get, None, {"If-None-Match": page.headers["etag"][0]}, name=name),
        described.call(get, name=name, offset=tail, live="long-poll"),
        described.call(get, name=name, offset="-1", live="long-poll", filter="service:a"),
        described.call(get, name=name, offset="-1", live="sse"),
        described.call(get, name=f"{base}/plain", offset="-1", live="sse"),
        described.call(get, name=name, offset="-1", live="ws"),
        described.call(get, name=name, filter="status:>=500"),
        described.call(get, name=name, filter="nothing:1"),
        described.call(get, name=f"{base}/plain"),
        described.call(get, name=f"{base}/closed", offset="now"),
        described.call(f"GET {STREAM}/pk/{{key}}", name=name, key="a"),
        described.call("GET /v1/streams", limit=1, prefix=base),
    ) == [200, 304, 204, 200, 200, 200, 426, 200, 400, 200, 200, 200, 200]


def test_the_list_names_profiles(described: Described, base: str) -> None:
    listed = described.call("GET /v1/streams", prefix=f"{base}/").json()
    profiles = {stream["name"].rpartition("/")[2]: stream["profile"] for stream in listed}
    assert (profiles["state"], profiles["json"]) == ("state-protocol", "generic")


def test_a_deleted_source_of_a_fork(described: Described, base: str) -> None:
    assert statuses(
        described.call(f"DELETE {STREAM}", name=f"{base}/plain"),
        described.call(f"GET {STREAM}", name=f"{base}/plain"),
        described.call(f"GET {STREAM}/_details", name=f"{base}/plain"),
    ) == [204, 410, 410]


def test_searching_and_inspecting(described: Described, base: str) -> None:
    search, name = f"POST {STREAM}/_search", f"{base}/json"
    found = described.call(
        search, {"q": "service:a OR status:500", "size": 1, "sort": ["status:asc"]}, name=name
    )
    shown = described.call(f"GET {STREAM}/_details", name=name)
    known = {"If-None-Match": shown.headers["etag"][0]}
    assert len(found.json()["hits"]) == 1
    assert statuses(
        found,
        described.call(
            search, {"q": "service:a", "search_after": found.json()["next_search_after"]}, name=name
        ),
        described.call(search, {"q": "service:a", "timeout_ms": 0}, name=name),
        described.call(f"GET {STREAM}/_search", name=name, q="service:a", size=2),
        shown,
        described.call(f"GET {STREAM}/_details", None, known, name=name, live="long-poll"),
        described.call(f"GET {STREAM}/_index_status", name=name),
        described.call(f"GET {STREAM}/_routing_keys", name=name, limit=1),
        described.call("POST /v1/server/_seal", stream=name),
        described.call(f"GET {STREAM}/_details", name=name),
    ) == [200, 400, 408, 200, 200, 304, 200, 200, 200, 200]


def test_the_shown_requests_are_taken(described: Described, base: str) -> None:
    schema, profile = f"POST {STREAM}/_schema", f"POST {STREAM}/_profile"
    search, activate = f"POST {STREAM}/_search", f"POST {STREAM}/touch/templates/activate"
    wait, aggregate = f"POST {STREAM}/touch/wait", f"POST {STREAM}/_aggregate"
    added_up = described.call(aggregate, example_of(aggregate), name=f"{base}/json")
    assert len(added_up.json()["buckets"][0]["groups"]) == 2
    assert statuses(
        described.call(f"PUT {STREAM}", example_of(f"PUT {STREAM}"), name=f"{base}/shown"),
        described.call(f"POST {STREAM}", example_of(f"POST {STREAM}"), name=f"{base}/shown"),
        described.call(schema, example_of(schema), name=f"{base}/json"),
        described.call(profile, example_of(profile), name=f"{base}/state"),
        described.call(search, example_of(search), name=f"{base}/json"),
        described.call(activate, example_of(activate), name=f"{base}/state"),
        described.call(wait, {**example_of(wait), "timeoutMs": 10}, name=f"{base}/state"),
        described.call(wait, {**example_of(wait), "cursor": f"{'0' * 16}:0"}, name=f"{base}/state"),
        described.call(f"GET {STREAM}/touch/meta", name=f"{base}/state", settle="flush"),
        described.call(f"PUT {SUBSCRIPTION}", example_of(f"PUT {SUBSCRIPTION}"), id=f"{base}-2"),
        described.call(f"POST {SUBSCRIPTION}/streams", {"streams": [f"{base}/plain"]}, id=base),
    ) == [201, 204, 200, 200, 200, 200, 200, 200, 200, 201, 204]


def test_working_for_a_subscription(described: Described, base: str, http: Wire) -> None:
    http.post(f"{base}/json", JSON, '{"service": "c"}')
    claimed = described.call(f"POST {SUBSCRIPTION}/claim", example_of(f"POST {SUBSCRIPTION}/claim"), id=base)
    wake = claimed.json()
    bearer = {"Authorization": f"Bearer {wake['token']}"}
    body = {"wake_id": wake["wake_id"], "generation": wake["generation"]}
    assert statuses(
        claimed,
        described.call(f"POST {SUBSCRIPTION}/claim", {"worker": "other"}, id=base),
        described.call(f"POST {SUBSCRIPTION}/ack", body, bearer, id=base),
        described.call(f"POST {SUBSCRIPTION}/callback", body, bearer, id=base),
        described.call(f"POST {SUBSCRIPTION}/release", body, bearer, id=base),
        described.call(f"POST {SUBSCRIPTION}/ack", body, bearer, id=base),
        described.call(f"GET {SUBSCRIPTION}", id=base),
        described.call(f"DELETE {SUBSCRIPTION}/streams/{{name}}", id=base, name=f"{base}/json"),
        described.call(f"DELETE {SUBSCRIPTION}", id=base),
        described.call(f"GET {SUBSCRIPTION}", id=base),
    ) == [200, 409, 200, 400, 204, 409, 200, 204, 204, 404]


@pytest.mark.parametrize("moment", [1e305, -1e305, 1e300, 10**30, "0000-00-00T00:00:00Z", True, []])
def test_moments_that_nothing_can_hold(moment: object, described: Described, base: str) -> None:
    label = f"POST {STREAM}/_aggregate"
    for bound in ("from", "to"):
        body = example_of(label) | {bound: moment}
        assert described.call(label, body, name=f"{base}/json").status_code == 400


@pytest.mark.parametrize("path", [STREAM, "/healthz", SUBSCRIPTION])
def test_what_browsers_ask(described: Described, path: str) -> None:
    assert described.call(f"OPTIONS {path}", name="a", id="a").status_code == 204
