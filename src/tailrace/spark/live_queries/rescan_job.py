"""`tailrace pipeline rescan`: a collection's view compared with its change log, corrected, published.

The state of every document is computed from the change log by Spark SQL, and compared with the rows of the
server's view. Documents written during the comparison are skipped (`moving`). With `apply` the server
corrects the differences; with `publish_view` the computed state is stored as a published view, in the
server's format.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

import msgspec
import orjson
import xxhash

from tailrace.spark.live_queries.match_job import decode_entries
from tailrace.spark.live_queries.watch_client import ChangeRange, RangeBound, WatchClient
from tailrace.spark.object_stores import shared_object_store
from tailrace.storage.segments.parquet import BINARY, INT32, INT64, STRING, pa
from tailrace.watch import document_view
from tailrace.watch.document import Change
from tailrace.watch.document_view import DocumentRow, PublishedViewHead, PurgedTombstones

VIEW_PART_SCHEMA: Final = pa.schema([("object", STRING), ("rows", INT64)])
VIEW_PART_DDL: Final = "object string, rows bigint"


class ViewPublicationError(RuntimeError):
    """The view could not be published; the previous published view is unchanged."""


def find_view_head(store: str, folder: str) -> tuple[PublishedViewHead, str] | None:
    found = shared_object_store(store).find(document_view.head_key(folder))
    return None if found is None else (document_view.decode_head(found[0]), found[1])


def publish_view(
    latest: Any,
    client: WatchClient,
    store: str,
    folder: str,
    identity: tuple[str, str, int],
    positions: Sequence[int],
    purged: Sequence[PurgedTombstones],
    ranges: Sequence[ChangeRange],
) -> str:
    """Write the parts, seal the changes that they cover, then write the head that names the parts.

    `identity` is the database, the collection and the generation of the view.
    """
    previous = find_view_head(store, folder)
    number = 1 if previous is None else previous[0].number + 1
    # A random name, because the server may publish at the same time.
    run = f"{number:020}-{secrets.token_hex(4)}"
    at_ms = time.time_ns() // 1_000_000
    rows = latest.select(*document_view.VIEW_COLUMNS).repartition("partition")
    put = rows.mapInArrow(partial(put_view_rows, store, f"{folder}_{run}"), VIEW_PART_DDL).collect()
    parts = sorted(row["object"].removeprefix(folder) for row in put)
    for one in ranges:
        if not client.seal(one.stream):
            shared_object_store(store).delete([folder + name for name in parts])
            raise ViewPublicationError("changes of the view are not all in the object store yet; try again")
    head = PublishedViewHead(
        database=identity[0],
        collection=identity[1],
        generation=identity[2],
        number=number,
        at_ms=at_ms,
        positions=list(positions),
        purged=list(purged),
        parts=parts,
        rows=sum(row["rows"] for row in put),
    )
    key = document_view.head_key(folder)
    if not shared_object_store(store).replace(
        key, document_view.encode_head(head), None if previous is None else previous[1]
    ):
        shared_object_store(store).delete([folder + name for name in parts])
        raise ViewPublicationError("another process has just published a view of the collection; try again")
    if previous is not None:
        shared_object_store(store).delete([folder + name for name in previous[0].parts])
    return key


def put_view_rows(store: str, prefix: str, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: writes rows to parts of bounded size, named after the task attempt."""
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


EXAMPLES_MAX: Final = 100
CORRECTION_PREFIX: Final = "rescan-"  # of the write ids of corrections
CORRECTIONS_MAX: Final = 200
CORRECTIONS_BYTES: Final = 2 << 20
UNKNOWN_DIGEST: Final = ""  # if an entry has no before image

STATE_SCHEMA: Final = pa.schema(
    [
        ("id", STRING),
        ("partition", INT32),
        ("seq", INT64),
        ("version", INT64),
        ("created_ms", INT64),
        ("updated_ms", INT64),
        ("deleted", pa.bool_()),
        ("digest", STRING),
        ("before", STRING),
        ("mended", pa.bool_()),
        ("data", BINARY),
    ]
)
STATE_DDL: Final = (
    "id string, partition int, seq bigint, version bigint, created_ms bigint, updated_ms bigint, "
    "deleted boolean, digest string, before string, mended boolean, data binary"
)
VIEW_SCHEMA: Final = pa.schema(
    [("id", STRING), ("seq", INT64), ("version", INT64), ("deleted", pa.bool_()), ("digest", STRING)]
)


