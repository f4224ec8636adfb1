"""A stream as it comes back from its manifest. Pure: heads in, heads and streams out.

What was acknowledged behind the last recorded entry is lost with the disk. So everything goes on in a new
epoch, and an offset that was handed out for a lost entry never finds a new one.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tailrace.log.model import NO_LIFETIME, ColdTotals, Lifetime, Stream
from tailrace.storage.manifests.model import ManifestHead, RecordedLifetime
from tailrace.storage.segments.segments import SegmentInfo

Epochs = tuple[tuple[int, int], ...]
# Consecutive entries: those behind the first number, up to and including the second.
RestoredRange = tuple[int, int]


class ForkSource(NamedTuple):
    """What a fork has to know about the restored stream it comes from."""

    number: int
    tail: int
    last_ns: int
    runs: tuple[RestoredRange, ...]


class SegmentTotals:
    """What the segments of a stream say together, oldest first."""

    def __init__(self, earliest: int = 0) -> None:
        self._earliest = earliest
        self.entries = self.payload_bytes = self.last_ns = 0
        self.segments = self.segment_bytes = 0
        self.runs: list[RestoredRange] = []

    def add(self, info: SegmentInfo) -> None:
        self.entries += info.rows
        self.last_ns = info.last_ns
        if info.last > self._earliest:  # an older one is kept for forks only
            self.payload_bytes += info.payload_bytes
            self.segments += 1
            self.segment_bytes += info.bytes
        if self.runs and self.runs[-1][1] == info.first - 1:
            self.runs[-1] = (self.runs[-1][0], info.last)
        else:
            self.runs.append((info.first - 1, info.last))


def raise_epoch(epochs: Epochs, through: int) -> Epochs:
    """The epochs of a stream that goes on behind entry `through`. Epochs without entries are passed over."""
    kept = tuple(pair for pair in epochs if pair[1] <= through) or epochs[:1]
    return (*kept, (epochs[-1][0] + 1, through + 1))


def restored_head(head: ManifestHead, source: ForkSource | None) -> ManifestHead:
    """What the manifest says from now on. It is recorded first: the next loss must know of this one."""
    if head.deleted is not None:
        # A later use of the name may be lost that nothing tells of.
        deleted = msgspec.structs.replace(head.deleted, epoch=head.deleted.epoch + 1)
        return msgspec.structs.replace(head, deleted=deleted)
    if source is not None and source.tail < head.fork_entry == head.uploaded_through:
        # Some of what it inherits was never recorded: it ends where its source does.
        through = source.tail
        head = msgspec.structs.replace(head, fork_entry=through, uploaded_through=through, tail=through)
    return msgspec.structs.replace(head, epochs=raise_epoch(head.epochs, head.uploaded_through))


def restored_ranges(
    head: ManifestHead, source: ForkSource | None, sums: SegmentTotals
) -> tuple[RestoredRange, ...]:
    """What is stored of all that a stream and its forks may show: its own entries and what it inherits."""
    if source is None:
        return tuple(sums.runs)
    runs = [(after, min(last, head.fork_entry)) for after, last in source.runs if after < head.fork_entry]
    for after, last in sums.runs:
        if runs and runs[-1][1] == after:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((after, last))
    return tuple(runs)


def restored_earliest(head: ManifestHead, source: ForkSource | None) -> int:
    """The entry behind which a restored stream can be read: retention, or a loss, took those before."""
    inherits = () if source is None else source.runs
    stored = (after for after, last in inherits if after < head.fork_entry <= last)
    return max(head.earliest, min(stored, default=head.fork_entry))


def restored_stream(
    number: int, head: ManifestHead, source: ForkSource | None, sums: SegmentTotals, now_ns: int
) -> Stream:
    """The stream as the hot store gets it. All its entries are in segments."""
    stream = Stream(number, head.name, head.created_ns)
    stream.incarnation = head.incarnation
    stream.epochs = head.epochs
    stream.bind(head.content_type)
    stream.lifetime = _restored_lifetime(head.lifetime)
    stream.asked = _restored_lifetime(head.asked)
    # When it was last used is not known, so its window begins again.
    stream.touched_ns = stream.touched_saved_ns = (
        now_ns if head.lifetime.ttl_s is not None else head.touched_ns
    )
    stream.closed = stream.visible_closed = head.closed
    stream.closed_by = head.closed_by
    stream.tail = stream.visible = stream.stored = stream.sealed = head.uploaded_through
    stream.size_bytes = stream.sealed_bytes = sums.payload_bytes
    stream.cold = ColdTotals(sums.segments, sums.segment_bytes, head.generation)
    stream.last_ns = max(head.tail_ns, sums.last_ns)
    if source is not None and not stream.last_ns:
        stream.last_ns = source.last_ns
    stream.seq = head.seq
    stream.parent = 0 if source is None else source.number
    stream.fork_entry = head.fork_entry
    stream.fork_sub = head.fork_sub
    stream.gone = head.gone
    stream.gone_reason = head.gone_reason
    stream.earliest = restored_earliest(head, source)
    return stream


def _restored_lifetime(recorded: RecordedLifetime) -> Lifetime:
    found = Lifetime(recorded.ttl_s, recorded.expires_ns, recorded.retention_s, recorded.retention_bytes)
    return NO_LIFETIME if found == NO_LIFETIME else found
