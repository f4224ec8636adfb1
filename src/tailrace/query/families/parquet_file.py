"""A Parquet file of a family in memory: its facts are checked, its row groups decoded on demand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

from tailrace.query import family_format as names
from tailrace.query.families.shelf import UnusableFileError
from tailrace.store.arrow import pa, pq

_GROUP_OVERHEAD_BYTES = 2048  # of the parsed footer
DECODED_BYTES_MAX = 32 << 20  # of one file: the row groups that were not asked for longest go first


def check_facts(facts: dict[str, str], family: str, stream_id: str, first: int, last: int) -> None:
    """Refuses a file that speaks of something else, or in a form that is not known yet."""
    try:
        form = int(facts[names.FACT_FORMAT])
        found = (
            facts[names.FACT_FAMILY],
            facts[names.FACT_STREAM_ID],
            int(facts[names.FACT_FIRST]),
            int(facts[names.FACT_LAST]),
        )
    except (KeyError, ValueError) as error:
        raise UnusableFileError(f"it lacks a fact: {error}") from error
    if form > names.FORMAT:
        raise UnusableFileError(f"it has format {form}, of a newer version of Tailrace")
    if found != (family, stream_id, first, last):
        raise UnusableFileError(f"it is the {found[0]} of {found[2]} to {found[3]} of {found[1]}")


class ParquetFile:
    """Row groups of one file. What was decoded last stays, and counts as memory."""

    def __init__(self, raw: bytes | memoryview) -> None:
        try:
            self._file: Any = pq.ParquetFile(pa.BufferReader(pa.py_buffer(raw)), pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise UnusableFileError(f"it is no Parquet file: {error}") from error
        self.metadata: Any = self._file.metadata
        self.groups: int = self.metadata.num_row_groups
        self.names: list[str] = self._file.schema_arrow.names
        self._raw_bytes = len(raw)
        schema = self.metadata.schema
        self._leaves: dict[str, int] = {schema.column(at).path: at for at in range(len(schema))}
        self._decoded: OrderedDict[tuple[int, tuple[str, ...]], Any] = OrderedDict()
        self._decoded_bytes = 0
        self._bounds: dict[tuple[int, str], tuple[Any, Any] | None] = {}  # that were asked for
        self._lock = Lock()  # searches on several threads share the file, and the library has one reader

    @property
    def facts(self) -> dict[str, str]:
        found: dict[bytes, bytes] = self.metadata.metadata or {}
        try:
            return {key.decode(): value.decode() for key, value in found.items()}
        except UnicodeDecodeError as error:
            raise UnusableFileError("its facts are no text") from error

    @property
    def memory_bytes(self) -> int:
        return self._raw_bytes + self._decoded_bytes + _GROUP_OVERHEAD_BYTES * (self.groups + 1)

    def statistics(self, group: int, column: str) -> tuple[Any, Any] | None:
        """The smallest and largest value of a plain column in a row group; None if that is not known."""
        key = (group, column)
        if key not in self._bounds:
            found: Any = self.metadata.row_group(group).column(self._leaves[column]).statistics
            self._bounds[key] = (found.min, found.max) if found is not None and found.has_min_max else None
        return self._bounds[key]

    def has_nulls(self, group: int, column: str) -> bool:
        found = self.metadata.row_group(group).column(self._leaves[column]).statistics
        return found is None or not found.has_null_count or found.null_count > 0

    def group(self, group: int, columns: Sequence[str]) -> Any:
        """A table with one chunk for each column."""
        key = (group, tuple(columns))
        with self._lock:
            table = self._decoded.get(key)
            if table is None:
                table = self._decoded[key] = self._read_group(group, columns)
                self._decoded_bytes += table.nbytes
                while self._decoded_bytes > DECODED_BYTES_MAX and len(self._decoded) > 1:
                    self._decoded_bytes -= self._decoded.popitem(last=False)[1].nbytes
            else:
                self._decoded.move_to_end(key)
        return table

    def read_group(self, group: int, columns: Sequence[str]) -> Any:
        """As `group`, for what is not worth keeping."""
        with self._lock:
            return self._read_group(group, columns)

    def _read_group(self, group: int, columns: Sequence[str]) -> Any:
        try:
            found = self._file.read_row_group(group, columns=list(columns), use_threads=False)
            return found.combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise UnusableFileError(f"row group {group} cannot be decoded: {error}") from error

    def read(self, columns: Sequence[str]) -> Any:
        """Whole columns; they are not kept."""
        try:
            with self._lock:
                return self._file.read(columns=list(columns), use_threads=False).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise UnusableFileError(f"it cannot be decoded: {error}") from error


def array_in(table: Any, name: str) -> Any:
    """A column as one array."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
