"""The columns of the source, and the projection of stream rows to them.

Rows from segments and from the server have the same columns: `entry, append_time, append_ns, key, payload,
epoch`. The projection returns batches with the Arrow schema that Spark expects.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from tailrace.protocol.offsets import ALPHABET
from tailrace.spark.options import OptionError, ReadOptions
from tailrace.storage.segments.parquet import (
    BINARY,
    INT32,
    INT64,
    MICROS,
    STRING,
    integer_scalar,
    pa,
    pc,
    string_scalar,
)

VALUE_TYPES: dict[str, DataType] = {"string": StringType(), "binary": BinaryType(), "json": VariantType()}
COLUMN_TYPES: dict[str, DataType] = {
    "stream": StringType(),
    "key": BinaryType(),
    "offset": StringType(),
    "entry": LongType(),
    "timestamp": TimestampType(),
    "epoch": IntegerType(),
    "timestamp_ns": LongType(),
    "headers": MapType(StringType(), StringType()),
}
DEFAULT_COLUMNS = ("stream", "key", "value", "offset", "entry", "timestamp", "epoch")

_THOUSAND = integer_scalar(INT64, 1000)
_DIGITS = np.frombuffer(ALPHABET.encode(), dtype=np.uint8)
_OFFSET_DIGITS = 26


class StreamMetadata(NamedTuple):
    """The values that all rows of a partition share."""

    stream: str
    content_type: str
    versions: tuple[tuple[int, int], ...] = ()  # first entry and schema version; empty without a schema


def source_schema(options: ReadOptions, value_format: str) -> StructType:
    """The columns of a read for which the user gave no schema."""
    names = (*DEFAULT_COLUMNS, "headers") if options.with_headers else DEFAULT_COLUMNS
    return StructType([_field(name, VALUE_TYPES[value_format]) for name in names])


def _field(name: str, value: DataType) -> StructField:
    nullable = name in ("key", "value", "headers")
    return StructField(name, value if name == "value" else COLUMN_TYPES[name], nullable)


def check_schema(schema: StructType) -> str | None:
    """Validate the columns of a read. Returns the format of its values, None without a `value` column."""
    value_format: str | None = None
    for field in schema.fields:
        if field.name == "value":
            found = [name for name, kind in VALUE_TYPES.items() if kind == field.dataType]
            if not found:
                raise OptionError(
                    f"value must be string, binary or variant, got {field.dataType.simpleString()}"
                )
            value_format = found[0]
        elif COLUMN_TYPES.get(field.name) is None:
            raise OptionError(
                f"unknown column {field.name}; expected one of value, {', '.join(COLUMN_TYPES)}"
            )
        elif field.dataType != COLUMN_TYPES[field.name]:
            expected = COLUMN_TYPES[field.name].simpleString()
            raise OptionError(f"{field.name} must be {expected}, got {field.dataType.simpleString()}")
    return value_format


class Projection:
    """Projects stream rows to the columns of a schema."""

    def __init__(self, schema: StructType, metadata: StreamMetadata) -> None:
        from pyspark.sql.pandas import types

        to_arrow_schema: Any = getattr(types, "to_arrow_schema")  # noqa: B009 - the library is half typed
        self._schema: Any = to_arrow_schema(schema, timezone="UTC")
        self._value_format = check_schema(schema)
        self._names: list[str] = schema.fieldNames()
        self._metadata = metadata

    @property
    def needs_payload(self) -> bool:
        return self._value_format is not None

    @property
    def needs_key(self) -> bool:
        return "key" in self._names

    def batch(self, rows: Any) -> Any:
        columns = [self._column(name, rows) for name in self._names]
        if not columns:
            # A count needs no columns; a struct array without fields still has a length.
            return pa.RecordBatch.from_struct_array(pa.array([{}] * rows.num_rows, pa.struct([])))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, name: str, rows: Any) -> Any:
        count: int = rows.num_rows
        match name:
            case "stream":
                return pa.repeat(string_scalar(self._metadata.stream), count)
            case "key":
                return _decode_column(rows.column("key"), BINARY)
            case "value":
                return self._value(rows)
            case "offset":
                return encode_offsets(rows.column("epoch"), rows.column("entry"))
            case "entry":
                return rows.column("entry")
            case "timestamp":
                return rows.column("append_time").cast(MICROS)
            case "timestamp_ns":
                micros = rows.column("append_time").view(INT64)
                return pc.add(pc.multiply(micros, _THOUSAND), rows.column("append_ns").cast(INT64))
            case "epoch":
                return rows.column("epoch").cast(INT32)
            case _:
                return self._headers(rows)

    def _value(self, rows: Any) -> Any:
        payload = rows.column("payload")
        if self._value_format == "binary":
            return _decode_column(payload, BINARY)
        if self._value_format == "string":
            return _to_text(payload, rows)
        return _parse_variants(_to_text(payload, rows), self._schema.field("value").type)

    def _headers(self, rows: Any) -> Any:
        kind = self._schema.field("headers").type
        common = [("content-type", self._metadata.content_type)]
        versions = self._metadata.versions
        if not versions:
            return pa.array([common] * rows.num_rows, kind)
        found: list[list[tuple[str, str]]] = []
        for entry in rows.column("entry").to_pylist():
            version = max((number for first, number in versions if entry >= first), default=0)
            found.append([*common, ("schema-version", str(version))] if version else common)
        return pa.array(found, kind)


def encode_offsets(epochs: Any, entries: Any) -> Any:
    """The offsets of entries as text: vectorized `protocol.offsets.encode_offset`."""
    count = len(entries)
    numbers, generations = _as_uint64(entries), _as_uint64(epochs)
    digits = np.empty((count, _OFFSET_DIGITS), dtype=np.uint8)
    digits[:, 20:] = 0  # the low 32 bits are always zero: six digits and two bits of the digit before
    for place in range(_OFFSET_DIGITS - 1, -1, -1):
        shift = 5 * (_OFFSET_DIGITS - 1 - place)
        digits[:, place] = _offset_digit(numbers, generations, shift)
    text = _DIGITS[digits]
    positions = np.arange(0, _OFFSET_DIGITS * (count + 1), _OFFSET_DIGITS, dtype=np.int32)
    return pa.Array.from_buffers(
        STRING, count, [None, pa.py_buffer(positions), pa.py_buffer(np.ascontiguousarray(text))]
    )


def _as_uint64(column: Any) -> Any:
    """The column's buffer without a copy. (`to_numpy` would import pandas.)"""
    return np.frombuffer(column.buffers()[1], np.uint64, len(column), 8 * column.offset)


