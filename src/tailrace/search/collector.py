"""The result of a search in progress: best hits, text statistics, counters and undecided entries.

Nothing here reads: sources and scans decide, `SearchRun` (run.py) adds what they return.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tailrace.search.columns import bits_from_rows, rows_from_bits
from tailrace.search.planner import IndexedRows, PlanPiece, ScanRange
from tailrace.search.ranking import (
    ClauseMatches,
    Scorer,
    SortValue,
    Statistics,
    TopHits,
    has_text_clause,
    sort_rank,
    to_sort_value,
)
from tailrace.search.records import RecordView, Value
from tailrace.search.requests import SearchRequest
from tailrace.search.scan import Payload, PieceStatistics, ScannedRows, Scanner


class SearchCounters:
    """What a search read and what it cost. Times are in seconds here, in milliseconds in the response."""

    def __init__(self) -> None:
        self.indexed_segments = 0
        self.indexed_s = 0.0
        self.scanned_segments = 0
        self.scanned_s = 0.0
        self.scanned_tail_docs = 0
        self.scanned_tail_s = 0.0
        self.exact_candidate_s = 0.0
        self.fts_section_get_s = 0.0
        self.fts_decode_s = 0.0
        self.fts_clause_estimate_s = 0.0
        self.families: set[str] = set()
        self.candidates = 0
        self.decoded = 0
        self.json_parse_s = 0.0
        self.payload_bytes = 0
        self.sort_s = 0.0
        self.peak_hits = 0

    def to_json(self) -> dict[str, object]:
        """By their names in the response; header names have hyphens instead of underscores."""
        return {
            "indexed_segments": self.indexed_segments,
            "indexed_segment_time_ms": _ms(self.indexed_s),
            "scanned_segments": self.scanned_segments,
            "scanned_segment_time_ms": _ms(self.scanned_s),
            "scanned_tail_docs": self.scanned_tail_docs,
            "scanned_tail_time_ms": _ms(self.scanned_tail_s),
            "exact_candidate_time_ms": _ms(self.exact_candidate_s),
            "fts_section_get_ms": _ms(self.fts_section_get_s),
            "fts_decode_ms": _ms(self.fts_decode_s),
            "fts_clause_estimate_ms": _ms(self.fts_clause_estimate_s),
            "index_families_used": sorted(self.families),
            "candidate_doc_ids": self.candidates,
            "decoded_records": self.decoded,
            "json_parse_time_ms": _ms(self.json_parse_s),
            "segment_payload_bytes_fetched": self.payload_bytes,
            "sort_time_ms": _ms(self.sort_s),
            "peak_hits_held": self.peak_hits,
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class OmittedRows(NamedTuple):
    """How many rows were not decided, and where they are."""

    segments: int  # uploaded segments with an undecided row
    sealed_rows: int  # rows in segments that are not uploaded
    wal_rows: int
    rows: int
    oldest: int | None  # first undecided entry


NOTHING_OMITTED = OmittedRows(0, 0, 0, 0, None)


def visible_through(first: int, last: int, undecided: Sequence[ScanRange]) -> int:
    """The largest entry with no undecided entry at or below it."""
    return min((scan_range.first - 1 for scan_range in undecided), default=last) if last >= first else last


def count_omitted(
    undecided: Sequence[ScanRange], sealed: int, segments: Sequence[tuple[int, int]]
) -> OmittedRows:
    """Count undecided rows. `segments` are first and last entries of segments that may hold some."""
    if not undecided:
        return NOTHING_OMITTED
    rows = sum(scan_range.last - scan_range.first + 1 for scan_range in undecided)
    unsealed = sum(max(0, scan_range.last - max(scan_range.first - 1, sealed)) for scan_range in undecided)
    return OmittedRows(
        count_touched_segments(segments, undecided),
        0,
        unsealed,
        rows,
        min(scan_range.first for scan_range in undecided),
    )


def count_touched_segments(segments: Sequence[tuple[int, int]], scan_ranges: Sequence[ScanRange]) -> int:
    """How many segments have a row in one of the ranges."""
    ordered = sorted(scan_ranges)
    firsts = [scan_range.first for scan_range in ordered]
    reach = list(accumulate((scan_range.last for scan_range in ordered), max))  # furthest end so far
    count = 0
    for first, last in segments:
        before = bisect_right(firsts, last)
        count += bool(before) and reach[before - 1] >= first
    return count


class Coverage:
    """What a search or an aggregate has decided of its snapshot so far, and what that cost."""

    def __init__(self, first: int, last: int) -> None:
        self.first = first
        self.last = last
        self.counters = SearchCounters()
        self.scanned: list[ScanRange] = []
        self.indexed: list[ScanRange] = []  # decided by index files, at least in part
        self.undecided: list[ScanRange] = []
        self._primaries: list[tuple[int, int]] = []  # last entry and largest timestamp of each piece

    def add_primary(self, primary: Value | None, last: int) -> None:
        """Add the largest primary timestamp of a piece that ends with the entry `last`."""
        if primary is not None:
            assert isinstance(primary, int)
            self._primaries.append((last, primary))

    def add_indexed(self, first: int, last: int, families: Iterable[str]) -> None:
        """Entries were decided by files of these index families."""
        self.indexed.append(ScanRange(first, last))
        self.counters.families.update(families)

    def add_scan(self, scan_range: ScanRange, decided: int, sealed: int, seconds: float) -> None:
        """Count a scan that decided the entries up to `decided`."""
        if scan_range.first <= sealed:
            self.counters.scanned_s += seconds
        else:
            self.counters.scanned_tail_s += seconds
            self.counters.scanned_tail_docs += decided - scan_range.first + 1

    def omitted(self, sealed: int, segments: Sequence[tuple[int, int]]) -> OmittedRows:
        """Count the segments that were read, and the rows that were not decided."""
        self.counters.scanned_segments = count_touched_segments(segments, self.scanned)
        self.counters.indexed_segments = count_touched_segments(segments, self.indexed)
        return count_omitted(self.undecided, sealed, segments)

    @property
    def through(self) -> int:
        """The largest entry with no undecided entry at or below it."""
        return visible_through(self.first, self.last, self.undecided)

    @property
    def primary_max(self) -> int | None:
        """The largest primary timestamp of the pieces that end at or below `through`."""
        through = self.through
        return max((primary for last, primary in self._primaries if last <= through), default=None)


class SearchProgress(Coverage):
    """All that a search changes while it runs. Only `SearchRun` changes it, never in two steps at once."""

    def __init__(self, first: int, last: int, statistics: Statistics) -> None:
        super().__init__(first, last)
        self.statistics = statistics
        self.rescans: list[ScanRange] = []  # to scan again when the statistics are complete
        self.timed_out = False
        self.stopped_early = False

    def leave_undecided(self, pieces: Sequence[PlanPiece]) -> None:
        """Time is up: these pieces were not decided."""
        if pieces:
            self.timed_out = True
            self.undecided += [ScanRange(piece.first, piece.last) for piece in pieces]

    def add_statistics(self, counted: PieceStatistics, last: int) -> None:
        """Add the statistics of a piece that ends with the entry `last`."""
        self.add_primary(counted.primary_max, last)
        for name, field in counted.statistics.items():
            self.statistics[name].add(field.documents, field.tokens, field.with_token)

    @property
    def exact(self) -> bool:
        return not (self.timed_out or self.undecided or self.stopped_early)


class SearchResult(NamedTuple):
    """Hits and coverage of a search. `hits` has one more than a page if others follow."""

    hits: list[Hit]
    matches: int
    exact: bool  # whether `matches` is the total
    timed_out: bool
    first: int
    last: int  # entry of the snapshot
    through: int  # last entry with no undecided entry at or below it
    primary_max: int | None
    omitted: OmittedRows
    oldest_omitted_ns: int | None
    counters: SearchCounters

    @property
    def complete(self) -> bool:
        return not self.timed_out and not self.omitted.rows


def largest_value(source: IndexedRows, name: str, trimmed: int) -> Value | None:
    """The largest value of a field in the rows of a source behind the entry `trimmed`."""
    if source.first > trimmed:
        bounds = source.bounds(name)
        return None if bounds is None else bounds[1]
    found = (source.extreme_value(name, row, True) for row in rows_from_bits(source.rows_after(trimmed)))
    return max((value for value in found if isinstance(value, int)), default=None)


# Scanned matches held until the statistics are complete; beyond these, ranges are scanned a second time.
UNSCORED_MATCHES_MAX = 250_000
UNSCORED_BYTES_MAX = 16 << 20
FIRST_BLOCK_ROWS = 128  # rows ranked before the others are filtered by the worst hit on the page


class Hit(NamedTuple):
    entry: int
    score: float
    values: list[SortValue]  # the entry number stands for the offset
    groups: list[ClauseMatches]  # terms to score, while the score is not known
    source: IndexedRows | None = None  # can compute the score if `groups` is not filled
    row: int = 0


class HitCollector:
    """Counts the rows that match, and ranks those that may reach the page."""

    def __init__(
        self,
        view: RecordView,
        request: SearchRequest,
        scanner: Scanner,
        statistics: Statistics,
        total_exact_max: int,
    ) -> None:
        self._request = request
        self._config = view.config
        self._scanner = scanner
        self._total_exact_max = total_exact_max
        self.matches = 0
        after = None if request.after is None else sort_rank(request.sort, request.after)
        self.top: TopHits[Hit] = TopHits(request.size, after)
        self.scores_text = has_text_clause(request.query)
        self._scorer = Scorer(view.config, statistics)
        self._waiting: list[tuple[ScannedRows, int]] = []  # scanned rows and which of them match
        self._waiting_rows = self._waiting_bytes = 0
        self._overflowed = False  # more matches than may be held
        self._settled = not (self.scores_text and request.by_score)

    def add_scanned(self, scanned: ScannedRows) -> None:
        """Rank decoded rows that match, or hold them until the statistics are complete."""
        if self._overflowed and not self._settled:
            return
        rows = scanned.match(self._request.query)
        if self._settled or not rows:
            self.add(scanned, rows)
        else:
            self._waiting.append((scanned, rows))
            self._waiting_rows += rows.bit_count()
            self._waiting_bytes += scanned.memory_bytes

    @property
    def must_scan_again(self) -> bool:
        """Whether ranges are only counted for now, and scanned again when the statistics are complete."""
        if self._waiting_rows >= UNSCORED_MATCHES_MAX or self._waiting_bytes >= UNSCORED_BYTES_MAX:
            self._overflowed = True
        return self._overflowed and not self._settled

    def settle_statistics(self, statistics: Statistics) -> None:
        """All statistics have been added: scores computed from here on are final."""
        self._scorer = Scorer(self._config, statistics)
        self._settled = True
        waiting, self._waiting = self._waiting, []
        for scanned, rows in waiting:
            self.add(scanned, rows)

    def add(self, source: IndexedRows, rows: int) -> None:
        """Count rows that match, and rank those that may reach the page.

        In blocks that grow: the first fills the page, whose worst hit then excludes most other rows.
        """
        self.matches += rows.bit_count()
        block = FIRST_BLOCK_ROWS
        while rows := self.may_rank(source, rows):
            listed = rows_from_bits(rows)
            # Newest rows first in a descending order: timestamps mostly grow, offsets always do.
            some = listed[-block:][::-1] if self._request.sort[0].descending else listed[:block]
            if not self._offer_rows(source, some):
                return
            rows &= ~bits_from_rows(some, rows.bit_length())
            block *= 4

    def _offer_rows(self, source: IndexedRows, rows: Sequence[int]) -> bool:
        """Rank some rows. Returns whether later rows can still reach the page."""
        request = self._request
        scores: Mapping[int, float] = {}
        if self.scores_text and request.by_score:
            scores = source.scores(request.query, bits_from_rows(rows, max(rows) + 1), self._scorer)
        for row in rows:
            values = self._sort_values(source, row, scores.get(row, 0.0))
            if request.sort[0].kind == "offset" and self._behind(values):
                return False
            self._offer(Hit(source.entries[row], scores.get(row, 0.0), values, [], source, row))
        return True

    def _may_score(self, source: IndexedRows, rows: int) -> int:
        """The rows whose score may reach the page; among equal scores the next sort key decides."""
        query, worst = self._request.query, self.top.hits[-1]
        rows = source.rows_scoring_at_least(query, rows, self._scorer, worst.score)
        if not rows:
            return 0
        heavier = source.rows_scoring_at_least(
            query, rows, self._scorer, math.nextafter(worst.score, math.inf)
        )
        equal = rows & ~heavier
        return heavier | (self._may_rank_by(1, source, equal) if equal else 0)

    def _behind(self, values: list[SortValue]) -> bool:
        """Whether a row, in the order of offsets, comes behind the page: then all later rows do."""
        worst = self.top.worst
        return worst is not None and sort_rank(self._request.sort, values) >= worst

    def _sort_values(self, source: IndexedRows, row: int, score: float) -> list[SortValue]:
        values: list[SortValue] = []
        for key in self._request.sort:
            if key.kind == "offset":
                values.append(source.entries[row])
            elif key.kind == "score":
                values.append(score)
            else:
                values.append(to_sort_value(source.extreme_value(key.name, row, key.descending)))
        return values

    def may_rank(self, source: IndexedRows, rows: int) -> int:
        """The rows that may reach the page, judged by the first one or two sort keys."""
        if not rows or not self.top.full:
            return rows
        key = self._request.sort[0]
        if key.kind == "score" and key.descending and self.scores_text:
            return self._may_score(source, rows)
        return self._may_rank_by(0, source, rows)

    def _may_rank_by(self, place: int, source: IndexedRows, rows: int) -> int:
        """As `may_rank`, by one sort key where the keys before it are equal. A missing value is greatest."""
        key, worst = self._request.sort[place], self.top.hits[-1].values[place]
        if key.kind == "score" or worst is None:
            return rows & source.rows_without(key.name) if worst is None and key.descending else rows
        if key.kind == "offset":
            assert isinstance(worst, int)
            beyond = source.last < worst if key.descending else source.first > worst
            return 0 if beyond else rows
        if key.descending:
            return rows & (source.rows_in_range(key.name, ">=", worst) | source.rows_without(key.name))
        return rows & source.rows_in_range(key.name, "<=", worst)

    # -- the page ----------------------------------------------------------------------------------------

    def _offer(self, hit: Hit) -> None:
        sort = self._request.sort
        if self._request.by_score:
            pairs = zip(sort, hit.values, strict=True)
            hit = hit._replace(values=[hit.score if key.kind == "score" else value for key, value in pairs])
        place = sort_rank(sort, hit.values)
        if not self.top.wants(place):
            return
        if isinstance(hit.source, ScannedRows):
            # Without the source, so that the rows decoded with it can be freed.
            groups = [] if self._request.by_score else self._scanner.explain(hit.source, hit.row)
            hit = hit._replace(groups=groups, source=None)
        self.top.add(place, hit)

    @property
    def has_enough(self) -> bool:
        """Whether no later row, in the order of offsets, can change the page or the total.

        Never so with text clauses: their scores depend on the statistics of all rows.
        """
        in_order = self._request.sort[0].kind == "offset" and not self.scores_text
        return in_order and self.top.full and self.matches >= self._total_exact_max

    @property
    def scores_at_end(self) -> bool:
        """Whether scores do not decide the order, and are computed for the hits of the page only."""
        return self.scores_text and not self._request.by_score

    def explain(self, hit: Hit, payload: Payload) -> Hit:
        """The hit with the terms to score, from its record."""
        return hit._replace(groups=self._scanner.explain_payload(hit.entry, payload), source=None)

    def hits(self, statistics: Statistics) -> list[Hit]:
        """The best hits in order, one more than a page if others follow."""
        if not self.scores_at_end:
            return self.top.hits
        scorer = Scorer(self._config, statistics)
        return [hit._replace(score=self._score(hit, scorer)) for hit in self.top.hits]

    def _score(self, hit: Hit, scorer: Scorer) -> float:
        if hit.source is None:
            return scorer.score(hit.groups)
        return hit.source.scores(self._request.query, 1 << hit.row, scorer)[hit.row]
