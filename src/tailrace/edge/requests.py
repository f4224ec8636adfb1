"""Parsing of requests at the edge, and the headers that are forwarded in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import quote, urlencode

from tailrace.http.exchange import Exchange
from tailrace.http.streaming_request import BodyStream
from tailrace.protocol import http_headers, offsets, stream_names
from tailrace.protocol.query_params import live_mode, parse_query, read_start, routing_key

STREAM_PREFIX = b"/v1/stream/"
CONTROL_PREFIX = b"/v1/stream/__ds"


class RequestTarget(NamedTuple):
    """The resource of a path. Only ordinary streams are cached and shared; all else is forwarded."""

    kind: str  # stream, reserved, resource, server or other
    name: str = ""
    key: str | None = None  # of `/pk/{key}`


def parse_target(path: bytes, name_bytes_max: int) -> RequestTarget:
    if not path.startswith(STREAM_PREFIX):
        return RequestTarget("server" if path.startswith(b"/v1/server") else "other")
    raw = path[len(STREAM_PREFIX) :]
    if path.startswith(CONTROL_PREFIX) and path[len(CONTROL_PREFIX) :][:1] in (b"", b"/"):
        return RequestTarget("other", "__ds")
    stream, slash, raw_key = raw.rpartition(b"/pk/")
    key: str | None = None
    if slash and b"/" not in raw_key:
        raw, key = stream, stream_names.decode_name(raw_key)
        if not key:
            return RequestTarget("other")
    name = stream_names.decode_name(raw)
    if name is None or not stream_names.is_valid_name(name, name_bytes_max):
        return RequestTarget("other")
    if name.startswith(("__", "hub/")) or name == "hub":
        return RequestTarget("reserved", name, key)
    if key is None and stream_names.is_sub_resource_name(name):
        return RequestTarget("resource", owning_stream(name))
    return RequestTarget("stream", name, key)


def owning_stream(path: str) -> str:
    """The stream of a sub-resource."""
    segments = path.split("/")
    for index in range(1, len(segments)):
        if (
            segments[index] in stream_names.RESERVED_LAST_SEGMENTS
            or segments[index] in stream_names.RESERVED_INNER_SEGMENTS
        ):
            return "/".join(segments[:index])
    return path


class SharedRead(NamedTuple):
    """A read that the edge may serve. Parameters that do not change its bytes are left out."""

    name: str
    offset: str  # 26 digits, -1 or now
    fmt: str
    key: str
    filter_text: str
    mode: str
    raw_live: str
    cursor: str | None
    query: dict[str, str]
    start_line: bytes = b""  # response header with the start that was used

    @property
    def parameters(self) -> dict[str, str]:
        """The normalised target of the upstream request."""
        return _parameters(self.offset, self.fmt, self.key, self.filter_text)

    @classmethod
    def plain(cls, name: str, offset: str, fmt: str, key: str) -> SharedRead:
        """The same read from another offset."""
        return cls(name, offset, fmt, key, "", "", "", None, {})


def parse_read(target: RequestTarget, raw_query: bytes, headers: Mapping[bytes, bytes]) -> SharedRead | None:
    """A GET on a stream as a shareable read; None if it must be forwarded.

    Raises for what every server refuses: repeated parameters, malformed offsets.
    """
    query = parse_query(raw_query)
    mode = live_mode(query)
    start = read_start(query, mode, headers)
    given = start.offset
    if given is not None and given not in ("-1", "now"):
        given = offsets.encode_offset(*offsets.parse_offset(given))
    fmt = query.get("format", "")
    filter_text = query.get("filter")
    if fmt not in ("", "json", "raw") or (given is None and (mode or "since" in query)):
        return None
    if (filter_text is not None and mode) or (given == "now" and not mode):
        return None
    key = routing_key(query, target.key)
    return SharedRead(
        target.name,
        given or "-1",
        fmt,
        key,
        filter_text or "",
        mode,
        query.get("live", ""),
        query.get("cursor"),
        query,
        start.header,
    )


def _parameters(offset: str, fmt: str, key: str, filter_text: str) -> dict[str, str]:
    found = {"filter": filter_text, "format": fmt, "key": key, "offset": offset}
    return {name: value for name, value in found.items() if value}


def build_stream_target(name: str, parameters: dict[str, str]) -> bytes:
    """Path and query of an upstream read."""
    query = f"?{urlencode(parameters, quote_via=quote)}" if parameters else ""
    return f"/v1/stream/{quote(name, safe='/')}{query}".encode()


# Hop-by-hop headers.
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Set by the edge; values of clients are dropped.
REQUEST_REPLACED = frozenset(
    (
        b"content-length",
        b"expect",
        b"host",
        b"tailrace-edge",
        b"via",
        b"forwarded",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-real-ip",
        b"x-request-id",
    )
)
# Of a response: the HTTP server and the edge set their own.
RESPONSE_REPLACED = frozenset(
    (
        b"content-length",
        b"date",
        b"access-control-allow-origin",
        b"access-control-allow-credentials",
        b"cross-origin-resource-policy",
        b"x-content-type-options",
        b"x-cache",
        b"server-timing",
    )
)
EXPOSED = http_headers.expose_headers_line(http_headers.RESPONSE_HEADERS).partition(b": ")[2].strip()


def request_lines(exchange: Exchange, edge_id: bytes, mark: bytes = b"", *, upgrade: bool = False) -> bytes:
    """The header lines of a forwarded request. `mark` is the line with the client's identity."""
    named = _connection_headers(exchange.headers.get(b"connection", b""))
    lines: list[bytes] = []
    for name, value in exchange.headers.items():
        if name in REQUEST_REPLACED or name in HOP_BY_HOP or name in named:
            continue
        lines.append(b"%b: %b\r\n" % (name, value))
    host = exchange.headers.get(b"host", b"")
    address = exchange.peer.rpartition(":")[0].encode()
    lines.append(b"host: %b\r\n%b" % (host, via_line(edge_id, exchange.headers.get(b"via", b""))))
    lines.append(b"x-forwarded-for: %b\r\nx-forwarded-proto: %b\r\n" % (address, exchange.scheme))
    lines.append(b"x-forwarded-host: %b\r\n%b%b" % (host, request_id_line(exchange.request_id), mark))
    if upgrade:
        asked = exchange.headers.get(b"upgrade", b"websocket")
        lines.append(b"connection: Upgrade\r\nupgrade: %b\r\n" % asked)
    return b"".join(lines)


