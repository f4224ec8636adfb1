"""The lookup index files: `exact` (entries by field value), `routing_key_index` (entry ranges by key) and
`routing_key_lexicon` (keys in order).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import xxhash

from tailrace.common.caches import LruCache
from tailrace.log.routing_keys import LexiconTimes
from tailrace.search.index_files import format as names
from tailrace.search.index_files.format import ENTRIES, FIELD, VALUE
from tailrace.search.index_files.parquet_file import ParquetFile, column_array
from tailrace.search.numpy_arrays import EMPTY, np, to_numpy
from tailrace.storage.segments import parquet
from tailrace.storage.segments.parquet import BINARY, pa, pc

_FOUND_MAX = 64  # cached lookups
_COLUMNS = (VALUE, ENTRIES)
FILTERED_ROWS_MIN = 512  # rows of a row group from which its Bloom filter is worth reading

_Filters = dict[int, bytes | None]  # by row group


class ExactFile:
    """The ascending entries of each value. Decodes only row groups that may have a value."""

    def __init__(self, file: ParquetFile) -> None:
        self._file = file
        self._groups: dict[str, list[int]] = {}
        for group in range(file.groups):
            bounds = file.statistics(group, FIELD)
            if bounds is not None:
                self._groups.setdefault(_text(bounds[0]), []).append(group)
        self._found: LruCache[tuple[str, bytes | None, bool], Any] = LruCache(
            entries_max=_FOUND_MAX, size_of=lambda _, found: found.nbytes + 200
        )
        self._filters: dict[str, _Filters] = {}  # by field
        self._filter_bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes + self._found.size + self._filter_bytes

    def entries(self, field: str, stored: bytes | None) -> Any:
        """The entries with a value, or with any value if `stored` is None."""
        return self._cached_lookup((field, stored, False), lambda: self._look_up(field, stored))

    def lacks(self, field: str, stored: bytes) -> bool:
        """Whether no entry has a value, judged by what is in memory; safe on the event loop."""
        found = self._found.peek((field, stored, False))
        if found is not None:
            return not len(found)
        groups, filters = self._groups_with(field, stored), self._filters.get(field)
        return not groups or (filters is not None and not _not_ruled_out(groups, filters, stored))

    def entries_from(self, field: str, prefix: bytes) -> Any:
        """The entries with a string that starts with a prefix."""
        return self._cached_lookup((field, prefix, True), lambda: self._starting_with(field, prefix))

    def _cached_lookup(self, key: tuple[str, bytes | None, bool], look_up: Callable[[], Any]) -> Any:
        """The last lookups are cached: a file may cover many spans, each of which needs them."""
        found = self._found.peek(key)
        if found is None:
            found = look_up()
            self._found.put(key, found)
        return found

    def _look_up(self, field: str, stored: bytes | None) -> Any:
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
        """Row groups of a field with the entries that have any value."""
        return [group for group in self._groups.get(field, ()) if self._file.has_nulls(group, VALUE)]

    def _groups_with(self, field: str, stored: bytes) -> list[int]:
        """Row groups of a field whose bounds include a value."""
        return self._groups_where(field, lambda least, most: least <= stored <= most)

    def _groups_where(self, field: str, may_hold: Callable[[bytes, bytes], bool]) -> list[int]:
        """Row groups of a field whose smallest and largest value pass a test."""
        groups = self._groups.get(field, ())
        found = ((group, self._file.statistics(group, VALUE)) for group in groups)
        return [group for group, bounds in found if bounds is None or may_hold(*bounds)]


def _not_ruled_out(groups: Sequence[int], filters: _Filters, stored: bytes) -> list[int]:
    """The row groups whose Bloom filters do not exclude a value."""
    hashed = xxhash.xxh64_intdigest(stored)
    return [
        group
        for group in groups
        if (bits := filters[group]) is None or parquet.bloom_may_hold(memoryview(bits), hashed)
    ]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


_KNOWN_MAX = 256  # cached lookups
_PLACES_BYTES = 500
_PLACES = (names.KEY_HASH, names.KEY, names.SPAN_FIRSTS, names.SPAN_LASTS)
_WORDS = (names.KEY, names.FIRST_ENTRY, names.LAST_ENTRY)


class KeyRanges(NamedTuple):
    """Ranges of entries that have a key, ascending."""

    firsts: list[int]
    lasts: list[int]

    def next_from(self, entry: int) -> int | None:
        """The first entry at or behind `entry` in a range; None if there is none."""
        at = bisect_left(self.lasts, entry)
        return max(entry, self.firsts[at]) if at < len(self.lasts) else None


class RoutingKeyIndexFile:
    def __init__(self, file: ParquetFile) -> None:
        self._file = file
        self._known: LruCache[bytes, KeyRanges] = LruCache(entries_max=_KNOWN_MAX)

    @property
    def memory_bytes(self) -> int:
        return self._file.memory_bytes + len(self._known) * _PLACES_BYTES

    def known(self, key: bytes) -> KeyRanges | None:
        """The cached ranges; safe on the event loop."""
        return self._known.peek(key)

    def places(self, key: bytes) -> KeyRanges:
        """The ranges of a key, read from the file."""
        found = self._look_up(key) or KeyRanges([], [])
        self._known.put(key, found)
        return found

    def _look_up(self, key: bytes) -> KeyRanges | None:
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
        """The first `wanted` keys behind `after` that have an entry behind `trimmed`."""
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
