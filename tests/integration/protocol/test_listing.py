"""Section 18: listing, and the registry stream."""

from __future__ import annotations

import re
from typing import Any

import pytest

from conftest import StartServer
from support.calls import eventually
from support.wire import Wire, fresh
from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.protocol.offsets import encode_offset

JSON, TEXT = "application/json", "text/plain"


def names(http: Wire, query: str) -> list[str]:
    return [row["name"] for row in http.get(f"/v1/streams?{query}").json]


def test_a_descriptor(http: Wire) -> None:
    name = fresh("listed-one")
    http.put(name, JSON, "[1,22]", stream_ttl="1h", stream_closed="true")
    answer = http.get(f"/v1/streams?prefix={name}")
    assert answer["cache-control"] == "no-store"
    assert answer["content-type"].startswith("application/json")
    (row,) = answer.json
    created, expires = row.pop("created_at"), row.pop("expires_at")
    assert parse_rfc3339_ns(expires) == (parse_rfc3339_ns(created) or 0) + 3600 * 10**9
    assert row == {
        "name": name,
        "content_type": JSON,
        "profile": "generic",
        "ttl_seconds": 3600,
        "closed": True,
        "epoch": 0,
        "next_offset": "2",
        "sealed_through": "-1",
        "uploaded_through": "-1",
        "end_offset": encode_offset(0, 2),
        "earliest_offset": encode_offset(0, 0),
        "total_size_bytes": "3",
    }
    http.delete(name)
    http.put(name)
    (row,) = http.get(f"/v1/streams?prefix={name}").json
    assert (row["epoch"], row["content_type"], row["expires_at"], row["ttl_seconds"]) == (
        1,
        "application/octet-stream",
        None,
        None,
    )
    assert http.get(f"{name}?offset={row['end_offset']}").status == 200


@pytest.mark.parametrize(
    "limit", ["", "0", "-1", "1001", "x", "1.5", "99999999999999999999", "000000001999", "%D9%A1"]
)
def test_limits_that_are_none(http: Wire, limit: str) -> None:
    answer = http.get(f"/v1/streams?limit={limit}")
    assert (answer.status, answer.code) == (400, "invalid_request")


def test_pages_in_byte_order(http: Wire) -> None:
    prefix = fresh("listed-many")
    made = [
        f"{prefix}/{tail}"
        for tail in ("B", "a", "a/b", "a b", "a-b", "\u00fc", "\uffff", "\U0001f30a", "z", "Z")
    ]
    for name in made:
        http.put("".join(f"%{byte:02X}" for byte in name.encode()), TEXT)
    expected = sorted(made, key=str.encode)
    assert names(http, f"prefix={prefix}/") == expected
    for limit in (1, 3, 10, 11, 1000):
        found: list[str] = []
        path: str | None = f"/v1/streams?limit={limit}&prefix={prefix}/"
        while path is not None:
            answer = http.get(path)
            found += [row["name"] for row in answer.json]
            link = answer.get("link")
            path = None
            if link is not None:
                match = re.fullmatch(r'<([^>]+)>; rel="next"', link)
                assert match is not None
                path = match[1].removeprefix("http://tailrace.test")
                assert len(answer.json) == limit
        assert found == expected
    assert (
        names(http, f"prefix={prefix}/&after={prefix}/a/b") == expected[expected.index(f"{prefix}/a/b") + 1 :]
    )
    assert names(http, f"prefix={prefix}/&after=0") == expected
    assert names(http, f"prefix={prefix}/&after=zzzz") == []
    assert names(http, f"prefix={prefix}/nothing") == []
    assert http.get("/v1/streams?limit=1&limit=2").status == 400
    assert http.call("HEAD", "/v1/streams").status == 200


