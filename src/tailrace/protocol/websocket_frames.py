"""WebSocket frames (RFC 6455), server side: bytes in, events out; payloads in, frames out. No I/O.

`FrameReader.feed` accepts reads split anywhere; the same bytes yield the same events however they are split.
It never holds more than one message, one frame header and one control frame: larger messages are skipped in
constant memory and reported, far larger ones end the connection.
"""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable
from typing import Final, Protocol

CONTINUATION: Final = 0x0
TEXT: Final = 0x1
BINARY: Final = 0x2
CLOSE: Final = 0x8
PING: Final = 0x9
PONG: Final = 0xA
# Kinds of events that are not opcodes.
TOO_LARGE: Final = 0x10
FAIL: Final = 0x11

PROTOCOL_ERROR: Final = 1002
NO_STATUS: Final = 1005
INVALID_DATA: Final = 1007
MESSAGE_TOO_BIG: Final = 1009

# (kind, payload, number).
# TEXT, BINARY, PING, PONG: the payload, 0. CLOSE: the reason in UTF-8, the code (1005 if there was none).
# TOO_LARGE: the first bytes of a skipped message, its size so far. FAIL: the reason, the code to close with;
# it is the last event.
FrameEvent = tuple[int, bytes, int]

# Size of the prefix of a skipped message that is reported, so that its handler can identify it.
SKIPPED_PREFIX_BYTES = 4096
HEADER_BYTES_MAX = 14
CONTROL_BYTES_MAX = 125

# The sender removes this end of a deflated message and the reader adds it again (RFC 7692).
_DEFLATE_TAIL = b"\x00\x00\xff\xff"
_RSV1 = 0x40
_FIN = 0x80


def mask_with_integers(data: bytes | bytearray | memoryview, mask: bytes) -> bytes:
    """XOR `data` with the repeated mask as one big integer; about a memory copy per operand."""
    size = len(data)
    repeated = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(repeated, "little")).to_bytes(size, "little")


def _choose_mask() -> Callable[[bytes | bytearray | memoryview, bytes], bytes]:
    try:
        from websockets.speedups import apply_mask as compiled
    except ImportError:
        return mask_with_integers
    return compiled


apply_mask = _choose_mask()


def is_close_code(code: int) -> bool:
    """True for codes that may appear in a close frame."""
    return 1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999


# --- writing


# Heads of text messages by size; a few hundred sizes cover nearly all messages.
_HEADS_MAX: Final = 1024
TEXT_HEADS: Final[dict[int, bytes]] = {}


def text_head(size: int) -> bytes:
    """The frame head of a text message from the server."""
    head = TEXT_HEADS.get(size)
    if head is None:
        head = _frame_head(_FIN | TEXT, size)
        if len(TEXT_HEADS) < _HEADS_MAX:
            TEXT_HEADS[size] = head
    return head


def _frame_head(first: int, size: int) -> bytes:
    if size < 126:
        return bytes((first, size))
    if size < 65536:
        return bytes((first, 126, size >> 8, size & 0xFF))
    return bytes((first, 127)) + size.to_bytes(8, "big")


def encode_frame(opcode: int, payload: bytes, *, fin: bool = True, compressed: bool = False) -> bytes:
    return _frame_head(opcode | (_FIN if fin else 0) | (_RSV1 if compressed else 0), len(payload)) + payload


def encode_text(payload: bytes) -> bytes:
    """One text message from the server, encoded once and written to many connections."""
    return text_head(len(payload)) + payload


def encode_binary(payload: bytes) -> bytes:
    return encode_frame(BINARY, payload)


def encode_close(code: int, reason: str = "") -> bytes:
    """A close frame; the reason is truncated to fit, at a character boundary."""
    if code == NO_STATUS:
        return encode_frame(CLOSE, b"")
    cut = reason.encode("utf-8")[: CONTROL_BYTES_MAX - 2].decode("utf-8", "ignore")
    return encode_frame(CLOSE, code.to_bytes(2, "big") + cut.encode("utf-8"))


