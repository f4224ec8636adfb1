"""`col` and `mblk` index files: field values and metric intervals as columns, one row per entry.

`col`: the values of typed fields, a row for each entry.

`mblk`: canonical metric intervals as columns, so that nobody has to decode them again.
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
    """Writes as it goes: it holds one row group."""

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
        self._held: list[Any] = []
        self._held_rows = 0
        self._held_bytes = 0
        self._times: tuple[int, int] | None = None

    def add(self, batch: SegmentBatch) -> None:
        columns = [from_numpy(batch.entries, INT64)]
        for name, kind in self._types.items():
            column = batch.column(name)
            columns.append(build_list_array(kind, column.offsets, column.values))
        if self._primary is not None:
            self._widen(batch.column(self._primary).values)
        table = pa.Table.from_arrays(columns, schema=self._schema)
        if self._held_rows + table.num_rows > GROUP_ROWS or self._held_bytes > GROUP_BYTES_MAX:
            self._flush()
        self._held.append(table)
        self._held_rows += table.num_rows
        self._held_bytes += table.nbytes

    def _widen(self, values: Any) -> None:
        if len(values):
            edges = pc.min_max(values).as_py()
            low, high = self._times or (edges["min"], edges["max"])
            self._times = (min(low, edges["min"]), max(high, edges["max"]))

    def _flush(self) -> None:
        if self._held:
            table = pa.concat_tables(self._held).combine_chunks()
            if self._writer is None:
                self._writer = self._opened(table)
            self._writer.write(table)
        self._held.clear()
        self._held_rows = self._held_bytes = 0

    def _opened(self, table: Any) -> IndexFileWriter:
        """The first row group tells what repeats itself, as levels do, and what does not, as ids."""
        paths: dict[str, list[str]] = {"repeated": [], "apart": [], "packed": [ENTRY], "plain": []}
        for name, kind in self._kinds.items():
            paths[_column_encoding(kind, table.column(name))].append(f"{name}.list.element")
        return IndexFileWriter(
            self._schema,
            build_file_facts(COL, self._covers),
            repeated=paths["repeated"],
            packed=paths["packed"],
            bytes_apart=paths["apart"],
        )

    def finish(self) -> list[BuiltIndexFile]:
        self._flush()
        if self._writer is None:
            self._writer = self._opened(self._schema.empty_table())
        assert self._writer.rows == self._covers.rows, "a row for each entry"
        stats = {} if self._times is None else {"ts_min": self._times[0], "ts_max": self._times[1]}
        return [BuiltIndexFile(COL, self._writer.finish(), self._covers.rows, stats)]


def _column_encoding(kind: str, column: Any) -> str:
    """How the values of a column are written."""
    if kind in ("integer", "date"):
        return "packed"
    if kind == "bool":
        return "plain"
    values = column.combine_chunks().flatten()
    if pc.count_distinct(values).as_py() * 2 <= len(values):
        return "repeated"
    return "plain" if kind == "float" else "apart"


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
        packed = [ENTRY, *MBLK_TIMES, COUNT]
        with IndexFileWriter(
            METRIC_BLOCK_SCHEMA, build_file_facts(MBLK, self._covers), repeated=texts, packed=packed
        ) as writer:
            for at in range(0, table.num_rows, GROUP_ROWS):
                writer.write(table.slice(at, GROUP_ROWS).combine_chunks())
            return [BuiltIndexFile(MBLK, writer.finish(), self._covers.rows, {})]