def test_many_streams_in_memory_and_in_the_store(start_server: StartServer) -> None:
    """Small journal files, so that part of the names is only in the hot store."""
    server = start_server("--journal-file-bytes", "20000")
    http = Wire(server.port)
    made = [f"many/{number:04d}" for number in range(600)]
    for name in made:
        assert http.put(name, TEXT).status == 201
    for name in made[::7]:
        assert http.delete(name).status == 204
    for name in made[::14]:
        assert http.put(name, TEXT, "again").status == 201
    eventually(lambda: checkpoints(http), lambda count: count >= 3)
    gone = set(made[::7]) - set(made[::14])
    expected = [name for name in made if name not in gone]
    for limit in (100, 37, 1000):
        found: list[str] = []
        while page := names(http, f"limit={limit}&prefix=many/&after={found[-1] if found else ''}"):
            found += page
        assert found == expected
    assert len(names(http, "")) == 100
    http.close()
    server.restart()
    assert names(http, "limit=1000") == expected
    assert http.get(made[0]).body == b"again"
    http.close()


def checkpoints(http: Wire) -> float:
    found = re.search(r"^tailrace_checkpoints_total (\S+)$", http.get("/metrics").body.decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_what_is_not_listed(http: Wire) -> None:
    prefix = fresh("unlisted")
    for kind in ("deleted", "expired", "source", "kept"):
        http.put(f"{prefix}/{kind}", TEXT, stream_ttl="0") if kind == "expired" else http.put(
            f"{prefix}/{kind}", TEXT
        )
    http.put(f"{prefix}/fork", stream_forked_from=f"{prefix}/source")
    http.delete(f"{prefix}/deleted")
    http.delete(f"{prefix}/source")
    assert names(http, f"prefix={prefix}/") == [f"{prefix}/fork", f"{prefix}/kept"]
    assert "__registry__" not in names(http, "limit=1000&after=_&prefix=__")
    assert "__registry__" in names(http, "limit=1000&prefix=__&system=true")


# -- 18.3 registry


def events(http: Wire, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    offset = "-1"
    while True:
        page = http.get(f"__registry__?offset={offset}")
        found += page.json
        offset = page["stream-next-offset"]
        if "stream-up-to-date" in page:
            return [event for event in found if event["key"] == name]


def test_the_registry_tells_the_life_of_every_stream(http: Wire) -> None:
    name = fresh("registered")
    http.put(name)
    http.post(name, JSON, "[1]")
    http.post(name, JSON, "[2]")
    http.post(name, stream_closed="true")
    http.delete(name)
    http.put(name, TEXT, stream_closed="true")
    http.delete(name)
    http.put(name, TEXT, stream_ttl="0")
    http.get(name)
    found = eventually(lambda: events(http, name), lambda seen: len(seen) >= 8)
    assert all(event["type"] == "stream" for event in found)
    stamps = [event["headers"].pop("timestamp") for event in found]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp) for stamp in stamps)
    assert stamps == sorted(stamps)
    created = [event["value"].pop("createdAt") for event in found if "value" in event]
    assert all(isinstance(moment, int) for moment in created)
    life = [(event["headers"], event.get("value")) for event in found]
    octets = "application/octet-stream"
    assert life == [
        ({"operation": "insert"}, {"path": name, "contentType": octets, "closed": False}),
        ({"operation": "update"}, {"path": name, "contentType": JSON, "closed": False}),
        ({"operation": "update"}, {"path": name, "contentType": JSON, "closed": True}),
        ({"operation": "delete", "reason": "deleted"}, None),
        ({"operation": "insert"}, {"path": name, "contentType": TEXT, "closed": True}),
        ({"operation": "delete", "reason": "deleted"}, None),
        ({"operation": "insert"}, {"path": name, "contentType": TEXT, "closed": False}),
        ({"operation": "delete", "reason": "expired"}, None),
    ]


def test_refusals_and_repetitions_are_no_events(http: Wire) -> None:
    name = fresh("registered")
    http.put(name, TEXT)
    http.put(name, TEXT)
    http.put(name, JSON)
    http.post(name, JSON, "[1]")
    http.post(name, TEXT, "x")
    assert [event["headers"]["operation"] for event in events(http, name)] == ["insert"]
    bound = fresh("registered")
    http.put(bound)
    http.put(bound, TEXT)
    assert [event["headers"]["operation"] for event in events(http, bound)] == ["insert", "update"]
    assert events(http, "__registry__") == []


def test_the_registry_can_be_followed(http: Wire) -> None:
    name = fresh("registered")
    with http.events("__registry__?offset=now&live=sse") as following:
        following.control()
        http.put(name, TEXT)
        assert name.encode() in following.data()
