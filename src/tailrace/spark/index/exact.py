"""`exact`: which entries have which value. All fields in one file, sorted, entries as lists."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tailrace.schema.search_config import SearchConfig
from tailrace.search.index_files.format import EXACT, VALUE_BYTES_MAX, encode_value
from tailrace.spark.index.arrays import argsort_bytes, np, offsets_from_counts, stable_argsort, to_numpy
from tailrace.spark.index.batch import SegmentBatch
from tailrace.spark.index.columns import FieldColumn
from tailrace.spark.index.exact_runs import merge_exact_runs
from tailrace.spark.index.exact_tables import EXACT_SCHEMA, GROUP_ROWS, exact_table, write_exact
from tailrace.spark.index.parquet import BuiltIndexFile, IndexedRange, IndexFileWriter, build_file_facts
from tailrace.storage.segments.parquet import BINARY, pa, pc, pq

_SIGN_BIT: Final = np.uint64(1 << 63)


def encode_stored_values(column: FieldColumn, kind: str) -> Any:
    """The values of a column as bytes that compare as they do: `stored_value` for all at once."""
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
    """Collects values with their entries; what is more than its share goes to disk as a sorted run."""

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
            if kind != "text":  # of a text it only counts that there is one
                stored, entries = encode_stored_values(column, kind), batch.entries[column.rows]
                self._values[name].append((stored, entries))
                self._bytes += stored.nbytes + entries.nbytes
        # Sorting takes about as much again as is held.
        if self._bytes * 2 > self._bytes_max:
            self._spill()

    def finish(self) -> list[BuiltIndexFile]:
        tables = self._tables() if not self._runs else self._merged()
        data = write_exact(tables, build_file_facts(EXACT, self._covers))
        return [BuiltIndexFile(EXACT, data, self._covers.rows, {"fields": len(self._kinds)})]

    def _tables(self) -> Iterator[Any]:
        """What is held, field by field, sorted; each field is let go once it is made."""
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

    def _merged(self) -> Iterator[Any]:
        self._spill()
        yield from merge_exact_runs([pq.ParquetFile(path) for path in self._runs])
        for path in self._runs:
            path.unlink()


def _group_by_value(name: str, stored: Any, entries: Any) -> Any:
    """Entries by value, in the order of values."""
    encoded = stored.dictionary_encode()
    dictionary = encoded.dictionary
    order = argsort_bytes(dictionary)
    if len(order) == len(stored):  # ids never repeat
        return exact_table(name, stored.take(pa.array(order)), np.arange(len(order) + 1), entries[order])
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    ranks = rank[to_numpy(encoded.indices)]
    by_value = stable_argsort(ranks, len(order))
    ranks, entries = ranks[by_value], entries[by_value]
    # A record that has a value twice is one entry.
    fresh = np.ones(len(ranks), dtype=bool)
    fresh[1:] = (np.diff(ranks) != 0) | (np.diff(entries) != 0)
    ranks, entries = ranks[fresh], entries[fresh]
    offsets = offsets_from_counts(np.bincount(ranks, minlength=len(order)))
    return exact_table(name, dictionary.take(pa.array(order)), offsets, entries)
