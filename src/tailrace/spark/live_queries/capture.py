"""`tailrace pipeline capture`: a range of changes with the subscriptions of the moment, fit to be kept.

Changes are sampled by document, so that those of one document stay together. A capture is complete when
`capture.json` is there.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import xxhash

from tailrace.spark.blobs import shared_object_store
from tailrace.spark.live_queries.compiled import SubscriptionSet, decode_subscription_set
from tailrace.spark.live_queries.kernels import decode_entries
from tailrace.spark.live_queries.mask import Masker
from tailrace.spark.live_queries.subscription_sets import read_subscription_set
from tailrace.spark.live_queries.watch_client import ChangeRange, RangeBound, WatchClient
from tailrace.spark.sink_options import store_url
from tailrace.storage.object_store.interface import ObjectMissingError
from tailrace.storage.segments.parquet import BINARY, INT32, INT64, STRING, pa, pq
from tailrace.watch.document import encode_change

CAPTURE_FILE: Final = "capture.json"
SUBSCRIPTIONS_FILE: Final = "subscriptions.json"
OBJECT_BYTES: Final = 8 << 20
CAPTURED_SCHEMA: Final = pa.schema(
    [
        ("stream", STRING),
        ("partition", INT32),
        ("entry", INT64),
        ("offset", STRING),
        ("timestamp_ns", INT64),
        ("value", BINARY),
    ]
)
CAPTURE_PART_SCHEMA: Final = pa.schema(
    [("object", STRING), ("rows", INT64), ("bytes", INT64), ("sha256", STRING)]
)
CAPTURE_PART_DDL: Final = "object string, rows bigint, bytes bigint, sha256 string"


class CaptureExistsError(ValueError):
    """Captures are not written over."""


class CaptureOptions(NamedTuple):
    database: str
    collection: str
    out: str
    start: RangeBound = RangeBound("earliest")
    end: RangeBound = RangeBound("latest")
    sample: float = 1.0
    mask: tuple[str, ...] = ()


class CapturePart(msgspec.Struct, frozen=True):
    object: str
    rows: int
    bytes: int
    sha256: str


class Capture(msgspec.Struct, frozen=True):
    """The head of a capture."""

    database: str
    collection: str
    ranges: list[ChangeRange]
    sample: float
    mask: list[str]
    changes: int
    subscriptions: int
    leftOut: int  # noqa: N815 - subscriptions that could not be masked
    parts: list[CapturePart]
    v: int = 1


class CaptureTask(msgspec.Struct, frozen=True):
    out: str
    ranges: dict[str, ChangeRange]
    sample: float
    mask: list[str]
    secret: bytes


def run_capture(spark: Any, place: WatchClient, options: CaptureOptions) -> Capture:
    out = store_url(options.out)
    try:
        shared_object_store(out).get(CAPTURE_FILE)
    except ObjectMissingError:
        pass
    else:
        raise CaptureExistsError(f"there is a capture at {options.out} already")
    place.check_matchable(options.database, options.collection)
    announced = place.announce(options.database)
    try:
        found = read_subscription_set(
            place.server, announced.stream, announced.offset, options.database, [options.collection]
        )
    finally:
        place.announce(options.database, 0)
    ranges = place.ranges(options.database, options.collection, options.start, options.end)
    # Made for this capture and kept nowhere: nobody can try values out later.
    secret = secrets.token_bytes(32)
    subscriptions = mask_subscriptions(found, Masker(options.mask, secret))
    task = CaptureTask(out, {one.stream: one for one in ranges}, options.sample, list(options.mask), secret)
    parts = _write_parts(spark, place, ranges, task) if ranges else []
    shared_object_store(out).create(SUBSCRIPTIONS_FILE, subscriptions.encode())
    capture = Capture(
        options.database,
        options.collection,
        ranges,
        options.sample,
        list(options.mask),
        sum(part.rows for part in parts),
        len(subscriptions.subs),
        len(found.subs) - len(subscriptions.subs),
        parts,
    )
    if not shared_object_store(out).create(CAPTURE_FILE, msgspec.json.encode(capture)):
        raise CaptureExistsError(f"somebody else has just written a capture to {options.out}")
    return capture


def mask_subscriptions(found: SubscriptionSet, masker: Masker) -> SubscriptionSet:
    masked = {key: masker.summary(one) for key, one in found.subs.items()}
    return SubscriptionSet({key: one for key, one in masked.items() if one is not None})


def _write_parts(
    spark: Any, place: WatchClient, ranges: Sequence[ChangeRange], task: CaptureTask
) -> list[CapturePart]:
    rows = place.frame(spark, ranges).mapInArrow(partial(capture_changes, task), CAPTURE_PART_DDL).collect()
    parts = [CapturePart(row["object"], row["rows"], row["bytes"], row["sha256"]) for row in rows]
    return sorted(parts, key=lambda part: part.object)


def capture_changes(task: CaptureTask, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: puts masked changes into objects, a few MiB each, and tells their names."""
    masker = Masker(task.mask, task.secret)
    rows: list[dict[str, Any]] = []
    size = 0
    for batch in batches:
        times: list[int] = batch.column("timestamp_ns").to_pylist()
        for entry, time_ns in zip(decode_entries(batch, task.ranges), times, strict=True):
            change = entry.change
            if change is None or not is_sampled(change.entry.documentKey, task.sample):
                continue
            value = encode_change(masker.change(change.entry))
            if rows and (size >= OBJECT_BYTES or rows[-1]["stream"] != entry.range.stream):
                yield _put_capture_part(task.out, rows)
                rows, size = [], 0
            rows.append(
                {
                    "stream": entry.range.stream,
                    "partition": entry.range.partition,
                    "entry": entry.seq,
                    "offset": entry.offset,
                    "timestamp_ns": time_ns,
                    "value": value,
                }
            )
            size += len(value)
    if rows:
        yield _put_capture_part(task.out, rows)


