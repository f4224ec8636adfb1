"""Parquet files that come out the same, byte for byte, whenever the same rows go in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from tailrace import __version__
from tailrace.pipeline.kernels.arrays import pa, pq
from tailrace.query.family_format import (
    FACT_FAMILY,
    FACT_FIRST,
    FACT_FORMAT,
    FACT_LAST,
    FACT_PLAN_HASH,
    FACT_ROWS,
    FACT_STREAM_ID,
    FACT_WRITER,
    FORMAT,
)

WRITER: Final = f"tailrace-pipeline/{__version__}"
PAGE_ROWS_MAX: Final = 1024
BLOOM_FALSE_POSITIVES: Final = 0.01
BLOOM_VALUES_MIN: Final = 64

_ZSTD_LEVEL: Final = 3


class Range(NamedTuple):
    """What a companion speaks for."""

    stream_id: str
    first: int
    last: int
    rows: int
    plan_hash: str


class Built(NamedTuple):
    """One finished file of a family."""

    family: str
    data: bytes
    rows: int  # entries it speaks for
    stats: dict[str, int]


def facts_of(family: str, covers: Range) -> dict[str, str]:
    return {
        FACT_FORMAT: str(FORMAT),
        FACT_FAMILY: family,
        FACT_STREAM_ID: covers.stream_id,
        FACT_FIRST: str(covers.first),
        FACT_LAST: str(covers.last),
        FACT_ROWS: str(covers.rows),
        FACT_PLAN_HASH: covers.plan_hash,
        FACT_WRITER: WRITER,
    }


class CompanionWriter:
    """One Parquet file in memory. Every table that is written is a row group.

    `repeated` columns get a dictionary, `packed` ones (paths of integers) are stored as small differences,
    `bloom` ones have a filter, sized by `bloom_values`, the most values a row group has.
    """

    def __init__(
        self,
        schema: Any,
        facts: Mapping[str, str],
        *,
        repeated: Sequence[str] = (),
        packed: Sequence[str] = (),
        bloom: str | None = None,
        bloom_values: int = 0,
        sink: Any = None,
    ) -> None:
        self.rows = 0
        self._facts = facts
        self._sink = pa.BufferOutputStream() if sink is None else sink
        filters = None
        if bloom is not None:
            filters = {bloom: {"ndv": max(bloom_values, BLOOM_VALUES_MIN), "fpp": BLOOM_FALSE_POSITIVES}}
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=list(repeated),
            column_encoding=dict.fromkeys(packed, "DELTA_BINARY_PACKED") or None,
            write_statistics=True,
            write_page_index=True,
            write_page_checksum=True,
            max_rows_per_page=PAGE_ROWS_MAX,
            bloom_filter_options=filters,
            store_schema=False,
        )

    def write(self, table: Any) -> None:
        if table.num_rows:
            self._writer.write_table(table, row_group_size=table.num_rows)
            self.rows += table.num_rows

    def finish(self) -> bytes:
        """The whole file; empty if it went to a sink of the caller's."""
        self._writer.add_key_value_metadata(dict(self._facts))
        self._writer.close()
        if not isinstance(self._sink, pa.BufferOutputStream):
            return b""
        return self._sink.getvalue().to_pybytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._writer.close()  # else the library would complain later
