"""Client logic as generators without I/O, and the two transports that run them on httpx2.

A generator yields an effect (send this, wait that long, read the next chunk) and is resumed with its reply,
or with `BrokenConnectionError` if the connection failed. The sync and the async transport run the same
generators, so there is one retry loop, one follower and one idempotent producer, and tests can play the
server without a socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import wraps
from typing import Concatenate, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar

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
from tailrace.common.backoff import backoff_delay

# These statuses guarantee that nothing was changed, so that even an append may be sent again.
NOT_APPLIED_STATUSES = frozenset({429, 507})
# After these the request may have taken effect; only repeatable requests are sent again.
TRANSIENT_STATUSES = frozenset({408, 500, 502, 503, 504})


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """Retry policy: exponential delays with jitter, bounded in number and in time."""

    attempts_max: int = 6
    delay_s_first: float = 0.1
    delay_s_max: float = 5.0
    elapsed_s_max: float = 60.0

    def __post_init__(self) -> None:
        check_integer("attempts_max", self.attempts_max, least=1)
        for name in ("delay_s_first", "delay_s_max", "elapsed_s_max"):
            check_seconds(name, getattr(self, name), may_be_zero=True)


class Backoff:
    """The delays of one operation. `reset` after progress starts them over."""

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
        """Seconds to wait before the next attempt, or None to stop."""
        now = self._monotonic()
        if self._attempts == 0:
            # Time is counted from the first failure: a stream may have been idle for hours before it.
            self._started = now
        self._attempts += 1
        if self._attempts >= self._attempts_max:
            return None
        retries = self._retries
        delay = backoff_delay(self._attempts, retries.delay_s_first, retries.delay_s_max, jitter=0.5)
        if retry_after_s is not None:
            # The server's value is a lower bound; the jitter is added to it.
            delay += retry_after_s
        if now + delay - self._started > self._elapsed_s_max:
            return None
        return delay


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from `Retry-After`, which is a number or a date; None if absent or invalid."""
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
    """Send a request; the reply is the whole `HttpResponse`."""

    request: HttpRequest


class Sleep(msgspec.Struct, frozen=True):
    """Wait; the reply is None."""

    seconds: float


class OpenStream(msgspec.Struct, frozen=True):
    """Send a request whose response is read chunk by chunk.

    The reply is an `HttpResponse` without a body if the status is 200; any other response is complete, and
    nothing stays open.
    """

    request: HttpRequest


class NextChunk(msgspec.Struct, frozen=True):
    """The reply is the next chunk of the open response, or None at its end."""


class CloseStream(msgspec.Struct, frozen=True):
    """Close the open response, if there is one; the reply is None."""


Effect: TypeAlias = SendRequest | Sleep | OpenStream | NextChunk | CloseStream
Reply: TypeAlias = HttpResponse | bytes | None

T = TypeVar("T")
P = ParamSpec("P")
Steps: TypeAlias = Generator[Effect, Reply, T]


class Items(msgspec.Struct, Generic[T], frozen=True):
    """Items for the caller, between the effects of an iterator; the reply is None."""

    items: Iterable[T]


ItemSteps: TypeAlias = Generator[Effect | Items[T], Reply, None]


class BrokenConnectionError(Exception):
    """The connection failed. Unless `sent` is false, the server may have executed the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class ExchangeResult(msgspec.Struct, frozen=True):
    """A response, and whether an earlier attempt at the same request may have taken effect."""

    response: HttpResponse
    maybe_applied: bool


class HasName(Protocol):
    @property
    def name(self) -> str: ...


SelfT = TypeVar("SelfT", bound=HasName)


def with_stream_name(
    operation: Callable[Concatenate[SelfT, P], Steps[T]],
) -> Callable[Concatenate[SelfT, P], Steps[T]]:
    """Decorates an operation on a stream so that its errors name the stream."""

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


def next_items(steps: ItemSteps[T]) -> Steps[Iterable[T] | None]:
    """Continue an iterator up to its next items; None at its end."""
    try:
        effect = next(steps)
        while not isinstance(effect, Items):
            try:
                reply = yield effect
            except BrokenConnectionError as broken:
                effect = steps.throw(broken)
            else:
                effect = steps.send(reply)
    except StopIteration:
        return None
    return effect.items


def may_retry(status: int, *, repeatable: bool) -> bool:
    return status in NOT_APPLIED_STATUSES or (repeatable and status in TRANSIENT_STATUSES)


def exchange(request: HttpRequest, backoff: Backoff) -> Steps[ExchangeResult]:
    """Send a request until there is a final response, or retries are exhausted.

    A request that is not repeatable is sent again only if the server certainly did nothing: the connection
    was never made, or the response says so.
    """
    maybe_applied = False
    while True:
        try:
            response = yield from send_request(request)
        except BrokenConnectionError as broken:
            maybe_applied = maybe_applied or broken.sent
            if broken.sent and not request.repeatable:
                raise outcome_unknown_error(broken) from broken
            delay = backoff.next_delay()
            if delay is None:
                raise connection_error(broken, request, maybe_applied=maybe_applied) from broken
        else:
            if not may_retry(response.status, repeatable=request.repeatable):
                return ExchangeResult(response, maybe_applied)
            # A transient error of the server may have come after the commit.
            delay = backoff.next_delay(retry_after_s(response.headers))
            if delay is None:
                return ExchangeResult(response, maybe_applied)
            maybe_applied = maybe_applied or response.status in TRANSIENT_STATUSES
        yield Sleep(delay)


def outcome_unknown_error(broken: BrokenConnectionError) -> ClientError:
    return ClientError(
        OUTCOME_UNKNOWN,
        f"the connection failed after the append was sent, it may or may not be committed: {broken}; "
        "check the stream's tail before you append again, or use a producer, which retries safely",
        outcome_unknown=True,
    )


def connection_error(
    broken: BrokenConnectionError, request: HttpRequest, *, maybe_applied: bool
) -> ClientError:
    return ClientError(
        CONNECTION_LOST if broken.sent else CONNECT_FAILED,
        f"{request.method} {request.path} failed: {broken}",
        # The outcome of a read does not matter.
        outcome_unknown=maybe_applied and request.method not in ("GET", "HEAD"),
    )


# Nothing was sent when one of these is raised.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)

# Failures of the network or the server. Local errors (a malformed URL, an illegal header) are not among them:
# they would fail again.
CONNECTION_ERRORS = (
    httpx2.TimeoutException,
    httpx2.NetworkError,
    httpx2.RemoteProtocolError,
    httpx2.ProxyError,
    httpx2.DecodingError,
)

# Each follower uses a connection. Beyond this number they wait for each other.
CONNECTIONS_MAX = 1000
CONNECTIONS_IDLE_MAX = 100
# Well below the 75 s after which the server closes idle connections.
CONNECTION_IDLE_S_MAX = 30.0


class TransportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Address, token, timeouts and retries of a client."""

    base_url: str
    token: str | Callable[[], str] | None
    timeout_s: float
    connect_timeout_s: float
    retries: Retries

    def authorization(self) -> bytes | None:
        token = self.token() if callable(self.token) else self.token
        # A token read from a file often ends with a line break.
        token = None if token is None else token.strip()
        if not token:
            return None
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("the token must be printable ASCII without spaces")
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
        raise ValueError(f"base_url must be a URL: {base_url!r} ({error})") from None
    check_seconds("timeout_s", timeout_s)
    check_seconds("connect_timeout_s", connect_timeout_s)
    if not host:
        raise ValueError(f"base_url must have a host: {base_url!r}")
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


