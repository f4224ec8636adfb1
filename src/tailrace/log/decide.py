"""Decisions: pure functions from a stream's state and a request to journal operations or a refusal.

Nothing here waits, does I/O or changes state. A refusal is a `TailraceError`. Checks run in the order in
which the protocol lists them; the first that fails determines the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tailrace.common.errors import TailraceError
from tailrace.log.model import NO_LIFETIME, Lifetime, Stream, Tombstone
from tailrace.log.records import Append, Bind, Create, Delete
from tailrace.protocol.http_headers import media_type

AppendCheck = Callable[["AppendRequest", Stream], Sequence[bytes | None] | None]


class AppendRequest:
    """An append with parsed headers and, on JSON streams, the lengths of the array's elements."""

    __slots__ = ("body", "check", "closes", "content_type", "hint_ns", "key", "lengths", "producer", "seq")

    def __init__(
        self,
        body: bytes,
        content_type: str | None,
        lengths: Sequence[int] | None = None,
        closes: bool = False,
        key: bytes | None = None,
        hint_ns: int | None = None,
        seq: bytes | None = None,
        producer: tuple[str, int, int] | None = None,
    ) -> None:
        self.body = body
        self.content_type = content_type
        self.lengths = lengths
        self.closes = closes
        self.key = key
        self.hint_ns = hint_ns
        self.seq = seq
        self.producer = producer
        # Validates the entries against the stream's documents after all other checks: raises, or returns a
        # key for each entry (None: all have the request's key). It must not be a closure over the request: a
        # reference cycle would hold the body in memory until the garbage collector runs.
        self.check: AppendCheck | None = None

    @property
    def count(self) -> int:
        if self.lengths is not None:
            return len(self.lengths)
        return 1 if self.body else 0


class CreateRequest(NamedTuple):
    name: str
    content_type: str | None = None
    lifetime: Lifetime = NO_LIFETIME
    closed: bool = False
    source: str | None = None  # name of the stream to fork
    fork_position: tuple[int, int] | None = None  # (epoch, entry); None is the source's tail
    fork_sub: int = 0
    initial: AppendRequest | None = None
    # Returns the documents that a fork inherits from its source at an entry; raises to refuse the fork.
    inherit: Callable[[Stream, int], dict[str, bytes]] | None = None


def append_time_ns(stream: Stream, hint_ns: int | None, now_ns: int, ahead_ns: int) -> int:
    """The time of an append: a hint may be `ahead_ns` in the future; times in a stream never decrease."""
    time_ns = now_ns if hint_ns is None else min(hint_ns, now_ns + ahead_ns)
    return time_ns if time_ns >= stream.last_ns else stream.last_ns


def decide_append(stream: Stream, request: AppendRequest, now_ns: int, ahead_ns: int) -> Append | None:
    """The operation for a well-formed append to an existing stream, or raises.

    None if the request is a duplicate: it succeeds and changes nothing.
    """
    count = request.count
    if stream.closed:
        _check_closed(stream, request, count)
        return None
    binds: str | None = None
    if count:
        assert request.content_type is not None
        if stream.content_type is None:
            binds = request.content_type
        elif request.content_type != stream.content_type and media_type(request.content_type) != media_type(
            stream.content_type
        ):
            raise TailraceError(
                "content_type_mismatch",
                f"the stream has content type {stream.content_type}, the request {request.content_type}",
            )
    if request.producer is not None and _producer_is_duplicate(stream, request.producer):
        return None
    if request.seq is not None and stream.seq is not None and request.seq <= stream.seq:
        raise TailraceError(
            "seq_conflict",
            "Stream-Seq must be greater than the last accepted value",
            headers=(
                ("Stream-Expected-Seq", stream.seq.decode("utf-8", "replace")),
                ("Stream-Received-Seq", request.seq.decode("utf-8", "replace")),
            ),
        )
    key, keys = request.key, None
    if stream.documents is not None and count and request.check is not None:
        keys = request.check(request, stream)
        if keys is not None and len(set(keys)) == 1:
            key, keys = keys[0], None
    return Append(
        stream.number,
        stream.tail + 1,
        count,
        request.body,
        request.lengths,
        append_time_ns(stream, request.hint_ns, now_ns, ahead_ns),
        key,
        request.producer,
        request.seq,
        binds,
        request.closes,
        keys,
    )


