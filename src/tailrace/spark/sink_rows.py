"""Rows to be written: validated, encoded, and cut into appends deterministically.

Rows to be written, in the one form that the sink works with: target, keys, values as bytes.

Cuts rows into appends, a column at a time. The same rows in the same order give the same appends.
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


_VALUE_END = 1 << 40  # the end of every value
_json_decoder = msgspec.json.Decoder(msgspec.Raw)
_json_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])


class SinkAppend(NamedTuple):
    """Rows that are sent together: one target, one key. `values` is a column of bytes."""

    stream: str
    key: str | None
    values: Any


def split_into_appends(
    rows: Iterator[SinkRows], options: WriteOptions, is_json: Callable[[str], bool]
) -> Iterator[SinkAppend]:
    """A chunk has rows of one target up to the limits; inside it, rows with the same key go together.

    Chunks of a target follow one another as their rows did, wherever the columns they came in were cut.
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
    """Rows of one target that wait until the next one does not fit."""

    def __init__(self, stream: str, options: WriteOptions, json: bool) -> None:
        self._stream = stream
        self._rows_max = options.rows_max
        self._bytes_max = options.bytes_max
        self._json = json
        self._kept: list[SinkRows] = []
        self._rows = 0
        self._bytes = 0  # with a comma behind each row

    def add(self, some: SinkRows) -> Iterator[SinkAppend]:
        """Takes rows, and gives the appends that are full."""
        ends = value_ends(some.values)
        weights = ends + np.arange(1, len(ends) + 1)  # of all rows up to each one, with their commas
        at = 0
        while at < len(ends):
            weight = int(weights[at - 1]) if at else 0
            # The last row of a chunk needs no comma.
            limit = self._bytes_max + 1 - self._bytes + weight
            upto = min(int(np.searchsorted(weights, limit, "right")), at + self._rows_max - self._rows)
            if not self._rows:
                upto = max(upto, at + 1)  # a row that is larger than the limit goes alone
            if upto > at:
                self._kept.append(some.slice(at, upto))
                self._rows += upto - at
                self._bytes += int(weights[upto - 1]) - weight
                at = upto
            if at < len(ends):
                yield from self.close()

    def close(self) -> Iterator[SinkAppend]:
        if not self._kept:
            return
        values = _concat_arrays([some.values for some in self._kept])
        keys = _concat_keys(self._kept)
        self._kept, self._rows, self._bytes = [], 0, 0
        if self._json:
            check_json(self._stream, values)
        if keys is None:
            yield SinkAppend(self._stream, None, values)
            return
        found = keys.dictionary_encode(null_encoding="encode")
        for key, indices in group_by_code(found.dictionary.to_pylist(), found.indices):
            yield SinkAppend(self._stream, key, values.take(indices))


def value_ends(values: Any) -> Any:
    """How many bytes there are in all values up to each one."""
    positions = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, 4 * values.offset)
    return positions[1:].astype(np.int64) - positions[0]


def json_array(values: Any) -> bytes:
    """JSON texts as one array, without a look at each of them."""
    separated = pc.binary_replace_slice(values, _VALUE_END, _VALUE_END, b",")
    _, positions, data = separated.buffers()
    at = np.frombuffer(positions, np.int32, len(separated) + 1, 4 * separated.offset)
    return b"".join((b"[", memoryview(data)[int(at[0]) : int(at[-1]) - 1], b"]"))


def check_json(stream: str, values: Any) -> None:
    """Refuses what is not exactly one JSON text: joined with others it would become another row, or none.

    All are looked at together: if the elements of their array are as long as they are, they are its elements,
    since then nothing is left that could stand between two of them but the commas.
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
        raise SinkError(
            f"a value for JSON stream {stream} is not one JSON text: {shown!r} ({error})"
        ) from None


def _concat_keys(kept: list[SinkRows]) -> Any:
    """The keys of all rows; None if no row has one."""
    if all(some.keys is None for some in kept):
        return None
    return _concat_arrays(
        [pa.nulls(len(some.values), STRING) if some.keys is None else some.keys for some in kept]
    )


def _concat_arrays(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
