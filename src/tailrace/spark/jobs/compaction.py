"""Segment compaction: adjacent small segments joined into one, verified, and offered to the server.

Small segments joined into one: every entry keeps its number, time, key and bytes, proven twice.

The compaction job: adjacent small segments become one, and readers never notice.
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import xxhash

from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.index.file_writer import WRITER
from tailrace.spark.index.segment_build import BUILT, UNDECODABLE, worker_stores
from tailrace.spark.jobs.messages import CompactionWork, StreamPlan
from tailrace.storage.segments.index_files import (
    SEGMENT_FAMILY,
    PublishedObject,
    PublishInput,
    PublishRequest,
    UnbuildableInput,
)
from tailrace.storage.segments.model import CorruptSegmentError, SegmentInfo, SegmentRows, stream_prefix
from tailrace.storage.segments.parquet import pa
from tailrace.storage.segments.reader import Footer, file_footer, read_all_rows
from tailrace.storage.segments.writer import write_segment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


RAW_BYTES_MAX: Final = 256 << 20  # unpacked, all columns; whoever plans keeps well below

# What has to be the same in all segments that are joined, and is the same in the joined one.
_COMMON_FACTS: Final = ("name", "stream_id", "epoch", "content_type")
_MODULUS: Final = 1 << 128


class EntriesChecksum(NamedTuple):
    """The sum of the hashes of all entries: the same whatever segments they lie in."""

    total: int
    entries: int

    def add(self, rows: SegmentRows, json: bool) -> EntriesChecksum:
        total, start, separator = self.total, 0, 1 if json else 0
        for index, end in enumerate(rows.ends):
            key = None if rows.keys is None else rows.keys[index]
            total += _hash_entry(rows.first + index, rows.times[index], key, rows.body[start:end])
            start = end + separator
        return EntriesChecksum(total % _MODULUS, self.entries + len(rows.ends))


EMPTY_CHECKSUM: Final = EntriesChecksum(0, 0)


def _hash_entry(entry: int, time_ns: int, key: bytes | None, payload: bytes) -> int:
    head = entry.to_bytes(8, "big") + time_ns.to_bytes(8, "big", signed=True)
    # The length tells no key from an empty one, and where the key ends.
    length = -1 if key is None else len(key)
    hashed = xxhash.xxh3_128(head + length.to_bytes(4, "big", signed=True) + (key or b""))
    hashed.update(payload)
    return hashed.intdigest()


def compute_checksum(raw: bytes) -> EntriesChecksum:
    footer = file_footer(raw)
    found = EMPTY_CHECKSUM
    for rows in read_all_rows(raw, footer):
        found = found.add(rows, footer.json)
    return found


def compact_segments(raws: Sequence[bytes], path: Path, attempt: str = "") -> SegmentInfo:
    """Adjacent segments of one epoch and schema version, oldest first, as one file at `path`.

    CorruptSegmentError if they are not that, or if the file does not hold exactly what went in.
    """
    footers = [file_footer(raw) for raw in raws]
    facts = _check_common_facts(footers)
    if sum(_raw_bytes(footer) for footer in footers) > RAW_BYTES_MAX:
        raise CorruptSegmentError("together the segments are too large")
    seen = [EMPTY_CHECKSUM]
    written = write_segment(
        _rows_with_checksum(zip(raws, footers, strict=True), seen),
        path,
        name=facts["name"],
        stream_id=facts["stream_id"],
        epoch=footers[0].epoch,
        json=footers[0].json,
        content_type=facts["content_type"] or None,
        schema_versions=_joined_schema_versions(footers),
        attempt=attempt,
    )
    if compute_checksum(path.read_bytes()) != seen[0]:
        raise CorruptSegmentError("the joined segment does not hold the entries of its inputs")
    return written.info


def _check_common_facts(footers: Sequence[Footer]) -> dict[str, str]:
    facts = {name: footers[0].facts.get(name, "") for name in _COMMON_FACTS}
    following = footers[0].first
    for footer in footers:
        if any(footer.facts.get(name, "") != value for name, value in facts.items()):
            raise CorruptSegmentError("segments of different streams or epochs are never joined")
        if footer.first != following or footer.json != footers[0].json:
            raise CorruptSegmentError(f"entry {following} is missing between two segments")
        following = footer.last + 1
    return facts


def _joined_schema_versions(footers: Sequence[Footer]) -> str:
    """Where schema versions begin in the joined segment: with its first entry, and nowhere else.

    Segments from before there was a schema say nothing; later ones say that version 0 goes on.
    """
    said = [footer.facts.get("schema_versions", "") for footer in footers]
    if not any(said):
        return ""
    found = {_schema_version(one) for one in said}
    if len(found) != 1:
        raise CorruptSegmentError("segments of different schema versions are never joined")
    return msgspec.json.encode([(footers[0].first, *found)]).decode()


def _schema_version(said: str) -> int:
    try:
        pairs = msgspec.json.decode(said, type=list[tuple[int, int]]) if said else [(0, 0)]
    except msgspec.MsgspecError as error:
        raise CorruptSegmentError(f"its schema versions cannot be read: {error}") from None
    if len(pairs) != 1:
        raise CorruptSegmentError("a segment with several schema versions is never joined")
    return pairs[0][1]


def _raw_bytes(footer: Footer) -> int:
    return sum(footer.group_bytes(index) for index in range(footer.count))


def _rows_with_checksum(
    segments: Iterable[tuple[bytes, Footer]], seen: list[EntriesChecksum]
) -> Iterator[SegmentRows]:
    for raw, footer in segments:
        for rows in read_all_rows(raw, footer):
            seen[0] = seen[0].add(rows, footer.json)
            yield rows


COMPACTED_DDL: Final = (
    "object string, rows bigint, bytes bigint, sha256 string, stats string, status string, error string"
)
COMPACTED_SCHEMA: Final = pa.schema(
    [
        pa.field("object", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("bytes", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("stats", pa.string()),
        pa.field("status", pa.string()),
        pa.field("error", pa.string()),
    ]
)


class CompactionTask(NamedTuple):
    store: str
    stream_id: str
    inputs: tuple[tuple[str, str], ...]  # object and SHA-256, oldest first


class CompactionKernel(NamedTuple):
    """For `mapInArrow` over one row: joins segments and puts the result, one row about it out."""

    order: CompactionTask

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            yield pa.RecordBatch.from_pylist([self._row()], schema=COMPACTED_SCHEMA)

    def _row(self) -> dict[str, object]:
        """A segment that is not what was recorded is told apart: it is given up, the others are not."""
        try:
            raws = [_fetch_segment(self.order.store, *one) for one in self.order.inputs]
            hit_failpoint("after_fetch", "worker")
            return self._joined(raws)
        except _BadInputError as error:
            return _quarantine_row(error.key, error)
        except CorruptSegmentError as error:
            # Each is sound, and they do not belong together: without the first one others may.
            return _quarantine_row(self.order.inputs[0][0], error)

    def _joined(self, raws: list[bytes]) -> dict[str, object]:
        with tempfile.TemporaryDirectory(prefix="tailrace-compact-") as directory:
            path = Path(directory) / "segment.parquet"
            info = compact_segments(raws, path, secrets.token_hex(8))
            hit_failpoint("after_write", "worker")
            key = stream_prefix(self.order.stream_id) + info.key
            worker_stores().put(self.order.store, key, path.read_bytes())
        hit_failpoint("after_put", "worker")
        stats = {
            "epoch": info.epoch,
            "raw_bytes": info.payload_bytes,
            "first_ns": info.first_ns,
            "last_ns": info.last_ns,
        }
        return {
            "object": key,
            "rows": info.rows,
            "bytes": info.bytes,
            "sha256": info.sha256,
            "stats": msgspec.json.encode(stats).decode(),
            "status": BUILT,
            "error": "",
        }


class _BadInputError(Exception):
    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _fetch_segment(store: str, key: str, sha256: str) -> bytes:
    raw = worker_stores().get(store, key)
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise _BadInputError(key, "the segment does not have its SHA-256")
    try:
        for _ in read_all_rows(raw, file_footer(raw)):
            pass  # every page has its checksum
    except CorruptSegmentError as error:
        raise _BadInputError(key, str(error)) from None
    return raw


def _quarantine_row(key: str, error: Exception) -> dict[str, object]:
    return {
        "object": key,
        "rows": 0,
        "bytes": 0,
        "sha256": "",
        "stats": "{}",
        "status": UNDECODABLE,
        "error": str(error),
    }


class CompactionJob:
    def __init__(self, spark: SparkSession, store: str) -> None:
        self._spark: Any = spark
        self._store = store

    def run(self, stream: StreamPlan, work: CompactionWork) -> PublishRequest:
        """Joins the segments; the result is in the store, and not yet listed."""
        inputs = tuple((one.object, one.sha256) for one in work.segments)
        order = CompactionTask(self._store, stream.stream_id, inputs)
        frame = self._spark.createDataFrame([(0,)], "n int").coalesce(1)
        (row,) = frame.mapInArrow(CompactionKernel(order), COMPACTED_DDL).collect()
        return compaction_publish_request(stream, work, row)


def compaction_publish_request(stream: StreamPlan, work: CompactionWork, row: Any) -> PublishRequest:
    """The joined segment in the place of the others; or which of them cannot be joined."""
    added: list[PublishedObject] = []
    given_up: list[UnbuildableInput] = []
    if row["status"] == BUILT:
        stats = msgspec.json.decode(row["stats"], type=dict[str, int])
        sha256, size = row["sha256"], row["bytes"]
        added.append(
            PublishedObject(
                SEGMENT_FAMILY, work.first, work.last, row["rows"], row["object"], size, sha256, stats
            )
        )
    else:
        given_up.append(UnbuildableInput(row["object"], row["status"], row["error"]))
    return PublishRequest(
        stream_id=stream.stream_id,
        job="compact",
        plan_hash=stream.plan.hash,
        writer=WRITER,
        inputs=[PublishInput(one.object, one.sha256) for one in work.segments],
        add=added,
        replace=[one.object for one in work.segments] if added else [],
        quarantine=given_up,
    )
