"""Client logic as generators: what to do is decided here once, the shells only carry it out.

A generator yields an effect (send this, wait that long, give me the next chunk) and is resumed with its
reply, or with `BrokenError` if the connection failed. The synchronous and the asynchronous shell run the same
generators, so there is one retry loop, one way to follow and one idempotent producer, and a test can play
the server without a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import msgspec

from tailrace.client.error import CONNECT_FAILED, CONNECTION_LOST, OUTCOME_UNKNOWN, ClientError
from tailrace.client.retry import NOT_APPLIED_STATUSES, TRANSIENT_STATUSES, Backoff, retry_after_s
from tailrace.client.wire import HttpRequest, HttpResponse


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
