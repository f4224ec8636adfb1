"""Laws of the wire formats: what goes in comes out, and order is kept."""

from __future__ import annotations

import base64
import json
import string
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tailrace.common import timestamps
from tailrace.common.errors import TailraceError
from tailrace.protocol import http_headers, json_split, offsets, sse, stream_names
from tailrace.protocol import offsets as cursor

settings.register_profile("protocol", derandomize=True, max_examples=100, deadline=None)
settings.load_profile("protocol")

epochs = st.integers(0, offsets.EPOCH_MAX)
entries = st.one_of(st.integers(0, offsets.ENTRY_MAX), st.integers(0, 2**29), st.integers(0, 100))


# -- offsets


@given(epochs, entries)
@example(0, 2**28 - 1)
@example(0, 2**28)
@example(0, 2**32)
@example(offsets.EPOCH_MAX, offsets.ENTRY_MAX)
def test_an_offset_comes_back_as_the_position_it_was_made_from(epoch: int, entry: int) -> None:
    text = offsets.encode_offset(epoch, entry)
    assert len(text) == 26
    assert offsets.parse_offset(text) == (epoch, entry)
    assert offsets.parse_offset(text.lower()) == (epoch, entry)
    number = 0
    for digit in text:
        number = number * 32 + "0123456789ABCDEFGHJKMNPQRSTVWXYZ".index(digit)
    assert number == epoch << 96 | entry << 32


