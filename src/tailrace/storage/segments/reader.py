"""Reading and checking segments: footer and checksums, decoding of row groups, verification of a file.

    ... last row group | Bloom filters, page indexes | footer | its length, u32 | PAR1
                         `------------- the tail, stored in the hot store ------------'

A row group is located by the footer and decoded from its own bytes only. No byte is used unchecked: the
footer has a checksum of itself and of every row group, and both are compared before pyarrow parses anything.
`footer_xxh3` covers the footer to the end of the file, with its own digits as zeros, so that it can be
checked before parsing; `index_xxh3` covers the bytes between the row groups and the footer.
"""

from __future__ import annotations

import hashlib
import re
import struct
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from tailrace.storage.segments import parquet
from tailrace.storage.segments.model import (
    FOOTER_GUESS_BYTES,
    FORMAT_VERSION,
    CorruptSegmentError,
    SegmentInfo,
    SegmentRows,
    segment_name,
)
from tailrace.storage.segments.parquet import (
    BINARY,
    INT32,
    INT64,
    PartialFile,
    integer_array,
    integer_scalar,
    pa,
    pc,
    pq,
    to_python_array,
)

BLANK_CHECKSUM = "0" * 16
GUESS_BYTES = FOOTER_GUESS_BYTES
_END = struct.Struct("<I4s")
_PACKED_LENGTH = struct.Struct("<I")
_MAGIC = b"PAR1"
_TAIL_BYTES_MAX = 256 << 20


def stamp_checksums(tail: bytearray) -> None:
    """Fill in the checksums of a tail that was just written."""
    start = _footer_start(tail)
    at = _digits(tail, start, b"tailrace.index_xxh3")
    tail[at : at + 16] = xxhash.xxh3_64_hexdigest(memoryview(tail)[:start]).encode()
    at = _digits(tail, start, b"tailrace.footer_xxh3")
    tail[at : at + 16] = xxhash.xxh3_64_hexdigest(memoryview(tail)[start:]).encode()


def pack_tail(tail: bytes | bytearray) -> bytes:
    """The stored form of a tail: footers are repetitive and compress to a quarter."""
    return _PACKED_LENGTH.pack(len(tail)) + pa.compress(tail, codec="zstd", asbytes=True)


def unpack_tail(stored: bytes) -> bytes:
    try:
        (size,) = _PACKED_LENGTH.unpack_from(stored)
        if size > _TAIL_BYTES_MAX:
            raise CorruptSegmentError(f"a footer of {size} bytes")
        return pa.decompress(
            stored[_PACKED_LENGTH.size :], decompressed_size=size, codec="zstd", asbytes=True
        )
    except (struct.error, OSError, ValueError) as error:
        raise CorruptSegmentError(f"the stored footer cannot be decompressed: {error}") from error


def parse_tail(tail: bytes) -> Any:
    """The parsed footer, if its checksum is correct. `tail` may start anywhere before it."""
    try:
        start = _footer_start(tail)
        at = _digits(tail, start, b"tailrace.footer_xxh3")
    except ValueError as error:
        raise CorruptSegmentError(f"this is not the end of a segment: {error}") from error
    blank = bytearray(tail[start:])
    blank[at - start : at - start + 16] = BLANK_CHECKSUM.encode()
    if xxhash.xxh3_64_hexdigest(blank).encode() != tail[at : at + 16]:
        raise CorruptSegmentError("the footer has a wrong checksum")
    # pyarrow requires a file: the magic and the footer are one.
    return pq.ParquetFile(pa.BufferReader(_MAGIC + tail[start:])).metadata


def check_index(tail: bytes, facts: dict[str, str]) -> None:
    """Checks Bloom filters and page indexes; `tail` starts at the first of them."""
    if xxhash.xxh3_64_hexdigest(memoryview(tail)[: _footer_start(tail)]) != facts.get("index_xxh3"):
        raise CorruptSegmentError("the indexes have a wrong checksum")


