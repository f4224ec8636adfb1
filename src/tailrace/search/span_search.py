"""The part of a search that asks built indexes: opens the files of spans, decides, and decodes what is left.

Spans are taken a few at a time. What computes runs on a thread, what reads comes through the loop. Whatever
cannot be used is handed back to be scanned.
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
    candidates: list[int] | None  # entries to be looked at; None if all of them have to be
    counted: bool  # whether its words and times were taken into account


class SpanSearch:
    """The spans of one search."""

    def __init__(
        self,
        library: IndexCatalogue,
        view: RecordView,
        request: SearchRequest,
        collector: HitCollector,
        trimmed: int,
    ) -> None:
        self._library = library
        self._view = view
        self._request = request
        self._collector = collector
        self._trimmed = trimmed
        columns = [key.name for key in request.sort if key.kind not in ("score", "offset")]
        self._scored = tuple(collector.scanner.wanted) if collector.weighs else ()
        self._wants = FileSelection(view, request.query, columns, self._scored)
        self._columns = columns
        self._weighs_here = can_score_from_postings(request.query)
        self._clauses = tuple(dict.fromkeys(query_clauses(request.query)))
        self._values = {
            clause: encode_value(clause.value) for clause in self._clauses if isinstance(clause, Equals)
        }
        self._lacking: dict[tuple[Clause, str], bool] = {}  # by file: it may speak for many spans
        self._files: dict[int, dict[str, UsableFile]] = {}  # by the first entry of a span
        self._statistics: dict[str, bool] = {}  # by split: whether they were taken in
        self.used: list[IndexSpan] = []  # that were decided, at least in part

    def usable(self, spans: Iterable[IndexSpan]) -> list[IndexSpan]:
        """The spans whose files are of any use to this search; none of them is left out later."""
        found: list[IndexSpan] = []
        for span in spans:
            files = self._wants.files(span, self._trimmed)
            if files is not None:
                self._files[span.first] = files
                found.append(span)
        return self._with_whole_splits(found) if self._scored else found

    def _with_whole_splits(self, spans: list[IndexSpan]) -> list[IndexSpan]:
        """Without spans of a split of which others are missing: its statistics are of all of them."""
        rows: dict[str, int] = {}
        kept: list[tuple[IndexSpan, UsableFile]] = []
        for span in spans:
            split = self._split_of(span)
            if split is not None:
                kept.append((span, split))
                key = split.published.key
                rows[key] = rows.get(key, 0) + span.last - span.first + 1
        return [
            span
            for span, split in kept
            if rows[split.published.key] == split.companion.last - split.companion.first + 1
        ]

    def _split_of(self, span: IndexSpan) -> UsableFile | None:
        """The split that has all texts that weigh; None if there is no single one."""
        for served in span.files.get(FTS, ()):
            if served.names.issuperset(self._scored):
                return served if all(span.serving(FTS, name) is served for name in self._scored) else None
        return None

    def is_at_hand(self, span: IndexSpan) -> bool:
        """Whether nothing has to be opened for a span: then there is nothing more to be held for it."""
        return self._library.at_hand(self._files[span.first])

    async def open(self, spans: Sequence[IndexSpan]) -> list[tuple[IndexSpan, SpanSource | None]]:
        """Sources, None where a file cannot be used; without those that can be decided unopened."""
        begun = time.monotonic()
        opened: list[tuple[IndexSpan, SpanSource | None]] = []
        for span in spans:
            if self._is_ruled_out(span):
                continue
            files = self._files[span.first]
            found = await self._library.opened(files)
            if self._has_none(span, found):
                continue
            source = SpanSource(span, self._view.config, found) if len(found) == len(files) else None
            usable = source is not None and all(map(source.has_column, self._columns))
            opened.append((span, source if usable else None))
        self._collector.counters.fts_section_get_s += time.monotonic() - begun
        return opened

    def _is_ruled_out(self, span: IndexSpan) -> bool:
        """Whether the times of a span alone decide all of it."""
        if self._scored or span.first <= self._trimmed or not self._wants.rules_out(span):
            return False
        self._pass_over(span, COL)
        return True

    def _has_none(self, span: IndexSpan, found: Mapping[str, OpenedFile]) -> bool:
        """Whether filters that are in memory tell that no record of a span matches."""
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

        if match_rows(self._request.query, 1, decide).maybe:
            return False
        self._pass_over(span, EXACT)
        return True

    def _pass_over(self, span: IndexSpan, family: str) -> None:
        """A span in which nothing matches is decided."""
        if span.primary is not None:
            self._collector.see_primary(span.primary[1], span.last)
        self._collector.counters.families.add(family)
        self.used.append(span)

    def can_explain(self, source: IndexedRows) -> bool:
        """Whether a source knows what weighs in its rows. Files may leave that to the records."""
        return not isinstance(source, SpanSource)

    # -- on a thread ---------------------------------------------------------------------------------------

    def count(self, opened: Sequence[tuple[IndexSpan, SpanSource | None]]) -> list[IndexSpan]:
        """Takes the statistics of sources in; answers the spans that have to be scanned for theirs."""
        return [span for span, source in opened if not self._counted(span, source)]

    def _counted(self, span: IndexSpan, source: SpanSource | None) -> bool:
        """Takes the words and times of a span in. If it could, no scan must count them again."""
        split = self._split_of(span) if self._scored else None
        if split is not None:
            key = split.published.key
            if key not in self._statistics:
                self._statistics[key] = source is not None and self._add_statistics(source)
            if not self._statistics[key]:
                return False
        try:
            if source is not None:
                self._collector.count_sources([source])
                return True
        except UnusableFileError:
            pass
        if split is not None and span.primary is not None:
            self._collector.see_primary(span.primary[1], span.last)
        return split is not None

    def _add_statistics(self, source: SpanSource) -> bool:
        """Those of the whole split, which may speak for other spans as well: all of them or nothing."""
        try:
            found = {
                name: source.text_statistics(name, tokens)
                for name, tokens in self._collector.scanner.wanted.items()
            }
        except UnusableFileError:
            return False
        for name, counted in found.items():
            self._collector.statistics[name].add(*counted)
        return True

    def decide(
        self, opened: Sequence[tuple[IndexSpan, SpanSource | None]], deadline: float, *, counts: bool
    ) -> tuple[list[UndecidedSpan], list[IndexSpan]]:
        """Decides sources; answers what has to be decoded, and the spans that were not come to.

        Those are left for want of time, or because the page has all it needs.
        """
        left: list[UndecidedSpan] = []
        begun = time.monotonic()
        for index, (span, source) in enumerate(opened):
            if time.monotonic() >= deadline or (counts and self._collector.enough):
                return left, [span for span, _ in opened[index:]]
            counted = self._counted(span, source) if counts else True
            if source is None or not counted:
                left.append(UndecidedSpan(span, None, counted))
                continue
            try:
                candidates = self._take(source)
            except UnusableFileError:
                left.append(UndecidedSpan(span, None, True))
                continue
            self.used.append(span)
            self._collector.counters.families |= source.families
            if candidates is None or candidates:
                left.append(UndecidedSpan(span, candidates, True))
        self._collector.counters.indexed_s += time.monotonic() - begun
        return left, []

    def _take(self, source: SpanSource) -> list[int] | None:
        """Takes what is certain, and answers the entries that have to be looked at.

        None if these are so many that all are better decoded; then nothing is taken.
        """
        verdict = source.judge(self._request.query)
        if source.first <= self._trimmed:
            kept = source.after(self._trimmed)
            verdict = verdict._replace(sure=verdict.sure & kept, maybe=verdict.maybe & kept)
        if not verdict.maybe:
            return []
        by_score = self._collector.weighs and self._request.by_score
        sure = verdict.sure
        if by_score and not (self._weighs_here and source.knows(self._clauses)):
            sure = 0
        elif by_score and sure:
            sure &= ~rows_needing_records(source, self._request.query)
        doubtful = verdict.maybe & ~sure
        if doubtful.bit_count() > max(source.rows.count * CANDIDATE_SHARE_MAX, 1):
            return None
        if sure:
            # Nothing of a source may be taken if it breaks half-way: a scan would count it again.
            self._touch(source, sure)
            self._collector.take_rows(source, sure)
        self._collector.counters.candidates += doubtful.bit_count()
        return [source.entries[row] for row in rows_from_bits(doubtful)]

    def _touch(self, source: SpanSource, rows: int) -> None:
        """Decodes all that taking the rows will need: columns only where a row can get among the best."""
        if self._collector.weighs and self._request.by_score:
            for name, tokens in self._collector.scanner.wanted.items():
                source.text_lengths(name)
                for token in tokens:
                    source.token_rows(name, token)
        if self._columns and self._collector.hopeful(source, rows):
            for name in self._columns:
                source.column(name)
