"""Server-sent events: how a batch and its control look on the wire."""

from __future__ import annotations

import base64
import re

import orjson

KEEP_ALIVE = b": keep-alive\n\n"
_LINE_END = re.compile(rb"\r\n|\r|\n")


def text_event(payload: bytes) -> bytes:
    """A data event; cut at CR as well as LF, or a payload could open an event of its own."""
    if b"\n" not in payload and b"\r" not in payload:
        # Parsers strip one leading space, so a line that begins with one gets another.
        return b"event: data\ndata:" + (b" " if payload.startswith(b" ") else b"") + payload + b"\n\n"
    lines = _LINE_END.split(payload)
    body = b"".join(b"data:" + (b" " if line.startswith(b" ") else b"") + line + b"\n" for line in lines)
    return b"event: data\n" + body + b"\n"


def base64_event(payload: bytes) -> bytes:
    return b"event: data\ndata:" + base64.b64encode(payload) + b"\n\n"


def control_event(next_offset: str, cursor: str, up_to_date: bool, closed: bool) -> bytes:
    """The control that follows every data event: one flat object on one line."""
    fields = f'"streamNextOffset":"{next_offset}"'
    if closed:
        fields += ',"streamClosed":true'
    else:
        fields += f',"streamCursor":"{cursor}"'
    if up_to_date:
        fields += ',"upToDate":true'
    return f"event: control\ndata:{{{fields}}}\n\n".encode()


def ws_data(payload: bytes, text: bool) -> bytes:
    """A data message of `live=ws`; bytes that are not text travel as base64."""
    if text:
        try:
            return orjson.dumps({"type": "data", "payload": payload.decode()})
        except UnicodeDecodeError:
            pass
    return orjson.dumps({"type": "data", "payload": base64.b64encode(payload).decode(), "encoding": "base64"})


def ws_control(next_offset: str, cursor: str, up_to_date: bool, closed: bool) -> bytes:
    message: dict[str, object] = {
        "type": "control",
        "streamNextOffset": next_offset,
        "upToDate": up_to_date,
        "streamClosed": closed,
    }
    if not closed:
        message["streamCursor"] = cursor
    return orjson.dumps(message)
