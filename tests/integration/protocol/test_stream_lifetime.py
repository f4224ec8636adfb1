"""Sections 5 and 15: creating, lifetimes, metadata, deleting."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from support.calls import eventually
from support.wire import Answer, Wire, fresh
from tailrace.protocol.offsets import encode_offset

JSON, TEXT = "application/json", "text/plain"
START = encode_offset(0, 0)


def instant(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


# -- 5 create


def test_a_created_stream_says_where_and_what_it_is(http: Wire) -> None:
    name = fresh()
    created = http.put(name, JSON, "[1,2]", stream_ttl="1h")
    assert created.status == 201
    assert created.body == b""
    assert created["location"] == f"http://tailrace.test/v1/stream/{name}"
    assert created["content-type"] == JSON
    assert created["stream-next-offset"] == encode_offset(0, 2)
    assert created["stream-ttl"] == "3600"
    assert "stream-closed" not in created
    confirmed = http.put(name, JSON, "[3]", stream_ttl="3600")
    assert confirmed.status == 200
    assert "location" not in confirmed
    for header in ("content-type", "stream-next-offset", "stream-ttl"):
        assert confirmed[header] == created[header]
    assert http.get(name).body == b"[1,2]", "an existing stream is never appended to by PUT"


def test_a_put_on_an_existing_stream_does_not_look_at_its_body(http: Wire) -> None:
    name = fresh()
    http.put(name, JSON)
    assert http.put(name, JSON, "not json").status == 200


def test_producer_headers_and_seq_are_ignored_on_put(http: Wire) -> None:
    name = fresh()
    assert http.put(name, TEXT, "x", producer_id="p", producer_epoch="nonsense", stream_seq="5").status == 201
    assert http.post(name, TEXT, "x", stream_seq="1").status == 204
    assert http.post(name, TEXT, "x", producer_id="p", producer_epoch="0", producer_seq="0").status == 200


def test_created_closed_with_its_whole_content(http: Wire) -> None:
    for body, tail in ((None, START), ("[1,2]", encode_offset(0, 2)), ("[]", START)):
        name = fresh()
        created = http.put(name, JSON, body, stream_closed="True")
        assert (created.status, created["stream-closed"], created["stream-next-offset"]) == (
            201,
            "true",
            tail,
        )
        assert http.put(name, JSON, stream_closed="true")["stream-closed"] == "true"
        assert http.put(name, JSON).code == "stream_exists"
        assert http.post(name, JSON, "[3]").code == "stream_closed"
        assert http.get(name)["stream-closed"] == "true"


def test_initial_content_takes_key_and_timestamp(http: Wire) -> None:
    name = fresh()
    http.put(name, TEXT, "x", stream_key="k", stream_timestamp="2001-01-01T00:00:00Z")
    assert http.get(f"{name}?key=k").body == b"x"
    assert http.get(f"{name}?key=l").body == b""
    assert http.get(f"{name}?since=2001-01-01T00:00:00Z").body == b"x"
    assert http.get(f"{name}?since=2001-01-01T00:00:01Z").body == b""
    assert http.put(fresh(), TEXT, "x", stream_key="").code == "invalid_header"
    assert http.put(fresh(), TEXT, "x", stream_timestamp="yesterday").code == "invalid_header"


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({}, {}, True),
        ({"stream_ttl": "3600"}, {"stream_ttl": "1h"}, True),
        ({"stream_ttl": "3600"}, {"stream_ttl": "60m"}, True),
        ({"stream_ttl": "3600"}, {"stream_ttl": "3601"}, False),
        ({"stream_ttl": "3600"}, {}, False),
        ({}, {"stream_ttl": "3600"}, False),
        (
            {"stream_expires_at": "2200-01-01T00:00:00Z"},
            {"stream_expires_at": "2200-01-01T00:00:00.000+00:00"},
            True,
        ),
        (
            {"stream_expires_at": "2200-01-01T00:00:00Z"},
            {"stream_expires_at": "2200-01-01T01:00:00+01:00"},
            True,
        ),
        ({"stream_expires_at": "2200-01-01T00:00:00Z"}, {"stream_expires_at": "2200-01-01T00:00:01Z"}, False),
        ({"stream_expires_at": "2200-01-01T00:00:00Z"}, {"stream_ttl": "3600"}, False),
        ({"stream_retention": "1d"}, {"stream_retention": "24h"}, True),
        ({"stream_retention": "1d"}, {}, False),
        ({"stream_retention_bytes": "10"}, {"stream_retention_bytes": "10"}, True),
        ({"stream_retention_bytes": "10"}, {"stream_retention_bytes": "11"}, False),
        ({"stream_closed": "true"}, {"stream_closed": "TRUE"}, True),
        ({"stream_closed": "true"}, {"stream_closed": "1"}, False),
        ({"stream_closed": "1"}, {}, True),
    ],
)
def test_a_repeated_put_must_ask_for_the_same(
    http: Wire, first: dict[str, str], second: dict[str, str], same: bool
) -> None:
    name = fresh()
    assert http.put(name, TEXT, **first).status == 201
    answer = http.put(name, TEXT, **second)
    assert (answer.status, answer.code) == ((200, None) if same else (409, "stream_exists"))


def test_metadata_shows_what_was_set(http: Wire) -> None:
    name = fresh()
    http.put(
        name,
        TEXT,
        "x",
        stream_retention="2h",
        stream_retention_bytes="1000",
        stream_expires_at="2200-01-01T02:00:00+02:00",
    )
    head = http.head(f"{name}?offset=nonsense&live=nonsense")
    assert head.status == 200
    assert head.body == b""
    assert head["content-type"] == TEXT
    assert head["stream-next-offset"] == head["stream-end-offset"] == encode_offset(0, 1)
    assert head["stream-earliest-offset"] == START
    assert head["stream-retention"] == "7200"
    assert head["stream-retention-bytes"] == "1000"
    assert head["stream-expires-at"] == "2200-01-01T00:00:00.000Z"
    assert head["cache-control"] == "no-store"
    for absent in ("stream-closed", "stream-ttl", "etag"):
        assert absent not in head
    http.post(name, stream_closed="true")
    assert http.head(name)["stream-closed"] == "true"


# -- 15.2 TTL and expiry

BAD_TTLS = [
    "",
    "060",
    "+60",
    "-1",
    "60.5",
    "1e3",
    "1500ms",
    "abc",
    "60 s",
    "1w",
    "s",
    "1h30m",
    "0x10",
    "\u0661",
    "00",
    "01s",
]
TOO_LARGE = ["9007199254740992", "9" * 30, "9" * 5000, "999999999999999d"]


@pytest.mark.parametrize("value", BAD_TTLS)
@pytest.mark.parametrize("header", ["Stream-TTL", "Stream-Retention"])
def test_windows_that_are_none(http: Wire, header: str, value: str) -> None:
    name = fresh()
    answer = http.call("PUT", name, {header: value})
    assert (answer.status, answer.code) == (400, "invalid_header")
    assert answer.json["error"]["header"] == header
    assert http.head(name).status == 404


@pytest.mark.parametrize("value", TOO_LARGE)
@pytest.mark.parametrize("header", ["Stream-TTL", "Stream-Retention"])
def test_windows_that_are_too_large_are_told_the_largest(http: Wire, header: str, value: str) -> None:
    answer = http.call("PUT", fresh(), {header: value})
    assert (answer.status, answer.code) == (400, "invalid_header")
    assert answer.json["error"]["header"] == header
    assert answer.json["error"]["message"] == f"{header} must be at most 9007199254740991 seconds"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("60", 60),
        ("90s", 90),
        ("5m", 300),
        ("1h", 3600),
        ("30d", 2_592_000),
        ("9007199254740991", 2**53 - 1),
        ("1000000d", 86_400_000_000),
    ],
)
def test_windows_are_shown_in_seconds_exactly_as_set(http: Wire, value: str, seconds: int) -> None:
    name = fresh()
    assert http.put(name, TEXT, stream_ttl=value)["stream-ttl"] == str(seconds)
    head = http.head(name)
    assert head["stream-ttl"] == str(seconds)
    assert "stream-expires-at" in head


BAD_INSTANTS = [
    "",
    "tomorrow",
    "2026-01-01",
    "2026-01-01T00:00:00",
    "2026-13-01T00:00:00Z",
    "2026-02-30T00:00:00Z",
    "2026-01-01T25:00:00Z",
    "1767225600",
    "2026-01-01T00:00:00.0000000001Z",
    "2026-01-01T00:00:00+25:00",
    "2026-01-01T00:00Z",
    "0000-01-01T00:00:00Z",
]


@pytest.mark.parametrize("value", BAD_INSTANTS)
def test_instants_that_are_none(http: Wire, value: str) -> None:
    answer = http.put(fresh(), TEXT, stream_expires_at=value)
    assert (answer.status, answer.code) == (400, "invalid_header")


@pytest.mark.parametrize(
    "value",
    [
        "2200-01-01T00:00:00Z",
        "2200-01-01t00:00:00.123456789z",
        "2200-01-01T00:00:00-23:59",
        "9999-12-31T23:59:59Z",
        "3000-01-01T00:00:00.5+14:00",
    ],
)
def test_instants_of_any_precision_zone_and_distance(http: Wire, value: str) -> None:
    name = fresh()
    assert http.put(name, TEXT, stream_expires_at=value).status == 201
    assert http.put(name, TEXT, stream_expires_at=value).status == 200
    assert http.head(name).status == 200
    if value.startswith("9999"):
        assert http.head(name)["stream-expires-at"].startswith("9999-12-31T23:59:59")


def test_two_kinds_of_end_exclude_each_other(http: Wire) -> None:
    answer = http.put(fresh(), TEXT, stream_ttl="60", stream_expires_at="2200-01-01T00:00:00Z")
    assert (answer.status, answer.code) == (400, "conflicting_expiry")


@pytest.mark.parametrize("value", ["", "-1", "1.5", "1k", "01", "+1", "1e3"])
def test_retention_bytes_is_a_whole_number(http: Wire, value: str) -> None:
    assert http.put(fresh(), TEXT, stream_retention_bytes=value).code == "invalid_header"


@pytest.mark.parametrize(
    "headers",
    [
        {"stream_ttl": "0"},
        {"stream_expires_at": "2001-01-01T00:00:00Z"},
        {"stream_expires_at": "1900-01-01T00:00:00Z"},
    ],
)
def test_a_lifetime_that_is_over_at_once_is_legal(http: Wire, headers: dict[str, str]) -> None:
    name = fresh()
    for _ in range(2):
        assert http.put(name, TEXT, "x", **headers).status == 201
        for answer in (http.get(name), http.head(name), http.post(name, TEXT, "x"), http.delete(name)):
            assert answer.status == 404
    assert http.put(name, TEXT).status == 201


def gone(answer: Answer) -> bool:
    return answer.status == 404


def test_expired_streams_are_gone_for_every_method_and_the_name_is_free(http: Wire) -> None:
    window, fixed = fresh(), fresh()
    http.put(window, TEXT, "old", stream_ttl="1")
    http.put(fixed, TEXT, "old", stream_expires_at=instant(1))
    for name in (window, fixed):
        eventually(lambda name=name: http.head(name), gone)
        assert http.get(name).code == "not_found"
        assert http.post(name, TEXT, "x").code == "not_found"
        assert http.delete(name).code == "not_found"
        created = http.put(name, TEXT, "new")
        assert (created.status, created["stream-next-offset"]) == (201, encode_offset(1, 1))


def test_what_renews_a_window_and_what_does_not(http: Wire) -> None:
    """All at once, so that the test waits once: what is renewed outlives what is not."""
    renewed = {kind: fresh() for kind in ("get", "now", "etag", "append", "past", "long-poll")}
    others = {kind: fresh() for kind in ("head", "put", "expires")}
    for kind, name in {**renewed, **others}.items():
        lifetime = {"stream_expires_at": instant(4)} if kind == "expires" else {"stream_ttl": "4"}
        http.put(name, TEXT, "x", **lifetime)
    tag = http.get(renewed["etag"])["etag"]

    def renew() -> list[int]:
        http.get(renewed["get"])
        http.get(f"{renewed['now']}?offset=now")
        assert http.get(renewed["etag"], {"If-None-Match": tag}).status == 304
        http.post(renewed["append"], TEXT, "x")
        http.post(renewed["past"], TEXT, "x", stream_timestamp="1")
        http.get(f"{renewed['long-poll']}?offset=now&live=long-poll&timeout_ms=20")
        if http.head(others["put"]).status == 200:
            http.put(others["put"], TEXT, stream_ttl="4")
        if http.head(others["expires"]).status == 200:
            http.get(others["expires"])
        return [http.head(name).status for name in others.values()]

    eventually(renew, lambda statuses: statuses == [404, 404, 404])
    for name in renewed.values():
        head = http.head(name)
        assert (head.status, head["stream-ttl"]) == (200, "4"), "the window, not what is left of it"


def test_a_live_reader_keeps_a_window_open_but_not_a_fixed_end(http: Wire) -> None:
    window, fixed = fresh(), fresh()
    http.put(window, TEXT, stream_ttl="3")
    http.put(fixed, TEXT, stream_expires_at=instant(3))
    with (
        http.events(f"{window}?offset=now&live=sse") as kept,
        http.events(f"{fixed}?offset=now&live=sse") as ended,
    ):
        kept.control()
        ended.control()
        assert ended.next() is None, "the response just ends"
        assert http.head(fixed).status == 404
        eventually(lambda: http.head(window)["stream-expires-at"] < instant(-0.5), bool)
        assert http.post(window, TEXT, "still here").status == 204
        assert kept.data() == b"still here"
    eventually(lambda: http.head(window), gone)


# -- 15.4 delete


def test_deleting(http: Wire) -> None:
    name = fresh()
    assert http.delete(name).code == "not_found"
    http.put(name, TEXT, "x", producer_id="p")
    assert http.delete(name).status == 204
    assert http.delete(name).status == 204, "a tombstone is deleted already"
    for answer in (http.get(name), http.head(name), http.post(name, TEXT, "x")):
        assert answer.status == 404
    http.put(name, JSON)
    http.post(name, JSON, "[1]", producer_id="p", producer_epoch="3", producer_seq="0", stream_seq="z")
    assert http.delete(name).status == 204
    assert http.put(name, TEXT).status == 201
    assert (
        http.post(
            name, TEXT, "x", producer_id="p", producer_epoch="0", producer_seq="0", stream_seq="a"
        ).status
        == 200
    )
    http.post(name, stream_closed="true")
    assert http.delete(name).status == 204
