"""Section 16: forks."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import StartServer
from support.calls import eventually
from support.wire import Answer, Wire, fresh
from tailrace.protocol.offsets import encode_offset

JSON, TEXT = "application/json", "text/plain"


def filled(http: Wire, *bodies: str, content_type: str = TEXT, **more: str) -> str:
    name = fresh()
    assert http.put(name, content_type, **more).status == 201
    for body in bodies:
        assert http.post(name, content_type, body).status == 204
    return name


def fork(
    http: Wire, source: str, name: str, at: str | None = None, sub: int | str | None = None, **more: Any
) -> Answer:
    headers = {"stream_forked_from": source if source.startswith("/") else f"/v1/stream/{source}"}
    if at is not None:
        headers["stream_fork_offset"] = at
    if sub is not None:
        headers["stream_fork_sub_offset"] = str(sub)
    return http.put(name, more.pop("content_type", None), more.pop("body", None), **headers, **more)


# -- 16.1 request


@pytest.mark.parametrize(
    ("at", "status", "code"),
    [
        (None, 201, None),
        ("-1", 201, None),
        ("now", 201, None),
        (encode_offset(0, 0), 201, None),
        (encode_offset(0, 2).lower(), 201, None),
        ("0000000000000000_0000000000000002", 201, None),
        (encode_offset(0, 3), 201, None),
        (encode_offset(0, 4), 400, "offset_beyond_tail"),
        (encode_offset(1, 0), 400, "offset_beyond_tail"),
        ("9999999999999999_9999999999999999", 400, "invalid_offset"),
        ("", 400, "invalid_offset"),
        ("17", 400, "invalid_offset"),
        ("nonsense", 400, "invalid_offset"),
    ],
)
def test_where_a_fork_may_begin(http: Wire, at: str | None, status: int, code: str | None) -> None:
    source = filled(http, "a", "b", "c")
    name = fresh()
    answer = fork(http, source, name, at)
    assert (answer.status, answer.code) == (status, code)
    if code is None:
        expected = {
            None: b"abc",
            "now": b"abc",
            "-1": b"",
            encode_offset(0, 0): b"",
            encode_offset(0, 3): b"abc",
        }.get(at, b"ab")
        assert http.get(name).body == expected
        assert answer["stream-next-offset"] == encode_offset(0, len(expected))
    else:
        assert http.head(name).status == 404
        assert http.delete(source).status == 204
        assert http.head(source).status == 404, "a refused fork holds nothing"


@pytest.mark.parametrize(
    ("content_type", "at", "sub", "status", "expected"),
    [
        (JSON, encode_offset(0, 1), 0, 201, b"[1]"),
        (JSON, encode_offset(0, 1), 1, 201, b"[1,2]"),
        (JSON, encode_offset(0, 0), 3, 201, b"[1,2,3]"),
        (JSON, encode_offset(0, 1), 3, 400, None),
        (JSON, None, 1, 400, None),
        (JSON, encode_offset(0, 3), 1, 400, None),
        (JSON, None, 0, 201, b"[1,2,3]"),
        (TEXT, encode_offset(0, 1), 0, 201, b"one"),
        (TEXT, encode_offset(0, 1), 2, 201, b"onetw"),
        (TEXT, encode_offset(0, 1), 3, 201, b"onetwo"),
        (TEXT, encode_offset(0, 1), 4, 400, None),
        (TEXT, encode_offset(0, 0), 1, 201, b"o"),
        (TEXT, None, 1, 400, None),
        (TEXT, encode_offset(0, 1), "-1", 400, None),
        (TEXT, encode_offset(0, 1), "01", 400, None),
        (TEXT, encode_offset(0, 1), "+1", 400, None),
        (TEXT, encode_offset(0, 1), "1.0", 400, None),
        (TEXT, encode_offset(0, 1), "", 400, None),
        (TEXT, encode_offset(0, 1), "x", 400, None),
        (TEXT, encode_offset(0, 1), "99999999999999999999", 400, None),
    ],
)
def test_sub_offsets(
    http: Wire, content_type: str, at: str | None, sub: int | str, status: int, expected: bytes | None
) -> None:
    bodies = ("[1]", "[2]", "[3]") if content_type == JSON else ("one", "two", "three")
    source = filled(http, *bodies, content_type=content_type)
    name = fresh()
    answer = fork(http, source, name, at, sub)
    assert (answer.status, answer.code) == (status, None if expected is not None else "invalid_fork")
    if expected is not None:
        assert http.get(name).body == expected
    else:
        assert http.delete(source).status == 204
        assert http.get(source).status == 404, "a refused fork holds nothing"


def test_sources_that_cannot_be_forked(http: Wire) -> None:
    source = filled(http, "x")
    assert fork(http, fresh(), fresh()).code == "not_found"
    assert fork(http, "a//b", fresh()).status in (400, 404)
    assert fork(http, "/elsewhere/x", fresh()).code == "invalid_fork"
    assert http.put(fresh(), stream_forked_from="").code == "invalid_fork"
    assert fork(http, source, fresh(), content_type=JSON).code == "content_type_mismatch"
    assert fork(http, source, fresh(), content_type="Text/PLAIN;x=y").status == 201
    expired = fresh()
    http.put(expired, TEXT, "x", stream_ttl="0")
    assert fork(http, expired, fresh()).code == "not_found"
    http.delete(source)
    refused = fork(http, source, fresh())
    assert (refused.status, refused.code) == (409, "source_deleted")


@pytest.mark.parametrize(
    "headers",
    [{"stream_fork_offset": "-1"}, {"stream_fork_sub_offset": "0"}, {"stream_fork_sub_offset": "1"}],
)
def test_a_position_needs_a_source(http: Wire, headers: dict[str, str]) -> None:
    name = fresh()
    answer = http.put(name, TEXT, **headers)
    assert (answer.status, answer.code) == (400, "invalid_fork")
    assert http.head(name).status == 404


def test_a_source_may_be_named_without_a_path(http: Wire) -> None:
    source = filled(http, "x")
    for number, written in enumerate((source, f"/v1/stream/{source}", source.replace("/", "%2F"))):
        assert http.put(f"{source}/{number}", stream_forked_from=written).status == 201


# -- 16.2 result


def test_a_fork_inherits_and_then_lives_on_its_own(http: Wire) -> None:
    source = filled(http, "[1]", "[2]", content_type="application/JSON; charset=utf-8")
    name = fresh()
    created = fork(http, source, name, encode_offset(0, 1), body="[9]")
    assert (created.status, created["stream-next-offset"]) == (201, encode_offset(0, 2))
    assert created["content-type"] == "application/JSON; charset=utf-8"
    assert http.get(name).body == b"[1,9]"
    assert not [header for header, value in http.head(name).headers if source in value]
    http.post(source, JSON, "[3]")
    http.post(name, JSON, "[10]")
    assert http.get(name).body == b"[1,9,10]"
    assert http.get(source).body == b"[1,2,3]"
    http.post(source, stream_closed="true")
    assert http.post(name, JSON, "[11]").status == 204
    assert "stream-closed" not in http.head(name)
    late = fresh()
    assert "stream-closed" not in fork(http, source, late)
    closed = fresh()
    assert fork(http, source, closed, stream_closed="true")["stream-closed"] == "true"
    assert http.post(closed, JSON, "[1]").code == "stream_closed"
    assert http.get(f"{name}?offset={encode_offset(0, 1)}").body == b"[9,10,11]"


def test_a_fork_of_an_unset_type_stays_unset(http: Wire) -> None:
    source, name = fresh(), fresh()
    http.put(source)
    assert fork(http, source, name).status == 201
    assert http.post(name, JSON, "[1]").status == 204
    assert http.post(source, TEXT, "x").status == 204
    assert (http.get(name).body, http.get(source).body) == (b"[1]", b"x")


def test_repeating_the_request(http: Wire) -> None:
    source = filled(http, "one", "two")
    name = fresh()
    assert fork(http, source, name, encode_offset(0, 1), 2).status == 201
    http.post(source, TEXT, "more")
    for at, sub, status in [
        (encode_offset(0, 1), 2, 200),
        (encode_offset(0, 1).lower(), 2, 200),
        ("0000000000000000_0000000000000001", 2, 200),
        (None, 2, 200),
        (encode_offset(0, 1), None, 409),
        (encode_offset(0, 1), 0, 409),
        (encode_offset(0, 1), 1, 409),
        (encode_offset(0, 2), 2, 409),
        (encode_offset(0, 0), 2, 409),
    ]:
        answer = fork(http, source, name, at, sub)
        assert answer.status == status, (at, sub)
        assert "location" not in answer
    assert http.put(name, TEXT).code == "stream_exists", "a plain PUT on a fork"
    assert fork(http, filled(http, "one"), name, encode_offset(0, 1), 2).code == "stream_exists"
    plain = filled(http, "x")
    assert fork(http, source, plain).code == "stream_exists"
    zero = fresh()
    assert fork(http, source, zero, encode_offset(0, 1), 0).status == 201
    assert fork(http, source, zero, encode_offset(0, 1)).status == 200
    json_source, json_fork = filled(http, "[1,2,3]", content_type=JSON), fresh()
    assert fork(http, json_source, json_fork, encode_offset(0, 1), 1).status == 201
    assert fork(http, json_source, json_fork, encode_offset(0, 1), 1).status == 200
    assert fork(http, json_source, json_fork, encode_offset(0, 2), 0).status == 409


def test_a_fork_starts_without_producers_and_sequence(http: Wire) -> None:
    source, name = filled(http), fresh()
    http.post(source, TEXT, "x", producer_id="p", producer_epoch="5", producer_seq="0", stream_seq="z")
    fork(http, source, name)
    assert (
        http.post(
            name, TEXT, "y", producer_id="p", producer_epoch="0", producer_seq="0", stream_seq="a"
        ).status
        == 200
    )
    assert (
        http.post(source, TEXT, "y", producer_id="p", producer_epoch="0", producer_seq="0").code
        == "stale_epoch"
    )


def test_lifetimes_are_inherited_as_settings(http: Wire) -> None:
    window = filled(http, "x", stream_ttl="1h")
    fixed = filled(http, "x", stream_expires_at="2200-01-01T00:00:00Z")
    kept = filled(http, "x", stream_retention="1d", stream_retention_bytes="99")
    inherited = fresh()
    assert fork(http, window, inherited)["stream-ttl"] == "3600"
    assert fork(http, window, inherited).status == 200, "inherited matches absent"
    assert fork(http, window, inherited, stream_ttl="1h").code == "stream_exists"
    assert fork(http, fixed, fresh())["stream-expires-at"] == "2200-01-01T00:00:00.000Z"
    own = fork(http, fixed, fresh(), stream_ttl="86400000")
    assert own["stream-ttl"] == "86400000", "never capped by the source"
    bounded = fork(http, kept, fresh())
    assert (bounded["stream-retention"], bounded["stream-retention-bytes"]) == ("86400", "99")


def test_forks_of_forks(http: Wire) -> None:
    chain = [filled(http, "0")]
    for depth in range(1, 70):
        name = fresh()
        assert fork(http, chain[-1], name).status == 201
        assert http.post(name, TEXT, str(depth % 10)).status == 204
        chain.append(name)
    assert http.get(chain[-1]).body == "".join(str(depth % 10) for depth in range(70)).encode()
    # A part of what the parent shows, wherever that comes from.
    deep = fresh()
    assert fork(http, chain[40], deep, encode_offset(0, 10), 1).status == 201
    assert http.get(deep).body == b"01234567890"
    source = filled(http, "abcdef")
    first, second = fresh(), fresh()
    fork(http, source, first, "-1", 4)
    fork(http, first, second, "-1", 2)
    assert (http.get(first).body, http.get(second).body) == (b"abcd", b"ab")


def test_epochs_across_forks(http: Wire) -> None:
    source, name = filled(http, "a", "b"), fresh()
    http.put(name, TEXT, "old")
    http.delete(name)
    created = fork(http, source, name, encode_offset(0, 1))
    assert created["stream-next-offset"] == encode_offset(0, 1)
    assert http.post(name, TEXT, "c")["stream-next-offset"] == encode_offset(1, 2)
    assert http.get(f"{name}?offset={encode_offset(0, 1)}").body == b"c"
    assert http.get(f"{name}?offset={encode_offset(0, 2)}").code == "offset_gone"
    assert http.get(f"{name}?offset={encode_offset(1, 3)}").code == "offset_beyond_tail"


# -- 16.3 reading


def test_reading_across_the_boundary_live_and_filtered(http: Wire) -> None:
    source, name = filled(http), fresh()
    http.post(source, TEXT, "a", stream_key="k", stream_timestamp="2001-01-01T00:00:00Z")
    http.post(source, TEXT, "b", stream_timestamp="2002-01-01T00:00:00Z")
    fork(http, source, name)
    http.post(name, TEXT, "c", stream_key="k")
    http.post(source, TEXT, "not in the fork", stream_key="k")
    assert http.get(f"{name}?key=k").body == b"ac"
    assert http.get(f"{name}?since=2001-06-01T00:00:00Z").body == b"bc"
    assert http.get(f"{name}?offset={encode_offset(0, 1)}&live=long-poll").body == b"bc"
    with http.events(f"{name}?offset={encode_offset(0, 1)}&live=sse") as events:
        assert events.data() == b"bc"
        assert events.control()["upToDate"] is True
        http.post(source, TEXT, "nor this")
        http.post(name, TEXT, "d")
        assert events.data() == b"d"


# -- 16.4 deletion


def test_a_source_with_forks_is_soft_deleted(http: Wire) -> None:
    source, name = filled(http, "x"), fresh()
    fork(http, source, name)
    assert http.delete(source).status == 204
    for answer in (
        http.get(source),
        http.head(source),
        http.post(source, TEXT, "y"),
        http.delete(source),
        http.get(f"{source}?offset=now&live=sse"),
    ):
        assert answer.status == 410
        assert answer.code in ("stream_gone", None)
    retained = http.put(source, TEXT)
    assert (retained.status, retained.code) == (409, "name_retained")
    assert http.get(name).body == b"x"
    assert fork(http, source, name).status == 200, "the fork is still what was asked for"
    assert http.delete(name).status == 204
    eventually(lambda: http.head(source).status, lambda status: status == 404)
    again = http.put(source, TEXT)
    assert (again.status, again["stream-next-offset"]) == (201, encode_offset(1, 0))


def test_a_chain_is_removed_from_its_end(http: Wire) -> None:
    first = filled(http, "a")
    middle, last = fresh(), fresh()
    fork(http, first, middle)
    http.post(middle, TEXT, "b")
    fork(http, middle, last)
    http.post(last, TEXT, "c")
    http.delete(middle)
    assert (http.get(first).body, http.get(last).body) == (b"a", b"abc")
    assert http.post(last, TEXT, "d").status == http.post(first, TEXT, "d").status == 204
    http.delete(first)
    assert [http.head(name).status for name in (first, middle, last)] == [410, 410, 200]
    http.delete(last)
    for name in (first, middle, last):
        eventually(lambda name=name: http.head(name).status, lambda status: status == 404)


def test_expiry_along_a_chain(http: Wire) -> None:
    source = filled(http, "x", stream_ttl="3")
    short, long = fresh(), fresh()
    fork(http, source, short)
    fork(http, source, long, stream_ttl="3600")
    eventually(lambda: http.head(source).status, lambda status: status == 410)
    eventually(lambda: http.head(short).status, lambda status: status == 404)
    assert http.put(source, TEXT).code == "name_retained"
    assert http.get(long).body == b"x"
    assert http.delete(long).status == 204
    eventually(lambda: http.head(source).status, lambda status: status == 404)
    assert http.delete(source).status == 404, "it expired"


def test_forks_outlive_a_restart(start_server: StartServer) -> None:
    server = start_server()
    http = Wire(server.port)
    source, name = filled(http, "a", "b"), fresh()
    fork(http, source, name, encode_offset(0, 1), 1)
    http.post(name, TEXT, "c")
    http.delete(source)
    http.close()
    server.restart()
    assert http.get(name).body == b"abc"
    assert http.head(source).status == 410
    assert http.delete(name).status == 204
    eventually(lambda: http.head(source).status, lambda status: status == 404)
    http.close()
