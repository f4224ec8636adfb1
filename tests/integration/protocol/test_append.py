"""Sections 6 to 8: appending, producers, closing."""

from __future__ import annotations

import pytest

from conftest import StartServer
from support.wire import Answer, Wire, fresh
from tailrace.protocol.offsets import encode_offset

JSON, TEXT = "application/json", "text/plain"


def produce(http: Wire, name: str, epoch: int, seq: int, body: str | None = "x", **more: str) -> Answer:
    kind = None if body is None else TEXT
    return http.post(
        name, kind, body, producer_id="p", producer_epoch=str(epoch), producer_seq=str(seq), **more
    )


def text_stream(http: Wire, body: str | None = None) -> str:
    name = fresh()
    assert http.put(name, TEXT, body).status == 201
    return name


# -- 6.1 request


@pytest.mark.parametrize(
    ("content_type", "body", "headers", "status", "code"),
    [
        (TEXT, None, {}, 400, "empty_body"),
        (TEXT, "", {}, 400, "empty_body"),
        (TEXT, "", {"stream_closed": "1"}, 400, "empty_body"),
        (TEXT, "", {"stream_closed": "yes"}, 400, "empty_body"),
        (TEXT, "", {"stream_closed": "false"}, 400, "empty_body"),
        (None, "x", {}, 400, "missing_content_type"),
        (None, "x", {"stream_closed": "true"}, 400, "missing_content_type"),
        (JSON, "[1]", {}, 409, "content_type_mismatch"),
        (JSON, "not json", {}, 409, "content_type_mismatch"),
        (JSON, "[]", {}, 409, "content_type_mismatch"),
        (TEXT, "x", {"stream_seq": ""}, 400, "invalid_header"),
        (TEXT, "x", {"stream_seq": "s" * 1025}, 400, "invalid_header"),
        (TEXT, "x", {"stream_seq": "s" * 1024}, 204, None),
        (TEXT, "x", {"stream_key": ""}, 400, "invalid_header"),
        (TEXT, "x", {"stream_key": "k" * 1025}, 400, "invalid_header"),
        (TEXT, "x", {"stream_key": "k" * 1024}, 204, None),
        (TEXT, "x", {"stream_timestamp": ""}, 400, "invalid_header"),
        (TEXT, "x", {"stream_timestamp": "now"}, 400, "invalid_header"),
        (TEXT, "x", {"stream_timestamp": "-5"}, 400, "invalid_header"),
        (TEXT, "x", {"stream_timestamp": "1.5"}, 400, "invalid_header"),
        (TEXT, "x", {"stream_timestamp": "2026-01-01"}, 400, "invalid_header"),
        (TEXT, "x", {"stream_timestamp": "99999999999999999999"}, 400, "invalid_header"),
        (TEXT, "x", {"stream_timestamp": "2026-01-01T00:00:00.123456789+01:00"}, 204, None),
        (TEXT, "x", {"stream_timestamp": "1767225600000000000"}, 204, None),
        (TEXT, "x", {"stream_timestamp": "9999-12-31T23:59:59Z"}, 204, None),
        (TEXT, "x", {"stream_timestamp": "1960-01-01T00:00:00Z"}, 204, None),
        (TEXT, "x", {"stream_timestamp": "0"}, 204, None),
        ("Text/Plain; charset=latin-1", "x", {}, 204, None),
    ],
)
def test_requests_and_their_answers(
    http: Wire,
    content_type: str | None,
    body: str | None,
    headers: dict[str, str],
    status: int,
    code: str | None,
) -> None:
    name = text_stream(http)
    answer = http.post(name, content_type, body, **headers)
    assert (answer.status, answer.code) == (status, code)
    assert http.get(name).body == (b"" if code else b"x")


def test_appending_to_what_is_not_there(http: Wire) -> None:
    assert http.post(fresh(), TEXT, "x").code == "not_found"
    assert http.post(fresh(), None, None).code == "not_found", "existence comes before syntax"
    assert http.post(fresh(), TEXT, "x", stream_seq="").code == "not_found"


