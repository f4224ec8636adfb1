"""The rows of `exact` as tables, and tables as a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final

from tailrace.search.index_files.format import ENTRIES, FIELD, LIST_ENTRIES_MAX, VALUE
from tailrace.spark.index.arrays import INT64_LIST, build_list_array, from_numpy, np
from tailrace.spark.index.parquet import IndexFileWriter
from tailrace.storage.segments.parquet import BINARY, INT64, STRING, pa

GROUP_ROWS: Final = 4096

EXACT_SCHEMA: Final = pa.schema(
    [
        pa.field(FIELD, STRING, nullable=False),
        pa.field(VALUE, BINARY),
        pa.field(ENTRIES, INT64_LIST, nullable=False),
    ]
)


def exact_table(name: str, values: Any, offsets: Any, entries: Any) -> Any:
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
        build_list_array(INT64_LIST, offsets, from_numpy(entries.astype(np.int64, copy=False), INT64)),
    ]
    return pa.Table.from_arrays(columns, schema=EXACT_SCHEMA)


def write_exact(tables: Iterable[Any], facts: dict[str, str], sink: Any = None) -> bytes:
    """Sorted tables as a file. A row group has one field, so that filters and bounds tell of that field."""
    with IndexFileWriter(
        EXACT_SCHEMA,
        facts,
        repeated=[FIELD],
        packed=[f"{ENTRIES}.list.element"],
        sorted_bytes=[VALUE],
        bloom=VALUE,
        bloom_values=GROUP_ROWS,
        sink=sink,
    ) as writer:
        for group in _cut_by_field(tables):
            writer.write(group)
        return writer.finish()


def _cut_by_field(tables: Iterable[Any]) -> Iterator[Any]:
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
