"""Who decides which rows: indexed sources where there are any, scans for the rest.

Each row at or below the head is decided by exactly one piece. An indexed source is anything that answers the
questions of `Indexed`: chunks of the tail index do, and files of built indexes do when they are open; before
that they are a span. What no source covers is cut into stretches that are decoded at request time. Stretches
begin at fixed entries, so that what was learnt about one serves the next search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tailrace.search.bind import BoundQuery
from tailrace.search.index_files.span import IndexSpan
from tailrace.search.score import Scorer, Statistics
from tailrace.search.sort import SortKey, sort_rank_part, to_sort_value
from tailrace.search.values import Value

SCAN_ROWS = 4096
CANDIDATE_SHARE_MAX = 0.3  # of the rows of a source: beyond, reading them all is not slower
ENTRY_GAP_MAX = 64  # entries between two candidates that are fetched in one go


class IndexedRows(Protocol):
    """Rows, in the order of their entries, that can be decided without their records."""

    @property
    def entries(self) -> Sequence[int]: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    def after(self, entry: int) -> int: ...
    def match(self, query: BoundQuery) -> int: ...
    def edge(self, name: str, row: int, largest: bool) -> Value | None: ...
    def bounds(self, name: str) -> tuple[Value, Value] | None: ...
    def within(self, name: str, comparison: str, bound: Value) -> int: ...
    def missing(self, name: str) -> int: ...
    def add_statistics(self, statistics: Statistics, after: int) -> None: ...
    def scores(self, query: BoundQuery, rows: int, scorer: Scorer) -> dict[int, float]: ...
    def heavy(self, query: BoundQuery, rows: int, scorer: Scorer, least: float) -> int: ...


class ScanRange(NamedTuple):
    """Entries from `first` to `last` that have to be decoded."""

    first: int
    last: int

    def is_whole(self, rows: int) -> bool:
        """Whether it is one of the fixed ones of so many rows, from edge to edge."""
        return self.last - self.first + 1 == rows and (self.first - 1) % rows == 0


PlanPiece = IndexedRows | IndexSpan | ScanRange


def plan_pieces(
    first: int, last: int, sources: Sequence[IndexedRows | IndexSpan], rows: int, *, newest_first: bool
) -> list[PlanPiece]:
    """Pieces that cover the entries from `first` to `last`, each entry once, in the order of the search.

    `rows` is the length of a whole stretch.
    """
    pieces: list[PlanPiece] = []
    at = first
    for source in sources:
        if source.last < at:
            continue
        if source.first > last:
            break
        if source.last > last:
            break  # rows behind the snapshot: scanned rather than masked
        pieces += split_scan_ranges(at, source.first - 1, rows)
        pieces.append(source)
        at = source.last + 1
    pieces += split_scan_ranges(at, last, rows)
    return pieces[::-1] if newest_first else pieces


def order_by_best_value(sources: Sequence[IndexedRows], key: SortKey) -> list[IndexedRows]:
    """Sources in the order of the best value each may bring: most rows then never get near the page."""

    def best(source: IndexedRows) -> Any:
        bounds = source.bounds(key.name)
        if bounds is None or (key.descending and source.missing(key.name)):
            return sort_rank_part(key, None)
        return sort_rank_part(key, to_sort_value(bounds[1] if key.descending else bounds[0]))

    return sorted(sources, key=best)


def group_adjacent(entries: Sequence[int]) -> list[list[int]]:
    """Ascending entries in runs that are fetched in one go."""
    runs: list[list[int]] = []
    for entry in entries:
        if runs and entry - runs[-1][-1] <= ENTRY_GAP_MAX:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


def split_scan_ranges(first: int, last: int, rows: int) -> list[ScanRange]:
    """Entries that have to be decoded, cut at fixed places."""
    found: list[ScanRange] = []
    while first <= last:
        end = min(last, (first - 1) // rows * rows + rows)
        found.append(ScanRange(first, end))
        first = end + 1
    return found
