"""Retention rules: which entries of a stream are over its bounds, and its view of the hot store.

A stream shows its own entries and, if it is a fork, entries of its ancestors. Its retention applies to what
it shows: its `earliest` advances. An entry is deleted from the stream that stores it only after `earliest` of
every stream that shows it has advanced past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgspec

from tailrace.common.timestamps import TIMESTAMP_NS_MAX
from tailrace.log.model import Lifetime, Stream
from tailrace.log.stored_streams import decode_stream, encode_stream
from tailrace.storage.hot_store.database import HotDatabase
from tailrace.storage.hot_store.tables import ForkRow
from tailrace.storage.segments.model import FOREVER, EntryRange, SegmentInfo

SECOND_NS = 1_000_000_000


class ShownSegment(NamedTuple):
    """A segment as far as the stream shows it. Of one that it shows in part, no bytes are counted."""

    last: int
    last_ns: int
    payload_bytes: int
    own: bool = True  # not an ancestor's
    file_bytes: int = 0


class RetentionDecision(NamedTuple):
    """Entries up to `earliest` are removed; check again at `next_ns`, or after new entries if it is None."""

    earliest: int
    payload_bytes: int  # of the stream's own entries among them
    next_ns: int | None
    segments: int = 0  # of the stream's own
    segment_bytes: int = 0
    to_the_end: bool = False  # every segment goes that there was


def has_bounds(lifetime: Lifetime) -> bool:
    return lifetime.retention_s is not None or lifetime.retention_bytes is not None


def decide_retention(
    earliest: int, shown: Iterable[ShownSegment], lifetime: Lifetime, shown_bytes: int, now_ns: int
) -> RetentionDecision:
    """Whole segments from the oldest, as long as all their entries are over one of the bounds.

    `shown` starts after `earliest`, oldest first, and is read only as far as needed. `shown_bytes` is the
    payload of everything the stream shows, including unsealed entries.
    """
    decided = RetentionDecision(earliest, 0, None)
    for segment in shown:
        newer_bytes = shown_bytes - segment.payload_bytes
        over_ns = over_bounds_at_ns(segment, lifetime, newer_bytes)
        if over_ns is None or over_ns > now_ns:
            return decided._replace(next_ns=over_ns)
        decided, shown_bytes = decided._replace(earliest=segment.last), newer_bytes
        if segment.own:
            decided = decided._replace(
                payload_bytes=decided.payload_bytes + segment.payload_bytes,
                segments=decided.segments + 1,
                segment_bytes=decided.segment_bytes + segment.file_bytes,
            )
    return decided._replace(to_the_end=True)


def over_bounds_at_ns(segment: ShownSegment, lifetime: Lifetime, newer_bytes: int) -> int | None:
    """When every entry of the segment is over a bound: 0 if by size, None if only newer entries can do it."""
    if lifetime.retention_bytes is not None and newer_bytes >= lifetime.retention_bytes:
        return 0
    if lifetime.retention_s is not None:
        return segment.last_ns + lifetime.retention_s * SECOND_NS
    return None


def is_over_bounds(lifetime: Lifetime, size_bytes: int, age_s: float) -> bool:
    """Whether the oldest of so many bytes, that old, is over a bound."""
    by_size = lifetime.retention_bytes is not None and size_bytes > lifetime.retention_bytes
    return by_size or (lifetime.retention_s is not None and age_s >= lifetime.retention_s)


def ranges_reached_by_forks(
    source: int, forks: int, forks_of: Callable[[int], Sequence[ForkRow]]
) -> list[EntryRange]:
    """The entries below their fork points that the forks of a stream show, recursively.

    Ranges may overlap. If the table of forks is incomplete, everything counts as shown.
    """
    runs: list[EntryRange] = []
    open_streams = [(source, forks, FOREVER)]
    while open_streams:
        number, count, upto = open_streams.pop()
        found = forks_of(number) if count else ()
        if len(found) != count:
            return [(0, FOREVER)]
        for fork in found:
            shared = min(upto, fork.fork_entry)
            if not fork.gone and fork.earliest < shared:  # a soft-deleted one is read by its forks only
                runs.append((fork.earliest, shared))
            if fork.forks:
                open_streams.append((fork.number, fork.forks, shared))
    return runs


# One decision examines no more than so many segments; the next one continues after them.
SHOWN_SEGMENTS_MAX = 1000

_INFO = msgspec.msgpack.Decoder(SegmentInfo)


def put_stream(db: HotDatabase, stream: Stream) -> None:
    """Everything of a stream but its entries and producers."""
    deadline_ns = stored_deadline_ns(stream)
    db.put_stream(stream.number, stream.name, stream.gone, deadline_ns, encode_stream(stream))
    if stream.parent:
        row = ForkRow(stream.number, stream.fork_entry, stream.earliest, stream.gone, stream.forks)
        db.trims.put_fork(stream.parent, row)


def put_due(db: HotDatabase, stream: Stream) -> None:
    """When retention has to examine the stream. Called after its segments and its ancestors' are written."""
    if has_bounds(stream.lifetime):
        sealed_ns = decide_stored_retention(db, stream, stream.lifetime, now_ns=-1).next_ns
        unsealed_ns = unsealed_over_bounds_ns(db, stream, stream.lifetime)
        due = [at_ns for at_ns in (sealed_ns, unsealed_ns) if at_ns is not None]
        db.trims.put_due(stream.number, min(due, default=None))


