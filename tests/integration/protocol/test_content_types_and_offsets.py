"""Sections 1 to 3: content types and their late binding, JSON mode, names, offsets, epochs."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from support.wire import Wire, fresh
from tailrace.protocol.offsets import encode_offset

JSON, TEXT, BYTES = "application/json", "text/plain", "application/octet-stream"


# -- 1.1 content type


def test_a_stream_without_a_type_takes_that_of_its_first_append(http: Wire) -> None:
    name = fresh()
    assert http.put(name)["content-type"] == BYTES
    assert http.head(name)["content-type"] == BYTES
    assert http.get(name)["content-type"] == BYTES
    assert http.get(f"{name}?format=json").code == "unsupported_format"
    assert http.post(name, JSON, '[{"n":1}]').status == 204
    assert http.head(name)["content-type"] == JSON
    assert http.get(name).body == b'[{"n":1}]'
    assert http.post(name, TEXT, "x").code == "content_type_mismatch"


def test_a_refused_first_append_binds_nothing(http: Wire) -> None:
    name = fresh()
    http.put(name)
    for content_type, body, more in [
        (JSON, "[", {}),
        (JSON, "[]", {}),
        (TEXT, "x", {"producer_id": "p", "producer_epoch": "0", "producer_seq": "5"}),
    ]:
        assert http.post(name, content_type, body, **more).status in (400, 409)
        assert http.head(name)["content-type"] == BYTES
    assert http.post(name, TEXT, "x").status == 204
    assert http.head(name)["content-type"] == TEXT


def test_a_later_put_binds_an_unset_type_and_another_is_refused(http: Wire) -> None:
    name = fresh()
    assert http.put(name).status == 201
    assert http.put(name).status == 200
    bound = http.put(name, "application/JSON; charset=utf-8")
    assert (bound.status, bound["content-type"]) == (200, "application/JSON; charset=utf-8")
    assert http.put(name, JSON).status == 200
    assert http.put(name).status == 200
    assert http.put(name, TEXT).code == "stream_exists"
    assert http.get(name).body == b"[]"


def test_a_put_with_a_body_and_no_type_binds_bytes_at_once(http: Wire) -> None:
    name = fresh()
    assert http.put(name, None, "abc")["content-type"] == BYTES
    assert http.put(name, JSON).code == "stream_exists"
    assert http.post(name, JSON, "[1]").code == "content_type_mismatch"
    assert http.post(name, BYTES, "[1]").status == 204
    assert http.get(name).body == b"abc[1]"


@pytest.mark.parametrize(
    "same",
    ["application/json", "APPLICATION/JSON", "Application/Json; charset=utf-8", "application/json ;x=y"],
)
def test_types_are_compared_without_parameters_and_case(http: Wire, same: str) -> None:
    name = fresh()
    http.put(name, "application/JSON;charset=utf-8")
    assert http.post(name, same, "[1]").status == 204
    assert http.put(name, same).status == 200
    assert http.head(name)["content-type"] == "application/JSON;charset=utf-8"


@pytest.mark.parametrize(
    "other", ["application/x-ndjson", "application/problem+json", "application/jsonl", "text/json"]
)
def test_only_application_json_is_json(http: Wire, other: str) -> None:
    name = fresh()
    http.put(name, other)
    assert http.post(name, other, "[1,").status == 204
    read = http.get(name)
    assert (read.body, read["content-type"]) == (b"[1,", other)


@pytest.mark.parametrize(
    "bad", ["", "json", "/json", "text/", "a" * 300 + "/x", b"text/\xff\xfe", "text/pl\tain"]
)
def test_a_content_type_is_a_media_type(http: Wire, bad: str | bytes) -> None:
    for method in ("PUT", "POST"):
        name = fresh()
        http.put(name)
        answer = http.call(method, name, {"Content-Type": bad}, b"x")
        assert (answer.status, answer.code) == (400, "invalid_header")
        assert answer.json["error"]["header"] == "Content-Type"


# -- 1.2 JSON mode


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        ("[[1,2],[3]]", "[[1,2],[3]]"),
        ("[[[1]]]", "[[[1]]]"),
        ("{}", "[{}]"),
        ('"x"', '["x"]'),
        ("null", "[null]"),
        ("true", "[true]"),
        ("17", "[17]"),
        (' [ 1.0 , 1e400,\n12345678901234567890 ,"\\u00e9" ] ', '[1.0,1e400,12345678901234567890,"\\u00e9"]'),
        ('[{"b" : 1, "a":2,  "b":3}]', '[{"b" : 1, "a":2,  "b":3}]'),
        ('["\\ud800", "é"]', '["\\ud800","é"]'),
        ("-0.0", "[-0.0]"),
        ("[" * 512 + "]" * 512, "[" * 512 + "]" * 512),
    ],
)
def test_json_is_kept_as_it_was_written(http: Wire, body: str, stored: str) -> None:
    for create in (True, False):
        name = fresh()
        if create:
            assert http.put(name, JSON, body).status == 201
        else:
            http.put(name, JSON)
            assert http.post(name, JSON, body).status == 204
        assert http.get(name).body.decode() == stored


@pytest.mark.parametrize(
    "body",
    [
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"[1,]",
        b"{,}",
        b"[1] [2]",
        b"1 2",
        b"\xef\xbb\xbf[1]",
        b'"\xff"',
        b'"\xc3"',
        b'"\xed\xa0\x80"',
        b"[",
        b'{"a"}',
        b"'a'",
        b"01",
        b"1.",
        b".5",
        b"+1",
        b"0x1",
        b'"\t"',
        b'"\\x"',
        b"nul",
        b"[1 2]",
        b"// c\n1",
        b" ",
        b"\x00",
        b"[" * 513 + b"]" * 513,
        b"[" * 200_000,
        b'{"a":' * 513 + b"1" + b"}" * 513,
    ],
)
def test_what_is_not_json_is_refused_and_nothing_of_it_stored(http: Wire, body: bytes) -> None:
    name = fresh()
    assert http.put(name, JSON, body).code == "invalid_json"
    assert http.head(name).status == 404
    http.put(name, JSON)
    assert http.post(name, JSON, body).code == "invalid_json"
    assert http.get(name).body == b"[]"


def test_an_empty_array_creates_but_appends_nothing(http: Wire) -> None:
    name = fresh()
    created = http.put(name, JSON, " [ ] ")
    assert (created.status, created["stream-next-offset"]) == (201, encode_offset(0, 0))
    answer = http.post(name, JSON, "[ ]")
    assert (answer.status, answer.code) == (400, "empty_array")
    assert http.post(name, JSON, "[ ]", stream_closed="true").code == "empty_array"


def test_a_batch_is_as_many_entries_as_it_has_elements(http: Wire) -> None:
    name = fresh()
    http.put(name, JSON)
    assert http.post(name, JSON, "[1,2,3]")["stream-next-offset"] == encode_offset(0, 3)
    assert http.get(f"{name}?offset={encode_offset(0, 2)}").body == b"[3]"
    text = fresh()
    http.put(text, TEXT)
    assert http.post(text, TEXT, "[1,2,3]")["stream-next-offset"] == encode_offset(0, 1)


# -- 2 names

LONG = "n" * 1024


@pytest.mark.parametrize(
    "path",
    [
        "a%20b",
        "%C3%BC",
        "x/y/z",
        LONG,
        "_schemas",
        "__x"[1:],
        "pk/x",
        "touch/x",
        "_otlp/x",
        "a/pk",
        "a/touch",
        "a%2Fb%2Fc",
        "~!$&'()*+,;=:@",
        "a/hub",
        "hubs/x",
        "...",
        "%25",
        "%2525",
    ],
)
def test_names_that_can_be_used(http: Wire, path: str) -> None:
    raw = f"ok-{fresh()}/{path}" if path not in (LONG, "pk/x", "touch/x", "_otlp/x") else path
    created = http.put(raw.encode(), TEXT, "x")
    assert created.status == 201
    assert created["location"] == f"http://tailrace.test/v1/stream/{raw.encode().decode('latin-1')}"
    assert http.get(raw.encode()).body == b"x"
    assert http.delete(raw.encode()).status == 204


@pytest.mark.parametrize(
    "path",
    [
        "",
        "a/",
        "/a",
        "a//b",
        ".",
        "..",
        "a/./b",
        "a/../b",
        "%2E%2E",
        "a/%2e",
        "a%2F%2Fb",
        "%2F",
        "a%00b",
        "a%0Ab",
        "%7F",
        "a%C2%85b",
        "%FF",
        "a/%C3",
        "%ED%A0%80",
        "n" * 1025,
        "%C3%BC" * 513,
    ],
)
def test_names_that_cannot(http: Wire, path: str) -> None:
    created = http.put(f"/v1/stream/{path}", TEXT)
    assert (created.status, created.code) == (400, "invalid_name")
    for method in ("GET", "HEAD", "POST", "DELETE"):
        assert http.call(method, f"/v1/stream/{path}", {"Content-Type": TEXT}, b"x").status == 404


@pytest.mark.parametrize(
    "path",
    [
        "__x",
        "__x/y",
        "__ds",
        "__registry",
        "%5F%5Fx",
        "%5F_ds/subscriptions/x",
        "a/_schema",
        "_schema",
        "a/_profile",
        "a/_search",
        "a/_aggregate",
        "a/_routing_keys",
        "a/_index_status",
        "a/_details",
        "a/_otlp",
        "a/pk/k",
        "a/p%6B/k",
        "a%2Fpk%2Fk",
        "a/pk/b/c",
        "a/touch/x",
        "a/_otlp/v1/traces",
        "hub",
        "hub/x",
        "h%75b/x",
    ],
)
def test_names_that_are_reserved(http: Wire, path: str) -> None:
    created = http.put(path, TEXT)
    assert created.status in ((404, 405) if path == "__ds" else (400,))
    if path != "__ds":
        assert created.code == "reserved_name"


def test_names_of_the_hub_are_its_own(http: Wire) -> None:
    assert http.get("hub/x").status == http.head("hub/x").status == 404
    for method in ("POST", "DELETE"):
        answer = http.call(method, "hub/x", {"Content-Type": JSON}, b"[1]")
        assert (answer.status, answer.code) == (405, "read_only_stream")


def test_a_percent_encoded_slash_is_a_slash(http: Wire) -> None:
    name = fresh()
    http.put(name, TEXT, "x")
    assert http.get(name.replace("/", "%2F")).body == b"x"
    assert http.get(name.replace("/", "%2f")).body == b"x"
    assert http.put(name.replace("/", "%2F"), TEXT).status == 200


def test_a_sub_resource_that_is_not_here_is_not_found(http: Wire) -> None:
    name = fresh()
    http.put(name, JSON)
    for method in ("GET", "POST"):
        answer = http.call(method, f"{name}/_otlp/v1/logs", {"Content-Type": JSON}, b"{}")
        assert (answer.status, answer.code) == (404, "not_found")


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_system_streams_are_read_only(http: Wire, method: str) -> None:
    answer = http.call(method, "__registry__", {"Content-Type": JSON}, b"[1]")
    assert (answer.status, answer.code) == (405, "read_only_stream")
    assert answer["allow"] == "GET, HEAD, OPTIONS"
    assert http.get("__registry__").status == http.head("__registry__").status == 200


# -- 3 offsets


def test_offsets_are_26_digits_that_sort(http: Wire) -> None:
    name = fresh()
    assert http.put(name, TEXT)["stream-next-offset"] == "00000000000000000000000000"
    seen = [http.post(name, TEXT, "x")["stream-next-offset"] for _ in range(8)]
    assert seen[:2] == ["00000000000000000004000000", "00000000000000000008000000"]
    assert seen[7] == "00000000000000000010000000"
    assert seen == sorted(seen)


def test_accepted_forms_of_an_offset(http: Wire) -> None:
    name = fresh()
    http.put(name, TEXT)
    for letter in "abc":
        http.post(name, TEXT, letter)
    for offset, body in [
        ("-1", b"abc"),
        (encode_offset(0, 0), b"abc"),
        (encode_offset(0, 1).lower(), b"bc"),
        ("0000000000000000_0000000000000000", b"abc"),
        ("0000000000000000_0000000000000002", b"c"),
        (encode_offset(0, 3), b""),
        ("now", b""),
    ]:
        answer = http.get(f"{name}?offset={offset}")
        assert (answer.status, answer.body) == (200, body)
        assert answer["stream-next-offset"] == encode_offset(0, 3)
    assert http.get(name).body == b"abc"


BAD_OFFSETS = [
    "",
    "0",
    "17",
    "+1",
    "-2",
    "-01",
    "NOW",
    "now%00",
    "%20now",
    "now%20",
    "-1%0A",
    f"{encode_offset(0, 1)}%0A",
    f"%20{encode_offset(0, 1)}",
    f"{encode_offset(0, 1)}%00",
    encode_offset(0, 1)[:-1],
    encode_offset(0, 1) + "0",
    "8" + encode_offset(0, 1)[1:],
    "I" + encode_offset(0, 1)[1:],
    encode_offset(0, 1)[:5] + "-" + encode_offset(0, 1)[6:],
    encode_offset(0, 1)[:25] + "1",
    "U" * 26,
    "..",
    "a/b",
    "1,2",
    "%00",
    "9999999999999999_9999999999999999",
    "0000000004294967296_0000000000000000",
    "0000000000000000-0000000000000000",
    "000000000000000_0000000000000000",
    "%D9%A0" * 26,
    "0000000000000000_000000000000000%D9%A0",
    f"{encode_offset(0, 1)}&offset={encode_offset(0, 1)}",
]


@pytest.mark.parametrize("offset", BAD_OFFSETS)
def test_everything_else_is_no_offset(http: Wire, offset: str) -> None:
    name = fresh()
    http.put(name, TEXT, "x")
    for mode in ("", "&live=long-poll", "&live=sse"):
        answer = http.get(f"{name}?offset={offset}{mode}")
        assert (answer.status, answer.code) == (400, "invalid_offset")


def test_positions_that_are_not_there(http: Wire) -> None:
    name = fresh()
    http.put(name, TEXT, "x")
    for offset in (
        encode_offset(0, 2),
        encode_offset(1, 0),
        encode_offset(1, 1),
        encode_offset(2**32 - 1, 2**64 - 1),
        "0000000000000000_9999999999999999",
    ):
        answer = http.get(f"{name}?offset={offset}")
        assert (answer.status, answer.code) == (400, "offset_beyond_tail")


def test_a_name_used_again_has_a_new_epoch_and_old_offsets_are_gone(http: Wire) -> None:
    name = fresh()
    http.put(name, TEXT, "old")
    http.post(name, TEXT, "old")
    tag = http.get(name)["etag"]
    for epoch in (1, 2):
        assert http.delete(name).status == 204
        created = http.put(name, TEXT, "new")
        assert (created.status, created["stream-next-offset"]) == (201, encode_offset(epoch, 1))
        assert http.get(name, {"If-None-Match": tag}).body == b"new"
        for offset in (encode_offset(0, 1), encode_offset(0, 2), encode_offset(epoch - 1, 1)):
            answer = http.get(f"{name}?offset={offset}")
            assert (answer.status, answer.code) == (410, "offset_gone")
            assert answer.json["error"]["earliest_offset"] == encode_offset(epoch, 0)
        assert http.get(f"{name}?offset={encode_offset(0, 0)}").body == b"new"
        assert http.get(f"{name}?offset={encode_offset(epoch, 0)}").body == b"new"
        assert http.head(name)["stream-earliest-offset"] == encode_offset(epoch, 0)
        assert http.get(f"{name}?offset={encode_offset(epoch + 1, 0)}").code == "offset_beyond_tail"


def test_names_may_be_any_language(http: Wire) -> None:
    name = f"{fresh()}/Grüße/日本/\U0001f30a"
    path = quote(name)
    assert http.put(path, JSON).status == 201
    assert http.get(path).status == 200
    raw = http.put(name.encode(), JSON)
    assert (raw.status, raw.code) == (400, "invalid_request"), "a request target is ASCII"
