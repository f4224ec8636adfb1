"""The table of streams: what a name leads to while streams come, go and are put away."""

from __future__ import annotations

from support.journals import create
from tailrace.log.model import NO_LIFETIME, Stream
from tailrace.log.records import Create, Delete, Op
from tailrace.log.streams import Streams


def apply(streams: Streams, op: Op) -> Stream:
    stream = streams.assign(op)
    assert stream is not None
    streams.publish(op, stream)
    return stream


def created_again(name: str) -> Create:
    return Create(2, name, 1, ((1, 1),), 2, "text/plain", NO_LIFETIME, NO_LIFETIME)


def test_putting_a_stream_away_leaves_its_successor_of_the_same_name() -> None:
    streams = Streams(None)
    old = apply(streams, create(1, "a"))
    apply(streams, Delete(1, 2, "deleted", soft=False))
    new = apply(streams, created_again("a"))
    assert new is not old
    # Whoever held the old one a moment longer puts it away now.
    streams.forget(old)
    assert streams.find("a") is new
    assert streams.get(2) is new
    assert streams.get(1) is None
    streams.forget(new)
    assert streams.by_name == {}
    assert streams.by_number == {}


def test_a_name_is_free_from_the_moment_its_deletion_is_decided() -> None:
    streams = Streams(None)
    old = apply(streams, create(1, "a"))
    removal = Delete(1, 2, "deleted", soft=False)
    assert streams.assign(removal) is old
    new = apply(streams, created_again("a"))
    # The deletion becomes durable after its successor was decided.
    streams.publish(removal, old)
    assert streams.find("a") is new
    assert not new.removed