class SyncTransport:
    """Runs steps on blocking sockets. Holds at most one open response."""

    __slots__ = ("_chunks", "_http", "_response", "_settings")

    def __init__(self, http: httpx2.Client, settings: TransportSettings) -> None:
        self._http = http
        self._settings = settings
        self._response: httpx2.Response | None = None
        self._chunks: Iterator[bytes] = iter(())

    def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                try:
                    reply = self._perform(effect)
                except CONNECTION_ERRORS as error:
                    effect = steps.throw(broken_connection_from(error))
                else:
                    effect = steps.send(reply)
        except StopIteration as stop:
            return stop.value

    def clone(self) -> Self:
        """A separate transport for a follower, on the same connection pool."""
        return type(self)(self._http, self._settings)

    def close_stream(self) -> None:
        response, self._response = self._response, None
        self._chunks = iter(())
        if response is not None:
            response.close()

    def _perform(self, effect: Effect) -> Reply:
        match effect:
            case SendRequest():
                response = self._http.send(self._settings.build(self._http, effect.request))
                return response_from(response, response.content)
            case Sleep():
                time.sleep(effect.seconds)
            case OpenStream():
                return self._open(effect.request)
            case NextChunk():
                return next(self._chunks, None)
            case CloseStream():
                self.close_stream()
        return None

    def _open(self, request: HttpRequest) -> Reply:
        self.close_stream()
        response = self._http.send(self._settings.build(self._http, request), stream=True)
        self._response = response
        if response.status_code == 200:
            self._chunks = response.iter_bytes()
            return response_from(response, b"")
        body = response.read()
        self.close_stream()
        return response_from(response, body)


class AsyncTransport:
    """Runs steps on an event loop. Holds at most one open response."""

    __slots__ = ("_chunks", "_http", "_response", "_settings")

    def __init__(self, http: httpx2.AsyncClient, settings: TransportSettings) -> None:
        self._http = http
        self._settings = settings
        self._response: httpx2.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    async def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                try:
                    reply = await self._perform(effect)
                except CONNECTION_ERRORS as error:
                    effect = steps.throw(broken_connection_from(error))
                else:
                    effect = steps.send(reply)
        except StopIteration as stop:
            return stop.value

    def clone(self) -> Self:
        """A separate transport for a follower, on the same connection pool."""
        return type(self)(self._http, self._settings)

    async def close_stream(self) -> None:
        response, self._response = self._response, None
        self._chunks = None
        if response is not None:
            await response.aclose()

    async def _perform(self, effect: Effect) -> Reply:
        match effect:
            case SendRequest():
                response = await self._http.send(self._settings.build(self._http, effect.request))
                return response_from(response, response.content)
            case Sleep():
                await asyncio.sleep(effect.seconds)
            case OpenStream():
                return await self._open(effect.request)
            case NextChunk():
                return None if self._chunks is None else await anext(self._chunks, None)
            case CloseStream():
                await self.close_stream()
        return None

    async def _open(self, request: HttpRequest) -> Reply:
        await self.close_stream()
        response = await self._http.send(self._settings.build(self._http, request), stream=True)
        self._response = response
        if response.status_code == 200:
            self._chunks = response.aiter_bytes()
            return response_from(response, b"")
        body = await response.aread()
        await self.close_stream()
        return response_from(response, body)
