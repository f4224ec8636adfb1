"""Plans which source decides which entries, and caches the statistics of ranges scanned before.

Each entry of the snapshot is decided by exactly one piece: a chunk of the tail index, a span with index
files, or a scan range that is decoded at request time. Scan ranges begin at fixed entries, so that the
statistics of a range can be reused by the next search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tailrace.common.caches import LruCache
from tailrace.search.index_files.spans import IndexSpan, is_outside_times
from tailrace.search.query_language import BoundQuery
from tailrace.search.ranking import Scorer, SortKey, Statistics, sort_rank_part, to_sort_value
from tailrace.search.records import RecordView, Value

SCAN_ROWS = 4096
CANDIDATE_SHARE_MAX = 0.3  # share of a source's rows above which reading all of them is as fast
ENTRY_GAP_MAX = 64  # entries between two candidates that are read together


class IndexedRows(Protocol):
    """Rows in the order of their entries that can be matched and scored without their records.

    Sets of rows are integers with a bit for each row.
    """

    @property
    def entries(self) -> Sequence[int]: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    def rows_after(self, entry: int) -> int: ...
    def match(self, query: BoundQuery) -> int: ...
    def extreme_value(self, name: str, row: int, largest: bool) -> Value | None: ...
    def bounds(self, name: str) -> tuple[Value, Value] | None: ...
    def rows_in_range(self, name: str, comparison: str, bound: Value) -> int: ...
    def rows_without(self, name: str) -> int: ...
    def add_statistics(self, statistics: Statistics, after: int) -> None: ...
    def scores(self, query: BoundQuery, rows: int, scorer: Scorer) -> dict[int, float]: ...
    def rows_scoring_at_least(self, query: BoundQuery, rows: int, scorer: Scorer, least: float) -> int: ...


class ScanRange(NamedTuple):
    """Entries from `first` to `last` that have to be decoded."""

    first: int
    last: int

    def is_whole(self, rows: int) -> bool:
        """Whether it is one of the fixed ranges of `rows` entries, and not a part of one."""
        return self.last - self.first + 1 == rows and (self.first - 1) % rows == 0


PlanPiece = IndexedRows | IndexSpan | ScanRange


def plan_pieces(
    first: int, last: int, sources: Sequence[IndexedRows | IndexSpan], rows: int, *, newest_first: bool
) -> list[PlanPiece]:
    """Pieces that cover the entries from `first` to `last`, each entry once, in the order of the search.

    `rows` is the length of a whole scan range.
    """
    pieces: list[PlanPiece] = []
    at = first
    for source in sources:
        if source.last < at:
            continue
        if source.first > last:
            break
        if source.last > last:
            break  # it has rows behind the snapshot: scanned rather than masked
        pieces += split_scan_ranges(at, source.first - 1, rows)
        pieces.append(source)
        at = source.last + 1
    pieces += split_scan_ranges(at, last, rows)
    return pieces[::-1] if newest_first else pieces


def order_by_best_value(sources: Sequence[IndexedRows], key: SortKey) -> list[IndexedRows]:
    """Sources by their best sort value: the page fills early, and most other rows are excluded."""

    def best(source: IndexedRows) -> Any:
        bounds = source.bounds(key.name)
        if bounds is None or (key.descending and source.rows_without(key.name)):
            return sort_rank_part(key, None)
        return sort_rank_part(key, to_sort_value(bounds[1] if key.descending else bounds[0]))

    return sorted(sources, key=best)


def group_adjacent(entries: Sequence[int]) -> list[list[int]]:
    """Ascending entries in groups that are read together."""
    runs: list[list[int]] = []
    for entry in entries:
        if runs and entry - runs[-1][-1] <= ENTRY_GAP_MAX:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


def split_scan_ranges(first: int, last: int, rows: int) -> list[ScanRange]:
    """The entries from `first` to `last`, cut at fixed places."""
    found: list[ScanRange] = []
    while first <= last:
        end = min(last, (first - 1) // rows * rows + rows)
        found.append(ScanRange(first, end))
        first = end + 1
    return found


RANGES_CACHED_MAX = 4096
TOKENS_PER_RANGE_MAX = 64


class RangeStatistics:
    """Bounds of the primary timestamps and text statistics of one scan range."""

    __slots__ = ("_fields", "_tokens", "has_primary", "primary_max", "primary_min")

    def __init__(self) -> None:
        self.has_primary = False
        self.primary_max: int | None = None
        self.primary_min: int | None = None
        self._fields: dict[str, tuple[int, int]] = {}
        self._tokens: dict[tuple[str, str], int] = {}

    def has_counts(self, wanted: Mapping[str, set[str]], primary: str | None) -> bool:
        if primary is not None and not self.has_primary:
            return False
        return all(
            name in self._fields and all((name, token) in self._tokens for token in tokens)
            for name, tokens in wanted.items()
        )

    def rules_out(self, query: BoundQuery, primary: str | None) -> bool:
        """Whether no row can match, judged by the primary timestamps alone."""
        if primary is None or self.primary_max is None or self.primary_min is None:
            return False
        return is_outside_times(query, primary, (self.primary_min, self.primary_max))

    def learn(self, statistics: Statistics, primary_max: int | None, primary_min: int | None = None) -> None:
        """Store what a scan of the whole range counted."""
        self.has_primary = True
        self.primary_max = primary_max
        self.primary_min = primary_min
        for name, field in statistics.items():
            self._fields[name] = (field.documents, field.tokens)
            for token, count in field.with_token.items():
                if len(self._tokens) >= TOKENS_PER_RANGE_MAX:
                    self._tokens.clear()
                self._tokens[name, token] = count

    def add_to(self, statistics: Statistics) -> None:
        for name, field in statistics.items():
            documents, tokens = self._fields[name]
            field.add(documents, tokens, {token: self._tokens[name, token] for token in field.with_token})


class RangeStatisticsCache:
    """LRU cache by stream and range. Entries never change; a change of the registry invalidates."""

    def __init__(self) -> None:
        self._cached: LruCache[tuple[int, int], tuple[RecordView, RangeStatistics]] = LruCache(
            entries_max=RANGES_CACHED_MAX
        )

    def find(self, number: int, scan_range: ScanRange, view: RecordView) -> RangeStatistics | None:
        cached = self._cached.get((number, scan_range.first))
        if cached is None or not cached[0].same_values(view):
            return None
        return cached[1]

    def put(self, number: int, scan_range: ScanRange, view: RecordView, statistics: RangeStatistics) -> None:
        self._cached.put((number, scan_range.first), (view, statistics))
