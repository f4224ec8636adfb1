"""A stream as its manifest tells it, and as it is remembered until its objects are deleted."""

from __future__ import annotations

import msgspec

from tailrace.log.model import Lifetime, Stream
from tailrace.log.stored_streams import StoredStreams, decode_stream, encode_stream
from tailrace.storage.manifests.model import ForkParent, RecordedLifetime, StreamFacts
from tailrace.storage.segments.segments import make_stream_id


class DeletedStreamFacts(msgspec.Struct, array_like=True):
    """What a row of `graves` holds about a stream that was removed."""

    stream: bytes  # its last image
    at_ns: int
    reason: str


def encode_deleted(stream: Stream, at_ns: int, reason: str) -> bytes:
    return msgspec.msgpack.encode(DeletedStreamFacts(encode_stream(stream), at_ns, reason))


def decode_deleted(raw: bytes) -> tuple[Stream, int, str]:
    found = msgspec.msgpack.decode(raw, type=DeletedStreamFacts)
    return decode_stream(found.stream), found.at_ns, found.reason


def manifest_facts(stream: Stream, as_of: int, store: StoredStreams | None = None) -> StreamFacts:
    """The manifest's view of a stream that was read from the hot store after journal file `as_of`."""
    parent: ForkParent | None = None
    if stream.parent and store is not None:
        source = store.stream_by_number(stream.parent)
        assert source is not None, f"the source of fork {stream.name} is missing"
        parent = ForkParent(make_stream_id(source.name, source.incarnation), source.name)
    return StreamFacts(
        name=stream.name,
        stream_id=make_stream_id(stream.name, stream.incarnation),
        incarnation=stream.incarnation,
        epochs=stream.epochs,
        created_ns=stream.created_ns,
        tail=stream.tail,
        as_of=as_of,
        content_type=stream.content_type,
        lifetime=_recorded_lifetime(stream.lifetime),
        asked=_recorded_lifetime(stream.asked),
        touched_ns=stream.touched_saved_ns,
        parent=parent,
        fork_entry=stream.fork_entry,
        fork_sub=stream.fork_sub,
        forks=stream.forks,
        gone=stream.gone,
        gone_reason=stream.gone_reason,
        meta_keys=tuple(sorted(stream.documents or ())),
        closed=stream.closed,
        closed_by=stream.closed_by,
        seq=stream.seq,
        tail_ns=stream.last_ns,
        size_bytes=stream.size_bytes,
    )


def stored_manifest_facts(store: StoredStreams, number: int) -> StreamFacts | None:
    """The manifest's view of a stream, as the hot store has it now. None if it has none."""
    with store.snapshot():
        stream = store.stream_by_number(number)
        return None if stream is None else manifest_facts(stream, store.db.journal_seq, store)


def _recorded_lifetime(lifetime: Lifetime) -> RecordedLifetime:
    return RecordedLifetime(
        lifetime.ttl_s, lifetime.expires_ns, lifetime.retention_s, lifetime.retention_bytes
    )