class MissingBaseViewError(RuntimeError):
    """The log was trimmed, and no published view covers the trimmed changes."""


class ExternalSourceError(ValueError):
    """Not possible for a collection with an external source."""


class RescanOptions(NamedTuple):
    database: str
    collection: str
    from_source: bool = False
    publish_view: bool = False
    apply: bool = False
    store: str | None = None


class Difference(msgspec.Struct, frozen=True):
    """A document that differs between log and view. None: that side does not have it."""

    id: str
    kind: str  # missing, extra, differs
    partition: int
    logSeq: int | None  # noqa: N815 - the name on the wire
    logVersion: int | None  # noqa: N815 - as above
    viewSeq: int | None  # noqa: N815 - as above
    viewVersion: int | None  # noqa: N815 - as above


class RescanReport(msgspec.Struct, frozen=True):
    database: str
    collection: str
    generation: int
    positions: list[int]
    documents: int
    moving: int  # documents written during the comparison
    broken: int  # changes that are inconsistent with the previous change of their document
    missing: int
    extra: int
    differs: int
    applied: int
    refused: int
    published: str | None
    examples: list[Difference]


class _ViewRow(msgspec.Struct):
    id: str
    partition: int
    seq: int
    version: int
    deleted: bool
    data: msgspec.Raw


class _ViewPage(msgspec.Struct):
    generation: int
    folder: str
    purged: list[PurgedTombstones]
    positions: list[int]
    rows: list[_ViewRow]
    next: str | None


class FetchedView(NamedTuple):
    """The server's view, read page by page between two positions of the log."""

    rows: Any
    start_positions: list[int]
    end_positions: list[int]
    generation: int
    folder: str
    purged: list[PurgedTombstones]


def document_digest(raw: bytes) -> str:
    """A digest of the document, independent of its JSON encoding."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps(orjson.loads(raw), option=orjson.OPT_SORT_KEYS))


def read_view(client: WatchClient, database: str, collection: str) -> FetchedView:
    rows: list[dict[str, Any]] = []
    after, start_positions = "", list[int]()
    while True:
        raw = client.view_page(database, collection, after)
        page = msgspec.json.decode(raw, type=_ViewPage)
        start_positions = start_positions or page.positions
        rows += [
            {
                "id": row.id,
                "seq": row.seq,
                "version": row.version,
                "deleted": row.deleted,
                "digest": document_digest(bytes(row.data)),
            }
            for row in page.rows
        ]
        if page.next is None:
            return FetchedView(
                rows, start_positions, page.positions, page.generation, page.folder, page.purged
            )
        after = page.next


class StateTask(msgspec.Struct, frozen=True):
    ranges: dict[str, ChangeRange]
    with_data: bool


def compute_states(task: StateTask, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: the state of the document after each change."""
    for batch in batches:
        rows: list[dict[str, Any]] = []
        for found in decode_entries(batch, task.ranges):
            change = found.change
            if change is None:
                continue
            entry, deleted = change.entry, change.entry.op == "delete"
            content = bytes(entry.before if deleted else entry.after)
            rows.append(
                {
                    "id": entry.documentKey,
                    "partition": change.partition,
                    "seq": change.seq,
                    "version": entry.version,
                    "created_ms": entry.createdAt,
                    "updated_ms": change.updated_ms,
                    "deleted": deleted,
                    "digest": document_digest(content),
                    "before": _before_digest(change),
                    "mended": (entry.writeId or "").startswith(CORRECTION_PREFIX),
                    "data": content if task.with_data else None,
                }
            )
        yield pa.RecordBatch.from_pylist(rows, schema=STATE_SCHEMA)


def _before_digest(change: Change) -> str | None:
    entry = change.entry
    if entry.prev is None:
        return None
    return UNKNOWN_DIGEST if change.lacks_before_image else document_digest(bytes(entry.before))


