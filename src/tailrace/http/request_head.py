"""The rules a request head must keep beyond its grammar, which llhttp checks.

Most requests pass without entering this module: `connection.py` comes here only for heads that have something
uncommon about them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from httptools import HttpParserInvalidURLError, parse_url

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import (
    MODE_CLOSE,
    MODE_CONTINUE,
    MODE_HEAD,
    MODE_HTTP_1_0,
    MODE_OBSERVED,
    MODE_UPGRADE,
    Exchange,
)
from tailrace.http.request_id import REQUEST_ID_HEADER as REQUEST_ID
from tailrace.http.request_id import request_id_from_client

if TYPE_CHECKING:
    from httptools import HttpRequestParser

# Headers that change how the connection behaves, or what its answers carry.
CONNECTION_HEADERS = frozenset((b"connection", b"expect", b"transfer-encoding", b"upgrade", REQUEST_ID))
# Heads that are kept in memory; a head of an append is a few hundred bytes.
CACHED_HEAD_BYTES_MAX = 2048
CACHED_HEADS_MAX = 1024
# Hosts seen to be well formed; bounded, because clients choose them.
CACHED_HOSTS_MAX = 1024
REPEATS_MAX = 100

_HOST = re.compile(
    rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._~-]+)?\])(?::[0-9]{0,5})?"
)


class CachedHead(NamedTuple):
    """What the parser made of a head; shared by all requests that repeat it, so nobody changes it."""

    method: bytes
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    body_bytes: int
    handle: Callable[[Exchange], None]


def is_plain_request(exchange: Exchange) -> bool:
    """A request that does nothing to its connection and has its length in its head."""
    headers = exchange.headers
    return (
        exchange.mode == 0
        and exchange.repeated is None
        and b"transfer-encoding" not in headers
        and headers.get(b"content-length") == b"%d" % len(exchange.body)
    )


def check_head_size(exchange: Exchange, url: bytes, limit_bytes: int) -> None:
    """The exact size of a head that came in several reads."""
    size = len(url) + sum(len(name) + len(value) + 4 for name, value in exchange.headers.items())
    if size > limit_bytes:
        raise head_too_large(limit_bytes)


def head_too_large(limit_bytes: int) -> TailraceError:
    message = f"the header block is over {limit_bytes} bytes"
    return TailraceError("invalid_request", message, limit_bytes=limit_bytes)


def add_repeated_header(exchange: Exchange, name: bytes, value: bytes) -> None:
    """Join the values of a repeated header, and remember that it was repeated."""
    repeated = exchange.repeated or frozenset()
    joined = exchange.headers[name] + b", " + value
    # Joining is quadratic in the number of repeats, so there is a bound on the work, not only on the bytes.
    if joined.count(b",") > REPEATS_MAX:
        raise TailraceError("invalid_header", "a header is repeated too often", header=_header_text(name))
    exchange.headers[name] = joined
    exchange.repeated = repeated | {name}


def validate_head(
    exchange: Exchange, parser: HttpRequestParser, keep_alive: bool, hosts: set[bytes | None]
) -> None:
    """Set the exchange's mode, or raise the refusal this head deserves."""
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise TailraceError("invalid_request", f"HTTP/{version} is not supported; use HTTP/1.1")
    legacy = version == "1.0"
    mode = (MODE_HTTP_1_0 if legacy else 0) | (0 if keep_alive else MODE_CLOSE)
    request_id = exchange.headers.get(REQUEST_ID)
    if request_id is not None:
        exchange.request_id = request_id_from_client(request_id)
        mode |= MODE_OBSERVED
    if exchange.method == b"HEAD":
        mode |= MODE_HEAD
    elif exchange.method == b"CONNECT":
        raise TailraceError("invalid_request", "this server is not a proxy")
    if exchange.path[:1] != b"/" and not (exchange.path == b"*" and exchange.method == b"OPTIONS"):
        _adopt_absolute_target(exchange)
    headers = exchange.headers
    _check_host(exchange, legacy=legacy, hosts=hosts)
    has_body = headers.get(b"content-length", b"0").strip(b"0") != b""
    encoding = headers.get(b"transfer-encoding")
    if encoding is not None:
        if encoding.lower() != b"chunked" or legacy:
            raise TailraceError(
                "invalid_header",
                "the only Transfer-Encoding is chunked, on HTTP/1.1",
                header="transfer-encoding",
            )
        has_body = True
    if not legacy:
        if has_body and headers.get(b"expect", b"").lower() == b"100-continue":
            mode |= MODE_CONTINUE
        if parser.should_upgrade():
            # The parser takes what follows an upgrade request for another protocol, so a body would be
            # read as the next request.
            if has_body:
                raise TailraceError("invalid_request", "a request with a body cannot ask for an upgrade")
            mode |= MODE_UPGRADE
    elif parser.should_upgrade():
        raise TailraceError("invalid_request", "an upgrade needs HTTP/1.1")
    exchange.mode = mode


def _check_host(exchange: Exchange, *, legacy: bool, hosts: set[bytes | None]) -> None:
    host = exchange.headers.get(b"host")
    if host is None:
        if legacy:
            return
        raise TailraceError("invalid_header", "HTTP/1.1 requests need a Host header", header="host")
    if exchange.repeated is not None and b"host" in exchange.repeated:
        raise TailraceError("invalid_header", "more than one Host header", header="host")
    if host in hosts:
        return
    if not _HOST.fullmatch(host):
        raise TailraceError("invalid_header", "malformed Host header", header="host")
    if len(hosts) < CACHED_HOSTS_MAX:
        hosts.add(host)


def _adopt_absolute_target(exchange: Exchange) -> None:
    """`GET http://host/path`: the host of the target replaces the header, as RFC 9112 3.2.2 demands."""
    target = exchange.path + (b"?" + exchange.query if exchange.query else b"")
    try:
        url = parse_url(target)
    except HttpParserInvalidURLError:
        raise TailraceError("invalid_request", "malformed request target") from None
    # The parser gives None for a part that is absent, whatever its stubs say.
    schema, host = url.schema or b"", url.host or b""
    if schema.lower() not in (b"http", b"https") or not host:
        raise TailraceError("invalid_request", "malformed request target")
    if b":" in host:
        host = b"[" + host + b"]"
    exchange.headers[b"host"] = host + (b":%d" % url.port if url.port else b"")
    exchange.path = url.path or b"/"


def _header_text(name: bytes) -> str:
    return name.decode("latin-1")
