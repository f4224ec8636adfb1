"""Streams of other workers as sources of documents, which the first worker keeps.

The first worker asks the owner for one page after the other, and waits there when it has read all.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec

from tailrace.cluster.fork_locations import ForkLocations
from tailrace.cluster.peers import DeferredResponses, Peers, decode_peer_error
from tailrace.http.exchange import Exchange
from tailrace.http.relay import PeerClient
from tailrace.log.log import Log
from tailrace.protocol import offsets
from tailrace.routing import responses
from tailrace.watch.sources.model import SourceError
from tailrace.watch.sources.stream import LocalOriginStream, OriginEntry, OriginStream, find_origin_stream

SOURCE_PATH: Final = "/_worker/source"
WAIT_S: Final = 4.0  # for news; less than anybody waits for an answer
HEAD: Final = b"Content-Type: application/msgpack\r\n" + responses.NO_STORE


class SourceRequest(msgspec.Struct, frozen=True):
    """For entries behind one, or, with none wanted, for the stream to have more than are known."""

    stream: str
    after: int = 0
    bytes_max: int = 0
    entries_max: int = 0
    known: int = -1


class SourceResponse(msgspec.Struct, frozen=True):
    incarnation: str = ""
    earliest: int = 0
    visible: int = 0
    gone: bool = False
    epochs: list[tuple[int, int]] = []
    entries: list[tuple[int, bytes, int]] = []
    problem: str = ""  # why nothing can be read


class SourceServer:
    """On every worker: reads its own streams for the first one."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._later = DeferredResponses()

    def answer(self, exchange: Exchange) -> None:
        asked = msgspec.msgpack.decode(exchange.body, type=SourceRequest)
        self._later.spawn(exchange, self._answer(exchange, asked))

    async def _answer(self, exchange: Exchange, asked: SourceRequest) -> None:
        try:
            stream = find_origin_stream(self._log, asked.stream)
        except SourceError as error:
            exchange.respond(200, HEAD, msgspec.msgpack.encode(SourceResponse(problem=str(error))))
            return
        origin = LocalOriginStream(self._log, stream)
        try:
            entries: list[OriginEntry] = []
            if asked.entries_max:
                entries = await origin.page(asked.after, asked.bytes_max, asked.entries_max)
            elif asked.known >= origin.visible and not origin.gone:
                with suppress(TimeoutError):
                    async with asyncio.timeout(WAIT_S):
                        await origin.wait_for_entries()
        finally:
            origin.close()
        told = SourceResponse(
            origin.incarnation,
            origin.earliest,
            origin.visible,
            origin.gone,
            list(stream.epochs),
            [(seq, bytes(raw), time_ns) for seq, raw, time_ns in entries],
        )
        exchange.respond(200, HEAD, msgspec.msgpack.encode(told))


class RemoteOrigin:
    """A stream of another worker."""

    def __init__(self, peer: PeerClient, name: str) -> None:
        self._peer = peer
        self._name = name
        self._told = SourceResponse()

    @property
    def incarnation(self) -> str:
        return self._told.incarnation

    @property
    def earliest(self) -> int:
        return self._told.earliest

    @property
    def visible(self) -> int:
        return self._told.visible

    @property
    def gone(self) -> bool:
        return self._told.gone

    def offset(self, entry: int) -> str:
        """As of the stream itself."""
        epochs = self._told.epochs
        epoch = next((epoch for epoch, first in reversed(epochs) if entry >= first), epochs[0][0])
        return offsets.encode_offset(epoch, entry)

    async def page(self, after: int, bytes_max: int, entries_max: int) -> list[OriginEntry]:
        await self.ask(SourceRequest(self._name, after, bytes_max, entries_max))
        return [OriginEntry(*row) for row in self._told.entries]

    async def wait_for_entries(self) -> None:
        await self.ask(SourceRequest(self._name, known=self._told.visible))

    def close(self) -> None:
        """Nothing is held between two questions."""

    async def ask(self, question: SourceRequest) -> None:
        status, body = await self._peer.ask("POST", SOURCE_PATH, msgspec.msgpack.encode(question))
        if status != 200:
            raise decode_peer_error(body)
        told = msgspec.msgpack.decode(body, type=SourceResponse)
        if told.problem:
            raise SourceError(told.problem)
        self._told = told


class RemoteOrigins:
    """On the first worker: finds streams that it does not have."""

    def __init__(self, log: Log, circle: Peers, homes: ForkLocations) -> None:
        self._log = log
        self._circle = circle
        self._homes = homes

    async def find(self, name: str) -> OriginStream:
        owner = await self._homes.find(name)
        if owner == self._circle.own:
            return LocalOriginStream(self._log, find_origin_stream(self._log, name))
        found = RemoteOrigin(self._circle.peers[owner], name)
        await found.ask(SourceRequest(name))
        return found
