"""What a request does to a stream: pure functions from state and request to operations or a refusal.

Nothing here waits, does I/O or changes state. A refusal is a `TailraceError`; the order of the checks is the
order in which the protocol lists them, and the first that fails decides.
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
    """An append as the protocol layer understood it: headers parsed, JSON cut."""

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
        # Looks at the entries by the stream's documents, when all else is in order: refuses by raising, or
        # gives each its key (None: they have the one of the request). It is handed the request and must not
        # hold it: a request that holds itself, and a megabyte with it, would wait for the collector.
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
    # The documents a fork has from its source, left after this entry. Refuses the first entries by raising.
    inherit: Callable[[Stream, int], dict[str, bytes]] | None = None


def append_time_ns(stream: Stream, hint_ns: int | None, now_ns: int, ahead_ns: int) -> int:
    """A hint may lie in the past or a little ahead; time never goes backwards within a stream."""
    wanted = now_ns if hint_ns is None else min(hint_ns, now_ns + ahead_ns)
    return wanted if wanted >= stream.last_ns else stream.last_ns


def decide_append(stream: Stream, request: AppendRequest, now_ns: int, ahead_ns: int) -> Append | None:
    """For a stream that exists and a request that is well-formed.

    None if the request asks for what is already so: it succeeds and changes nothing.
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
                "content_type_mismatch", f"the stream holds {stream.content_type}, not {request.content_type}"
            )
    if request.producer is not None and _producer_is_duplicate(stream, request.producer):
        return None
    if request.seq is not None and stream.seq is not None and request.seq <= stream.seq:
        raise TailraceError(
            "seq_conflict",
            "Stream-Seq must be greater than the last accepted one",
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
    """Refuses, unless the request closed the stream before or asks for nothing but that it be closed."""
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
    """Validates a producer's claim; False means it may append."""
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
            "invalid_header", "a new Producer-Epoch starts with Producer-Seq 0", header="Producer-Seq"
        )
    if seq <= known.seq:
        return True
    if seq == known.seq + 1:
        return False
    raise _producer_gap(known.seq + 1, seq)


def _stale_epoch(current: int) -> TailraceError:
    return TailraceError(
        "stale_epoch",
        "a producer with a newer epoch has taken over",
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
    """PUT on a name that exists: None if it matches, a Bind if it names an unset type, else a refusal."""
    if stream.gone:
        raise TailraceError("name_retained", "the name is held by a deleted stream that still has forks")
    wanted = request.content_type
    if _types_differ(wanted, stream.content_type):
        raise _differs("content type")
    if request.lifetime != stream.asked:
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
    if wanted is not None and stream.content_type is None:
        return Bind(stream.number, wanted)
    return None


def _types_differ(one: str | None, other: str | None) -> bool:
    """An unset type says nothing, so it differs from none."""
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
    """A new stream, or a new life of an old name.

    `first_epoch` is above 0 once a disk was lost: what seems to be a new name may have been used before.
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
        raise TailraceError("content_type_mismatch", f"the source holds {source.content_type}")
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
    """Where a fork leaves its source; `head` is the part of the next entry it takes along."""

    source: Stream
    entry: int
    head: bytes
    time_ns: int  # append time of the last entry it inherits, which its own must not fall behind


def _fork_epochs(source: Stream, entry: int, own: int) -> tuple[tuple[int, int], ...]:
    inherited = tuple(pair for pair in source.epochs if pair[1] <= entry)
    current = max(own, inherited[-1][0] if inherited else source.epochs[0][0])
    if inherited and inherited[-1][0] == current:
        return inherited
    return (*inherited, (current, entry + 1))


def _inherited(asked: Lifetime, source: Lifetime) -> Lifetime:
    """What the PUT gives is used as it is; what it leaves out comes from the source."""
    ends = asked if asked.ttl_s is not None or asked.expires_ns is not None else source
    keeps = asked if asked.retention_s is not None or asked.retention_bytes is not None else source
    return Lifetime(ends.ttl_s, ends.expires_ns, keeps.retention_s, keeps.retention_bytes)


def resolve_position(stream: Stream, position: tuple[int, int], earliest: int) -> int:
    """The entry number a position stands for, if the stream has (or had) it."""
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
    """Deletion of a stream, and of soft-deleted ancestors that lose their last fork by it."""
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
    """A deletion comes after the creation and the last entry, also when the clock was set back meanwhile."""
    return max(now_ns, stream.created_ns, stream.last_ns)
