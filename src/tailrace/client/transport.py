"""Request steps without I/O, retries with back-off, and their mapping to httpx2.

How long to wait before the next try, and when to stop trying.

Client logic as generators: what to do is decided here once, the shells only carry it out.

A generator yields an effect (send this, wait that long, give me the next chunk) and is resumed with its
reply, or with `BrokenError` if the connection failed. The synchronous and the asynchronous shell run the same
generators, so there is one retry loop, one way to follow and one idempotent producer, and a test can play
the server without a socket.

Between our requests and httpx2: what both shells need of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import httpx2
import msgspec

from tailrace.client.errors import (
    CONNECT_FAILED,
    CONNECTION_LOST,
    OUTCOME_UNKNOWN,
    ClientError,
    check_integer,
    check_seconds,
)
from tailrace.client.wire import HttpRequest, HttpResponse

# These answers promise that nothing was changed, so that even an append may be sent again.
NOT_APPLIED_STATUSES = frozenset({429, 507})
# These may hide a request that took effect; only repeatable requests are sent again after them.
TRANSIENT_STATUSES = frozenset({408, 500, 502, 503, 504})


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """The patience of a client: exponential delays with jitter, bounded in number and in time."""

    attempts_max: int = 6
    delay_s_first: float = 0.1
    delay_s_max: float = 5.0
    elapsed_s_max: float = 60.0

    def __post_init__(self) -> None:
        check_integer("attempts_max", self.attempts_max, least=1)
        for name in ("delay_s_first", "delay_s_max", "elapsed_s_max"):
            check_seconds(name, getattr(self, name), may_be_zero=True)


class Backoff:
    """The delays of one operation. `reset` after progress starts them anew."""

    __slots__ = ("_attempts", "_attempts_max", "_elapsed_s_max", "_monotonic", "_retries", "_started")

    def __init__(
        self,
        retries: Retries,
        *,
        attempts_max: int | None = None,
        elapsed_s_max: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._retries = retries
        self._attempts_max = retries.attempts_max if attempts_max is None else attempts_max
        self._elapsed_s_max = retries.elapsed_s_max if elapsed_s_max is None else elapsed_s_max
        self._monotonic = monotonic
        self._attempts = 0
        self._started = 0.0

    @property
    def attempts(self) -> int:
        """Failed attempts since the start or the last progress."""
        return self._attempts

    def reset(self) -> None:
        self._attempts = 0

    def next_delay(self, retry_after_s: float | None = None) -> float | None:
        """Seconds to wait before the next attempt, or None if it is time to give up."""
        now = self._monotonic()
        if self._attempts == 0:
            # Patience is counted from the first failure: a stream may have been idle for hours before it.
            self._started = now
        self._attempts += 1
        if self._attempts >= self._attempts_max:
            return None
        ceiling = min(
            self._retries.delay_s_max, self._retries.delay_s_first * 2 ** min(self._attempts - 1, 30)
        )
        # Half of the delay is random: clients that failed together do not come back together.
        delay = ceiling * (0.5 + random.random() / 2)  # noqa: S311 - jitter, not a secret
        if retry_after_s is not None:
            # The server's word is a lower bound; the jitter goes on top of it.
            delay += retry_after_s
        if now + delay - self._started > self._elapsed_s_max:
            return None
        return delay


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from `Retry-After`, which is a number or a date; None if there is none to understand."""
    text = headers.get("retry-after")
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


class SendRequest(msgspec.Struct, frozen=True):
    """Send a request; the reply is the whole `Answer`."""

    request: HttpRequest


class Sleep(msgspec.Struct, frozen=True):
    """Wait; the reply is None."""

    seconds: float


class OpenStream(msgspec.Struct, frozen=True):
    """Send a request whose answer is read chunk by chunk.

    The reply is an `Answer` without a body if the status is 200; any other answer comes whole, and nothing
    stays open.
    """

    request: HttpRequest


class NextChunk(msgspec.Struct, frozen=True):
    """The reply is the next chunk of the open answer, or None at its end."""


class CloseStream(msgspec.Struct, frozen=True):
    """Close the open answer, if there is one; the reply is None."""


Effect: TypeAlias = SendRequest | Sleep | OpenStream | NextChunk | CloseStream
Reply: TypeAlias = HttpResponse | bytes | None

T = TypeVar("T")
P = ParamSpec("P")
Steps: TypeAlias = Generator[Effect, Reply, T]


