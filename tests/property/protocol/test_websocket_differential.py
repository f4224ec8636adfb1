"""The codec against the `websockets` library, and against itself under every way of cutting."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from support.ws_wire import frame, read_all
from tailrace.protocol import websocket_frames as ws

LIMIT = 300
DISCARD = 2000
CORPUS = sorted((Path(__file__).parents[2] / "corpus" / "ws").glob("*.bin"))
REPEATABLE = settings(derandomize=True, max_examples=150, deadline=None, database=None)

_opcodes = st.sampled_from([0, 0, 1, 1, 2, 8, 9, 10, 3, 11])
_payloads = st.one_of(
    st.binary(max_size=20),
    st.text(max_size=12).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"\x03\xe8", b"\x03\xe8ok", b"\x03\xed", b"\x03", b"x" * 125, b"x" * 126, b"y" * 290]),
)
_frames = st.builds(
    frame,
    _opcodes,
    _payloads,
    fin=st.sampled_from([True, True, True, False]),
    rsv=st.sampled_from([0, 0, 0, 0, 0, 0, 0, 1, 2, 4]),
    mask=st.sampled_from([b"\x00\x00\x00\x00", b"\x12\x34\x56\x78", b"\xff\x00\xff\x01", None]),
)
_streams = st.lists(_frames, max_size=12).map(b"".join)
_cuts = st.lists(st.integers(0, 1500), max_size=8)


def _reader() -> ws.FrameReader:
    return ws.FrameReader(LIMIT, DISCARD)


def _theirs(data: bytes, cuts: list[int]) -> tuple[list[tuple[int, bytes]], int | None]:
    """Messages and control frames as `websockets` sees them, and the code it closes with."""
    silent = logging.getLogger("websockets.differential")
    silent.setLevel(logging.CRITICAL)
    peer = ServerProtocol(state=OPEN, max_size=None, logger=silent)
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        peer.receive_data(data[start:end])
    events: list[tuple[int, bytes]] = []
    opcode, parts = 0, b""
    for event in peer.events_received():
        assert isinstance(event, Frame)
        payload = bytes(event.data)
        if event.opcode in (Opcode.PING, Opcode.PONG):
            events.append((int(event.opcode), payload))
        elif event.opcode is not Opcode.CLOSE:
            opcode = opcode if event.opcode is Opcode.CONT else int(event.opcode)
            parts += payload
            if event.fin:
                events.append((opcode, parts))
                opcode, parts = 0, b""
    return events, None if peer.close_sent is None else int(peer.close_sent.code)


def _ours(data: bytes, cuts: list[int]) -> tuple[list[tuple[int, bytes]], int | None]:
    events: list[tuple[int, bytes]] = []
    code: int | None = None
    for kind, payload, number in read_all(_reader(), data, cuts):
        if kind in (ws.CLOSE, ws.FAIL):
            code = number
        else:
            events.append((kind, payload))
    return events, code


def _is_text_error(events: list[tuple[int, bytes]]) -> bool:
    """`websockets` checks text in the layer above; such a message is where the two part ways."""
    return any(kind == ws.TEXT and not _is_utf8(payload) for kind, payload in events)


def _is_utf8(payload: bytes) -> bool:
    try:
        payload.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@REPEATABLE
@given(_streams, _cuts)
def test_same_events_and_close_codes_as_websockets(data: bytes, cuts: list[int]) -> None:
    cuts = sorted(min(cut, len(data)) for cut in cuts)
    ours, our_code = _ours(data, cuts)
    theirs, their_code = _theirs(data, cuts)
    if our_code == 1007:
        # Ours stops at the bad text, theirs hands it on (or had it inside a close frame, and says the same).
        assert theirs[: len(ours)] == ours
        assert their_code == 1007 or _is_text_error(theirs) or len(theirs) == len(ours)
    elif any(kind == ws.TOO_LARGE for kind, _ in ours):
        # The listed difference: over the limit is skipped, not closed. The rest must agree.
        sizes = [(kind, payload) for kind, payload in theirs if len(payload) <= LIMIT]
        assert [event for event in ours if event[0] != ws.TOO_LARGE] == sizes
        assert our_code == their_code
    else:
        assert (ours, our_code) == (theirs, their_code)


@REPEATABLE
@given(st.one_of(_streams, st.binary(max_size=600)), _cuts)
def test_h44_cutting_changes_nothing(data: bytes, cuts: list[int]) -> None:
    """H-44."""
    assert read_all(_reader(), data, cuts) == read_all(_reader(), data)


@REPEATABLE
@given(st.one_of(_streams, st.binary(max_size=600)))
def test_input_held_is_bounded(data: bytes) -> None:
    """H-45: the message limit and one header; a control frame inside a message adds itself."""
    reader = _reader()
    for byte in data:
        reader.feed(bytes((byte,)))
        assert reader.buffered_bytes <= LIMIT + ws.HEADER_BYTES_MAX + ws.CONTROL_BYTES_MAX
    whole = _reader()
    whole.feed(data)
    assert whole.buffered_bytes == reader.buffered_bytes


@REPEATABLE
@given(st.lists(st.binary(min_size=1, max_size=400), min_size=1, max_size=5), st.booleans())
def test_h45_messages_without_control_frames_hold_no_more(payloads: list[bytes], deflate: bool) -> None:
    reader = ws.FrameReader(LIMIT, DISCARD, deflate=deflate)
    for number, payload in enumerate(payloads):
        is_packed = deflate and number == 0
        piece = ws.deflate(payload) if is_packed else payload
        last = number == len(payloads) - 1
        for byte in frame(2 if number == 0 else 0, piece, fin=last, rsv=4 if is_packed else 0):
            reader.feed(bytes((byte,)))
            assert reader.buffered_bytes <= LIMIT + ws.HEADER_BYTES_MAX


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_corpus(path: Path) -> None:
    data = path.read_bytes()
    whole = read_all(_reader(), data)
    assert read_all(_reader(), data, list(range(len(data)))) == whole
    for step in (2, 3, 7, 64):
        assert read_all(_reader(), data, list(range(0, len(data), step))) == whole


def test_the_corpus_is_there() -> None:
    assert len(CORPUS) >= 20
