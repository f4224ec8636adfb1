"""`exact`: which entries have which value. All fields in one file, sorted, entries as lists."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

from tailrace.pipeline.kernels.arrays import (
    BINARY,
    INT64,
    INT64_LIST,
    STRING,
    from_numpy,
    lists,
    np,
    offsets_of,
    pa,
    pc,
    pq,
    stable_order,
    to_numpy,
)
from tailrace.pipeline.kernels.batch import Batch
from tailrace.pipeline.kernels.columns import FieldColumn
from tailrace.pipeline.kernels.parquet import Built, CompanionWriter, Range, facts_of
from tailrace.query.family_format import (
    ENTRIES,
    EXACT,
    FIELD,
    LIST_ENTRIES_MAX,
    VALUE,
    VALUE_BYTES_MAX,
    stored_value,
)
from tailrace.schema.search_config import SearchConfig

GROUP_ROWS: Final = 4096
GROUP_ENTRIES_MAX: Final = 1 << 20

SCHEMA: Final = pa.schema(
    [
        pa.field(FIELD, STRING, nullable=False),
        pa.field(VALUE, BINARY),
        pa.field(ENTRIES, INT64_LIST, nullable=False),
    ]
)
_SIGN: Final = np.uint64(1 << 63)

Row = tuple[str, bytes | None, list[int]]


def stored_values(column: FieldColumn, kind: str) -> Any:
    """The values of a column as bytes that compare as they do: `stored_value` for all at once."""
    values = column.values
    if kind in ("keyword", "text"):
        stored = values.cast(BINARY)
        if len(stored) and pc.max(pc.binary_length(stored)).as_py() > VALUE_BYTES_MAX:
            return pa.array([stored_value(value) for value in values.to_pylist()], BINARY)
        return stored
    if kind == "bool":
        numbers = to_numpy(values).astype(np.uint8)
        return pa.Array.from_buffers(pa.binary(1), len(numbers), [None, pa.py_buffer(numbers)]).cast(BINARY)
    bits = to_numpy(values).view(np.uint64)
    if kind == "float":
        bits = np.where(bits & _SIGN, ~bits, bits ^ _SIGN)
    else:
        bits = bits ^ _SIGN
    words = np.ascontiguousarray(bits.astype(">u8"))
    return pa.Array.from_buffers(pa.binary(8), len(words), [None, pa.py_buffer(words)]).cast(BINARY)


class ExactBuilder:
    """Collects values with their entries; what is more than its share goes to disk as a sorted run."""

    def __init__(
        self, covers: Range, config: SearchConfig, fields: Sequence[str], bytes_max: int, directory: Path
    ) -> None:
        self._covers = covers
        self._kinds = {name: config.fields[name].kind for name in sorted(fields)}
        self._bytes_max = bytes_max
        self._directory = directory
        self._values: dict[str, list[tuple[Any, Any]]] = {name: [] for name in self._kinds}
        self._present: dict[str, list[Any]] = {name: [] for name in self._kinds}
        self._bytes = 0
        self._runs: list[Path] = []

    def add(self, batch: Batch) -> None:
        for name, kind in self._kinds.items():
            column = batch.column(name)
            if not len(column.rows):
                continue
            present = batch.entries[column.present]
            self._present[name].append(present)
            self._bytes += present.nbytes
            if kind != "text":  # of a text it only counts that there is one
                stored, entries = stored_values(column, kind), batch.entries[column.rows]
                self._values[name].append((stored, entries))
                self._bytes += stored.nbytes + entries.nbytes
        # Sorting takes about as much again as is held.
        if self._bytes * 2 > self._bytes_max:
            self._spill()

    def finish(self) -> list[Built]:
        tables = self._tables() if not self._runs else self._merged()
        data = write_exact(tables, facts_of(EXACT, self._covers))
        return [Built(EXACT, data, self._covers.rows, {"fields": len(self._kinds)})]

    def _tables(self) -> Iterator[Any]:
        """What is held, field by field, sorted; each field is let go once it is made."""
        for name in self._kinds:
            present, values = self._present[name], self._values[name]
            if not present:
                continue
            entries = np.concatenate(present)
            yield _table(name, pa.nulls(1, BINARY), np.array([0, len(entries)]), entries)
            if values:
                stored = pa.concat_arrays([piece for piece, _ in values])
                yield _grouped(name, stored, np.concatenate([piece for _, piece in values]))
            present.clear()
            values.clear()

    def _spill(self) -> None:
        path = Path(tempfile.mkstemp(suffix=".run", dir=self._directory)[1])
        with pa.OSFile(str(path), "wb") as sink:
            data = CompanionWriter(SCHEMA, {}, sink=sink)
            for table in self._tables():
                for at in range(0, table.num_rows, GROUP_ROWS):
                    data.write(table.slice(at, GROUP_ROWS))
            data.finish()
        self._runs.append(path)
        self._bytes = 0

    def _merged(self) -> Iterator[Any]:
        self._spill()
        # Runs follow each other in the order of entries, and a merge keeps the order of equals.
        yield from tables_of(merge(*map(_rows, self._runs), key=_place))
        for path in self._runs:
            path.unlink()


def _grouped(name: str, stored: Any, entries: Any) -> Any:
    """Entries by value, in the order of values."""
    encoded = stored.dictionary_encode()
    dictionary = encoded.dictionary
    order = to_numpy(pc.sort_indices(dictionary)).astype(np.int64)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    ranks = rank[to_numpy(encoded.indices)]
    by_value = stable_order(ranks, len(order))
    ranks, entries = ranks[by_value], entries[by_value]
    # A record that has a value twice is one entry.
    fresh = np.ones(len(ranks), dtype=bool)
    fresh[1:] = (np.diff(ranks) != 0) | (np.diff(entries) != 0)
    ranks, entries = ranks[fresh], entries[fresh]
    offsets = offsets_of(np.bincount(ranks, minlength=len(order)))
    return _table(name, dictionary.take(pa.array(order)), offsets, entries)


def _table(name: str, values: Any, offsets: Any, entries: Any) -> Any:
    """Rows of one field. Lists that are too long go on in further rows."""
    counts = np.diff(offsets)
    if len(counts) and counts.max() > LIST_ENTRIES_MAX:
        pieces = -(-counts // LIST_ENTRIES_MAX)
        starts = np.concatenate([np.arange(*span, LIST_ENTRIES_MAX) for span in pairwise(offsets.tolist())])
        values = values.take(pa.array(np.repeat(np.arange(len(counts)), pieces)))
        offsets = np.append(starts, offsets[-1])
    columns = [
        pa.array([name]).take(pa.array(np.zeros(len(values), np.int64))),
        values,
        lists(INT64_LIST, offsets, from_numpy(entries.astype(np.int64), INT64)),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a sorted run, a few at a time."""
    file = pq.ParquetFile(path)
    for batch in file.iter_batches(batch_size=256, use_threads=False):
        for row in batch.to_pylist():
            yield row[FIELD], row[VALUE], row[ENTRIES]


