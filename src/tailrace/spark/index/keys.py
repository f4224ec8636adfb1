"""`routing_key_index` and `routing_key_lexicon`: which keys there are, and where."""

from __future__ import annotations

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
from tailrace.spark.index.batch import SegmentBatch
from tailrace.spark.index.parquet import BuiltIndexFile, IndexedRange, IndexFileWriter, build_file_facts
from tailrace.storage.segments.parquet import BINARY, INT64, pa, pc

GROUP_ROWS: Final = 4096  # small: a page of a listing reads one row group

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
INDEX_PACKED: Final = (
    *(KEY_HASH, FIRST_ENTRY, LAST_ENTRY, ENTRY_COUNT),
    *(f"{SPAN_FIRSTS}.list.element", f"{SPAN_LASTS}.list.element"),
)
LEXICON_PACKED: Final = (FIRST_ENTRY, LAST_ENTRY)
# How columns are written, also where runs are merged. Keys lie in the order of their hashes, or in their own.
INDEX_ENCODING: Final[dict[str, Any]] = {"packed": INDEX_PACKED, "bytes_apart": (KEY,), "bloom": KEY}
LEXICON_ENCODING: Final[dict[str, Any]] = {"packed": LEXICON_PACKED, "sorted_bytes": (KEY,)}


class RoutingKeyBuilder:
    """Collects a span for each key of each row group."""

    def __init__(self, covers: IndexedRange, families: frozenset[str]) -> None:
        self._covers = covers
        self._families = families
        self._keys: list[Any] = []  # Arrow, each different key of a batch once
        self._keys_before = 0
        self._spans: list[tuple[Any, Any, Any, Any]] = []  # places among all keys, firsts, lasts, counts

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
        order = stable_argsort(rank[numbers], len(keys))  # spans of a key stay in the order of entries
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
    """The places of different keys in the order of the index."""
    order = np.argsort(hashes)
    if (np.diff(hashes[order]) != 0).all():
        return order
    table = pa.table({KEY_HASH: hashes, KEY: keys})
    by = [(KEY_HASH, "ascending"), (KEY, "ascending")]
    return to_numpy(pc.sort_indices(table, sort_keys=by)).astype(np.int64)


def write_index(table: Any, facts: dict[str, str]) -> bytes:
    """A run of keys as a file; the rows are in order."""
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
