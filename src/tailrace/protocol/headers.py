"""The one table of header names: what browsers may read, what they may send."""

from __future__ import annotations

# Every response header of the protocol; `Access-Control-Expose-Headers` is made from it.
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

# On the answer to a long-poll whose wait was shortened, and exposed there only.
WAIT_LIMIT_HEADER = "Stream-Wait-Limit-Ms"

# On answers to searches only, and so exposed there only: every other answer is spared the length of them.
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
    """The line that lets browsers read these. It may be there more than once: browsers join them."""
    return header_line("Access-Control-Expose-Headers", ", ".join(names))


def header_line(name: str, value: str) -> bytes:
    """One header line, CRLF included. Values beyond ASCII travel as UTF-8."""
    assert not {"\r", "\n"} & set(value), f"line break in header {name}"
    return f"{name}: {value}\r\n".encode()


def common_header_lines(resource_policy: str, origin: str | None) -> bytes:
    """On every response, errors and preflights included; `origin` is None where it depends on the request."""
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
