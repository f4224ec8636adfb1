"""Which events an operation on the object store puts into `__segments__`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tailrace.log import outbox
from tailrace.log.catalogue import plans_in
from tailrace.log.model import Stream
from tailrace.log.records import Compacted, Published, Recorded, Sealed, Trim
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams
from tailrace.storage.segments.segments import SegmentInfo

_DECODE = msgspec.msgpack.Decoder(SegmentInfo).decode


def of(
    op: Sealed | Trim | Recorded | Published | Compacted,
    store: StoredStreams,
    streams: Streams,
    now_ns: int,
) -> list[bytes]:
    """What to tell, as long as the operation has not been applied."""
    if isinstance(op, Recorded):
        return []
    stream = streams.get(op.stream)
    assert stream is not None
    if not outbox.is_reported(stream.name):
        return []
    if isinstance(op, Sealed):
        wanted = plans_in(stream.documents).wanted
        return outbox.inserted(stream, op.segments, 0 if wanted is None else wanted.generation, now_ns)
    if isinstance(op, Published):
        return outbox.published(stream, op)
    if isinstance(op, Compacted):
        wanted = plans_in(stream.documents).wanted
        events = outbox.inserted(stream, [op.segment], 0 if wanted is None else wanted.generation, now_ns)
        return [*outbox.compacted(stream, op.segment.epoch, op.replaced, now_ns), *events]
    found = store.db.cold.infos_within(stream.number, stream.earliest, op.earliest, outbox.EVENTS_MAX)
    shown = _as_of_now(map(_DECODE, found), streams, stream, op.earliest)
    return outbox.dropped(stream, shown, "retention", now_ns)


def of_removal(
    store: StoredStreams, streams: Streams, stream: Stream, reason: str, now_ns: int
) -> list[bytes]:
    """A stream that is gone for good, if anybody was told of it. One that forks still need is not."""
    if not stream.removed or not outbox.is_reported(stream.name):
        return []
    told = bool(stream.cold.segments) or bool(plans_in(stream.documents).plans)
    if not told:
        return []
    found = store.db.cold.infos_within(stream.number, stream.earliest, stream.sealed, outbox.EVENTS_MAX)
    shown = _as_of_now(map(_DECODE, found), streams, stream, stream.sealed)[: outbox.EVENTS_MAX]
    return [
        *outbox.dropped(stream, shown, reason, now_ns),
        outbox.unplanned(stream, reason, now_ns),
    ]


def _as_of_now(
    stored: Iterable[SegmentInfo], streams: Streams, stream: Stream, upto: int
) -> list[SegmentInfo]:
    """Segments of the hot store with what the journal says beyond it, as far as they end by an entry."""
    found = {info.first: info for info in stored}
    for _, op in streams.unfolded.get(stream.number, ()):
        if isinstance(op, Sealed):
            found |= {info.first: info for info in op.segments if info.first not in found}
        elif isinstance(op, Compacted):
            for first, _ in op.replaced:
                found.pop(first, None)
            found[op.segment.first] = op.segment
    return [found[first] for first in sorted(found) if stream.earliest < found[first].last <= upto]
