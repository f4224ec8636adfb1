"""Segment rows in batches, as all index builders read them: payloads decoded once, field values as columns.

Decoding has a fast path: a msgspec Struct with just the required members. Records that do not fit it (not an
object, a member of another type on the path, an older schema version) take the reference path, one by one.

A column is converted as a whole if all its leaves have the Python type of the field's kind; else each leaf is
converted by the reference function. `search.records` defines what a value is; both paths give the same
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, cast

import msgspec
from msgspec.structs import astuple

from tailrace.schema.json_values import ABSENT, parse_pointer, resolve_pointer
from tailrace.schema.search_config import Field
from tailrace.search.records import RecordView, Value, converter_for, extract_values, flatten_leaves
from tailrace.spark.index.arrays import BOOL, DOUBLE, np, offsets_from_counts, to_numpy
from tailrace.storage.segments.parquet import INT64, STRING, pa, pc, pq

PointerTokens = tuple[str, ...]
LeafColumn = list[Any]  # the value at one pointer by row; None if absent


class _PathNode:
    """A member on the path to leaves."""

    def __init__(self) -> None:
        self.is_leaf = False
        self.children: dict[str, _PathNode] = {}
        self.empty: Any = None  # a struct without any of its members
        self.deep: list[
            PointerTokens
        ] = []  # pointers that may enter an array: resolved by the reference function

    def add(self, tokens: PointerTokens, at: int = 0) -> None:
        if at == len(tokens):
            self.is_leaf = True
        elif at and tokens[at].isdigit():
            self.deep.append(tokens[at:])
        else:
            self.children.setdefault(tokens[at], _PathNode()).add(tokens, at + 1)

    def arrange(self, example: object) -> None:
        """Order members as in the example record: the decoder is fastest if records have this order."""
        if not isinstance(example, dict):
            return
        record = cast("dict[str, object]", example)
        places = {name: place for place, name in enumerate(record)}
        self.children = dict(sorted(self.children.items(), key=lambda one: places.get(one[0], len(places))))
        for name, child in self.children.items():
            child.arrange(record.get(name))

    @property
    def opaque(self) -> bool:
        """Decoded as `Any`: a leaf itself, or an array may be on the path."""
        return self.is_leaf or bool(self.deep)


class PayloadDecoder:
    """Decodes the leaves of payloads at the given pointers. `reference` forces the reference path."""

    def __init__(self, view: RecordView, pointers: Iterable[PointerTokens], *, reference: bool) -> None:
        self._view = view
        self._reference = reference
        self._first_current = view.first_current()
        self._pointers = sorted({tokens for tokens in pointers if tokens})
        root = _PathNode()
        for tokens in self._pointers:
            root.add(tokens)
        self._root = root
        self._decode: Callable[[memoryview], object] | None = None  # created for the first record

    def leaves(
        self, entries: Sequence[int], payloads: Sequence[memoryview]
    ) -> tuple[dict[PointerTokens, LeafColumn], dict[int, object]]:
        """The leaves of each pointer by row; and, by row, the records that took the reference path."""
        members, whole = self._members(entries, payloads)
        found: dict[PointerTokens, LeafColumn] = {}
        _collect_leaves(self._root, members, (), found)
        for row, record in whole.items():
            usable = isinstance(record, dict)
            for tokens in self._pointers:
                leaf = resolve_pointer(cast("object", record), tokens) if usable else ABSENT
                found[tokens][row] = None if leaf is ABSENT else leaf
        return found, whole

    def _members(
        self, entries: Sequence[int], payloads: Sequence[memoryview]
    ) -> tuple[list[object], dict[int, object]]:
        whole: dict[int, object] = {}
        if self._decode is None:
            self._root.arrange(self._view.record(entries[0], payloads[0]))
            self._decode = msgspec.json.Decoder(_build_struct(self._root)).decode
        decode, record_of = self._decode, self._view.record
        if not self._reference and entries[0] >= self._first_current:
            try:
                return list(map(decode, payloads)), whole
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass
        members: list[object] = []
        for row, (entry, payload) in enumerate(zip(entries, payloads, strict=True)):
            if not self._reference and (entry >= self._first_current or self._view.is_current(entry)):
                try:
                    members.append(decode(payload))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    pass
                else:
                    continue
            members.append(self._root.empty)
            whole[row] = record_of(entry, payload)
        return members, whole


def _build_struct(node: _PathNode) -> Any:
    """A struct with the required members. A missing member is None like null: neither has values."""
    fields: list[tuple[str, Any, Any]] = []
    names: dict[str, str] = {}
    for index, (name, child) in enumerate(node.children.items()):
        names[f"m{index}"] = name
        fields.append((f"m{index}", Any if child.opaque else _build_struct(child) | None, None))
    shape = msgspec.defstruct("Members", fields, rename=names, gc=False)
    node.empty = cast("Callable[[], object]", shape)()
    return shape


def _collect_leaves(
    node: _PathNode, members: Sequence[Any], path: PointerTokens, found: dict[PointerTokens, LeafColumn]
) -> None:
    """Columns of leaves from a column of structs."""
    columns = zip(*map(astuple, members), strict=True)
    for (name, child), column in zip(node.children.items(), columns, strict=True):
        leaves = list(column)
        here = (*path, name)
        if not child.opaque:
            empty = child.empty
            _collect_leaves(child, [empty if leaf is None else leaf for leaf in leaves], here, found)
            continue
        if child.is_leaf:
            found[here] = leaves
        for rest in _nested_pointers(child):
            below = [resolve_pointer(value, rest) for value in leaves]
            found[here + rest] = [None if leaf is ABSENT else leaf for leaf in below]


def _nested_pointers(node: _PathNode) -> list[PointerTokens]:
    """All pointers below an opaque member."""
    found = list(node.deep)
    for name, child in node.children.items():
        if child.is_leaf:
            found.append((name,))
        found += [(name, *rest) for rest in _nested_pointers(child)]
    return found


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
# The format of nearly all programs. Arrow parses only these: it accepts texts that are no dates here.
_COMMON_DATE_PATTERN: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{3})?Z$"
)


class FieldColumn(NamedTuple):
    """The values of one field in a batch: flat, with the row of each value and the offset of each row."""

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
    """The column of a field from its leaves."""
    try:
        column = _text_column(field, found) if field.kind in _TEXT_KINDS else _number_column(field, found)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        column = None
    return _convert_each(field, found) if column is None else _drop_nulls(column)


def field_column_from_values(field: Field, rows: Sequence[Sequence[Value]]) -> FieldColumn:
    """The column of a field from the values of each row."""
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = [value for row in rows for value in row]
    values = pa.array(flat, ARROW_TYPES[field.kind])
    return FieldColumn(values, np.repeat(np.arange(len(rows)), counts), offsets_from_counts(counts))


def _text_column(field: Field, found: LeafColumn) -> Any:
    """The whole column with nulls for absent values; None if a leaf needs the reference function."""
    column = pa.array(found, STRING)  # raises if a leaf is not a text
    if field.normalizer == "lowercase_v1" and field.kind == "keyword":
        # Arrow and Python agree on lower case for ASCII only.
        return pc.ascii_lower(column) if pc.all(pc.string_is_ascii(column)).as_py() else None
    return column


def _number_column(field: Field, found: LeafColumn) -> Any:
    """As `_text_column`.

    Arrow would also accept other types, so the types of all leaves are checked first.
    """
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
    return pc.add(column, 0.0) if pc.all(pc.is_finite(column)).as_py() else None  # turns -0.0 into 0.0


def _date_column(texts: Any) -> Any:
    if not pc.all(pc.match_substring_regex(texts, _COMMON_DATE_PATTERN)).as_py():
        return None
    if pc.any(pc.less_equal(texts, "0001")).as_py() or pc.any(pc.greater_equal(texts, "2262")).as_py():
        return None  # Arrow has no year 0; years from 2262 are rare
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
    """The distinct values of a column, and the index of each value among them."""
    encoded = column.values.dictionary_encode()
    return encoded.dictionary.to_pylist(), to_numpy(encoded.indices)


ENTRY, KEY, PAYLOAD = "entry", "key", "payload"

# Rows decoded at a time. Each column has a fixed cost, so many short batches cost more.
BATCH_ROWS_MAX: Final = 4096
BATCH_BYTES_MAX: Final = 4 << 20


class StoredRows(NamedTuple):
    """Rows of a segment as they are stored, with the entry number of each."""

    entries: Any  # numpy int64
    keys: Any  # Arrow dictionary of binary, with nulls
    payloads: list[memoryview] | None  # None if they were not read
    groups: Any  # numpy: the number of rows of each row group


def iter_row_group_runs(file: Any) -> Iterator[list[int]]:
    """The row groups of an open Parquet file, in runs that make up one batch."""
    run: list[int] = []
    rows = size = 0
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        if run and (rows + group.num_rows > BATCH_ROWS_MAX or size + group.total_byte_size > BATCH_BYTES_MAX):
            yield run
            run, rows, size = [], 0, 0
        run.append(index)
        rows += group.num_rows
        size += group.total_byte_size
    if run:
        yield run


def read_rows(file: Any, run: list[int], *, payloads: bool) -> StoredRows:
    """Read the row groups of one batch."""
    columns = [ENTRY, KEY, PAYLOAD] if payloads else [ENTRY, KEY]
    table = file.read_row_groups(run, columns=columns, use_threads=False).combine_chunks()
    keys = table.column(KEY).combine_chunks()
    if not pa.types.is_dictionary(keys.type):
        keys = keys.dictionary_encode()
    found = _payload_views(table.column(PAYLOAD).combine_chunks()) if payloads else None
    groups = np.array([file.metadata.row_group(index).num_rows for index in run])
    return StoredRows(to_numpy(table.column(ENTRY)), keys, found, groups)


def _payload_views(stored: Any) -> list[memoryview]:
    """The bytes of each text, without a copy."""
    _, starts, data = stored.buffers()
    edges: list[int] = np.frombuffer(starts, np.int32)[
        stored.offset : stored.offset + len(stored) + 1
    ].tolist()
    raw = memoryview(b"" if data is None else data)
    return [raw[first:last] for first, last in pairwise(edges)]


def open_segment(raw: bytes | memoryview) -> Any:
    """Open a segment that is in memory, to be read row group by row group."""
    return pq.ParquetFile(pa.BufferReader(pa.py_buffer(raw)), read_dictionary=[KEY], pre_buffer=False)


class SegmentBatch:
    """Rows with the values of their fields. A column is built when it is first used."""

    def __init__(self, rows: StoredRows, decoded: DecodedPayloads | None) -> None:
        self.rows = rows
        self._decoded = decoded
        self._columns: dict[str, FieldColumn] = {}

    @property
    def entries(self) -> Any:
        return self.rows.entries

    @property
    def count(self) -> int:
        return len(self.rows.entries)

    def column(self, name: str) -> FieldColumn:
        column = self._columns.get(name)
        if column is None:
            assert self._decoded is not None
            column = self._columns[name] = self._decoded.column(name)
        return column

    def leaves(self, tokens: PointerTokens) -> LeafColumn:
        """The value at a pointer by row; None if absent."""
        assert self._decoded is not None
        return self._decoded.leaves.get(tokens) or [None] * self.count


class DecodedPayloads(NamedTuple):
    """The leaves of a batch, and the reader that converts them."""

    reader: SegmentReader
    leaves: dict[PointerTokens, LeafColumn]
    records: dict[int, object]
    rows: int

    def column(self, name: str) -> FieldColumn:
        return self.reader.column(name, self)


class SegmentReader:
    """Creates batches. `reference` computes every value by the reference function, record by record."""

    def __init__(
        self, view: RecordView, fields: Iterable[str], pointers: Iterable[PointerTokens], *, reference: bool
    ) -> None:
        self._view = view
        self._reference = reference
        self._tokens: dict[str, PointerTokens] = {}
        for name in fields:
            pointer = view.config.fields[name].pointer_at(view.version)
            # A field without a pointer has no values; nor has the root pointer, since a record is an object.
            self._tokens[name] = (parse_pointer(pointer) or ()) if pointer else ()
        # The reference function extracts the values from the record itself.
        of_fields = () if reference else self._tokens.values()
        self._decoder = PayloadDecoder(view, [*of_fields, *pointers], reference=reference)

    def batch(self, rows: StoredRows) -> SegmentBatch:
        assert rows.payloads is not None
        entries: Sequence[int] = rows.entries.tolist()
        leaves, records = self._decoder.leaves(entries, rows.payloads)
        return SegmentBatch(rows, DecodedPayloads(self, leaves, records, len(entries)))

    def column(self, name: str, decoded: DecodedPayloads) -> FieldColumn:
        field = self._view.config.fields[name]
        tokens = self._tokens[name]
        if self._reference:
            convert, records = converter_for(field), decoded.records
            found = [extract_values(records[row], tokens, convert) for row in range(decoded.rows)]
            return field_column_from_values(field, found)
        return build_field_column(field, decoded.leaves[tokens] if tokens else [None] * decoded.rows)
