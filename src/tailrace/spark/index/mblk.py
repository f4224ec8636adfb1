"""`mblk`: canonical metric intervals as columns, so that nobody has to decode them again."""

from __future__ import annotations

from typing import Any, Final

from tailrace.schema.search_config import Measure
from tailrace.search.aggregates.measures import SummaryPartsReader
from tailrace.search.index_files.format import (
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
from tailrace.spark.index.arrays import DOUBLE, from_numpy, list_type
from tailrace.spark.index.batch import SegmentBatch
from tailrace.spark.index.decoding import PointerTokens
from tailrace.spark.index.parquet import BuiltIndexFile, IndexedRange, IndexFileWriter, build_file_facts
from tailrace.storage.segments.parquet import BINARY, INT32, INT64, STRING, pa

GROUP_ROWS: Final = 8192

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