@given(st.tuples(epochs, entries), st.tuples(epochs, entries))
def test_comparing_offsets_as_text_compares_positions(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (offsets.encode_offset(*one) < offsets.encode_offset(*other)) == (one < other)


@given(epochs, st.integers(0, 10**16 - 1))
def test_the_decimal_alias_names_the_same_position(epoch: int, entry: int) -> None:
    assert offsets.parse_offset(f"{epoch:016d}_{entry:016d}") == (epoch, entry)


@given(st.text(alphabet=string.printable + "\x00\u0660\uff10", max_size=33))
def test_other_text_is_no_offset(text: str) -> None:
    with pytest.raises(TailraceError) as refusal:
        assume(not _is_offset(text))
        offsets.parse_offset(text)
    assert refusal.value.code == "invalid_offset"


def _is_offset(text: str) -> bool:
    digits = set("0123456789ABCDEFGHJKMNPQRSTVWXYZabcdefghjkmnpqrstvwxyz")
    if len(text) == 26:
        return set(text) <= digits and text[0] in "01234567"
    return len(text) == 33 and text[16] == "_" and (text[:16] + text[17:]).isdecimal()


# -- durations and instants


@given(st.integers(0, 10**9), st.sampled_from(["", "s", "m", "h", "d"]))
def test_windows_are_whole_seconds(count: int, unit: str) -> None:
    factor = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    assert timestamps.parse_duration_s(f"{count}{unit}", "Stream-TTL") == count * factor


@given(
    st.datetimes(min_value=datetime(1, 1, 3), max_value=datetime(9999, 12, 29)),  # noqa: DTZ001
    st.integers(-23 * 60, 23 * 60),
    st.integers(0, 999_999_999),
    st.integers(0, 9),
)
def test_instants_in_any_zone(naive: datetime, offset_min: int, nanos: int, digits: int) -> None:
    moment = naive.replace(microsecond=0, tzinfo=timezone(timedelta(minutes=offset_min)))
    fraction = f"{nanos:09d}"[:digits]
    sign = "-" if offset_min < 0 else "+"
    zone = f"{sign}{abs(offset_min) // 60:02d}:{abs(offset_min) % 60:02d}"
    text = f"{moment:%Y}".rjust(4, "0") + f"{moment:-%m-%dT%H:%M:%S}" + (f".{fraction}" if fraction else "")
    since_1970 = moment - datetime(1970, 1, 1, tzinfo=UTC)
    expected = (since_1970.days * 86_400 + since_1970.seconds) * 10**9 + int(fraction.ljust(9, "0"))
    expected = max(-timestamps.TIMESTAMP_NS_MAX, min(expected, timestamps.TIMESTAMP_NS_MAX))
    assert timestamps.parse_rfc3339_ns(text + zone) == expected
    assert timestamps.parse_timestamp_ns(text + zone) == expected


@given(st.integers(-timestamps.TIMESTAMP_NS_MAX // 10**6 + 1, timestamps.TIMESTAMP_NS_MAX // 10**6))
@example(timestamps.TIMESTAMP_NS_MAX // 10**6)
def test_a_written_instant_is_read_back(millis: int) -> None:
    assert timestamps.parse_rfc3339_ns(timestamps.format_rfc3339(millis * 10**6)) == millis * 10**6


# -- JSON

spaces = st.text(alphabet=" \t\r\n", max_size=2)
scalars = st.one_of(
    st.sampled_from(["null", "true", "false", "0", "-0", "1.0", "1e400", "-2E-7", "12345678901234567890"]),
    st.text(max_size=5).map(json.dumps),
    st.text(max_size=5).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(['"\\u00e9"', '"\\ud800"', '"\\/\\b"', '"[{,"', '"\\""', '"\\\\"']),
)


def _containers(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.tuples(st.sampled_from(['"a"', '"a"', '"\\u0062"']), spaces, spaces, values).map(
        lambda found: f"{found[0]}{found[1]}:{found[2]}{found[3]}"
    )
    arrays = st.tuples(spaces, st.lists(values, max_size=3)).map(
        lambda found: f"[{found[0]}{', '.join(found[1])}]"
    )
    objects = st.tuples(spaces, st.lists(members, max_size=3)).map(
        lambda found: f"{{{found[0]}{','.join(found[1])}}}"
    )
    return st.one_of(arrays, objects)


texts = st.recursive(scalars, _containers, max_leaves=8)


@given(st.lists(st.tuples(spaces, texts, spaces), max_size=4), spaces, spaces)
def test_an_array_is_cut_into_its_elements_own_bytes(
    elements: list[tuple[str, str, str]], before: str, after: str
) -> None:
    body = f"{before}[{','.join(''.join(element) for element in elements)}]{after}".encode()
    found = json_split.split_entries(body, 512)
    wanted = [element[1].encode() for element in elements]
    assert [bytes(entry) for entry in found] == wanted
    joined, lengths = json_split.join_entries(found)
    assert joined == b",".join(wanted)
    assert lengths == [len(text) for text in wanted]


@given(spaces, texts.filter(lambda text: not text.startswith("[")), spaces)
def test_any_other_value_is_one_entry_without_the_space_around_it(before: str, text: str, after: str) -> None:
    assert [bytes(entry) for entry in json_split.split_entries(f"{before}{text}{after}".encode(), 512)] == [
        text.encode()
    ]


def _oracle(body: bytes) -> list[object] | None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        value = json.loads(body.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else [value]


@given(
    texts.map(str.encode),
    st.lists(
        st.tuples(
            st.integers(0, 40),
            st.integers(0, 2),
            st.sampled_from(
                [
                    b"",
                    *(bytes([byte]) for byte in b'[]{}",:\\ 0123-+.eEnNul\x00\x1f\x7f/\x0b\xff\xc3\xa9\xa0'),
                ]
            ),
        ),
        max_size=3,
    ),
)
@settings(max_examples=600)
@example(b"[1]", [(0, 0, b"\xef\xbb\xbf")])
@example(b'"\xed\xa0\x80"', [])
@example(b"[1,]", [])
@example(b"[1][2]", [])
@example(b"1 2", [])
@example(b"NaN", [])
@example(b"[-Infinity]", [])
@example(b"", [])
@example(b"  ", [])
def test_json_is_taken_if_and_only_if_it_is_json(body: bytes, edits: list[tuple[int, int, bytes]]) -> None:
    """Valid texts with a few bytes changed: as a careful parser judges, so do we."""
    for at, cut, insert in edits:
        body = body[:at] + insert + body[at + cut :]
    expected = _oracle(body)
    if expected is None:
        with pytest.raises(TailraceError, match="JSON"):
            json_split.split_entries(body, 512)
        return
    found = json_split.split_entries(body, 512)
    assert len(found) == len(expected)
    assert repr([json.loads(bytes(entry)) for entry in found]) == repr(expected)


@given(
    texts.map(str.encode),
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(list(b'[]{}",:\\ 0')))),
    st.integers(1, 9),
)
@settings(max_examples=400)
@example(b"[1,2,3,4]", [(4, 0x2C)], 2)
@example(b"[1,2,3,4,]", [], 3)
@example(b'["a,b","\\ud800,",[1,2],{"a":[3,4]}]', [], 4)
def test_a_body_that_is_cut_in_pieces_has_the_same_entries(
    body: bytes, edits: list[tuple[int, int]], block_bytes: int
) -> None:
    for at, byte in edits:
        body = body[:at] + bytes((byte,)) + body[at:]
    try:
        whole = json_split.join_entries(json_split.split_entries(body, 6))
    except TailraceError:
        whole = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_split, "_BLOCK_BYTES", block_bytes)
        patched.setattr(json_split, "_ELEMENT_BYTES_MIN", len(body) + 1)
        if whole is None:
            with pytest.raises(TailraceError, match="JSON"):
                json_split.split_to_block(body, 6, 1000)
        else:
            joined, lengths = json_split.split_to_block(body, 6, 1000)
            assert (joined, list(lengths)) == (whole[0], list(whole[1]))


@pytest.mark.parametrize("element", [b"0", b'{"a": "some more of it"}'])
def test_an_array_has_a_limited_number_of_entries(element: bytes) -> None:
    body = b"[" + b",".join([element] * 200_000) + b"]"
    assert len(json_split.split_to_block(body, 512, 200_000)[1]) == 200_000
    with pytest.raises(TailraceError, match="more than 199999 entries"):
        json_split.split_to_block(body, 512, 199_999)


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
def test_nesting_has_a_limit(opening: bytes, closing: bytes) -> None:
    levels = opening.count(b"[") + opening.count(b"{")
    fits = 512 // levels
    assert json_split.split_entries(opening * fits + b"1" + closing * fits, 512)
    for depth in (fits + 1, 100_000):
        with pytest.raises(TailraceError):
            json_split.split_entries(opening * depth + b"1" + closing * depth, 512)
    assert json_split.split_entries(b"[" + b",".join([b'["[[[[",{}]'] * 2000) + b"]", 512)


def _levels(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_levels, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_levels, value), default=0)
    return 0


@given(
    st.recursive(
        st.sampled_from([1, "[[[[{{{{", "]}", '"[{\\']),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("a[{"), inner, max_size=3)
        ),
        max_leaves=12,
    ),
    st.integers(1, 8),
)
@example([[[]]], 2)
@example([[[]]], 3)
@example({"a": {"a": {}}}, 2)
@example([{}, [[]], 1], 3)
def test_what_is_nested_deeper_is_refused_and_nothing_else(value: Any, depth_max: int) -> None:
    body = json.dumps(value, separators=(",", ":")).encode()
    if _levels(value) > depth_max:
        with pytest.raises(TailraceError, match=f"nested deeper than {depth_max} levels"):
            json_split.split_entries(body, depth_max)
    else:
        assert len(json_split.split_entries(body, depth_max)) == (
            len(value) if isinstance(value, list) else 1
        )


