"""Published views: a collection's documents at one position of its changes, as Parquet on the object store.

    watch/views/<database>/<collection>/<generation>/_head.json
    watch/views/<database>/<collection>/<generation>/_<number, 20 digits>-<part, 5 digits>.parquet

The head names the parts and the position of each partition that they hold. It is replaced as a whole, after
all of its parts are there; parts never change. No segment of a collection's path begins with an underscore,
so these names cannot meet those of a collection below.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from tailrace.watch.view import DocumentRow, PurgedTombstones, ViewSnapshot

VIEW_FORMAT: Final = 1
PART_ROWS_MAX: Final = 50_000
PART_BYTES_MAX: Final = 32 * 1024 * 1024
PAGE_ROWS: Final = 500
VIEW_COLUMNS: Final = ("id", "partition", "seq", "version", "created_ms", "updated_ms", "deleted", "data")


class PublishedViewHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a published view is."""

    database: str
    collection: str
    generation: int
    number: int  # one more with each publication
    at_ms: int
    positions: list[int]
    purged: list[PurgedTombstones]  # of each partition
    parts: list[str]
    rows: int
    format: int = VIEW_FORMAT


class InvalidViewError(Exception):
    """What is on the object store is no published view."""


def view_folder(database: str, collection: str, generation: int) -> str:
    return f"watch/views/{database}/{collection}/{generation}/"


def head_key(folder: str) -> str:
    return f"{folder}_head.json"


def part_name(number: int, part: int) -> str:
    return f"_{number:020}-{part:05}.parquet"


_encode = msgspec.json.Encoder().encode


def encode_head(head: PublishedViewHead) -> bytes:
    return _encode(head)


def decode_head(raw: bytes) -> PublishedViewHead:
    try:
        head = msgspec.json.decode(raw, type=PublishedViewHead)
    except msgspec.MsgspecError as error:
        raise InvalidViewError(f"the head of a view cannot be read: {error}") from None
    if head.format != VIEW_FORMAT or len(head.positions) != len(head.purged):
        raise InvalidViewError(f"the head of a view has the form {head.format}, not {VIEW_FORMAT}")
    return head


def view_parts(moment: ViewSnapshot, number: int) -> Iterator[list[DocumentRow]]:
    """Every row of a collection, in pieces that are each one part."""
    rows: list[DocumentRow] = []
    size = 0
    after = ""
    while page := moment.rows_after(number, after, PAGE_ROWS):
        after = page[-1].id
        for row in page:
            if rows and (len(rows) >= PART_ROWS_MAX or size + len(row.data) > PART_BYTES_MAX):
                yield rows
                rows, size = [], 0
            rows.append(row)
            size += len(row.data)
    if rows:
        yield rows


def encode_part(rows: Iterable[DocumentRow]) -> bytes:
    """Rows as a Parquet file. Arrow is loaded when the first view is published."""
    from tailrace.storage.segments.parquet import pa, pq

    columns: list[list[Any]] = [list(column) for column in zip(*rows, strict=True)]
    columns[VIEW_COLUMNS.index("deleted")] = [bool(value) for value in columns[VIEW_COLUMNS.index("deleted")]]
    kinds = (pa.string(), pa.int32(), *[pa.int64()] * 4, pa.bool_(), pa.binary())
    arrays = [pa.array(values, kind) for values, kind in zip(columns, kinds, strict=True)]
    sink = io.BytesIO()
    pq.write_table(pa.table(arrays, names=list(VIEW_COLUMNS)), sink, compression="zstd", row_group_size=4096)
    return sink.getvalue()


def decode_part(raw: bytes) -> list[DocumentRow]:
    from tailrace.storage.segments.parquet import pa, pq

    try:
        table = pq.read_table(io.BytesIO(raw))
        columns: list[list[Any]] = [table.column(name).to_pylist() for name in VIEW_COLUMNS]
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise InvalidViewError(f"a part of a view cannot be read: {error}") from None
    columns[VIEW_COLUMNS.index("deleted")] = [int(value) for value in columns[VIEW_COLUMNS.index("deleted")]]
    return [DocumentRow(*values) for values in zip(*columns, strict=True)]
