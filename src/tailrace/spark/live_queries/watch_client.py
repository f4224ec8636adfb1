"""The server's watch API as used by jobs: collections, their partitions, and ranges of their changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import msgspec

from tailrace.client import wire
from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.protocol.stream_names import NamePattern
from tailrace.spark.catalogue import Position, StreamCatalogue, StreamState
from tailrace.spark.options import OptionReader, ReadOptions, parse_connection
from tailrace.spark.partitions import PositionResolver
from tailrace.spark.server_client import ServerClient, shared_client
from tailrace.watch.names import CHANGES_PREFIX, change_stream_name

LEASE_S: Final = 3600
CHANGE_COLUMNS: Final = "stream string, offset string, entry bigint, timestamp_ns bigint, value binary"


class RangeBoundError(ValueError):
    """An invalid bound of a range."""


class MissingBeforeImageError(ValueError):
    """Changes without their before image: only the server, which has the view, can match them."""


class SummariesResponse(msgspec.Struct, frozen=True):
    """Where the gateway writes its subscriptions, and where a job writes deliveries."""

    gateway: str
    stream: str
    deliveries: str
    offset: str
    subscriptions: int
    token: str | None = None


class CollectionInfo(msgspec.Struct, frozen=True):
    collection: str
    database: str
    partitions: int
    generation: int
    positions: list[int]
    source: str = "native"
    storeBefore: bool = True  # noqa: N815 - the name on the wire


class ChangeRange(msgspec.Struct, frozen=True):
    """Entries `after + 1` to `upto` of one partition."""

    database: str
    collection: str
    partition: int
    generation: int
    epoch: int
    after: int
    upto: int

    @property
    def stream(self) -> str:
        return change_stream_name(self.database, self.collection, self.partition)


class RangeBound(NamedTuple):
    """One bound of a range: a word, a time, or by partition the number of the last entry before it."""

    word: str = ""
    instant_ns: int | None = None
    seqs: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> RangeBound:
        text = text.strip()
        if text in ("earliest", "latest"):
            return cls(text)
        if text.startswith("["):
            try:
                return cls(seqs=tuple(msgspec.json.decode(text, type=list[int])))
            except msgspec.MsgspecError:
                pass
        elif (instant_ns := parse_rfc3339_ns(text)) is not None:
            return cls(instant_ns=instant_ns)
        raise RangeBoundError(
            f"range bound must be earliest, latest, an RFC 3339 timestamp or positions such as [118,0,97], "
            f"got {text!r}"
        )


class WatchClient:
    """One server, as used on the driver. `options` are those of `format("tailrace")`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = dict(options)
        self._connection = parse_connection(OptionReader(options))
        # Explicit, because the environment of executors may differ from that of this process.
        self.options["endpoint"] = self._connection.endpoint
        self.server: ServerClient = shared_client(self._connection)

    # -- requests --------------------------------------------------------------------------------------

    def request_summaries(self, database: str, seconds: int = LEASE_S) -> SummariesResponse:
        """Request the gateway to write its subscriptions to a stream for so long; 0 ends it."""
        body = self.post(f"/v1/databases/{database}/summaries", {"seconds": seconds})
        return msgspec.convert(body, SummariesResponse)

    def report_statistics(self, database: str, collection: str, bloom: dict[str, int]) -> None:
        """Send the quality of the collection's Bloom filter to the server, for its metrics."""
        self.post(f"/v1/databases/{database}/statistics", {"collection": collection, "bloom": bloom})

    def post(self, path: str, body: object) -> Any:
        request = wire.HttpRequest(
            method="POST",
            path=path,
            headers=(("Content-Type", b"application/json"),),
            body=msgspec.json.encode(body),
        )
        response = self.server.send(request)
        wire.check_status(response, 200)
        return msgspec.json.decode(response.body)

    def store(self) -> str:
        return self.server.get("/v1/pipeline/plan?limit=1")["store"]

    def collection(self, database: str, name: str) -> CollectionInfo:
        found = self.server.get(f"/v1/databases/{quote(database)}/collections/{quote(name)}")
        return msgspec.convert(found, CollectionInfo)

    def collections(self, database: str, glob: str) -> list[str]:
        """The collections of a database that have changes and match the glob."""
        prefix, pattern = f"{CHANGES_PREFIX}{database}/", NamePattern(glob)
        listed = self.server.list_streams(prefix, system=True)
        names = {row.name.removeprefix(prefix).rpartition("/")[0] for row in listed}
        return sorted(name for name in names if pattern.matches(name))

    def matchable_collections(self, database: str, glob: str) -> list[str]:
        """As `collections`, only those whose changes have before images."""
        names = self.collections(database, glob)
        return [name for name in names if self.collection(database, name).storeBefore]

    def check_matchable(self, database: str, name: str) -> None:
        if not self.collection(database, name).storeBefore:
            raise MissingBeforeImageError(
                f"changes of {name} have no before images (storeBefore is false), so only the server can "
                "match them"
            )

    def view_page(self, database: str, collection: str, after: str) -> bytes:
        parameters = urlencode({"collection": collection, "after": after})
        response = self.server.send(
            wire.HttpRequest(method="GET", path=f"/v1/databases/{quote(database)}/view?{parameters}")
        )
        wire.check_status(response, 200)
        return response.body

    def seal(self, stream: str) -> bool:
        """Seal the stream. Returns whether all its entries are in the object store."""
        path = f"/v1/server/_seal?{urlencode({'stream': stream})}"
        response = self.server.send(wire.HttpRequest(method="POST", path=path))
        wire.check_status(response, 200, 202)
        return response.status == 200

    # -- ranges ----------------------------------------------------------------------------------------

    def ranges(self, database: str, name: str, start: RangeBound, end: RangeBound) -> list[ChangeRange]:
        """The ranges of all partitions; empty ones are left out."""
        info = self.collection(database, name)
        for bound in (start, end):
            if bound.seqs is not None and len(bound.seqs) != info.partitions:
                raise RangeBoundError(
                    f"{name} has {info.partitions} partitions, got {len(bound.seqs)} positions"
                )
        options = ReadOptions(connection=self._connection)
        catalogue = StreamCatalogue(options, self.server)
        positions = PositionResolver(catalogue, options)
        found: list[ChangeRange] = []
        for partition in range(info.partitions):
            state = catalogue.state(change_stream_name(database, name, partition))
            if state is None:
                continue
            after = max(state.earliest.entry, _resolve_bound(positions, state, start, partition))
            through = min(state.tail.entry, _resolve_bound(positions, state, end, partition))
            if after < through:
                found.append(
                    ChangeRange(database, name, partition, info.generation, state.tail.epoch, after, through)
                )
        return found

    def earliest(self, database: str, name: str, partitions: int) -> list[int]:
        """The last trimmed entry of each partition; 0 if none."""
        catalogue = StreamCatalogue(ReadOptions(connection=self._connection), self.server)
        states = [
            catalogue.state(change_stream_name(database, name, partition)) for partition in range(partitions)
        ]
        return [0 if state is None else state.earliest.entry for state in states]

    def frame(self, spark: Any, ranges: Sequence[ChangeRange]) -> Any:
        """The entries of the ranges; each partition is read by one task, in order."""
        begin = {one.stream: Position(one.epoch, one.after).offset for one in ranges}
        end = {one.stream: Position(one.epoch, one.upto).offset for one in ranges}
        return (
            spark.read.format("tailrace")
            .schema(CHANGE_COLUMNS)
            .options(**self.options)
            .option("stream", ",".join(begin))
            .option("startingOffsets", msgspec.json.encode(begin).decode())
            .option("endingOffsets", msgspec.json.encode(end).decode())
            .option("wholeStreams", "true")
            .load()
        )


def _resolve_bound(positions: PositionResolver, state: StreamState, bound: RangeBound, partition: int) -> int:
    if bound.seqs is not None:
        return bound.seqs[partition]
    if bound.instant_ns is not None:
        return positions.resolve_time(state, bound.instant_ns).entry
    return state.earliest.entry if bound.word == "earliest" else state.tail.entry