@pytest.mark.parametrize("raw", [b"\xff", b"k\xc3"])
def test_keys_and_producers_are_utf8(http: Wire, raw: bytes) -> None:
    name = text_stream(http)
    assert http.call("POST", name, {"Content-Type": TEXT, "Stream-Key": raw}, b"x").code == "invalid_header"
    bad = {"Content-Type": TEXT, "Producer-Id": raw, "Producer-Epoch": "0", "Producer-Seq": "0"}
    assert http.call("POST", name, bad, b"x").code == "invalid_header"
    sequenced = http.call("POST", name, {"Content-Type": TEXT, "Stream-Seq": raw}, b"x")
    assert sequenced.status == 204, "a sequence is compared as bytes, whatever they are"


@pytest.mark.parametrize("key", ["k", "gr\u00fc\u00dfe", "\u65e5\u672c", "a b,c;d=e", "%41", "\U0001f30a"])
def test_keys_select_exactly(http: Wire, key: str) -> None:
    name = text_stream(http)
    http.call("POST", name, {"Content-Type": TEXT, "Stream-Key": key.encode()}, b"1")
    http.post(name, TEXT, "2")
    http.call("POST", name, {"Content-Type": TEXT, "Stream-Key": key.encode() + b"x"}, b"3")
    http.call("POST", name, {"Content-Type": TEXT, "Stream-Key": key.encode()}, b"4")
    encoded = "".join(f"%{byte:02X}" for byte in key.encode())
    assert http.get(f"{name}?key={encoded}").body == b"14"
    assert http.get(f"{name}/pk/{encoded}").body == b"14"
    assert http.get(f"{name}?key={encoded}x").body == b"3"


# -- 6.2 precedence


def test_the_first_failing_check_decides(http: Wire) -> None:
    name = fresh()
    http.put(name, JSON)
    # Header syntax before the body, the body before its type, JSON before the state.
    assert http.post(name, None, "", stream_seq="", stream_closed="no").code == "invalid_header"
    assert http.post(name, None, "[", producer_id="p").code == "invalid_header"
    assert http.post(name, None, "[").code == "missing_content_type"
    assert http.post(name, JSON, "[1]", stream_seq="5").status == 204
    assert http.post(name, JSON, "[", stream_seq="1").code == "invalid_json"
    # The type before the producer, the producer before the sequence.
    gap = {"producer_id": "q", "producer_epoch": "0", "producer_seq": "7"}
    assert http.post(name, TEXT, "x", stream_seq="1", **gap).code == "content_type_mismatch"
    assert http.post(name, JSON, "[1]", stream_seq="1", **gap).code == "producer_gap"
    # A duplicate wins over an old sequence.
    first = {"producer_id": "q", "producer_epoch": "0", "producer_seq": "0"}
    assert http.post(name, JSON, "[1]", stream_seq="6", **first).status == 200
    assert http.post(name, JSON, "[1]", stream_seq="6", **first).status == 204
    # Closed before everything of the state, after syntax and JSON.
    http.post(name, stream_closed="true")
    assert http.post(name, TEXT, "x", stream_seq="1", **gap).code == "stream_closed"
    assert http.post(name, JSON, "[").code == "invalid_json"
    assert http.post(name, JSON, "[1]", stream_timestamp="x").code == "invalid_header"


def test_sequences_are_compared_as_bytes(http: Wire) -> None:
    for accepted, refused in [("2", "10"), ("2", "2"), ("b", "B"), ("a", ""), ("\u00e9", "z"), ("10", "09")]:
        name = text_stream(http)
        assert (
            http.call("POST", name, {"Content-Type": TEXT, "Stream-Seq": accepted.encode()}, b"x").status
            == 204
        )
        answer = http.call("POST", name, {"Content-Type": TEXT, "Stream-Seq": refused.encode()}, b"y")
        if not refused:
            assert answer.code == "invalid_header"
            continue
        assert (answer.status, answer.code) == (409, "seq_conflict")
        assert answer["stream-expected-seq"].encode("latin-1").decode() == accepted
        assert answer["stream-received-seq"] == refused
        assert http.get(name).body == b"x"
    name = text_stream(http)
    for accepted in ("09", "10", "100", "2", "B", "a", "aa"):
        assert http.post(name, TEXT, "x", stream_seq=accepted).status == 204


