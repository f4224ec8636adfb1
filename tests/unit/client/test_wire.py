"""Requests as they go out, values as they are encoded."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from support.steps import OFFSET, answer, header
from tailrace.client import model, transport, wire
from tailrace.client.errors import ClientError, error_from
from tailrace.client.model import Page

JSON = "application/json"


def test_names_are_encoded_segment_by_segment() -> None:
    assert wire.stream_path("a b/ü/c%2F?") == "/v1/stream/a%20b/%C3%BC/c%252F%3F"


@pytest.mark.parametrize("unreachable", ["", ".", "..", "a/../b", "./a", "a/.."])
def test_a_name_that_would_lead_to_another_stream_is_refused(unreachable: str) -> None:
    with pytest.raises(ClientError) as caught:
        wire.stream_path(unreachable)
    assert caught.value.code == "invalid_name"
    assert wire.stream_path("a/...b/.c") == "/v1/stream/a/...b/.c"


@pytest.mark.parametrize("value", ["", "a\r\nX: y", "a\n", "\x00", " a", "a\t", "\x7f"])
def test_a_header_value_cannot_forge_a_header(value: str) -> None:
    with pytest.raises(ValueError, match="Stream-Key"):
        wire.append("s", b"x", content_type=JSON, key=value)


def test_create_headers() -> None:
    lifetime: wire.Lifetime = {"ttl": timedelta(hours=1), "retention": "7d", "retention_bytes": 5}
    request = wire.create("s", content_type=JSON, lifetime=lifetime, closed=True, body=b"")
    assert dict(request.headers) == {
        "Content-Type": b"application/json",
        "Stream-TTL": b"3600",
        "Stream-Retention": b"7d",
        "Stream-Retention-Bytes": b"5",
        "Stream-Closed": b"true",
    }


def test_times() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    assert wire.time_text(moment) == "2026-01-02T03:04:05.000006+00:00"
    assert wire.time_text(1) == "1"
    with pytest.raises(ValueError, match="zone"):
        wire.time_text(datetime(2026, 1, 1))  # noqa: DTZ001 - naive on purpose
    with pytest.raises(ValueError, match="whole seconds"):
        wire.create("s", content_type=None, lifetime={"ttl": timedelta(seconds=1.5)}, closed=False, body=b"")


def test_the_zone_of_a_time_survives_the_query() -> None:
    since = datetime(2026, 1, 1, tzinfo=UTC)
    assert wire.read("s", offset=None, since=since).path.endswith("?since=2026-01-01T00%3A00%3A00%2B00%3A00")


def test_fork_headers() -> None:
    fork = wire.ForkPoint(source="a b", offset=OFFSET, sub_offset=0)
    request = wire.create("s", content_type=None, lifetime={}, closed=False, body=b"", fork=fork)
    assert header(request, "Stream-Forked-From") == b"/v1/stream/a%20b"
    assert header(request, "Stream-Fork-Sub-Offset") == b"0"


def test_only_what_is_safe_is_repeatable() -> None:
    producing = wire.ProducerFields("p", 0, 0)
    assert wire.append("s", b"x", content_type=JSON, producing=producing).repeatable
    assert wire.append("s", b"", content_type=None, close=True).repeatable
    assert not wire.append("s", b"x", content_type=JSON).repeatable
    assert not wire.append("s", b"x", content_type=JSON, close=True).repeatable


class Row(msgspec.Struct, array_like=True):
    a: int
    b: int


@pytest.mark.parametrize(
    ("data", "body", "parts"),
    [
        ({"a": 1}, b'{"a":1}', [b'{"a":1}']),
        ([1, [2]], b"[1,[2]]", [b"1", b"[2]"]),
        ((1, 2), b"[1,2]", [b"1", b"2"]),
        ("text", b'"text"', [b'"text"']),
        (None, b"null", [b"null"]),
        (2**70, b"1180591620717411303424", [b"1180591620717411303424"]),
        (b' [1.0, {"b":  2}] ', b' [1.0, {"b":  2}] ', [b"1.0", b'{"b":  2}']),
        (b"1e400", b"1e400", [b"1e400"]),
        (bytearray(b"7"), b"7", [b"7"]),
        (memoryview(b"7"), b"7", [b"7"]),
        (msgspec.Raw(b"[1]"), b"[1]", [b"[1]"]),
        ({1}, b"[[1]]", [b"[1]"]),  # one message: only lists and tuples are batches
        (Row(1, 2), b"[[1,2]]", [b"[1,2]"]),
    ],
)
def test_json_data(data: Any, body: bytes, parts: list[bytes]) -> None:
    assert model.encode_body(data, JSON) == body
    assert model.encode_parts(data, JSON) == parts


def test_byte_data() -> None:
    assert model.encode_body("é", "text/plain") == b"\xc3\xa9"
    assert model.encode_parts(b"[1,2]", "text/plain") == [b"[1,2]"]
    assert model.join_parts([b"a", b"b"], "text/plain") == b"ab"
    for data in ({"a": 1}, [b"a"], 1, None):
        with pytest.raises(TypeError, match="text/plain"):
            model.encode_body(data, "text/plain")


def test_what_the_data_says_about_the_type() -> None:
    assert model.implied_type({"a": 1}) == JSON
    assert model.implied_type(b"") is None
    assert model.implied_type("x") is None


def test_groups_are_bounded() -> None:
    cut = list(model.group_parts([1, 22, b"333", 4], JSON, bytes_max=6, count_max=2))
    assert cut == [[b"1", b"22"], [b"333", b"4"]]
    assert list(model.group_parts([b"a", "b"], "text/plain", bytes_max=99, count_max=9)) == [[b"a"], [b"b"]]
    assert list(model.group_parts([], JSON, bytes_max=1, count_max=1)) == []


def test_a_page_keeps_what_python_numbers_cannot() -> None:
    body = b'[1e400,12345678901234567890123,"\\ud800", {"a":1.0}]'
    page = Page(body=body, content_type="Application/JSON; charset=utf-8", next_offset=OFFSET)
    assert page.entries == [float("inf"), 12345678901234567890123, "\ud800", {"a": 1.0}]
    assert Page(body=b"[]", content_type=JSON, next_offset=OFFSET).is_empty
    assert Page(body=b"[]", content_type="text/plain", next_offset=OFFSET).entries == [b"[]"]
    exact = Page(body=b'[1e400, {"a" :1.0}]', content_type=JSON, next_offset=OFFSET)
    assert exact.raw_entries == [b"1e400", b'{"a" :1.0}']
    texts = [b'{"a": "\\ud800,["}', '"ü"'.encode(), b"[1 , 2]", b"1e400"]
    lone = Page(body=b"[" + b" ,\n".join(texts) + b"]", content_type=JSON, next_offset=OFFSET)
    assert lone.raw_entries == texts, "text that was cut within a character is still a message"
    long = b"9" * 5000  # more digits than Python converts to a number
    assert Page(body=b'["\\ud800",%b]' % long, content_type=JSON, next_offset=OFFSET).raw_entries[1] == long
    assert wire.parse_number("9" * 5000) is None


def test_errors_carry_what_the_server_said() -> None:
    body = b'{"error":{"code":"payload_too_large","message":"too much","limit_bytes":10}}'
    error = error_from(413, {"x": "y"}, body)
    assert (error.code, error.status, error.message) == ("payload_too_large", 413, "too much")
    assert error.extra == {"limit_bytes": 10}
    assert str(error) == "too much (payload_too_large, HTTP 413)"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error":"no"}', b'{"error":{"code":5}}'])
def test_a_foreign_error_is_still_an_error(body: bytes) -> None:
    assert error_from(502, {}, body).code == "http_502"


@pytest.mark.parametrize(
    ("status", "challenge", "code", "message"),
    [
        (404, None, "not_found", "stream 'orders' not found"),
        (410, None, "stream_gone", "the stream was deleted; its forks still exist"),
        (401, 'Bearer realm="tailrace"', "unauthorized", "missing bearer token"),
        (401, 'Bearer error_description="the token has expired"', "unauthorized", "the token has expired"),
        (403, 'Bearer error="insufficient_scope", scope="read"', "forbidden", "requires scope read"),
        (403, None, "forbidden", "the token does not cover this stream"),
        (502, None, "http_502", "unexpected status 502"),
    ],
)
def test_a_refusal_without_a_body_is_told_in_words(
    status: int, challenge: str | None, code: str, message: str
) -> None:
    headers = {} if challenge is None else {"www-authenticate": challenge}
    with pytest.raises(ClientError) as caught:
        wire.check_head("orders", wire.HttpResponse(status, headers))
    assert (caught.value.status, caught.value.code, caught.value.message) == (status, code, message)


def test_a_token_may_end_with_a_line() -> None:
    given = transport.make_settings(
        "http://x", token="abc\n", timeout_s=1.0, connect_timeout_s=1.0, retries=None
    )
    assert given.authorization() == b"Bearer abc"


@pytest.mark.parametrize("wrong", ["a\nb", "a b", "ü"])
def test_a_token_that_cannot_travel_is_not_shown(wrong: str) -> None:
    given = transport.make_settings(
        "http://x", token=wrong, timeout_s=1.0, connect_timeout_s=1.0, retries=None
    )
    with pytest.raises(ValueError, match="the token must be printable") as caught:
        given.authorization()
    assert wrong not in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:1", "http://[::1", "http://", "http://x:port"])
def test_a_base_url_is_checked_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="base_url"):
        transport.make_settings(url, token=None, timeout_s=1.0, connect_timeout_s=1.0, retries=None)


def test_an_answer_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ClientError, match="is this a Tailrace server"):
        wire.parse_page(answer(200, b"<html>"))
    with pytest.raises(ClientError, match="unexpected status 302"):
        wire.check_status(answer(302), 200)
    with pytest.raises(ClientError, match="malformed list"):
        wire.parse_list(answer(200, b"<html>"))


@pytest.mark.parametrize(
    ("status", "code"), [(429, "overloaded"), (503, "unavailable"), (507, "insufficient_storage")]
)
def test_a_head_that_is_refused_for_now_has_the_code_of_other_requests(status: int, code: str) -> None:
    # It has no body that could say so.
    with pytest.raises(ClientError) as caught:
        wire.check_head("s", wire.HttpResponse(status, {}, b""))
    assert (caught.value.code, caught.value.status) == (code, status)
