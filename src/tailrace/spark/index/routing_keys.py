"""`routing_key_index` and `routing_key_lexicon` index files: built from a segment, and merged.

The index has the entry spans of each key, sorted by key hash; the lexicon has the keys in their own order.
Sorted runs are merged a few row groups at a time, in the order of their entries, so that the spans of a key
are concatenated in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tailrace.search.index_files.format import (
    ENTRY_COUNT,
    FIRST_ENTRY,
    KEY,
    KEY_HASH,
    LAST_ENTRY,
    ROUTING_KEY_INDEX,
    ROUTING_KEY_LEXICON,
    SPAN_FIRSTS,
    SPAN_LASTS,
    unsigned_key_hash,
)
from tailrace.spark.index.arrays import (
    INT64_LIST,
    build_list_array,
    from_numpy,
    np,
    offsets_from_counts,
    stable_argsort,
    to_numpy,
)
from tailrace.spark.index.file_writer import BuiltIndexFile, IndexedRange, IndexFileWriter, build_file_facts
from tailrace.spark.index.segment_batches import SegmentBatch
from tailrace.storage.segments.parquet import BINARY, INT64, pa, pc

GROUP_ROWS: Final = 4096  # small: one page of a key listing reads one row group

INDEX_SCHEMA: Final = pa.schema(
    [
        pa.field(KEY_HASH, INT64, nullable=False),
        pa.field(KEY, BINARY, nullable=False),
        pa.field(FIRST_ENTRY, INT64, nullable=False),
        pa.field(LAST_ENTRY, INT64, nullable=False),
        pa.field(ENTRY_COUNT, INT64, nullable=False),
        pa.field(SPAN_FIRSTS, INT64_LIST, nullable=False),
        pa.field(SPAN_LASTS, INT64_LIST, nullable=False),
    ]
)
LEXICON_SCHEMA: Final = pa.schema(
    [
        pa.field(KEY, BINARY, nullable=False),
        pa.field(FIRST_ENTRY, INT64, nullable=False),
        pa.field(LAST_ENTRY, INT64, nullable=False),
    ]
)
INDEX_DELTA: Final = (
    *(KEY_HASH, FIRST_ENTRY, LAST_ENTRY, ENTRY_COUNT),
    *(f"{SPAN_FIRSTS}.list.element", f"{SPAN_LASTS}.list.element"),
)
LEXICON_DELTA: Final = (FIRST_ENTRY, LAST_ENTRY)
# Column encodings, also used when runs are merged.
INDEX_ENCODING: Final[dict[str, Any]] = {"delta": INDEX_DELTA, "delta_length": (KEY,), "bloom": KEY}
LEXICON_ENCODING: Final[dict[str, Any]] = {"delta": LEXICON_DELTA, "delta_bytes": (KEY,)}


class RoutingKeyBuilder:
    """Collects one span per key and row group."""

    def __init__(self, covers: IndexedRange, families: frozenset[str]) -> None:
        self._covers = covers
        self._families = families
        self._keys: list[Any] = []  # Arrow, the distinct keys of each batch
        self._keys_before = 0
        self._spans: list[tuple[Any, Any, Any, Any]] = []  # indices into all keys, firsts, lasts, counts

    def add(self, batch: SegmentBatch) -> None:
        keys = batch.rows.keys
        if keys.null_count == len(keys):
            return
        valid = to_numpy(keys.is_valid())
        size, groups = len(keys.dictionary), batch.rows.groups
        group = np.repeat(np.arange(len(groups)), groups)[valid]
        spans = group * size + to_numpy(keys.indices.drop_null())
        entries = batch.entries[valid]
        order = stable_argsort(spans, len(groups) * size)
        spans, entries = spans[order], entries[order]
        starts = np.flatnonzero(np.diff(spans, prepend=-1))
        stops = np.append(starts[1:], len(spans))
        places = self._keys_before + spans[starts] % size
        self._spans.append((places, entries[starts], entries[stops - 1], stops - starts))
        self._keys.append(keys.dictionary)
        self._keys_before += size

    def finish(self) -> list[BuiltIndexFile]:
        index = self._index()
        built: list[BuiltIndexFile] = []
        stats = {"keys": index.num_rows}
        if ROUTING_KEY_INDEX in self._families:
            data = write_index(index, build_file_facts(ROUTING_KEY_INDEX, self._covers))
            built.append(BuiltIndexFile(ROUTING_KEY_INDEX, data, self._covers.rows, stats))
        if ROUTING_KEY_LEXICON in self._families:
            lexicon = index.select(LEXICON_SCHEMA.names).sort_by(KEY).cast(LEXICON_SCHEMA)
            data = write_lexicon(lexicon, build_file_facts(ROUTING_KEY_LEXICON, self._covers))
            built.append(BuiltIndexFile(ROUTING_KEY_LEXICON, data, self._covers.rows, stats))
        return built

    def _index(self) -> Any:
        if not self._spans:
            return INDEX_SCHEMA.empty_table()
        places, firsts, lasts, counts = (
            np.concatenate([span[place] for span in self._spans]) for place in range(4)
        )
        encoded = pa.concat_arrays(self._keys).dictionary_encode()
        keys = encoded.dictionary
        numbers = to_numpy(encoded.indices)[places]
        hashes = np.fromiter(map(unsigned_key_hash, keys.to_pylist()), np.uint64, len(keys)).view(np.int64)
        by_hash = _index_order(hashes, keys)
        rank = np.empty(len(keys), dtype=np.int64)
        rank[by_hash] = np.arange(len(keys))
        order = stable_argsort(rank[numbers], len(keys))  # spans of a key stay in entry order
        firsts, lasts, counts = firsts[order], lasts[order], counts[order]
        offsets = offsets_from_counts(np.bincount(rank[numbers], minlength=len(keys)))
        columns = [
            from_numpy(hashes[by_hash], INT64),
            keys.take(pa.array(by_hash)),
            from_numpy(firsts[offsets[:-1]], INT64),
            from_numpy(lasts[offsets[1:] - 1], INT64),
            from_numpy(np.add.reduceat(counts, offsets[:-1]).astype(np.int64), INT64),
            build_list_array(INT64_LIST, offsets, from_numpy(firsts, INT64)),
            build_list_array(INT64_LIST, offsets, from_numpy(lasts, INT64)),
        ]
        return pa.Table.from_arrays(columns, schema=INDEX_SCHEMA)


def _index_order(hashes: Any, keys: Any) -> Any:
    """Argsort of the keys by hash, then by key."""
    order = np.argsort(hashes)
    if (np.diff(hashes[order]) != 0).all():
        return order
    table = pa.table({KEY_HASH: hashes, KEY: keys})
    by = [(KEY_HASH, "ascending"), (KEY, "ascending")]
    return to_numpy(pc.sort_indices(table, sort_keys=by)).astype(np.int64)


def write_index(table: Any, facts: dict[str, str]) -> bytes:
    """Write a sorted index."""
    with IndexFileWriter(
        INDEX_SCHEMA, facts, bloom_values=min(table.num_rows, GROUP_ROWS), **INDEX_ENCODING
    ) as writer:
        for at in range(0, table.num_rows, GROUP_ROWS):
            writer.write(table.slice(at, GROUP_ROWS))
        return writer.finish()


def write_lexicon(table: Any, facts: dict[str, str]) -> bytes:
    with IndexFileWriter(LEXICON_SCHEMA, facts, **LEXICON_ENCODING) as writer:
        for at in range(0, table.num_rows, GROUP_ROWS):
            writer.write(table.slice(at, GROUP_ROWS))
        return writer.finish()


_REDUCERS = {FIRST_ENTRY: np.minimum, LAST_ENTRY: np.maximum, ENTRY_COUNT: np.add}
_SPAN_COLUMNS = (SPAN_FIRSTS, SPAN_LASTS)


class _KeyRun:
    """A run, read row group by row group. `sort_column` is the first column that it is sorted by."""

    def __init__(self, file: Any, sort_column: str) -> None:
        self._file = file
        self._sort_column = sort_column
        self._next = 0
        self.buffered: Any = None  # rows read but not consumed

    @property
    def has_more(self) -> bool:
        return self._next < self._file.metadata.num_row_groups

    def read(self) -> None:
        """Append the next row group to the buffer."""
        found = self._file.read_row_group(self._next, use_threads=False)
        self._next += 1
        self.buffered = found if self.buffered is None else pa.concat_tables([self.buffered, found])

    def last(self) -> Any:
        """The last buffered value. Unread rows may continue it, but are not smaller."""
        return self.buffered.column(self._sort_column)[-1].as_py()

    def consume_below(self, bound: Any) -> Any:
        """Remove and return the buffered rows with values below the bound; all rows if it is None."""
        count = self.buffered.num_rows
        if bound is not None:
            values = self.buffered.column(self._sort_column)
            count = pc.sum(pc.less(values, pa.scalar(bound, values.type))).as_py() or 0
        consumed = self.buffered.slice(0, count)
        self.buffered = self.buffered.slice(count) if count < self.buffered.num_rows else None
        return consumed


def merge_key_runs(files: Sequence[Any], schema: Any) -> Iterator[Any]:
    """The rows of all runs, of an index or of a lexicon, in order as tables with one row per key."""
    by = [name for name in (KEY_HASH, KEY) if name in schema.names]
    runs = [_KeyRun(file, by[0]) for file in files]
    while True:
        for run in runs:
            if run.buffered is None and run.has_more:
                run.read()
        nonempty = [run for run in runs if run.buffered is not None]
        if not nonempty:
            return
        open_ended = [run for run in nonempty if run.has_more]
        bound = min((run.last() for run in open_ended), default=None)
        rows = pa.concat_tables([run.consume_below(bound) for run in nonempty]).combine_chunks()
        if rows.num_rows:
            order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in by])  # stable
            yield _join_equal_keys(rows.take(order).combine_chunks(), schema)
        else:
            # One value fills the buffers: read on.
            for run in open_ended:
                if run.last() == bound:
                    run.read()


def _join_equal_keys(table: Any, schema: Any) -> Any:
    """One row per key, with the spans of all its rows."""
    keys = table.column(KEY).combine_chunks()
    is_start = np.ones(len(keys), dtype=bool)
    is_start[1:] = to_numpy(pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1)))
    if is_start.all():
        return table
    starts = np.flatnonzero(is_start)
    columns: list[Any] = []
    for name in schema.names:
        column = table.column(name).combine_chunks()
        if name in _REDUCERS:
            columns.append(from_numpy(_REDUCERS[name].reduceat(to_numpy(column), starts), INT64))
        elif name in _SPAN_COLUMNS:
            offsets = to_numpy(column.offsets)
            bounds = np.append(offsets[starts], offsets[-1]) - offsets[0]
            columns.append(build_list_array(INT64_LIST, bounds, column.flatten()))
        else:
            columns.append(column.take(pa.array(starts)))
    return pa.Table.from_arrays(columns, schema=schema)
