"""System streams: `__registry__` and `__segments__`, their events and their retention.

`__registry__` has state messages for the creation, change and deletion of every stream, `__segments__` for
segments, index files and plans on the object store. An event is an entry in the same journal record as the
change it reports, so it is never lost, repeated or out of order. With several workers each writes its own
`__segments__` stream (an outbox), from which the events are delivered.

The retention of system streams is a setting and not part of the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import orjson

from tailrace.common.clock import Clock
from tailrace.common.limits import Limits
from tailrace.common.timestamps import format_rfc3339
from tailrace.log.decide import CreateRequest, decide_create
from tailrace.log.model import NO_LIFETIME, Lifetime, Stream
from tailrace.log.records import Compacted, Published, Recorded, Sealed, Trim
from tailrace.log.segment_catalogue import decode_plans
from tailrace.log.stored_streams import StoredStreams
from tailrace.log.streams import Streams
from tailrace.log.transaction import Transaction
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE
from tailrace.storage.segments.index_files import PlanRecord
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, stream_prefix

REGISTRY_STREAM = "__registry__"


def is_registered(name: str) -> bool:
    """Whether a stream appears in the registry: system streams and those of the hub do not."""
    return not name.startswith("__") and not name.startswith("hub/")


def registry_lifetime(limits: Limits) -> Lifetime:
    """The retention of `__registry__` according to the settings of this start."""
    age_ms, size_bytes = limits.registry_retention_ms, limits.registry_retention_bytes
    if not age_ms and not size_bytes:
        return NO_LIFETIME
    return Lifetime(retention_s=-(-age_ms // 1000) or None, retention_bytes=size_bytes or None)


def registry_insert(stream: Stream) -> bytes:
    return _registry_message(stream.name, "insert", stream.created_ns, _registry_value(stream, stream.closed))


def registry_update(stream: Stream, now_ns: int) -> bytes:
    return _registry_message(stream.name, "update", now_ns, _registry_value(stream, stream.closed))


def registry_delete(name: str, reason: str, now_ns: int) -> bytes:
    return _registry_message(name, "delete", now_ns, reason=reason)


def registry_snapshot_entry(stream: Stream, now_ns: int) -> bytes:
    """The message for an existing stream in a registry snapshot."""
    return _registry_message(stream.name, "insert", now_ns, _registry_value(stream, stream.visible_closed))


def _registry_value(stream: Stream, closed: bool) -> dict[str, object]:
    return {
        "path": stream.name,
        "contentType": stream.content_type or DEFAULT_CONTENT_TYPE,
        "createdAt": stream.created_ns // 1_000_000,
        "closed": closed,
    }


def _registry_message(
    name: str, operation: str, now_ns: int, value: dict[str, object] | None = None, reason: str | None = None
) -> bytes:
    headers = {"operation": operation, "timestamp": format_rfc3339(now_ns)}
    if reason is not None:
        headers["reason"] = reason
    message: dict[str, object] = {"type": "stream", "key": name}
    if value is not None:
        message["value"] = value
    message["headers"] = headers
    return orjson.dumps(message)


SEGMENTS_STREAM: Final = "__segments__"
SEGMENT_EVENTS_MAX: Final = 1000  # per deletion; followers drop all segments of a deleted stream anyway


def has_segment_events(name: str) -> bool:
    """Whether segments of a stream are reported: all except those of `__segments__` itself."""
    return not name.startswith(SEGMENTS_STREAM)


def has_index_files(name: str) -> bool:
    """Whether a stream gets index files: system streams and those of the hub do not."""
    return not name.startswith("__") and not name.startswith("hub/")


def segments_stream_lifetime(limits: Limits) -> Lifetime:
    """The retention of `__segments__` according to the settings of this start."""
    age_ms = limits.segments_retention_ms
    return Lifetime(retention_s=-(-age_ms // 1000)) if age_ms else NO_LIFETIME


def segment_insert_events(
    stream: Stream, segments: Sequence[SegmentInfo], generation: int, now_ns: int
) -> list[bytes]:
    """Segments that were added to the manifest, so that followers can read them."""
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
    """Segments that are no longer part of the stream, for the reason `retention` or `deleted`."""
    folder = make_stream_id(stream.name, stream.incarnation)
    headers = {"operation": "delete", "timestamp": format_rfc3339(now_ns), "reason": reason}
    return [
        _segments_message("segment", f"{folder}/{info.epoch:010}-{info.first:020}-{info.last:020}", headers)
        for info in segments
    ]


def segment_compacted_events(
    stream: Stream, epoch: int, ranges: Iterable[tuple[int, int]], now_ns: int
) -> list[bytes]:
    """Segments that were replaced by a larger one."""
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
    """The stream was removed, and its plan with it."""
    headers = {"operation": "delete", "timestamp": format_rfc3339(now_ns), "reason": reason}
    return _segments_message("plan", make_stream_id(stream.name, stream.incarnation), headers)


def index_published_events(stream: Stream, op: Published) -> list[bytes]:
    """One event for each range that got index files."""
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


METRICS_STREAM: Final = "__stream_metrics__"
AUDIT_STREAM: Final = "__audit__"
BOUNDED_STREAMS: Final = (REGISTRY_STREAM, SEGMENTS_STREAM, METRICS_STREAM, AUDIT_STREAM)


_decode_segment_info = msgspec.msgpack.Decoder(SegmentInfo).decode


def events_of_op(
    op: Sealed | Trim | Recorded | Published | Compacted,
    store: StoredStreams,
    streams: Streams,
    now_ns: int,
) -> list[bytes]:
    """The `__segments__` events of an operation, computed before it is applied."""
    if isinstance(op, Recorded):
        return []
    stream = streams.get(op.stream)
    assert stream is not None
    if not has_segment_events(stream.name):
        return []
    if isinstance(op, Sealed):
        wanted = decode_plans(stream.documents).wanted
        return segment_insert_events(stream, op.segments, 0 if wanted is None else wanted.generation, now_ns)
    if isinstance(op, Published):
        return index_published_events(stream, op)
    if isinstance(op, Compacted):
        wanted = decode_plans(stream.documents).wanted
        events = segment_insert_events(
            stream, [op.segment], 0 if wanted is None else wanted.generation, now_ns
        )
        return [*segment_compacted_events(stream, op.segment.epoch, op.replaced, now_ns), *events]
    found = store.db.cold.infos_within(stream.number, stream.earliest, op.earliest, SEGMENT_EVENTS_MAX)
    shown = _current_segments(map(_decode_segment_info, found), streams, stream, op.earliest)
    return segment_delete_events(stream, shown, "retention", now_ns)


def events_of_removal(
    store: StoredStreams, streams: Streams, stream: Stream, reason: str, now_ns: int
) -> list[bytes]:
    """Events for a removed stream that had segments or plans; none for a soft-deleted one."""
    if not stream.removed or not has_segment_events(stream.name):
        return []
    has_events = bool(stream.cold.segments) or bool(decode_plans(stream.documents).plans)
    if not has_events:
        return []
    found = store.db.cold.infos_within(stream.number, stream.earliest, stream.sealed, SEGMENT_EVENTS_MAX)
    shown = _current_segments(map(_decode_segment_info, found), streams, stream, stream.sealed)[
        :SEGMENT_EVENTS_MAX
    ]
    return [
        *segment_delete_events(stream, shown, reason, now_ns),
        plan_delete_event(stream, reason, now_ns),
    ]


def _current_segments(
    stored: Iterable[SegmentInfo], streams: Streams, stream: Stream, upto: int
) -> list[SegmentInfo]:
    """Segments of the hot store and of later journal files that end at or before entry `upto`."""
    found = {info.first: info for info in stored}
    for _, op in streams.uncheckpointed.get(stream.number, ()):
        if isinstance(op, Sealed):
            found |= {info.first: info for info in op.segments if info.first not in found}
        elif isinstance(op, Compacted):
            for first, _ in op.replaced:
                found.pop(first, None)
            found[op.segment.first] = op.segment
    return [found[first] for first in sorted(found) if stream.earliest < found[first].last <= upto]


JSON_TYPE = "application/json"


class SystemStreams:
    """Adds the events of a change to its transaction, so that they are durable together."""

    def __init__(self, streams: Streams, limits: Limits, clock: Clock, suffix: str) -> None:
        self._streams = streams
        self._limits = limits
        self._clock = clock
        self.registry_name = REGISTRY_STREAM + suffix
        self.outbox_name = SEGMENTS_STREAM + suffix

    def open(self, transaction: Transaction) -> None:
        """Creates the registry if it is missing, and sets the retention of this start."""
        found = self._streams.find(self.registry_name)
        if found is None:
            found = create_system_stream(self._streams, transaction, self.registry_name, self._clock.now_ns())
        found.lifetime = registry_lifetime(self._limits)
        if (events := self._streams.find(self.outbox_name)) is not None:
            events.lifetime = segments_stream_lifetime(self._limits)

    def outbox(self, transaction: Transaction) -> Stream:
        """The `__segments__` stream; created in this transaction if it is missing."""
        found = self._streams.find(self.outbox_name)
        if found is None:
            found = create_system_stream(self._streams, transaction, self.outbox_name, self._clock.now_ns())
            found.lifetime = segments_stream_lifetime(self._limits)
        return found

    def add_segment_events(self, transaction: Transaction, events: Sequence[bytes], now_ns: int) -> None:
        """Adds events to `__segments__`."""
        if events:
            transaction.add_entries(self._streams, self.outbox(transaction), events, now_ns)

    def register_created(self, transaction: Transaction, stream: Stream) -> None:
        if is_registered(stream.name):
            self._append_registry(transaction, registry_insert(stream), stream.created_ns)

    def register_updated(self, transaction: Transaction, stream: Stream, now_ns: int) -> None:
        if is_registered(stream.name):
            self._append_registry(transaction, registry_update(stream, now_ns), now_ns)

    def register_deleted(self, transaction: Transaction, stream: Stream, reason: str, now_ns: int) -> None:
        if is_registered(stream.name):
            self._append_registry(transaction, registry_delete(stream.name, reason, now_ns), now_ns)

    def _append_registry(self, transaction: Transaction, event: bytes, now_ns: int) -> None:
        found = self._streams.find(self.registry_name)
        assert found is not None, "the registry stream is created when the log opens"
        transaction.add_entries(self._streams, found, [event], now_ns)


def create_system_stream(streams: Streams, transaction: Transaction, name: str, now_ns: int) -> Stream:
    """Creates a JSON system stream as part of a transaction."""
    request, tombstone = CreateRequest(name, JSON_TYPE), streams.tombstone(name)
    create = decide_create(request, streams.next_number, tombstone, None, now_ns, streams.first_epoch)
    created = transaction.add(streams, create)
    assert created is not None
    return created
