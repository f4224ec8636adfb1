"""Server-sent events and WebSocket messages of live reads: data and control events.

Both events of a pair have the offset after the batch as their `id`. A browser's `EventSource` remembers the
id of the last event that it dispatched and sends it as `Last-Event-ID` when it reconnects, so a connection
that ends anywhere, even between data and control, neither loses nor repeats a batch. The `id` line is the
last one of an event because clients that match the text of an event expect `data:` directly after `event:`.
"""

from __future__ import annotations

import base64
import re

import orjson

# The header lines of every event stream.
EVENT_STREAM_HEADERS = (
    b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
)
KEEP_ALIVE = b": keep-alive\n\n"
_LINE_END = re.compile(rb"\r\n|\r|\n")


def text_event(payload: bytes, next_offset: str) -> bytes:
    """A data event; split at CR as well as LF, otherwise a payload could inject an event."""
    end = b"id: %b\n\n" % next_offset.encode()
    if b"\n" not in payload and b"\r" not in payload:
        # Parsers strip one leading space, so a line that starts with one gets another.
        return b"event: data\ndata:" + (b" " if payload.startswith(b" ") else b"") + payload + b"\n" + end
    lines = _LINE_END.split(payload)
    body = b"".join(b"data:" + (b" " if line.startswith(b" ") else b"") + line + b"\n" for line in lines)
    return b"event: data\n" + body + end


def base64_event(payload: bytes, next_offset: str) -> bytes:
    return b"event: data\ndata:%b\nid: %b\n\n" % (base64.b64encode(payload), next_offset.encode())


def control_event(next_offset: str, cursor: str, up_to_date: bool, closed: bool) -> bytes:
    """The control event after every data event: one flat object on one line."""
    fields = f'"streamNextOffset":"{next_offset}"'
    if closed:
        fields += ',"streamClosed":true'
    else:
        fields += f',"streamCursor":"{cursor}"'
    if up_to_date:
        fields += ',"upToDate":true'
    return f"event: control\ndata:{{{fields}}}\nid: {next_offset}\n\n".encode()


def websocket_data(payload: bytes, text: bool) -> bytes:
    """A data message of `live=ws`; payloads that are not text are base64."""
    if text:
        try:
            return orjson.dumps({"type": "data", "payload": payload.decode()})
        except UnicodeDecodeError:
            pass
    return orjson.dumps({"type": "data", "payload": base64.b64encode(payload).decode(), "encoding": "base64"})


def websocket_control(next_offset: str, cursor: str, up_to_date: bool, closed: bool) -> bytes:
    message: dict[str, object] = {
        "type": "control",
        "streamNextOffset": next_offset,
        "upToDate": up_to_date,
        "streamClosed": closed,
    }
    if not closed:
        message["streamCursor"] = cursor
    return orjson.dumps(message)
