"""Parses and validates the headers and page limits of requests."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from tailrace.common import timestamps
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.http.exchange import Exchange
from tailrace.log.model import Lifetime
from tailrace.protocol import offsets
from tailrace.protocol.http_headers import is_valid_content_type
from tailrace.protocol.stream_names import decode_name

INTEGER_MAX = 2**53 - 1
_INTEGER = re.compile(rb"[0-9]{1,16}")
_COUNT = re.compile(rb"0|[1-9][0-9]{0,15}")
# Headers that must not be repeated.
_SINGLE_HEADERS = frozenset(
    {
        b"content-type",
        b"stream-seq",
        b"stream-key",
        b"stream-timestamp",
        b"stream-ttl",
        b"stream-expires-at",
        b"stream-retention",
        b"stream-retention-bytes",
        b"stream-closed",
        b"stream-forked-from",
        b"stream-fork-offset",
        b"stream-fork-sub-offset",
        b"producer-id",
        b"producer-epoch",
        b"producer-seq",
        b"authorization",
    }
)


def parse_page_limit(query: dict[str, str], name: str, maximum: int) -> int:
    """The requested size of a page, within the limit."""
    text = query.get(name)
    if text is None:
        return maximum
    if not text.isascii() or not text.isdigit() or len(text) > 12 or not int(text):
        raise TailraceError("invalid_request", f"{name} must be a whole number above 0")
    return min(int(text), maximum)


def invalid_header(name: str, problem: str) -> TailraceError:
    return TailraceError("invalid_header", f"{name} {problem}", header=name)


def check_single_headers(exchange: Exchange) -> None:
    """Reject repeated headers that may occur only once."""
    if exchange.repeated is not None:
        for name in exchange.repeated & _SINGLE_HEADERS:
            raise invalid_header(name.decode(), "must be given only once")


def request_content_type(exchange: Exchange) -> str | None:
    raw = exchange.headers.get(b"content-type")
    return None if raw is None else parse_content_type(raw)


@lru_cache(maxsize=1024)
def parse_content_type(raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise invalid_header("Content-Type", "must be UTF-8") from None
    if not is_valid_content_type(text):
        raise invalid_header("Content-Type", "must be a media type")
    return text


def check_content_encoding(exchange: Exchange) -> None:
    encoding = exchange.headers.get(b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise TailraceError("unsupported_encoding", "request bodies must not be compressed")


def is_closing(exchange: Exchange) -> bool:
    """Whether the request has `Stream-Closed: true` (case-insensitive); other values are ignored."""
    value = exchange.headers.get(b"stream-closed")
    return value is not None and value.lower() == b"true"


def parse_stream_seq(exchange: Exchange, limits: Limits) -> bytes | None:
    value = exchange.headers.get(b"stream-seq")
    if value is not None and not 0 < len(value) <= limits.stream_seq_bytes:
        raise invalid_header("Stream-Seq", f"must have 1 to {limits.stream_seq_bytes} bytes")
    return value


def parse_stream_key(exchange: Exchange, limits: Limits) -> bytes | None:
    value = exchange.headers.get(b"stream-key")
    if value is None:
        return None
    if not 0 < len(value) <= limits.key_bytes:
        raise invalid_header("Stream-Key", f"must have 1 to {limits.key_bytes} bytes")
    try:
        value.decode()
    except UnicodeDecodeError:
        raise invalid_header("Stream-Key", "must be UTF-8") from None
    return value


def parse_stream_timestamp_ns(exchange: Exchange) -> int | None:
    value = exchange.headers.get(b"stream-timestamp")
    if value is None:
        return None
    parsed = timestamps.parse_timestamp_ns(value.decode("latin-1"))
    if parsed is None:
        raise invalid_header("Stream-Timestamp", "must be an RFC 3339 timestamp or Unix nanoseconds")
    return parsed


def parse_producer(exchange: Exchange, limits: Limits) -> tuple[str, int, int] | None:
    """The three producer headers; all of them must be present, or none."""
    headers = exchange.headers
    raw_id, raw_epoch, raw_seq = (
        headers.get(b"producer-id"),
        headers.get(b"producer-epoch"),
        headers.get(b"producer-seq"),
    )
    if raw_id is None and raw_epoch is None and raw_seq is None:
        return None
    if raw_id is None or raw_epoch is None or raw_seq is None:
        raise invalid_header("Producer-Id", "must be sent together with Producer-Epoch and Producer-Seq")
    if not 0 < len(raw_id) <= limits.producer_id_bytes:
        raise invalid_header("Producer-Id", f"must have 1 to {limits.producer_id_bytes} bytes")
    try:
        producer_id = raw_id.decode()
    except UnicodeDecodeError:
        raise invalid_header("Producer-Id", "must be UTF-8") from None
    return producer_id, _parse_integer("Producer-Epoch", raw_epoch), _parse_integer("Producer-Seq", raw_seq)


def _parse_integer(name: str, raw: bytes) -> int:
    if not _INTEGER.fullmatch(raw) or int(raw) > INTEGER_MAX:
        raise invalid_header(name, "must be a decimal integer from 0 to 2^53-1")
    return int(raw)


def parse_lifetime(exchange: Exchange) -> Lifetime:
    headers = exchange.headers
    raw_ttl, raw_expires = headers.get(b"stream-ttl"), headers.get(b"stream-expires-at")
    if raw_ttl is not None and raw_expires is not None:
        raise TailraceError("conflicting_expiry", "Stream-TTL and Stream-Expires-At cannot be combined")
    ttl_s = None if raw_ttl is None else timestamps.parse_duration_s(raw_ttl.decode("latin-1"), "Stream-TTL")
    expires_ns: int | None = None
    if raw_expires is not None:
        expires_ns = timestamps.parse_rfc3339_ns(raw_expires.decode("latin-1"))
        if expires_ns is None:
            raise invalid_header("Stream-Expires-At", "must be an RFC 3339 timestamp")
    raw_retention, raw_bytes = headers.get(b"stream-retention"), headers.get(b"stream-retention-bytes")
    retention_s: int | None = None
    if raw_retention is not None:
        retention_s = timestamps.parse_duration_s(raw_retention.decode("latin-1"), "Stream-Retention")
    if raw_bytes is not None and not _COUNT.fullmatch(raw_bytes):
        raise invalid_header("Stream-Retention-Bytes", "must be a whole number of bytes")
    return Lifetime(ttl_s, expires_ns, retention_s, None if raw_bytes is None else int(raw_bytes))


class ForkHeaders(NamedTuple):
    source: str | None
    position: tuple[int, int] | None
    sub: int


def parse_fork(exchange: Exchange) -> ForkHeaders:
    headers = exchange.headers
    raw_source = headers.get(b"stream-forked-from")
    raw_offset = headers.get(b"stream-fork-offset")
    raw_sub = headers.get(b"stream-fork-sub-offset")
    if raw_source is None:
        if raw_offset is not None or raw_sub is not None:
            raise TailraceError("invalid_fork", "Stream-Fork-Offset requires Stream-Forked-From")
        return ForkHeaders(None, None, 0)
    raw_name = raw_source.removeprefix(b"/v1/stream/")
    source = decode_name(raw_name)
    if source is None or not source or source.startswith("/"):
        raise TailraceError("invalid_fork", "Stream-Forked-From must be /v1/stream/<name> on this server")
    if raw_sub is not None and not _COUNT.fullmatch(raw_sub):
        raise TailraceError("invalid_fork", "Stream-Fork-Sub-Offset must be a whole number")
    position: tuple[int, int] | None = None
    if raw_offset is not None:
        text = raw_offset.decode("latin-1")
        if text != "now":  # `now` is the tail, as without an offset
            position = (0, 0) if text == "-1" else offsets.parse_offset(text)
    return ForkHeaders(source, position, 0 if raw_sub is None else int(raw_sub))
