"""What retention takes away. Pure: what a stream shows, its bounds and the time in, a decision out.

A stream shows its own entries and, being a fork, entries of its ancestors. Its retention bounds what *it*
shows: its `earliest` moves on and its readers are told. Whether an entry is also deleted is another question,
asked of the stream that stores it: not before every stream that shows it has moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tailrace.log.model import Lifetime
from tailrace.storage.hot_store.trim_tables import ForkRow
from tailrace.storage.segments.kept import FOREVER, EntryRange

SECOND_NS = 1_000_000_000


class ShownSegment(NamedTuple):
    """A segment as far as the stream shows it. Of one that it shows in part, no bytes are counted."""

    last: int
    last_ns: int
    payload_bytes: int
    own: bool = True  # not an ancestor's
    file_bytes: int = 0


class RetentionDecision(NamedTuple):
    """Entries up to `earliest` go; look again at `next_ns`, or never if only new entries can matter."""

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

    `shown` begins behind `earliest`, oldest first, and is read only as far as it is needed. `shown_bytes` is
    the payload of everything the stream shows, that which is not sealed included.
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
    """The entries below their fork points that the forks of a stream show, and the forks of those, and so on.

    Runs may overlap. If the book of forks does not have as many as there are, everything counts as shown.
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