# -- events


def parse_events(raw: bytes) -> list[tuple[str, bytes]]:
    """Event streams as the standard reads them."""
    events: list[tuple[str, bytes]] = []
    kind, data = "message", list[bytes]()
    for line in raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if not line:
            if data:
                events.append((kind, b"\n".join(data)))
            kind, data = "message", []
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            kind = value.decode()
        elif field == b"data":
            data.append(value)
    return events


payload_bytes = st.lists(
    st.one_of(
        st.binary(max_size=4),
        st.sampled_from([b"\r", b"\n", b"\r\n", b" ", b"data:", b"event: control\n", b":"]),
    )
).map(b"".join)


@given(payload_bytes)
@example(b"")
@example(b"\n")
@example(b"\n\nevent: control\ndata:{}\n\n")
def test_a_payload_is_one_event_and_cannot_forge_another(payload: bytes) -> None:
    events = parse_events(sse.text_event(payload, "X") + sse.control_event("X", "7", True, False))
    assert [kind for kind, _ in events] == ["data", "control"]
    assert events[0][1] == payload.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert parse_events(sse.base64_event(payload, "X")) == [("data", base64.b64encode(payload))]


@given(st.booleans(), st.booleans())
def test_a_control_is_one_flat_object_on_one_line(up_to_date: bool, closed: bool) -> None:
    raw = sse.control_event("0" * 26, "33", up_to_date, closed)
    assert raw.startswith(b"event: control\ndata:{")
    assert raw.endswith(b"}\nid: %b\n\n" % (b"0" * 26))
    assert raw.count(b"\n") == 4
    fields = json.loads(parse_events(raw)[0][1])
    assert fields.pop("streamNextOffset") == "0" * 26
    assert fields.pop("upToDate", False) is up_to_date
    assert fields.pop("streamClosed", False) is closed
    assert fields == ({} if closed else {"streamCursor": "33"})
    message = json.loads(sse.websocket_control("0" * 26, "33", up_to_date, closed))
    assert message["type"] == "control"
    assert (message["upToDate"], message["streamClosed"]) == (up_to_date, closed)
    assert ("streamCursor" in message) is not closed


