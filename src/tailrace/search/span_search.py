"""The part of a search that uses index files: opens the files of spans, and decides their rows.

Spans are decided in small batches. Files are opened on the event loop and read on a thread. Spans whose files
cannot be used, and rows that the files cannot decide, are returned to the search, which decodes their
records.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tailrace.search.collector import HitCollector
from tailrace.search.columns import rows_from_bits
from tailrace.search.index_files.catalogue import IndexCatalogue
from tailrace.search.index_files.file_cache import OpenedFile, UnusableFileError
from tailrace.search.index_files.format import COL, EXACT, FTS, encode_value
from tailrace.search.index_files.full_text import can_score_from_postings, rows_needing_records
from tailrace.search.index_files.lookup_files import ExactFile
from tailrace.search.index_files.span_source import SpanSource
from tailrace.search.index_files.spans import FileSelection, IndexSpan, UsableFile, query_clauses
from tailrace.search.language import Clause, Equals
from tailrace.search.matching import RowMatches, match_rows
from tailrace.search.planner import CANDIDATE_SHARE_MAX, IndexedRows
from tailrace.search.records import RecordView
from tailrace.search.requests import SearchRequest


class UndecidedSpan(NamedTuple):
    """A span that is not decided yet."""

    span: IndexSpan
    candidates: list[int] | None  # entries to decode; None for all of the span
    counted: bool  # whether its statistics were added


class SpanSearch:
    """The spans of one search."""

    def __init__(
        self,
        catalogue: IndexCatalogue,
        view: RecordView,
        request: SearchRequest,
        collector: HitCollector,
        trimmed: int,
    ) -> None:
        self._catalogue = catalogue
        self._view = view
        self._request = request
        self._collector = collector
        self._trimmed = trimmed
        columns = [key.name for key in request.sort if key.kind not in ("score", "offset")]
        self._scored = tuple(collector.scanner.scored_tokens) if collector.scores_text else ()
        self._selection = FileSelection(view, request.query, columns, self._scored)
        self._columns = columns
        self._scores_from_postings = can_score_from_postings(request.query)
        self._clauses = tuple(dict.fromkeys(query_clauses(request.query)))
        self._values = {
            clause: encode_value(clause.value) for clause in self._clauses if isinstance(clause, Equals)
        }
        self._lacking: dict[tuple[Clause, str], bool] = {}  # by file, which may cover many spans
        self._files: dict[int, dict[str, UsableFile]] = {}  # by the first entry of a span
        self._statistics: dict[str, bool] = {}  # by split: whether its statistics were added
        self.used: list[IndexSpan] = []  # spans decided by index files, at least in part

    def usable(self, spans: Iterable[IndexSpan]) -> list[IndexSpan]:
        """The spans whose files help this search."""
        found: list[IndexSpan] = []
        for span in spans:
            files = self._selection.files(span, self._trimmed)
            if files is not None:
                self._files[span.first] = files
                found.append(span)
        return self._with_whole_splits(found) if self._scored else found

    def _with_whole_splits(self, spans: list[IndexSpan]) -> list[IndexSpan]:
        """Spans whose split is covered by these spans completely: its statistics count all of its rows."""
        rows: dict[str, int] = {}
        with_split: list[tuple[IndexSpan, UsableFile]] = []
        for span in spans:
            split = self._split_of(span)
            if split is not None:
                with_split.append((span, split))
                key = split.published.key
                rows[key] = rows.get(key, 0) + span.last - span.first + 1
        return [
            span
            for span, split in with_split
            if rows[split.published.key] == split.index_file.last - split.index_file.first + 1
        ]

    def _split_of(self, span: IndexSpan) -> UsableFile | None:
        """The split with all scored fields; None if there is no single one."""
        for served in span.files.get(FTS, ()):
            if served.names.issuperset(self._scored):
                return served if all(span.serving(FTS, name) is served for name in self._scored) else None
        return None

    def is_cached(self, span: IndexSpan) -> bool:
        """Whether all files of a span are open already."""
        return self._catalogue.are_open(self._files[span.first])

    async def open(self, spans: Sequence[IndexSpan]) -> list[tuple[IndexSpan, SpanSource | None]]:
        """Open the files of spans: None for a source that cannot be used.

        Spans that are decided without opening files, or by filters in memory, are left out.
        """
        begun = time.monotonic()
        opened: list[tuple[IndexSpan, SpanSource | None]] = []
        for span in spans:
            if self._is_ruled_out(span):
                continue
            files = self._files[span.first]
            found = await self._catalogue.open_all(files)
            if self._excluded_by_filters(span, found):
                continue
            source = SpanSource(span, self._view.config, found) if len(found) == len(files) else None
            usable = source is not None and all(map(source.has_column, self._columns))
            opened.append((span, source if usable else None))
        self._collector.counters.fts_section_get_s += time.monotonic() - begun
        return opened

    def _is_ruled_out(self, span: IndexSpan) -> bool:
        """Whether no row of a span can match, judged by its timestamps; the span is then decided."""
        if self._scored or span.first <= self._trimmed or not self._selection.rules_out(span):
            return False
        self._mark_decided(span, COL)
        return True

    def _excluded_by_filters(self, span: IndexSpan, found: Mapping[str, OpenedFile]) -> bool:
        """Whether filters in memory exclude all records of a span; the span is then decided."""
        is_known = self._view.primary is None or span.primary is not None
        if self._scored or not self._values or span.first <= self._trimmed or not is_known:
            return False

        def decide(clause: Clause) -> RowMatches | None:
            if not isinstance(clause, Equals) or (served := span.serving(EXACT, clause.field)) is None:
                return None
            key = (clause, served.published.key)
            if key not in self._lacking:
                file = found.get(served.published.key)
                self._lacking[key] = isinstance(file, ExactFile) and file.lacks(
                    clause.field, self._values[clause]
                )
            return RowMatches(0, 0) if self._lacking[key] else None

        if match_rows(self._request.query, 1, decide).possible:
            return False
        self._mark_decided(span, EXACT)
        return True

    def _mark_decided(self, span: IndexSpan, family: str) -> None:
        """Count a span in which no row matches as decided."""
        if span.primary is not None:
            self._collector.add_primary(span.primary[1], span.last)
        self._collector.counters.families.add(family)
        self.used.append(span)

    def can_explain(self, source: IndexedRows) -> bool:
        """Whether a source can score its rows without their records."""
        return not isinstance(source, SpanSource)

    # -- on a thread ---------------------------------------------------------------------------------------

    def count(self, opened: Sequence[tuple[IndexSpan, SpanSource | None]]) -> list[IndexSpan]:
        """Add the statistics of sources. Returns the spans that must be scanned for theirs."""
        return [span for span, source in opened if not self._add_counted(span, source)]

    def _add_counted(self, span: IndexSpan, source: SpanSource | None) -> bool:
        """Add the statistics of a span. If that succeeds, a scan must not count them again."""
        split = self._split_of(span) if self._scored else None
        if split is not None:
            key = split.published.key
            if key not in self._statistics:
                self._statistics[key] = source is not None and self._add_statistics(source)
            if not self._statistics[key]:
                return False
        try:
            if source is not None:
                self._collector.add_statistics_of([source])
                return True
        except UnusableFileError:
            pass
        if split is not None and span.primary is not None:
            self._collector.add_primary(span.primary[1], span.last)
        return split is not None

    def _add_statistics(self, source: SpanSource) -> bool:
        """Add the statistics of a whole split, which may cover several spans: all or nothing."""
        try:
            found = {
                name: source.text_statistics(name, tokens)
                for name, tokens in self._collector.scanner.scored_tokens.items()
            }
        except UnusableFileError:
            return False
        for name, counted in found.items():
            self._collector.statistics[name].add(*counted)
        return True

    def decide(
        self, opened: Sequence[tuple[IndexSpan, SpanSource | None]], deadline: float, *, counts: bool
    ) -> tuple[list[UndecidedSpan], list[IndexSpan]]:
        """Decide sources. Returns what has to be decoded, and the spans that were not reached.

        Spans are not reached at the deadline, or when the page is full and the total large enough.
        """
        left: list[UndecidedSpan] = []
        begun = time.monotonic()
        for index, (span, source) in enumerate(opened):
            if time.monotonic() >= deadline or (counts and self._collector.has_enough):
                return left, [span for span, _ in opened[index:]]
            counted = self._add_counted(span, source) if counts else True
            if source is None or not counted:
                left.append(UndecidedSpan(span, None, counted))
                continue
            try:
                candidates = self._add_certain(source)
            except UnusableFileError:
                left.append(UndecidedSpan(span, None, True))
                continue
            self.used.append(span)
            self._collector.counters.families |= source.families
            if candidates is None or candidates:
                left.append(UndecidedSpan(span, candidates, True))
        self._collector.counters.indexed_s += time.monotonic() - begun
        return left, []

    def _add_certain(self, source: SpanSource) -> list[int] | None:
        """Add the rows that match for certain. Returns the entries to decode.

        None if there are so many that the whole span is better decoded; then nothing is added.
        """
        matches = source.match_rows(self._request.query)
        if source.first <= self._trimmed:
            visible = source.rows_after(self._trimmed)
            matches = matches._replace(certain=matches.certain & visible, possible=matches.possible & visible)
        if not matches.possible:
            return []
        by_score = self._collector.scores_text and self._request.by_score
        certain = matches.certain
        if by_score and not (self._scores_from_postings and source.decides_all(self._clauses)):
            certain = 0
        elif by_score and certain:
            certain &= ~rows_needing_records(source, self._request.query)
        doubtful = matches.possible & ~certain
        if doubtful.bit_count() > max(source.rows.count * CANDIDATE_SHARE_MAX, 1):
            return None
        if certain:
            # All reads that may fail come first: a scan would count rows already added again.
            self._preload(source, certain)
            self._collector.add_matches(source, certain)
        self._collector.counters.candidates += doubtful.bit_count()
        return [source.entries[row] for row in rows_from_bits(doubtful)]

    def _preload(self, source: SpanSource, rows: int) -> None:
        """Read everything that adding the rows needs; columns only if a row may reach the page."""
        if self._collector.scores_text and self._request.by_score:
            for name, tokens in self._collector.scanner.scored_tokens.items():
                source.text_lengths(name)
                for token in tokens:
                    source.token_rows(name, token)
        if self._columns and self._collector.may_rank(source, rows):
            for name in self._columns:
                source.column(name)
