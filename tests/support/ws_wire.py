"""Frames as a client would send them, good and bad, and ways to cut bytes."""

from __future__ import annotations

from itertools import pairwise

from tailrace.protocol import websocket_frames as ws

MASK = b"\x12\x34\x56\x78"


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, mask: bytes | None = MASK
) -> bytes:
    """One masked client frame; `mask=None` leaves it unmasked."""
    return header(opcode, len(payload), fin=fin, rsv=rsv, mask=mask) + (
        payload if mask is None else ws.mask_with_integers(payload, mask)
    )


def header(
    opcode: int,
    size: int,
    *,
    fin: bool = True,
    rsv: int = 0,
    mask: bytes | None = MASK,
    width: int | None = None,
) -> bytes:
    """A frame header; `width` forces a length field of 0, 2 or 8 bytes."""
    first = bytes(((0x80 if fin else 0) | rsv << 4 | opcode,))
    bit = 0 if mask is None else 0x80
    if width is None:
        width = 0 if size < 126 else 2 if size < 65536 else 8
    if width == 0:
        length = bytes((bit | size,))
    else:
        length = bytes((bit | (126 if width == 2 else 127),)) + size.to_bytes(width, "big")
    return first + length + (mask or b"")


def read_all(reader: ws.FrameReader, data: bytes, cuts: list[int] | None = None) -> list[ws.FrameEvent]:
    """The events of `data`, fed in the pieces that `cuts` make."""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts or []), len(data)]
    events: list[ws.FrameEvent] = []
    for start, end in pairwise(edges):
        events += reader.feed(data[start:end])
    return events
