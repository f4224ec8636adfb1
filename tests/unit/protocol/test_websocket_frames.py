"""The WebSocket codec by itself."""

from __future__ import annotations

import random
import zlib

import pytest
from websockets.speedups import apply_mask

from support.ws_wire import frame, header, read_all
from tailrace.protocol import websocket_frames as ws

LIMIT = 1000
DISCARD = 5000


def _reader(**options: bool) -> ws.FrameReader:
    return ws.FrameReader(LIMIT, DISCARD, **options)


def _events(data: bytes, **options: bool) -> list[ws.FrameEvent]:
    return _reader(**options).feed(data)


def test_messages_of_every_length_form() -> None:
    reader = ws.FrameReader(100_000, 100_000)
    for size in (0, 1, 125, 126, 65535, 65536):
        payload = random.Random(size).randbytes(size)
        assert reader.feed(frame(ws.BINARY, payload)) == [(ws.BINARY, payload, 0)]
        assert reader.buffered_bytes == 0
    assert reader.feed(frame(ws.TEXT, "zwölf".encode())) == [(ws.TEXT, "zwölf".encode(), 0)]


def test_fragments_with_control_frames_between() -> None:
    data = (
        frame(ws.TEXT, "g\u00fc".encode()[:2], fin=False)
        + frame(ws.PING, b"p")
        + frame(ws.CONTINUATION, "g\u00fc".encode()[2:], fin=False)
        + frame(ws.PONG, b"q")
        + frame(ws.CONTINUATION, b"", fin=True)
        + frame(ws.BINARY, b"\xff", fin=False)
        + frame(ws.CONTINUATION, b"\xfe")
    )
    assert _events(data) == [
        (ws.PING, b"p", 0),
        (ws.PONG, b"q", 0),
        (ws.TEXT, "gü".encode(), 0),
        (ws.BINARY, b"\xff\xfe", 0),
    ]


