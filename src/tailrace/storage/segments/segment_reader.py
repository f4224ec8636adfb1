"""Reads segments: a row group is found in the footer and decoded from just its own bytes.

No byte reaches a reader unchecked. The footer has a checksum of itself and one of every row group, and both
are compared before the library sees anything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from tailrace.storage.segments import block_filter, segment_tail
from tailrace.storage.segments.arrow import (
    BINARY,
    INT32,
    INT64,
    integer_array,
    integer_scalar,
    pa,
    pc,
    pq,
    to_python_array,
)
from tailrace.storage.segments.byte_window import PartialFile
from tailrace.storage.segments.segments import FORMAT_VERSION, CorruptSegmentError, SegmentRows

_TIME, _KEY, _PAYLOAD = 1, 3, 4
_READ = ["append_time", "append_ns", "payload", "key"]  # the numbers of entries follow from the first
_THOUSAND = integer_scalar(INT64, 1000)
_BEYOND = 1 << 40  # the end of every value
_GROUP_OVERHEAD_BYTES = 4096  # what the parsed footer costs in memory for each row group, roughly


class RowGroup(NamedTuple):
    first: int
    last: int
    start: int  # the first byte in the file
    stop: int  # the byte behind the last
    rows: int


class Footer:
    """The parsed footer of one segment, made from the bytes kept in the hot store."""

    def __init__(self, kept: bytes) -> None:
        self._tail = segment_tail.unpack_tail(kept)
        self.metadata = segment_tail.parse_tail(self._tail)
        self.facts = segment_tail.footer_facts(self.metadata)
        segment_tail.check_index(self._tail, self.facts)
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
        self._size = segment_tail.row_groups_end(self.metadata) + len(self._tail)
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
        ranges = [segment_tail.column_range(found.column(column)) for column in range(found.num_columns)]
        first = self._firsts[index]
        rows: int = found.num_rows
        return RowGroup(first, first + rows - 1, min(ranges)[0], max(stop for _, stop in ranges), rows)

    def digest(self, index: int) -> str:
        return self._digests[16 * index : 16 * index + 16]

    def find(self, entry: int) -> int:
        """The row group that holds an entry of this segment."""
        if not self.first <= entry <= self.last:
            raise ValueError(f"entry {entry} is not in {self.first} to {self.last}")
        return bisect_right(self._firsts, entry) - 1

    def group_bytes(self, index: int) -> int:
        """How large a row group is when it is unpacked."""
        size: int = self.metadata.row_group(index).total_byte_size
        return size

    def reach(self, index: int, bytes_ahead: int) -> int:
        """The last row group up to which, from `index` on, no more than so many bytes come out."""
        taken = self.group_bytes(index)
        while index + 1 < self.count:
            taken += self.group_bytes(index + 1)
            if taken > bytes_ahead:
                break
            index += 1
        return index

    def group_since(self, since_ns: int) -> int | None:
        """The first row group that can hold an entry appended at or after the instant."""
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
        """The row groups that can hold entries with this key; only some of them may be wrong guesses."""
        hashed = xxhash.xxh64_intdigest(key)
        return [index for index in range(self.count) if self._may_hold(index, key, hashed)]

    def next_with_key(self, key: bytes, index: int) -> int | None:
        """The first row group, from `index` on, that can hold entries with this key."""
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
        return block_filter.bloom_may_hold(block_filter.bloom_bits(stored), hashed)


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
            raise CorruptSegmentError(f"row group {index} does not have its checksum")
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
        # Arrow has a fast way to put something behind every value, and a slow one to join them.
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
