"""What a merge does in Python workers: read companions from any store, write the one that replaces them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from tailrace.pipeline.failpoints import reached
from tailrace.pipeline.kernels import agg, key_runs, keys, splits
from tailrace.pipeline.kernels.arrays import pa, pq
from tailrace.pipeline.kernels.exact_runs import merged
from tailrace.pipeline.kernels.exact_tables import write_exact
from tailrace.pipeline.kernels.parquet import Built, CompanionWriter, Range, facts_of
from tailrace.pipeline.kernels.segment import check_built
from tailrace.pipeline.worker import StoredFile, stores
from tailrace.query.family_format import (
    AGG,
    EXACT,
    FACT_ROWS,
    FTS,
    ROUTING_KEY_INDEX,
    ROUTING_KEY_LEXICON,
    companion_name,
)
from tailrace.store.segments import stream_prefix

FILE_DDL: Final = "object string, rows bigint, bytes bigint, sha256 string, stats string"
FILE: Final = pa.schema(
    [
        pa.field("object", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("bytes", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("stats", pa.string()),
    ]
)
READ_ROWS: Final = 1024
_FOOTER_GUESS: Final = 64 << 10


class MergeOrder(NamedTuple):
    """One merge: which companions become one."""

    family: str
    store: str
    stream_id: str
    first: int
    last: int
    plan_hash: str
    inputs: tuple[str, ...]


def read_companions(batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: rows of Parquet companions, wherever they lie, a few at a time."""
    for batch in batches:
        for row in batch.to_pylist():
            raw = stores().get(row["store"], row["object"])
            file = pq.ParquetFile(pa.BufferReader(raw))
            for found in file.iter_batches(batch_size=READ_ROWS, use_threads=False):
                yield pa.RecordBatch.from_arrays(found.columns, names=found.schema.names)


class WriteStates(NamedTuple):
    """For `mapInArrow`: sorted states of one partition in, one row about the written companion out."""

    order: MergeOrder

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        covers = _covers(self.order, sum(_rows_in(self.order.store, key) for key in self.order.inputs))
        tables = (_plain(pa.Table.from_batches([batch]), agg.SCHEMA) for batch in batches)
        data, groups = agg.write_agg(agg.sections(tables), facts_of(AGG, covers))
        built = Built(AGG, data, covers.rows, {"groups": groups})
        check_built(built)
        yield _put(self.order, built)


class MergeSplits(NamedTuple):
    """For `mapInArrow` over one row: the postings of all splits are put in order at once."""

    order: MergeOrder

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            data = [stores().get(self.order.store, key) for key in self.order.inputs]
            covers = _covers(self.order, sum(map(splits.rows_in, data)))
            yield _put(self.order, splits.merge_splits(data, covers))


class MergeExact(NamedTuple):
    """For `mapInArrow` over one row: runs are sorted already, and are read side by side."""

    order: MergeOrder

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            files = [pq.ParquetFile(StoredFile(self.order.store, key)) for key in self.order.inputs]
            covers = _covers(self.order, sum(map(_rows_said, files)))
            data = write_exact(merged(files), facts_of(EXACT, covers))
            built = Built(EXACT, data, covers.rows, {})
            check_built(built)
            yield _put(self.order, built)


class MergeKeys(NamedTuple):
    """For `mapInArrow` over one row: as with `exact`."""

    order: MergeOrder

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        schema, form, size = _SHAPES[self.order.family]
        for _ in batches:
            files = [pq.ParquetFile(StoredFile(self.order.store, key)) for key in self.order.inputs]
            covers = _covers(self.order, sum(map(_rows_said, files)))
            facts = facts_of(self.order.family, covers)
            with CompanionWriter(schema, facts, bloom_values=size, **form) as writer:
                for table in _cut(key_runs.merged(files, schema), size):
                    writer.write(table)
                data = writer.finish()
            built = Built(self.order.family, data, covers.rows, {"keys": writer.rows})
            check_built(built)
            yield _put(self.order, built)


def _covers(order: MergeOrder, rows: int) -> Range:
    return Range(order.stream_id, order.first, order.last, rows, order.plan_hash)


def _rows_in(store: str, key: str) -> int:
    """How many entries a companion speaks for, from its footer."""
    return _rows_said(pq.ParquetFile(pa.BufferReader(stores().tail(store, key, _FOOTER_GUESS))))


def _rows_said(file: Any) -> int:
    return int(file.metadata.metadata[FACT_ROWS.encode()])


def _cut(tables: Iterable[Any], size: int) -> Iterator[Any]:
    """Rows as they come, in row groups of one size."""
    held: list[Any] = []
    rows = 0
    for table in tables:
        at = 0
        while at < table.num_rows:
            piece = table.slice(at, size - rows)
            held.append(piece)
            rows += piece.num_rows
            at += piece.num_rows
            if rows == size:
                yield pa.concat_tables(held).combine_chunks()
                held, rows = [], 0
    if held:
        yield pa.concat_tables(held).combine_chunks()


def _plain(table: Any, schema: Any) -> Any:
    """Columns of Spark under our own schema, which knows what is never null."""
    arrays = [table.column(field.name).combine_chunks().cast(field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _put(order: MergeOrder, built: Built) -> Any:
    sha256 = hashlib.sha256(built.data).hexdigest()
    name = companion_name(order.plan_hash, order.family, order.first, order.last, sha256)
    key = stream_prefix(order.stream_id) + name
    reached("after_write", "worker")
    stores().put(order.store, key, built.data)
    reached("after_put", "worker")
    row: dict[str, object] = {
        "object": key,
        "rows": built.rows,
        "bytes": len(built.data),
        "sha256": sha256,
        "stats": msgspec.json.encode(built.stats).decode(),
    }
    return pa.RecordBatch.from_pylist([row], schema=FILE)


# Schema, how its columns are written, rows of a row group.
_SHAPES: Final[dict[str, tuple[Any, dict[str, Any], int]]] = {
    ROUTING_KEY_INDEX: (keys.INDEX_SCHEMA, keys.INDEX_FORM, keys.GROUP_ROWS),
    ROUTING_KEY_LEXICON: (keys.LEXICON_SCHEMA, keys.LEXICON_FORM, keys.GROUP_ROWS),
}
MERGED: Final = (ROUTING_KEY_INDEX, ROUTING_KEY_LEXICON, EXACT, AGG, FTS)