def find_tail(end: bytes, size: int) -> bytes | int:
    """The tail of a file of `size` bytes, found in its last bytes; or from where on more are needed."""
    length = len(end)
    if length < _END.size:
        raise CorruptSegmentError(f"a file of {size} bytes is not a segment")
    footer_bytes, magic = _END.unpack_from(end, length - _END.size)
    footer_start = size - _END.size - footer_bytes
    if magic != _MAGIC or footer_start < len(_MAGIC):
        raise CorruptSegmentError("this is not the end of a segment")
    if footer_start < size - length:
        return max(footer_start - GUESS_BYTES, 0)
    start = row_groups_end(parse_tail(end))
    if start < size - length:
        return start
    return end[start - (size - length) :]


def footer_facts(metadata: Any) -> dict[str, str]:
    """The facts of the segment in the footer, without the common prefix of the names."""
    pairs: dict[bytes, bytes] = metadata.metadata or {}
    return {key[9:].decode(): value.decode() for key, value in pairs.items() if key.startswith(b"tailrace.")}


def column_range(column: Any) -> tuple[int, int]:
    """The bytes of one column of one row group."""
    start: int = column.data_page_offset
    if column.has_dictionary_page:
        start = min(start, column.dictionary_page_offset)
    return start, start + column.total_compressed_size


def row_groups_end(metadata: Any) -> int:
    """Where the last row group ends and the tail starts."""
    last = metadata.row_group(metadata.num_row_groups - 1)
    return max(column_range(last.column(index))[1] for index in range(last.num_columns))


def _footer_start(tail: bytes | bytearray) -> int:
    if len(tail) < _END.size:
        raise ValueError("too short")
    footer_bytes, magic = _END.unpack_from(tail, len(tail) - _END.size)
    start = len(tail) - _END.size - footer_bytes
    if magic != _MAGIC or start < 0:
        raise ValueError("no footer")
    return start


def _digits(tail: bytes | bytearray, start: int, key: bytes) -> int:
    """Where the 16 digits of a checksum are: after its key, a type byte and a length byte."""
    marker = key + b"\x18\x10"
    at = tail.rindex(marker, start) + len(marker)
    if at + 16 > len(tail):
        raise ValueError("cut off")
    return at


_TIME, _KEY, _PAYLOAD = 1, 3, 4
_READ = ["append_time", "append_ns", "payload", "key"]  # the numbers of entries follow from the first
_THOUSAND = integer_scalar(INT64, 1000)
_BEYOND = 1 << 40  # the end of every value
_GROUP_OVERHEAD_BYTES = 4096  # what the parsed footer costs in memory for each row group, roughly


class RowGroup(NamedTuple):
    first: int
    last: int
    start: int  # the first byte in the file
    stop: int  # the byte after the last
    rows: int


