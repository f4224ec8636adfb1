"""Requests and responses of the stream protocol, as values. No I/O.

All knowledge of the client about URLs, headers and statuses is in this module. The transports send an
`HttpRequest` and return an `HttpResponse`.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TypeAlias, TypedDict, Unpack
from urllib.parse import quote, urlencode

import msgspec

from tailrace.client.errors import (
    INVALID_ANSWER,
    INVALID_NAME,
    ClientError,
    check_integer,
    error_from,
    error_from_status,
)
from tailrace.client.model import AppendResult, Page, StreamDescriptor, StreamInfo

STREAM_ROOT = "/v1/stream/"
LIST_PATH = "/v1/streams"
OCTETS_TYPE = "application/octet-stream"
DIGITS_MAX = 18  # of a number in a header
TIME_NS_MAX = 2**63 - 1

# A point in time. An integer counts Unix nanoseconds; text is RFC 3339.
Time: TypeAlias = datetime | int | str


class HttpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request. `repeatable` means that sending it twice has the effect of sending it once."""

    method: str
    path: str
    headers: tuple[tuple[str, bytes], ...] = ()
    body: bytes = b""
    repeatable: bool = True
    wait_s: float = 0.0


class HttpResponse(msgspec.Struct, frozen=True):
    """A whole response. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class Lifetime(TypedDict, total=False):
    """How long a stream and its entries are retained: options of `create` and `fork`."""

    ttl: timedelta | int | str | None
    expires_at: datetime | str | None
    retention: timedelta | int | str | None
    retention_bytes: int | None


class ReadOptions(TypedDict, total=False):
    """Which entries a read returns: options of `read`, `pages`, `entries` and `follow`."""

    key: str | None
    since: Time | None
    filter: str | None


class ProducerFields(msgspec.Struct, frozen=True):
    """The identity of one idempotent append."""

    producer_id: str
    epoch: int
    seq: int


class ForkPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a fork starts in its source; by default at the tail."""

    source: str
    offset: str | None = None
    sub_offset: int | None = None


def stream_path(name: str) -> str:
    # URL normalisation would remove these segments and reach another stream.
    if not name or any(segment in (".", "..") for segment in name.split("/")):
        raise ClientError(
            INVALID_NAME, f"a stream name must not be empty or have '.' or '..' segments: {name!r}"
        )
    return STREAM_ROOT + quote(name, safe="/")


def header_value(name: str, value: str) -> bytes:
    """UTF-8 bytes of a header value; ValueError if they are not allowed in a header."""
    if not value or value != value.strip(" \t") or any(ord(c) < 0x20 or ord(c) == 0x7F for c in value):
        raise ValueError(
            f"{name} must be non-empty, without control characters and surrounding spaces: {value!r}"
        )
    return value.encode()


def time_text(value: Time | None, name: str = "time") -> str | None:
    """A point in time in the protocol's form: RFC 3339, or Unix nanoseconds for an integer."""
    if value is None:
        return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{name} must have a time zone: {value!r}")
        return value.isoformat()
    if isinstance(value, int):
        check_integer(name, value, most=TIME_NS_MAX)
    return str(value)


def _duration_text(value: timedelta | int | str | None, name: str) -> str | None:
    if isinstance(value, timedelta):
        if value % timedelta(seconds=1):
            raise ValueError(f"{name} must be whole seconds: {value}")
        value = value // timedelta(seconds=1)
    if isinstance(value, int):
        check_integer(name, value)
    return None if value is None else str(value)


class _Headers(list[tuple[str, bytes]]):
    """Header lines; None values are left out."""

    def put(self, name: str, value: str | int | None) -> None:
        if value is not None:
            self.append((name, header_value(name, str(value))))


