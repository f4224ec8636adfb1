"""How much of what is new goes into one micro-batch, without cutting an append in two."""

from __future__ import annotations

from typing import NamedTuple

from tailrace.protocol import offsets
from tailrace.spark.catalogue import Position, StreamCatalogue, StreamState
from tailrace.storage.segments.parquet import pa

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
