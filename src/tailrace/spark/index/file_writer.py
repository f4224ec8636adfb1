"""Writer of index files: Parquet with block checksums and file metadata.

The same rows give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import xxhash

from tailrace import __version__
from tailrace.search.index_files.format import (
    BLOCK_BYTES,
    FACT_BLOCK_BYTES,
    FACT_BLOCK_XXH3,
    FACT_CHECKED_BYTES,
    FACT_FAMILY,
    FACT_FIRST,
    FACT_FOOTER_XXH3,
    FACT_FORMAT,
    FACT_INDEX_XXH3,
    FACT_LAST,
    FACT_PLAN_HASH,
    FACT_ROWS,
    FACT_STREAM_ID,
    FACT_WRITER,
    FORMATS,
)
from tailrace.storage.segments import reader
from tailrace.storage.segments.parquet import pa, pq

WRITER: Final = f"tailrace-pipeline/{__version__}"
# Our readers always read neighbouring pages too, and each page is compressed alone: short pages are larger
# and slower to write. Pages exist for other programs that use page indexes.
PAGE_ROWS_MAX: Final = 4096
# One byte per value. Filter sizes are powers of two: a lower rate would double the size.
BLOOM_FALSE_POSITIVES: Final = 0.026
BLOOM_VALUES_MIN: Final = 64

_ZSTD_LEVEL: Final = 1
# Parquet writes hundreds of small pieces: Arrow buffers them before they are passed to Python.
_WRITE_BUFFER_BYTES: Final = 1 << 18


class IndexedRange(NamedTuple):
    """The entries that an index file covers, and the plan that it was built by."""

    stream_id: str
    first: int
    last: int
    rows: int
    plan_hash: str


class BuiltIndexFile(NamedTuple):
    """A complete index file of one family."""

    family: str
    data: bytes
    rows: int  # number of entries it covers
    stats: dict[str, int]


def build_file_facts(family: str, covers: IndexedRange) -> dict[str, str]:
    return {
        FACT_FORMAT: str(FORMATS[family]),
        FACT_FAMILY: family,
        FACT_STREAM_ID: covers.stream_id,
        FACT_FIRST: str(covers.first),
        FACT_LAST: str(covers.last),
        FACT_ROWS: str(covers.rows),
        FACT_PLAN_HASH: covers.plan_hash,
        FACT_WRITER: WRITER,
    }


class _ChecksummedSink:
    """Forwards what is written to a target and computes the checksum of every block.

    The tail is buffered until it is complete, because it contains its own checksum.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._block = xxhash.xxh3_64()
        self._block_bytes = 0
        self._digests: list[str] = []
        self._tail: bytearray | None = None
        self._position = 0
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        size = view.nbytes
        self._position += size
        if self._tail is not None:
            self._tail += view
        else:
            self._target.write(view)
            self._check(view)
        return size

    def _check(self, view: memoryview) -> None:
        while view:
            piece = view[: BLOCK_BYTES - self._block_bytes]
            self._block.update(piece)
            self._block_bytes += len(piece)
            if self._block_bytes == BLOCK_BYTES:
                self._end_block()
            view = view[len(piece) :]

    def _end_block(self) -> None:
        self._digests.append(self._block.hexdigest())
        self._block.reset()
        self._block_bytes = 0

    def begin_tail(self) -> dict[str, str]:
        """Called after the last row group. Returns the checksum metadata for the footer."""
        if self._block_bytes:
            self._end_block()
        self._tail = bytearray()
        return {
            FACT_BLOCK_BYTES: str(BLOCK_BYTES),
            FACT_BLOCK_XXH3: "".join(self._digests),
            FACT_CHECKED_BYTES: str(self._position),
            FACT_INDEX_XXH3: reader.BLANK_CHECKSUM,
            FACT_FOOTER_XXH3: reader.BLANK_CHECKSUM,
        }

    def end_tail(self) -> None:
        assert self._tail is not None
        reader.stamp_checksums(self._tail)
        self._target.write(self._tail)

    def tell(self) -> int:
        return self._position

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Does nothing: the target is flushed by its owner."""

    def close(self) -> None:
        self.closed = True


class IndexFileWriter:
    """Writes one Parquet file, in memory without a `sink`. Each written table is a row group.

    Column encodings, by path: `dictionary`, `delta` (DELTA_BINARY_PACKED), `delta_bytes` (DELTA_BYTE_ARRAY,
    for sorted values) and `delta_length` (DELTA_LENGTH_BYTE_ARRAY). The `bloom` column has a Bloom filter,
    sized for `bloom_values`, the maximum of values in a row group. `statistics` names the columns with
    minimum and maximum; by default all have them.
    """

    def __init__(
        self,
        schema: Any,
        facts: Mapping[str, str],
        *,
        dictionary: Sequence[str] = (),
        delta: Sequence[str] = (),
        delta_bytes: Sequence[str] = (),
        delta_length: Sequence[str] = (),
        bloom: str | None = None,
        bloom_values: int = 0,
        page_rows: int = PAGE_ROWS_MAX,
        statistics: Sequence[str] | None = None,
        sink: Any = None,
    ) -> None:
        self.rows = 0
        self._facts = facts
        self._target = pa.BufferOutputStream() if sink is None else sink
        self._sink = _ChecksummedSink(self._target)
        self._buffer = pa.BufferedOutputStream(pa.PythonFile(self._sink, "w"), _WRITE_BUFFER_BYTES)
        filters = None
        if bloom is not None:
            filters = {bloom: {"ndv": max(bloom_values, BLOOM_VALUES_MIN), "fpp": BLOOM_FALSE_POSITIVES}}
        self._writer = pq.ParquetWriter(
            self._buffer,
            schema,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=list(dictionary),
            column_encoding={
                **dict.fromkeys(delta, "DELTA_BINARY_PACKED"),
                **dict.fromkeys(delta_bytes, "DELTA_BYTE_ARRAY"),
                **dict.fromkeys(delta_length, "DELTA_LENGTH_BYTE_ARRAY"),
            },
            write_statistics=True if statistics is None else list(statistics),
            write_page_index=True,
            write_page_checksum=True,
            max_rows_per_page=page_rows,
            bloom_filter_options=filters,
            store_schema=False,
        )

    def write(self, table: Any) -> None:
        if table.num_rows:
            self._writer.write_table(table, row_group_size=table.num_rows)
            self.rows += table.num_rows

    def finish(self) -> bytes:
        """The whole file; empty if it was written to a `sink`."""
        self._buffer.flush()
        self._writer.add_key_value_metadata({**self._facts, **self._sink.begin_tail()})
        self._writer.close()
        self._buffer.flush()
        self._sink.end_tail()
        if not isinstance(self._target, pa.BufferOutputStream):
            return b""
        return self._target.getvalue().to_pybytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._writer.close()  # else Arrow warns when it is collected


def cut_row_groups(tables: Iterable[Any], size: int) -> Iterator[Any]:
    """Row groups of `size` rows. They depend on the rows only, not on how these are cut into tables."""
    pending: list[Any] = []
    rows = 0
    for table in tables:
        at = 0
        while at < table.num_rows:
            piece = table.slice(at, size - rows)
            pending.append(piece)
            rows += piece.num_rows
            at += piece.num_rows
            if rows == size:
                yield pa.concat_tables(pending).combine_chunks()
                pending, rows = [], 0
    if pending:
        yield pa.concat_tables(pending).combine_chunks()