def create(
    name: str,
    *,
    content_type: str | None,
    lifetime: Lifetime,
    closed: bool,
    body: bytes,
    key: str | None = None,
    timestamp: Time | None = None,
    fork: ForkPoint | None = None,
) -> HttpRequest:
    headers = _Headers()
    headers.put("Content-Type", content_type)
    headers.put("Stream-TTL", _duration_text(lifetime.get("ttl"), "ttl"))
    headers.put("Stream-Expires-At", time_text(lifetime.get("expires_at"), "expires_at"))
    headers.put("Stream-Retention", _duration_text(lifetime.get("retention"), "retention"))
    if (retention_bytes := lifetime.get("retention_bytes")) is not None:
        check_integer("retention_bytes", retention_bytes)
        headers.put("Stream-Retention-Bytes", retention_bytes)
    headers.put("Stream-Closed", "true" if closed else None)
    headers.put("Stream-Key", key)
    headers.put("Stream-Timestamp", time_text(timestamp, "timestamp"))
    if fork is not None:
        headers.put("Stream-Forked-From", stream_path(fork.source))
        headers.put("Stream-Fork-Offset", fork.offset)
        if fork.sub_offset is not None:
            check_integer("sub_offset", fork.sub_offset)
        headers.put("Stream-Fork-Sub-Offset", fork.sub_offset)
    # PUT is repeatable: an existing stream with this configuration is left unchanged, content included.
    return HttpRequest(method="PUT", path=stream_path(name), headers=tuple(headers), body=body)


def append(
    name: str,
    body: bytes,
    *,
    content_type: str | None,
    close: bool = False,
    key: str | None = None,
    seq: str | None = None,
    timestamp: Time | None = None,
    producing: ProducerFields | None = None,
) -> HttpRequest:
    headers = _Headers()
    headers.put("Content-Type", content_type)
    headers.put("Stream-Closed", "true" if close else None)
    headers.put("Stream-Key", key)
    headers.put("Stream-Seq", seq)
    headers.put("Stream-Timestamp", time_text(timestamp, "timestamp"))
    if producing is not None:
        headers.put("Producer-Id", producing.producer_id)
        headers.put("Producer-Epoch", producing.epoch)
        headers.put("Producer-Seq", producing.seq)
    return HttpRequest(
        method="POST",
        path=stream_path(name),
        headers=tuple(headers),
        body=body,
        # Closing a closed stream succeeds, so a close without content is repeatable too.
        repeatable=producing is not None or (close and not body),
    )


def head(name: str) -> HttpRequest:
    return HttpRequest(method="HEAD", path=stream_path(name))


def delete(name: str) -> HttpRequest:
    return HttpRequest(method="DELETE", path=stream_path(name))


def read(
    name: str,
    *,
    offset: str | None,
    live: str | None = None,
    cursor: str | None = None,
    wait_s: float = 0.0,
    **options: Unpack[ReadOptions],
) -> HttpRequest:
    parameters: list[tuple[str, str]] = []
    if offset is not None:
        parameters.append(("offset", offset))
    if (since_text := time_text(options.get("since"), "since")) is not None:
        parameters.append(("since", since_text))
    for name_of, value in (("key", options.get("key")), ("filter", options.get("filter"))):
        if value is not None:
            parameters.append((name_of, value))
    if live is not None:
        parameters.append(("live", live))
    if cursor is not None:
        parameters.append(("cursor", cursor))
    query = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
    return HttpRequest(method="GET", path=stream_path(name) + query, wait_s=wait_s)


def continued_options(options: ReadOptions) -> ReadOptions:
    """The options for reads that continue from a position; `since` only applies to the first one."""
    return {"key": options.get("key"), "filter": options.get("filter")}


def list_streams(*, prefix: str, after: str, limit: int, system: bool) -> HttpRequest:
    parameters = {"limit": str(limit)}
    if prefix:
        parameters["prefix"] = prefix
    if after:
        parameters["after"] = after
    if system:
        parameters["system"] = "true"
    return HttpRequest(method="GET", path=f"{LIST_PATH}?{urlencode(parameters, quote_via=quote)}")


def check_status(response: HttpResponse, *expected: int, repeatable: bool = True) -> None:
    """Raise the error of an unexpected response."""
    if response.status in expected:
        return
    # A 4xx error changed nothing; after 408 and 5xx the outcome of an append is unknown.
    unknown = not repeatable and (
        response.status == 408 or (response.status >= 500 and response.status != 507)
    )
    if response.status < 400:
        raise ClientError(
            INVALID_ANSWER,
            f"unexpected status {response.status}",
            status=response.status,
            headers=response.headers,
        )
    raise error_from(response.status, response.headers, response.body, unknown=unknown)