class Footer:
    """The parsed footer of one segment, from the bytes stored in the hot store."""

    def __init__(self, stored: bytes) -> None:
        self._tail = unpack_tail(stored)
        self.metadata = parse_tail(self._tail)
        self.facts = footer_facts(self.metadata)
        check_index(self._tail, self.facts)
        try:
            version = int(self.facts["version"])
            self.epoch = int(self.facts["epoch"])
            self.first = int(self.facts["first"])
            self._digests = self.facts["row_group_xxh3"]
        except (KeyError, ValueError) as error:
            raise CorruptSegmentError(f"the footer lacks a fact: {error}") from error
        if version > FORMAT_VERSION:
            raise CorruptSegmentError(f"the segment has format {version}, of a newer version of Tailrace")
        self.count: int = self.metadata.num_row_groups
        firsts = [self.first]
        for index in range(self.count):
            firsts.append(firsts[-1] + self.metadata.row_group(index).num_rows)
        self.last = firsts.pop() - 1
        self._firsts = firsts
        self._size = row_groups_end(self.metadata) + len(self._tail)
        if len(self._digests) != 16 * self.count:
            raise CorruptSegmentError("the footer lacks the checksum of a row group")

    @property
    def memory_bytes(self) -> int:
        return len(self._tail) + _GROUP_OVERHEAD_BYTES * self.count

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._size

    @cached_property
    def json(self) -> bool:
        column = self.metadata.schema.column(_PAYLOAD)
        return str(column.logical_type.type) == "STRING"

    @cached_property
    def row_groups(self) -> list[RowGroup]:
        return [self.group(index) for index in range(self.count)]

    def group(self, index: int) -> RowGroup:
        found = self.metadata.row_group(index)
        ranges = [column_range(found.column(column)) for column in range(found.num_columns)]
        first = self._firsts[index]
        rows: int = found.num_rows
        return RowGroup(first, first + rows - 1, min(ranges)[0], max(stop for _, stop in ranges), rows)

    def digest(self, index: int) -> str:
        return self._digests[16 * index : 16 * index + 16]

    def find(self, entry: int) -> int:
        """The row group of an entry of this segment."""
        if not self.first <= entry <= self.last:
            raise ValueError(f"entry {entry} is not in {self.first} to {self.last}")
        return bisect_right(self._firsts, entry) - 1

    def group_bytes(self, index: int) -> int:
        """How large a row group is when it is unpacked."""
        size: int = self.metadata.row_group(index).total_byte_size
        return size

    def reach(self, index: int, bytes_ahead: int) -> int:
        """The last row group up to which, from `index` on, no more than so many bytes are decoded."""
        taken = self.group_bytes(index)
        while index + 1 < self.count:
            taken += self.group_bytes(index + 1)
            if taken > bytes_ahead:
                break
            index += 1
        return index

    def group_since(self, since_ns: int) -> int | None:
        """The first row group that can have an entry appended at or after the instant."""
        since_us = since_ns // 1000
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            newest = self.metadata.row_group(middle).column(_TIME).statistics.max_raw
            if newest < since_us:
                low = middle + 1
            else:
                high = middle
        return low if low < self.count else None

    def groups_with_key(self, key: bytes) -> list[int]:
        """The row groups that can have entries with this key; false positives are possible."""
        hashed = xxhash.xxh64_intdigest(key)
        return [index for index in range(self.count) if self._may_hold(index, key, hashed)]

    def next_with_key(self, key: bytes, index: int) -> int | None:
        """The first row group, from `index` on, that can have entries with this key."""
        hashed = xxhash.xxh64_intdigest(key)
        while index < self.count and not self._may_hold(index, key, hashed):
            index += 1
        return index if index < self.count else None

    def has_keys(self, index: int) -> bool:
        """Whether any entry of a row group may have a key."""
        column = self.metadata.row_group(index).column(_KEY)
        statistics = column.statistics
        return (
            statistics is None or not statistics.has_null_count or statistics.null_count < column.num_values
        )

    def _may_hold(self, index: int, key: bytes, hashed: int) -> bool:
        if not self.has_keys(index):
            return False
        column = self.metadata.row_group(index).column(_KEY)
        statistics = column.statistics
        if statistics is not None and statistics.has_min_max:
            if not statistics.min <= key <= statistics.max:
                return False
        if column.bloom_filter_offset is None:
            return True
        start = column.bloom_filter_offset - (self._size - len(self._tail))
        stored = memoryview(self._tail)[start : start + column.bloom_filter_length]
        return parquet.bloom_may_hold(parquet.bloom_bits(stored), hashed)


def read_row_group(footer: Footer, index: int, raw: bytes | memoryview) -> SegmentRows:
    """The rows of one row group. `raw` is its bytes of the file, from `start` to `stop`."""
    return read_row_groups(footer, [index], raw)[0]


def read_row_groups(footer: Footer, indices: Sequence[int], raw: bytes | memoryview) -> list[SegmentRows]:
    """The rows of adjacent row groups, by row group. `raw` is all of their bytes."""
    tables = read_tables(footer, indices, raw, _READ)
    firsts = [footer.group(index).first for index in indices]
    return [_decode_rows(table, first, footer.json) for table, first in zip(tables, firsts, strict=True)]


def read_payloads(
    footer: Footer, index: int, raw: bytes | memoryview, entries: Sequence[int]
) -> dict[int, bytes]:
    """The payloads of some entries of one row group."""
    payload = _join_column(read_tables(footer, [index], raw, ["payload"])[0], "payload")
    first = footer.group(index).first
    return {entry: payload[entry - first].as_buffer().to_pybytes() for entry in entries}


