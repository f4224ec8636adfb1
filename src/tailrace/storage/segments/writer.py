"""Writing segments: rows in, a synced Parquet file and its footer out.

Works on one row group at a time, so its memory does not grow with the segment, and passes whole buffers to
Arrow: no Python object is created per entry, except for its key.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from tailrace.storage.segments import reader
from tailrace.storage.segments.model import (
    FORMAT_VERSION,
    SegmentFile,
    SegmentInfo,
    SegmentRows,
    segment_name,
)
from tailrace.storage.segments.parquet import (
    BINARY,
    INT16,
    INT32,
    INT64,
    MICROS,
    STRING,
    integer_array,
    pa,
    pc,
    pq,
)

GROUP_ROWS_MAX = 1024
GROUP_BYTES_MAX = 1 << 20
BLOOM_KEYS_MIN = 64
BLOOM_FALSE_POSITIVES = 0.05
_ZSTD_LEVEL = 1  # level 3 is a third slower and saves nothing on the measured payloads
_BODY_BYTES_MAX = (1 << 31) - 1  # of one run of rows: Arrow's positions are 32 bits

_ZERO = integer_array(INT32, array("i", [0]), 1)

COLUMNS = ("entry", "append_time", "append_ns", "key", "payload")


def write_segment(
    rows: Iterable[SegmentRows],
    path: Path,
    *,
    name: str,
    stream_id: str,
    epoch: int,
    json: bool,
    content_type: str | None = None,
    schema_versions: str = "",
    attempt: str = "",
) -> SegmentFile:
    """Write consecutive rows of one stream to a new file. When it returns, the bytes are on disk."""
    if "\x18" in name + (content_type or ""):
        raise ValueError("a name contains a control character")  # it marks the checksums in the footer
    facts = {"name": name, "stream_id": stream_id, "epoch": str(epoch), "content_type": content_type or ""}
    if schema_versions:
        facts["schema_versions"] = schema_versions
    if attempt:
        facts["attempt"] = attempt  # makes every file unique: an orphan is never named later
    with path.open("wb", buffering=0) as file:
        sink = _Sink(file.fileno())
        with _ParquetWriter(sink, json) as writer:
            for group in _groups(rows, 1 if json else 0):
                writer.write(group)
            if writer.rows == 0:
                raise ValueError("a segment must have at least one entry")
            footer = writer.finish(facts)
        os.fsync(file.fileno())
    sha256 = sink.sha256.hexdigest()
    info = SegmentInfo(
        key=segment_name(epoch, writer.first, writer.last, sha256),
        epoch=epoch,
        first=writer.first,
        last=writer.last,
        rows=writer.rows,
        bytes=sink.position,
        payload_bytes=writer.payload_bytes,
        sha256=sha256,
        first_ns=writer.first_ns,
        last_ns=writer.last_ns,
    )
    return SegmentFile(info, footer)


class _PendingGroup:
    """The rows of one row group, collected from the runs they arrived in."""

    __slots__ = ("bytes", "ends", "first", "has_keys", "keys", "parts", "times")

    def __init__(self, first: int) -> None:
        self.first = first
        self.parts: list[memoryview] = []
        self.ends: list[Any] = []  # positions in the joined parts
        self.times: array[int] = array("q")
        self.keys: list[bytes | None] = []
        self.has_keys = False
        self.bytes = 0

    @property
    def rows(self) -> int:
        return len(self.times)

    def append(self, run: SegmentRows, start: int, stop: int, separator: int) -> None:
        begin = run.ends[start - 1] + separator if start else 0
        end = run.ends[stop - 1]
        ends = integer_array(INT32, memoryview(run.ends)[start:stop], stop - start)
        self.ends.append(pc.add(ends, pa.scalar(self.bytes - begin + separator, INT32)))
        self.parts.append(memoryview(run.body)[begin:end])
        self.bytes += end - begin + separator
        self.times.extend(run.times[start:stop])
        if run.keys is None:
            self.keys.extend([None] * (stop - start))
        else:
            self.keys.extend(run.keys[start:stop])
            self.has_keys = True


def _groups(rows: Iterable[SegmentRows], separator: int) -> Iterator[_PendingGroup]:
    """Cut runs of rows into row groups: at most so many rows, and so many bytes unless one row has more."""
    group: _PendingGroup | None = None
    following: int | None = None
    for run in rows:
        count = len(run.ends)
        if following is not None and run.first != following:
            raise ValueError(f"entry {following} is missing: the next rows start at {run.first}")
        if count == 0 or count != len(run.times) or len(run.body) > _BODY_BYTES_MAX:
            raise ValueError(f"the rows that start at {run.first} cannot be stored")
        following = run.first + count
        at = 0
        while at < count:
            if group is None:
                group = _PendingGroup(run.first + at)
            begin = run.ends[at - 1] + separator if at else 0
            room = begin + GROUP_BYTES_MAX - group.bytes
            reach = min(count, at + GROUP_ROWS_MAX - group.rows)
            stop = bisect_right(run.ends, room, at, reach)
            if stop == at and group.rows == 0:
                stop = at + 1
            if stop > at:
                group.append(run, at, stop, separator)
                at = stop
            if at < count or group.rows == GROUP_ROWS_MAX:
                yield group
                group = None
    if group is not None:
        yield group


class _Sink:
    """The file Arrow writes to, in many small pieces that are written and hashed together.

    It buffers what comes after the row groups: that part still gets its checksums.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self.position = 0
        self.sha256 = hashlib.sha256()
        self.closed = False

    def write(self, data: bytes) -> int:
        self._pieces.append(data)
        self._held_bytes += len(data)
        return len(data)

    def drain(self) -> bytes:
        """Everything since the last time; it is for the caller to put."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self._held_bytes = 0
        return taken

    def put(self, data: bytes | bytearray) -> None:
        self.sha256.update(data)
        view = memoryview(data)
        self.position += len(view)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def tell(self) -> int:
        return self.position + self._held_bytes

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Row groups are written when they are complete; the file is synced at the end."""

    def close(self) -> None:
        self.closed = True


