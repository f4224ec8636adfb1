"""Server-sent events, parsed from bytes.

Payloads stay bytes from the socket to the caller: decoding them to text and back would cost time and would
change what is not valid UTF-8.
"""

from __future__ import annotations

import msgspec

# One event holds at most one read page, which is one oversized entry in the worst case: 64 MiB of line ends.
EVENT_BYTES_MAX = 400 * 1024 * 1024


class ServerSentEvent(msgspec.Struct, frozen=True):
    """One dispatched event."""

    name: bytes
    data: bytes


class EventTooLargeError(ValueError):
    """An event grew past `EVENT_BYTES_MAX` before it ended."""


class EventParser:
    """Feed it chunks as they come, cut anywhere; it returns the events completed by them."""

    __slots__ = ("_data", "_name", "_partial", "_partial_bytes", "_size", "_skip_lf")

    def __init__(self) -> None:
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._skip_lf = False
        self._name = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        if self._skip_lf and chunk[:1] == b"\n":
            # The CR that ended the last line was the first half of a CRLF.
            chunk = chunk[1:]
            self._skip_lf = False
        if not chunk:
            return []
        self._skip_lf = chunk.endswith(b"\r")
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *lines = chunk.split(b"\n")
        self._partial.append(first)
        self._partial_bytes += len(first)
        if self._size + self._partial_bytes > EVENT_BYTES_MAX:
            raise EventTooLargeError(f"a server-sent event is larger than {EVENT_BYTES_MAX} bytes")
        if not lines:
            return []
        complete = [b"".join(self._partial), *lines[:-1]]
        self._partial = [lines[-1]]
        self._partial_bytes = len(lines[-1])
        return [event for line in complete if (event := self._take(line)) is not None]

    def _take(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            event = ServerSentEvent(self._name or b"message", b"\n".join(self._data)) if self._data else None
            self._name = b""
            self._data = []
            self._size = 0
            return event
        field, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            self._data.append(value)
            self._size += len(value)
        elif field == b"event":
            self._name = value
        # Comments (an empty field name), `id` and `retry` carry nothing that this protocol uses.
        return None
