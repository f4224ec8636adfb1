"""What a decision asks for: bytes to a connection, entries to a stream, pages from one, the end of either.

Decisions wait for nothing. Where something has to be durable or read before it goes on, the effect carries
what follows: it is called with the outcome, and asks for further effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tailrace.common.errors import TailraceError
    from tailrace.hub.session import Session


class Send(msgspec.Struct, eq=False, gc=False):
    """One envelope to one connection."""

    session: Session
    frame: bytes


class SendMany(msgspec.Struct, eq=False, gc=False):
    """Envelopes to many connections, one each."""

    copies: list[tuple[Session, bytes]]


class Close(msgspec.Struct, eq=False):
    """The goodbye, after everything that was sent before it."""

    session: Session
    code: int
    reason: str


class AppendOutcome(msgspec.Struct, frozen=True):
    """An append that is durable, or why it is not. `entry` is 0 if it is not known any more."""

    entry: int = 0
    offset: str | None = None
    duplicate: bool = False
    error: TailraceError | None = None


class Append(msgspec.Struct, eq=False):
    """An entry for a stream of the hub, or several; the stream is made if it is missing."""

    stream: str
    body: bytes
    then: Callable[[AppendOutcome, int], None] | None = None
    key: bytes | None = None
    producer: tuple[str, int, int] | None = None
    lengths: list[int] | None = None  # of each, if the body is several entries joined by commas
    begun_s: float = 0.0  # when it was given to the log, by whoever measures


class ReadResult(msgspec.Struct, frozen=True):
    """Entries `after + 1 .. next_entry` of a stream; `error` if they cannot be read."""

    entries: tuple[tuple[int, int, bytes], ...] = ()  # number, append time in ns, body
    next_entry: int = 0
    error: TailraceError | None = None


class Read(msgspec.Struct, eq=False):
    """A page of a stream."""

    stream: str
    after: int
    entries_max: int
    bytes_max: int
    then: Callable[[ReadResult, int], None]
    since_ns: int | None = None  # from the first entry of this time on, instead of `after`


class CreateStream(msgspec.Struct, eq=False):
    """A stream that is to be there before anything is in it."""

    stream: str


class DeleteStream(msgspec.Struct, eq=False):
    """The end of a stream."""

    stream: str


class StreamSummary(msgspec.Struct, frozen=True):
    """One stream as a list of names shows it."""

    stream: str
    earliest: int
    tail: int
    size_bytes: int
    created_ms: int
    last_ms: int  # of its last entry


class ListStreams(msgspec.Struct, eq=False):
    """The next streams whose names begin like this, in order."""

    prefix: str
    after: str
    names_max: int
    then: Callable[[list[StreamSummary], int], None]


class ResumeReading(msgspec.Struct, eq=False):
    """A session whose frames had to wait is read from again."""

    session: Session


class Defer(msgspec.Struct, eq=False):
    """Goes on after others had their turn."""

    then: Callable[[int], None]


Effect = (
    Send
    | SendMany
    | Close
    | Append
    | Read
    | CreateStream
    | DeleteStream
    | Defer
    | ResumeReading
    | ListStreams
)
