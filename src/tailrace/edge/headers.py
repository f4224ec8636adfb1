"""Which headers pass the edge, in both directions."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.http.exchange import Exchange
from tailrace.http.streaming_request import BodyStream
from tailrace.protocol import http_headers

# They belong to one connection, not to the message.
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
# Written by the edge itself; what a client says about them is not believed.
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
# Of an answer: net and the edge write their own.
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
    """The header lines with which a client's request goes on. `mark` is the line that vouches for it."""
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
    """Path and query, as they came."""
    return exchange.path + (b"?" + exchange.query if exchange.query else b"")


def request_bytes(exchange: Exchange, lines: bytes) -> bytes:
    """A client's request as it goes upstream."""
    length = b""
    if exchange.body or exchange.method in (b"POST", b"PUT", b"PATCH"):
        length = b"content-length: %d\r\n" % len(exchange.body)
    return request_head(exchange, lines, length) + exchange.body


def request_head(exchange: Exchange, lines: bytes, framing: bytes) -> bytes:
    """The same without its body, which may still be coming."""
    return b"%b %b HTTP/1.1\r\n%b%b\r\n" % (exchange.method, whole_target(exchange), lines, framing)


def framing_header(intake: BodyStream) -> bytes:
    if intake.length is None:
        return b"transfer-encoding: chunked\r\n"
    return b"content-length: %d\r\n" % intake.length


def response_lines(fields: Iterable[tuple[bytes, bytes]], *more: bytes) -> bytes:
    """The header lines with which an upstream's answer goes on, without those that every answer has here."""
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
    """The fields of an answer that is for several: the id of the request that brought it is one client's."""
    return [field for field in fields if field[0].lower() != b"x-request-id" and field[1] != b"X-Request-Id"]


def cache_line(outcome: str) -> bytes:
    return b"X-Cache: %b\r\n" % outcome.encode()


def via_line(edge_id: bytes, seen: bytes = b"") -> bytes:
    """The way that a request has come, with this edge behind those that it came through."""
    return b"via: %b1.1 tailrace-edge-%b\r\n" % (seen + b", " if seen else b"", edge_id)


def request_id_line(request_id: bytes) -> bytes:
    """The name of a request, so that it is found by it in the log of the owner, too."""
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
    """A request that the edge makes on its own account; `via` is how the client came who is the reason."""
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
    """Headers that the client has tied to its connection."""
    return frozenset(token.strip().lower() for token in connection.split(b",")) - {b"", b"close"}
