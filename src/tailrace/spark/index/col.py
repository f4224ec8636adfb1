"""`col`: the values of typed fields, a row for each entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tailrace.schema.search_config import SearchConfig
from tailrace.search.index_files.format import COL, ENTRY
from tailrace.spark.index.arrays import build_list_array, from_numpy, list_type
from tailrace.spark.index.batch import SegmentBatch
from tailrace.spark.index.columns import ARROW_TYPES
from tailrace.spark.index.parquet import BuiltIndexFile, IndexedRange, IndexFileWriter, build_file_facts
from tailrace.storage.segments.parquet import INT64, pa, pc

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