def test_a_refused_append_changes_no_sequence(http: Wire) -> None:
    name = text_stream(http)
    assert http.post(name, JSON, "[1]", stream_seq="9").code == "content_type_mismatch"
    assert http.post(name, TEXT, "x", stream_seq="1").status == 204
    assert produce(http, name, 0, 0, stream_seq="0").code == "seq_conflict"
    assert produce(http, name, 0, 1).code == "producer_gap", "the refused one did not count"


def test_timestamps_never_go_back_and_never_far_ahead(http: Wire) -> None:
    name = text_stream(http)
    for letter, stamp in [
        ("a", "2001-01-01T00:00:00Z"),
        ("b", "2000-01-01T00:00:00Z"),
        ("c", "2002-01-01T00:00:00Z"),
        ("d", "3000-01-01T00:00:00Z"),
    ]:
        http.post(name, TEXT, letter, stream_timestamp=stamp)
    assert http.get(f"{name}?since=2000-06-01T00:00:00Z").body == b"abcd"
    assert http.get(f"{name}?since=2001-01-01T00:00:00.000000001Z").body == b"cd"
    assert http.get(f"{name}?since=2002-01-01T00:00:00Z").body == b"cd"
    assert http.get(f"{name}?since=2002-01-01T00:00:01Z").body == b"d"
    assert http.get(f"{name}?since=2990-01-01T00:00:00Z").body == b"", "at most five minutes ahead"


# -- 6.3 response


def test_a_plain_append_is_204(http: Wire) -> None:
    name = text_stream(http)
    answer = http.post(name, TEXT, "x")
    assert (answer.status, answer["stream-next-offset"]) == (204, encode_offset(0, 1))
    assert not [header for header, _ in answer.headers if header.startswith("producer-")]
    assert "stream-closed" not in answer


def test_prefer_representation(http: Wire) -> None:
    name = fresh()
    http.put(name, JSON)

    def represented(body: str | None, **more: str) -> Answer:
        answer = http.post(name, JSON, body, prefer="return=representation", **more)
        assert (answer.status, answer["preference-applied"]) == (200, "return=representation")
        assert answer["content-type"].startswith("application/json")
        assert answer.json["next_offset"] == answer["stream-next-offset"]
        return answer

    assert represented("[1,2]").json == {"next_offset": encode_offset(0, 2), "count": 2, "closed": False}
    producer = {"producer_id": "p", "producer_epoch": "0", "producer_seq": "0"}
    assert represented("[3]", **producer).json["count"] == 1
    duplicate = represented("[3]", **producer)
    assert duplicate.json["count"] == 0
    assert (duplicate["producer-epoch"], duplicate["producer-seq"]) == ("0", "0")
    closing = represented(None, stream_closed="true")
    assert closing.json == {"next_offset": encode_offset(0, 3), "count": 0, "closed": True}
    assert closing["stream-closed"] == "true"
    refused = http.post(name, JSON, "[1]", prefer="return=representation")
    assert refused.code == "stream_closed"
    assert "preference-applied" not in refused
    plain = fresh()
    http.put(plain, TEXT)
    assert http.post(plain, TEXT, "x", prefer="return=minimal").status == 204


# -- 7 producers


