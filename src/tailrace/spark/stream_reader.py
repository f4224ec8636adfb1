"""Streaming reads, `spark.readStream.format("tailrace")`: offsets, batch limits and the lag of a query.

How much of what is new goes into one micro-batch, without cutting an append in two.

Streaming reads: `spark.readStream.format("tailrace")`.

Spark keeps what this hands out: a flat map from stream to offset. A restarted query that had planned its very
first batch, but not finished it, is asked again where to begin, and by then `latest` is another place. So the
end of the first batch also carries where it began, under names that no stream can have.

How far a streaming query is behind the streams it reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tailrace.common.errors import TailraceError
from tailrace.protocol import offsets
from tailrace.spark.catalogue import Position, StreamCatalogue, StreamState
from tailrace.spark.columns import check_schema
from tailrace.spark.options import OptionError, OptionReader, ReadOptions, parse_connection
from tailrace.spark.partitions import (
    DataLossError,
    PartitionPlanner,
    PartitionReader,
    PositionResolver,
    StreamPartition,
    StreamRange,
    decode_positions,
    encode_positions,
)
from tailrace.spark.server_client import ServerClient
from tailrace.storage.segments.parquet import pa

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


SAMPLE_ENTRIES = 256  # whose average says what entries weigh that are in no segment


class StreamBacklog(NamedTuple):
    """What a stream has behind a position."""

    state: StreamState
    start: Position
    target: Position

    @property
    def entries(self) -> int:
        return max(0, self.target.entry - self.start.entry)


def share_rows(lags: list[StreamBacklog], rows_max: int) -> dict[str, int]:
    """So many entries in all, shared in proportion to the lags; never nothing while there is something."""
    total = sum(lag.entries for lag in lags)
    if total <= rows_max:
        return {lag.state.name: lag.entries for lag in lags}
    shares = {lag.state.name: rows_max * lag.entries // total for lag in lags}
    left = rows_max - sum(shares.values())
    # What rounding leaves goes to those who lost most by it.
    for lag in sorted(lags, key=lambda one: (-(rows_max * one.entries % total), one.state.name)):
        if left <= 0:
            break
        shares[lag.state.name] += 1
        left -= 1
    return shares


class BatchLimiter:
    """Ends of micro-batches."""

    def __init__(self, catalogue: StreamCatalogue) -> None:
        self._catalogue = catalogue

    def by_rows(self, lags: list[StreamBacklog], rows_max: int) -> dict[str, Position]:
        shares = share_rows(lags, rows_max)
        return {lag.state.name: self.end_of(lag, shares[lag.state.name]) for lag in lags}

    def by_bytes(self, lags: list[StreamBacklog], bytes_max: int) -> dict[str, Position]:
        """A soft bound: sizes are those of segments, or guessed from a few entries."""
        weights = {lag.state.name: self._entry_bytes(lag) for lag in lags if lag.entries}
        total = sum(lag.entries * weights[lag.state.name] for lag in lags if lag.entries)
        if total <= bytes_max:
            return {lag.state.name: lag.target for lag in lags}
        # In proportion, as with rows; each stream that has something moves on by one entry at least.
        return {
            lag.state.name: self.end_of(lag, max(1, int(lag.entries * bytes_max / total)))
            if lag.entries
            else lag.target
            for lag in lags
        }

    def end_of(self, lag: StreamBacklog, entries: int) -> Position:
        """The last place at which a batch of so many entries can end: between two appends if possible."""
        if entries >= lag.entries:
            return lag.target
        if entries <= 0:
            return lag.start
        last = lag.start.entry + entries
        # The entries on both sides of the cut tell: entries of one append have one time.
        before, after = self._entry(lag, last), self._entry(lag, last + 1)
        if before.time_ns != after.time_ns:
            return Position(before.epoch, last)
        first = self._first_at(lag, after.time_ns)
        if first.entry - 1 > lag.start.entry:
            return Position(self._entry(lag, first.entry - 1).epoch, first.entry - 1)
        return Position(before.epoch, last)  # one append is larger than the limit

    def _entry(self, lag: StreamBacklog, entry: int) -> _EntryPosition:
        offset = offsets.encode_offset(lag.state.tail.epoch, entry - 1)
        return _read_first_entry(
            self._catalogue.server.rows(lag.state.name, offset=offset, entries_max=1).body
        )

    def _first_at(self, lag: StreamBacklog, time_ns: int) -> _EntryPosition:
        """The first entry that was appended at that time."""
        return _read_first_entry(
            self._catalogue.server.rows(lag.state.name, since_ns=time_ns, entries_max=1).body
        )

    def _entry_bytes(self, lag: StreamBacklog) -> float:
        segments = self._catalogue.segments(lag.state.name, lag.start.entry, lag.target.entry)
        rows = sum(info.rows for _, info in segments)
        if rows:
            return max(1.0, sum(info.payload_bytes for _, info in segments) / rows)
        offset = offsets.encode_offset(lag.state.tail.epoch, lag.start.entry)
        page = self._catalogue.server.rows(lag.state.name, offset=offset, entries_max=SAMPLE_ENTRIES)
        rows_read = pa.ipc.open_stream(page.body).read_next_batch()
        return max(1.0, rows_read.column("payload").nbytes / max(1, rows_read.num_rows))


class _EntryPosition(NamedTuple):
    entry: int
    epoch: int
    time_ns: int


def _read_first_entry(body: bytes) -> _EntryPosition:
    rows = pa.ipc.open_stream(body).read_next_batch()
    micros: int = rows.column("append_time")[0].value
    below: int = rows.column("append_ns")[0].as_py()
    entry, epoch = rows.column("entry")[0].as_py(), rows.column("epoch")[0].as_py()
    return _EntryPosition(entry, epoch, micros * 1000 + below)


START_PREFIX = "/began/"  # stands before a name; no name begins with a slash
IDLE_MS_FIRST = 50
IDLE_MS_MAX = 4000
IDLE_MANY_MS_MAX = 1000

StreamOffsets = dict[str, str]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches on the driver. Travels to executors for `read`, without what planning needs."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._planning: _MicroBatchPlanner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_schema": self._schema, "_planning": None}

    @property
    def _plan(self) -> _MicroBatchPlanner:
        if self._planning is None:
            self._planning = _MicroBatchPlanner(self._options)
        return self._planning

    def initialOffset(self) -> StreamOffsets:  # noqa: N802 - Spark's name
        return self._plan.initial()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        if self._options.rows_per_trigger is not None:
            return ReadMaxRows(self._options.rows_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: StreamOffsets, limit: ReadLimit) -> StreamOffsets:  # noqa: N802 - Spark's name
        return self._plan.latest(start, limit)

    def reportLatestOffset(self) -> StreamOffsets | None:  # noqa: N802 - Spark's name
        return self._plan.tails()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._plan.freeze()

    def partitions(self, start: StreamOffsets, end: StreamOffsets) -> Sequence[InputPartition]:
        return self._plan.partitions(start, end, with_versions="headers" in self._schema.fieldNames())

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, StreamPartition)
        return PartitionReader(self._options, self._schema, partition).batches()


class _MicroBatchPlanner:
    """What the driver knows while a query runs."""

    def __init__(self, options: ReadOptions) -> None:
        from tailrace.spark.catalogue import StreamCatalogue

        self._options = options
        self._catalogue: StreamCatalogue = StreamCatalogue(options)
        self._starts = PositionResolver(self._catalogue, options)
        self._limiter: BatchLimiter = BatchLimiter(self._catalogue)
        self._planner = PartitionPlanner(
            self._catalogue,
            sealed_min=options.sealed_entries_min,
            partitions_min=options.partitions_min,
            keyed=options.key is not None,
            whole_streams=options.whole_streams,
        )
        self._initial: StreamOffsets | None = None
        self._frozen: dict[str, StreamState] | None = None
        self._states: dict[str, StreamState] = {}
        self._idle_ms = 0
        self._checked: dict[tuple[str, Position, int, int], Position] = {}

    # -- where things stand ----------------------------------------------------------------------------

    def initial(self) -> StreamOffsets:
        states = self._look()
        missing = [name for name in self._options.streams if name not in states]
        if missing:
            where = self._options.connection.endpoint
            raise OptionError(f"there is no stream {', '.join(missing)} at {where}")
        self._initial = encode_positions(
            {name: self._starts.starting(one, "latest") for name, one in states.items()}
        )
        return self._initial

    def freeze(self) -> None:
        self._frozen = self._catalogue.states()

    def tails(self) -> StreamOffsets:
        """Where the streams really end, for the progress report: as seen at the last look."""
        states = self._states or self._look()
        return encode_positions({name: state.tail for name, state in states.items()})

    def _look(self) -> dict[str, StreamState]:
        self._states = self._catalogue.states()
        return self._states

    # -- the next batch --------------------------------------------------------------------------------

    def latest(self, start: StreamOffsets, limit: ReadLimit) -> StreamOffsets:

        begun = decode_positions({name: text for name, text in start.items() if not name.startswith("/")})
        states = self._frozen if self._frozen is not None else self._look()
        lags = [
            StreamBacklog(state, self._begin(state, begun.get(name)), state.tail)
            for name, state in states.items()
        ]
        self._note_missing(begun, states)
        if not any(lag.entries for lag in lags):
            if self._frozen is None:
                self._wait(start)
            return start
        self._idle_ms = 0
        if isinstance(limit, ReadMaxRows):
            ends = self._limiter.by_rows(lags, limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            ends = self._limiter.by_bytes(lags, limit.max_bytes)
        else:
            ends = {lag.state.name: lag.target for lag in lags}
        found = encode_positions(ends)
        if start == self._initial:
            found |= {START_PREFIX + name: offset for name, offset in start.items()}
        return found

    def _note_missing(self, begun: dict[str, Position], states: dict[str, StreamState]) -> None:
        """A stream that was named and is gone: nobody can say what of it was not read."""
        gone = [name for name in self._options.streams if name in begun and name not in states]
        if gone and self._options.fail_on_data_loss and self._frozen is None:
            raise DataLossError(gone[0], "it was deleted")

    def _wait(self, start: StreamOffsets) -> None:
        """Nothing is new: ask more and more rarely, but hear of the first new entry at once."""
        self._idle_ms = min(IDLE_MS_MAX, max(IDLE_MS_FIRST, 2 * self._idle_ms))
        names = [name for name in start if not name.startswith("/")]
        if len(names) == 1 and not self._options.pattern and names[0] in self._states:
            # A long-poll comes back when there is something.
            tail = self._states[names[0]].tail
            self._catalogue.server.rows(names[0], offset=tail.offset, entries_max=1, wait_ms=self._idle_ms)
        else:
            time.sleep(min(self._idle_ms, IDLE_MANY_MS_MAX) / 1000)

    def _begin(self, state: StreamState, begun: Position | None) -> Position:
        """Where a batch of the stream begins: where the last one ended, if that is still there."""
        if begun is None:
            return state.earliest  # a stream that has come to a pattern
        if begun.epoch == state.tail.epoch and state.earliest.entry <= begun.entry <= state.tail.entry:
            return begun
        asked = (state.name, begun, state.tail.epoch, state.earliest.entry)
        if asked not in self._checked:
            self._checked.clear()
            self._checked[asked] = self._starts.checked(state, begun)
        return self._checked[asked]

    # -- partitions ------------------------------------------------------------------------------------

    def partitions(
        self, start: StreamOffsets, end: StreamOffsets, *, with_versions: bool
    ) -> list[StreamPartition]:
        began = {
            name.removeprefix(START_PREFIX): text
            for name, text in end.items()
            if name.startswith(START_PREFIX)
        }
        starts = decode_positions(
            began or {name: text for name, text in start.items() if not name.startswith("/")}
        )
        ends = decode_positions({name: text for name, text in end.items() if not name.startswith("/")})
        ranges: list[StreamRange] = []
        for name, target in ends.items():
            if starts.get(name) == target:
                continue
            state = self._states.get(name) or self._catalogue.state(name)
            if state is None:
                if self._options.fail_on_data_loss:
                    raise DataLossError(name, "it was deleted")
                continue
            after = self._begin(state, starts.get(name)).entry
            ranges.append(StreamRange(state, after, max(after, target.entry)))
        return self._planner.partitions(ranges, with_versions=with_versions)


class StreamLag(NamedTuple):
    """Entries that were not read yet, and how long the oldest of them has been there."""

    entries: int
    seconds: float


def lag(progress: Any, **options: str) -> dict[str, StreamLag]:
    """The lag of each stream, out of a `StreamingQueryProgress`.

    Options are those of the connection (`endpoint`, `token`, ...): how long the oldest entry has been waiting
    is asked of the server, for streams that are behind only.
    """
    behind: dict[str, tuple[str, int]] = {}
    for source in progress.sources:
        ends, tails = _decode_offsets(source.endOffset), _decode_offsets(source.latestOffset)
        for name, tail in tails.items():
            end = ends.get(name, offsets.START_OFFSET)
            behind[name] = end, max(0, offsets.parse_offset(tail)[1] - offsets.parse_offset(end)[1])
    server = ServerClient(parse_connection(OptionReader(options)))
    try:
        return {
            name: StreamLag(entries, _oldest_entry_age_s(server, name, end) if entries else 0.0)
            for name, (end, entries) in behind.items()
        }
    finally:
        server.close()


def _decode_offsets(text: str | None) -> dict[str, str]:
    """The offsets of one of our sources; nothing for a source of another kind."""
    try:
        found = msgspec.json.decode(text or "{}", type=dict[str, str])
        for name, offset in found.items():
            if not name.startswith("/"):
                offsets.parse_offset(offset)
    except (msgspec.MsgspecError, TailraceError):
        return {}
    return {name: offset for name, offset in found.items() if not name.startswith("/")}


def _oldest_entry_age_s(server: ServerClient, name: str, end: str) -> float:
    page = server.rows(name, offset=end, entries_max=1)
    rows = pa.ipc.open_stream(page.body).read_next_batch()
    if not rows.num_rows:
        return 0.0
    appended_us: int = rows.column("append_time")[0].value
    return max(0.0, time.time() - appended_us / 1e6)