class _ParquetWriter:
    """One Parquet file being written. The options of the library need the first row group to be chosen."""

    def __init__(self, sink: _Sink, json: bool) -> None:
        self._sink = sink
        self._json = json
        self._payload = STRING if json else BINARY
        self._parquet: Any = None
        self._digests: list[str] = []
        self._sha256 = hashlib.sha256()
        self.rows = 0
        self.payload_bytes = 0
        self.first = self.first_ns = self.last_ns = 0

    @property
    def last(self) -> int:
        return self.first + self.rows - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._parquet is not None:
            self._parquet.close()  # else it would complain later; what it still writes is dropped

    def write(self, group: _PendingGroup) -> None:
        count = group.rows
        if self._parquet is None:
            self.first, self.first_ns = group.first, group.times[0]
            self._parquet = _open_writer(self._sink, self._payload, group)
            self._sink.put(self._sink.drain())
        payload = self._payloads(group)
        micros, nanos = _split_times(integer_array(INT64, group.times, count))
        entries = integer_array(INT64, array("q", range(group.first, group.first + count)), count)
        keys = pa.array(group.keys, BINARY) if group.has_keys else pa.nulls(count, BINARY)
        table = pa.table([entries, micros, nanos, keys, payload], schema=self._parquet.schema)
        self._parquet.write_table(table, row_group_size=count)
        written = self._sink.drain()
        self._sink.put(written)
        self._digests.append(xxhash.xxh3_64_hexdigest(written))
        self.rows += count
        self.last_ns = group.times[-1]

    def finish(self, facts: dict[str, str]) -> bytes:
        """Writes the rest of the file, and returns it in its stored form: filters, page indexes, footer."""
        facts = {
            "version": str(FORMAT_VERSION),
            **facts,
            "first": str(self.first),
            "last": str(self.last),
            "rows": str(self.rows),
            "payload_sha256": self._sha256.hexdigest(),
            "row_group_xxh3": "".join(self._digests),
            "index_xxh3": reader.BLANK_CHECKSUM,
            "footer_xxh3": reader.BLANK_CHECKSUM,
        }
        self._parquet.add_key_value_metadata({f"tailrace.{key}": value for key, value in facts.items()})
        self._parquet.close()
        tail = bytearray(self._sink.drain())
        reader.stamp_checksums(tail)
        self._sink.put(tail)
        return reader.pack_tail(tail)

    def _payloads(self, group: _PendingGroup) -> Any:
        """The payload column: the joined entries and where each ends, without their commas."""
        count = group.rows
        ends = pa.concat_arrays([_ZERO, *group.ends])
        positions = ends.buffers()[1]
        if not self._json:
            body = b"".join(group.parts)
            self._count(body)
            return pa.Array.from_buffers(self._payload, count, [None, positions, pa.py_buffer(body)])
        body = pa.py_buffer(b",".join([*group.parts, b""]))
        with_commas = pa.Array.from_buffers(BINARY, count, [None, positions, body])
        plain = pc.binary_slice(with_commas, 0, -1).buffers()
        data = plain[2] or pa.py_buffer(b"")
        self._count(data.slice(0, group.bytes - count))
        return pa.Array.from_buffers(self._payload, count, [None, plain[1], data])

    def _count(self, payload: Any) -> None:
        self._sha256.update(payload)
        self.payload_bytes += len(payload)


def _open_writer(sink: _Sink, payload: Any, first: _PendingGroup) -> Any:
    """The library's writer. Integers are packed so well that compressing them again only costs time."""
    fields = [
        pa.field("entry", INT64, nullable=False),
        pa.field("append_time", MICROS, nullable=False),
        pa.field("append_ns", INT16, nullable=False),
        pa.field("key", BINARY),
        pa.field("payload", payload, nullable=False),
    ]
    integers = COLUMNS[:3]
    # A filter sized by the first row group. A stream that has no keys there gets none: it is only a shortcut.
    distinct = len(set(first.keys) - {None})
    bloom = {"ndv": max(distinct, BLOOM_KEYS_MIN), "fpp": BLOOM_FALSE_POSITIVES}
    return pq.ParquetWriter(
        sink,
        pa.schema(fields),
        use_dictionary=["key"],
        column_encoding={**dict.fromkeys(integers, "DELTA_BINARY_PACKED"), "payload": "PLAIN"},
        compression={**dict.fromkeys(integers, "none"), "key": "zstd", "payload": "zstd"},
        compression_level={"key": _ZSTD_LEVEL, "payload": _ZSTD_LEVEL},
        write_statistics=["entry", "append_time", "key"],
        write_page_index=True,
        write_page_checksum=True,
        bloom_filter_options={"key": bloom} if distinct else None,
        sorting_columns=[pq.SortingColumn(0)],
        store_schema=False,
        data_page_size=GROUP_BYTES_MAX,
    )


def _split_times(times: Any) -> tuple[Any, Any]:
    """Microseconds and the 0 to 999 nanoseconds below them, also before 1970."""
    thousand = pa.scalar(1000, INT64)
    micros = pc.divide(times, thousand)
    nanos = pc.subtract(times, pc.multiply(micros, thousand))
    if pc.min(nanos).as_py() < 0:
        below = pc.less(nanos, pa.scalar(0, INT64))
        micros = pc.subtract(micros, below.cast(INT64))
        nanos = pc.if_else(below, pc.add(nanos, thousand), nanos)
    return micros.view(MICROS), nanos.cast(INT16)
