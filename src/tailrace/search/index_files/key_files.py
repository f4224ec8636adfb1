"""`routing_key_index` and `routing_key_lexicon`: where a key is, and which keys come next."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import OrderedDict
from typing import Any, NamedTuple

from tailrace.log.routing_keys import LexiconTimes
from tailrace.search.index_files import format as names
from tailrace.search.index_files.parquet_file import ParquetFile, column_array
from tailrace.storage.segments.parquet import pa, pc

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
