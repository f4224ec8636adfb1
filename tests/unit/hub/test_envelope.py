"""Envelopes: what is understood, what is refused, and that data stays as it was written."""

from __future__ import annotations

import json
import uuid
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.common.errors import ERROR_STATUS, TailraceError
from tailrace.hub import envelope as message
from tailrace.hub.envelope import MessageIds, compact_json, parse_members, scan_members
from tailrace.hub.errors import HUB_CODES, HubError, encode_error, error_payload, to_hub_error

NOW_MS = 1_767_225_600_000
LEAST: dict[str, Any] = {"id": "1", "type": "hub:heartbeat", "timestamp": NOW_MS}
WHOLE = (
    b'{"id":"1","from":"@(a/b)","to":null,"type":"t","payload":{"n":1},"pattern":"ask","correlationId":null,'
    b'"timestamp":1767225600000,"metadata":{},"ttl":12,"signature":null}'
)


def frame(**changed: Any) -> bytes:
    return json.dumps({**LEAST, **changed}, separators=(",", ":")).encode()


def spliced(data: str) -> bytes:
    return b'{"id":"1","type":"t","timestamp":1,"payload":{"data":%b}}' % data.encode()


def refusal(text: bytes) -> HubError:
    with pytest.raises(HubError) as refused:
        message.parse_envelope(text)
    return refused.value


def test_absent_members_have_their_defaults() -> None:
    envelope = message.parse_envelope(frame())
    assert (envelope.from_, envelope.to, envelope.pattern, envelope.correlation_id) == (
        None,
        None,
        "tell",
        None,
    )
    assert bytes(envelope.payload) == b"null"
    assert bytes(envelope.metadata) == b"{}"
    assert envelope.ttl is None
    assert envelope.signature is None


@given(st.permutations(message.ENVELOPE_MEMBERS), st.sampled_from(["@(a/b)", "é", 'a"b', None]))
def test_a_whole_envelope_is_understood_in_any_order(names: list[str], sender: str | None) -> None:
    whole = {**json.loads(WHOLE), "from": sender}
    text = json.dumps({name: whole[name] for name in names}, separators=(",", ":"), ensure_ascii=False)
    found = message.parse_envelope(text.encode())
    assert (found.id, found.from_, found.to, found.type, found.ttl) == ("1", sender, None, "t", 12)
    assert (bytes(found.payload), bytes(found.metadata), found.is_ask) == (b'{"n":1}', b"{}", True)
    assert found.timestamp == NOW_MS


def test_nulls_are_as_good_as_absent() -> None:
    envelope = message.parse_envelope(
        frame(payload=None, metadata=None, ttl=None, signature=None, correlationId=None, to=None)
    )
    assert bytes(envelope.metadata) == b"{}"
    assert parse_members(envelope.payload) == {}


def test_a_message_expires_after_its_time_and_not_at_it() -> None:
    envelope = message.parse_envelope(frame(ttl=10))
    assert not envelope.is_expired(NOW_MS + 10)
    assert envelope.is_expired(NOW_MS + 11)
    assert not message.parse_envelope(frame()).is_expired(2**60)


def test_unknown_members_and_space_are_accepted() -> None:
    text = json.dumps({**LEAST, "payload": {"x": 1}, "extra": [1, {"id": 2}]}, indent=2).encode()
    assert json.loads(bytes(message.parse_envelope(text).payload)) == {"x": 1}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"1",
        b"null",
        b'"x"',
        b"{",
        b"{}",
        frame(id=""),
        frame(id="x" * 129),
        frame(id="\u00e4" * 65),
        frame(id=7),
        frame(type=""),
        frame(type="x" * 129),
        frame(timestamp=-1),
        frame(timestamp=1.5),
        frame(timestamp="1"),
        frame(timestamp=2**53),
        frame(ttl=0),
        frame(ttl="1"),
        frame(pattern="shout"),
        frame(metadata=[]),
        frame(metadata="x"),
        frame(metadata={"x": "y" * 64 * 1024}),
        frame(signature=1),
        frame(correlationId=1),
        frame(to=[]),
        b"\xef\xbb\xbf" + frame(),
        frame()[:-1] + b',"payload":"\xff"}',
        frame()[:-1] + b',"payload":NaN}',
        frame()[:-1] + b',"payload":-Infinity}',
        frame()[:-1] + b',"payload":01}',
        frame()[:-1] + b',"payload":"a\nb"}',
        frame()[:-1] + b',"payload":"\\u00zz"}',
        frame()[:-1] + b',"payload":1,}',
        frame() + b"{}",
        frame(payload="\ud800") + b"x",
    ],
)
def test_h3_what_is_no_envelope_is_refused(text: bytes) -> None:
    assert refusal(text).code == "invalid_message"


