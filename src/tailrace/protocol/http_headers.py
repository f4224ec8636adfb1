"""HTTP headers of the protocol: header names, content types, ETags, and the response for an error.

`error_response` is the only place where an error becomes a status, header lines and a body.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote

from tailrace.common.errors import TailraceError

# Every response header of the protocol; `Access-Control-Expose-Headers` is built from it.
RESPONSE_HEADERS: tuple[str, ...] = (
    "Stream-Next-Offset",
    "Stream-End-Offset",
    "Stream-Earliest-Offset",
    "Stream-Cursor",
    "Stream-Start",
    "Stream-Up-To-Date",
    "Stream-Closed",
    "Stream-TTL",
    "Stream-Expires-At",
    "Stream-Retention",
    "Stream-Retention-Bytes",
    "Stream-Expected-Seq",
    "Stream-Received-Seq",
    "Stream-SSE-Data-Encoding",
    "Stream-Filter-Scan-Limit-Reached",
    "Stream-Filter-Scan-Limit-Bytes",
    "Stream-Filter-Scanned-Bytes",
    "Producer-Epoch",
    "Producer-Seq",
    "Producer-Expected-Seq",
    "Producer-Received-Seq",
    "Preference-Applied",
    "ETag",
    "Location",
    "Link",
    "Allow",
    "Retry-After",
    "Server-Timing",
    "X-Cache",
    "WWW-Authenticate",
    "Content-Type",
    "Content-Encoding",
    "Vary",
)

# On the response to a long-poll whose wait was shortened, and exposed only there.
WAIT_LIMIT_HEADER = "Stream-Wait-Limit-Ms"

# On responses to searches only, and exposed only there, to save the bytes on all others.
SEARCH_HEADERS: tuple[str, ...] = (
    "search-timed-out",
    "search-timeout-ms",
    "search-took-ms",
    "search-total-relation",
    "search-coverage-complete",
    "search-indexed-segments",
    "search-indexed-segment-time-ms",
    "search-scanned-segments",
    "search-scanned-segment-time-ms",
    "search-scanned-tail-docs",
    "search-scanned-tail-time-ms",
    "search-exact-candidate-time-ms",
    "search-fts-section-get-ms",
    "search-fts-decode-ms",
    "search-fts-clause-estimate-ms",
    "search-index-families-used",
    "search-candidate-doc-ids",
    "search-decoded-records",
    "search-json-parse-time-ms",
    "search-segment-payload-bytes-fetched",
    "search-sort-time-ms",
    "search-peak-hits-held",
)

REQUEST_HEADERS: tuple[str, ...] = (
    "Content-Type",
    "Authorization",
    "If-Match",
    "If-None-Match",
    "Idempotency-Key",
    "Prefer",
    "Cache-Control",
    "Last-Event-ID",
    "X-Request-Id",
    "traceparent",
    "tracestate",
    "Stream-Seq",
    "Stream-Key",
    "Stream-Timestamp",
    "Stream-TTL",
    "Stream-Expires-At",
    "Stream-Retention",
    "Stream-Retention-Bytes",
    "Stream-Closed",
    "Stream-Forked-From",
    "Stream-Fork-Offset",
    "Stream-Fork-Sub-Offset",
    "Producer-Id",
    "Producer-Epoch",
    "Producer-Seq",
)

ALLOWED_METHODS = "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
PREFLIGHT_MAX_AGE_S = 86_400


def expose_headers_line(names: tuple[str, ...]) -> bytes:
    """The line that lets browsers read these headers. It may be repeated: browsers join the values."""
    return header_line("Access-Control-Expose-Headers", ", ".join(names))


def header_line(name: str, value: str) -> bytes:
    """One header line, CRLF included. Values beyond ASCII are UTF-8."""
    assert not {"\r", "\n"} & set(value), f"line break in header {name}"
    return f"{name}: {value}\r\n".encode()


def common_header_lines(resource_policy: str, origin: str | None) -> bytes:
    """Header lines of every response; `origin` is None if it depends on the request."""
    lines = header_line("X-Content-Type-Options", "nosniff")
    lines += header_line("Cross-Origin-Resource-Policy", resource_policy)
    lines += expose_headers_line(RESPONSE_HEADERS)
    return lines + (
        header_line("Vary", "Origin")
        if origin is None
        else header_line("Access-Control-Allow-Origin", origin)
    )


def preflight_lines() -> bytes:
    return (
        header_line("Access-Control-Allow-Methods", ALLOWED_METHODS)
        + header_line("Access-Control-Allow-Headers", ", ".join(REQUEST_HEADERS))
        + header_line("Access-Control-Max-Age", str(PREFLIGHT_MAX_AGE_S))
    )


DEFAULT_CONTENT_TYPE = "application/octet-stream"
JSON_MEDIA_TYPE = "application/json"
CONTENT_TYPE_BYTES_MAX = 256


@lru_cache(maxsize=1024)
def media_type(content_type: str) -> str:
    """The type without parameters, in lower case, for comparisons."""
    return content_type.partition(";")[0].strip().lower()


@lru_cache(maxsize=1024)
def is_json(content_type: str | None) -> bool:
    return content_type is not None and media_type(content_type) == JSON_MEDIA_TYPE


@lru_cache(maxsize=1024)
def is_text(content_type: str | None) -> bool:
    """Whether SSE and WebSocket carry the payload as text; anything else is base64."""
    if content_type is None:
        return False
    media = media_type(content_type)
    return media == JSON_MEDIA_TYPE or media.startswith("text/")


def is_valid_content_type(content_type: str) -> bool:
    """Whether it has the form type/subtype and cannot break a header line."""
    if len(content_type) > CONTENT_TYPE_BYTES_MAX or not content_type.isprintable():
        return False
    kind, slash, sub = media_type(content_type).partition("/")
    return bool(kind and slash and sub)


def slice_etag(
    start: str, following: str, key: str, fmt: str, filter_text: str, closed: bool, version: str = ""
) -> str:
    """The weak tag of the slice `(start, following]`; it changes when the stream is closed.

    `version` identifies what else the bytes depend on, such as the stream's schema registry.
    """
    tail = ":closed" if closed else ""
    schema = f":schema={version}" if version else ""
    key, filter_text = quote(key, safe=""), quote(filter_text, safe="")
    return f'W/"slice:{start}:{following}:key={key}:fmt={fmt}{schema}:filter={filter_text}{tail}"'


def if_none_match(header: str, tag: str) -> bool:
    """Whether `If-None-Match` names the tag: weak comparison, lists and `*`."""
    if header.strip() == "*":
        return True
    opaque = tag.removeprefix("W/")
    return any(item.strip().removeprefix("W/") == opaque for item in header.split(","))


def slice_etag_format(tag: str) -> str:
    """The format of a slice's body; empty if the tag is not a slice tag."""
    return tag.partition(":fmt=")[2].partition(":")[0] if slice_etag_start(tag) else ""


def slice_etag_start(tag: str) -> str:
    """The start offset of a slice; empty if the tag is not a slice tag."""
    parts = tag.removeprefix("W/").strip('"').split(":", 3)
    return parts[1] if len(parts) == 4 and parts[0] == "slice" else ""


NO_STORE = b"Cache-Control: no-store\r\n"
JSON_TYPE = b"Content-Type: application/json; charset=utf-8\r\n"


def error_response(refusal: TailraceError) -> tuple[int, bytes, bytes]:
    """Status, header lines and body of an error.

    The traceback is dropped because it references the request with its body, and some errors are long-lived
    or part of a reference cycle.
    """
    refusal.__traceback__ = refusal.__context__ = None
    head = JSON_TYPE + NO_STORE
    if refusal.retry_after_s is not None:
        head += header_line("Retry-After", str(refusal.retry_after_s))
    for name, value in refusal.headers:
        head += header_line(name, "".join(char if char.isprintable() else "?" for char in value))
    return refusal.status, head, refusal.body()