def whole_target(exchange: Exchange) -> bytes:
    """Path and query, unchanged."""
    return exchange.path + (b"?" + exchange.query if exchange.query else b"")


def request_bytes(exchange: Exchange, lines: bytes) -> bytes:
    """The forwarded request."""
    length = b""
    if exchange.body or exchange.method in (b"POST", b"PUT", b"PATCH"):
        length = b"content-length: %d\r\n" % len(exchange.body)
    return request_head(exchange, lines, length) + exchange.body


def request_head(exchange: Exchange, lines: bytes, framing: bytes) -> bytes:
    """The forwarded request without its body."""
    return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (exchange.method, whole_target(exchange), lines, framing)


def framing_header(intake: BodyStream) -> bytes:
    if intake.length is None:
        return b"transfer-encoding: chunked\r\n"
    return b"content-length: %d\r\n" % intake.length


def response_lines(fields: Iterable[tuple[bytes, bytes]], *more: bytes) -> bytes:
    """The forwarded header lines of an upstream response."""
    lines: list[bytes] = []
    for name, value in fields:
        lower = name.lower()
        if lower in RESPONSE_REPLACED or lower in HOP_BY_HOP:
            continue
        if lower == b"access-control-expose-headers" and value == EXPOSED:
            continue
        if lower == b"vary" and value.lower() == b"origin":
            continue
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join(lines) + b"".join(more)


def without_request_id(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The fields of a shared response, without the request id of one client."""
    return [field for field in fields if field[0].lower() != b"x-request-id" and field[1] != b"X-Request-Id"]


def cache_line(outcome: str) -> bytes:
    return b"X-Cache: %b\r\n" % outcome.encode()


def via_line(edge_id: bytes, seen: bytes = b"") -> bytes:
    """The Via header line, with this edge appended."""
    return b"via: %b1.1 tailrace-edge-%b\r\n" % (seen + b", " if seen else b"", edge_id)


def request_id_line(request_id: bytes) -> bytes:
    """The request id header line, so that the owner logs the same id."""
    return b"x-request-id: %b\r\n" % request_id if request_id else b""


def build_request(
    method: bytes,
    target: bytes,
    host: bytes,
    edge_id: bytes,
    authorization: bytes | None,
    *more: bytes,
    via: bytes = b"",
) -> bytes:
    """A request of the edge itself; `via` is the Via header of the client's request."""
    bearer = b"authorization: %b\r\n" % authorization if authorization else b""
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b%b\r\n" % (
        method,
        target,
        host,
        via_line(edge_id, via),
        bearer,
        b"".join(more),
    )


def _connection_headers(connection: bytes) -> frozenset[bytes]:
    """Headers named by Connection."""
    return frozenset(token.strip().lower() for token in connection.split(b",")) - {b"", b"close"}
