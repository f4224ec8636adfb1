"""A span with its index files open: matches clauses, scores rows and reads columns."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

from tailrace.schema.search_config import SearchConfig
from tailrace.search.index_files import format as names
from tailrace.search.index_files.column_file import ArrowColumn, ColumnFile
from tailrace.search.index_files.file_cache import FileContent, OpenedFile, UnusableFileError
from tailrace.search.index_files.format import COL, EXACT, FTS, VALUE_BYTES_MAX, encode_value, is_truncated
from tailrace.search.index_files.full_text import (
    FullTextFile,
    TokenPostings,
    rows_scoring_at_least,
    score_rows,
)
from tailrace.search.index_files.lookup_files import ExactFile, RoutingKeyIndexFile, RoutingKeyLexiconFile
from tailrace.search.index_files.parquet_file import ParquetFile, check_metadata
from tailrace.search.index_files.rollup_files import MetricBlockFile, RollupFile
from tailrace.search.index_files.spans import IndexSpan, UsableFile
from tailrace.search.matching import RowMatches, certain_match, match_rows
from tailrace.search.numpy_arrays import bits_from_row_array, np
from tailrace.search.query_language import (
    BoundQuery,
    Clause,
    Compares,
    Equals,
    HasValue,
    Phrase,
    StartsWith,
    Words,
)
from tailrace.search.ranking import Scorer, Statistics
from tailrace.search.records import Value


def open_index_file(served: UsableFile, body: FileContent) -> OpenedFile:
    """Open a file by its family; runs on a thread."""
    index_file, identity = served.index_file, served.published.stream_id
    family, first, last = index_file.family, index_file.first, index_file.last
    if family == names.FTS:
        return FullTextFile(body, identity, first, last)
    file = ParquetFile(body)
    check_metadata(file.facts, family, identity, first, last)
    if family == names.COL:
        return ColumnFile(file, first, last)
    if family == names.EXACT:
        return ExactFile(file)
    if family == names.AGG:
        return RollupFile(file)
    if family == names.MBLK:
        return MetricBlockFile(file)
    if family == names.ROUTING_KEY_INDEX:
        return RoutingKeyIndexFile(file)
    if family == names.ROUTING_KEY_LEXICON:
        return RoutingKeyLexiconFile(file)
    raise UnusableFileError(f"unknown index family {family}")


class RowNumbering:
    """Maps ascending entries to rows. Usually the entries are consecutive, but not always."""

    def __init__(self, entries: Sequence[int]) -> None:
        self.entries = entries
        self.first = entries[0]
        self.last = entries[-1]
        self.count = len(entries)
        self.all_rows = (1 << self.count) - 1
        self._is_range = self.last - self.first + 1 == self.count

    @cached_property
    def _numbers(self) -> Any:
        return np.array(self.entries, np.int64)

    def rows_after(self, entry: int) -> int:
        """The rows behind an entry."""
        return self.all_rows & ~((1 << bisect_left(self.entries, entry + 1)) - 1)

    def cut(self, entries: Any) -> tuple[Any, Any]:
        """Which of some ascending entries are here, and their rows."""
        begin, end = np.searchsorted(entries, (self.first, self.last + 1))
        inside = entries[begin:end]
        if self._is_range:
            return slice(begin, end), inside - self.first
        rows = np.searchsorted(self._numbers, inside)
        found = self._numbers[rows] == inside
        return begin + np.flatnonzero(found), rows[found]

    def rows(self, entries: Any) -> int:
        """The set of rows of some ascending entries."""
        if not len(entries):
            return 0  # the usual case for a rare value
        return bits_from_row_array(self.cut(entries)[1], self.count)

    def each(self, numbers: Any, first: int) -> Any:
        """The number of each row, from an array with one for every entry from `first` on."""
        if self._is_range:
            return numbers[self.first - first : self.last - first + 1]
        return numbers[self._numbers - first]


class SpanSource:
    """The rows of one span. `opened` are its usable files by key."""

    def __init__(self, span: IndexSpan, config: SearchConfig, opened: Mapping[str, OpenedFile]) -> None:
        self._span = span
        self._config = config
        self._primary = config.primary_timestamp_field
        self._opened = opened
        self.rows = RowNumbering(range(span.first, span.last + 1) if span.is_range else self._listed())
        self.families: set[str] = set()  # index families used by the search
        self._decided: dict[Clause, RowMatches] = {}
        # Cached for this search: reading again might fail after some rows were added.
        self._token_rows: dict[tuple[str, str], TokenPostings] = {}
        self._text_lengths: dict[str, Any] = {}

    def _listed(self) -> Sequence[int]:
        """The entries, if they are not consecutive."""
        for served in self._span.files.get(COL, ()):
            found = cast("ColumnFile | None", self._opened.get(served.published.key))
            if found is not None:
                begin = bisect_left(found.entries, self._span.first)
                return found.entries[begin : bisect_left(found.entries, self._span.last + 1)]
        raise LookupError("no col file lists the entries of the span")

    def _file(self, family: str, name: str) -> OpenedFile | None:
        for served in self._span.files.get(family, ()):
            if name in served.names and (found := self._opened.get(served.published.key)) is not None:
                self.families.add(family)
                return found
        return None

    # -- IndexedRows ---------------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[int]:
        return self.rows.entries

    @property
    def first(self) -> int:
        return self._span.first

    @property
    def last(self) -> int:
        return self._span.last

    @property
    def count(self) -> int:
        return self.rows.count

    def rows_after(self, entry: int) -> int:
        return self.rows.rows_after(entry)

    def match(self, query: BoundQuery) -> int:
        verdict = self.match_rows(query)
        assert verdict.is_final, "rows in doubt are decoded"
        return verdict.certain

    def extreme_value(self, name: str, row: int, largest: bool) -> Value | None:
        column, shift = self.column(name)
        return column.extreme_value(row + shift, largest)

    def bounds(self, name: str) -> tuple[Value, Value] | None:
        if name == self._primary and self._span.primary is not None:
            return self._span.primary
        column, shift = self.column(name)
        if column.count == self.rows.count:
            return column.bounds
        found = [value for row in range(self.rows.count) for value in column.values(row + shift)]
        return (min(found), max(found)) if found else None

    def rows_in_range(self, name: str, comparison: str, bound: Value) -> int:
        if self._col(name).is_beyond(name, comparison, bound):
            return 0  # excluded by the statistics of the file
        column, shift = self.column(name)
        return self._cut(column.rows_in_range(comparison, bound), shift)

    def rows_with_several(self, name: str) -> int:
        """The rows with more than one value."""
        column, shift = self.column(name)
        return self._cut(column.multiple, shift)

    def rows_without(self, name: str) -> int:
        if self._col(name).is_full(name):
            return 0
        column, shift = self.column(name)
        return self.rows.all_rows & ~self._cut(column.present, shift)

    def add_statistics(self, statistics: Statistics, after: int) -> None:
        """Adds nothing: a split may cover several spans, and is counted once for all of them."""

    def scores(self, query: BoundQuery, rows: int, scorer: Scorer) -> dict[int, float]:
        return score_rows(self, query, rows, scorer)

    def rows_scoring_at_least(self, query: BoundQuery, rows: int, scorer: Scorer, least: float) -> int:
        return rows_scoring_at_least(self, query, rows, scorer, least)

    # -- columns -------------------------------------------------------------------------------------------

    def leaves(self, name: str, begin: int, end: int) -> list[object]:
        """The value of a field in each row of a range: a scalar, a list of several, or None."""
        column, shift = self.column(name)
        return column.leaves(begin + shift, end + shift)

    def _col(self, name: str) -> ColumnFile:
        found = self._file(COL, name)
        assert isinstance(found, ColumnFile)
        return found

    def has_column(self, name: str) -> bool:
        found = self._file(COL, name)
        return isinstance(found, ColumnFile) and found.has(name)

    def column(self, name: str) -> tuple[ArrowColumn, int]:
        """A column, and the position of the span's first row in it."""
        found = self._col(name)
        return found.column(name), bisect_left(found.entries, self._span.first)

    def _cut(self, bits: int, shift: int) -> int:
        return bits >> shift & self.rows.all_rows

    # -- clauses -------------------------------------------------------------------------------------------

    def match_rows(self, query: BoundQuery) -> RowMatches:
        return match_rows(query, self.rows.all_rows, self.decide)

    def decides_all(self, clauses: Iterable[Clause]) -> bool:
        """Whether each of these clauses is certain on its own."""
        return all((found := self.decide(clause)) is not None and found.is_final for clause in clauses)

    def certain_rows(self, clause: Clause) -> int:
        found = self.decide(clause)
        assert found is not None
        return found.certain

    def decide(self, clause: Clause) -> RowMatches | None:
        known = self._decided.get(clause)
        if known is None:
            known = self._decide(clause)
            if known is not None:
                self._decided[clause] = known
        return known

    def _decide(self, clause: Clause) -> RowMatches | None:
        match clause:
            case Equals(field, value):
                return self._equal(field, value)
            case HasValue(field):
                return self._present(field)
            case StartsWith(field, prefix):
                return self._starting(field, prefix)
            case Compares(field, comparison, value):
                return (
                    certain_match(self.rows_in_range(field, comparison, value))
                    if self.has_column(field)
                    else None
                )
            case Words():
                return self._words(clause)
            case Phrase():
                return self._phrase(clause)
            case _:
                raise AssertionError("match_rows resolves Anywhere")

    def _equal(self, field: str, value: Value) -> RowMatches | None:
        exact = self._file(EXACT, field)
        if isinstance(exact, ExactFile):
            stored = encode_value(value)
            found = self.rows.rows(exact.entries(field, stored))
            return RowMatches(0, found) if is_truncated(stored) else certain_match(found)
        if not self.has_column(field):
            return None
        column, shift = self.column(field)
        return certain_match(self._cut(column.equal(value), shift))

    def _present(self, field: str) -> RowMatches | None:
        if self.has_column(field):
            column, shift = self.column(field)
            return certain_match(self._cut(column.present, shift))
        exact = self._file(EXACT, field)
        if isinstance(exact, ExactFile):
            return certain_match(self.rows.rows(exact.entries(field, None)))
        split = self._split(field)
        if split is not None and field in split.texts:
            return certain_match(self.rows.rows(split.entries_with_text(field)))
        return None

    def _starting(self, field: str, prefix: str) -> RowMatches | None:
        if not prefix and (present := self._present(field)) is not None:
            return present
        if self.has_column(field):
            column, shift = self.column(field)
            return certain_match(self._cut(column.starting_with(prefix), shift))
        encoded = prefix.encode()
        exact = self._file(EXACT, field)
        if isinstance(exact, ExactFile) and len(encoded) <= VALUE_BYTES_MAX:
            return certain_match(self.rows.rows(exact.entries_from(field, encoded)))
        split = self._file(FTS, field)
        found = split.keyword_prefix(field, prefix) if isinstance(split, FullTextFile) else None
        return None if found is None else certain_match(self.rows.rows(found))

    # -- texts ---------------------------------------------------------------------------------------------

    def _split(self, field: str) -> FullTextFile | None:
        found = self._file(FTS, field)
        return found if isinstance(found, FullTextFile) else None

    def text_statistics(self, field: str, tokens: Iterable[str]) -> tuple[int, int, dict[str, int]]:
        """Statistics of the whole split: entries with a text, tokens, entries with each of `tokens`."""
        split = self._split(field)
        text = None if split is None else split.texts.get(field)
        if split is None or text is None:
            raise UnusableFileError(f"fts file has no field {field}")
        return text.documents, text.tokens, {token: split.documents_with(field, token) for token in tokens}

    def _words(self, clause: Words) -> RowMatches | None:
        split = self._split(clause.field)
        if split is None:
            return None
        found = self.rows.all_rows
        for token in clause.tokens[:-1] if clause.prefix else clause.tokens:
            found &= self.rows.rows(split.postings(clause.field, token).entries)
        if clause.prefix and found:
            found &= self.rows.rows(split.starting_with(clause.field, clause.tokens[-1]))
        # All tokens must be in one value, and a field may have several values.
        return certain_match(found) if len(clause.tokens) == 1 or not found else RowMatches(0, found)

    def _phrase(self, clause: Phrase) -> RowMatches | None:
        split = self._split(clause.field)
        if split is None:
            return None
        found = self.rows.all_rows
        for token in set(clause.tokens):
            found &= self.rows.rows(split.postings(clause.field, token).entries)
        if len(clause.tokens) == 1 or not found:
            return certain_match(found)
        engine = split.phrase(clause.field, clause.tokens)
        if engine is None:
            return RowMatches(0, found)
        return certain_match(found & self.rows.rows(engine))

    def token_rows(self, field: str, token: str) -> TokenPostings:
        found = self._token_rows.get((field, token))
        if found is None:
            split = self._split(field)
            assert split is not None
            postings = split.postings(field, token)
            which, rows = self.rows.cut(postings.entries)
            lengths = self.text_lengths(field)[rows]
            found = self._token_rows[field, token] = TokenPostings(rows, postings.frequencies[which], lengths)
        return found

    def text_lengths(self, field: str) -> Any:
        found = self._text_lengths.get(field)
        if found is None:
            split = self._split(field)
            assert split is not None
            found = self._text_lengths[field] = self.rows.each(split.lengths(field), split.first)
        return found