def _place(row: Row) -> tuple[str, bool, bytes]:
    return row[0], row[1] is not None, row[1] or b""


def tables_of(rows: Iterable[Row]) -> Iterator[Any]:
    """Sorted rows as tables of one field each; rows of one value that follow each other are joined."""
    held: list[Row] = []
    held_entries = 0
    for _, found in groupby(rows, key=_place):
        for row in _joined(found):
            if held and (held[0][0] != row[0] or len(held) == GROUP_ROWS or held_entries > GROUP_ENTRIES_MAX):
                yield _held_table(held)
                held, held_entries = [], 0
            held.append(row)
            held_entries += len(row[2])
    if held:
        yield _held_table(held)


def _joined(found: Iterable[Row]) -> Iterator[Row]:
    """Rows of one value, every list but the last one full."""
    name, value, waiting = "", None, list[int]()
    for name, value, entries in found:
        waiting += entries
        while len(waiting) > LIST_ENTRIES_MAX:
            yield name, value, waiting[:LIST_ENTRIES_MAX]
            waiting = waiting[LIST_ENTRIES_MAX:]
    yield name, value, waiting


def _held_table(held: list[Row]) -> Any:
    names, values, entries = zip(*held, strict=True)
    columns = [pa.array(names, STRING), pa.array(values, BINARY), pa.array(entries, INT64_LIST)]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def write_exact(tables: Iterable[Any], facts: dict[str, str], sink: Any = None) -> bytes:
    """Sorted tables as a file. A row group has one field, so that filters and bounds tell of that field."""
    with CompanionWriter(
        SCHEMA,
        facts,
        repeated=[FIELD],
        packed=[f"{ENTRIES}.list.element"],
        sorted_bytes=[VALUE],
        bloom=VALUE,
        bloom_values=GROUP_ROWS,
        sink=sink,
    ) as writer:
        for group in _row_groups(tables):
            writer.write(group)
        return writer.finish()


def _row_groups(tables: Iterable[Any]) -> Iterator[Any]:
    """Tables cut and joined: the same rows give the same row groups, however they arrive."""
    held: list[Any] = []
    rows = 0
    name: str | None = None
    for table in tables:
        if not table.num_rows:
            continue
        field: str = table.column(FIELD)[0].as_py()
        if field != name and held:
            yield pa.concat_tables(held)
            held, rows = [], 0
        name = field
        at = 0
        while at < table.num_rows:
            piece = table.slice(at, GROUP_ROWS - rows)
            held.append(piece)
            rows += piece.num_rows
            at += piece.num_rows
            if rows == GROUP_ROWS:
                yield pa.concat_tables(held)
                held, rows = [], 0
    if held:
        yield pa.concat_tables(held)