@pytest.mark.parametrize(
    "headers",
    [
        {"producer_id": "p"},
        {"producer_epoch": "0"},
        {"producer_seq": "0"},
        {"producer_id": "p", "producer_epoch": "0"},
        {"producer_id": "p", "producer_seq": "0"},
        {"producer_epoch": "0", "producer_seq": "0"},
        {"producer_id": "", "producer_epoch": "0", "producer_seq": "0"},
        {"producer_id": "p" * 257, "producer_epoch": "0", "producer_seq": "0"},
        *(
            {"producer_id": "p", "producer_epoch": epoch, "producer_seq": seq}
            for bad in (
                "",
                "-1",
                "1abc",
                "0xyz",
                "1e3",
                "1.0",
                "+1",
                " 1 2",
                "9007199254740992",
                "99999999999999999999",
            )
            for epoch, seq in ((bad, "0"), ("0", bad))
        ),
    ],
)
def test_producer_headers_come_together_and_are_numbers(http: Wire, headers: dict[str, str]) -> None:
    name = text_stream(http)
    for body in ("x", None):
        closing = {} if body else {"stream_closed": "true"}
        answer = http.post(name, TEXT if body else None, body, **headers, **closing)
        assert (answer.status, answer.code) == (400, "invalid_header")
        assert answer.json["error"]["header"].startswith("Producer-")
    assert "stream-closed" not in http.head(name)


def test_the_largest_numbers_and_ids(http: Wire) -> None:
    name = text_stream(http)
    top = str(2**53 - 1)
    assert (
        http.post(name, TEXT, "x", producer_id="p" * 256, producer_epoch=top, producer_seq="0").status == 200
    )
    assert (
        http.post(name, TEXT, "x", producer_id="p" * 256, producer_epoch=top, producer_seq=top).code
        == "producer_gap"
    )


def test_the_table_of_producers(http: Wire) -> None:
    name = text_stream(http)
    unknown = produce(http, name, 0, 3)
    assert (unknown.status, unknown.code) == (409, "producer_gap")
    assert (unknown["producer-expected-seq"], unknown["producer-received-seq"]) == ("0", "3")
    accepted = produce(http, name, 2, 0)
    assert (accepted.status, accepted["producer-epoch"], accepted["producer-seq"]) == (200, "2", "0")
    assert accepted["stream-next-offset"] == encode_offset(0, 1)
    assert produce(http, name, 2, 1).status == 200
    stale = produce(http, name, 1, 2)
    assert (stale.status, stale.code, stale["producer-epoch"]) == (403, "stale_epoch", "2")
    assert stale.json["error"]["current_epoch"] == 2
    for seq in (0, 1):
        duplicate = produce(http, name, 2, seq, "another body")
        assert (duplicate.status, duplicate["producer-epoch"], duplicate["producer-seq"]) == (204, "2", "1")
        assert duplicate["stream-next-offset"] == encode_offset(0, 2)
    gap = produce(http, name, 2, 3)
    assert (gap.status, gap["producer-expected-seq"], gap["producer-received-seq"]) == (409, "2", "3")
    jump = produce(http, name, 3, 1)
    assert (jump.status, jump.code) == (400, "invalid_header")
    assert produce(http, name, 3, 0).status == 200
    assert produce(http, name, 2, 2).code == "stale_epoch"
    assert http.get(name).body == b"xxx"


def test_a_sequence_counts_requests_and_refusals_do_not_count(http: Wire) -> None:
    name = fresh()
    http.put(name, JSON)
    producer = {"producer_id": "p", "producer_epoch": "0"}
    assert http.post(name, JSON, "[1,2,3]", producer_seq="0", **producer).status == 200
    for body, status in [("[", 400), ("[]", 400)]:
        assert http.post(name, JSON, body, producer_seq="1", **producer).status == status
    assert http.post(name, TEXT, "x", producer_seq="1", **producer).status == 409
    assert http.post(name, JSON, "[4]", producer_seq="1", **producer).status == 200
    other = {"producer_id": "q", "producer_epoch": "0"}
    assert http.post(name, JSON, "[5]", producer_seq="0", **other).status == 200
    assert http.get(name).body == b"[1,2,3,4,5]"


# -- 8 closing


@pytest.mark.parametrize("value", ["true", "TRUE", "True", "tRuE"])
def test_closing_alone(http: Wire, value: str) -> None:
    name = text_stream(http, "x")
    for _ in range(2):
        answer = http.post(name, None, None, stream_closed=value)
        assert (answer.status, answer["stream-closed"], answer["stream-next-offset"]) == (
            204,
            "true",
            encode_offset(0, 1),
        )
    answer = http.post(name, "application/nonsense", None, stream_closed=value)
    assert answer.status == 204, "the type of an empty body is not looked at"
    assert http.post(name, "nonsense", None, stream_closed=value).status == 204
    assert http.post(text_stream(http), "nonsense", None).code == "empty_body"


