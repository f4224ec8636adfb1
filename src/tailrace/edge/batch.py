"""A batch of a stream: what one data message and its control carried, in every form that readers take."""

from __future__ import annotations

import base64

import msgspec

from tailrace.http.exchange import chunk
from tailrace.protocol import sse
from tailrace.protocol.websocket_frames import encode_text

OVERHEAD_BYTES = 512


class FeedMessage(msgspec.Struct, frozen=True):
    """What an upstream says on a socket: a `data` or a `control`."""

    type: str
    payload: str = ""
    encoding: str = ""
    offset: str = msgspec.field(name="streamNextOffset", default="")
    cursor: str = msgspec.field(name="streamCursor", default="")
    up_to_date: bool = msgspec.field(name="upToDate", default=False)
    closed: bool = msgspec.field(name="streamClosed", default=False)


decode_message = msgspec.json.Decoder(FeedMessage).decode


class FeedBatch:
    """Covers `(start, next]`. Each wire form is made on first use, and the same bytes go to all readers."""

    __slots__ = (
        "_data",
        "arrived",
        "closed",
        "cursor",
        "cursor_number",
        "next",
        "payload",
        "size",
        "start",
        "text",
        "up_to_date",
    )

    def __init__(
        self, start: str, following: str, payload: bytes | None, text: bool, cursor: str, *, closed: bool
    ) -> None:
        self.start = start
        self.next = following
        self.payload = payload  # None if the batch only moves on: nothing in it was for this reader
        self.text = text  # else it travels as base64
        self.cursor = cursor
        self.cursor_number = int(cursor) if cursor else -1
        self.closed = closed
        # What it holds with one wire form made of it, which is the usual number.
        self.size = OVERHEAD_BYTES + (0 if payload is None else 2 * len(payload))
        self.arrived = 0.0
        self.up_to_date = False  # as a slice said; of a batch the channel knows
        self._data: dict[str, bytes] = {}

    def encode(self, form: str, cursor: str, up_to_date: bool) -> bytes:
        """The batch with its control; the cursor may be one that a single reader needs."""
        return self.event(form) + encode_control(form, self.next, cursor, up_to_date, self.closed)

    def is_made(self, form: str) -> bool:
        return self.payload is None or form in self._data

    def event(self, form: str) -> bytes:
        """The data alone: most of the bytes, and the same for everybody."""
        payload = self.payload
        if payload is None:
            return b""
        found = self._data.get(form)
        if found is None:
            if form == "ws":
                found = encode_text(sse.websocket_data(payload, self.text))
            else:
                made = sse.text_event if self.text else sse.base64_event
                found = chunk(made(payload, self.next))
            self._data[form] = found
        return found


def encode_control(form: str, offset: str, cursor: str, up_to_date: bool, closed: bool) -> bytes:
    """A control by itself."""
    if form == "ws":
        return encode_text(sse.websocket_control(offset, cursor, up_to_date, closed))
    return chunk(sse.control_event(offset, cursor, up_to_date, closed))


def message_payload(message: FeedMessage) -> bytes:
    if message.encoding == "base64":
        return base64.b64decode(message.payload)
    return message.payload.encode()
