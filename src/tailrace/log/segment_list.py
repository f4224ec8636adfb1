"""The segments of a stream as they are now: the hot store's book, and what the journal says beyond it."""

from __future__ import annotations

import msgspec

from tailrace.log.catalogue import UncheckpointedOps
from tailrace.log.records import Compacted, Sealed
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.segments.segments import SegmentInfo

_decode_segment_info = msgspec.msgpack.Decoder(SegmentInfo).decode


def read_segments(
    store: StoredStreams, number: int, earliest: int, unfolded: UncheckpointedOps
) -> list[SegmentInfo]:
    """On a thread. The segments with entries behind `earliest`, oldest first.

    Journal files that the hot store has by now are not counted twice.
    """
    with store.snapshot():
        seq = store.db.journal_seq
        found = {
            info.first: info
            for info in map(_decode_segment_info, store.db.cold.infos_from(number, earliest + 1))
        }
    for file, op in unfolded:
        if file <= seq:
            continue
        if isinstance(op, Sealed):
            found.update((info.first, info) for info in op.segments)
        elif isinstance(op, Compacted):
            for first, _ in op.replaced:
                found.pop(first, None)
            found[op.segment.first] = op.segment
    return [found[first] for first in sorted(found) if found[first].last > earliest]