def is_sampled(document_key: str, share: float) -> bool:
    return xxhash.xxh3_64_intdigest(document_key.encode("utf-8", "surrogatepass"), seed=1) < share * 2**64


def _put_capture_part(out: str, rows: list[dict[str, Any]]) -> Any:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=CAPTURED_SCHEMA), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    name = f"changes/{rows[0]['partition']:05}-{rows[0]['entry']:020}-{rows[-1]['entry']:020}.parquet"
    shared_object_store(out).create(name, data)
    told = {
        "object": name,
        "rows": len(rows),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    return pa.RecordBatch.from_pylist([told], schema=CAPTURE_PART_SCHEMA)


# -- reading one back --------------------------------------------------------------------------------------


def load_capture(url: str) -> tuple[Capture, SubscriptionSet]:
    store = shared_object_store(store_url(url))
    return (
        msgspec.json.decode(store.get(CAPTURE_FILE), type=Capture),
        decode_subscription_set(store.get(SUBSCRIPTIONS_FILE)),
    )


def read_capture_parts(url: str, batches: Iterator[Any]) -> Iterator[Any]:
    """For `mapInArrow`: names of parts in, their changes out."""
    store = shared_object_store(store_url(url))
    for batch in batches:
        for name, sha256 in zip(
            batch.column("object").to_pylist(), batch.column("sha256").to_pylist(), strict=True
        ):
            data = store.get(name)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise ValueError(f"{name} is not what was captured")
            yield from pq.read_table(pa.BufferReader(data), use_threads=False).to_batches()


CAPTURED_DDL: Final = (
    "stream string, partition int, entry bigint, offset string, timestamp_ns bigint, value binary"
)


def captured_frame(spark: Any, url: str, capture: Capture) -> Any:
    table = pa.Table.from_pylist(
        [{"object": part.object, "sha256": part.sha256} for part in capture.parts],
        schema=pa.schema([("object", STRING), ("sha256", STRING)]),
    )
    named = spark.createDataFrame(table).repartition(max(1, len(capture.parts)))
    return named.mapInArrow(partial(read_capture_parts, url), CAPTURED_DDL)