@pytest.mark.parametrize("value", ["1", "yes", "", "false", "true,true", "truee"])
def test_other_values_do_not_close(http: Wire, value: str) -> None:
    name = text_stream(http)
    assert http.post(name, TEXT, "x", stream_closed=value).status == 204
    assert http.post(name, TEXT, "y").status == 204


def test_what_a_closed_stream_answers(http: Wire) -> None:
    name = text_stream(http)
    closing = http.post(name, TEXT, "last", stream_closed="true")
    assert (closing.status, closing["stream-closed"], closing["stream-next-offset"]) == (
        204,
        "true",
        encode_offset(0, 1),
    )
    for answer in (
        http.post(name, TEXT, "x"),
        http.post(name, TEXT, "last", stream_closed="true"),
        http.post(name, JSON, "[1]"),
        produce(http, name, 0, 0),
        produce(http, name, 0, 0, None, stream_closed="true"),
    ):
        assert (answer.status, answer.code) == (409, "stream_closed")
        assert (answer["stream-closed"], answer["stream-next-offset"]) == ("true", encode_offset(0, 1))
        assert "producer-epoch" not in answer
    assert http.get(name).body == b"last"


def test_closing_by_a_producer(http: Wire) -> None:
    name = text_stream(http)
    assert produce(http, name, 1, 0).status == 200
    closed = produce(http, name, 1, 1, "end", stream_closed="true")
    assert (closed.status, closed["stream-closed"], closed["producer-seq"]) == (200, "true", "1")
    for again in (
        produce(http, name, 1, 1, "end", stream_closed="true"),
        produce(http, name, 1, 1, "other", stream_closed="true"),
        produce(http, name, 1, 1, None, stream_closed="true"),
        produce(http, name, 1, 1, "end"),
    ):
        assert (again.status, again["stream-closed"], again["stream-next-offset"]) == (
            204,
            "true",
            encode_offset(0, 2),
        )
        assert (again["producer-epoch"], again["producer-seq"]) == ("1", "1")
    stale = produce(http, name, 0, 5)
    assert (stale.status, stale["producer-epoch"]) == (403, "1")
    for other in (produce(http, name, 1, 0), produce(http, name, 1, 2), produce(http, name, 2, 0)):
        assert (other.status, other.code) == (409, "stream_closed")
        assert (other["producer-epoch"], other["producer-seq"]) == ("1", "1")
    assert http.post(name, stream_closed="true").status == 204
    assert http.get(name).body == b"xend"


def test_closing_alone_by_a_producer_is_judged_like_an_append(http: Wire) -> None:
    name = text_stream(http)
    assert produce(http, name, 0, 4, None, stream_closed="true").code == "producer_gap"
    closed = produce(http, name, 0, 0, None, stream_closed="true")
    assert (closed.status, closed["producer-epoch"], closed["producer-seq"]) == (204, "0", "0")
    assert produce(http, name, 0, 0, None, stream_closed="true").status == 204
    assert produce(http, name, 0, 1, None, stream_closed="true").code == "stream_closed"


def test_state_outlives_a_crash(start_server: StartServer) -> None:
    server = start_server()
    http = Wire(server.port)
    names = [text_stream(http), text_stream(http)]
    produce(http, names[0], 3, 0, stream_seq="m")
    produce(http, names[1], 3, 0, "x", stream_closed="true")
    http.close()
    server.restart(kill=True)
    assert produce(http, names[0], 3, 0).status == 204
    assert produce(http, names[0], 2, 1).code == "stale_epoch"
    assert produce(http, names[0], 3, 1, stream_seq="l").code == "seq_conflict"
    assert produce(http, names[0], 3, 1, stream_seq="n").status == 200
    assert produce(http, names[1], 3, 0).status == 204
    assert http.post(names[1], TEXT, "x").code == "stream_closed"
    http.close()