def _offset_digit(numbers: Any, generations: Any, shift: int) -> Any:
    """Bits `shift` to `shift + 4` of `epoch << 96 | entry << 32`."""
    five = np.uint64(31)
    if shift + 5 <= 32:
        return np.uint8(0)
    if shift < 32:
        return (numbers << np.uint64(32 - shift)) & five
    if shift + 5 <= 96:
        return (numbers >> np.uint64(shift - 32)) & five
    if shift < 96:
        low = numbers >> np.uint64(shift - 32)
        return (low | (generations << np.uint64(96 - shift))) & five
    return (generations >> np.uint64(shift - 96)) & five


def _decode_column(column: Any, kind: Any) -> Any:
    """A column as plain text or bytes, also if Arrow read it as a dictionary."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == kind:
        return column
    if column.type == STRING and kind == BINARY and not column.offset:
        return pa.Array.from_buffers(BINARY, len(column), column.buffers())
    return column.cast(kind)


def _to_text(payload: Any, rows: Any) -> Any:
    if payload.type == STRING:
        return payload
    try:
        return payload.cast(STRING)
    except pa.ArrowInvalid:
        for entry, value in zip(rows.column("entry").to_pylist(), payload.to_pylist(), strict=True):
            try:
                value.decode()
            except UnicodeDecodeError:
                message = f"entry {entry} is not UTF-8; read the stream with valueFormat=binary"
                raise ValueError(message) from None
        raise


def _parse_variants(texts: Any, kind: Any) -> Any:
    return pa.array([_parse_variant(text) for text in texts.to_pylist()], kind)


def _parse_variant(text: str) -> dict[str, bytes] | None:
    """The variant of a JSON text; None where `try_parse_json`, which history reads use, returns NULL."""
    from pyspark.sql.types import VariantVal

    try:
        json.loads(text, object_pairs_hook=_reject_duplicate_keys)
        variant = VariantVal.parseJson(text)
    except (_DuplicateKeyError, UnicodeEncodeError):  # a duplicate key or a lone surrogate
        return None
    return {"value": bytes(variant.value), "metadata": bytes(variant.metadata)}


class _DuplicateKeyError(Exception):
    """An object has the same key twice."""


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) != len(pairs):
        raise _DuplicateKeyError
