"""Rows to be written: validated, encoded as target, keys and values, and cut into appends.

Cutting is deterministic: the same rows in the same order give the same appends.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
import numpy as np
from pyspark.sql.types import BinaryType, DataType, StringType, StructType

from tailrace.spark.options import OptionError, WriteOptions
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
    """Rows could not be written."""


class SinkRows(NamedTuple):
    """Rows for one target, in order.

    `keys` is a string column, None if no row has one; `values` is binary.
    """

    stream: str
    keys: Any
    values: Any

    def slice(self, start: int, stop: int) -> SinkRows:
        keys = None if self.keys is None else self.keys.slice(start, stop - start)
        return SinkRows(self.stream, keys, self.values.slice(start, stop - start))


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Validate the columns of a table before anything is written."""
    kinds: dict[str, DataType] = {field.name: field.dataType for field in schema.fields}
    if "value" not in kinds:
        raise OptionError(f"column value is required; the columns are {', '.join(kinds) or 'none'}")
    unexpected = sorted(set(kinds) - {"value", "key", "stream"})
    if unexpected:
        raise OptionError(
            f"unexpected column {', '.join(unexpected)}; only value, key and stream are written, for example "
            "select to_json(struct(*)) as value"
        )
    if kinds["value"] not in _TEXT and not isinstance(kinds["value"], StructType):
        raise OptionError(f"value must be string, binary or a struct, got {kinds['value'].simpleString()}")
    if kinds.get("key", StringType()) not in _TEXT:
        raise OptionError(f"key must be string or binary, got {kinds['key'].simpleString()}")
    if kinds.get("stream", StringType()) != StringType():
        raise OptionError(f"stream must be string, got {kinds['stream'].simpleString()}")
    if options.stream is None and "stream" not in kinds:
        raise OptionError("the option stream or a column stream is required")


def to_sink_rows(batches: Iterator[Any], options: WriteOptions) -> Iterator[SinkRows]:
    """The rows of a partition, grouped by target within each batch."""
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
    names: list[str | None] = [None] if named is None else named.dictionary.to_pylist()
    streams = [name or options.stream for name in names]
    if None in streams:
        raise SinkError("a row has no stream, and the option stream is not set")
    if named is None or len(set(streams)) == 1:
        yield rows._replace(stream=str(streams[0]))
        return
    for stream, indices in group_by_code(streams, named.indices):
        keys = None if rows.keys is None else rows.keys.take(indices)
        yield SinkRows(str(stream), keys, rows.values.take(indices))


def group_by_code(names: Sequence[str | None], codes: Any) -> Iterator[tuple[str | None, Any]]:
    """The row indices of each name, names in the order of `names`.

    The code of a row is the index of its name.
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
    """Keys as text, since they are sent in a header. An empty key is null; None if all are null."""
    try:
        keys = column.cast(STRING) if column.type != STRING else column
    except pa.ArrowInvalid:
        for key in column.to_pylist():
            try:
                (key or b"").decode()
            except UnicodeDecodeError:
                raise SinkError(f"key {key!r} is not UTF-8") from None
        raise
    empty = pc.equal(pc.binary_length(keys), integer_scalar(INT32, 0))
    keys = pc.if_else(empty, pa.nulls(1, STRING)[0], keys)
    return keys if keys.null_count < len(keys) else None


def to_json(value: dict[str, Any], kind: Any) -> bytes:
    """A struct of this Arrow type as JSON like Spark's `to_json`: null fields are left out."""
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


_VALUE_END = 1 << 40  # beyond the end of every value
_json_decoder = msgspec.json.Decoder(msgspec.Raw)
_json_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class SinkAppend(NamedTuple):
    """Rows of one target and one key, sent in one append. `values` is a binary column."""

    stream: str
    key: str | None
    values: Any