def run_rescan(spark: Any, client: WatchClient, options: RescanOptions) -> RescanReport:
    from pyspark.sql import functions as f

    native = client.collection(options.database, options.collection).source == "native"
    if not native and (options.from_source or options.apply):
        raise ExternalSourceError(
            "a collection with an external source is corrected by its connector, not by rescan"
        )
    view = read_view(client, options.database, options.collection)
    end = RangeBound(seqs=tuple(view.end_positions))
    ranges = client.ranges(options.database, options.collection, RangeBound("earliest"), end)
    store = options.store or client.store()
    base = _find_base_view(
        store, view, client.earliest(options.database, options.collection, len(view.end_positions))
    )
    states = _states_frame(spark, client, ranges, with_data=options.publish_view or options.apply).persist()
    try:
        broken = _count_broken_changes(states)
        whole = states if base is None else states.unionByName(_base_frame(spark, store, view.folder, base))
        latest = _latest_states(whole)
        compared = _compare_states(spark, latest, view).persist()
        counts = {row["kind"]: row["count"] for row in compared.groupBy("kind").count().collect()}
        wrong = compared.where(f.col("kind").isin("missing", "extra", "differs"))
        examples = [_parse_difference(row) for row in wrong.orderBy("id").limit(EXAMPLES_MAX).collect()]
        applied = refused = 0
        if options.apply:
            applied, refused = Corrector(client, options, view).run(wrong.orderBy("id").toLocalIterator())
        published = None
        if options.publish_view:
            identity = (options.database, options.collection, int(view.folder.split("/")[-2]))
            published = publish_view(
                latest, client, store, view.folder, identity, view.end_positions, view.purged, ranges
            )
        compared.unpersist()
    finally:
        states.unpersist()
    return RescanReport(
        options.database,
        options.collection,
        view.generation,
        view.end_positions,
        sum(counts.values()),
        counts.get("moving", 0),
        broken,
        counts.get("missing", 0),
        counts.get("extra", 0),
        counts.get("differs", 0),
        applied,
        refused,
        published,
        examples,
    )


def _states_frame(spark: Any, client: WatchClient, ranges: Sequence[ChangeRange], *, with_data: bool) -> Any:
    if not ranges:
        return spark.createDataFrame([], STATE_DDL)
    task = StateTask({one.stream: one for one in ranges}, with_data)
    return client.frame(spark, ranges).mapInArrow(partial(compute_states, task), STATE_DDL)


def _find_base_view(store: str, view: FetchedView, earliest: list[int]) -> PublishedViewHead | None:
    """The published view to start from if the log was trimmed."""
    if not any(earliest):
        return None
    found = find_view_head(store, view.folder)
    if found is None or any(map(int.__lt__, found[0].positions, earliest)):
        raise MissingBaseViewError("log was trimmed, and no published view covers the trimmed changes")
    return found[0]