def _check_closed(stream: Stream, request: AppendRequest, count: int) -> None:
    """Raises, unless the request is the one that closed the stream, or only closes it."""
    producer = request.producer
    headers: list[tuple[str, str]] = [
        ("Stream-Closed", "true"),
        ("Stream-Next-Offset", stream.offset(stream.tail)),
    ]
    if producer is not None:
        known = (stream.producers or {}).get(producer[0])
        if known is not None and producer[1] < known.epoch:
            raise _stale_epoch(known.epoch)
        if producer == stream.closed_by:
            return
        if known is not None:
            headers += [("Producer-Epoch", str(known.epoch)), ("Producer-Seq", str(known.seq))]
    elif request.closes and not count:
        return
    raise TailraceError("stream_closed", "the stream is closed", headers=tuple(headers))


def _producer_is_duplicate(stream: Stream, producer: tuple[str, int, int]) -> bool:
    """Whether the append was accepted before; raises if its epoch or sequence number is not valid."""
    producer_id, epoch, seq = producer
    known = (stream.producers or {}).get(producer_id)
    if known is None:
        if seq == 0:
            return False
        raise _producer_gap(0, seq)
    if epoch < known.epoch:
        raise _stale_epoch(known.epoch)
    if epoch > known.epoch:
        if seq == 0:
            return False
        raise TailraceError(
            "invalid_header", "Producer-Seq must be 0 with a new Producer-Epoch", header="Producer-Seq"
        )
    if seq <= known.seq:
        return True
    if seq == known.seq + 1:
        return False
    raise _producer_gap(known.seq + 1, seq)


def _stale_epoch(current: int) -> TailraceError:
    return TailraceError(
        "stale_epoch",
        f"Producer-Epoch is stale; the current epoch is {current}",
        headers=(("Producer-Epoch", str(current)),),
        current_epoch=current,
    )


def _producer_gap(expected: int, received: int) -> TailraceError:
    return TailraceError(
        "producer_gap",
        f"expected Producer-Seq {expected}, received {received}",
        headers=(("Producer-Expected-Seq", str(expected)), ("Producer-Received-Seq", str(received))),
        expected_seq=expected,
        received_seq=received,
    )


def decide_existing(stream: Stream, request: CreateRequest, source: Stream | None) -> Bind | None:
    """PUT on an existing name: None if it matches, a Bind if it sets an unset content type, or raises."""
    if stream.gone:
        raise TailraceError("name_retained", "the name is retained by a deleted stream that still has forks")
    content_type = request.content_type
    if _types_differ(content_type, stream.content_type):
        raise _differs("content type")
    if request.lifetime != stream.requested_lifetime:
        raise _differs("lifetime")
    if request.closed != stream.closed:
        raise _differs("closed state")
    if (request.source is None) != (stream.parent == 0):
        raise _differs("fork source")
    if request.source is not None:
        if source is None or source.number != stream.parent:
            raise _differs("fork source")
        if request.fork_sub != stream.fork_sub:
            raise _differs("fork position")
        if request.fork_position is not None:
            anchor = stream.fork_entry - (stream.fork_sub if stream.json else 0)
            if resolve_position(source, request.fork_position, 0) != anchor:
                raise _differs("fork position")
    if content_type is not None and stream.content_type is None:
        return Bind(stream.number, content_type)
    return None


def _types_differ(one: str | None, other: str | None) -> bool:
    """An unset type matches every type."""
    return one is not None and other is not None and media_type(one) != media_type(other)


def _differs(what: str) -> TailraceError:
    return TailraceError("stream_exists", f"the stream exists with a different {what}")


