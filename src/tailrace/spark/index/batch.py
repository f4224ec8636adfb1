"""Some row groups of a segment, decoded once, as all builders see them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from tailrace.schema.json_values import parse_pointer
from tailrace.search.records import RecordView, converter_for, extract_values
from tailrace.spark.index.arrays import np, to_numpy
from tailrace.spark.index.columns import FieldColumn, build_field_column, field_column_from_values
from tailrace.spark.index.decoding import LeafColumn, PayloadDecoder, PointerTokens
from tailrace.storage.segments.parquet import pa, pq

ENTRY, KEY, PAYLOAD = "entry", "key", "payload"

# What is decoded at once. A column costs a little whatever its length, so that many short ones cost more.
BATCH_ROWS_MAX: Final = 4096
BATCH_BYTES_MAX: Final = 4 << 20


class StoredRows(NamedTuple):
    """Rows as they lie in a segment. Every one says which entry it is: none is counted."""

    entries: Any  # numpy int64
    keys: Any  # Arrow dictionary of binary, with nulls; None if nobody asked
    payloads: list[memoryview] | None
    groups: Any  # numpy: how many rows each row group has


def iter_row_group_runs(file: Any) -> Iterator[list[int]]:
    """The row groups of an open Parquet file, as many at a time as are decoded at once."""
    turn: list[int] = []
    rows = size = 0
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        if turn and (
            rows + group.num_rows > BATCH_ROWS_MAX or size + group.total_byte_size > BATCH_BYTES_MAX
        ):
            yield turn
            turn, rows, size = [], 0, 0
        turn.append(index)
        rows += group.num_rows
        size += group.total_byte_size
    if turn:
        yield turn


def read_rows(file: Any, turn: list[int], *, payloads: bool) -> StoredRows:
    """Some row groups of an open Parquet file."""
    columns = [ENTRY, KEY, PAYLOAD] if payloads else [ENTRY, KEY]
    table = file.read_row_groups(turn, columns=columns, use_threads=False).combine_chunks()
    keys = table.column(KEY).combine_chunks()
    if not pa.types.is_dictionary(keys.type):
        keys = keys.dictionary_encode()
    found = _payload_views(table.column(PAYLOAD).combine_chunks()) if payloads else None
    groups = np.array([file.metadata.row_group(index).num_rows for index in turn])
    return StoredRows(to_numpy(table.column(ENTRY)), keys, found, groups)


def _payload_views(stored: Any) -> list[memoryview]:
    """The bytes of each text, as they lie there: nothing is copied."""
    _, starts, data = stored.buffers()
    edges: list[int] = np.frombuffer(starts, np.int32)[
        stored.offset : stored.offset + len(stored) + 1
    ].tolist()
    held = memoryview(b"" if data is None else data)
    return [held[first:last] for first, last in pairwise(edges)]


def open_segment(raw: bytes | memoryview) -> Any:
    """A segment that is there as a whole, ready to be read row group by row group."""
    return pq.ParquetFile(pa.BufferReader(pa.py_buffer(raw)), read_dictionary=[KEY], pre_buffer=False)


class SegmentBatch:
    """Some rows with the values of their fields, each column made when it is first asked for."""

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
        """What lies at a pointer, by row; None where nothing does."""
        assert self._decoded is not None
        return self._decoded.leaves.get(tokens) or [None] * self.count


class DecodedPayloads(NamedTuple):
    """Leaves of some rows and how values are made of them."""

    reader: SegmentReader
    leaves: dict[PointerTokens, LeafColumn]
    records: dict[int, object]
    rows: int

    def column(self, name: str) -> FieldColumn:
        return self.reader.column(name, self)


class SegmentReader:
    """Makes batches. `reference` has every value come from the reference function, record by record."""

    def __init__(
        self, view: RecordView, fields: Iterable[str], pointers: Iterable[PointerTokens], *, reference: bool
    ) -> None:
        self._view = view
        self._reference = reference
        self._tokens: dict[str, PointerTokens] = {}
        for name in fields:
            pointer = view.config.fields[name].pointer_at(view.version)
            # Without a binding there are no values; the whole record is an object, and so none either.
            self._tokens[name] = (parse_pointer(pointer) or ()) if pointer else ()
        # The reference function looks for values itself.
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