def check_head(name: str, response: HttpResponse) -> None:
    """Raise the error of a response to HEAD, which has no body."""
    if (
        response.status != 200
        and (refusal := error_from_status(name, response.status, response.headers)) is not None
    ):
        raise refusal
    check_status(response, 200)


def required_header(response: HttpResponse, name: str) -> str:
    value = response.headers.get(name)
    if value is None:
        raise ClientError(
            INVALID_ANSWER,
            f"the response has no {name} header; is this a Tailrace server?",
            status=response.status,
            headers=response.headers,
        )
    return value


def _header_flag(response: HttpResponse, name: str) -> bool:
    return response.headers.get(name, "").lower() == "true"


def parse_number(text: str | None) -> int | None:
    """The value of a header with a whole number; None if it is absent or invalid."""
    text = text or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX else None


def parse_info(name: str, response: HttpResponse) -> StreamInfo:
    headers = response.headers
    return StreamInfo(
        name=name,
        content_type=headers.get("content-type", OCTETS_TYPE),
        next_offset=required_header(response, "stream-next-offset"),
        closed=_header_flag(response, "stream-closed"),
        created=response.status == 201,
        earliest_offset=headers.get("stream-earliest-offset"),
        ttl_s=parse_number(headers.get("stream-ttl")),
        expires_at=headers.get("stream-expires-at"),
        retention=headers.get("stream-retention"),
        retention_bytes=parse_number(headers.get("stream-retention-bytes")),
    )


def parse_append(response: HttpResponse) -> AppendResult:
    return AppendResult(
        next_offset=required_header(response, "stream-next-offset"),
        closed=_header_flag(response, "stream-closed"),
        # 204 is the normal success too; only with producer headers it means that nothing was added.
        duplicate=response.status == 204 and "producer-seq" in response.headers,
    )


def parse_page(response: HttpResponse) -> Page:
    """The page of a 200, or the empty page of an idle or closed long-poll (204)."""
    headers = response.headers
    return Page(
        body=response.body,
        content_type=headers.get("content-type", OCTETS_TYPE),
        next_offset=required_header(response, "stream-next-offset"),
        up_to_date=_header_flag(response, "stream-up-to-date"),
        closed=_header_flag(response, "stream-closed"),
        end_offset=headers.get("stream-end-offset"),
        earliest_offset=headers.get("stream-earliest-offset"),
        etag=headers.get("etag"),
        cursor=headers.get("stream-cursor"),
    )


class _Control(msgspec.Struct, rename="camel"):
    stream_next_offset: str
    stream_cursor: str | None = None
    up_to_date: bool = False
    stream_closed: bool = False


_control_decoder = msgspec.json.Decoder(_Control)
_list_decoder = msgspec.json.Decoder(list[StreamDescriptor])


def parse_live(control: bytes, data: bytes | None, *, content_type: str, base64: bool) -> Page:
    """The page of a control event and the data event before it, if there was one."""
    try:
        fields = _control_decoder.decode(control)
        body = b"" if data is None else b64decode(data, validate=True) if base64 else data
    except (msgspec.MsgspecError, ValueError) as error:
        raise ClientError(INVALID_ANSWER, f"malformed event from the server: {error}") from error
    return Page(
        body=body,
        content_type=content_type,
        next_offset=fields.stream_next_offset,
        up_to_date=fields.up_to_date,
        closed=fields.stream_closed,
        cursor=fields.stream_cursor,
    )


def parse_list(response: HttpResponse) -> tuple[list[StreamDescriptor], bool]:
    """The rows of a page, and whether there are more."""
    try:
        rows = _list_decoder.decode(response.body)
    except msgspec.MsgspecError as error:
        raise ClientError(
            INVALID_ANSWER, f"malformed list of streams: {error}", status=response.status
        ) from error
    return rows, 'rel="next"' in response.headers.get("link", "")
