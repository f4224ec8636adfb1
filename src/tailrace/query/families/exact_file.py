"""`exact`: the entries of each value of a field."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from tailrace.query.families.parquet_file import ParquetFile, array_in
from tailrace.query.family_format import ENTRIES, FIELD, VALUE
from tailrace.store.arrow import BINARY, INT64, pa, pc

_FOUND_MAX = 64  # look-ups that are kept
_COLUMNS = (VALUE, ENTRIES)


class ExactFile:
    """Only the row groups that may hold a value are decoded. Answers are Arrow arrays, ascending."""

    def __init__(self, file: ParquetFile) -> None:
        self._file = file
        self._groups: dict[str, list[int]] = {}
        for group in range(file.groups):
            bounds = file.statistics(group, FIELD)
            if bounds is not None:
                self._groups.setdefault(_text(bounds[0]), []).append(group)
        self._found: OrderedDict[tuple[str, bytes | None], Any] = OrderedDict()
        self._found_bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes + self._found_bytes

    def entries(self, field: str, stored: bytes | None) -> Any:
        """The entries with a value, or with any if it is None."""
        key = (field, stored)
        found = self._found.get(key)
        if found is None:
            found = self._looked_up(field, stored)
            self._found[key] = found
            self._found_bytes += found.nbytes + 200
            if len(self._found) > _FOUND_MAX:
                _, old = self._found.popitem(last=False)
                self._found_bytes -= old.nbytes + 200
        return found

    def _looked_up(self, field: str, stored: bytes | None) -> Any:
        lists: list[Any] = []
        for group in self._groups.get(field, ()):
            bounds = self._file.statistics(group, VALUE)
            if stored is not None and bounds is not None and not bounds[0] <= stored <= bounds[1]:
                continue
            table = self._file.group(group, _COLUMNS)
            values = array_in(table, VALUE)
            marks = values.is_null() if stored is None else pc.equal(values, pa.scalar(stored, values.type))
            lists.append(array_in(table, ENTRIES).filter(marks).flatten())
        return pa.concat_arrays(lists) if lists else pa.array([], INT64)

    def entries_from(self, field: str, prefix: bytes) -> Any:
        """The entries with a string that starts like this, in no order, some more than once."""
        lists: list[Any] = []
        for group in self._groups.get(field, ()):
            bounds = self._file.statistics(group, VALUE)
            if bounds is not None and not (bounds[0][: len(prefix)] <= prefix <= bounds[1]):
                continue
            table = self._file.group(group, _COLUMNS)
            marks = pc.fill_null(pc.starts_with(array_in(table, VALUE).cast(BINARY), prefix), False)
            lists.append(array_in(table, ENTRIES).filter(marks).flatten())
        return pa.concat_arrays(lists) if lists else pa.array([], INT64)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()
