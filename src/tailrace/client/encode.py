"""Turning what the caller appends into bytes.

The rule, for streams and producers alike: bytes go out as they are; on a JSON stream they are JSON text.
Any other value is a JSON message, and a list is a batch of messages. A string is a JSON string on a JSON
stream and UTF-8 text on any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import msgspec

from tailrace.client.error import NotEncodableError
from tailrace.client.model import JSON_TYPE, is_json

# Any value msgspec can encode: dicts, lists, numbers, datetimes, dataclasses, Structs...
Data = Any

_encode = msgspec.json.Encoder().encode
_raw = msgspec.json.Decoder(msgspec.Raw)
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])


def implied_type(data: Data) -> str | None:
    """The content type that the data leaves no choice about; None if it must come from the stream."""
    return None if isinstance(data, str) or _as_bytes(data) is not None else JSON_TYPE


def encode_body(data: Data, content_type: str) -> bytes:
    """The body of one append."""
    octets = _as_bytes(data)
    if octets is not None:
        return octets
    if not is_json(content_type):
        return _encode_text(data, content_type)
    body = _encode(data)
    if body.startswith(b"[") and not isinstance(data, (list, tuple, msgspec.Raw)):
        # A set, for instance: one message, which the server would take apart as a batch.
        return b"[" + body + b"]"
    return body


def encode_parts(data: Data, content_type: str) -> list[bytes]:
    """The same append as the messages it is made of, for batching with others."""
    if not is_json(content_type):
        return [encode_body(data, content_type)]
    octets = _as_bytes(data)
    if octets is not None:
        text = octets.strip(b" \t\r\n")
        try:
            if text.startswith(b"["):
                return [bytes(raw) for raw in _raw_list.decode(text)]
            _raw.decode(text)
        except msgspec.DecodeError as error:
            # Refused here: one malformed message would fail all others of its batch.
            raise ValueError(f"bytes for a JSON stream must be JSON text: {error}") from error
        return [text]
    if isinstance(data, (list, tuple)):
        return [_encode(message) for message in data]  # pyright: ignore[reportUnknownVariableType]
    return [_encode(data)]


def join_parts(parts: list[bytes], content_type: str) -> bytes:
    """One body for many parts. On a byte stream a reader sees the same bytes however they were grouped."""
    if is_json(content_type):
        return b"[" + b",".join(parts) + b"]"
    return parts[0] if len(parts) == 1 else b"".join(parts)


def group_parts(
    items: Iterable[Data], content_type: str, *, bytes_max: int, count_max: int
) -> Iterator[list[bytes]]:
    """Cut items into bodies of a bounded size. Entries of byte streams are never joined.

    NotEncodableError for an item that no body can hold.
    """
    group: list[bytes] = []
    size = 0
    for item in items:
        part = _encode_part(item, content_type)
        if not is_json(content_type):
            yield [part]
            continue
        if group and (size + len(part) > bytes_max or len(group) >= count_max):
            yield group
            group, size = [], 0
        group.append(part)
        size += len(part) + 1
    if group:
        yield group


def _encode_part(item: Data, content_type: str) -> bytes:
    """One item of several: of JSON one message, whatever it is."""
    try:
        if not is_json(content_type):
            return encode_body(item, content_type)
        octets = _as_bytes(item)
        return _encode(item) if octets is None else octets
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NotEncodableError(str(error)) from error


def _as_bytes(data: Data) -> bytes | None:
    """The bytes of what the wire can carry as it is; None for a value that has to be encoded."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, (bytearray, memoryview)):
        return bytes(cast("bytearray", data))
    return None


def _encode_text(data: Data, content_type: str) -> bytes:
    if isinstance(data, str):
        return data.encode()
    raise TypeError(
        f"a stream of {content_type} takes bytes or str, not {type(data).__name__}; "
        "use append_many for several entries"
    )
