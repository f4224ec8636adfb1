"""Streaming reads, `spark.readStream.format("tailrace")`: offsets, batch limits and the lag of a query.

The offsets of a query, which Spark checkpoints, are a flat map from stream to offset. If a query restarts
after it planned its first batch but before it finished it, Spark requests the initial offsets again, and
`latest` has moved by then. So the end offsets of the first batch also contain its start offsets, under
`/began/<stream>`, which is not a valid stream name.
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


SAMPLE_ENTRIES = 256  # read to estimate the size of entries that are in no segment


class StreamBacklog(NamedTuple):
    """The entries of a stream after a position."""

    state: StreamState
    start: Position
    target: Position

    @property
    def entries(self) -> int:
        return max(0, self.target.entry - self.start.entry)


def share_rows(lags: list[StreamBacklog], rows_max: int) -> dict[str, int]:
    """Distribute `rows_max` entries over the streams in proportion to their backlogs."""
    total = sum(lag.entries for lag in lags)
    if total <= rows_max:
        return {lag.state.name: lag.entries for lag in lags}
    shares = {lag.state.name: rows_max * lag.entries // total for lag in lags}
    left = rows_max - sum(shares.values())
    # The remainder goes to the streams with the largest rounding loss.
    for lag in sorted(lags, key=lambda one: (-(rows_max * one.entries % total), one.state.name)):
        if left <= 0:
            break
        shares[lag.state.name] += 1
        left -= 1
    return shares


class BatchLimiter:
    """Computes the end positions of a micro-batch without splitting an append."""

    def __init__(self, catalogue: StreamCatalogue) -> None:
        self._catalogue = catalogue

    def by_rows(self, lags: list[StreamBacklog], rows_max: int) -> dict[str, Position]:
        shares = share_rows(lags, rows_max)
        return {lag.state.name: self.end_position(lag, shares[lag.state.name]) for lag in lags}

    def by_bytes(self, lags: list[StreamBacklog], bytes_max: int) -> dict[str, Position]:
        """A soft limit: sizes are averages of segments, or estimated from a sample of entries."""
        weights = {lag.state.name: self._entry_bytes(lag) for lag in lags if lag.entries}
        total = sum(lag.entries * weights[lag.state.name] for lag in lags if lag.entries)
        if total <= bytes_max:
            return {lag.state.name: lag.target for lag in lags}
        # In proportion, as with rows; every stream with a backlog advances by at least one entry.
        return {
            lag.state.name: self.end_position(lag, max(1, int(lag.entries * bytes_max / total)))
            if lag.entries
            else lag.target
            for lag in lags
        }

    def end_position(self, lag: StreamBacklog, entries: int) -> Position:
        """The last position, between two appends if possible, for a batch of at most so many entries."""
        if entries >= lag.entries:
            return lag.target
        if entries <= 0:
            return lag.start
        last = lag.start.entry + entries
        # All entries of an append have the same time: compare the entries on both sides of the cut.
        before, after = self._entry(lag, last), self._entry(lag, last + 1)
        if before.time_ns != after.time_ns:
            return Position(before.epoch, last)
        first = self._first_at(lag, after.time_ns)
        if first.entry - 1 > lag.start.entry:
            return Position(self._entry(lag, first.entry - 1).epoch, first.entry - 1)
        return Position(before.epoch, last)  # a single append exceeds the limit

    def _entry(self, lag: StreamBacklog, entry: int) -> _EntryPosition:
        offset = offsets.encode_offset(lag.state.tail.epoch, entry - 1)
        return _read_first_entry(
            self._catalogue.server.rows(lag.state.name, offset=offset, entries_max=1).body
        )

    def _first_at(self, lag: StreamBacklog, time_ns: int) -> _EntryPosition:
        """The first entry appended at that time."""
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


START_PREFIX = "/began/"  # before a stream name; no stream name starts with a slash
IDLE_MS_FIRST = 50
IDLE_MS_MAX = 4000
IDLE_MANY_MS_MAX = 1000

StreamOffsets = dict[str, str]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches on the driver. Pickled to executors for `read`, without the planner."""

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

    def latestOffset(self, start: StreamOffsets, limit: ReadLimit) -> StreamOffsets:  # noqa: N802
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
    """The driver's state while a query runs."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._catalogue = StreamCatalogue(options)
        self._positions = PositionResolver(self._catalogue, options)
        self._limiter = BatchLimiter(self._catalogue)
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

    # -- stream states ---------------------------------------------------------------------------------

    def initial(self) -> StreamOffsets:
        states = self._refresh_states()
        missing = [name for name in self._options.streams if name not in states]
        if missing:
            where = self._options.connection.endpoint
            raise OptionError(f"stream not found: {', '.join(missing)} at {where}")
        self._initial = encode_positions(
            {name: self._positions.resolve_start(one, "latest") for name, one in states.items()}
        )
        return self._initial

    def freeze(self) -> None:
        self._frozen = self._catalogue.list_states()

    def tails(self) -> StreamOffsets:
        """The tails at the last refresh, for the progress report."""
        states = self._states or self._refresh_states()
        return encode_positions({name: state.tail for name, state in states.items()})

    def _refresh_states(self) -> dict[str, StreamState]:
        self._states = self._catalogue.list_states()
        return self._states

    # -- the next batch --------------------------------------------------------------------------------

    def latest(self, start: StreamOffsets, limit: ReadLimit) -> StreamOffsets:
        read_through = decode_positions(
            {name: text for name, text in start.items() if not name.startswith("/")}
        )
        states = self._frozen if self._frozen is not None else self._refresh_states()
        lags = [
            StreamBacklog(state, self._batch_start(state, read_through.get(name)), state.tail)
            for name, state in states.items()
        ]
        self._check_missing(read_through, states)
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

    def _check_missing(self, read_through: dict[str, Position], states: dict[str, StreamState]) -> None:
        """A deleted stream is a data loss: it may have had entries that were not read."""
        deleted = [name for name in self._options.streams if name in read_through and name not in states]
        if deleted and self._options.fail_on_data_loss and self._frozen is None:
            raise DataLossError(deleted[0], "stream was deleted")

    def _wait(self, start: StreamOffsets) -> None:
        """Back off while there are no new entries; a single stream is waited for by a long-poll."""
        self._idle_ms = min(IDLE_MS_MAX, max(IDLE_MS_FIRST, 2 * self._idle_ms))
        names = [name for name in start if not name.startswith("/")]
        if len(names) == 1 and not self._options.pattern and names[0] in self._states:
            tail = self._states[names[0]].tail
            self._catalogue.server.rows(names[0], offset=tail.offset, entries_max=1, wait_ms=self._idle_ms)
        else:
            time.sleep(min(self._idle_ms, IDLE_MANY_MS_MAX) / 1000)

    def _batch_start(self, state: StreamState, start: Position | None) -> Position:
        """The start of a batch: the end of the previous one if its entries are still retained."""
        if start is None:
            return state.earliest  # a new stream that matches the pattern
        if start.epoch == state.tail.epoch and state.earliest.entry <= start.entry <= state.tail.entry:
            return start
        key = (state.name, start, state.tail.epoch, state.earliest.entry)
        if key not in self._checked:
            self._checked.clear()
            self._checked[key] = self._positions.check_retained(state, start)
        return self._checked[key]

    # -- partitions ------------------------------------------------------------------------------------

    def partitions(
        self, start: StreamOffsets, end: StreamOffsets, *, with_versions: bool
    ) -> list[StreamPartition]:
        first_starts = {
            name.removeprefix(START_PREFIX): text
            for name, text in end.items()
            if name.startswith(START_PREFIX)
        }
        starts = decode_positions(
            first_starts or {name: text for name, text in start.items() if not name.startswith("/")}
        )
        ends = decode_positions({name: text for name, text in end.items() if not name.startswith("/")})
        ranges: list[StreamRange] = []
        for name, target in ends.items():
            if starts.get(name) == target:
                continue
            state = self._states.get(name) or self._catalogue.state(name)
            if state is None:
                if self._options.fail_on_data_loss:
                    raise DataLossError(name, "stream was deleted")
                continue
            after = self._batch_start(state, starts.get(name)).entry
            ranges.append(StreamRange(state, after, max(after, target.entry)))
        return self._planner.partitions(ranges, with_versions=with_versions)


class StreamLag(NamedTuple):
    """The number of entries not read yet, and the age of the oldest one."""

    entries: int
    seconds: float


def lag(progress: Any, **options: str) -> dict[str, StreamLag]:
    """The lag of each stream in a `StreamingQueryProgress`.

    Options are those of the connection (`endpoint`, `token`, ...). The age of the oldest entry is requested
    from the server, only for streams with a lag.
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
    """The offsets of a Tailrace source; empty for any other source."""
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
