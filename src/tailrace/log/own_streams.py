"""What the log tells of itself: `__registry__` and `__segments__`, written in the records they speak of."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.common.clock import Clock
from tailrace.common.limits import Limits
from tailrace.log import outbox, registry
from tailrace.log.decide import CreateRequest, decide_create
from tailrace.log.model import Stream
from tailrace.log.streams import Streams
from tailrace.log.transaction import Transaction

JSON_TYPE = "application/json"


class SystemStreams:
    """Adds to a change the events it calls for. Being in one record, they happen with it or not at all."""

    def __init__(self, streams: Streams, limits: Limits, clock: Clock, suffix: str) -> None:
        self._streams = streams
        self._limits = limits
        self._clock = clock
        self.registry_name = registry.REGISTRY_STREAM + suffix
        self.outbox_name = outbox.SEGMENTS_STREAM + suffix

    def open(self, transaction: Transaction) -> None:
        """Makes the registry if it is missing. Bounds are settings, so they are those of this start."""
        found = self._streams.find(self.registry_name)
        if found is None:
            found = create_system_stream(self._streams, transaction, self.registry_name, self._clock.now_ns())
        found.lifetime = registry.registry_lifetime(self._limits)
        if (events := self._streams.find(self.outbox_name)) is not None:
            events.lifetime = outbox.segments_stream_lifetime(self._limits)

    def outbox(self, transaction: Transaction) -> Stream:
        """`__segments__`; made in this very record if it has to be."""
        found = self._streams.find(self.outbox_name)
        if found is None:
            found = create_system_stream(self._streams, transaction, self.outbox_name, self._clock.now_ns())
            found.lifetime = outbox.segments_stream_lifetime(self._limits)
        return found

    def tell(self, transaction: Transaction, events: Sequence[bytes], now_ns: int) -> None:
        """What happens on the object store."""
        if events:
            transaction.add_entries(self._streams, self.outbox(transaction), events, now_ns)

    def tell_created(self, transaction: Transaction, stream: Stream) -> None:
        if registry.is_registered(stream.name):
            self._register(transaction, registry.registry_insert(stream), stream.created_ns)

    def tell_updated(self, transaction: Transaction, stream: Stream, now_ns: int) -> None:
        if registry.is_registered(stream.name):
            self._register(transaction, registry.registry_update(stream, now_ns), now_ns)

    def tell_deleted(self, transaction: Transaction, stream: Stream, reason: str, now_ns: int) -> None:
        if registry.is_registered(stream.name):
            self._register(transaction, registry.registry_delete(stream.name, reason, now_ns), now_ns)

    def _register(self, transaction: Transaction, event: bytes, now_ns: int) -> None:
        found = self._streams.find(self.registry_name)
        assert found is not None, "the registry stream is made when the log opens"
        transaction.add_entries(self._streams, found, [event], now_ns)


def create_system_stream(streams: Streams, transaction: Transaction, name: str, now_ns: int) -> Stream:
    """A JSON stream of the server itself, made as part of a larger change."""
    request, tombstone = CreateRequest(name, JSON_TYPE), streams.tombstone(name)
    create = decide_create(request, streams.next_number, tombstone, None, now_ns, streams.first_epoch)
    created = transaction.add(streams, create)
    assert created is not None
    return created