def read_base_rows(store: str, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: the rows of the named parts of a published view."""
    for batch in batches:
        for name in batch.column("object").to_pylist():
            rows = document_view.decode_part(shared_object_store(store).get(name))
            yield pa.RecordBatch.from_pylist(
                [
                    {**row._asdict(), "deleted": bool(row.deleted), "digest": document_digest(row.data)}
                    for row in rows
                ],
                schema=STATE_SCHEMA,
            )


def _base_frame(spark: Any, store: str, folder: str, base: PublishedViewHead) -> Any:
    names = [{"object": folder + name} for name in base.parts]
    table = pa.Table.from_pylist(names, schema=pa.schema([("object", STRING)]))
    frame = spark.createDataFrame(table).repartition(max(1, len(names)))
    return frame.mapInArrow(partial(read_base_rows, store), STATE_DDL)


def _latest_states(states: Any) -> Any:
    """The last change of each document."""
    from pyspark.sql import functions as f

    return (
        states.groupBy("id")
        .agg(f.max_by(f.struct(*states.columns[1:]), "seq").alias("last"))
        .select("id", "last.*")
    )


def _count_broken_changes(states: Any) -> int:
    """The number of changes whose before image or version does not follow from the previous change.

    Corrections are excluded: they replace the previous state.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy("id").orderBy("seq")
    follows = states.select(
        "mended",
        "version",
        "before",
        f.lag("version").over(order).alias("version_before"),
        f.lag("digest").over(order).alias("digest_before"),
        f.lag("deleted").over(order).alias("deleted_before"),
    ).where("version_before is not null and not mended")
    expected = f.when(f.col("deleted_before"), f.lit(None)).otherwise(f.col("digest_before"))
    return follows.where(
        (f.col("version") <= f.col("version_before"))
        | ~(f.col("before").eqNullSafe(expected) | f.col("before").eqNullSafe(f.lit(UNKNOWN_DIGEST)))
    ).count()


def _compare_states(spark: Any, latest: Any, view: FetchedView) -> Any:
    from pyspark.sql import functions as f

    view_rows = spark.createDataFrame(pa.Table.from_pylist(view.rows, schema=VIEW_SCHEMA)).select(
        "id", *(f.col(name).alias(f"view_{name}") for name in VIEW_SCHEMA.names[1:])
    )
    start_positions = f.array(*(f.lit(seq).cast("bigint") for seq in view.start_positions))
    purged = f.array(*(f.lit(one.seq).cast("bigint") for one in view.purged))
    both = latest.drop("before", "mended").join(view_rows, "id", "full_outer")
    moving = f.greatest("seq", "view_seq") > f.element_at(start_positions, f.col("partition") + 1)
    equal = (
        (f.col("seq") == f.col("view_seq"))
        & (f.col("version") == f.col("view_version"))
        & (f.col("deleted") == f.col("view_deleted"))
        & (f.col("digest") == f.col("view_digest"))
    )
    # The server purges tombstones after a while.
    purged_tombstone = (
        f.col("view_seq").isNull()
        & f.col("deleted")
        & (f.col("seq") <= f.element_at(purged, f.col("partition") + 1))
    )
    kind = (
        f.when(f.col("seq").isNull(), "extra")
        .when(moving, "moving")
        .when(purged_tombstone, "same")
        .when(f.col("view_seq").isNull(), "missing")
        .when(equal, "same")
        .otherwise("differs")
    )
    known = ("id", "partition", "seq", "version", "deleted", "created_ms", "data")
    return both.select(*known, "view_seq", "view_version", kind.alias("kind"))


def _parse_difference(row: Any) -> Difference:
    return Difference(
        row["id"],
        row["kind"],
        -1 if row["partition"] is None else row["partition"],
        row["seq"],
        row["version"],
        row["view_seq"],
        row["view_version"],
    )


class Corrector:
    """Sends corrections to the server, which skips documents that were written meanwhile."""

    def __init__(self, client: WatchClient, options: RescanOptions, view: FetchedView) -> None:
        self._client = client
        self._options = options
        run = [options.database, options.collection, view.generation, view.end_positions]
        self._name = f"{CORRECTION_PREFIX}{hashlib.sha256(msgspec.json.encode(run)).hexdigest()[:24]}"
        self._sent = 0

    def run(self, wrong: Iterator[Any]) -> tuple[int, int]:
        """The numbers of applied and refused corrections."""
        applied = refused = size = 0
        page: list[dict[str, Any]] = []
        for row in wrong:
            data = b"{}" if row["seq"] is None else bytes(row["data"])
            page.append(_build_correction(row, data))
            size += len(data)
            if len(page) >= CORRECTIONS_MAX or size >= CORRECTIONS_BYTES:
                done = self._send(page)
                applied, refused, size, page = applied + done[0], refused + done[1], 0, []
        done = self._send(page) if page else (0, 0)
        return applied + done[0], refused + done[1]

    def _send(self, page: list[dict[str, Any]]) -> tuple[int, int]:
        body = {
            "collection": self._options.collection,
            "name": f"{self._name}-{self._sent}",
            "corrections": page,
        }
        self._sent += 1
        response = self._client.post(f"/v1/databases/{self._options.database}/corrections", body)
        applied = sum(1 for result in response["results"] if result["status"] in (200, 201, 204))
        return applied, len(response["results"]) - applied


def _build_correction(row: Any, data: bytes) -> dict[str, Any]:
    """A document that the log does not have is deleted."""
    unknown = row["seq"] is None
    return {
        "id": row["id"],
        "seen": row["view_seq"],
        "version": row["view_version"] if unknown else row["version"],
        "createdMs": 0 if unknown else row["created_ms"],
        "deleted": unknown or row["deleted"],
        "data": msgspec.Raw(data),
    }