def deflate(payload: bytes) -> bytes:
    """The payload of a compressed message, without context takeover."""
    packer = zlib.compressobj(wbits=-15)
    return (packer.compress(payload) + packer.flush(zlib.Z_SYNC_FLUSH))[: -len(_DEFLATE_TAIL)]


# --- reading


class _FrameError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _Inflater(Protocol):
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class FrameReader:
    """Turns the bytes of one client into events."""

    __slots__ = (
        "_checker",
        "_deflate",
        "_discard_bytes",
        "_done",
        "_fin",
        "_frame_left",
        "_frame_opcode",
        "_header",
        "_inflater",
        "_mask",
        "_message_bytes",
        "_message_opcode",
        "_parts",
        "_parts_bytes",
        "_payload",
        "_prefix",
        "_prefix_bytes",
        "_skipped_bytes",
    )

    def __init__(self, message_bytes: int, discard_bytes: int, *, deflate: bool = False) -> None:
        self._message_bytes = message_bytes
        self._discard_bytes = max(discard_bytes, message_bytes)
        self._prefix_bytes = min(SKIPPED_PREFIX_BYTES, message_bytes)
        self._deflate = deflate
        self._done = False
        # An incomplete frame header.
        self._header = b""
        # The frame whose payload is arriving; -1 between frames.
        self._frame_opcode = -1
        self._frame_left = 0
        self._fin = True
        self._mask = b""
        self._payload: bytearray | None = None  # received so far, if incomplete
        # The message whose frames are arriving; 0 between messages.
        self._message_opcode = 0
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._checker: codecs.IncrementalDecoder | None = None
        self._inflater: _Inflater | None = None
        # Size of the message being skipped; -1 if none is.
        self._skipped_bytes = -1
        self._prefix = b""

    @property
    def buffered_bytes(self) -> int:
        """Bytes buffered for incomplete frames and messages."""
        return len(self._header) + len(self._payload or b"") + self._parts_bytes + len(self._prefix)

    @property
    def in_frame(self) -> bool:
        """Whether a frame is incomplete."""
        return self._frame_opcode >= 0 or self._header != b""

    def feed(self, data: bytes) -> list[FrameEvent]:
        """The events that `data` completes. After CLOSE or FAIL nothing more is read."""
        events: list[FrameEvent] = []
        try:
            between = not (self._header or self._message_opcode or self._done) and self._frame_opcode < 0
            read = _read_whole_texts(data, self._message_bytes, events) if between else 0
            if read < len(data) or not between:
                self._read(data[read:] if read else data, events)
        except _FrameError as failure:
            events.append((FAIL, str(failure).encode("utf-8"), failure.code))
            self._done = True
        if self._done:
            self._reset()
        return events

    def _read(self, data: bytes, events: list[FrameEvent]) -> None:
        position = 0
        if self._header:
            data = self._header + data
            self._header = b""
        end = len(data)
        while not self._done:
            if self._frame_opcode >= 0:
                if position < end or self._frame_left == 0:
                    position = self._read_payload(data, position, events)
                if self._frame_opcode >= 0:
                    return
                continue
            start = position
            if end - position < 2:
                break
            first = data[position]
            second = data[position + 1]
            if first != _FIN | TEXT or second < 0x80 or self._message_opcode:
                self._check_first_bytes(first, second)
            size = second & 0x7F
            position += 2
            if size >= 126:
                width = 2 if size == 126 else 8
                if end - position < width:
                    position = start
                    break
                size = _long_size(data[position : position + width])
                position += width
            if end - position < 4:
                self._check_size(first, size, events)
                if self._done:
                    return
                position = start
                break
            mask = data[position : position + 4]
            position += 4
            if first == _FIN | TEXT and end - position >= size <= self._message_bytes:
                # The common case: a whole text message in one read.
                payload = apply_mask(data[position : position + size], mask)
                position += size
                _check_utf8(payload)
                events.append((TEXT, payload, 0))
                continue
            self._begin_frame(first, size, mask, events)
        self._header = data[position:] if not self._done else b""

    def _check_first_bytes(self, first: int, second: int) -> None:
        opcode = first & 0x0F
        reserved = first & 0x70
        if opcode > PONG or BINARY < opcode < CLOSE:
            raise _FrameError(PROTOCOL_ERROR, "unknown opcode")
        if reserved and not (reserved == _RSV1 and self._deflate and opcode in (TEXT, BINARY)):
            raise _FrameError(PROTOCOL_ERROR, "reserved bits are set")
        if not second & 0x80:
            raise _FrameError(PROTOCOL_ERROR, "a client's frames must be masked")
        if opcode >= CLOSE:
            if second & 0x7F > CONTROL_BYTES_MAX or not first & _FIN:
                raise _FrameError(PROTOCOL_ERROR, "a control frame is too long or fragmented")
        elif opcode == CONTINUATION:
            if self._message_opcode == 0:
                raise _FrameError(PROTOCOL_ERROR, "continuation frame without a message")
        elif self._message_opcode != 0:
            raise _FrameError(PROTOCOL_ERROR, "new message inside a fragmented one")

    def _check_size(self, first: int, size: int, events: list[FrameEvent]) -> None:
        """End the connection for a message that is too large even to skip, as soon as its size is known."""
        if first & 0x0F >= CLOSE:
            return
        total = size + (self._skipped_bytes if self._skipped_bytes >= 0 else self._parts_bytes)
        if total > self._discard_bytes:
            prefix = self._prefix or b"".join(self._parts)[: self._prefix_bytes]
            events.append((TOO_LARGE, prefix, total))
            events.append((FAIL, b"message too large", MESSAGE_TOO_BIG))
            self._done = True

    def _begin_frame(self, first: int, size: int, mask: bytes, events: list[FrameEvent]) -> None:
        self._check_size(first, size, events)
        if self._done:
            return
        opcode = first & 0x0F
        self._frame_opcode = opcode
        self._frame_left = size
        self._fin = first & _FIN != 0
        self._mask = mask
        if opcode >= CLOSE:
            return
        if opcode != CONTINUATION:
            self._message_opcode = opcode
            if first & _RSV1:
                self._inflater = zlib.decompressobj(wbits=-15)
        # A deflated frame is inflated as it arrives, so only its own size counts here.
        held = self._parts_bytes if self._inflater is None else 0
        if self._skipped_bytes < 0 and held + size > self._message_bytes:
            self._skip()
        if self._skipped_bytes >= 0:
            self._skipped_bytes += size

    def _skip(self) -> None:
        """Discard the rest of the message as it arrives; its prefix is stored."""
        self._prefix = b"".join(self._parts)[: self._prefix_bytes]
        self._skipped_bytes = self._parts_bytes
        self._parts.clear()
        self._parts_bytes = 0
        self._checker = None

    def _read_payload(self, data: bytes, position: int, events: list[FrameEvent]) -> int:
        """Consume the part of the current frame's payload in `data`; returns the new position."""
        piece = data[position : position + self._frame_left]
        position += len(piece)
        self._frame_left -= len(piece)
        is_control = self._frame_opcode >= CLOSE
        if is_control or (self._inflater is None and self._skipped_bytes < 0):
            if self._frame_left:
                if self._payload is None:
                    self._payload = bytearray()
                self._payload += piece
                return position
            whole = bytes(self._payload) + piece if self._payload else piece
            self._payload = None
            payload = apply_mask(whole, self._mask) if whole else b""
        else:
            payload = apply_mask(piece, self._mask) if piece else b""
            shift = len(piece) & 3
            self._mask = self._mask[shift:] + self._mask[:shift]
            if self._skipped_bytes >= 0:
                if len(self._prefix) < self._prefix_bytes and self._inflater is None:
                    self._prefix += payload[: self._prefix_bytes - len(self._prefix)]
                payload = b""
            else:
                self._inflate(payload)
                payload = b""
            if self._frame_left:
                return position
        opcode = self._frame_opcode
        self._frame_opcode = -1
        if is_control:
            self._end_control(opcode, payload, events)
        else:
            self._end_data(payload, events)
        return position

    def _inflate(self, payload: bytes) -> None:
        """Inflate into the message up to the limit, to bound memory for compression bombs."""
        inflater = self._inflater
        assert inflater is not None
        room = self._message_bytes - self._parts_bytes + 1
        try:
            inflated = inflater.decompress(payload, room)
        except zlib.error:
            raise _FrameError(INVALID_DATA, "invalid compressed message") from None
        if inflated:
            self._parts.append(inflated)
            self._parts_bytes += len(inflated)
        if self._parts_bytes > self._message_bytes:
            self._skip()

    def _end_data(self, payload: bytes, events: list[FrameEvent]) -> None:
        if self._skipped_bytes >= 0:
            if self._fin:
                events.append((TOO_LARGE, self._prefix, self._skipped_bytes))
                self._end_message()
            return
        if self._inflater is not None:
            if not self._fin:
                return
            self._inflate(_DEFLATE_TAIL)
            if self._skipped_bytes >= 0:
                self._end_data(b"", events)
                return
            payload = b"".join(self._parts)
            if self._message_opcode == TEXT:
                _check_utf8(payload)
        elif self._fin and not self._parts_bytes and self._checker is None:
            if self._message_opcode == TEXT:
                _check_utf8(payload)
        else:
            if payload:
                self._parts.append(payload)
                self._parts_bytes += len(payload)
            if self._message_opcode == TEXT:
                self._check_fragment(payload)
            if not self._fin:
                return
            payload = b"".join(self._parts)
        events.append((self._message_opcode, payload, 0))
        self._end_message()

    def _check_fragment(self, payload: bytes) -> None:
        """Characters may be split between fragments, so the decoder keeps its state between frames."""
        if self._checker is None:
            self._checker = codecs.getincrementaldecoder("utf-8")()
        try:
            self._checker.decode(payload, self._fin)
        except UnicodeDecodeError:
            raise _FrameError(INVALID_DATA, "text is not UTF-8") from None

    def _end_control(self, opcode: int, payload: bytes, events: list[FrameEvent]) -> None:
        if opcode != CLOSE:
            events.append((opcode, payload, 0))
            return
        code = NO_STATUS
        if payload:
            code = int.from_bytes(payload[:2], "big")
            if len(payload) == 1 or not is_close_code(code):
                raise _FrameError(PROTOCOL_ERROR, "malformed close frame")
            _check_utf8(payload[2:])
        if self._message_opcode:
            raise _FrameError(PROTOCOL_ERROR, "closed inside a fragmented message")
        events.append((CLOSE, payload[2:], code))
        self._done = True

    def _end_message(self) -> None:
        self._message_opcode = 0
        self._parts.clear()
        self._parts_bytes = 0
        self._checker = None
        self._inflater = None
        self._skipped_bytes = -1
        self._prefix = b""

    def _reset(self) -> None:
        self._end_message()
        self._header = b""
        self._payload = None


