"""The result of one search in progress: best hits, text statistics, counters and undecided entries.

What a search looked at, what it cost, and what it had to leave out.

One search under way: counts matches, keeps the best, and knows what is still undecided.

Everything here is computing and runs on a thread of the search; never two steps of one search at a time.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from tailrace.search.columns import bits_from_rows, rows_from_bits
from tailrace.search.planner import IndexedRows, RangeStatistics, ScanRange
from tailrace.search.ranking import (
    ClauseMatches,
    Scorer,
    SortValue,
    TopHits,
    has_text_clause,
    sort_rank,
    to_sort_value,
)
from tailrace.search.records import RecordView, Value
from tailrace.search.requests import SearchRequest
from tailrace.search.scan import Payload, ScannedRows, Scanner, ScanStatistics


class SearchCounters:
    """Times are in seconds while they are counted, and milliseconds where they are shown."""

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

    def shown(self) -> dict[str, object]:
        """By the names of the response, those of the headers with underscores."""
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
    """The rows that were not decided."""

    segments: int  # uploaded ones with such a row
    sealed_rows: int  # in segments that are not uploaded
    wal_rows: int
    rows: int
    oldest: int | None  # the first such entry


NOTHING_OMITTED = OmittedRows(0, 0, 0, 0, None)


def visible_through(first: int, last: int, undecided: Sequence[ScanRange]) -> int:
    """The greatest entry with nothing undecided at or below it."""
    return min((stretch.first - 1 for stretch in undecided), default=last) if last >= first else last


def count_omitted(
    undecided: Sequence[ScanRange], sealed: int, segments: Sequence[tuple[int, int]]
) -> OmittedRows:
    """`segments` are the first and last entries of those that may hold undecided rows."""
    if not undecided:
        return NOTHING_OMITTED
    rows = sum(stretch.last - stretch.first + 1 for stretch in undecided)
    unsealed = sum(max(0, stretch.last - max(stretch.first - 1, sealed)) for stretch in undecided)
    return OmittedRows(
        count_touched_segments(segments, undecided),
        0,
        unsealed,
        rows,
        min(stretch.first for stretch in undecided),
    )


def count_touched_segments(segments: Sequence[tuple[int, int]], stretches: Sequence[ScanRange]) -> int:
    """How many segments have a row in some of the stretches."""
    ordered = sorted(stretches)
    firsts = [stretch.first for stretch in ordered]
    reach = list(accumulate((stretch.last for stretch in ordered), max))  # of a stretch and those before it
    count = 0
    for first, last in segments:
        before = bisect_right(firsts, last)
        count += bool(before) and reach[before - 1] >= first
    return count


# What may wait for the statistics, in matches and bytes; the rest is scanned a second time.
UNSCORED_MATCHES_MAX = 250_000
UNSCORED_BYTES_MAX = 16 << 20
FIRST_BLOCK_ROWS = 128  # of a source, offered before it is looked which others have a chance


class Hit(NamedTuple):
    entry: int
    score: float
    values: list[SortValue]  # with the entry's number in the place of the offset
    groups: list[ClauseMatches]  # what weighs, while the score is not known
    source: IndexedRows | None = None  # who knows what weighs, if that is not known here
    row: int = 0


class HitCollector:
    """`trimmed` is the last entry that retention has taken: it and what comes before is not there."""

    def __init__(self, view: RecordView, request: SearchRequest, trimmed: int, total_exact_max: int) -> None:
        self.request = request
        self.counters = SearchCounters()
        self.scanner = Scanner(view, request)
        self.matches = 0
        self._primaries: list[tuple[int, int]] = []  # by piece: its last entry, its largest timestamp
        self.undecided: list[ScanRange] = []
        self._view = view
        self._trimmed = trimmed
        self._total_exact_max = total_exact_max
        after = None if request.after is None else sort_rank(request.sort, request.after)
        self.top: TopHits[Hit] = TopHits(request.size, after)
        self.weighs = has_text_clause(request.query)
        self.statistics = self.scanner.new_statistics()
        self._scorer = Scorer(view.config, self.statistics)
        self._waiting: list[tuple[ScannedRows, int]] = []  # with the rows of each that match
        self._waiting_rows = self._waiting_bytes = 0
        self._overflowed = False  # more matches than may wait
        self._settled = not (self.weighs and request.by_score)

    # -- scans -------------------------------------------------------------------------------------------

    def scan(
        self, first: int, payloads: Sequence[Payload], counts: ScanStatistics | None, deadline: float
    ) -> int:
        """How many payloads were decided before the deadline."""
        begun = time.monotonic()
        decided = self.scanner.scan(first, payloads, counts, deadline, self._take)
        self.counters.json_parse_s += time.monotonic() - begun
        return decided

    def verify(self, entries: Sequence[int], payloads: Sequence[Payload], deadline: float) -> int:
        """How many candidates of an index were decided before the deadline."""
        begun = time.monotonic()
        decided = self.scanner.verify(entries, payloads, deadline, self._take)
        self.counters.json_parse_s += time.monotonic() - begun
        return decided

    def explain(self, hit: Hit, payload: Payload) -> Hit:
        """A hit with all that weighs in it, from its record."""
        return hit._replace(groups=self.scanner.groups_in(hit.entry, payload), source=None)

    def counted(self, counts: ScanStatistics, last: int) -> None:
        """A stretch, or what was decided of it up to `last`, is counted in."""
        self.see_primary(counts.primary_max, last)
        for name, field in counts.statistics.items():
            self.statistics[name].add(field.documents, field.tokens, field.with_token)

    def known(self, facts: RangeStatistics, last: int) -> None:
        """As `counted`, for a stretch that was counted before."""
        self.see_primary(facts.primary_max, last)
        facts.add_to(self.statistics)

    def see_primary(self, primary: Value | None, last: int) -> None:
        if primary is not None:
            assert isinstance(primary, int)
            self._primaries.append((last, primary))

    def primary_max(self, through: int) -> int | None:
        """The largest primary timestamp of the pieces that end at or below an entry."""
        return max((primary for last, primary in self._primaries if last <= through), default=None)

    def _take(self, scanned: ScannedRows) -> None:
        """Decides rows that were decoded, or keeps them until it is known what weighs how much."""
        if self._overflowed and not self._settled:
            return
        rows = scanned.match(self.request.query)
        if self._settled or not rows:
            self._keep_best(scanned, rows)
        else:
            self._waiting.append((scanned, rows))
            self._waiting_rows += rows.bit_count()
            self._waiting_bytes += scanned.memory_bytes

    @property
    def must_scan_again(self) -> bool:
        """Whether what comes now is only counted: it is scanned again when the statistics are known."""
        if self._waiting_rows >= UNSCORED_MATCHES_MAX or self._waiting_bytes >= UNSCORED_BYTES_MAX:
            self._overflowed = True
        return self._overflowed and not self._settled

    def settle(self) -> None:
        """All statistics are in: from here on scores are final."""
        self._scorer = Scorer(self._view.config, self.statistics)
        self._settled = True
        waiting, self._waiting = self._waiting, []
        for scanned, rows in waiting:
            self._keep_best(scanned, rows)

    # -- indexed sources ---------------------------------------------------------------------------------

    def count_sources(self, sources: Sequence[IndexedRows]) -> None:
        """The statistics of sources, and how far their timestamps reach."""
        begun = time.monotonic()
        primary = self._view.primary
        for source in sources:
            source.add_statistics(self.statistics, self._trimmed)
            if primary is None:
                continue
            if source.first > self._trimmed:
                bounds = source.bounds(primary)
                self.see_primary(None if bounds is None else bounds[1], source.last)
            else:
                for row in rows_from_bits(source.after(self._trimmed)):
                    self.see_primary(source.edge(primary, row, True), source.last)
        self.counters.fts_clause_estimate_s += time.monotonic() - begun

    def source(self, source: IndexedRows) -> None:
        """Decides all rows of a chunk."""
        rows = source.match(self.request.query)
        if source.first <= self._trimmed:
            rows &= source.after(self._trimmed)
        self.counters.scanned_tail_docs += rows.bit_count()
        self.take_rows(source, rows)

    def take_rows(self, source: IndexedRows, rows: int) -> None:
        """Takes the rows of a source that match."""
        self.counters.candidates += rows.bit_count()
        self._keep_best(source, rows)

    def _keep_best(self, source: IndexedRows, rows: int) -> None:
        """Counts rows that match, and offers those that have a chance.

        Some at a time: a few fill the page, and of the others most have no chance from then on.
        """
        self.matches += rows.bit_count()
        block = FIRST_BLOCK_ROWS
        while rows := self.hopeful(source, rows):
            listed = rows_from_bits(rows)
            # The newest first where larger comes first: times mostly grow, and offsets always do.
            some = listed[-block:][::-1] if self.request.sort[0].descending else listed[:block]
            if not self._offer_rows(source, some):
                return
            rows &= ~bits_from_rows(some, rows.bit_length())
            block *= 4

    def _offer_rows(self, source: IndexedRows, rows: Sequence[int]) -> bool:
        """Answers whether others may follow."""
        request = self.request
        scores: Mapping[int, float] = {}
        if self.weighs and request.by_score:
            scores = source.scores(request.query, bits_from_rows(rows, max(rows) + 1), self._scorer)
        for row in rows:
            values = self._sort_values(source, row, scores.get(row, 0.0))
            if request.sort[0].kind == "offset" and self._behind(values):
                return False
            self._offer(Hit(source.entries[row], scores.get(row, 0.0), values, [], source, row))
        return True

    def _heavy(self, source: IndexedRows, rows: int) -> int:
        """The rows that can get among the best by their weight, and those of equal weight by the next key."""
        query, worst = self.request.query, self.top.hits[-1]
        rows = source.heavy(query, rows, self._scorer, worst.score)
        if not rows:
            return 0
        heavier = source.heavy(query, rows, self._scorer, math.nextafter(worst.score, math.inf))
        equal = rows & ~heavier
        return heavier | (self._hopeful_by(1, source, equal) if equal else 0)

    def _behind(self, values: list[SortValue]) -> bool:
        """Whether a row in the order of offsets comes behind all that is kept: then all others do."""
        worst = self.top.worst
        return worst is not None and sort_rank(self.request.sort, values) >= worst

    def _sort_values(self, source: IndexedRows, row: int, score: float) -> list[SortValue]:
        values: list[SortValue] = []
        for key in self.request.sort:
            if key.kind == "offset":
                values.append(source.entries[row])
            elif key.kind == "score":
                values.append(score)
            else:
                values.append(to_sort_value(source.edge(key.name, row, key.descending)))
        return values

    def hopeful(self, source: IndexedRows, rows: int) -> int:
        """The rows that can get among the best, as far as the first sort key or two tell."""
        if not rows or not self.top.full:
            return rows
        key = self.request.sort[0]
        if key.kind == "score" and key.descending and self.weighs:
            return self._heavy(source, rows)
        return self._hopeful_by(0, source, rows)

    def _hopeful_by(self, place: int, source: IndexedRows, rows: int) -> int:
        """As `_hopeful`, by a key of which those before it are equal. A missing value is greatest."""
        key, worst = self.request.sort[place], self.top.hits[-1].values[place]
        if key.kind == "score" or worst is None:
            return rows & source.missing(key.name) if worst is None and key.descending else rows
        if key.kind == "offset":
            assert isinstance(worst, int)
            beyond = source.last < worst if key.descending else source.first > worst
            return 0 if beyond else rows
        if key.descending:
            return rows & (source.within(key.name, ">=", worst) | source.missing(key.name))
        return rows & source.within(key.name, "<=", worst)

    # -- the page ----------------------------------------------------------------------------------------

    def _offer(self, hit: Hit) -> None:
        sort = self.request.sort
        if self.request.by_score:
            pairs = zip(sort, hit.values, strict=True)
            hit = hit._replace(values=[hit.score if key.kind == "score" else value for key, value in pairs])
        place = sort_rank(sort, hit.values)
        if not self.top.wants(place):
            return
        if isinstance(hit.source, ScannedRows):
            # The other rows it was decoded with are let go.
            groups = [] if self.request.by_score else self.scanner.explain(hit.source, hit.row)
            hit = hit._replace(groups=groups, source=None)
        self.top.add(place, hit)

    @property
    def enough(self) -> bool:
        """Whether nothing that is left, in the order of offsets, can change the page or has to be counted.

        Where words weigh, every row counts for the weights.
        """
        in_order = self.request.sort[0].kind == "offset" and not self.weighs
        return in_order and self.top.full and self.matches >= self._total_exact_max

    @property
    def weighs_last(self) -> bool:
        """Whether the hits still have to be weighed: they are in an order of their own."""
        return self.weighs and not self.request.by_score

    def hits(self) -> list[Hit]:
        """The best, in order; one more than a page if others follow."""
        self.counters.peak_hits = self.top.peak
        self.counters.decoded += self.scanner.decoded
        if not self.weighs_last:
            return self.top.hits
        scorer = Scorer(self._view.config, self.statistics)
        return [hit._replace(score=self._weigh(hit, scorer)) for hit in self.top.hits]

    def _weigh(self, hit: Hit, scorer: Scorer) -> float:
        if hit.source is None:
            return scorer.score(hit.groups)
        return hit.source.scores(self.request.query, 1 << hit.row, scorer)[hit.row]
