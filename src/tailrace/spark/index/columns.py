"""Values of fields as columns. What a value is, only `query.values` decides.

Where all leaves of a column have the type that the field's kind is made of, the column is made as a whole;
else every leaf goes through the reference converter. Both give the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

from tailrace.schema.search_config import Field
from tailrace.search.records import Value, converter_for, flatten_leaves
from tailrace.spark.index.arrays import BOOL, DOUBLE, np, offsets_from_counts, to_numpy
from tailrace.spark.index.decoding import LeafColumn
from tailrace.storage.segments.parquet import INT64, STRING, pa, pc

ARROW_TYPES: Final = {
    "keyword": STRING,
    "text": STRING,
    "integer": INT64,
    "float": DOUBLE,
    "date": INT64,
    "bool": BOOL,
}
_TEXT_KINDS: Final = ("keyword", "text")
_PYTHON_TYPES: Final[dict[str, frozenset[type]]] = {
    "integer": frozenset({int}),
    "float": frozenset({int, float}),
    "bool": frozenset({bool}),
}
_NONE_TYPE: Final = type(None)
# What nearly every program writes; no other text is given to the library, which takes more than it should.
_COMMON_DATE_PATTERN: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{3})?Z$"
)


class FieldColumn(NamedTuple):
    """The values of one field in some rows: flat, with the row of each and where each row begins."""

    values: Any  # Arrow, without nulls
    rows: Any  # numpy int64, ascending
    offsets: Any  # numpy int64, one more than there are rows

    @property
    def counts(self) -> Any:
        return np.diff(self.offsets)

    @property
    def present(self) -> Any:
        """The rows with a value, ascending."""
        return np.flatnonzero(self.counts)


def build_field_column(field: Field, found: LeafColumn) -> FieldColumn:
    """The column of a field from what lies at its pointer."""
    try:
        column = _text_column(field, found) if field.kind in _TEXT_KINDS else _number_column(field, found)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        column = None
    return _convert_each(field, found) if column is None else _drop_nulls(column)


def field_column_from_values(field: Field, rows: Sequence[Sequence[Value]]) -> FieldColumn:
    """The same from lists of values, as the reference gives them."""
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = [value for row in rows for value in row]
    values = pa.array(flat, ARROW_TYPES[field.kind])
    return FieldColumn(values, np.repeat(np.arange(len(rows)), counts), offsets_from_counts(counts))


def _text_column(field: Field, found: LeafColumn) -> Any:
    """The column at once, nulls where nothing lies; None if some leaf needs a closer look."""
    column = pa.array(found, STRING)  # refuses what is no text
    if field.normalizer == "lowercase_v1" and field.kind == "keyword":
        # Arrow knows other letters than Python does, but the same in ASCII.
        return pc.ascii_lower(column) if pc.all(pc.string_is_ascii(column)).as_py() else None
    return column


def _number_column(field: Field, found: LeafColumn) -> Any:
    """The same for what would take more than it should: the types of all leaves are looked at first."""
    kind, types = field.kind, set(map(type, found)) - {_NONE_TYPE}
    if not types:
        return pa.nulls(len(found), ARROW_TYPES[kind])
    if kind == "date":
        if types == {int}:
            return pa.array(found, INT64)
        return _date_column(pa.array(found, STRING)) if types == {str} else None
    if not types <= _PYTHON_TYPES[kind]:
        return None
    column = pa.array(found, ARROW_TYPES[kind])
    if kind != "float":
        return column
    return pc.add(column, 0.0) if pc.all(pc.is_finite(column)).as_py() else None  # zero has no sign


def _date_column(texts: Any) -> Any:
    if not pc.all(pc.match_substring_regex(texts, _COMMON_DATE_PATTERN)).as_py():
        return None
    if pc.any(pc.less_equal(texts, "0001")).as_py() or pc.any(pc.greater_equal(texts, "2262")).as_py():
        return None  # the year 0 is no year of the library, and far ones are not worth a thought
    stamps = pc.cast(pc.utf8_slice_codeunits(texts, 0, -1), pa.timestamp("ms"))
    return stamps.view(INT64)


def _drop_nulls(column: Any) -> FieldColumn:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    count = len(column)
    if column.null_count == 0:
        return FieldColumn(column, np.arange(count), np.arange(count + 1))
    valid = to_numpy(column.is_valid())
    return FieldColumn(column.drop_null(), np.flatnonzero(valid), offsets_from_counts(valid))


def _convert_each(field: Field, found: LeafColumn) -> FieldColumn:
    convert = converter_for(field)
    rows: list[list[Value]] = []
    for leaf in found:
        if type(leaf) is list:
            values = [convert(one) for one in flatten_leaves(cast("object", leaf))]
            rows.append([value for value in values if value is not None])
        else:
            value = None if leaf is None else convert(leaf)
            rows.append([] if value is None else [value])
    return field_column_from_values(field, rows)


def distinct_values(column: FieldColumn) -> tuple[list[Value], Any]:
    """The different values of a column and, for each value of it, which of them it is."""
    encoded = column.values.dictionary_encode()
    return encoded.dictionary.to_pylist(), to_numpy(encoded.indices)
