"""Which events an operation on the object store puts into `__segments__`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tailrace.log import outbox
from tailrace.log.catalogue import decode_plans
from tailrace.log.model import Stream
from tailrace.log.records import Compacted, Published, Recorded, Sealed, Trim
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams
from tailrace.storage.segments.segments import SegmentInfo

_decode_segment_info = msgspec.msgpack.Decoder(SegmentInfo).decode


def events_of_op(
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
    if not outbox.has_segment_events(stream.name):
        return []
    if isinstance(op, Sealed):
        wanted = decode_plans(stream.documents).wanted
        return outbox.segment_insert_events(
            stream, op.segments, 0 if wanted is None else wanted.generation, now_ns
        )
    if isinstance(op, Published):
        return outbox.index_published_events(stream, op)
    if isinstance(op, Compacted):
        wanted = decode_plans(stream.documents).wanted
        events = outbox.segment_insert_events(
            stream, [op.segment], 0 if wanted is None else wanted.generation, now_ns
        )
        return [*outbox.segment_compacted_events(stream, op.segment.epoch, op.replaced, now_ns), *events]
    found = store.db.cold.infos_within(stream.number, stream.earliest, op.earliest, outbox.SEGMENT_EVENTS_MAX)
    shown = _current_segments(map(_decode_segment_info, found), streams, stream, op.earliest)
    return outbox.segment_delete_events(stream, shown, "retention", now_ns)


def events_of_removal(
    store: StoredStreams, streams: Streams, stream: Stream, reason: str, now_ns: int
) -> list[bytes]:
    """A stream that is gone for good, if anybody was told of it. One that forks still need is not."""
    if not stream.removed or not outbox.has_segment_events(stream.name):
        return []
    told = bool(stream.cold.segments) or bool(decode_plans(stream.documents).plans)
    if not told:
        return []
    found = store.db.cold.infos_within(
        stream.number, stream.earliest, stream.sealed, outbox.SEGMENT_EVENTS_MAX
    )
    shown = _current_segments(map(_decode_segment_info, found), streams, stream, stream.sealed)[
        : outbox.SEGMENT_EVENTS_MAX
    ]
    return [
        *outbox.segment_delete_events(stream, shown, reason, now_ns),
        outbox.plan_delete_event(stream, reason, now_ns),
    ]


def _current_segments(
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