def read_tables(
    footer: Footer, indices: Sequence[int], raw: bytes | memoryview, columns: Sequence[str]
) -> list[Any]:
    """Adjacent row groups as Arrow tables. A group in which no entry has a key lacks that column."""
    groups = [footer.group(index) for index in indices]
    start, stop = groups[0].start, groups[-1].stop
    view = memoryview(raw)
    for index, group in zip(indices, groups, strict=True):
        own = view[group.start - start : group.stop - start]
        if len(view) != stop - start or xxhash.xxh3_64_hexdigest(own) != footer.digest(index):
            raise CorruptSegmentError(f"row group {index} has a wrong checksum")
    keyless = [name for name in columns if name != "key"]
    try:
        file = pq.ParquetFile(
            PartialFile(footer.size, [(start, raw)]),
            metadata=footer.metadata,
            read_dictionary=["key"],
            pre_buffer=False,
        )
        return [
            file.read_row_group(
                index, columns=list(columns) if footer.has_keys(index) else keyless, use_threads=False
            )
            for index in indices
        ]
    except (pa.ArrowException, OSError) as error:
        raise CorruptSegmentError(f"row groups from {indices[0]} cannot be decoded: {error}") from error


def _decode_rows(table: Any, first: int, json: bool) -> SegmentRows:
    count: int = table.num_rows
    payload = _join_column(table, "payload")
    if json:
        # Arrow appends a suffix to every value quickly, but joins values slowly.
        payload = pa.Array.from_buffers(BINARY, count, payload.buffers(), offset=payload.offset)
        payload = pc.binary_replace_slice(payload, _BEYOND, _BEYOND, b",")
    _, positions, data = payload.buffers()
    skipped: int = payload.offset
    offsets = integer_array(INT32, positions.slice(4 * skipped), count + 1)
    at: memoryview[int] = memoryview(positions).cast("i")
    begin, end = at[skipped], at[skipped + count] - json
    ends = offsets.slice(1)
    if begin + json:
        ends = pc.subtract(ends, pa.scalar(begin + json, INT32))
    body = b"" if data is None else data.slice(begin, end - begin).to_pybytes()
    micros = _join_column(table, "append_time").view(INT64)
    times = pc.add(pc.multiply(micros, _THOUSAND), _join_column(table, "append_ns"))
    keys = _decode_keys(_join_column(table, "key")) if "key" in table.column_names else None
    return SegmentRows(first, body, to_python_array("I", ends), to_python_array("q", times), keys)


def _join_column(table: Any, name: str) -> Any:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _decode_keys(column: Any) -> list[bytes | None] | None:
    """The keys by row; one object for each distinct key."""
    if column.null_count == len(column):
        return None
    distinct: list[bytes | None] = column.dictionary.to_pylist()
    indices: list[int | None] = column.indices.to_pylist()
    return [None if index is None else distinct[index] for index in indices]


_SEGMENT_NAME = re.compile(r"(\d{10})-(\d{20})-(\d{20})\.([0-9a-f]{16})\.parquet$")


def file_footer(raw: bytes) -> Footer:
    """The footer of a file that is there as a whole."""
    tail = find_tail(raw, len(raw))
    assert isinstance(tail, bytes), "the whole file was read"
    return Footer(pack_tail(tail))


def read_all_rows(raw: bytes, footer: Footer) -> Iterator[SegmentRows]:
    view = memoryview(raw)
    for index, group in enumerate(footer.row_groups):
        yield read_row_group(footer, index, view[group.start : group.stop])


def describe_entries(raw: bytes) -> Iterator[dict[str, object]]:
    """Every entry for display: bytes that are not text are in base64."""
    footer = file_footer(raw)
    separator = 1 if footer.json else 0
    for rows in read_all_rows(raw, footer):
        start = 0
        for index, end in enumerate(rows.ends):
            shown: dict[str, object] = {"entry": rows.first + index, "time_ns": rows.times[index]}
            key = None if rows.keys is None else rows.keys[index]
            if key is not None:
                shown |= _describe_value("key", key)
            yield shown | _describe_value("payload", rows.body[start:end])
            start = end + separator


def _describe_value(name: str, value: bytes) -> dict[str, str]:
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(value).decode()}