def stored_deadline_ns(stream: Stream) -> int | None:
    """When the retention scan may examine the stream; errs towards later."""
    if stream.gone:
        return None
    deadline_ns = stream.deadline_ns()
    if deadline_ns is not None and stream.lifetime.ttl_s is not None:
        deadline_ns += stream.lifetime.ttl_s * 100_000_000
    return None if deadline_ns is None else min(deadline_ns, TIMESTAMP_NS_MAX)


def stored_stream(db: HotDatabase, number: int) -> Stream | None:
    raw = db.image_by_number(number)
    return None if raw is None else decode_stream(raw)


def decide_stored_retention(
    db: HotDatabase, stream: Stream, lifetime: Lifetime, now_ns: int, upto: int | None = None
) -> RetentionDecision:
    """The retention decision for a stream in the hot store; entries after `upto` stay in any case."""
    shown_bytes = stream.size_bytes
    inherits = stream.parent and stream.earliest < stream.fork_entry
    if inherits and lifetime.retention_bytes is not None:
        shown_bytes += sum(part.payload_bytes for part in shown_segments(db, stream) if not part.own)
    shown: Iterable[ShownSegment] = shown_segments(db, stream, SHOWN_SEGMENTS_MAX)
    if upto is not None:
        shown = takewhile(lambda segment: segment.last <= upto, shown)
    decision = decide_retention(stream.earliest, shown, lifetime, shown_bytes, now_ns)
    if decision.to_the_end and inherits and decision.earliest < stream.fork_entry:
        # Its source has yet to seal what it shows of it, and there is no event when that is done.
        return decision._replace(next_ns=0)
    return decision


def unsealed_over_bounds_ns(db: HotDatabase, stream: Stream, lifetime: Lifetime) -> int | None:
    """When the oldest unsealed entry is over a bound: unsealed entries must be sealed to be removed.

    0 if it is by size. None: there are none, or only new entries can bring it about.
    """
    oldest_ns = db.cold.hot_time_ns(stream.number, stream.sealed + 1)
    if oldest_ns is None:
        return None
    return over_bounds_at_ns(
        ShownSegment(0, oldest_ns, 0), lifetime, stream.size_bytes - stream.sealed_bytes - 1
    )


def shown_segments(db: HotDatabase, stream: Stream, count_max: int | None = None) -> Iterator[ShownSegment]:
    """The segments that a stream shows, its ancestors' first, up to the first entry that is not sealed."""
    levels: list[tuple[Stream, int]] = [(stream, stream.sealed)]
    while (owner := levels[-1][0]).parent and stream.earliest < owner.fork_entry:
        source = stored_stream(db, owner.parent)
        assert source is not None, f"the source of fork {owner.name} is missing"
        levels.append((source, min(owner.fork_entry, levels[-1][1])))
    entry = stream.earliest + 1
    for owner, upto in reversed(levels):
        if entry > upto:
            continue
        for raw in db.cold.infos_from(owner.number, entry):
            info = _INFO.decode(raw)
            if count_max == 0 or info.first > entry:
                return
            whole = info.first == entry and info.last <= upto
            last = min(info.last, upto)
            payload_bytes = info.payload_bytes if whole else 0
            yield ShownSegment(last, info.last_ns, payload_bytes, owner is stream, info.bytes)
            count_max = None if count_max is None else count_max - 1
            entry = last + 1
            if entry > upto:
                break
        else:
            return


def reached_by_forks(db: HotDatabase, stream: Stream) -> list[EntryRange]:
    """Entries of the stream, and of its ancestors, that its forks show."""
    return ranges_reached_by_forks(stream.number, stream.forks, db.trims.forks_of)


def fork_points(db: HotDatabase, number: int) -> set[int]:
    """The last entries of a stream that its forks show, and the forks of those, and so on."""
    points: set[int] = set()
    open_streams = [(number, FOREVER)]
    while open_streams:
        source, upto = open_streams.pop()
        for fork in db.trims.forks_of(source):
            shared = min(upto, fork.fork_entry)
            points.add(shared)
            if fork.forks:
                open_streams.append((fork.number, shared))
    return points
