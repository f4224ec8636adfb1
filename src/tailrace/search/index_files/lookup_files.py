"""The `exact` and routing key index files: entries by field value and by key.

`exact`: the entries of each value of a field.

`routing_key_index` and `routing_key_lexicon`: where a key is, and which keys come next.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import xxhash

from tailrace.log.routing_keys import LexiconTimes
from tailrace.search.index_files import format as names
from tailrace.search.index_files.format import ENTRIES, FIELD, VALUE
from tailrace.search.index_files.parquet_file import ParquetFile, column_array
from tailrace.search.numpy_arrays import EMPTY, np, to_numpy
from tailrace.storage.segments import parquet
from tailrace.storage.segments.parquet import BINARY, pa, pc

_FOUND_MAX = 64  # look-ups that are kept
_COLUMNS = (VALUE, ENTRIES)
FILTERED_ROWS_MIN = 512  # of a row group: a shorter one is as soon decoded

_Filters = dict[int, bytes | None]  # by row group


class ExactFile:
    """Only the row groups that may hold a value are decoded. Answers ascend."""

    def __init__(self, file: ParquetFile) -> None:
        self._file = file
        self._groups: dict[str, list[int]] = {}
        for group in range(file.groups):
            bounds = file.statistics(group, FIELD)
            if bounds is not None:
                self._groups.setdefault(_text(bounds[0]), []).append(group)
        self._found: OrderedDict[tuple[str, bytes | None, bool], Any] = OrderedDict()
        self._found_bytes = 0
        self._filters: dict[str, _Filters] = {}  # by field
        self._filter_bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes + self._found_bytes + self._filter_bytes

    def entries(self, field: str, stored: bytes | None) -> Any:
        """The entries with a value, or with any if it is None."""
        return self._kept((field, stored, False), lambda: self._looked_up(field, stored))

    def lacks(self, field: str, stored: bytes) -> bool:
        """Whether no entry has a value, if what is in memory tells. Nothing is read: the loop may ask."""
        found = self._found.get((field, stored, False))
        if found is not None:
            return not len(found)
        groups, filters = self._groups_with(field, stored), self._filters.get(field)
        return not groups or (filters is not None and not _not_ruled_out(groups, filters, stored))

    def entries_from(self, field: str, prefix: bytes) -> Any:
        """The entries with a string that starts like this."""
        return self._kept((field, prefix, True), lambda: self._starting_with(field, prefix))

    def _kept(self, key: tuple[str, bytes | None, bool], look_up: Callable[[], Any]) -> Any:
        """What was looked up last stays: a file may speak for many spans, and each of them asks."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = look_up()
            self._found_bytes += found.nbytes + 200
            if len(self._found) > _FOUND_MAX:
                _, old = self._found.popitem(last=False)
                self._found_bytes -= old.nbytes + 200
        return found

    def _looked_up(self, field: str, stored: bytes | None) -> Any:
        groups = self._groups_with_any(field) if stored is None else self._groups_with(field, stored)
        if stored is not None and any(self._file.rows_in(group) >= FILTERED_ROWS_MIN for group in groups):
            groups = _not_ruled_out(groups, self._filters_of(field), stored)
        lists: list[Any] = []
        for table in self._file.tables(groups, _COLUMNS):
            values = column_array(table, VALUE)
            marks = values.is_null() if stored is None else pc.equal(values, pa.scalar(stored, values.type))
            lists.append(to_numpy(column_array(table, ENTRIES).filter(marks).flatten()))
        return np.concatenate(lists) if lists else EMPTY

    def _filters_of(self, field: str) -> _Filters:
        found = self._filters.get(field)
        if found is None:
            groups = self._groups[field]
            found = dict(zip(groups, self._file.filters(groups, VALUE), strict=True))
            self._filters[field] = found
            self._filter_bytes += sum(len(bits) for bits in found.values() if bits is not None)
        return found

    def _starting_with(self, field: str, prefix: bytes) -> Any:

        def may_hold(least: bytes, most: bytes) -> bool:
            return least[: len(prefix)] <= prefix <= most

        lists: list[Any] = []
        for table in self._file.tables(self._groups_where(field, may_hold), _COLUMNS):
            marks = pc.fill_null(pc.starts_with(column_array(table, VALUE).cast(BINARY), prefix), False)
            lists.append(to_numpy(column_array(table, ENTRIES).filter(marks).flatten()))
        return np.unique(np.concatenate(lists)) if lists else EMPTY

    def _groups_with_any(self, field: str) -> list[int]:
        """Row groups of a field that tell which entries have any value."""
        return [group for group in self._groups.get(field, ()) if self._file.has_nulls(group, VALUE)]

    def _groups_with(self, field: str, stored: bytes) -> list[int]:
        """Row groups of a field whose bounds a value lies in."""
        return self._groups_where(field, lambda least, most: least <= stored <= most)

    def _groups_where(self, field: str, may_hold: Callable[[bytes, bytes], bool]) -> list[int]:
        """Row groups of a field whose values reach from one to another that may be wanted."""
        groups = self._groups.get(field, ())
        found = ((group, self._file.statistics(group, VALUE)) for group in groups)
        return [group for group, bounds in found if bounds is None or may_hold(*bounds)]


