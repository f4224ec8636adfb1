"""Pages, stream descriptions and append results; JSON encoding of appended data.

Encoding rule for streams and producers: bytes are sent unchanged; on a JSON stream they are JSON text. Any
other value is a JSON message, and a list is a batch of messages. A string is a JSON string on a JSON stream
and UTF-8 text on any other.

`raw_elements` and `raw_members` return the parts of a JSON text as written. Fast decoders reject lone
surrogates, which JavaScript writes for text that was cut within a character, and round or reject numbers
beyond 64 bits; both must be passed on unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

import msgspec

from tailrace.client.errors import NotEncodableError

# Numbers are not converted: they may have any number of digits, and only their positions are needed.
_RAW_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)
_BETWEEN: Final = re.compile(r"[ \t\r\n,:]*")


def raw_elements(body: bytes) -> list[bytes]:
    """The elements of a JSON array, as written."""
    return [text.encode() for text in _scan_values(body, "[", "]")]


def raw_members(body: bytes) -> dict[str, bytes]:
    """The members of a JSON object by name, as written."""
    values = iter(_scan_values(body, "{", "}"))
    return {json.loads(name): text.encode() for name, text in zip(values, values, strict=True)}


def _scan_values(body: bytes, opening: str, closing: str) -> list[str]:
    """The values in order; for an object names and values alternate."""
    text, found = body.decode(), list[str]()
    _RAW_DECODER.decode(text)
    place = _skip_separators(text, text.index(opening) + 1)
    while text[place] != closing:
        end = _RAW_DECODER.raw_decode(text, place)[1]
        found.append(text[place:end])
        place = _skip_separators(text, end)
    return found


def _skip_separators(text: str, place: int) -> int:
    between = _BETWEEN.match(text, place)
    assert between is not None, "the pattern matches the empty text"
    return between.end()


JSON_TYPE = "application/json"
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])


def is_json(content_type: str | None) -> bool:
    """Whether a content type means one entry per JSON message; ignores parameters and case."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() == JSON_TYPE


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a stream and the position after it.

    Read on from `next_offset`, and store it to resume later. `up_to_date` means that the slice reached the
    tail, `closed` that nothing will follow it.
    """

    body: bytes
    content_type: str
    next_offset: str
    up_to_date: bool = False
    closed: bool = False
    end_offset: str | None = None
    earliest_offset: str | None = None
    etag: str | None = None
    cursor: str | None = None

    @property
    def is_json(self) -> bool:
        return is_json(self.content_type)

    @property
    def entries(self) -> list[Any]:
        """The decoded messages of a JSON stream; on other streams the bytes of the page, as one item.

        The protocol does not mark the boundaries between entries of a byte stream.
        """
        if not self.is_json:
            return [self.body] if self.body else []
        if not self.body:
            return []
        try:
            return msgspec.json.decode(self.body, type=list[Any])
        except msgspec.DecodeError:
            # Legal JSON that msgspec rejects: numbers like 1e400, lone surrogates.
            return json.loads(self.body)

    @property
    def raw_entries(self) -> list[bytes]:
        """Like `entries`, with each JSON message as the exact bytes that were appended."""
        if not self.is_json:
            return [self.body] if self.body else []
        if not self.body:
            return []
        try:
            return [bytes(raw) for raw in _raw_list.decode(self.body)]
        except msgspec.DecodeError:
            return raw_elements(self.body)

    @property
    def is_empty(self) -> bool:
        return not self.body or (self.is_json and self.body == b"[]")


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as described by HEAD and PUT. `next_offset` is the tail."""

    name: str
    content_type: str
    next_offset: str
    closed: bool = False
    created: bool = False
    earliest_offset: str | None = None
    ttl_s: int | None = None
    expires_at: str | None = None
    retention: str | None = None
    retention_bytes: int | None = None


class AppendResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a committed append: the tail after it. A `duplicate` had been committed before."""

    next_offset: str
    closed: bool = False
    duplicate: bool = False


class StreamDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the list of streams. Decimal positions are strings, as on the wire."""

    name: str
    content_type: str | None = None
    profile: str | None = None
    created_at: str | None = None
    expires_at: str | None = None
    ttl_seconds: int | None = None
    closed: bool = False
    epoch: int = 0
    next_offset: str | None = None
    sealed_through: str | None = None
    uploaded_through: str | None = None
    end_offset: str | None = None
    earliest_offset: str | None = None
    total_size_bytes: str | None = None


# Any value msgspec can encode: dicts, lists, numbers, datetimes, dataclasses, Structs...
Data = Any

_encode = msgspec.json.Encoder().encode
_raw = msgspec.json.Decoder(msgspec.Raw)


def implied_type(data: Data) -> str | None:
    """The content type that the data implies; None if it must come from the stream."""
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
        # For example a set: one message, which the server would split as a batch.
        return b"[" + body + b"]"
    return body


def encode_parts(data: Data, content_type: str) -> list[bytes]:
    """The messages of one append, for batching with others."""
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
            # Rejected here: one malformed message would fail its whole batch.
            raise ValueError(f"bytes for a JSON stream must be JSON text: {error}") from error
        return [text]
    if isinstance(data, (list, tuple)):
        return [_encode(message) for message in data]  # pyright: ignore[reportUnknownVariableType]
    return [_encode(data)]


def join_parts(parts: list[bytes], content_type: str) -> bytes:
    """One body for many parts. On a byte stream the grouping makes no difference to readers."""
    if is_json(content_type):
        return b"[" + b",".join(parts) + b"]"
    return parts[0] if len(parts) == 1 else b"".join(parts)


def group_parts(
    items: Iterable[Data], content_type: str, *, bytes_max: int, count_max: int
) -> Iterator[list[bytes]]:
    """Group items into bodies of a bounded size. Entries of byte streams are never joined.

    NotEncodableError for an item that cannot be encoded.
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
    """Encode one of several items; on a JSON stream always as one message."""
    try:
        if not is_json(content_type):
            return encode_body(item, content_type)
        octets = _as_bytes(item)
        return _encode(item) if octets is None else octets
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NotEncodableError(str(error)) from error


def _as_bytes(data: Data) -> bytes | None:
    """The data if it is bytes-like; None for a value that has to be encoded."""
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
