"""What a search looked at, what it cost, and what it had to leave out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tailrace.search.plan import ScanRange


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
