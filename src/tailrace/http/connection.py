"""One HTTP/1.1 connection: bytes in, requests to the application, responses out in order.

The parser is llhttp (through httptools); `HttpConnection` is its callback object and the asyncio protocol at
once, so that a request costs one object and no task. Rare cases are in separate methods, off the hot path.
llhttp checks the grammar of a head; `validate_head` checks the remaining rules, and only for uncommon heads.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, NamedTuple, cast

from httptools import (
    HttpParserError,
    HttpParserInvalidURLError,
    HttpParserUpgrade,
    HttpRequestParser,
    parse_url,
)

from tailrace.common.errors import TailraceError
from tailrace.http.exchange import (
    CONTINUE,
    MODE_CLOSE,
    MODE_CONTINUE,
    MODE_HEAD,
    MODE_HTTP_1_0,
    MODE_OBSERVED,
    MODE_UPGRADE,
    Exchange,
    request_id_from_client,
)
from tailrace.http.exchange import REQUEST_ID_HEADER as REQUEST_ID
from tailrace.http.request_body import RequestBodyConnection
from tailrace.http.response_connection import PIPELINED_REQUESTS_MAX, logger

if TYPE_CHECKING:
    from tailrace.http.server import HttpServer


# Headers that change how the connection behaves, or what its responses carry.
CONNECTION_HEADERS = frozenset((b"connection", b"expect", b"transfer-encoding", b"upgrade", REQUEST_ID))
# Largest cached head; the head of an append has a few hundred bytes.
CACHED_HEAD_BYTES_MAX = 2048
CACHED_HEADS_MAX = 1024
# Well-formed hosts seen so far; bounded, because clients choose them.
CACHED_HOSTS_MAX = 1024
REPEATS_MAX = 100

_HOST = re.compile(
    rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._~-]+)?\])(?::[0-9]{0,5})?"
)


class CachedHead(NamedTuple):
    """A parsed head, shared by all requests that repeat it, so it must not be changed."""

    method: bytes
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    body_bytes: int
    handle: Callable[[Exchange], None]


def is_plain_request(exchange: Exchange) -> bool:
    """Whether a request has no effect on its connection and has a Content-Length."""
    headers = exchange.headers
    return (
        exchange.mode == 0
        and exchange.repeated is None
        and b"transfer-encoding" not in headers
        and headers.get(b"content-length") == b"%d" % len(exchange.body)
    )


def check_head_size(exchange: Exchange, url: bytes, limit_bytes: int) -> None:
    """Check the exact size of a head that arrived in several reads."""
    size = len(url) + sum(len(name) + len(value) + 4 for name, value in exchange.headers.items())
    if size > limit_bytes:
        raise head_too_large(limit_bytes)


def head_too_large(limit_bytes: int) -> TailraceError:
    message = f"the header block exceeds {limit_bytes} bytes"
    return TailraceError("invalid_request", message, limit_bytes=limit_bytes)


def add_repeated_header(exchange: Exchange, name: bytes, value: bytes) -> None:
    """Join the values of a repeated header, and record that it was repeated."""
    repeated = exchange.repeated or frozenset()
    joined = exchange.headers[name] + b", " + value
    # Joining is quadratic in the number of repeats, so the number is limited too.
    if joined.count(b",") > REPEATS_MAX:
        raise TailraceError(
            "invalid_header", f"a header is repeated more than {REPEATS_MAX} times", header=_header_text(name)
        )
    exchange.headers[name] = joined
    exchange.repeated = repeated | {name}


def validate_head(
    exchange: Exchange, parser: HttpRequestParser, keep_alive: bool, hosts: set[bytes | None]
) -> None:
    """Set the exchange's mode, or raise an error if the head is invalid."""
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
                "Transfer-Encoding must be chunked, and needs HTTP/1.1",
                header="transfer-encoding",
            )
        has_body = True
    if not legacy:
        if has_body and headers.get(b"expect", b"").lower() == b"100-continue":
            mode |= MODE_CONTINUE
        if parser.should_upgrade():
            # The parser treats what follows an upgrade request as another protocol, so a body would be
            # read as the next request.
            if has_body:
                raise TailraceError("invalid_request", "a request with a body cannot be upgraded")
            mode |= MODE_UPGRADE
    elif parser.should_upgrade():
        raise TailraceError("invalid_request", "an upgrade requires HTTP/1.1")
    exchange.mode = mode


def _check_host(exchange: Exchange, *, legacy: bool, hosts: set[bytes | None]) -> None:
    host = exchange.headers.get(b"host")
    if host is None:
        if legacy:
            return
        raise TailraceError("invalid_header", "HTTP/1.1 requests must have a Host header", header="host")
    if exchange.repeated is not None and b"host" in exchange.repeated:
        raise TailraceError("invalid_header", "a request must have only one Host header", header="host")
    if host in hosts:
        return
    if not _HOST.fullmatch(host):
        raise TailraceError("invalid_header", "malformed Host header", header="host")
    if len(hosts) < CACHED_HOSTS_MAX:
        hosts.add(host)


