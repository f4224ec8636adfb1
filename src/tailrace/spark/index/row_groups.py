"""Rows as they come, cut into row groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tailrace.storage.segments.parquet import pa


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