def check_segment(raw: bytes, info: SegmentInfo) -> list[str]:
    """Everything that is wrong with a file that should be the recorded segment; nothing, if all is well."""
    try:
        sha256 = hashlib.sha256(raw).hexdigest()
        problems = [] if sha256 == info.sha256 else [f"its SHA-256 is {sha256}, recorded is {info.sha256}"]
        footer = file_footer(raw)
        problems += _differences(footer, info, len(raw))
        payload = hashlib.sha256()
        payload_bytes = 0
        first_ns = last_ns = None
        for rows in read_all_rows(raw, footer):
            payload_bytes += _add_payload(payload, rows, footer.json)
            first_ns = rows.times[0] if first_ns is None else first_ns
            last_ns = rows.times[-1]
    except CorruptSegmentError as error:
        return [str(error)]
    if payload.hexdigest() != footer.facts["payload_sha256"]:
        problems.append("its payloads have a wrong checksum")
    if (payload_bytes, first_ns, last_ns) != (info.payload_bytes, info.first_ns, info.last_ns):
        problems.append("its payload bytes or append times are not the recorded ones")
    return problems


def describe_segment(raw: bytes, name: str) -> dict[str, Any]:
    """The content of a file for people, with a `problem` if it is damaged."""
    described: dict[str, Any] = {"file": name, "bytes": len(raw)}
    try:
        footer = file_footer(raw)
        described |= {
            "sha256": hashlib.sha256(raw).hexdigest(),
            **{fact: footer.facts.get(fact) for fact in ("version", "name", "stream_id", "content_type")},
            "json": footer.json,
            "epoch": footer.epoch,
            "first": footer.first,
            "last": footer.last,
            "rows": footer.last - footer.first + 1,
            "payload_sha256": footer.facts.get("payload_sha256"),
            "row_groups": [group._asdict() for group in footer.row_groups],
        }
        info = _as_described(described, raw, footer)
        described |= {"payload_bytes": info.payload_bytes, "first_ns": info.first_ns, "last_ns": info.last_ns}
        problems = check_segment(raw, info)
        named = _SEGMENT_NAME.search(name)
        if named and not info.key.endswith(named[0]):
            problems.append(f"its name does not match its content, which is {info.key}")
    except CorruptSegmentError as error:
        problems = [str(error)]
    if problems:
        described["problem"] = "; ".join(problems)
    return described


def _as_described(described: dict[str, Any], raw: bytes, footer: Footer) -> SegmentInfo:
    """The recorded fields of a file according to its own footer."""
    first_ns = last_ns = payload_bytes = 0
    for rows in read_all_rows(raw, footer):
        first_ns = rows.times[0] if rows.first == footer.first else first_ns
        last_ns = rows.times[-1]
        payload_bytes += len(rows.body) - (len(rows.ends) - 1 if footer.json else 0)
    epoch, first, last, sha256 = footer.epoch, footer.first, footer.last, described["sha256"]
    return SegmentInfo(
        key=segment_name(epoch, first, last, sha256),
        epoch=epoch,
        first=first,
        last=last,
        rows=described["rows"],
        bytes=len(raw),
        payload_bytes=payload_bytes,
        sha256=sha256,
        first_ns=first_ns,
        last_ns=last_ns,
    )


def _differences(footer: Footer, info: SegmentInfo, size: int) -> list[str]:
    found = {"epoch": footer.epoch, "first": footer.first, "last": footer.last, "bytes": size}
    found["rows"] = footer.last - footer.first + 1
    said = {name: footer.facts.get(name) for name in ("epoch", "first", "last", "rows")}
    return [
        f"its {name} is {value}, recorded is {getattr(info, name)}"
        for name, value in found.items()
        if value != getattr(info, name) or said.get(name, str(value)) != str(value)
    ]


def _add_payload(digest: Any, rows: SegmentRows, json: bool) -> int:
    """Hashes the entries of some rows without separators; returns their size in bytes."""
    if not json:
        digest.update(rows.body)
        return len(rows.body)
    body = memoryview(rows.body)
    start = 0
    for end in rows.ends:
        digest.update(body[start:end])
        start = end + 1
    return len(body) - (len(rows.ends) - 1)
