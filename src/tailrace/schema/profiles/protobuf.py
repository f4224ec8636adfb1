"""The wire format of protocol buffers, as far as reading exports and writing their answers needs it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

Data = bytes | memoryview

VARINT: Final = 0
FIXED64: Final = 1
BYTES: Final = 2
FIXED32: Final = 5

_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class MalformedMessageError(ValueError):
    """The bytes are no message."""


def read_fields(data: Data) -> Iterator[tuple[int, int, int | Data]]:
    """Number, wire type and value of each field, in the order of the message."""
    at, end = 0, len(data)
    while at < end:
        # Nearly all tags and lengths are one byte: those are not worth a call.
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise MalformedMessageError("a field has no number")
        if kind == BYTES:
            if at < end and (size := data[at]) < 0x80:
                at += 1
            else:
                size, at = _varint(data, at)
            if size > end - at:
                raise MalformedMessageError("a field is longer than its message")
            yield number, kind, data[at : at + size]
            at += size
        elif kind == VARINT:
            value, at = _varint(data, at)
            yield number, kind, value
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
            if size > end - at:
                raise MalformedMessageError("a field is longer than its message")
            yield number, kind, (_U64 if size == 8 else _U32).unpack_from(data, at)[0]
            at += size
        else:
            raise MalformedMessageError("a field has an unknown type")


def _varint(data: Data, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            raise MalformedMessageError("a number is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
        shift += 7
    raise MalformedMessageError("a number is too long")


def to_signed(value: int) -> int:
    """A 64-bit number as it was before it was written."""
    return value - 2**64 if value >= 2**63 else value


def write_varint(number: int, value: int) -> bytes:
    return _encode_varint(number << 3) + _encode_varint(value & (2**64 - 1))


def write_fixed64(number: int, value: int) -> bytes:
    return _encode_varint(number << 3 | FIXED64) + _U64.pack(value)


def write_bytes(number: int, value: bytes) -> bytes:
    return _encode_varint(number << 3 | BYTES) + _encode_varint(len(value)) + value


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
