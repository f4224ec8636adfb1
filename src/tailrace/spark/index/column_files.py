"""`col` and `mblk` index files, with one row per entry.

`col` has the values of typed fields. `mblk` has canonical metric intervals as columns, so that readers need
not decode records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tailrace.schema.search_config import Measure, SearchConfig
from tailrace.search.aggregates.measures import SummaryPartsReader
from tailrace.search.index_files.format import (
    COL,
    COUNT,
    ENTRY,
    HISTOGRAM,
    MAX,
    MAX_WHOLE,
    MBLK,
    MBLK_DIMENSION_PAIRS,
    MBLK_POINTERS,
    MBLK_TEXTS,
    MBLK_TIMES,
    MIN,
    MIN_WHOLE,
    SKETCH,
    SUM,
    SUM_WHOLE,
)
from tailrace.search.records import flatten_leaves, to_integer, to_string
from tailrace.spark.index.aggregate_states import as_double, as_whole
from tailrace.spark.index.arrays import DOUBLE, build_list_array, from_numpy, list_type
from tailrace.spark.index.file_writer import BuiltIndexFile, IndexedRange, IndexFileWriter, build_file_facts
from tailrace.spark.index.segment_batches import ARROW_TYPES, PointerTokens, SegmentBatch
from tailrace.storage.segments.parquet import BINARY, INT32, INT64, STRING, pa, pc

GROUP_ROWS: Final = 8192
GROUP_BYTES_MAX: Final = 8 << 20


class ColumnBuilder:
    """Builds `col`. Writes row group by row group: one is in memory at a time."""

    def __init__(
        self, covers: IndexedRange, config: SearchConfig, fields: Sequence[str], primary: str | None
    ) -> None:
        self._covers = covers
        self._fields = list(fields)
        self._primary = primary
        self._kinds = {name: config.fields[name].kind for name in self._fields}
        self._types = {name: list_type(ARROW_TYPES[kind]) for name, kind in self._kinds.items()}
        columns = [pa.field(name, kind, nullable=False) for name, kind in self._types.items()]
        self._schema = pa.schema([pa.field(ENTRY, INT64, nullable=False), *columns])
        self._writer: IndexFileWriter | None = None
        self._pending: list[Any] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        self._times: tuple[int, int] | None = None

    def add(self, batch: SegmentBatch) -> None:
        columns = [from_numpy(batch.entries, INT64)]
        for name, kind in self._types.items():
            column = batch.column(name)
            columns.append(build_list_array(kind, column.offsets, column.values))
        if self._primary is not None:
            self._extend_times(batch.column(self._primary).values)
        table = pa.Table.from_arrays(columns, schema=self._schema)
        if self._pending_rows + table.num_rows > GROUP_ROWS or self._pending_bytes > GROUP_BYTES_MAX:
            self._flush()
        self._pending.append(table)
        self._pending_rows += table.num_rows
        self._pending_bytes += table.nbytes

    def _extend_times(self, values: Any) -> None:
        if len(values):
            edges = pc.min_max(values).as_py()
            low, high = self._times or (edges["min"], edges["max"])
            self._times = (min(low, edges["min"]), max(high, edges["max"]))

    def _flush(self) -> None:
        if self._pending:
            table = pa.concat_tables(self._pending).combine_chunks()
            if self._writer is None:
                self._writer = self._open_writer(table)
            self._writer.write(table)
        self._pending.clear()
        self._pending_rows = self._pending_bytes = 0

    def _open_writer(self, table: Any) -> IndexFileWriter:
        """Choose the encoding of columns by the values in the first row group."""
        paths: dict[str, list[str]] = {"dictionary": [], "delta_length": [], "delta": [ENTRY], "plain": []}
        for name, kind in self._kinds.items():
            paths[_column_encoding(kind, table.column(name))].append(f"{name}.list.element")
        return IndexFileWriter(
            self._schema,
            build_file_facts(COL, self._covers),
            dictionary=paths["dictionary"],
            delta=paths["delta"],
            delta_length=paths["delta_length"],
        )

    def finish(self) -> list[BuiltIndexFile]:
        self._flush()
        if self._writer is None:
            self._writer = self._open_writer(self._schema.empty_table())
        assert self._writer.rows == self._covers.rows, "one row per entry"
        stats = {} if self._times is None else {"ts_min": self._times[0], "ts_max": self._times[1]}
        return [BuiltIndexFile(COL, self._writer.finish(), self._covers.rows, stats)]


def _column_encoding(kind: str, column: Any) -> str:
    if kind in ("integer", "date"):
        return "delta"
    if kind == "bool":
        return "plain"
    values = column.combine_chunks().flatten()
    if pc.count_distinct(values).as_py() * 2 <= len(values):
        return "dictionary"
    return "plain" if kind == "float" else "delta_length"


METRIC_BLOCK_SCHEMA: Final = pa.schema(
    [
        pa.field(ENTRY, INT64, nullable=False),
        *(pa.field(name, STRING) for name in MBLK_TEXTS),
        pa.field(MBLK_DIMENSION_PAIRS, list_type(STRING), nullable=False),
        *(pa.field(name, INT64) for name in MBLK_TIMES),
        pa.field(COUNT, INT64),
        pa.field(SUM, DOUBLE),
        pa.field(SUM_WHOLE, INT64),
        pa.field(MIN, DOUBLE),
        pa.field(MIN_WHOLE, INT64),
        pa.field(MAX, DOUBLE),
        pa.field(MAX_WHOLE, INT64),
        pa.field(HISTOGRAM, pa.map_(INT32, pa.field("value", INT64, nullable=False))),
        pa.field(SKETCH, BINARY),
    ]
)
_METRIC_BLOCK_PARTS: Final = tuple(pointer[1:] for pointer in MBLK_POINTERS)
METRIC_BLOCK_POINTERS: Final[list[PointerTokens]] = [
    (name,) for name in (*MBLK_TEXTS, MBLK_DIMENSION_PAIRS, *MBLK_TIMES, *_METRIC_BLOCK_PARTS)
]


class MetricBlockBuilder:
    def __init__(self, covers: IndexedRange) -> None:
        self._covers = covers
        self._reader = SummaryPartsReader(Measure("summary_parts", None, None, None, *MBLK_POINTERS))
        self._tables: list[Any] = []

    def add(self, batch: SegmentBatch) -> None:
        columns = [from_numpy(batch.entries, INT64)]
        columns += [pa.array(list(map(to_string, batch.leaves((name,)))), STRING) for name in MBLK_TEXTS]
        pairs = [
            []
            if found is None
            else [text for leaf in flatten_leaves(found) if (text := to_string(leaf)) is not None]
            for found in batch.leaves((MBLK_DIMENSION_PAIRS,))
        ]
        columns.append(pa.array(pairs, METRIC_BLOCK_SCHEMA.field(MBLK_DIMENSION_PAIRS).type))
        columns += [pa.array(list(map(to_integer, batch.leaves((name,)))), INT64) for name in MBLK_TIMES]
        columns += self._parts(batch)
        self._tables.append(pa.Table.from_arrays(columns, schema=METRIC_BLOCK_SCHEMA))

    def _parts(self, batch: SegmentBatch) -> list[Any]:
        found = [batch.leaves((name,)) for name in _METRIC_BLOCK_PARTS]
        rows: list[tuple[object, ...]] = []
        for values in zip(*found, strict=True):
            parts = self._reader.read(dict(zip(_METRIC_BLOCK_PARTS, values, strict=True)))
            if parts is None:
                rows.append((None,) * 9)
                continue
            histogram = None if parts.histogram is None else sorted(parts.histogram.counts.items())
            numbers = (parts.total, parts.smallest, parts.largest)
            shown = [shape(number) for number in numbers for shape in (as_double, as_whole)]
            sketch = None if parts.sketch is None else parts.sketch.to_bytes()
            rows.append((parts.size, *shown, histogram, sketch))
        fields = list(METRIC_BLOCK_SCHEMA)[-9:]
        return [
            pa.array(column, field.type)
            for column, field in zip(zip(*rows, strict=True), fields, strict=True)
        ]

    def finish(self) -> list[BuiltIndexFile]:
        table = pa.concat_tables(self._tables).combine_chunks()
        table = table.sort_by([("metric", "ascending"), ("windowStart", "ascending"), (ENTRY, "ascending")])
        texts = [*MBLK_TEXTS, f"{MBLK_DIMENSION_PAIRS}.list.element"]
        delta = [ENTRY, *MBLK_TIMES, COUNT]
        with IndexFileWriter(
            METRIC_BLOCK_SCHEMA, build_file_facts(MBLK, self._covers), dictionary=texts, delta=delta
        ) as writer:
            for at in range(0, table.num_rows, GROUP_ROWS):
                writer.write(table.slice(at, GROUP_ROWS).combine_chunks())
            return [BuiltIndexFile(MBLK, writer.finish(), self._covers.rows, {})]
