"""The part of a search that uses index files: opens the files of spans, and decides their rows.

Files are opened on the event loop and read on a thread. Nothing of the search is changed here: each span has
a `SpanResult`, which the search adds to its progress. A file that turns out to be damaged while it is read
leaves nothing half added: the span is then decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tailrace.search.collector import largest_value
from tailrace.search.columns import rows_from_bits
from tailrace.search.index_files.catalogue import IndexCatalogue
from tailrace.search.index_files.file_cache import OpenedFile, UnusableFileError
from tailrace.search.index_files.format import COL, EXACT, FTS, encode_value
from tailrace.search.index_files.full_text import can_score_from_postings, rows_needing_records
from tailrace.search.index_files.lookup_files import ExactFile
from tailrace.search.index_files.span_source import SpanSource
from tailrace.search.index_files.spans import FileSelection, IndexSpan, UsableFile, query_clauses
from tailrace.search.matching import RowMatches, match_rows
from tailrace.search.planner import CANDIDATE_SHARE_MAX, IndexedRows
from tailrace.search.query_language import Clause, Equals
from tailrace.search.ranking import FieldStatistics, Statistics, has_text_clause, scored_tokens
from tailrace.search.records import RecordView
from tailrace.search.requests import SearchRequest
from tailrace.search.scan import PieceStatistics

MayRank = Callable[[IndexedRows, int], int]  # the rows of a source that may reach the page

NO_STATISTICS = PieceStatistics({})


class SpanResult(NamedTuple):
    """What the index files of a span decide."""

    span: IndexSpan
    statistics: PieceStatistics | None  # None if a scan has to count them
    source: SpanSource | None = None  # None if the files cannot be used
    rows: int = 0  # of the source, which match for certain
    candidates: Sequence[int] | None = None  # entries to decode; None for the whole span


class OpenedSpans(NamedTuple):
    """Spans with their files: None for a source that cannot be used."""

    opened: list[tuple[IndexSpan, SpanSource | None]]
    excluded: list[tuple[IndexSpan, str]]  # without a match, and the index family that says so


class SpanSearch:
    """The spans of one search. `trimmed` is the last entry that retention has removed."""

    def __init__(
        self, catalogue: IndexCatalogue, view: RecordView, request: SearchRequest, trimmed: int
    ) -> None:
        self._catalogue = catalogue
        self._view = view
        self._request = request
        self._trimmed = trimmed
        columns = [key.name for key in request.sort if key.kind not in ("score", "offset")]
        self._scored = scored_tokens(request.query) if has_text_clause(request.query) else {}
        self._by_score = has_text_clause(request.query) and request.by_score
        self._selection = FileSelection(view, request.query, columns, tuple(self._scored))
        self._columns = columns
        self._scores_from_postings = can_score_from_postings(request.query)
        self._clauses = tuple(dict.fromkeys(query_clauses(request.query)))
        self._values = {
            clause: encode_value(clause.value) for clause in self._clauses if isinstance(clause, Equals)
        }
        self._lacking: dict[tuple[Clause, str], bool] = {}  # by file, which may cover many spans
        self._files: dict[int, dict[str, UsableFile]] = {}  # by the first entry of a span
        self._counted_splits: dict[str, bool] = {}  # by key: whether its statistics could be read

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

    async def open(self, spans: Sequence[IndexSpan]) -> OpenedSpans:
        """Open the files of spans, except where timestamps or filters in memory show that no row matches."""
        found = OpenedSpans([], [])
        for span in spans:
            if self._is_outside_times(span):
                found.excluded.append((span, COL))
                continue
            files = self._files[span.first]
            opened = await self._catalogue.open_all(files)
            if self._lacks_values(span, opened):
                found.excluded.append((span, EXACT))
                continue
            source = SpanSource(span, self._view.config, opened) if len(opened) == len(files) else None
            usable = source is not None and all(map(source.has_column, self._columns))
            found.opened.append((span, source if usable else None))
        return found

    def _is_outside_times(self, span: IndexSpan) -> bool:
        """Whether no row of a span can match, judged by its timestamps."""
        return not self._scored and span.first > self._trimmed and self._selection.rules_out(span)

    def _lacks_values(self, span: IndexSpan, opened: Mapping[str, OpenedFile]) -> bool:
        """Whether no row of a span can match, judged by filters in memory."""
        is_known = self._view.primary is None or span.primary is not None
        if self._scored or not self._values or span.first <= self._trimmed or not is_known:
            return False

        def decide(clause: Clause) -> RowMatches | None:
            if not isinstance(clause, Equals) or (served := span.serving(EXACT, clause.field)) is None:
                return None
            key = (clause, served.published.key)
            if key not in self._lacking:
                file = opened.get(served.published.key)
                self._lacking[key] = isinstance(file, ExactFile) and file.lacks(
                    clause.field, self._values[clause]
                )
            return RowMatches(0, 0) if self._lacking[key] else None

        return not match_rows(self._request.query, 1, decide).possible

    def needs_record(self, source: IndexedRows) -> bool:
        """Whether a hit of the source can be scored alone only with its record."""
        return isinstance(source, SpanSource)

    # -- on a thread ---------------------------------------------------------------------------------------

    def count(self, span: IndexSpan, source: SpanSource | None) -> PieceStatistics | None:
        """The statistics of a span; None if a scan has to count them.

        Those of a split that covers several spans are in the result of the first one that is counted.
        """
        split = self._split_of(span) if self._scored else None
        statistics: Statistics = {}
        if split is not None:
            key = split.published.key
            if key not in self._counted_splits:
                found = None if source is None else self._split_statistics(source)
                self._counted_splits[key] = found is not None
                statistics = found or {}
            if not self._counted_splits[key]:
                return None
        primary = self._view.primary
        try:
            if source is not None:
                most = None if primary is None else largest_value(source, primary, self._trimmed)
                return PieceStatistics(statistics, most)
        except UnusableFileError:
            pass
        if split is None:
            return None
        return PieceStatistics(statistics, None if span.primary is None else span.primary[1])

    def _split_statistics(self, source: SpanSource) -> Statistics | None:
        """The statistics of a whole split; None if they cannot be read."""
        found: Statistics = {}
        try:
            for name, tokens in self._scored.items():
                found[name] = FieldStatistics(sorted(tokens))
                found[name].add(*source.text_statistics(name, tokens))
        except UnusableFileError:
            return None
        return found

    def decide(
        self, span: IndexSpan, source: SpanSource | None, may_rank: MayRank, *, counts: bool
    ) -> SpanResult:
        """Decide a span. `counts` if its statistics have not been added yet."""
        statistics = self.count(span, source) if counts else NO_STATISTICS
        if source is None or statistics is None:
            return SpanResult(span, statistics)
        try:
            rows, candidates = self._match(source, may_rank)
        except UnusableFileError:
            return SpanResult(span, statistics)
        return SpanResult(span, statistics, source, rows, candidates)

    def _match(self, source: SpanSource, may_rank: MayRank) -> tuple[int, list[int] | None]:
        """The rows that match for certain, and the entries to decode.

        No rows and None if there are so many candidates that the whole span is better decoded.
        """
        matches = source.match_rows(self._request.query)
        if source.first <= self._trimmed:
            visible = source.rows_after(self._trimmed)
            matches = matches._replace(certain=matches.certain & visible, possible=matches.possible & visible)
        if not matches.possible:
            return 0, []
        certain = matches.certain
        if self._by_score and not (self._scores_from_postings and source.decides_all(self._clauses)):
            certain = 0
        elif self._by_score and certain:
            certain &= ~rows_needing_records(source, self._request.query)
        doubtful = matches.possible & ~certain
        if doubtful.bit_count() > max(source.rows.count * CANDIDATE_SHARE_MAX, 1):
            return 0, None
        if certain:
            self._preload(source, certain, may_rank)
        return certain, [source.entries[row] for row in rows_from_bits(doubtful)]

    def _preload(self, source: SpanSource, rows: int, may_rank: MayRank) -> None:
        """Read everything that ranking the rows needs; columns only if a row may reach the page.

        A file that is damaged is found here, before any of its rows is added.
        """
        if self._by_score:
            for name, tokens in self._scored.items():
                source.text_lengths(name)
                for token in tokens:
                    source.token_rows(name, token)
        if self._columns and may_rank(source, rows):
            for name in self._columns:
                source.column(name)
