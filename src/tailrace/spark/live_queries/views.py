"""Published views, read and written as the server does: the state of a collection at known positions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, cast

from tailrace.spark.blobs import shared_object_store
from tailrace.spark.live_queries.watch_client import ChangeRange, WatchClient
from tailrace.storage.segments.parquet import INT64, STRING, pa
from tailrace.watch import document_view
from tailrace.watch.document_view import DocumentRow, PublishedViewHead, PurgedTombstones

VIEW_PART_SCHEMA: Final = pa.schema([("object", STRING), ("rows", INT64)])
VIEW_PART_DDL: Final = "object string, rows bigint"


class ViewPublicationError(RuntimeError):
    """The view could not be published; what was published before stays."""


def find_view_head(store: str, folder: str) -> tuple[PublishedViewHead, str] | None:
    found = shared_object_store(store).find(document_view.head_key(folder))
    return None if found is None else (document_view.decode_head(found[0]), found[1])


def publish_view(
    latest: Any,
    place: WatchClient,
    store: str,
    folder: str,
    about: tuple[str, str, int],
    positions: Sequence[int],
    purged: Sequence[PurgedTombstones],
    ranges: Sequence[ChangeRange],
) -> str:
    """Parts first, then the seal of all changes that they hold, then the head that names them."""
    before = find_view_head(store, folder)
    number = 1 if before is None else before[0].number + 1
    # A name that nobody else chooses: the server may publish at the same time.
    run = f"{number:020}-{secrets.token_hex(4)}"
    at_ms = time.time_ns() // 1_000_000
    rows = latest.select(*document_view.VIEW_COLUMNS).repartition("partition")
    put = rows.mapInArrow(partial(put_view_rows, store, f"{folder}_{run}"), VIEW_PART_DDL).collect()
    parts = sorted(row["object"].removeprefix(folder) for row in put)
    for one in ranges:
        if not place.seal(one.stream):
            shared_object_store(store).delete([folder + name for name in parts])
            raise ViewPublicationError(
                "the changes of the view are not all on the object store yet; try again"
            )
    head = PublishedViewHead(
        database=about[0],
        collection=about[1],
        generation=about[2],
        number=number,
        at_ms=at_ms,
        positions=list(positions),
        purged=list(purged),
        parts=parts,
        rows=sum(row["rows"] for row in put),
    )
    key = document_view.head_key(folder)
    if not shared_object_store(store).replace(
        key, document_view.encode_head(head), None if before is None else before[1]
    ):
        shared_object_store(store).delete([folder + name for name in parts])
        raise ViewPublicationError("somebody else has just published a view of the collection")
    if before is not None:
        shared_object_store(store).delete([folder + name for name in before[0].parts])
    return key


def put_view_rows(store: str, prefix: str, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: rows into parts of a bounded size, named by the task that made them."""
    from pyspark import TaskContext

    context = TaskContext.get()
    task = f"{0 if context is None else context.taskAttemptId():08x}"
    rows: list[DocumentRow] = []
    size = count = 0
    for batch in batches:
        columns: list[list[Any]] = [batch.column(name).to_pylist() for name in document_view.VIEW_COLUMNS]
        for values in zip(*columns, strict=True):
            row = DocumentRow(*cast("tuple[str, int, int, int, int, int, int, bytes]", values))
            rows.append(row)
            size += len(row.data)
            if len(rows) >= document_view.PART_ROWS_MAX or size >= document_view.PART_BYTES_MAX:
                yield _put_view_part(store, f"{prefix}-{task}-{count:05}.parquet", rows)
                rows, size, count = [], 0, count + 1
    if rows:
        yield _put_view_part(store, f"{prefix}-{task}-{count:05}.parquet", rows)


def _put_view_part(store: str, name: str, rows: list[DocumentRow]) -> Any:
    shared_object_store(store).create(name, document_view.encode_part(rows))
    return pa.RecordBatch.from_pylist([{"object": name, "rows": len(rows)}], schema=VIEW_PART_SCHEMA)
