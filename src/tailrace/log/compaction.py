"""Compaction as the log knows it: what is about to be replaced, and what has been since the last checkpoint.

Before the manifest is touched, a fact of the log says which segment is to stand for which. A server that is
killed in between finds it at its next start and finishes: it never goes on with segments that the manifest
has given up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.log.records import Compacted
from tailrace.storage.segments.segments import SegmentInfo

if TYPE_CHECKING:
    from tailrace.log.streams import Streams

COMPACTION_FACT_PREFIX: Final = "compact/"  # of the facts, which go on with the number of the stream


class CompactionIntent(msgspec.Struct, frozen=True, array_like=True):
    """One segment, and those in whose place it is put."""

    segment: SegmentInfo
    replaced: tuple[SegmentInfo, ...]

    def done(self, number: int, generation: int, footer: bytes, at_ns: int) -> Compacted:
        ranges = [(info.first, info.last) for info in self.replaced]
        size = sum(info.bytes for info in self.replaced)
        return Compacted(number, generation, self.segment, footer, ranges, size, at_ns)


def compaction_fact_key(number: int) -> str:
    """The key of the fact about a stream: one compaction at a time."""
    return f"{COMPACTION_FACT_PREFIX}{number}"


def encode_intent(intent: CompactionIntent) -> bytes:
    return msgspec.msgpack.encode(intent)


def decode_intent(raw: bytes) -> CompactionIntent:
    return msgspec.msgpack.decode(raw, type=CompactionIntent)


def pending_compactions(streams: Streams) -> Iterator[tuple[int, CompactionIntent]]:
    """Everything that was begun, with the number of its stream."""
    for key, raw in list(streams.meta.items()):
        if key.startswith(COMPACTION_FACT_PREFIX):
            yield int(key.removeprefix(COMPACTION_FACT_PREFIX)), decode_intent(raw)


def replacement_segment(streams: Streams, number: int, entry: int) -> Compacted | None:
    """What stands for the segment of an entry since the last checkpoint. Also asked on other threads."""
    for _, op in reversed(tuple(streams.unfolded.get(number, ()))):
        if isinstance(op, Compacted) and op.segment.first <= entry <= op.segment.last:
            return op
    return None


def has_uncheckpointed_compaction(streams: Streams, number: int, earliest: int) -> bool:
    """Whether the hot store does not know some of the segments that begin up to an entry.

    Retention is decided by what it knows, and takes whole segments.
    """
    raw = streams.meta.get(compaction_fact_key(number))
    begun: Sequence[SegmentInfo] = () if raw is None else (decode_intent(raw).segment,)
    fresh = (op.segment for _, op in streams.unfolded.get(number, ()) if isinstance(op, Compacted))
    return any(info.first <= earliest for info in (*begun, *fresh))
