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
from tailrace.client.retry import PASSING_FAULTS, REFUSED_UNTOUCHED, Backoff, retry_after_s
from tailrace.client.wire import Answer, Request


class Send(msgspec.Struct, frozen=True):
    """Send a request; the reply is the whole `Answer`."""

    request: Request


class Pause(msgspec.Struct, frozen=True):
    """Wait; the reply is None."""

    seconds: float


class Open(msgspec.Struct, frozen=True):
    """Send a request whose answer is read chunk by chunk.

    The reply is an `Answer` without a body if the status is 200; any other answer comes whole, and nothing
    stays open.
    """

    request: Request


class NextChunk(msgspec.Struct, frozen=True):
    """The reply is the next chunk of the open answer, or None at its end."""


class HangUp(msgspec.Struct, frozen=True):
    """Close the open answer, if there is one; the reply is None."""


Effect: TypeAlias = Send | Pause | Open | NextChunk | HangUp
Reply: TypeAlias = Answer | bytes | None

T = TypeVar("T")
P = ParamSpec("P")
Steps: TypeAlias = Generator[Effect, Reply, T]


class BrokenError(Exception):
    """The connection failed. Unless `sent` is false, the server may have got and obeyed the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class Outcome(msgspec.Struct, frozen=True):
    """An answer, and whether an earlier attempt at the same request may have taken effect."""

    answer: Answer
    doubtful: bool


class Named(Protocol):
    @property
    def name(self) -> str: ...


SelfT = TypeVar("SelfT", bound=Named)


def names_stream(
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


def send(request: Request) -> Steps[Answer]:
    reply = yield Send(request)
    assert isinstance(reply, Answer)
    return reply


def open_answer(request: Request) -> Steps[Answer]:
    reply = yield Open(request)
    assert isinstance(reply, Answer)
    return reply


def next_chunk() -> Steps[bytes | None]:
    reply = yield NextChunk()
    assert not isinstance(reply, Answer)
    return reply


def may_retry(status: int, *, repeatable: bool) -> bool:
    return status in REFUSED_UNTOUCHED or (repeatable and status in PASSING_FAULTS)


def exchange(request: Request, backoff: Backoff) -> Steps[Outcome]:
    """Send a request until there is an answer worth having, or patience ends.

    What is not repeatable goes out again only if it is certain that the server did nothing: the connection
    was never made, or the answer says so.
    """
    doubtful = False
    while True:
        try:
            answer = yield from send(request)
        except BrokenError as broken:
            doubtful = doubtful or broken.sent
            if broken.sent and not request.repeatable:
                raise unknown_outcome(broken) from broken
            delay = backoff.next_delay()
            if delay is None:
                raise lost(broken, request, doubtful=doubtful) from broken
        else:
            if not may_retry(answer.status, repeatable=request.repeatable):
                return Outcome(answer, doubtful)
            # A passing fault of the server may have come after the commit.
            delay = backoff.next_delay(retry_after_s(answer.headers))
            if delay is None:
                return Outcome(answer, doubtful)
            doubtful = doubtful or answer.status in PASSING_FAULTS
        yield Pause(delay)


def unknown_outcome(broken: BrokenError) -> ClientError:
    return ClientError(
        OUTCOME_UNKNOWN,
        f"the connection failed after the append was sent, it may or may not have been committed: {broken}; "
        "compare the stream's tail before you append again, or use a producer, which retries safely",
        outcome_unknown=True,
    )


def lost(broken: BrokenError, request: Request, *, doubtful: bool) -> ClientError:
    return ClientError(
        CONNECTION_LOST if broken.sent else CONNECT_FAILED,
        f"{request.method} {request.path} failed: {broken}",
        # A read has no outcome to be in doubt about.
        outcome_unknown=doubtful and request.method not in ("GET", "HEAD"),
    )
