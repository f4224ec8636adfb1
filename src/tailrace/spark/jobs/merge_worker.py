"""What a merge does in Python workers: read companions from any store, write the one that replaces them."""

from __future__ import annotations

import hashlib
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from tailrace.search.index_files.format import (
    AGG,
    EXACT,
    FACT_ROWS,
    ROUTING_KEY_INDEX,
    ROUTING_KEY_LEXICON,
    index_file_key,
)
from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.index import agg, agg_runs, agg_sums, exact_runs, key_runs, keys, splits
from tailrace.spark.index.exact_tables import write_exact
from tailrace.spark.index.parquet import IndexedRange, IndexFileWriter, build_file_facts
from tailrace.spark.index.row_groups import cut_row_groups
from tailrace.spark.index.segment import verify_index_file
from tailrace.spark.index.worker import ObjectFile, release_memory, worker_stores
from tailrace.storage.segments.model import stream_prefix
from tailrace.storage.segments.parquet import pa, pq

MERGED_DDL: Final = "object string, rows bigint, bytes bigint, sha256 string, stats string"
MERGED_SCHEMA: Final = pa.schema(
    [
        pa.field("object", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("bytes", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("stats", pa.string()),
    ]
)


class MergeTask(NamedTuple):
    """One merge: which companions become one."""

    family: str
    store: str
    stream_id: str
    first: int
    last: int
    plan_hash: str
    inputs: tuple[str, ...]


class MergeSortedRuns(NamedTuple):
    """For `mapInArrow` over one row: rows are sorted already, and files are read side by side.

    Of each a few rows are in memory, and of what is written one row group: it grows on disk.
    """

    order: MergeTask

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            files = [pq.ParquetFile(ObjectFile(self.order.store, key)) for key in self.order.inputs]
            covers = _merged_range(self.order, sum(map(_recorded_rows, files)))
            facts = build_file_facts(self.order.family, covers)
            with tempfile.TemporaryFile(prefix="tailrace-merge-") as sink:
                stats = _WRITERS[self.order.family](self.order.family, files, facts, sink)
                sink.flush()
                data = memoryview(mmap.mmap(sink.fileno(), 0, access=mmap.ACCESS_READ))
                verify_index_file(self.order.family, data, covers.rows)
                row = _put_file(self.order, data, covers.rows, stats)
            del files, data
            release_memory()
            yield row


class MergeTextSplits(NamedTuple):
    """For `mapInArrow` over one row: the postings of all splits, one field after the other."""

    order: MergeTask

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            data = [worker_stores().get(self.order.store, key) for key in self.order.inputs]
            covers = _merged_range(self.order, sum(map(splits.split_row_count, data)))
            built = splits.merge_splits(data, covers)
            row = _put_file(self.order, built.data, built.rows, built.stats)
            del data, built
            release_memory()
            yield row


def _write_merged_aggregates(
    _: str, files: Sequence[Any], facts: dict[str, str], sink: Any
) -> dict[str, int]:
    states = agg_sums.merge_states(agg_runs.merge_aggregate_runs(files))
    groups = agg.write_aggregates(agg.split_sections(states), facts, sink)[1]
    return {"groups": groups}


def _write_merged_exact(_: str, files: Sequence[Any], facts: dict[str, str], sink: Any) -> dict[str, int]:
    write_exact(exact_runs.merge_exact_runs(files), facts, sink)
    return {}


def _write_merged_keys(family: str, files: Sequence[Any], facts: dict[str, str], sink: Any) -> dict[str, int]:
    schema, form = _KEY_FILE_SCHEMAS[family]
    size = keys.GROUP_ROWS
    with IndexFileWriter(schema, facts, bloom_values=size, sink=sink, **form) as writer:
        for table in cut_row_groups(key_runs.merge_key_runs(files, schema), size):
            writer.write(table)
        writer.finish()
    return {"keys": writer.rows}


def _merged_range(order: MergeTask, rows: int) -> IndexedRange:
    return IndexedRange(order.stream_id, order.first, order.last, rows, order.plan_hash)


def _recorded_rows(file: Any) -> int:
    return int(file.metadata.metadata[FACT_ROWS.encode()])


def _put_file(order: MergeTask, data: bytes | memoryview, rows: int, stats: dict[str, int]) -> Any:
    sha256 = hashlib.sha256(data).hexdigest()
    name = index_file_key(order.plan_hash, order.family, order.first, order.last, sha256)
    key = stream_prefix(order.stream_id) + name
    hit_failpoint("after_write", "worker")
    worker_stores().put(order.store, key, data)
    hit_failpoint("after_put", "worker")
    row: dict[str, object] = {
        "object": key,
        "rows": rows,
        "bytes": len(data),
        "sha256": sha256,
        "stats": msgspec.json.encode(stats).decode(),
    }
    return pa.RecordBatch.from_pylist([row], schema=MERGED_SCHEMA)


# Schema, and how its columns are written.
_KEY_FILE_SCHEMAS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    ROUTING_KEY_INDEX: (keys.INDEX_SCHEMA, keys.INDEX_ENCODING),
    ROUTING_KEY_LEXICON: (keys.LEXICON_SCHEMA, keys.LEXICON_ENCODING),
}
# What they answer are the statistics of the companion.
_WRITERS: Final[dict[str, Callable[[str, Sequence[Any], dict[str, str], Any], dict[str, int]]]] = {
    ROUTING_KEY_INDEX: _write_merged_keys,
    ROUTING_KEY_LEXICON: _write_merged_keys,
    EXACT: _write_merged_exact,
    AGG: _write_merged_aggregates,
}