@pytest.mark.parametrize(
    "text",
    [
        frame()[:-1] + b',"id":"1"}',
        frame()[:-1] + b',"payload":1,"payload":1}',
        frame()[:-1] + b', "extra": 1, "extra": 2}',
        frame()[:-1] + b',"\\u0069d":"2"}',
        frame(payload="\ud800")[:-1] + b',"ttl":1,"ttl":1}',
        # As long as if `ttl` came once and `to` was there.
        b'{"id":"1","type":"t","timestamp":1,"ttl":1,"ttl":1}',
        WHOLE.replace(b',"signature":null', b',"ttl":123,"ttl":4'),
    ],
)
def test_h3_a_member_that_comes_twice_is_refused(text: bytes) -> None:
    error = refusal(text)
    assert error.code == "invalid_message"
    assert "duplicate member" in error.message


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_h3_depth_is_bounded(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"

    def nested(levels: int) -> bytes:
        return frame()[:-1] + b',"payload":' + opening * levels + b"1" + closing * levels + b"}"

    assert message.parse_envelope(nested(63)).id == "1"
    assert "deeper" in refusal(nested(64)).message
    assert "deeper" in refusal(nested(100_000)).message
    assert refusal(frame()[:-1] + b',"payload":' + opening * 100_000).code == "invalid_message"
    flat = frame()[:-1] + b',"payload":[' + b'"[[{{",[],' * 100 + b"0]}"
    assert message.parse_envelope(flat).id == "1"


def test_h3_size_is_looked_at_before_anything_else() -> None:
    error = refusal(b"x" * (1024 * 1024 + 1))
    assert (error.code, error.details["messageSize"], error.details["maxSize"]) == (
        "message_too_large",
        1024 * 1024 + 1,
        1024 * 1024,
    )


def _value_texts() -> st.SearchStrategy[str]:
    """JSON as people and programs write it: any spelling that the grammar allows."""
    space = st.sampled_from(["", " ", "\n\t", "\r "])
    escapes = st.sampled_from(
        ['\\"', "\\\\", "\\/", "\\b", "\\u00e4", "\\ud83d\\ude00", "\\ud800", "\\uDC00", "{", "]", "ä", "😀"]
    )
    strings = st.lists(st.one_of(escapes, st.sampled_from("abc,:")), max_size=5).map("".join)
    texts = strings.map(lambda text: f'"{text}"')
    numbers = st.sampled_from(["0", "-0", "1e400", "-1.5E-7", "9" * 500, "0.10", "1e5"])
    leaves = st.one_of(st.sampled_from(["null", "true", "false"]), numbers, texts)

    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        padded = st.tuples(space, inner, space).map("".join)
        pairs = st.tuples(space, st.sampled_from(['"a"', '"b"', '"\\u0061"']), space, padded)
        joined = pairs.map(lambda pair: f"{pair[0]}{pair[1]}{pair[2]}:{pair[3]}")
        arrays = st.lists(padded, max_size=4).map(lambda items: f"[{','.join(items)}]")
        return st.one_of(arrays, st.lists(joined, max_size=4).map(lambda items: f"{{{','.join(items)}}}"))

    return st.recursive(leaves, grown, max_leaves=10)


@given(_value_texts())
def test_h2_data_is_cut_out_byte_for_byte(data: str) -> None:
    envelope = message.parse_envelope(spliced(data))
    assert bytes(parse_members(envelope.payload)["data"]) == data.encode()
    out = message.encode_envelope(
        id="2",
        from_="@(a)",
        to="@(b)",
        type="t",
        payload=parse_members(envelope.payload)["data"],
        timestamp=1,
    )
    assert b'"payload":' + data.encode() + b',"pattern":"tell"' in out
    assert bytes(message.parse_envelope(out).payload) == data.encode()


@given(_value_texts())
def test_space_between_tokens_is_all_that_compacting_takes(data: str) -> None:
    compacted = compact_json(data.encode()).decode()
    assert json.loads(compacted, parse_int=str, parse_float=str) == json.loads(
        data, parse_int=str, parse_float=str
    )
    assert compact_json(f" {compacted}\n".encode()).decode() == compacted


@given(st.binary(max_size=80))
def test_h1_any_bytes_are_an_envelope_or_a_refusal(text: bytes) -> None:
    for tried in (text, frame()[:-1] + b"," + text + b"}", frame()[:-1] + b',"payload":' + text + b"}"):
        try:
            message.parse_envelope(tried)
        except HubError as refused:
            error = refused
        else:
            continue
        assert error.code == "invalid_message"


@given(st.dictionaries(st.sampled_from(["a", "b", "é", '"', "\\"]), st.integers(), max_size=4))
def test_the_slow_way_finds_what_the_fast_one_finds(value: dict[str, int]) -> None:
    text = json.dumps(value).encode()
    fast, slow = parse_members(text), scan_members(text)
    assert {name: bytes(raw) for name, raw in fast.items()} == {
        name: bytes(raw) for name, raw in slow.items()
    }


def test_output_has_the_eleven_members_in_order() -> None:
    out = message.encode_envelope(
        id="i",
        from_="@(a/b)",
        to="@(c)",
        type='quo"te',
        payload=b"[1, 2]",
        pattern="ask",
        correlation_id="c\n",
        timestamp=NOW_MS,
        metadata=b'{"x":1.0,"via":"@(cloudflare/signal-hub)"}',
        ttl=5,
    )
    assert b'"payload":[1, 2],' in out
    assert b'"metadata":{"x":1.0,"via":' in out
    assert tuple(json.loads(out)) == message.ENVELOPE_MEMBERS
    assert json.loads(out) == {
        "id": "i",
        "from": "@(a/b)",
        "to": "@(c)",
        "type": 'quo"te',
        "payload": [1, 2],
        "pattern": "ask",
        "correlationId": "c\n",
        "timestamp": NOW_MS,
        "metadata": {"x": 1.0, "via": message.HUB_ADDRESS},
        "ttl": 5,
        "signature": None,
    }


def test_copies_share_all_but_id_and_recipient() -> None:
    shared = message.encode_shared(from_="@(a)", type="news", payload=b'{"v":2}', timestamp=1)
    one, other = (json.loads(shared.frame(*names)) for names in (("1", "@(b)"), ("2", "@(c)")))
    assert (one["id"], one["to"], other["id"], other["to"]) == ("1", "@(b)", "2", "@(c)")
    assert {**one, "id": "", "to": ""} == {**other, "id": "", "to": ""}


def test_ids_are_version_7_unique_and_growing_even_if_the_clock_is_not() -> None:
    ids = MessageIds()
    made = [ids(now_ms) for now_ms in (5, 5, 4, NOW_MS, NOW_MS, NOW_MS - 1000, NOW_MS + 1)]
    assert all(str(uuid.UUID(text)) == text for text in made)
    assert {(uuid.UUID(text).version, uuid.UUID(text).variant) for text in made} == {(7, uuid.RFC_4122)}
    assert all(one < other for one, other in pairwise(made))
    assert uuid.UUID(made[-1]).int >> 80 == NOW_MS + 1
    assert MessageIds()(5)[-8:] != made[0][-8:]
    wrapping = MessageIds()
    wrapping._count = 2**16 - 3
    over = [wrapping(NOW_MS) for _ in range(6)]
    assert all(one < other for one, other in pairwise(over))
    assert {uuid.UUID(text).version for text in over} == {7}


# -- errors


def test_every_code_has_a_status_and_typed_forms_have_their_members_first() -> None:
    assert set(HUB_CODES) <= set(ERROR_STATUS)
    error = HubError("rate_limited", "too many", {"retryAfter": 1120, "kind": "send"})
    kind, payload = error_payload(error)
    assert kind == "hub:rate_limited"
    assert next(iter(payload)) == "retryAfter"
    assert error.retry_after_s == 2
    kind, text = encode_error(error)
    assert json.loads(text) == {
        "retryAfter": 1120,
        "code": "rate_limited",
        "message": "too many",
        "resolution": "wait retryAfter ms, then send again",
        "details": {"retryAfter": 1120, "kind": "send", "outcome": "not_applied"},
        "retryable": True,
    }


def test_a_code_without_a_typed_form_is_told_generically() -> None:
    assert error_payload(HubError("timeout", "late"))[0] == "hub:error"
    assert HubError("timeout", "late").details == {"outcome": "unknown"}


def test_refusals_of_the_log_are_told_in_the_words_of_the_hub() -> None:
    assert to_hub_error(TailraceError("stale_epoch", "old", current_epoch=3)).code == "producer_fenced"
    assert to_hub_error(TailraceError("insufficient_storage", "full")).code == "unavailable"
    hidden = to_hub_error(TailraceError("stream_exists", "secret"))
    assert (hidden.code, "secret" in hidden.message) == ("internal_error", False)
    assert json.loads(HubError("unknown_actor", "gone", {"actorAddress": "@(a)"}).body()) == {
        "error": {
            "code": "unknown_actor",
            "message": "gone",
            "actorAddress": "@(a)",
            "outcome": "not_applied",
        }
    }
