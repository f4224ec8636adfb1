"""Effects: what a decision requests of connections and streams.

Decisions never wait. An effect whose outcome matters carries a callback, which gets the outcome and the time,
and may queue further effects.
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
    """Close after everything that was sent before."""

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
    """One or several entries for a stream of the hub, which is created if missing."""

    stream: str
    body: bytes
    then: Callable[[AppendOutcome, int], None] | None = None
    key: bytes | None = None
    producer: tuple[str, int, int] | None = None
    lengths: list[int] | None = None  # of each, if the body is several entries joined by commas
    begun_s: float = 0.0  # when it was passed to the log, for metrics


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
    """Creates an empty stream."""

    stream: str


class DeleteStream(msgspec.Struct, eq=False):
    """Deletes a stream."""

    stream: str


class StreamSummary(msgspec.Struct, frozen=True):
    """One stream of a listing."""

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
    """Resumes reading from a session whose frames were held."""

    session: Session


class Defer(msgspec.Struct, eq=False):
    """Continues in the next loop iteration."""

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