def decide_create(
    request: CreateRequest,
    number: int,
    tombstone: Tombstone | None,
    fork: ForkPoint | None,
    now_ns: int,
    first_epoch: int = 0,
) -> Create:
    """Creates a stream; a name that was used before gets the next incarnation and epoch.

    `first_epoch` is above 0 after a lost disk: a name that seems new may have been used before.
    """
    incarnation = 0 if tombstone is None else tombstone.incarnation + 1
    epoch = first_epoch if tombstone is None else max(first_epoch, tombstone.epoch + 1)
    if fork is None:
        return Create(
            number,
            request.name,
            incarnation,
            ((epoch, 1),),
            now_ns,
            request.content_type,
            request.lifetime,
            request.lifetime,
            closed=request.closed and request.initial is None,
        )
    source = fork.source
    if _types_differ(request.content_type, source.content_type):
        raise TailraceError(
            "content_type_mismatch",
            f"the source has content type {source.content_type}, the request {request.content_type}",
        )
    return Create(
        number,
        request.name,
        incarnation,
        _fork_epochs(source, fork.entry, epoch),
        now_ns,
        source.content_type if source.content_type is not None else request.content_type,
        _inherited(request.lifetime, source.lifetime),
        request.lifetime,
        closed=request.closed and request.initial is None and not fork.head,
        parent=source.number,
        fork_entry=fork.entry,
        fork_sub=request.fork_sub,
        fork_ns=fork.time_ns,
    )


class ForkPoint(NamedTuple):
    """The last entry a fork inherits from its source; `head` is the part of the next entry it starts with."""

    source: Stream
    entry: int
    head: bytes
    time_ns: int  # append time of the last inherited entry; the fork's own entries are not older


def _fork_epochs(source: Stream, entry: int, own: int) -> tuple[tuple[int, int], ...]:
    inherited = tuple(pair for pair in source.epochs if pair[1] <= entry)
    current = max(own, inherited[-1][0] if inherited else source.epochs[0][0])
    if inherited and inherited[-1][0] == current:
        return inherited
    return (*inherited, (current, entry + 1))


def _inherited(requested: Lifetime, source: Lifetime) -> Lifetime:
    """The requested expiry and retention; each that is unset comes from the source."""
    has_expiry = requested.ttl_s is not None or requested.expires_ns is not None
    has_retention = requested.retention_s is not None or requested.retention_bytes is not None
    expiry = requested if has_expiry else source
    retention = requested if has_retention else source
    return Lifetime(expiry.ttl_s, expiry.expires_ns, retention.retention_s, retention.retention_bytes)


def resolve_position(stream: Stream, position: tuple[int, int], earliest: int) -> int:
    """The entry number of a position; raises if the stream does not have it."""
    epoch, entry = position
    tail = stream.visible
    if position == (0, 0):
        entry = 0
    elif epoch > stream.epoch or (epoch == stream.epoch and entry > tail):
        raise TailraceError("offset_beyond_tail", "the offset is past the end of the stream")
    elif epoch < stream.epoch:
        later = [first for number, first in stream.epochs if number > epoch]
        written = any(number <= epoch for number, _ in stream.epochs)
        if not written or entry > min(later[0] - 1, tail):
            raise offset_gone(stream, earliest)
    if entry < earliest:
        raise offset_gone(stream, earliest)
    return entry


def offset_gone(stream: Stream, earliest: int) -> TailraceError:
    offset = stream.offset(earliest)
    return TailraceError(
        "offset_gone",
        "the offset is no longer available",
        headers=(("Stream-Earliest-Offset", offset),),
        earliest_offset=offset,
    )


def decide_delete(stream: Stream, reason: str, now_ns: int, ancestors: Sequence[Stream]) -> list[Delete]:
    """Deletes a stream, and soft-deleted ancestors that lose their last fork by it."""
    if stream.forks:
        return [Delete(stream.number, delete_time_ns(stream, now_ns), reason, soft=True)]
    ops = [Delete(stream.number, delete_time_ns(stream, now_ns), reason, soft=False)]
    for ancestor in ancestors:
        if not ancestor.gone or ancestor.forks > 1:
            break
        at_ns = delete_time_ns(ancestor, now_ns)
        ops.append(Delete(ancestor.number, at_ns, ancestor.gone_reason, soft=False))
    return ops


def delete_time_ns(stream: Stream, now_ns: int) -> int:
    """A deletion is not before the creation and the last entry, even if the clock was set back."""
    return max(now_ns, stream.created_ns, stream.last_ns)
