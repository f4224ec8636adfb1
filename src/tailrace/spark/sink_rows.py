"""Rows to be written, in the one form that the sink works with: target, key, value as bytes."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from pyspark.sql.types import BinaryType, DataType, StringType, StructType

from tailrace.spark.options import OptionError
from tailrace.spark.sink_options import WriteOptions
from tailrace.store.arrow import BINARY, pa

_TEXT = (StringType(), BinaryType())
_raw = msgspec.json.Decoder(msgspec.Raw)


class SinkError(RuntimeError):
    """Rows that could not be written. The message says which and why."""


class SinkRow(NamedTuple):
    stream: str
    key: str | None
    value: bytes


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Refuses a table that cannot be written, before anything is."""
    kinds: dict[str, DataType] = {field.name: field.dataType for field in schema.fields}
    if "value" not in kinds:
        raise OptionError(f"a column value is written; there are {', '.join(kinds) or 'none'}")
    strange = sorted(set(kinds) - {"value", "key", "stream"})
    if strange:
        raise OptionError(
            f"only value, key and stream are written, not {', '.join(strange)}; select what you want, "
            "for example to_json(struct(*)) as value"
        )
    if kinds["value"] not in _TEXT and not isinstance(kinds["value"], StructType):
        raise OptionError(f"value is string, binary or a struct, not {kinds['value'].simpleString()}")
    if kinds.get("key", StringType()) not in _TEXT:
        raise OptionError(f"key is string or binary, not {kinds['key'].simpleString()}")
    if kinds.get("stream", StringType()) != StringType():
        raise OptionError(f"stream is string, not {kinds['stream'].simpleString()}")
    if options.stream is None and "stream" not in kinds:
        raise OptionError("the option stream, or a column stream, says where rows go")


def rows_of(batches: Iterator[Any], options: WriteOptions) -> Iterator[SinkRow]:
    """The rows of a partition, one after the other."""
    for batch in batches:
        names = batch.schema.names
        values = _values(batch.column("value"))
        keys = _keys(batch.column("key")) if "key" in names else [None] * batch.num_rows
        streams: list[str | None] = [options.stream] * batch.num_rows
        if "stream" in names:
            given: list[str | None] = batch.column("stream").to_pylist()
            streams = [one or options.stream for one in given]
        for stream, key, value in zip(streams, keys, values, strict=True):
            if stream is None:
                raise SinkError("a row has no stream, and the option stream names none")
            if value is None:
                raise SinkError(f"a row for stream {stream} has no value")
            yield SinkRow(stream, key, value)


def _values(column: Any) -> list[bytes | None]:
    if pa.types.is_struct(column.type):
        kind = column.type
        return [None if value is None else to_json(value, kind) for value in column.to_pylist()]
    return column.cast(BINARY).to_pylist() if column.type != BINARY else column.to_pylist()


def _keys(column: Any) -> list[str | None]:
    """Keys travel in a header, as text. An empty one is none."""
    keys: list[Any] = column.to_pylist()
    found: list[str | None] = []
    for key in keys:
        if isinstance(key, bytes):
            try:
                key = key.decode()
            except UnicodeDecodeError:
                raise SinkError(f"the key {key!r} is not UTF-8") from None
        found.append(key or None)
    return found


def to_json(value: dict[str, Any], kind: Any) -> bytes:
    """A struct of this Arrow type as Spark's `to_json` writes it: fields without a value are left out."""
    return msgspec.json.encode(_plain(value, kind))


def _plain(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        fields = {name: _plain(one, kind.field(name).type) for name, one in value.items()}
        return {name: one for name, one in fields.items() if one is not None}
    if pa.types.is_map(kind):
        return {str(name): _plain(one, kind.item_type) for name, one in value}
    if pa.types.is_list(kind):
        return [_plain(one, kind.value_type) for one in value]
    match value:
        case datetime():
            return _instant(value)
        case date():
            return value.isoformat()
        case Decimal():
            return msgspec.Raw(format(value, "f").encode())
        case bytes():
            return base64.b64encode(value).decode()
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
        case _:
            return value


def _instant(value: datetime) -> str:
    if value.tzinfo is None:
        return value.isoformat(timespec="milliseconds")
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def check_json(row: SinkRow) -> None:
    """Refuses what is not exactly one JSON text: joined with others it would become another row, or none."""
    try:
        _raw.decode(row.value)
    except msgspec.DecodeError as error:
        shown = row.value[:60].decode(errors="replace")
        raise SinkError(
            f"a value for JSON stream {row.stream} is not one JSON text: {shown!r} ({error})"
        ) from None


class Append(NamedTuple):
    """Rows that are sent together: one target, one key."""

    stream: str
    key: str | None
    values: list[bytes]


def appends_of(
    rows: Iterator[SinkRow], options: WriteOptions, is_json: Callable[[str], bool]
) -> Iterator[Append]:
    """Cuts rows into appends. The same rows in the same order give the same appends.

    A chunk has rows of one target up to the limits; inside it, rows with the same key go together. Chunks of
    a target follow one another as their rows did.
    """
    open_chunks: dict[str, _Chunk] = {}
    for row in rows:
        if is_json(row.stream):
            check_json(row)
        chunk = open_chunks.get(row.stream)
        if chunk is None:
            chunk = open_chunks[row.stream] = _Chunk()
        if chunk.rows and (
            chunk.rows >= options.rows_max or chunk.bytes + len(row.value) > options.bytes_max
        ):
            yield from chunk.appends(row.stream)
            chunk = open_chunks[row.stream] = _Chunk()
        chunk.add(row)
    for stream, chunk in open_chunks.items():
        yield from chunk.appends(stream)


class _Chunk:
    def __init__(self) -> None:
        self.rows = 0
        self.bytes = 0
        self._by_key: dict[str | None, list[bytes]] = {}

    def add(self, row: SinkRow) -> None:
        self._by_key.setdefault(row.key, []).append(row.value)
        self.rows += 1
        self.bytes += len(row.value) + 1

    def appends(self, stream: str) -> Iterator[Append]:
        for key, values in self._by_key.items():
            yield Append(stream, key, values)