def split_into_appends(
    rows: Iterator[SinkRows], options: WriteOptions, is_json: Callable[[str], bool]
) -> Iterator[SinkAppend]:
    """Cut rows into chunks of one target up to the limits; within a chunk, each key is an append.

    Chunks of a target are in row order and do not depend on how the rows were batched.
    """
    chunks: dict[str, _AppendBuffer] = {}
    for some in rows:
        chunk = chunks.get(some.stream)
        if chunk is None:
            chunk = chunks[some.stream] = _AppendBuffer(some.stream, options, is_json(some.stream))
        yield from chunk.add(some)
    for chunk in chunks.values():
        yield from chunk.close()


class _AppendBuffer:
    """Buffers rows of one target until the next row does not fit."""

    def __init__(self, stream: str, options: WriteOptions, json: bool) -> None:
        self._stream = stream
        self._rows_max = options.rows_max
        self._bytes_max = options.bytes_max
        self._json = json
        self._pending: list[SinkRows] = []
        self._rows = 0
        self._bytes = 0  # with a comma after each row

    def add(self, some: SinkRows) -> Iterator[SinkAppend]:
        """Add rows. Yields the appends of full chunks."""
        ends = value_ends(some.values)
        weights = ends + np.arange(1, len(ends) + 1)  # cumulative bytes with commas
        at = 0
        while at < len(ends):
            weight = int(weights[at - 1]) if at else 0
            # The last row of a chunk needs no comma.
            limit = self._bytes_max + 1 - self._bytes + weight
            stop = min(int(np.searchsorted(weights, limit, "right")), at + self._rows_max - self._rows)
            if not self._rows:
                stop = max(stop, at + 1)  # a row larger than the limit is sent alone
            if stop > at:
                self._pending.append(some.slice(at, stop))
                self._rows += stop - at
                self._bytes += int(weights[stop - 1]) - weight
                at = stop
            if at < len(ends):
                yield from self.close()

    def close(self) -> Iterator[SinkAppend]:
        if not self._pending:
            return
        values = _concat_arrays([some.values for some in self._pending])
        keys = _concat_keys(self._pending)
        self._pending, self._rows, self._bytes = [], 0, 0
        if self._json:
            check_json(self._stream, values)
        if keys is None:
            yield SinkAppend(self._stream, None, values)
            return
        found = keys.dictionary_encode(null_encoding="encode")
        for key, indices in group_by_code(found.dictionary.to_pylist(), found.indices):
            yield SinkAppend(self._stream, key, values.take(indices))


def value_ends(values: Any) -> Any:
    """The cumulative size of the values in bytes."""
    positions = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, 4 * values.offset)
    return positions[1:].astype(np.int64) - positions[0]


def json_array(values: Any) -> bytes:
    """JSON texts joined to one array, as column operations."""
    separated = pc.binary_replace_slice(values, _VALUE_END, _VALUE_END, b",")
    _, positions, data = separated.buffers()
    at = np.frombuffer(positions, np.int32, len(separated) + 1, 4 * separated.offset)
    return b"".join((b"[", memoryview(data)[int(at[0]) : int(at[-1]) - 1], b"]"))


def check_json(stream: str, values: Any) -> None:
    """Require that every value is exactly one JSON text: else the joined array would have other elements.

    The joined array is decoded once. If its elements have the lengths of the values, they are the values,
    since only the commas are left between them.
    """
    try:
        found = _json_array_decoder.decode(json_array(values))
    except (msgspec.DecodeError, RecursionError):
        found = []
    if list(map(len, found)) != np.diff(value_ends(values), prepend=0).tolist():
        for value in values.to_pylist():
            _check_json_value(stream, value)


def _check_json_value(stream: str, value: bytes) -> None:
    try:
        _json_decoder.decode(value)
    except msgspec.DecodeError as error:
        shown = value[:60].decode(errors="replace")
        raise SinkError(f"value for JSON stream {stream} is not one JSON text: {shown!r} ({error})") from None


def _concat_keys(pending: list[SinkRows]) -> Any:
    """The keys of all rows; None if no row has one."""
    if all(some.keys is None for some in pending):
        return None
    return _concat_arrays(
        [pa.nulls(len(some.values), STRING) if some.keys is None else some.keys for some in pending]
    )


def _concat_arrays(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
