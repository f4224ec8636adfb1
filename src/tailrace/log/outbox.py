"""`__segments__`: what happens on the object store, as state messages on a stream of its own.

The journal record that commits a fact holds its events too, so that none is lost, told twice or out of order.
While one process owns all streams, being in that record is being delivered: an event is an entry of
`__segments__` at once. Where several do, it is an entry of one such stream of each, and delivered from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import orjson

from tailrace.common.limits import Limits
from tailrace.common.timestamps import format_rfc3339
from tailrace.log.model import NO_LIFETIME, Lifetime, Stream
from tailrace.log.records import Published
from tailrace.storage.segments.companions import PlanRecord
from tailrace.storage.segments.segments import SegmentInfo, make_stream_id, stream_prefix

SEGMENTS_STREAM: Final = "__segments__"
SEGMENT_EVENTS_MAX: Final = (
    1000  # about one deletion; whoever follows drops what it knows of a deleted stream
)


def has_segment_events(name: str) -> bool:
    """Segments of every stream are, the server's own included, but for those that hold the reports."""
    return not name.startswith(SEGMENTS_STREAM)


def has_index_files(name: str) -> bool:
    """Streams of the server itself have no companions."""
    return not name.startswith("__") and not name.startswith("hub/")


def segments_stream_lifetime(limits: Limits) -> Lifetime:
    """Its bounds are a setting of the server, and may be others after a restart."""
    age_ms = limits.segments_retention_ms
    return Lifetime(retention_s=-(-age_ms // 1000)) if age_ms else NO_LIFETIME


def segment_insert_events(
    stream: Stream, segments: Sequence[SegmentInfo], generation: int, now_ns: int
) -> list[bytes]:
    """Segments that are in the manifest now: whoever hears of one can read it."""
    folder = make_stream_id(stream.name, stream.incarnation)
    prefix = stream_prefix(folder)
    return [
        _segments_message(
            "segment",
            f"{folder}/{info.epoch:010}-{info.first:020}-{info.last:020}",
            {"operation": "insert", "timestamp": format_rfc3339(now_ns)},
            {
                "stream": stream.name,
                "stream_id": folder,
                "epoch": info.epoch,
                "first": info.first,
                "last": info.last,
                "rows": info.rows,
                "bytes": info.bytes,
                "raw_bytes": info.payload_bytes,
                "object": prefix + info.key,
                "sha256": info.sha256,
                "plan_generation": generation,
            },
        )
        for info in segments
    ]


def segment_delete_events(
    stream: Stream, segments: Iterable[SegmentInfo], reason: str, now_ns: int
) -> list[bytes]:
    """Segments that the stream shows no more: `retention` or `deleted`."""
    folder = make_stream_id(stream.name, stream.incarnation)
    headers = {"operation": "delete", "timestamp": format_rfc3339(now_ns), "reason": reason}
    return [
        _segments_message("segment", f"{folder}/{info.epoch:010}-{info.first:020}-{info.last:020}", headers)
        for info in segments
    ]


def segment_compacted_events(
    stream: Stream, epoch: int, ranges: Iterable[tuple[int, int]], now_ns: int
) -> list[bytes]:
    """Segments that have become part of a larger one."""
    folder = make_stream_id(stream.name, stream.incarnation)
    headers = {"operation": "delete", "timestamp": format_rfc3339(now_ns), "reason": "compacted"}
    return [
        _segments_message("segment", f"{folder}/{epoch:010}-{first:020}-{last:020}", headers)
        for first, last in ranges
    ]


def plan_insert_event(stream: Stream, plan: PlanRecord, now_ns: int) -> bytes:
    value = {"stream": stream.name, "generation": plan.generation, "hash": plan.hash}
    headers = {"operation": "update", "timestamp": format_rfc3339(now_ns)}
    return _segments_message("plan", make_stream_id(stream.name, stream.incarnation), headers, value)


def plan_delete_event(stream: Stream, reason: str, now_ns: int) -> bytes:
    """The stream is gone, and with it everything that was said about it."""
    headers = {"operation": "delete", "timestamp": format_rfc3339(now_ns), "reason": reason}
    return _segments_message("plan", make_stream_id(stream.name, stream.incarnation), headers)


def index_published_events(stream: Stream, op: Published) -> list[bytes]:
    """One event for each range that got companions."""
    folder = make_stream_id(stream.name, stream.incarnation)
    headers = {"operation": "insert", "timestamp": format_rfc3339(op.at_ns)}
    ranges: dict[tuple[int, int, str], list[str]] = {}
    for one in op.added:
        families = ranges.setdefault((one.first, one.last, one.plan_hash), [])
        if one.family not in families:
            families.append(one.family)
    return [
        _segments_message(
            "companion",
            f"{folder}/{first:020}-{last:020}",
            headers,
            {"plan_hash": plan, "families": families},
        )
        for (first, last, plan), families in ranges.items()
    ]


def _segments_message(
    kind: str, key: str, headers: Mapping[str, str], value: Mapping[str, object] | None = None
) -> bytes:
    message: dict[str, object] = {"type": kind, "key": key}
    if value is not None:
        message["value"] = value
    message["headers"] = headers
    return orjson.dumps(message)