def _read_whole_texts(data: bytes, bytes_max: int, events: list[FrameEvent]) -> int:
    """Read complete single-frame text messages, the common case; returns the position after them."""
    position, end, mask_off = 0, len(data), apply_mask
    while end - position > HEADER_BYTES_MAX and data[position] == _FIN | TEXT:
        size = data[position + 1] - 0x80  # negative without a mask
        start = position + 6
        if size == 126:
            size = data[position + 2] << 8 | data[position + 3]
            start = position + 8
            if size < 126:
                break
        elif not 0 <= size < 126:
            break
        stop = start + size
        if stop > end or size > bytes_max:
            break
        payload = mask_off(data[start:stop], data[start - 4 : start])
        if not payload.isascii():
            _check_utf8(payload)
        events.append((TEXT, payload, 0))
        position = stop
    return position


def _long_size(field: bytes) -> int:
    size = int.from_bytes(field, "big")
    if size >> 63 or size < (126 if len(field) == 2 else 65536):
        raise _FrameError(PROTOCOL_ERROR, "frame length is not minimally encoded")
    return size


def _check_utf8(payload: bytes) -> None:
    if payload.isascii():
        return
    try:
        payload.decode("utf-8")
    except UnicodeDecodeError:
        raise _FrameError(INVALID_DATA, "text is not UTF-8") from None
