"""An index file in Parquet format: metadata is checked, row groups are fetched and decoded on demand.

Of a file that is not in memory as a whole, the footer is fetched first. It has a checksum of itself and of
every block of the file, so that only verified bytes are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Any

import xxhash

from tailrace.common.caches import LruCache
from tailrace.search.index_files import format as names
from tailrace.search.index_files.file_cache import (
    ByteRange,
    FileContent,
    FileSlice,
    UnusableFileError,
    WholeFileRequiredError,
    read_exactly,
    split_by_size,
)
from tailrace.storage.segments import parquet, reader
from tailrace.storage.segments.model import FOOTER_GUESS_BYTES, CorruptSegmentError
from tailrace.storage.segments.parquet import PartialFile, pa, pq

_GROUP_OVERHEAD_BYTES = 2048  # of the parsed footer
_PARSED = 2  # further memory of a parsed footer for each of its bytes
_STAMP = names.FACT_FOOTER_XXH3.encode()
DECODED_BYTES_MAX = 4 << 20  # decoded row groups of one file, an LRU cache


def check_metadata(facts: dict[str, str], family: str, stream_id: str, first: int, last: int) -> None:
    """Reject a file of another family, stream or range, or in an unknown format."""
    try:
        form = int(facts[names.FACT_FORMAT])
        found = (
            facts[names.FACT_FAMILY],
            facts[names.FACT_STREAM_ID],
            int(facts[names.FACT_FIRST]),
            int(facts[names.FACT_LAST]),
        )
    except (KeyError, ValueError) as error:
        raise UnusableFileError(f"metadata is missing or invalid: {error}") from error
    if form != names.FORMATS[family]:
        whose = "a newer" if form > names.FORMATS[family] else "an older"
        raise UnusableFileError(f"{family} file has format {form}, of {whose} version of Tailrace")
    if found != (family, stream_id, first, last):
        raise UnusableFileError(
            f"file is {found[0]} of entries {found[2]} to {found[3]} of stream {found[1]}, "
            f"expected {family} of entries {first} to {last} of stream {stream_id}"
        )


class ParquetFile:
    """The row groups of one file. Recently decoded ones are cached and count as memory."""

    def __init__(self, body: FileContent) -> None:
        self._body = body
        self._file: Any = None
        self._blocks: _BlockChecksums | None = None
        self._footer_bytes = 0
        if body.is_whole:
            self._file = _open_parquet(body)
            self.metadata: Any = self._file.metadata
        else:
            self.metadata, self._footer_bytes = _read_footer(body)
            self._blocks = _BlockChecksums(self.facts)
        self.groups: int = self.metadata.num_row_groups
        # Not `metadata.schema`, which makes a reference cycle: footers of closed files would stay in memory
        # until the next garbage collection.
        self._schema: Any = (self._file or self._at(())).schema_arrow.remove_metadata()
        self._leaves: dict[str, int] = {}
        if self.groups:
            group = self.metadata.row_group(0)
            self._leaves = {group.column(at).path_in_schema: at for at in range(group.num_columns)}
        self._decoded: LruCache[tuple[int, tuple[str, ...]], Any] = LruCache(
            size_max=DECODED_BYTES_MAX, size_of=lambda _, table: table.nbytes, keep_newest=True
        )
        self._bounds: dict[tuple[int, str], tuple[Any, Any] | None] = {}  # by row group and column
        self._lock = Lock()  # the Parquet reader is shared by searches on several threads

    @property
    def names(self) -> list[str]:
        """The column names."""
        return self._schema.names

    @property
    def facts(self) -> dict[str, str]:
        found: dict[bytes, bytes] = self.metadata.metadata or {}
        try:
            return {key.decode(): value.decode() for key, value in found.items()}
        except UnicodeDecodeError as error:
            raise UnusableFileError("metadata is not valid UTF-8") from error

    @property
    def memory_bytes(self) -> int:
        parsed = _PARSED * self._footer_bytes + _GROUP_OVERHEAD_BYTES * (self.groups + 1)
        return self._body.held_bytes + self._decoded.size + parsed

    @property
    def size(self) -> int:
        """The size of the file."""
        return self._body.size

    def statistics(self, group: int, column: str) -> tuple[Any, Any] | None:
        """The smallest and largest value of a plain column in a row group; None if not known."""
        key = (group, column)
        if key not in self._bounds:
            found: Any = self.metadata.row_group(group).column(self._leaves[column]).statistics
            self._bounds[key] = (found.min, found.max) if found is not None and found.has_min_max else None
        return self._bounds[key]

    def leaf_bounds(self, column: str) -> tuple[Any, Any] | None:
        """The smallest and largest value in a column of lists; None if not known of every row group."""
        leaf = next((path for path in self._leaves if _is_of(path, (column,))), None)
        found = [] if leaf is None else [self.statistics(group, leaf) for group in range(self.groups)]
        known = [bounds for bounds in found if bounds is not None]
        if not known or len(known) < len(found):
            return None
        return min(least for least, _ in known), max(most for _, most in known)

    def leaf_is_full(self, column: str) -> bool:
        """Whether the statistics show that no list of a column is empty."""
        leaves = [path for path in self._leaves if _is_of(path, (column,))]
        return len(leaves) == 1 and not any(self.has_nulls(group, leaves[0]) for group in range(self.groups))

    def rows_in(self, group: int) -> int:
        rows: int = self.metadata.row_group(group).num_rows
        return rows

    def has_nulls(self, group: int, column: str) -> bool:
        found = self.metadata.row_group(group).column(self._leaves[column]).statistics
        return found is None or not found.has_null_count or found.null_count > 0

    def filters(self, groups: Sequence[int], column: str) -> list[bytes | None]:
        """The Bloom filter of a plain column in each of some row groups; None where there is none."""
        start = 0 if self._blocks is None else self._blocks.end
        [stretch] = self._body.stretches([(start, self.size)], self._are_indexes)
        found: list[bytes | None] = []
        for group in groups:
            column_chunk = self.metadata.row_group(group).column(self._leaves[column])
            at, length = column_chunk.bloom_filter_offset, column_chunk.bloom_filter_length
            if at is None or length is None:
                found.append(None)
                continue
            if not start <= at < at + parquet.BLOOM_BLOCK_BYTES <= at + length <= self.size:
                raise UnusableFileError("position of a Bloom filter is invalid")
            stored = stretch.data[at - stretch.start : at - stretch.start + length]
            found.append(bytes(parquet.bloom_bits(stored)))
        return found

    def _are_indexes(self, stretch: FileSlice) -> bool:
        """Whether the bytes between the row groups and the footer match their checksum."""
        try:
            reader.check_index(bytes(stretch.data), reader.footer_facts(self.metadata))
        except (CorruptSegmentError, ValueError):
            return False
        return True

    def tables(self, groups: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        """Row groups as tables with one chunk for each column. Adjacent ones are fetched together."""
        wanted = tuple(columns)
        for batch in self._batches(groups, wanted):
            with self._lock:
                missing = [group for group in batch if (group, wanted) not in self._decoded]
            file = self._reader(missing, wanted)
            for group in batch:
                table = self._known(group, wanted)
                if table is None:
                    # It may have been evicted in the meantime.
                    held = file if group in missing else self._reader([group], wanted)
                    table = self._decode_cached(group, wanted, held)
                yield table

    def group(self, group: int, columns: Sequence[str]) -> Any:
        """One of them."""
        [table] = self.tables([group], columns)
        return table

    def read_tables(self, groups: Sequence[int], columns: Sequence[str]) -> Iterator[Any]:
        """As `tables`, without the cache."""
        for batch in self._batches(groups, columns):
            file = self._reader(batch, columns)
            for group in batch:
                yield self._decode(file, [group], columns)

    def read_group(self, group: int, columns: Sequence[str]) -> Any:
        """One of them."""
        [table] = self.read_tables([group], columns)
        return table

    def read(self, columns: Sequence[str]) -> Any:
        """Whole columns, without the cache."""
        batches = self._batches(range(self.groups), columns)
        tables = [self._decode(self._reader(batch, columns), batch, columns) for batch in batches if batch]
        return pa.concat_tables(tables or [self._empty(columns)]).combine_chunks()

    def _empty(self, columns: Sequence[str]) -> Any:
        return self._schema.empty_table().select(list(columns))

    def _known(self, group: int, columns: tuple[str, ...]) -> Any:
        with self._lock:
            return self._decoded.get((group, columns))

    def _decode_cached(self, group: int, columns: tuple[str, ...], file: Any) -> Any:
        table = self._decode(file, [group], columns)
        with self._lock:
            self._decoded.put((group, columns), table)
        return table

    def _decode(self, file: Any, groups: Sequence[int], columns: Sequence[str]) -> Any:
        try:
            with self._lock if file is self._file else nullcontext():
                found = file.read_row_groups(list(groups), columns=list(columns), use_threads=False)
            return found.combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise UnusableFileError(f"row groups from {groups[0]} cannot be decoded: {error}") from error

    # -- byte ranges ---------------------------------------------------------------------------------------

    def _batches(self, groups: Sequence[int], columns: Sequence[str]) -> list[list[int]]:
        """Row groups in batches that are fetched together."""
        if self._blocks is None:
            return [list(groups)]
        sizes = [sum(stop - start for start, stop in self._ranges([group], columns)) for group in groups]
        return [[groups[place] for place in batch] for batch in split_by_size(sizes)]

    def _ranges(self, groups: Iterable[int], columns: Sequence[str]) -> list[ByteRange]:
        """The byte ranges of columns in row groups. A column of lists has several leaves."""
        leaves = [at for path, at in self._leaves.items() if _is_of(path, columns)]
        rows = map(self.metadata.row_group, groups)
        return [reader.column_range(row.column(at)) for row in rows for at in leaves]

    def _reader(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        """A Parquet reader over at least the bytes of these row groups."""
        if self._blocks is None:
            return self._file
        wanted = [self._blocks.around(found) for found in self._ranges(groups, columns)]
        return self._at(self._body.stretches(wanted, self._blocks.are_right) if wanted else ())

    def _at(self, held: Sequence[FileSlice]) -> Any:
        """A Parquet reader over these bytes only."""
        window = PartialFile(self._body.size, held)
        return pq.ParquetFile(window, metadata=self.metadata, pre_buffer=False)


class _BlockChecksums:
    """The checksums of all blocks of a file, up to its tail."""

    def __init__(self, facts: dict[str, str]) -> None:
        try:
            self._bytes = int(facts[names.FACT_BLOCK_BYTES])
            self.end = int(facts[names.FACT_CHECKED_BYTES])
            self._digests = facts[names.FACT_BLOCK_XXH3]
        except (KeyError, ValueError) as error:
            raise UnusableFileError(f"checksums are missing or invalid: {error}") from error
        if self._bytes <= 0 or len(self._digests) != 16 * -(-self.end // self._bytes):
            raise UnusableFileError("checksums do not cover every block")

    def around(self, wanted: ByteRange) -> ByteRange:
        """The whole blocks that contain a byte range."""
        start, stop = wanted
        if not 0 <= start <= stop <= self.end:
            raise UnusableFileError("position of a column is invalid")
        return start // self._bytes * self._bytes, min(-(-stop // self._bytes) * self._bytes, self.end)

    def are_right(self, stretch: FileSlice) -> bool:
        for at in range(0, len(stretch.data), self._bytes):
            block = (stretch.start + at) // self._bytes
            found = xxhash.xxh3_64_hexdigest(stretch.data[at : at + self._bytes])
            if found != self._digests[16 * block : 16 * block + 16]:
                return False
        return True


def _is_of(path: str, columns: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in columns)


def _open_parquet(body: FileContent) -> Any:
    [stretch] = body.stretches([(0, body.size)])
    try:
        return pq.ParquetFile(pa.BufferReader(pa.py_buffer(stretch.data)), pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise UnusableFileError(f"not a valid Parquet file: {error}") from error


def _read_footer(body: FileContent) -> tuple[Any, int]:
    """The verified and parsed footer of a file, and its size."""
    guess = min(body.size, FOOTER_GUESS_BYTES)
    end = read_exactly(body, body.size - guess, body.size)
    length = int.from_bytes(end[-8:-4], "little") + 8
    if end[-4:] != b"PAR1" or length > body.size:
        raise UnusableFileError("not a valid Parquet file")
    if length > guess:
        end = read_exactly(body, body.size - length, body.size)
    if _STAMP not in end:
        raise WholeFileRequiredError
    try:
        return reader.parse_tail(end), length
    except CorruptSegmentError as error:
        raise UnusableFileError(str(error)) from error


def column_array(table: Any, name: str) -> Any:
    """A column as one array."""
    column = table.column(name)
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks or [pa.array([], column.type)])
