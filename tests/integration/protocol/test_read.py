"""Sections 9, 10, 13 and 14: reading, long-polls, cursors, caching."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from conftest import StartServer
from support.edge import StartEdge
from support.waiting import Waiting
from support.wire import Wire, fresh
from tailrace.common.limits import Limits
from tailrace.protocol.offsets import CURSOR_INTERVAL_S, CURSOR_ORIGIN_S, encode_offset

JSON, TEXT, BYTES = "application/json", "text/plain", "application/octet-stream"
IMMUTABLE = "public, max-age=31536000, immutable"


def filled(http: Wire, *bodies: str, content_type: str = TEXT, **more: str) -> str:
    name = fresh()
    assert http.put(name, content_type, **more).status == 201
    for body in bodies:
        assert http.post(name, content_type, body).status == 204
    return name


# -- 9 parameters


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("live=yes", 400, "invalid_request"),
        ("live=LONG-POLL", 400, "invalid_request"),
        ("live=", 200, None),
        ("live=false", 200, None),
        ("live=0", 200, None),
        ("live=long-poll", 400, "missing_offset"),
        ("live=true", 400, "missing_offset"),
        ("live=1", 400, "missing_offset"),
        ("live=sse", 400, "missing_offset"),
        ("live=ws", 400, "missing_offset"),
        ("live=ws-internal", 400, "missing_offset"),
        ("live=ws&offset=-1", 426, "upgrade_required"),
        ("live=ws-internal&offset=-1", 426, "upgrade_required"),
        ("format=json", 400, "unsupported_format"),
        ("format=xml", 400, "unsupported_format"),
        ("format=raw", 200, None),
        ("since=yesterday", 400, "invalid_request"),
        ("since=2026-01-01", 400, "invalid_request"),
        ("since=", 400, "invalid_request"),
        ("since=-1", 400, "invalid_request"),
        ("since=2026-01-01T00:00:00Z", 200, None),
        ("since=9999-12-31T23:59:59Z", 200, None),
        ("since=1000-01-01T00:00:00Z", 200, None),
        ("since=nonsense&offset=-1", 200, None),
        ("since=0&live=long-poll", 200, None),
        ("filter=a:b", 400, "invalid_filter"),
        ("offset=-1&live=long-poll&timeout=5x", 400, "invalid_timeout"),
        ("offset=-1&live=long-poll&timeout=", 400, "invalid_timeout"),
        ("offset=-1&live=long-poll&timeout=-1", 400, "invalid_timeout"),
        ("offset=-1&live=long-poll&timeout=1.5", 400, "invalid_timeout"),
        ("offset=-1&live=long-poll&timeout=%2B1", 400, "invalid_timeout"),
        ("offset=-1&live=long-poll&timeout_ms=1s", 400, "invalid_timeout"),
        ("offset=-1&live=long-poll&timeout_ms=", 400, "invalid_timeout"),
        ("offset=-1&live=long-poll&timeout_ms=-1", 400, "invalid_timeout"),
        ("offset=-1&live=long-poll&timeout=1h", 200, None),
        ("offset=-1&live=long-poll&timeout=bad&timeout_ms=5", 200, None),
        ("timeout=nonsense&cursor=nonsense", 200, None),
    ],
)
def test_parameters(http: Wire, query: str, status: int, code: str | None) -> None:
    name = filled(http, "x")
    answer = http.get(f"{name}?{query}")
    assert (answer.status, answer.code) == (status, code)
    if code == "upgrade_required":
        assert answer["upgrade"].lower() == "websocket"


def test_what_is_not_there(http: Wire) -> None:
    for query in (
        "",
        "?offset=now",
        "?offset=-1&live=long-poll",
        "?offset=-1&live=sse",
        "?offset=-1&live=ws",
        "?key=x",
    ):
        assert http.get(f"{fresh()}{query}").code == "not_found"
    assert http.get(f"{fresh()}/pk/x").code == "not_found"


def test_bodies_and_types(http: Wire) -> None:
    json_stream = filled(http, "[1, 2]", '{"a": 3}', content_type=JSON)
    array = http.get(json_stream)
    assert (array.body, array["content-type"]) == (b'[1,2,{"a": 3}]', JSON)
    raw = http.get(f"{json_stream}?format=raw")
    assert (raw.body, raw["content-type"]) == (b'12{"a": 3}', BYTES)
    assert http.get(f"{json_stream}?format=json").body == array.body
    assert http.get(f"{json_stream}?offset=now").body == b"[]"
    assert http.get(f"{json_stream}?offset=now&format=raw").body == b""
    text = filled(http, "a", "b")
    assert (http.get(text).body, http.get(text)["content-type"]) == (b"ab", TEXT)
    empty = filled(http)
    assert http.get(empty).body == b""
    assert http.get(empty)["content-length"] == "0"


def test_reading_at_and_before_the_tail(http: Wire) -> None:
    name = filled(http, "a", "b")
    whole = http.get(name)
    assert whole["stream-next-offset"] == whole["stream-end-offset"] == encode_offset(0, 2)
    assert whole["stream-up-to-date"] == "true"
    assert "stream-earliest-offset" not in whole
    assert "stream-cursor" not in whole
    tail = http.get(f"{name}?offset={encode_offset(0, 2).lower()}")
    assert (tail.status, tail.body, tail["stream-next-offset"]) == (200, b"", encode_offset(0, 2))
    assert tail["stream-up-to-date"] == "true"
    assert "etag" in tail
    now = http.get(f"{name}?offset=now")
    assert (now.status, now.body, now["stream-next-offset"]) == (200, b"", encode_offset(0, 2))
    assert (now["stream-up-to-date"], now["cache-control"]) == ("true", "no-store")
    assert "etag" not in now
    http.post(name, stream_closed="true")
    assert http.get(f"{name}?offset=now")["stream-closed"] == "true"
    assert http.get(name)["stream-closed"] == "true"


def test_pages_end_on_entries_and_only_the_last_is_up_to_date(start_server: StartServer) -> None:
    http = Wire(start_server("--read-page-bytes", "10", "--read-page-entries", "4").port)
    name = filled(http, "aaaa", "bbbb", "cccc", "d" * 50, "e", "f", "g", "h", "i")
    http.post(name, stream_closed="true")
    pages: list[bytes] = []
    offset = "-1"
    while True:
        page = http.get(f"{name}?offset={offset}")
        pages.append(page.body)
        offset = page["stream-next-offset"]
        assert page["stream-end-offset"] == encode_offset(0, 9)
        last = offset == encode_offset(0, 9)
        assert ("stream-up-to-date" in page) is last
        assert ("stream-closed" in page) is last, "a partial page of a closed stream does not say so"
        assert page["cache-control"] == IMMUTABLE
        if last:
            break
    assert pages == [b"aaaabbbb", b"cccc", b"d" * 50, b"efgh", b"i"]
    records = filled(http, "[1,2,3,4,5,6]", content_type=JSON)
    assert http.get(records).body == b"[1,2,3,4]"
    http.close()


def test_a_filtered_page_moves_past_what_it_looked_at(http: Wire) -> None:
    name = filled(http)
    for key, body in [("a", "1"), ("b", "2"), ("a", "3"), ("b", "4")]:
        http.post(name, TEXT, body, stream_key=key)
    for path in (f"{name}?key=a", f"{name}/pk/a"):
        answer = http.get(path)
        assert (answer.body, answer["stream-next-offset"], answer["stream-up-to-date"]) == (
            b"13",
            encode_offset(0, 4),
            "true",
        )
    assert http.get(f"{name}/pk/a?offset={encode_offset(0, 1)}").body == b"3"
    assert http.get(f"{name}/pk/a?key=b").body == b"13", "the path decides"
    empty = http.get(f"{name}?key=")
    assert (empty.status, empty.code) == (400, "invalid_request"), "nobody means everything by it"
    none = http.get(f"{name}?key=none")
    assert (none.status, none.body, none["stream-next-offset"]) == (200, b"", encode_offset(0, 4))
    for method in ("PUT", "POST", "DELETE"):
        assert http.call(method, f"{name}/pk/a", {"Content-Type": TEXT}, b"x").status in (400, 405)


@pytest.mark.parametrize("key", ["..", ".", "a%2Fb", "a%2F%2Fb", "%2F", "k" * 1024, "_schema", "pk"])
def test_any_key_can_stand_in_the_path(http: Wire, key: str) -> None:
    name = filled(http)
    http.post(name, TEXT, "x", stream_key=key.replace("%2F", "/"))
    http.post(name, TEXT, "y", stream_key="other")
    assert http.get(f"{name}/pk/{key}").body == b"x"
    assert http.get(f"{name}/pk/%FF").status == 404


def test_since(http: Wire) -> None:
    name = filled(http)
    for second in range(5):
        http.post(name, TEXT, str(second), stream_timestamp=f"2020-01-01T00:00:0{second}Z")
    for since, body in [
        ("2020-01-01T00:00:02Z", b"234"),
        ("2020-01-01T00:00:02.000000001Z", b"34"),
        ("2020-01-01T01:00:03%2B01:00", b"34"),
        ("1577836803000000000", b"34"),
        ("2020-01-01T00:00:05Z", b""),
        ("0", b"01234"),
    ]:
        answer = http.get(f"{name}?since={since}")
        assert (answer.body, answer["stream-next-offset"]) == (body, encode_offset(0, 5))
    assert http.get(f"{name}?since=2020-01-01T00:00:03Z&offset=-1").body == b"01234", "offset wins"
    waiting = http.get(f"{name}?since=2021-01-01T00:00:00Z&live=long-poll&timeout_ms=0")
    assert (waiting.status, waiting["stream-next-offset"]) == (204, encode_offset(0, 5))


def test_the_answer_says_whether_offset_or_since_was_used(http: Wire) -> None:
    name = filled(http)
    for second in range(3):
        http.post(name, TEXT, str(second), stream_timestamp=f"2020-01-01T00:00:0{second}Z")
    since, offset = "since=2020-01-01T00:00:01Z", f"offset={encode_offset(0, 2)}"
    for live in ("", "&live=long-poll", "&live=true"):
        only = http.get(f"{name}?{since}{live}")
        assert (only.body, only["stream-start"]) == (b"12", "since")
        for query in (f"{since}&{offset}", f"{offset}&{since}", f"{offset}&since=nonsense"):
            both = http.get(f"{name}?{query}{live}")
            assert (both.body, both["stream-start"]) == (b"2", "offset"), query
        plain = http.get(f"{name}?{offset}{live}")
        assert plain.body == b"2"
        assert "stream-start" not in plain
    idle = http.get(f"{name}?offset=now&{since}&live=long-poll&timeout_ms=0")
    assert (idle.status, idle["stream-start"]) == (204, "offset")
    now = http.get(f"{name}?offset=now&{since}")
    assert (now.body, now["stream-start"]) == (b"", "offset")
    tag = http.get(f"{name}?{offset}&{since}")["etag"]
    same = http.get(f"{name}?{offset}&{since}", {"If-None-Match": tag})
    assert (same.status, same["stream-start"]) == (304, "offset")
    for query, used in ((since, "since"), (f"{since}&{offset}", "offset")):
        with http.events(f"{name}?{query}&live=sse") as events:
            assert events.head["stream-start"] == used
    assert http.get(f"{name}?{since}&from=1&offsets=2&_=3").body == b"12", "clients send their own parameters"


# -- 10 long-poll


@pytest.mark.parametrize("mode", ["long-poll", "true", "1"])
def test_a_long_poll_answers_at_once_when_there_is_something(http: Wire, mode: str) -> None:
    name = filled(http, "x")
    answer = http.get(f"{name}?offset=-1&live={mode}")
    assert (answer.status, answer.body, answer["stream-up-to-date"]) == (200, b"x", "true")
    assert "stream-cursor" in answer
    assert "etag" in answer
    assert answer["cache-control"] == ("public, max-age=20" if mode == "long-poll" else "no-store")


def test_a_long_poll_waits_for_the_first_commit(http: Wire) -> None:
    name = filled(http, "old")
    with Waiting(http) as waiting:
        polls = [
            waiting.get(f"{name}?offset={offset}&live=long-poll") for offset in ("now", encode_offset(0, 1))
        ]
        http.post(name, TEXT, "new")
        answers = [poll.result() for poll in polls]
    for answer in answers:
        assert (answer.status, answer.body, answer["stream-next-offset"]) == (
            200,
            b"new",
            encode_offset(0, 2),
        )
        assert "stream-cursor" in answer
    assert answers[0]["cache-control"] == "no-store"
    assert "etag" not in answers[0]
    assert answers[1]["cache-control"] == "public, max-age=20"


@pytest.mark.parametrize(
    "wait",
    ["timeout_ms=0", "timeout=0", "timeout=0s", "timeout_ms=30", "timeout=30ms", "timeout=1h&timeout_ms=1"],
)
def test_an_idle_long_poll_is_204(http: Wire, wait: str) -> None:
    name = filled(http, "x")
    answer = http.get(f"{name}?offset={encode_offset(0, 1)}&live=long-poll&{wait}")
    assert answer.status == 204
    assert answer["stream-next-offset"] == answer["stream-end-offset"] == encode_offset(0, 1)
    assert answer["stream-up-to-date"] == "true"
    assert answer["cache-control"] == "no-store"
    assert "stream-cursor" in answer
    assert "stream-closed" not in answer


def test_at_a_closed_tail_a_long_poll_does_not_wait(http: Wire) -> None:
    name = filled(http, "x")
    http.post(name, stream_closed="true")
    for offset in ("now", encode_offset(0, 1)):
        answer = http.get(f"{name}?offset={offset}&live=long-poll")
        assert (answer.status, answer["stream-closed"], answer["stream-up-to-date"]) == (204, "true", "true")
        assert answer["stream-next-offset"] == encode_offset(0, 1)
        assert "stream-cursor" not in answer
    final = http.get(f"{name}?offset=-1&live=long-poll")
    assert (final.status, final.body, final["stream-closed"]) == (200, b"x", "true")
    assert "stream-cursor" not in final


def test_what_ends_a_wait(http: Wire) -> None:
    ends: dict[str, tuple[Callable[[str], object], int]] = {
        "close": (lambda name: http.post(name, stream_closed="true"), 204),
        "append and close": (lambda name: http.post(name, TEXT, "end", stream_closed="true"), 200),
        "delete": (http.delete, 404),
        "soft delete": (
            lambda name: (http.put(f"{name}/fork", stream_forked_from=name), http.delete(name)),
            410,
        ),
    }
    for what, (end, status) in ends.items():
        name = filled(http, "x")
        with Waiting(http) as waiting:
            poll = waiting.get(f"{name}?offset=now&live=long-poll")
            end(name)
            answer = poll.result()
        assert answer.status == status, what
        if status < 300:
            assert (answer["stream-closed"], answer.body) == ("true", b"end" if status == 200 else b"")
            assert "stream-cursor" not in answer


def test_a_wait_on_a_key_passes_over_other_entries(http: Wire) -> None:
    name = filled(http)
    http.post(name, TEXT, "0", stream_key="other")
    with Waiting(http) as waiting:
        poll = waiting.get(f"{name}?offset=-1&live=long-poll&key=mine")
        assert not poll.done(), "what does not match is no answer"
        http.post(name, TEXT, "1", stream_key="other")
        http.post(name, TEXT, "2", stream_key="mine")
        answer = poll.result()
    assert (answer.status, answer.body, answer["stream-next-offset"]) == (200, b"2", encode_offset(0, 3))
    idle = http.get(f"{name}?offset={encode_offset(0, 3)}&live=long-poll&key=mine&timeout_ms=0")
    assert (idle.status, idle["stream-next-offset"]) == (204, encode_offset(0, 3))
    http.post(name, TEXT, "3", stream_key="other")
    passed = http.get(f"{name}?offset={encode_offset(0, 3)}&live=long-poll&key=mine&timeout_ms=0")
    assert (passed.status, passed["stream-next-offset"]) == (204, encode_offset(0, 4))
    http.post(name, stream_closed="true")
    closed = http.get(f"{name}?offset={encode_offset(0, 3)}&live=long-poll&key=mine")
    assert (closed.status, closed["stream-closed"]) == (204, "true")


def test_a_type_that_binds_while_somebody_waits(http: Wire) -> None:
    name = fresh()
    http.put(name)
    with Waiting(http) as waiting:
        poll = waiting.get(f"{name}?offset=now&live=long-poll")
        http.put(name, JSON)
        assert not poll.done()
        http.post(name, JSON, "[1]")
        answer = poll.result()
    assert (answer.body, answer["content-type"]) == (b"[1]", JSON)


def test_the_default_wait_leaves_room_for_clients_with_a_limit_of_five_seconds(
    start_server: StartServer,
) -> None:
    assert Limits().long_poll_default_ms <= Limits().long_poll_max_ms < 4800
    http = Wire(start_server("--long-poll-default-ms", "50", "--long-poll-max-ms", "80").port)
    name = filled(http)
    for wait in ("", "&timeout=1h", "&timeout_ms=100000"):
        assert http.get(f"{name}?offset=now&live=long-poll{wait}").status == 204
    http.close()


def test_a_wait_that_was_shortened_says_so(start_server: StartServer, start_edge: StartEdge) -> None:
    """Asking for more than the server waits is no error: the answer has the limit."""
    waits = {"long_poll_default_ms": "50", "long_poll_max_ms": "80"}
    server = start_server(env={f"TAILRACE_{name.upper()}": value for name, value in waits.items()})
    edge = start_edge(server.base_url, **waits)
    for wire in (Wire(server.port), Wire(edge.port)):
        name = filled(wire)
        for wait, limit in (
            ("timeout=30s", "80"),
            ("timeout_ms=81", "80"),
            ("timeout=80ms", None),
            ("", None),
        ):
            answer = wire.get(f"{name}?offset=now&live=long-poll&{wait}")
            assert (answer.status, answer.get("stream-wait-limit-ms")) == (204, limit), wait
        shortened = wire.get(f"{name}?offset=now&live=long-poll&timeout=1h")
        assert "Stream-Wait-Limit-Ms" in shortened["access-control-expose-headers"]
        wire.close()


def test_a_shortened_wait_for_details_says_so(start_server: StartServer) -> None:
    http = Wire(start_server("--details-max-wait-ms", "80").port)
    name = filled(http, "x")
    tag = http.get(f"{name}/_details")["etag"]
    for wait, limit in (("timeout=30s", "80"), ("timeout=50ms", None)):
        answer = http.get(f"{name}/_details?live=true&{wait}", {"If-None-Match": tag})
        assert (answer.status, answer.get("stream-wait-limit-ms")) == (304, limit)
    http.close()


# -- 13 cursor


def test_cursors(http: Wire) -> None:
    name = filled(http, "x")
    path = f"{name}?offset=-1&live=long-poll"

    def interval() -> int:
        return int(time.time() - CURSOR_ORIGIN_S) // CURSOR_INTERVAL_S

    for given in ("", "&cursor=", "&cursor=abc", "&cursor=-5", "&cursor=1", "&cursor=1.5", "&cursor=%D9%A1"):
        before, found, after = interval(), int(http.get(path + given)["stream-cursor"]), interval()
        assert before <= found <= after
    for ahead in (1, 100, 10**9):
        sent = interval() + ahead
        found = int(http.get(f"{path}&cursor={sent}")["stream-cursor"])
        assert sent < found <= sent + 180
    assert http.get(f"{path}&cursor={interval() + 5}").body == b"x", "it never affects the data"


# -- 14 caching


def test_cache_control_of_every_kind_of_answer(http: Wire) -> None:
    opened, closed = filled(http, "x"), filled(http, "x")
    http.post(closed, stream_closed="true")
    for path, expected in [
        (opened, "no-cache"),
        (f"{opened}?offset={encode_offset(0, 1)}", "no-cache"),
        (closed, IMMUTABLE),
        (f"{closed}?offset={encode_offset(0, 1)}", IMMUTABLE),
        (f"{opened}?offset=now", "no-store"),
        (f"{closed}?offset=now", "no-store"),
        (f"{opened}?offset=-1&live=long-poll", "public, max-age=20"),
        (f"{closed}?offset=-1&live=long-poll", "public, max-age=20"),
        (f"{opened}?offset=-1&live=true", "no-store"),
        (f"{opened}?offset=-1&live=1", "no-store"),
        (f"{opened}?offset={encode_offset(0, 1)}&live=long-poll&timeout_ms=0", "no-store"),
        (f"{closed}?offset={encode_offset(0, 1)}&live=long-poll", "no-store"),
        (fresh(), "no-store"),
    ]:
        assert http.get(path)["cache-control"] == expected, path
    assert http.head(opened)["cache-control"] == "no-store"
    with http.events(f"{opened}?offset=-1&live=sse") as events:
        assert events.head["cache-control"] == "no-cache"


def test_a_lifetime_bounds_what_caches_may_keep(http: Wire) -> None:
    def left(ttl_s: int) -> set[str]:
        """However long the way to the answer took."""
        return {f"public, max-age={seconds}" for seconds in range(ttl_s // 4, ttl_s + 1)}

    for lifetime, expected in [
        ({"stream_ttl": "100"}, left(100)),
        ({"stream_ttl": "1"}, {"public, max-age=1", "no-store"}),
        ({"stream_expires_at": "2200-01-01T00:00:00Z"}, {"public, max-age=31536000"}),
        ({"stream_retention": "1h"}, {"public, max-age=3600"}),
    ]:
        name = filled(http, "x", **lifetime)
        http.post(name, stream_closed="true")
        assert http.get(name)["cache-control"] in expected
    answer = http.get(f"{filled(http, 'x', stream_ttl='19')}?offset=-1&live=long-poll")
    assert answer["cache-control"] in left(19)


def test_tags(http: Wire) -> None:
    name = filled(http, "[1]", "[2]", content_type=JSON)
    start, middle, end = (encode_offset(0, entry) for entry in range(3))
    for query, tag in [
        ("", f'W/"slice:{start}:{end}:key=:fmt=json:filter="'),
        ("?offset=-1", f'W/"slice:{start}:{end}:key=:fmt=json:filter="'),
        (f"?offset={middle.lower()}", f'W/"slice:{middle}:{end}:key=:fmt=json:filter="'),
        ("?format=raw", f'W/"slice:{start}:{end}:key=:fmt=raw:filter="'),
        ("?key=a%22%2C%20%C3%BC", f'W/"slice:{start}:{end}:key=a%22%2C%20%C3%BC:fmt=json:filter="'),
        (f"?offset={end}", f'W/"slice:{end}:{end}:key=:fmt=json:filter="'),
    ]:
        assert http.get(f"{name}{query}")["etag"] == tag
    http.post(name, stream_closed="true")
    assert http.get(name)["etag"] == f'W/"slice:{start}:{end}:key=:fmt=json:filter=:closed"'


def test_if_none_match(http: Wire) -> None:
    name = filled(http, "x")
    tag = http.get(name)["etag"]
    strong = tag.removeprefix("W/")
    for header in (tag, strong, f'"a", {tag}', f'{tag} , W/"b"', "*", f'"x",{strong},"y"'):
        answer = http.get(name, {"If-None-Match": header})
        assert (answer.status, answer.body, answer["etag"]) == (304, b"", tag)
        assert answer["stream-next-offset"] == encode_offset(0, 1)
        assert answer["stream-up-to-date"] == "true"
        assert answer["cache-control"] == "no-cache"
        assert "content-type" not in answer
    assert http.get(name, [("If-None-Match", '"a"'), ("If-None-Match", tag)]).status == 304
    for header in ('"a"', "", strong[1:-1], f'"{tag}"', 'W/"*"'):
        assert http.get(name, {"If-None-Match": header}).status == 200
    # In live modes it is ignored; errors come first; `now` has no tag.
    assert http.get(f"{name}?offset=-1&live=long-poll", {"If-None-Match": tag}).status == 200
    assert http.get(f"{name}?offset=zzz", {"If-None-Match": "*"}).status == 400
    assert http.get(fresh(), {"If-None-Match": "*"}).status == 404
    http.post(name, TEXT, "y")
    assert http.get(name, {"If-None-Match": tag}).body == b"xy"


def test_closing_changes_the_tag(http: Wire) -> None:
    name = filled(http, "x")
    tag = http.get(name)["etag"]
    http.post(name, stream_closed="true")
    answer = http.get(name, {"If-None-Match": tag})
    assert (answer.status, answer["stream-closed"]) == (200, "true")
    closed = http.get(name, {"If-None-Match": answer["etag"]})
    assert (closed.status, closed["stream-closed"], closed["cache-control"]) == (304, "true", IMMUTABLE)
