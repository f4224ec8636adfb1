"""One row group of a segment, decoded once, as all builders see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tailrace.pipeline.kernels.arrays import BINARY, pa, pq, to_numpy
from tailrace.pipeline.kernels.columns import FieldColumn, column_of, column_of_values
from tailrace.pipeline.kernels.decoding import Decoder, Leaves, Tokens
from tailrace.query.values import values_of
from tailrace.query.view import View
from tailrace.schema.pointer import parse_pointer

ENTRY, KEY, PAYLOAD = "entry", "key", "payload"


class StoredRows(NamedTuple):
    """Rows as they lie in a segment. Every one says which entry it is: none is counted."""

    entries: Any  # numpy int64
    keys: Any  # Arrow dictionary of binary, with nulls; None if nobody asked
    payloads: list[bytes] | None


def read_rows(file: Any, index: int, *, payloads: bool) -> StoredRows:
    """One row group of an open Parquet file."""
    columns = [ENTRY, KEY, PAYLOAD] if payloads else [ENTRY, KEY]
    table = file.read_row_group(index, columns=columns, use_threads=False).combine_chunks()
    keys = table.column(KEY).combine_chunks()
    if not pa.types.is_dictionary(keys.type):
        keys = keys.dictionary_encode()
    found: list[bytes] | None = None
    if payloads:
        # As bytes: a text would be decoded only to be encoded again.
        stored = table.column(PAYLOAD).combine_chunks()
        plain = pa.Array.from_buffers(BINARY, len(stored), stored.buffers(), offset=stored.offset)
        found = plain.to_pylist()
    return StoredRows(to_numpy(table.column(ENTRY)), keys, found)


def open_segment(raw: bytes | memoryview) -> Any:
    """A segment that is there as a whole, ready to be read row group by row group."""
    return pq.ParquetFile(pa.BufferReader(pa.py_buffer(raw)), read_dictionary=[KEY], pre_buffer=False)


class Batch:
    """The rows of one row group with the values of their fields, each made when it is first asked for."""

    def __init__(self, rows: StoredRows, decoded: Decoded | None) -> None:
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

    def leaves(self, tokens: Tokens) -> Leaves:
        """What lies at a pointer, by row; None where nothing does."""
        assert self._decoded is not None
        return self._decoded.leaves.get(tokens) or [None] * self.count


class Decoded(NamedTuple):
    """Leaves of a row group and how values are made of them."""

    reader: Reader
    leaves: dict[Tokens, Leaves]
    records: dict[int, object]
    rows: int

    def column(self, name: str) -> FieldColumn:
        return self.reader.column(name, self)


class Reader:
    """Makes batches. `reference` has every value come from the reference function, record by record."""

    def __init__(
        self, view: View, fields: Iterable[str], pointers: Iterable[Tokens], *, reference: bool
    ) -> None:
        self._view = view
        self._reference = reference
        self._tokens: dict[str, Tokens] = {}
        for name in fields:
            pointer = view.config.fields[name].pointer_at(view.version)
            # Without a binding there are no values; the whole record is an object, and so none either.
            self._tokens[name] = (parse_pointer(pointer) or ()) if pointer else ()
        self._decoder = Decoder(view, [*self._tokens.values(), *pointers], reference=reference)

    def batch(self, rows: StoredRows) -> Batch:
        assert rows.payloads is not None
        entries: Sequence[int] = rows.entries.tolist()
        leaves, records = self._decoder.leaves(entries, rows.payloads)
        return Batch(rows, Decoded(self, leaves, records, len(entries)))

    def column(self, name: str, decoded: Decoded) -> FieldColumn:
        field = self._view.config.fields[name]
        if self._reference:
            version = self._view.version
            found = [values_of(decoded.records[row], field, version) for row in range(decoded.rows)]
            return column_of_values(field, found)
        tokens = self._tokens[name]
        return column_of(field, decoded.leaves[tokens] if tokens else [None] * decoded.rows)
