"""What the client hands out: pages, descriptions of streams, receipts for appends."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tailrace.client import raw_json

JSON_TYPE = "application/json"
_raw_list = msgspec.json.Decoder(list[msgspec.Raw])


def is_json(content_type: str | None) -> bool:
    """Whether a content type means one entry per JSON message. Parameters and case do not matter."""
    return content_type is not None and content_type.partition(";")[0].strip().lower() == JSON_TYPE


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A slice of a stream and the position after it.

    `next_offset` is what to read from next, and what to store in order to resume. `up_to_date` says that the
    slice reached the tail; `closed` that nothing will ever follow it.
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

        The wire does not show where one entry of a byte stream ends and the next begins.
        """
        if not self.is_json:
            return [self.body] if self.body else []
        if not self.body:
            return []
        try:
            return msgspec.json.decode(self.body, type=list[Any])
        except msgspec.DecodeError:
            # Legal JSON beyond msgspec: numbers like 1e400, lone surrogates.
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
            return raw_json.raw_elements(self.body)

    @property
    def is_empty(self) -> bool:
        return not self.body or (self.is_json and self.body == b"[]")


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What HEAD and PUT tell about a stream. `next_offset` is the tail."""

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
    """The receipt of a committed append: the tail after it. A `duplicate` had been committed before."""

    next_offset: str
    closed: bool = False
    duplicate: bool = False


class StreamDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the list of streams. The decimal positions are strings, as on the wire."""

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