def _not_ruled_out(groups: Sequence[int], filters: _Filters, stored: bytes) -> list[int]:
    """Of some row groups those whose filters may have a value."""
    hashed = xxhash.xxh64_intdigest(stored)
    return [
        group
        for group in groups
        if (bits := filters[group]) is None or parquet.bloom_may_hold(memoryview(bits), hashed)
    ]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


_KNOWN_MAX = 256  # look-ups that are kept
_PLACES_BYTES = 500
_PLACES = (names.KEY_HASH, names.KEY, names.SPAN_FIRSTS, names.SPAN_LASTS)
_WORDS = (names.KEY, names.FIRST_ENTRY, names.LAST_ENTRY)


class KeyRanges(NamedTuple):
    """Stretches of entries that a key lies in, ascending."""

    firsts: list[int]
    lasts: list[int]

    def next_from(self, entry: int) -> int | None:
        """Where to look at or behind an entry."""
        at = bisect_left(self.lasts, entry)
        return max(entry, self.firsts[at]) if at < len(self.lasts) else None


class RoutingKeyIndexFile:
    def __init__(self, file: ParquetFile) -> None:
        self._file = file
        self._known: OrderedDict[bytes, KeyRanges] = OrderedDict()

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes + len(self._known) * _PLACES_BYTES

    def known(self, key: bytes) -> KeyRanges | None:
        """The answer of before, without a thread."""
        return self._known.get(key)

    def places(self, key: bytes) -> KeyRanges:
        """Nowhere, if the file does not have the key."""
        found = self._known[key] = self._looked_up(key) or KeyRanges([], [])
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return found

    def _looked_up(self, key: bytes) -> KeyRanges | None:
        hashed = names.key_hash(key)
        for group in range(self._file.groups):
            bounds = self._file.statistics(group, names.KEY_HASH)
            if bounds is not None and not bounds[0] <= hashed <= bounds[1]:
                continue
            table = self._file.group(group, _PLACES)
            marks = pc.equal(column_array(table, names.KEY_HASH), pa.scalar(hashed))
            found = table.filter(pc.and_(marks, pc.equal(column_array(table, names.KEY), pa.scalar(key))))
            if found.num_rows:
                [row] = found.to_pylist()
                return KeyRanges(row[names.SPAN_FIRSTS], row[names.SPAN_LASTS])
        return None


class RoutingKeyLexiconFile:
    def __init__(self, file: ParquetFile) -> None:
        self._file = file

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes

    def keys(self, after: bytes | None, wanted: int, trimmed: int, times: LexiconTimes) -> list[bytes]:
        """The first keys behind one, of those that have an entry behind `trimmed`."""
        found: list[bytes] = []
        for group in range(self._file.groups):
            bounds = self._file.statistics(group, names.KEY)
            if len(found) >= wanted:
                break
            if after is not None and bounds is not None and bounds[1] <= after:
                continue
            begun_s = time.monotonic()
            table = self._file.group(group, _WORDS)
            decoded_s = time.monotonic()
            marks: Any = pc.greater(column_array(table, names.LAST_ENTRY), pa.scalar(trimmed))
            if after is not None:
                marks = pc.and_(marks, pc.greater(column_array(table, names.KEY), pa.scalar(after)))
            found += column_array(table, names.KEY).filter(marks).slice(0, wanted - len(found)).to_pylist()
            times.decode_s += decoded_s - begun_s
            times.enumerate_s += time.monotonic() - decoded_s
        return found