def _adopt_absolute_target(exchange: Exchange) -> None:
    """`GET http://host/path`: the host of the target replaces the header, as RFC 9112 3.2.2 requires."""
    target = exchange.path + (b"?" + exchange.query if exchange.query else b"")
    try:
        url = parse_url(target)
    except HttpParserInvalidURLError:
        raise TailraceError("invalid_request", "malformed request target") from None
    # The parser returns None for an absent part, contrary to its stubs.
    schema, host = url.schema or b"", url.host or b""
    if schema.lower() not in (b"http", b"https") or not host:
        raise TailraceError("invalid_request", "malformed request target")
    if b":" in host:
        host = b"[" + host + b"]"
    exchange.headers[b"host"] = host + (b":%d" % url.port if url.port else b"")
    exchange.path = url.path or b"/"


def _header_text(name: bytes) -> str:
    return name.decode("latin-1")


# Searched as numbers: `b"?" in url` takes seven times as long as `0x3F in url`.
SLASH = 0x2F
LETTER_P = 0x50
# One parsed head in eight is cached: enough for those that repeat, cheap for those that do not.
CACHE_HEADS_MASK = 7
QUESTION_MARK = 0x3F


def _ignore_data(data: bytes | memoryview) -> None:
    """Discard further bytes of a connection that is no longer read."""


def _http09_error() -> TailraceError:
    return TailraceError("invalid_request", "HTTP/0.9 is not supported; use HTTP/1.1")


# Replaces the parser of a finished connection: parser and connection refer to each other, and breaking the
# cycle frees both at once instead of at the next collection.
_NO_PARSER = HttpRequestParser(object())