class BrokenConnectionError(Exception):
    """The connection failed. Unless `sent` is false, the server may have got and obeyed the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class ExchangeResult(msgspec.Struct, frozen=True):
    """An answer, and whether an earlier attempt at the same request may have taken effect."""

    answer: HttpResponse
    doubtful: bool


class HasName(Protocol):
    @property
    def name(self) -> str: ...


SelfT = TypeVar("SelfT", bound=HasName)


def with_stream_name(
    operation: Callable[Concatenate[SelfT, P], Steps[T]],
) -> Callable[Concatenate[SelfT, P], Steps[T]]:
    """An operation on a stream whose errors say which stream it is."""

    @wraps(operation)
    def named(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> Steps[T]:
        try:
            return (yield from operation(self, *args, **kwargs))
        except ClientError as error:
            if error.stream is None:
                error.stream = self.name
            raise

    return named


def send_request(request: HttpRequest) -> Steps[HttpResponse]:
    reply = yield SendRequest(request)
    assert isinstance(reply, HttpResponse)
    return reply


def open_stream(request: HttpRequest) -> Steps[HttpResponse]:
    reply = yield OpenStream(request)
    assert isinstance(reply, HttpResponse)
    return reply


def next_chunk() -> Steps[bytes | None]:
    reply = yield NextChunk()
    assert not isinstance(reply, HttpResponse)
    return reply


def may_retry(status: int, *, repeatable: bool) -> bool:
    return status in NOT_APPLIED_STATUSES or (repeatable and status in TRANSIENT_STATUSES)


def exchange(request: HttpRequest, backoff: Backoff) -> Steps[ExchangeResult]:
    """Send a request until there is an answer worth having, or patience ends.

    What is not repeatable goes out again only if it is certain that the server did nothing: the connection
    was never made, or the answer says so.
    """
    doubtful = False
    while True:
        try:
            answer = yield from send_request(request)
        except BrokenConnectionError as broken:
            doubtful = doubtful or broken.sent
            if broken.sent and not request.repeatable:
                raise outcome_unknown_error(broken) from broken
            delay = backoff.next_delay()
            if delay is None:
                raise connection_error(broken, request, doubtful=doubtful) from broken
        else:
            if not may_retry(answer.status, repeatable=request.repeatable):
                return ExchangeResult(answer, doubtful)
            # A passing fault of the server may have come after the commit.
            delay = backoff.next_delay(retry_after_s(answer.headers))
            if delay is None:
                return ExchangeResult(answer, doubtful)
            doubtful = doubtful or answer.status in TRANSIENT_STATUSES
        yield Sleep(delay)


def outcome_unknown_error(broken: BrokenConnectionError) -> ClientError:
    return ClientError(
        OUTCOME_UNKNOWN,
        f"the connection failed after the append was sent, it may or may not have been committed: {broken}; "
        "compare the stream's tail before you append again, or use a producer, which retries safely",
        outcome_unknown=True,
    )


def connection_error(broken: BrokenConnectionError, request: HttpRequest, *, doubtful: bool) -> ClientError:
    return ClientError(
        CONNECTION_LOST if broken.sent else CONNECT_FAILED,
        f"{request.method} {request.path} failed: {broken}",
        # A read has no outcome to be in doubt about.
        outcome_unknown=doubtful and request.method not in ("GET", "HEAD"),
    )


# Nothing has left this machine when one of these is raised.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)

# What the network or the other side did. Errors of our own making (a malformed URL, an illegal header) are
# not among them: they would fail again.
CONNECTION_ERRORS = (
    httpx2.TimeoutException,
    httpx2.NetworkError,
    httpx2.RemoteProtocolError,
    httpx2.ProxyError,
    httpx2.DecodingError,
)

# Each follower holds a connection. Beyond this many they wait for each other.
CONNECTIONS_MAX = 1000
CONNECTIONS_IDLE_MAX = 100
# Well below the 75 s after which the server closes an idle connection: it must not close one under us.
CONNECTION_IDLE_S_MAX = 30.0


class TransportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a client reaches its server."""

    base_url: str
    token: str | Callable[[], str] | None
    timeout_s: float
    connect_timeout_s: float
    retries: Retries

    def authorization(self) -> bytes | None:
        token = self.token() if callable(self.token) else self.token
        # One that was read from a file often ends with a line break.
        token = None if token is None else token.strip()
        if not token:
            return None
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("the token has characters that no header can carry")
        return b"Bearer " + token.encode()

    def build(self, http: httpx2.Client | httpx2.AsyncClient, request: HttpRequest) -> httpx2.Request:
        headers = [(name.encode("ascii"), value) for name, value in request.headers]
        if (authorization := self.authorization()) is not None:
            headers.append((b"Authorization", authorization))
        read_s = max(self.timeout_s, request.wait_s)
        return http.build_request(
            request.method,
            self.base_url + request.path,
            headers=headers,
            content=request.body if request.method in ("POST", "PUT") else None,
            timeout=httpx2.Timeout(self.timeout_s, connect=self.connect_timeout_s, read=read_s),
        )


def make_settings(
    base_url: str,
    *,
    token: str | Callable[[], str] | None,
    timeout_s: float,
    connect_timeout_s: float,
    retries: Retries | None,
) -> TransportSettings:
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must start with http:// or https://: {base_url!r}")
    try:
        host = httpx2.URL(base_url).host
    except httpx2.InvalidURL as error:
        raise ValueError(f"base_url is not a URL: {base_url!r} ({error})") from None
    check_seconds("timeout_s", timeout_s)
    check_seconds("connect_timeout_s", connect_timeout_s)
    if not host:
        raise ValueError(f"base_url names no host: {base_url!r}")
    return TransportSettings(
        base_url=base_url.rstrip("/"),
        token=token,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
        retries=retries or Retries(),
    )


def pool_limits() -> httpx2.Limits:
    return httpx2.Limits(
        max_connections=CONNECTIONS_MAX,
        max_keepalive_connections=CONNECTIONS_IDLE_MAX,
        keepalive_expiry=CONNECTION_IDLE_S_MAX,
    )


def broken_connection_from(error: httpx2.RequestError) -> BrokenConnectionError:
    reason = str(error) or type(error).__name__
    return BrokenConnectionError(reason, sent=not isinstance(error, _NOT_SENT))


def response_from(response: httpx2.Response, body: bytes) -> HttpResponse:
    headers: Mapping[str, str] = {name.lower(): value for name, value in response.headers.items()}
    return HttpResponse(response.status_code, headers, body)
