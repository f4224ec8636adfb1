"""Where the changes are: the collections of a server, their partitions, and ranges of them."""

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
    """One end of a range that cannot be understood."""


class MissingBeforeImageError(ValueError):
    """Changes that do not say what was there before: only the server that has the view can match them."""


class SummariesAnswer(msgspec.Struct, frozen=True):
    """What the server says to a job that needs its subscriptions."""

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
    """One end of a range: a word, an instant, or the number of the last entry before it, by partition."""

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
            f"{text!r} is no end of a range: write earliest, latest, an instant as in RFC 3339, "
            "or positions as in [118,0,97]"
        )


class WatchClient:
    """One server, as a driver sees it. `given` are options of `format("tailrace")`."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = dict(given)
        self._connection = parse_connection(OptionReader(given))
        # Said once more: executors may have another environment than this process.
        self.given["endpoint"] = self._connection.endpoint
        self.server: ServerClient = shared_client(self._connection)

    # -- asking ----------------------------------------------------------------------------------------

    def announce(self, database: str, seconds: int = LEASE_S) -> SummariesAnswer:
        """Has the gateway write down its subscriptions for so long; with 0, no longer."""
        body = self.post(f"/v1/databases/{database}/summaries", {"seconds": seconds})
        return msgspec.convert(body, SummariesAnswer)

    def note_statistics(self, database: str, collection: str, bloom: dict[str, int]) -> None:
        """Has the server report how good the collection's Bloom filter is."""
        self.post(f"/v1/databases/{database}/statistics", {"collection": collection, "bloom": bloom})

    def post(self, path: str, body: object) -> Any:
        request = wire.HttpRequest(
            method="POST",
            path=path,
            headers=(("Content-Type", b"application/json"),),
            body=msgspec.json.encode(body),
        )
        answer = self.server.send(request)
        wire.check_status(answer, 200)
        return msgspec.json.decode(answer.body)

    def store(self) -> str:
        return self.server.get("/v1/pipeline/plan?limit=1")["store"]

    def collection(self, database: str, name: str) -> CollectionInfo:
        found = self.server.get(f"/v1/databases/{quote(database)}/collections/{quote(name)}")
        return msgspec.convert(found, CollectionInfo)

    def collections(self, database: str, glob: str) -> list[str]:
        """The collections of a database that have changes, as far as a glob covers them."""
        prefix, pattern = f"{CHANGES_PREFIX}{database}/", NamePattern(glob)
        listed = self.server.list_streams(prefix, system=True)
        names = {row.name.removeprefix(prefix).rpartition("/")[0] for row in listed}
        return sorted(name for name in names if pattern.matches(name))

    def matchable(self, database: str, glob: str) -> list[str]:
        """As `collections`, those whose changes say both what was before and what came after."""
        names = self.collections(database, glob)
        return [name for name in names if self.collection(database, name).storeBefore]

    def check_matchable(self, database: str, name: str) -> None:
        if not self.collection(database, name).storeBefore:
            raise MissingBeforeImageError(
                f"changes of {name} do not say what was there before (storeBefore is false),"
                " so that nobody but the server can tell who left a result"
            )

    def view_page(self, database: str, collection: str, after: str) -> bytes:
        parameters = urlencode({"collection": collection, "after": after})
        answer = self.server.send(
            wire.HttpRequest(method="GET", path=f"/v1/databases/{quote(database)}/view?{parameters}")
        )
        wire.check_status(answer, 200)
        return answer.body

    def seal(self, stream: str) -> bool:
        """Whether everything of the stream is on the object store now."""
        path = f"/v1/server/_seal?{urlencode({'stream': stream})}"
        answer = self.server.send(wire.HttpRequest(method="POST", path=path))
        wire.check_status(answer, 200, 202)
        return answer.status == 200

    # -- ranges ----------------------------------------------------------------------------------------

    def ranges(self, database: str, name: str, start: RangeBound, end: RangeBound) -> list[ChangeRange]:
        """The range of each partition, without those that have nothing in it."""
        info = self.collection(database, name)
        for bound in (start, end):
            if bound.seqs is not None and len(bound.seqs) != info.partitions:
                raise RangeBoundError(f"{name} has {info.partitions} partitions, not {len(bound.seqs)}")
        options = ReadOptions(connection=self._connection)
        catalogue = StreamCatalogue(options, self.server)
        starts = PositionResolver(catalogue, options)
        found: list[ChangeRange] = []
        for partition in range(info.partitions):
            state = catalogue.state(change_stream_name(database, name, partition))
            if state is None:
                continue
            after = max(state.earliest.entry, _resolve_bound(starts, state, start, partition))
            upto = min(state.tail.entry, _resolve_bound(starts, state, end, partition))
            if after < upto:
                found.append(
                    ChangeRange(database, name, partition, info.generation, state.tail.epoch, after, upto)
                )
        return found

    def earliest(self, database: str, name: str, partitions: int) -> list[int]:
        """What the log does not have any more, by partition."""
        catalogue = StreamCatalogue(ReadOptions(connection=self._connection), self.server)
        states = [
            catalogue.state(change_stream_name(database, name, partition)) for partition in range(partitions)
        ]
        return [0 if state is None else state.earliest.entry for state in states]

    def frame(self, spark: Any, ranges: Sequence[ChangeRange]) -> Any:
        """The entries of ranges, each partition in one task and in order."""
        begin = {one.stream: Position(one.epoch, one.after).offset for one in ranges}
        end = {one.stream: Position(one.epoch, one.upto).offset for one in ranges}
        return (
            spark.read.format("tailrace")
            .schema(CHANGE_COLUMNS)
            .options(**self.given)
            .option("stream", ",".join(begin))
            .option("startingOffsets", msgspec.json.encode(begin).decode())
            .option("endingOffsets", msgspec.json.encode(end).decode())
            .option("wholeStreams", "true")
            .load()
        )


def _resolve_bound(starts: PositionResolver, state: StreamState, bound: RangeBound, partition: int) -> int:
    if bound.seqs is not None:
        return bound.seqs[partition]
    if bound.instant_ns is not None:
        return starts.at_time(state, bound.instant_ns).entry
    return state.earliest.entry if bound.word == "earliest" else state.tail.entry
