"""Delivery of system stream events of all workers to the first worker, which has the system streams.

Every other worker writes its events to a stream of its own (`__registry__/1`), in the same record as the
change they report, and delivers them from there. The first worker stores the number of the last delivered
entry in the same record as the entries, so repeats after a crash are recognised: each event arrives exactly
once, in its worker's order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet
from tailrace.http.exchange import Exchange
from tailrace.http.relay import PeerClient
from tailrace.log import listing, system_streams
from tailrace.log.log import Log, append_to_streams
from tailrace.log.model import Stream
from tailrace.log.system_streams import METRICS_STREAM
from tailrace.log.transaction import Transaction

logger = logging.getLogger("tailrace.workers")

DELIVER_PATH: Final = "/_worker/deliver"
DELIVERED_FACT: Final = "delivered/"
FORWARDED_STREAMS: Final = (
    system_streams.REGISTRY_STREAM,
    system_streams.SEGMENTS_STREAM,
)  # must be delivered without gaps
SYSTEM_STREAMS: Final = (*FORWARDED_STREAMS, METRICS_STREAM)
PAGE_ENTRIES: Final = 500
PAGE_BYTES: Final = 1024 * 1024
RETRY_S: Final = 0.5
STOP_S_MAX: Final = 5.0
JSON: Final = b"Content-Type: application/json\r\n"


class EventDelivery(msgspec.Struct, frozen=True):
    """Entries of one worker's stream, in order; without entries it requests the last delivered number."""

    worker: int
    stream: str
    first: int  # number of the first entry
    entries: list[msgspec.Raw]
    lost: bool = False  # earlier entries were trimmed by retention before they were delivered


class DeliveryAck(msgspec.Struct, frozen=True):
    last: int  # number of the last delivered entry


class EventSender:
    """Delivers the events of this worker; on every worker but the first."""

    def __init__(self, log: Log, index: int, first: PeerClient) -> None:
        self._log = log
        self._index = index
        self._peer = first
        self._new_events = asyncio.Event()
        self._arrived = {name: asyncio.Event() for name in SYSTEM_STREAMS}  # all events are delivered
        self._tasks = TaskSet()

    def start(self) -> None:
        self._log.publisher.on_system_append.append(self._on_new_events)
        for name in SYSTEM_STREAMS:
            self._tasks.start(self._run(name))

    async def stop(self) -> None:
        """Deliver the remaining events, if possible; else they are delivered after a restart."""
        try:
            async with asyncio.timeout(STOP_S_MAX):
                for name in SYSTEM_STREAMS:
                    await self._arrived[name].wait()
        except TimeoutError:
            logger.warning("cannot deliver all events to the first worker, retrying after a restart")
        await self._tasks.close()

    def _on_new_events(self, stream: Stream) -> None:
        for arrived in self._arrived.values():
            arrived.clear()
        new_events, self._new_events = self._new_events, asyncio.Event()
        new_events.set()

    async def _run(self, name: str) -> None:
        position = -1
        while True:
            new_events = self._new_events
            try:
                position = await self._deliver(name, position)
            except TailraceError as error:
                logger.debug(
                    "cannot deliver events, retrying", extra=log_fields(stream=name, error=str(error))
                )
                await asyncio.sleep(RETRY_S)
                position = -1
                continue
            stream = self._log.find(name + self._log.own_suffix)
            if stream is None or stream.visible <= position:
                if new_events is self._new_events:
                    self._arrived[name].set()
                await new_events.wait()

    async def _deliver(self, name: str, position: int) -> int:
        """Deliver one page; returns the number of the last delivered entry."""
        stream = self._log.find(name + self._log.own_suffix)
        if stream is None:
            return position
        if position < 0:
            position = await self._send(EventDelivery(self._index, name, 0, []))
        if stream.visible <= position:
            return position
        after = max(position, stream.earliest)
        page = await self._log.reader.read(stream, after, PAGE_BYTES, PAGE_ENTRIES, apart=True)
        entries = [msgspec.Raw(bytes(part)) for part in page.parts]
        return await self._send(EventDelivery(self._index, name, after + 1, entries, lost=after > position))

    async def _send(self, delivery: EventDelivery) -> int:
        status, body = await self._peer.ask("POST", DELIVER_PATH, msgspec.json.encode(delivery))
        if status != 200:
            raise TailraceError("unavailable", f"the first worker responded with {status}")
        return msgspec.json.decode(body, type=DeliveryAck).last


class EventReceiver:
    """Receives the events of the other workers; on the first worker."""

    def __init__(self, log: Log, prepare: Callable[[str], None]) -> None:
        self._log = log
        self._prepare = prepare  # creates a stream that needs a schema or profile

    def receive(self, exchange: Exchange) -> None:
        delivery = msgspec.json.decode(exchange.body, type=EventDelivery)
        assert delivery.stream in SYSTEM_STREAMS
        if (
            delivery.stream == system_streams.REGISTRY_STREAM
            and listing.REGISTRY_SNAPSHOT_DUE in self._log.streams.meta
        ):
            raise TailraceError("unavailable", "the registry is being rewritten; retry later")
        key = f"{DELIVERED_FACT}{delivery.worker}/{delivery.stream}"
        last = int(self._log.streams.meta.get(key, b"0"))
        fits = delivery.first == last + 1 or (delivery.lost and delivery.first > last)
        if not delivery.entries or not fits:
            exchange.respond(200, JSON, msgspec.json.encode(DeliveryAck(last)))
            return
        self._prepare(delivery.stream)
        now = delivery.first + len(delivery.entries) - 1

        def reply(_: Transaction, error: TailraceError | None) -> None:
            if error is None:
                exchange.respond(200, JSON, msgspec.json.encode(DeliveryAck(now)))
            else:
                exchange.respond(503)

        entries = [bytes(entry) for entry in delivery.entries]
        facts = [(key, b"%d" % now)]
        append_to_streams(
            self._log, [(delivery.stream, entries)], self._log.clock.now_ns(), reply, None, facts
        )
