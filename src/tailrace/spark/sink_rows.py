"""Rows to be written, in the one form that the sink works with: target, keys, values as bytes."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import numpy as np
from pyspark.sql.types import BinaryType, DataType, StringType, StructType

from tailrace.spark.options import OptionError
from tailrace.spark.sink_options import WriteOptions
from tailrace.storage.segments.parquet import (
    BINARY,
    INT32,
    INT64,
    STRING,
    integer_array,
    integer_scalar,
    pa,
    pc,
)

_TEXT = (StringType(), BinaryType())


class SinkError(RuntimeError):
    """Rows that could not be written. The message says which and why."""


class SinkRows(NamedTuple):
    """Rows for one target, in their order: a column of text, if any has a key, and one of bytes."""

    stream: str
    keys: Any
    values: Any

    def slice(self, start: int, stop: int) -> SinkRows:
        keys = None if self.keys is None else self.keys.slice(start, stop - start)
        return SinkRows(self.stream, keys, self.values.slice(start, stop - start))


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


def to_sink_rows(batches: Iterator[Any], options: WriteOptions) -> Iterator[SinkRows]:
    """The rows of a partition as they come, those of each target together."""
    for batch in batches:
        if not batch.num_rows:
            continue
        names = batch.schema.names
        values = _encode_values(batch.column("value"))
        rows = SinkRows(
            options.stream or "", _encode_keys(batch.column("key")) if "key" in names else None, values
        )
        by_stream = list(
            _split_by_stream(rows, batch.column("stream") if "stream" in names else None, options)
        )
        for some in by_stream:
            if some.values.null_count:
                raise SinkError(f"a row for stream {some.stream} has no value")
        yield from by_stream


def _split_by_stream(rows: SinkRows, column: Any, options: WriteOptions) -> Iterator[SinkRows]:
    named = None if column is None else column.dictionary_encode(null_encoding="encode")
    given: list[str | None] = [None] if named is None else named.dictionary.to_pylist()
    streams = [one or options.stream for one in given]
    if None in streams:
        raise SinkError("a row has no stream, and the option stream names none")
    if named is None or len(set(streams)) == 1:
        yield rows._replace(stream=str(streams[0]))
        return
    for stream, indices in group_by_code(streams, named.indices):
        keys = None if rows.keys is None else rows.keys.take(indices)
        yield SinkRows(str(stream), keys, rows.values.take(indices))


def group_by_code(names: Sequence[str | None], codes: Any) -> Iterator[tuple[str | None, Any]]:
    """Where the rows of each name are, names in the order of their first rows.

    The code of a row is the place of its name.
    """
    distinct = {name: place for place, name in enumerate(dict.fromkeys(names))}
    places = np.array([distinct[name] for name in names], np.int64)
    numbers = places[np.frombuffer(codes.buffers()[1], np.int32, len(codes), 4 * codes.offset)]
    order = np.argsort(numbers, kind="stable")
    start = 0
    for name, count in zip(distinct, np.bincount(numbers, minlength=len(distinct)).tolist(), strict=True):
        yield name, integer_array(INT64, order[start : start + count], count)
        start += count


def _encode_values(column: Any) -> Any:
    if pa.types.is_struct(column.type):
        kind = column.type
        texts = [None if value is None else to_json(value, kind) for value in column.to_pylist()]
        return pa.array(texts, BINARY)
    return column.cast(BINARY) if column.type != BINARY else column


def _encode_keys(column: Any) -> Any:
    """Keys travel in a header, as text. An empty one is none; None if there are no others."""
    try:
        keys = column.cast(STRING) if column.type != STRING else column
    except pa.ArrowInvalid:
        for key in column.to_pylist():
            try:
                (key or b"").decode()
            except UnicodeDecodeError:
                raise SinkError(f"the key {key!r} is not UTF-8") from None
        raise
    empty = pc.equal(pc.binary_length(keys), integer_scalar(INT32, 0))
    keys = pc.if_else(empty, pa.nulls(1, STRING)[0], keys)
    return keys if keys.null_count < len(keys) else None


def to_json(value: dict[str, Any], kind: Any) -> bytes:
    """A struct of this Arrow type as Spark's `to_json` writes it: fields without a value are left out."""
    return msgspec.json.encode(_to_json_value(value, kind))


def _to_json_value(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        fields = {name: _to_json_value(one, kind.field(name).type) for name, one in value.items()}
        return {name: one for name, one in fields.items() if one is not None}
    if pa.types.is_map(kind):
        return {str(name): _to_json_value(one, kind.item_type) for name, one in value}
    if pa.types.is_list(kind):
        return [_to_json_value(one, kind.value_type) for one in value]
    match value:
        case datetime():
            return _format_timestamp(value)
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


def _format_timestamp(value: datetime) -> str:
    if value.tzinfo is None:
        return value.isoformat(timespec="milliseconds")
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
