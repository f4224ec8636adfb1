"""Streams of other workers as sources of documents, which are on the first worker.

The first worker requests one page after the other from the owner, and long-polls at the tail.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec

from tailrace.cluster.fork_locations import ForkLocations
from tailrace.cluster.peers import Peers, decode_peer_error
from tailrace.http.exchange import Exchange
from tailrace.http.relay import PeerClient
from tailrace.log.log import Log
from tailrace.protocol import offsets
from tailrace.routing import responses
from tailrace.routing.deferred_responses import DeferredResponses
from tailrace.watch.sources.model import SourceError
from tailrace.watch.sources.stream import LocalOriginStream, OriginEntry, OriginStream, find_origin_stream

SOURCE_PATH: Final = "/_worker/source"
WAIT_S: Final = 4.0  # for new entries; less than the request timeout
HEAD: Final = b"Content-Type: application/msgpack\r\n" + responses.NO_STORE


class SourceRequest(msgspec.Struct, frozen=True):
    """Requests entries after one; with `entries_max` 0 it waits until there are more than `known`."""

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
    problem: str = ""  # why the stream cannot be read


class SourceServer:
    """Reads streams for the first worker; on every worker."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._later = DeferredResponses()

    def respond(self, exchange: Exchange) -> None:
        request = msgspec.msgpack.decode(exchange.body, type=SourceRequest)
        self._later.respond(exchange, self._respond(exchange, request))

    async def _respond(self, exchange: Exchange, request: SourceRequest) -> None:
        try:
            stream = find_origin_stream(self._log, request.stream)
        except SourceError as error:
            exchange.respond(200, HEAD, msgspec.msgpack.encode(SourceResponse(problem=str(error))))
            return
        origin = LocalOriginStream(self._log, stream)
        try:
            entries: list[OriginEntry] = []
            if request.entries_max:
                entries = await origin.page(request.after, request.bytes_max, request.entries_max)
            elif request.known >= origin.visible and not origin.gone:
                with suppress(TimeoutError):
                    async with asyncio.timeout(WAIT_S):
                        await origin.wait_for_entries()
        finally:
            origin.close()
        response = SourceResponse(
            origin.incarnation,
            origin.earliest,
            origin.visible,
            origin.gone,
            list(stream.epochs),
            [(seq, bytes(raw), time_ns) for seq, raw, time_ns in entries],
        )
        exchange.respond(200, HEAD, msgspec.msgpack.encode(response))


class RemoteOrigin:
    """A stream of another worker."""

    def __init__(self, peer: PeerClient, name: str) -> None:
        self._peer = peer
        self._name = name
        self._response = SourceResponse()

    @property
    def incarnation(self) -> str:
        return self._response.incarnation

    @property
    def earliest(self) -> int:
        return self._response.earliest

    @property
    def visible(self) -> int:
        return self._response.visible

    @property
    def gone(self) -> bool:
        return self._response.gone

    def offset(self, entry: int) -> str:
        """The offset of an entry, as the stream itself computes it."""
        epochs = self._response.epochs
        epoch = next((epoch for epoch, first in reversed(epochs) if entry >= first), epochs[0][0])
        return offsets.encode_offset(epoch, entry)

    async def page(self, after: int, bytes_max: int, entries_max: int) -> list[OriginEntry]:
        await self.request(SourceRequest(self._name, after, bytes_max, entries_max))
        return [OriginEntry(*row) for row in self._response.entries]

    async def wait_for_entries(self) -> None:
        await self.request(SourceRequest(self._name, known=self._response.visible))

    def close(self) -> None:
        """Nothing to release: there is no state between requests."""

    async def request(self, request: SourceRequest) -> None:
        status, body = await self._peer.ask("POST", SOURCE_PATH, msgspec.msgpack.encode(request))
        if status != 200:
            raise decode_peer_error(body)
        response = msgspec.msgpack.decode(body, type=SourceResponse)
        if response.problem:
            raise SourceError(response.problem)
        self._response = response


class RemoteOrigins:
    """Finds streams on all workers; on the first worker."""

    def __init__(self, log: Log, cluster: Peers, fork_locations: ForkLocations) -> None:
        self._log = log
        self._cluster = cluster
        self._fork_locations = fork_locations

    async def find(self, name: str) -> OriginStream:
        owner = await self._fork_locations.find(name)
        if owner == self._cluster.own:
            return LocalOriginStream(self._log, find_origin_stream(self._log, name))
        found = RemoteOrigin(self._cluster.peers[owner], name)
        await found.request(SourceRequest(name))
        return found