@given(st.binary(max_size=20), st.booleans())
def test_a_websocket_message_carries_the_payload(payload: bytes, text: bool) -> None:
    message = json.loads(sse.websocket_data(payload, text))
    assert message.pop("type") == "data"
    if message.get("encoding") == "base64":
        assert base64.b64decode(message["payload"], validate=True) == payload
        assert not (text and _is_utf8(payload))
    else:
        assert message == {"payload": payload.decode()}


def _is_utf8(payload: bytes) -> bool:
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


# -- cursors, tags, names

NOW_S = cursor.CURSOR_ORIGIN_S + 20 * 1000 + 7


@given(st.one_of(st.none(), st.integers(0, 10**17).map(str), st.text(max_size=5)))
def test_a_cursor_is_always_greater_than_what_the_client_sent(requested: str | None) -> None:
    found = int(cursor.next_cursor(requested, NOW_S))
    is_number = requested is not None and requested.isascii() and requested.isdigit()
    if not is_number or int(requested or "") < 1000:
        assert found == 1000
    else:
        assert int(requested or "") < found <= int(requested or "") + 180


@given(st.text(max_size=8), st.sampled_from(["json", "raw"]), st.booleans())
def test_a_tag_matches_itself_in_any_list(key: str, fmt: str, closed: bool) -> None:
    tag = http_headers.slice_etag("A" * 26, "B" * 26, key, fmt, "", closed)
    assert tag.startswith('W/"slice:')
    assert tag.isascii()
    strong = tag.removeprefix("W/")
    assert "," not in tag
    assert '"' not in strong[1:-1]
    for header in (tag, strong, f'"other", {tag}', f'{tag},W/"x"', f'W/"x" ,{strong} , "y"', "*", " * "):
        assert http_headers.if_none_match(header, tag)
    for header in ("", '"other"', strong[1:-1], tag.replace("slice", "Slice"), f'"*", {tag}'[:3]):
        assert not http_headers.if_none_match(header, tag)
    assert not http_headers.if_none_match(
        tag, http_headers.slice_etag("A" * 26, "B" * 26, key, fmt, "", not closed)
    )


@given(st.text(max_size=20))
def test_names_survive_percent_encoding_and_follow_the_rules(name: str) -> None:
    raw = quote(name, safe="/").encode()
    assert stream_names.decode_name(raw) == name
    assert stream_names.decode_name(quote(name, safe="").encode()) == name
    controls = any(ord(char) < 32 or 127 <= ord(char) < 160 for char in name)
    odd_segment = any(segment in ("", ".", "..") for segment in name.split("/"))
    valid = not controls and not odd_segment and len(name.encode()) <= 20
    assert stream_names.is_valid_name(name, 20) is valid


@given(st.binary(max_size=8))
def test_names_are_utf8(raw: bytes) -> None:
    encoded = quote(raw, safe="").encode()
    assert stream_names.decode_name(encoded) == (raw.decode() if _is_utf8(raw) else None)