class HttpConnection(RequestBodyConnection):
    """The protocol object of one client connection; internal to `tailrace.http`."""

    __slots__ = (
        "_begun",
        "_direct",
        "_feed",
        "_head_bytes",
        "_headers",
        "_held",
        "_last_request",
        "_latest",
        "_parser",
        "_time",
        "_url",
        "_wire_idle",
        "successor",
    )

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server)
        # The protocol that took the connection over, if one did.
        self.successor: asyncio.Protocol | None = None
        self._time = time.monotonic  # the loop's clock, read directly: the loop caches it per iteration
        self._parser = HttpRequestParser(self)
        self._direct: Callable[[bytes | memoryview], None] = self._parser.feed_data
        self._feed = self._direct
        self._begun = False  # the parser is inside a request, if only at its first byte
        self._latest: Exchange | None = None  # the last request the parser completed
        self._headers: dict[bytes, bytes] = {}
        self._url = b""
        self._head_bytes = 0
        self._wire_idle = 0
        self._held = b""
        self._last_request = False

    # --- asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        address: object = transport.get_extra_info("peername")
        if isinstance(address, tuple):
            host, port, *_ = cast("tuple[object, ...]", address)
            self.peer = f"{host}:{port}"
        if transport.get_extra_info("sslcontext") is not None:
            self.scheme = b"https"
        self.server.admit(self)

    def data_received(self, data: bytes) -> None:
        server = self.server
        size = len(data)
        server.bytes_in += size
        at_rest = not self._begun and self.current is None and self._feed is self._direct
        if at_rest and size and data[0] == LETTER_P and self._match_cached_head(data, size):
            return
        self.cork = []
        try:
            if size > server.slice_bytes:
                self._feed_slices(data)
                return
            self._feed(data)
            if self._incoming is not None:
                self._on_partial(size)
            elif at_rest and not self._begun:
                server.heads_parsed += 1
                if not server.heads_parsed & CACHE_HEADS_MASK:
                    self._cache_head(data)
        except HttpParserUpgrade as upgrade:
            self._leave_parser(data[cast("int", upgrade.args[0]) :])
        except HttpParserError as error:
            self._parse_failed(error)
        finally:
            self.flush()
            self.cork = None

    def _match_cached_head(self, data: bytes, size: int) -> bool:
        """Handle a request whose head is cached, without parsing it.

        A writer repeats its head for every append of the same length; the lookup takes a third of the time of
        parsing.
        """
        split = data.find(b"\r\n\r\n") + 4
        server = self.server
        known = server.cached_heads.get(data[:split])
        if known is None or self._write_paused or size - split != known.body_bytes:
            return False
        server.requests += 1
        self.current = exchange = Exchange(
            self, known.headers, known.method, known.path, known.query, self._time(), data[split:]
        )
        self.deadline = inf
        try:
            known.handle(exchange)
        except Exception as error:  # noqa: BLE001 - becomes an error response
            self._handler_failed(exchange, error)
        return True

    def _cache_head(self, data: bytes) -> None:
        """Cache the head of a plain append that arrived in one read."""
        exchange, self._latest = self._latest, None
        if exchange is not None and exchange.method == b"POST" and is_plain_request(exchange):
            split = data.find(b"\r\n\r\n") + 4
            size = len(exchange.body)
            if split <= CACHED_HEAD_BYTES_MAX and split + size == len(data):
                handle = self.server.app.handler_for(exchange)
                self.server.cache_head(
                    data[:split],
                    CachedHead(
                        exchange.method, exchange.path, exchange.query, exchange.headers, size, handle
                    ),
                )

    def eof_received(self) -> bool:
        """The client half-closed the connection or has gone; which one is unknown.

        A response that is being prepared is finished and sent. A stream, or a wait with `on_gone`, would
        occupy the connection for long and most likely without a reader, so it ends.
        """
        current = self.current
        if (
            current is None
            or current.on_gone is not None
            or self.response_stream is not None
            or self.scheme == b"https"
        ):
            return False
        self._stop_parsing()
        last = self._queue[-1] if self._queue else current
        last.mode |= MODE_CLOSE
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._stop_parsing()
        self._parser = _NO_PARSER
        self._direct = _ignore_data
        self._latest = None
        self.server.remove(self)
        for waiting in self._queue:
            waiting.answered = True
        self._queue.clear()
        exchange, stream = self.current, self.response_stream
        self.current = self.response_stream = None
        if exchange is not None:
            exchange.answered = True
            gone, exchange.on_gone, exchange.on_deadline = exchange.on_gone, None, None
            self._call(gone)
        if stream is not None:
            stream.closed = True
            gone, stream.on_gone, stream.on_drain = stream.on_gone, None, None
            self._call(gone)

    # --- parser callbacks

    def on_message_begin(self) -> None:
        self._begun = True

    def on_url(self, url: bytes) -> None:
        if self._incoming is None:
            headers: dict[bytes, bytes] = {}
            self._headers = headers
            self._incoming = Exchange(self, headers)
            self._url = url
        else:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self._headers
        name = name.lower()
        if name not in headers:
            headers[name] = value.rstrip()
        elif self._incoming is not None and not self._head_done:
            add_repeated_header(self._incoming, name, value.rstrip())

    def on_headers_complete(self) -> None:
        exchange = self._incoming
        assert exchange is not None
        self._head_done = True
        parser = self._parser
        server = self.server
        exchange.started = self._time()
        method = exchange.method = parser.get_method()
        url = self._url
        if QUESTION_MARK in url:
            exchange.path, _, exchange.query = url.partition(b"?")
        else:
            exchange.path = url
            exchange.query = b""
        if self._head_bytes:
            self._head_bytes = 0
            check_head_size(exchange, url, server.limits.header_bytes)
        headers = exchange.headers
        keep_alive = parser.should_keep_alive()
        if (
            not keep_alive
            or headers.get(b"host") not in server.cached_hosts
            or exchange.repeated is not None
            or method == b"HEAD"
            or url[0] != SLASH
            or not CONNECTION_HEADERS.isdisjoint(headers)
        ):
            self._validate_head(exchange, keep_alive)
        length = headers.get(b"content-length")
        if length is not None and len(length) >= server.body_digits:
            self._check_declared(length)

    def on_body(self, piece: bytes) -> None:
        if self._body is None:
            self._body = piece
            if len(piece) > self.server.body_bytes_max:
                self._check_length(len(piece))
        else:
            self._add_body(piece)

    def on_message_complete(self) -> None:
        exchange = self._incoming
        assert exchange is not None
        self._incoming = None
        self._begun = False
        self._latest = exchange
        self._head_done = False
        self._wire_idle = 0
        body = self._body
        if body is not None:
            exchange.body = body if type(body) is bytes else bytes(body)
            self._drop_body()
        self.server.requests += 1
        if self.current is None and not self._write_paused:
            self.current = exchange
            self.deadline = inf
            try:
                self._handle(exchange)
            except Exception as error:  # noqa: BLE001 - becomes an error response
                self._handler_failed(exchange, error)
        else:
            self._queue.append(exchange)
            self.has_backlog = True
            if len(self._queue) >= PIPELINED_REQUESTS_MAX:
                self._update_reading()

    # --- reading, uncommon cases

    def _feed_slices(self, data: bytes) -> None:
        """Parse a large read in slices, so that the limit of pipelined requests applies within it."""
        view = memoryview(data)
        step = self.server.slice_bytes
        position = 0
        while position < len(data):
            if self._holding or len(self._queue) >= PIPELINED_REQUESTS_MAX:
                self._hold(data[position:])
                return
            piece = view[position : position + step]
            try:
                self._feed(piece)
            except HttpParserUpgrade as upgrade:
                self._leave_parser(data[position + cast("int", upgrade.args[0]) :])
                return
            except HttpParserError as error:
                self._parse_failed(error)
                return
            position += len(piece)
            if self._incoming is not None:
                self._on_partial(len(piece))

    def _hold(self, data: bytes | memoryview) -> None:
        """Hold bytes unparsed until the responses in front are sent; the socket is not read meanwhile."""
        self._held += data
        if not self._holding:
            self._holding = True
            self._feed = self._hold
            self.has_backlog = True
            self._update_reading()

    def _release_held(self) -> None:
        data, self._held = self._held, b""
        self._holding = False
        self._feed = self._direct
        if data:
            self._feed_slices(data)

    def _leave_parser(self, rest: bytes) -> None:
        """After an upgrade request: the application decides whether HTTP follows."""
        if self.successor is not None:
            if rest:
                self.successor.data_received(rest)
        elif self._ended:
            return
        elif self.current is not None or self._queue:
            self._hold(rest)
        elif rest:
            self._feed_slices(rest)

    def _stop_parsing(self) -> None:
        self._feed = _ignore_data
        self._holding = False
        self._held = b""
        self._incoming = None
        self._headers = {}
        self._drop_body()

    def _on_partial(self, size: int) -> None:
        """A request is incomplete: check its size and set its deadline."""
        server = self.server
        limit = server.limits.header_bytes
        if not self._head_done:
            if self._head_bytes == 0:
                # A slice is not longer than the limit, so the part of a head within one slice never exceeds
                # it.
                self._head_bytes = 1
                self._head_deadline = server.now + server.limits.header_ms / 1000
            else:
                self._head_bytes += size
            if self._head_bytes > limit:
                self.refuse(head_too_large(limit))
                return
            if self._parser.get_http_version() == "0.9":
                self.refuse(_http09_error())
                return
        else:
            try:
                self._check_admission()
                self._request_body_memory()
            except TailraceError as refusal:
                self.refuse(refusal)
                return
            received = self._received_bytes()
            # Chunk extensions and trailers carry no body: together they are limited like a head.
            self._wire_idle = self._wire_idle + size if received == self._body_seen else 0
            self._body_seen = received
            if self._wire_idle > limit:
                self.refuse(
                    TailraceError("invalid_request", f"chunk framing or trailers exceed {limit} bytes")
                )
                return
        if self.current is None:
            self.rearm()
        else:
            self.has_backlog = True

    def _validate_head(self, exchange: Exchange, keep_alive: bool) -> None:
        # on_header is also called for the trailers of a chunked body; they must not become headers.
        self._headers = {}
        validate_head(exchange, self._parser, keep_alive, self.server.cached_hosts)
        if exchange.mode & MODE_CLOSE:
            self._last_request = True
        if exchange.mode & MODE_CONTINUE:
            length = exchange.headers.get(b"content-length")
            if length is not None:
                self._check_declared(length)
            self._check_admission()
            self._send_continue()

    def _send_continue(self) -> None:
        """Send 100 Continue, but only after every response in front of it."""
        exchange = self._incoming
        if exchange is None or not exchange.mode & MODE_CONTINUE:
            return
        if self.current is not None or self._queue:
            self.has_backlog = True
            return
        exchange.mode &= ~MODE_CONTINUE
        if self._body is None:
            self.write(CONTINUE)

    def _parse_failed(self, error: HttpParserError) -> None:
        if self._ended or (self._last_request and self._incoming is None):
            # Bytes after a request that closes the connection are ignored.
            return
        cause = error.__context__
        if isinstance(cause, TailraceError):
            self.refuse(cause)
        elif cause is not None:
            logger.error("request parsing failed", exc_info=cause)
            self.refuse(TailraceError("internal", "internal error"))
        elif self._parser.get_http_version() == "0.9":
            self.refuse(_http09_error())
        else:
            self.refuse(TailraceError("invalid_request", f"malformed HTTP request: {error}"))

    def is_only_request(self, exchange: Exchange) -> bool:
        """Whether `exchange` is the only request that was read and not responded to, not even partially."""
        return (
            self.current is exchange
            and not exchange.answered
            and not (self._queue or self._begun or self._held or self.cork or self._ended)
            and self._refusal is None
        )

    def detach(self, successor: asyncio.Protocol) -> bytes:
        """Give the transport to another protocol; returns the bytes received after the request."""
        held = self._held
        self._ended = True
        self.successor = successor
        self.current = None
        self._stop_parsing()
        self.server.remove(self)
        self.transport.set_protocol(successor)
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()
        return held
