"""`exact` index files: field values with the lists of entries that have them; built, spilled and merged.

One file has all fields, sorted by field and value; a row with a null value lists all entries that have the
field. The builder spills sorted runs to disk when it exceeds its memory. Runs are merged a few row groups at
a time, in the order of their entries, so that the lists of equal values are concatenated in order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tailrace.schema.search_config import SearchConfig
from tailrace.search.index_files.format import (
    ENTRIES,
    EXACT,
    FIELD,
    LIST_ENTRIES_MAX,
    VALUE,
    VALUE_BYTES_MAX,
    encode_value,
)
from tailrace.spark.index.arrays import (
    INT64_LIST,
    argsort_bytes,
    build_list_array,
    from_numpy,
    np,
    offsets_from_counts,
    stable_argsort,
    to_numpy,
)
from tailrace.spark.index.file_writer import BuiltIndexFile, IndexedRange, IndexFileWriter, build_file_facts
from tailrace.spark.index.segment_batches import FieldColumn, SegmentBatch
from tailrace.storage.segments.parquet import BINARY, INT64, STRING, pa, pc, pq

GROUP_ROWS: Final = 4096

EXACT_SCHEMA: Final = pa.schema(
    [
        pa.field(FIELD, STRING, nullable=False),
        pa.field(VALUE, BINARY),
        pa.field(ENTRIES, INT64_LIST, nullable=False),
    ]
)


def exact_table(name: str, values: Any, offsets: Any, entries: Any) -> Any:
    """The rows of one field. Lists longer than LIST_ENTRIES_MAX continue in further rows."""
    counts = np.diff(offsets)
    if len(counts) and counts.max() > LIST_ENTRIES_MAX:
        pieces = -(-counts // LIST_ENTRIES_MAX)
        starts = np.concatenate([np.arange(*span, LIST_ENTRIES_MAX) for span in pairwise(offsets.tolist())])
        values = values.take(pa.array(np.repeat(np.arange(len(counts)), pieces)))
        offsets = np.append(starts, offsets[-1])
    columns = [
        pa.array([name]).take(pa.array(np.zeros(len(values), np.int64))),
        values,
        build_list_array(INT64_LIST, offsets, from_numpy(entries.astype(np.int64, copy=False), INT64)),
    ]
    return pa.Table.from_arrays(columns, schema=EXACT_SCHEMA)


def write_exact(tables: Iterable[Any], facts: dict[str, str], sink: Any = None) -> bytes:
    """Write sorted tables. A row group has one field, so that its filter and statistics are of that field."""
    with IndexFileWriter(
        EXACT_SCHEMA,
        facts,
        dictionary=[FIELD],
        delta=[f"{ENTRIES}.list.element"],
        delta_bytes=[VALUE],
        bloom=VALUE,
        bloom_values=GROUP_ROWS,
        sink=sink,
    ) as writer:
        for group in _cut_by_field(tables):
            writer.write(group)
        return writer.finish()


def _cut_by_field(tables: Iterable[Any]) -> Iterator[Any]:
    """Row groups of one field each. They depend on the rows only, not on how these are cut into tables."""
    pending: list[Any] = []
    rows = 0
    name: str | None = None
    for table in tables:
        if not table.num_rows:
            continue
        field: str = table.column(FIELD)[0].as_py()
        if field != name and pending:
            yield pa.concat_tables(pending)
            pending, rows = [], 0
        name = field
        at = 0
        while at < table.num_rows:
            piece = table.slice(at, GROUP_ROWS - rows)
            pending.append(piece)
            rows += piece.num_rows
            at += piece.num_rows
            if rows == GROUP_ROWS:
                yield pa.concat_tables(pending)
                pending, rows = [], 0
    if pending:
        yield pa.concat_tables(pending)


class _ExactRun:
    """A run, read row group by row group. Each row group has one field."""

    def __init__(self, file: Any) -> None:
        self._file = file
        names = file.schema_arrow.names
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        self.fields: list[str] = [group.column(names.index(FIELD)).statistics.min for group in groups]
        self._next = 0
        self.buffered: Any = None  # rows read but not consumed

    def has_more(self, field: str) -> bool:
        return self._next < len(self.fields) and self.fields[self._next] == field

    def read(self) -> None:
        """Append the next row group to the buffer."""
        found = self._file.read_row_group(self._next, use_threads=False)
        self._next += 1
        self.buffered = found if self.buffered is None else pa.concat_tables([self.buffered, found])

    def last_value(self) -> Any:
        return self.buffered.column(VALUE)[-1].as_py()

    def consume_below(self, bound: Any) -> Any:
        """Remove and return the buffered rows with values below the bound; all rows if it is None."""
        count = self.buffered.num_rows if bound is None else _count_below(self.buffered.column(VALUE), bound)
        consumed = self.buffered.slice(0, count)
        self.buffered = self.buffered.slice(count) if count < self.buffered.num_rows else None
        return consumed


def merge_exact_runs(files: Sequence[Any]) -> Iterator[Any]:
    """The rows of all runs in order, as tables of one field each, with the lists of equal values joined."""
    runs = [_ExactRun(file) for file in files]
    for field in sorted({field for run in runs for field in run.fields}):
        yield from _join_equal_values(field, _iter_sorted(field, runs))


def _iter_sorted(field: str, runs: Sequence[_ExactRun]) -> Iterator[Any]:
    """All rows of a field by value, and by run within a value."""
    while True:
        for run in runs:
            if run.buffered is None and run.has_more(field):
                run.read()
        open_ended = [run for run in runs if run.has_more(field)]
        nonempty = [run for run in runs if run.buffered is not None]
        if not nonempty:
            return
        bound: Any = None
        if open_ended:
            # The unread rows of a run may continue its last value, but are not smaller.
            lasts = [run.last_value() for run in open_ended]
            bound = b"" if None in lasts else min(lasts)
        rows = pa.concat_tables([run.consume_below(bound) for run in nonempty]).combine_chunks()
        if rows.num_rows:
            values = rows.column(VALUE).combine_chunks()
            yield rows.take(pc.array_sort_indices(values, null_placement="at_start"))  # stable
        else:
            # One value fills the buffers: read on.
            for run in open_ended:
                if (run.last_value() or b"") <= bound:
                    run.read()


def _count_below(values: Any, bound: bytes) -> int:
    """The number of sorted values below the bound.

    Null is below all but b"", the bound while nulls may follow.
    """
    if not bound:
        return 0
    return pc.sum(pc.fill_null(pc.less(values, pa.scalar(bound, pa.binary())), True)).as_py() or 0


def _join_equal_values(field: str, tables: Iterable[Any]) -> Iterator[Any]:
    """Join the lists of equal values, up to LIST_ENTRIES_MAX."""
    last_row: Any = None  # its value may continue in the next table
    for table in tables:
        joined = _join_lists(field, table if last_row is None else pa.concat_tables([last_row, table]))
        yield joined.slice(0, joined.num_rows - 1)
        last_row = joined.slice(joined.num_rows - 1)
    if last_row is not None:
        yield last_row


def _join_lists(field: str, table: Any) -> Any:
    table = table.combine_chunks()
    values, entries = table.column(VALUE).combine_chunks(), table.column(ENTRIES).combine_chunks()
    valid = to_numpy(values.is_valid())
    is_start = np.ones(len(values), dtype=bool)
    differ = pc.fill_null(pc.not_equal(values.slice(1), values.slice(0, len(values) - 1)), False)
    is_start[1:] = to_numpy(differ) | (valid[1:] != valid[:-1])
    starts = np.flatnonzero(is_start)
    offsets = to_numpy(entries.offsets).astype(np.int64)
    offsets -= offsets[0]
    bounds = np.append(offsets[:-1][starts], offsets[-1])
    return exact_table(field, values.take(pa.array(starts)), bounds, to_numpy(entries.flatten()))


_SIGN_BIT: Final = np.uint64(1 << 63)


def encode_stored_values(column: FieldColumn, kind: str) -> Any:
    """The values of a column as bytes with the same order: vectorized `encode_value`."""
    values = column.values
    if kind in ("keyword", "text"):
        stored = values.cast(BINARY)
        if len(stored) and pc.max(pc.binary_length(stored)).as_py() > VALUE_BYTES_MAX:
            return pa.array([encode_value(value) for value in values.to_pylist()], BINARY)
        return stored
    if kind == "bool":
        numbers = to_numpy(values).astype(np.uint8)
        return pa.Array.from_buffers(pa.binary(1), len(numbers), [None, pa.py_buffer(numbers)]).cast(BINARY)
    bits = to_numpy(values).view(np.uint64)
    if kind == "float":
        bits = np.where(bits & _SIGN_BIT, ~bits, bits ^ _SIGN_BIT)
    else:
        bits = bits ^ _SIGN_BIT
    words = np.ascontiguousarray(bits.astype(">u8"))
    return pa.Array.from_buffers(pa.binary(8), len(words), [None, pa.py_buffer(words)]).cast(BINARY)


class ExactBuilder:
    """Collects values with their entries; spills a sorted run to disk when it exceeds `bytes_max`."""

    def __init__(
        self,
        covers: IndexedRange,
        config: SearchConfig,
        fields: Sequence[str],
        bytes_max: int,
        directory: Path,
    ) -> None:
        self._covers = covers
        self._kinds = {name: config.fields[name].kind for name in sorted(fields)}
        self._bytes_max = bytes_max
        self._directory = directory
        self._values: dict[str, list[tuple[Any, Any]]] = {name: [] for name in self._kinds}
        self._present: dict[str, list[Any]] = {name: [] for name in self._kinds}
        self._bytes = 0
        self._runs: list[Path] = []

    def add(self, batch: SegmentBatch) -> None:
        for name, kind in self._kinds.items():
            column = batch.column(name)
            if not len(column.rows):
                continue
            present = batch.entries[column.present]
            self._present[name].append(present)
            self._bytes += present.nbytes
            if kind != "text":  # for texts, only their presence is indexed
                stored, entries = encode_stored_values(column, kind), batch.entries[column.rows]
                self._values[name].append((stored, entries))
                self._bytes += stored.nbytes + entries.nbytes
        # Sorting takes about as much memory again.
        if self._bytes * 2 > self._bytes_max:
            self._spill()

    def finish(self) -> list[BuiltIndexFile]:
        tables = self._tables() if not self._runs else self._merge_spilled()
        data = write_exact(tables, build_file_facts(EXACT, self._covers))
        return [BuiltIndexFile(EXACT, data, self._covers.rows, {"fields": len(self._kinds)})]

    def _tables(self) -> Iterator[Any]:
        """The collected values, sorted, field by field; the memory of each field is released after it."""
        for name in self._kinds:
            present, values = self._present[name], self._values[name]
            if not present:
                continue
            entries = np.concatenate(present)
            yield exact_table(name, pa.nulls(1, BINARY), np.array([0, len(entries)]), entries)
            if values:
                stored = pa.concat_arrays([piece for piece, _ in values])
                yield _group_by_value(name, stored, np.concatenate([piece for _, piece in values]))
            present.clear()
            values.clear()

    def _spill(self) -> None:
        path = Path(tempfile.mkstemp(suffix=".run", dir=self._directory)[1])
        with pa.OSFile(str(path), "wb") as sink:
            data = IndexFileWriter(EXACT_SCHEMA, {}, sink=sink)
            for table in self._tables():
                for at in range(0, table.num_rows, GROUP_ROWS):
                    data.write(table.slice(at, GROUP_ROWS))
            data.finish()
        self._runs.append(path)
        self._bytes = 0

    def _merge_spilled(self) -> Iterator[Any]:
        self._spill()
        yield from merge_exact_runs([pq.ParquetFile(path) for path in self._runs])
        for path in self._runs:
            path.unlink()


def _group_by_value(name: str, stored: Any, entries: Any) -> Any:
    """Entries grouped by value, sorted by value."""
    encoded = stored.dictionary_encode()
    dictionary = encoded.dictionary
    order = argsort_bytes(dictionary)
    if len(order) == len(stored):  # all values are distinct, as with ids
        return exact_table(name, stored.take(pa.array(order)), np.arange(len(order) + 1), entries[order])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    ranks = rank[to_numpy(encoded.indices)]
    by_value = stable_argsort(ranks, len(order))
    ranks, entries = ranks[by_value], entries[by_value]
    # A record that has a value twice is listed once.
    is_start = np.ones(len(ranks), dtype=bool)
    is_start[1:] = (np.diff(ranks) != 0) | (np.diff(entries) != 0)
    ranks, entries = ranks[is_start], entries[is_start]
    offsets = offsets_from_counts(np.bincount(ranks, minlength=len(order)))
    return exact_table(name, dictionary.take(pa.array(order)), offsets, entries)