BROKEN = {
    "unmasked": frame(ws.TEXT, b"a", mask=None),
    "opcode 3": frame(3),
    "opcode 11": frame(11),
    "opcode 15": frame(15),
    "rsv1": frame(ws.TEXT, b"a", rsv=4),
    "rsv2": frame(ws.TEXT, b"a", rsv=2),
    "rsv3": frame(ws.PING, b"a", rsv=1),
    "continuation first": frame(ws.CONTINUATION, b"a"),
    "start inside": frame(ws.TEXT, b"a", fin=False) + frame(ws.TEXT, b"b"),
    "long control": frame(ws.PING, b"a" * 126),
    "fragmented control": frame(ws.PING, b"a", fin=False),
    "16 bit, not minimal": header(ws.TEXT, 125, width=2),
    "64 bit, not minimal": header(ws.TEXT, 65535, width=8),
    "64 bit, top bit": header(ws.TEXT, 1 << 63, width=8),
    "close of one byte": frame(ws.CLOSE, b"\x03"),
    "close 1005": frame(ws.CLOSE, b"\x03\xed"),
    "close 1006": frame(ws.CLOSE, b"\x03\xee"),
    "close 1015": frame(ws.CLOSE, b"\x03\xf7"),
    "close 999": frame(ws.CLOSE, b"\x03\xe7"),
    "close 5000": frame(ws.CLOSE, b"\x13\x88"),
    "close 2999": frame(ws.CLOSE, b"\x0b\xb7"),
    "close inside a message": frame(ws.TEXT, b"a", fin=False) + frame(ws.CLOSE),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_frames_fail_with_1002(name: str) -> None:
    reader = _reader()
    (event,) = reader.feed(BROKEN[name] + frame(ws.TEXT, b"after"))
    assert (event[0], event[2]) == (ws.FAIL, 1002)
    assert reader.feed(frame(ws.TEXT, b"still after")) == []
    assert reader.buffered_bytes == 0


@pytest.mark.parametrize(
    "data",
    [
        frame(ws.TEXT, b"\xff"),
        frame(ws.TEXT, b"\xc3"),
        frame(ws.TEXT, b"\xed\xa0\x80"),
        frame(ws.TEXT, b"\xc3", fin=False) + frame(ws.CONTINUATION, b"a"),
        frame(ws.TEXT, b"\xc3", fin=False) + frame(ws.CONTINUATION, b""),
        frame(ws.CLOSE, b"\x03\xe8\xff"),
    ],
)
def test_text_that_is_not_utf8_fails_with_1007(data: bytes) -> None:
    (event,) = _events(data)
    assert (event[0], event[2]) == (ws.FAIL, 1007)


def test_close() -> None:
    assert _events(frame(ws.CLOSE)) == [(ws.CLOSE, b"", 1005)]
    assert _events(frame(ws.CLOSE, b"\x03\xe8bye") + b"junk") == [(ws.CLOSE, b"bye", 1000)]
    assert _events(frame(ws.CLOSE, b"\x11\x30")) == [(ws.CLOSE, b"", 4400)]


def test_a_large_message_is_skipped_in_constant_memory() -> None:
    big = b"0123456789" * 480
    reader = _reader()
    events: list[ws.FrameEvent] = []
    data = frame(ws.BINARY, big) + frame(ws.TEXT, b"next")
    for byte in data:
        events += reader.feed(bytes((byte,)))
        assert reader.buffered_bytes <= LIMIT + ws.HEADER_BYTES_MAX
    assert events == [(ws.TOO_LARGE, big[:LIMIT], 4800), (ws.TEXT, b"next", 0)]


def test_fragments_obey_the_limit_together() -> None:
    data = (
        frame(ws.TEXT, b"a" * 600, fin=False)
        + frame(ws.CONTINUATION, b"b" * 600, fin=False)
        + frame(ws.CONTINUATION, b"c" * 100)
        + frame(ws.TEXT, b"d" * 1000)
    )
    assert _events(data) == [(ws.TOO_LARGE, b"a" * 600 + b"b" * 400, 1300), (ws.TEXT, b"d" * 1000, 0)]


def test_far_too_large_ends_the_connection_from_the_header_alone() -> None:
    expected = [(ws.TOO_LARGE, b"", 5001), (ws.FAIL, b"message too large", 1009)]
    assert _events(header(ws.TEXT, 5001)) == expected
    # Even the mask is not needed to know.
    assert _events(header(ws.TEXT, 5001)[:-4]) == expected
    fragments = frame(ws.TEXT, b"a" * 900, fin=False) + header(ws.CONTINUATION, 4101)
    assert _events(fragments) == [(ws.TOO_LARGE, b"a" * 900, 5001), (ws.FAIL, b"message too large", 1009)]
    after_skipping = frame(ws.TEXT, b"a" * 3000, fin=False) + header(ws.CONTINUATION, 2001)
    assert _events(after_skipping)[1] == (ws.FAIL, b"message too large", 1009)


def test_masking_with_integers_equals_the_compiled_helper() -> None:
    rng = random.Random(45)
    for size in (*range(70), 1000, 65_537):
        data, mask = rng.randbytes(size), rng.randbytes(4)
        assert ws.mask_with_integers(data, mask) == apply_mask(data, mask)


def test_encoding() -> None:
    assert ws.encode_text(b"hi") == b"\x81\x02hi"
    assert ws.encode_binary(b"x" * 126)[:4] == b"\x82\x7e\x00\x7e"
    assert ws.encode_frame(ws.BINARY, b"x" * 65536)[:10] == b"\x82\x7f" + (65536).to_bytes(8, "big")
    assert ws.encode_close(1005) == b"\x88\x00"
    assert ws.encode_close(1000, "bye") == b"\x88\x05\x03\xe8bye"
    long_close = ws.encode_close(4000, "ü" * 100)
    assert len(long_close) <= 2 + 125
    assert long_close[4:].decode() == "ü" * 61


def _deflated(payload: bytes, *, opcode: int = ws.TEXT, pieces: int = 1) -> bytes:
    packed = ws.deflate(payload)
    step = len(packed) // pieces + 1
    parts = [packed[start : start + step] for start in range(0, len(packed), step)]
    return b"".join(
        frame(opcode if number == 0 else 0, part, fin=number == len(parts) - 1, rsv=4 if number == 0 else 0)
        for number, part in enumerate(parts)
    )


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_deflated_messages(pieces: int) -> None:
    text = "wörter und wörter ".encode() * 40
    data = _deflated(text, pieces=pieces) + frame(ws.TEXT, b"plain") + _deflated(b"", opcode=ws.BINARY)
    expected = [(ws.TEXT, text, 0), (ws.TEXT, b"plain", 0), (ws.BINARY, b"", 0)]
    assert _events(data, deflate=True) == expected
    assert read_all(_reader(deflate=True), data, list(range(len(data)))) == expected


def test_a_deflate_bomb_stops_at_the_limit() -> None:
    bomb = _deflated(b"\x00" * 1_000_000)
    assert len(bomb) < LIMIT + 100
    reader = _reader(deflate=True)
    events: list[ws.FrameEvent] = []
    for byte in bomb + _deflated(b"next"):
        events += reader.feed(bytes((byte,)))
        assert reader.buffered_bytes <= LIMIT + ws.HEADER_BYTES_MAX
    kinds = [event[0] for event in events]
    assert kinds == [ws.TOO_LARGE, ws.TEXT]
    assert events[1][1] == b"next"


def test_damaged_deflate_and_bad_text_inside_fail_with_1007() -> None:
    assert _events(frame(ws.TEXT, b"\xff\xff\xff", rsv=4), deflate=True)[0][2] == 1007
    assert _events(_deflated(b"\xff\xfe"), deflate=True)[0][2] == 1007
    (continuation,) = _events(frame(ws.TEXT, b"", fin=False) + frame(0, b"", rsv=4), deflate=True)
    assert continuation[2] == 1002


def test_what_we_deflate_a_plain_inflater_understands() -> None:
    inflater = zlib.decompressobj(wbits=-15)
    assert inflater.decompress(ws.deflate(b"abc" * 1000) + b"\x00\x00\xff\xff") == b"abc" * 1000
