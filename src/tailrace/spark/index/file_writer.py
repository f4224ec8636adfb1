"""Writer of index files: deterministic Parquet with block checksums and file metadata.

Parquet files that come out the same, byte for byte, whenever the same rows go in.

Rows as they come, cut into row groups.
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
# Whoever reads a page reads its neighbours too, and every page is compressed by itself: short ones are larger
# and take longer to write. They are there for programs that look into page indexes.
PAGE_ROWS_MAX: Final = 4096
BLOOM_FALSE_POSITIVES: Final = (
    0.026  # a byte for each value; filters are powers of two, and less is twice that
)
BLOOM_VALUES_MIN: Final = 64

_ZSTD_LEVEL: Final = 1
# A file is written in hundreds of small pieces: they are put together before Python sees them.
_WRITE_BUFFER_BYTES: Final = 1 << 18


class IndexedRange(NamedTuple):
    """What a companion speaks for."""

    stream_id: str
    first: int
    last: int
    rows: int
    plan_hash: str


class BuiltIndexFile(NamedTuple):
    """One finished file of a family."""

    family: str
    data: bytes
    rows: int  # entries it speaks for
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
    """Passes a file on as it is written, and has the checksum of every block of it.

    The tail is held back until all of it is there: it has a checksum of itself.
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
        """No row group follows. Answers what the footer has to say about checksums."""
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
        """The target does that."""

    def close(self) -> None:
        self.closed = True


class IndexFileWriter:
    """One Parquet file, in memory if there is no `sink`. Every table that is written is a row group.

    `repeated` columns get a dictionary, `packed` ones (paths of integers) are stored as small differences,
    `sorted_bytes` as what is new after the value before, `bytes_apart` as lengths and then all bytes.
    `bloom` ones have a filter, sized by `bloom_values`, the most values a row group has. A page
    has `page_rows` rows at most. Of `bounds`, or of all columns, smallest and largest values are told.
    """

    def __init__(
        self,
        schema: Any,
        facts: Mapping[str, str],
        *,
        repeated: Sequence[str] = (),
        packed: Sequence[str] = (),
        sorted_bytes: Sequence[str] = (),
        bytes_apart: Sequence[str] = (),
        bloom: str | None = None,
        bloom_values: int = 0,
        page_rows: int = PAGE_ROWS_MAX,
        bounds: Sequence[str] | None = None,
        sink: Any = None,
    ) -> None:
        self.rows = 0
        self._facts = facts
        self._target = pa.BufferOutputStream() if sink is None else sink
        self._sink = _ChecksummedSink(self._target)
        self._pieces = pa.BufferedOutputStream(pa.PythonFile(self._sink, "w"), _WRITE_BUFFER_BYTES)
        filters = None
        if bloom is not None:
            filters = {bloom: {"ndv": max(bloom_values, BLOOM_VALUES_MIN), "fpp": BLOOM_FALSE_POSITIVES}}
        self._writer = pq.ParquetWriter(
            self._pieces,
            schema,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=list(repeated),
            column_encoding={
                **dict.fromkeys(packed, "DELTA_BINARY_PACKED"),
                **dict.fromkeys(sorted_bytes, "DELTA_BYTE_ARRAY"),
                **dict.fromkeys(bytes_apart, "DELTA_LENGTH_BYTE_ARRAY"),
            },
            write_statistics=True if bounds is None else list(bounds),
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
        """The whole file; empty if it went to a sink of the caller's."""
        self._pieces.flush()
        self._writer.add_key_value_metadata({**self._facts, **self._sink.begin_tail()})
        self._writer.close()
        self._pieces.flush()
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
            self._writer.close()  # else the library would complain later


def cut_row_groups(tables: Iterable[Any], size: int) -> Iterator[Any]:
    """The same rows give the same row groups, however they arrive."""
    held: list[Any] = []
    rows = 0
    for table in tables:
        at = 0
        while at < table.num_rows:
            piece = table.slice(at, size - rows)
            held.append(piece)
            rows += piece.num_rows
            at += piece.num_rows
            if rows == size:
                yield pa.concat_tables(held).combine_chunks()
                held, rows = [], 0
    if held:
        yield pa.concat_tables(held).combine_chunks()
