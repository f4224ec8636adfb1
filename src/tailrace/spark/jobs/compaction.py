"""Segment compaction: adjacent small segments merged into one, verified, and published to the server.

Entries do not change: number, time, key and payload of all of them are hashed while they are read and again
from the written file, and both sums must be equal. `CompactionJob` runs on the driver, `CompactionKernel` in
a task.
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


RAW_BYTES_MAX: Final = 256 << 20  # uncompressed, all columns; the server plans well below this

# Footer facts that must be equal in all inputs, and are copied to the output.
_COMMON_FACTS: Final = ("name", "stream_id", "epoch", "content_type")
_MODULUS: Final = 1 << 128


class EntriesChecksum(NamedTuple):
    """The sum of the hashes of all entries, independent of how they are cut into segments."""

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
    # The length separates the key from the payload, and no key (-1) from an empty one.
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
    """Write adjacent segments of one epoch and schema version, oldest first, to one file at `path`.

    Raises CorruptSegmentError if the inputs are not such segments, or if the file differs from the inputs.
    """
    footers = [file_footer(raw) for raw in raws]
    facts = _check_common_facts(footers)
    if sum(_raw_bytes(footer) for footer in footers) > RAW_BYTES_MAX:
        raise CorruptSegmentError(f"segments are too large to merge: more than {RAW_BYTES_MAX} bytes")
    seen = [EMPTY_CHECKSUM]
    written = write_segment(
        _rows_with_checksum(zip(raws, footers, strict=True), seen),
        path,
        name=facts["name"],
        stream_id=facts["stream_id"],
        epoch=footers[0].epoch,
        json=footers[0].json,
        content_type=facts["content_type"] or None,
        schema_versions=_merged_schema_versions(footers),
        attempt=attempt,
    )
    if compute_checksum(path.read_bytes()) != seen[0]:
        raise CorruptSegmentError("merged segment does not have the entries of its inputs")
    return written.info


def _check_common_facts(footers: Sequence[Footer]) -> dict[str, str]:
    facts = {name: footers[0].facts.get(name, "") for name in _COMMON_FACTS}
    following = footers[0].first
    for footer in footers:
        if any(footer.facts.get(name, "") != value for name, value in facts.items()):
            raise CorruptSegmentError("segments of different streams or epochs cannot be merged")
        if footer.first != following or footer.json != footers[0].json:
            raise CorruptSegmentError(f"entry {following} is missing between two segments")
        following = footer.last + 1
    return facts


def _merged_schema_versions(footers: Sequence[Footer]) -> str:
    """The `schema_versions` fact of the merged segment: one version from its first entry.

    Segments sealed before the stream had a schema lack the fact; later ones have version 0.
    """
    facts = [footer.facts.get("schema_versions", "") for footer in footers]
    if not any(facts):
        return ""
    versions = {_schema_version(fact) for fact in facts}
    if len(versions) != 1:
        raise CorruptSegmentError("segments of different schema versions cannot be merged")
    return msgspec.json.encode([(footers[0].first, *versions)]).decode()


def _schema_version(fact: str) -> int:
    try:
        pairs = msgspec.json.decode(fact, type=list[tuple[int, int]]) if fact else [(0, 0)]
    except msgspec.MsgspecError as error:
        raise CorruptSegmentError(f"invalid schema_versions in segment: {error}") from None
    if len(pairs) != 1:
        raise CorruptSegmentError("a segment with several schema versions cannot be merged")
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
    """For `mapInArrow` over one row: merges segments, stores the result, and returns one row about it."""

    task: CompactionTask

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            yield pa.RecordBatch.from_pylist([self._row()], schema=COMPACTED_SCHEMA)

    def _row(self) -> dict[str, object]:
        """A corrupt input is quarantined alone; the other inputs can be merged later."""
        try:
            raws = [_fetch_segment(self.task.store, *one) for one in self.task.inputs]
            hit_failpoint("after_fetch", "worker")
            return self._merge(raws)
        except _BadInputError as error:
            return _quarantine_row(error.key, error)
        except CorruptSegmentError as error:
            # The inputs are valid but cannot be merged: without the first one, the others may.
            return _quarantine_row(self.task.inputs[0][0], error)

    def _merge(self, raws: list[bytes]) -> dict[str, object]:
        with tempfile.TemporaryDirectory(prefix="tailrace-compact-") as directory:
            path = Path(directory) / "segment.parquet"
            info = compact_segments(raws, path, secrets.token_hex(8))
            hit_failpoint("after_write", "worker")
            key = stream_prefix(self.task.stream_id) + info.key
            worker_stores().put(self.task.store, key, path.read_bytes())
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
        raise _BadInputError(key, "segment checksum mismatch")
    try:
        for _ in read_all_rows(raw, file_footer(raw)):
            pass  # reading verifies the checksum of every page
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
        """Merge the segments. The result is stored, and must be published to become visible."""
        inputs = tuple((one.object, one.sha256) for one in work.segments)
        task = CompactionTask(self._store, stream.stream_id, inputs)
        frame = self._spark.createDataFrame([(0,)], "n int").coalesce(1)
        (row,) = frame.mapInArrow(CompactionKernel(task), COMPACTED_DDL).collect()
        return compaction_publish_request(stream, work, row)


def compaction_publish_request(stream: StreamPlan, work: CompactionWork, row: Any) -> PublishRequest:
    """Replaces the inputs by the merged segment, or quarantines the input that cannot be merged."""
    added: list[PublishedObject] = []
    quarantined: list[UnbuildableInput] = []
    if row["status"] == BUILT:
        stats = msgspec.json.decode(row["stats"], type=dict[str, int])
        sha256, size = row["sha256"], row["bytes"]
        added.append(
            PublishedObject(
                SEGMENT_FAMILY, work.first, work.last, row["rows"], row["object"], size, sha256, stats
            )
        )
    else:
        quarantined.append(UnbuildableInput(row["object"], row["status"], row["error"]))
    return PublishRequest(
        stream_id=stream.stream_id,
        job="compact",
        plan_hash=stream.plan.hash,
        writer=WRITER,
        inputs=[PublishInput(one.object, one.sha256) for one in work.segments],
        add=added,
        replace=[one.object for one in work.segments] if added else [],
        quarantine=quarantined,
    )
