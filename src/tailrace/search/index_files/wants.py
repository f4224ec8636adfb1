"""Which files a query needs of a span, and whether they are worth it."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.search.bind import (
    All,
    AnyOf,
    Anywhere,
    BoundQuery,
    Clause,
    Compares,
    Equals,
    HasValue,
    Negation,
    Phrase,
    StartsWith,
    Words,
)
from tailrace.search.index_files.format import COL, EXACT, FTS
from tailrace.search.index_files.span import IndexSpan, UsableFile
from tailrace.search.values import excludes_bounds
from tailrace.search.verdict import RowMatches, match_rows
from tailrace.search.view import RecordView


def query_clauses(query: BoundQuery) -> Iterable[Clause]:
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            for clause in clauses:
                yield from query_clauses(clause)
        case Negation(clause):
            yield from query_clauses(clause)
        case _:
            yield query


class FileSelection:
    """What one query asks of every span. `columns` are fields whose values are wanted, to sort by."""

    def __init__(
        self,
        view: RecordView,
        query: BoundQuery,
        columns: Iterable[str],
        scored: Iterable[str],
        *,
        with_times: bool = True,
    ) -> None:
        self._view = view
        self._with_times = with_times  # whether it has to be known how far the primary timestamps reach
        self._query = query
        self._clauses = tuple(dict.fromkeys(query_clauses(query)))
        self._columns = tuple(columns)
        self._scored = tuple(scored)

    def files(self, span: IndexSpan, trimmed: int) -> dict[str, UsableFile] | None:
        """The files to be opened, by key; None if the rows are better decoded at once.

        Without columns to sort by, or without the words that weigh, nothing is won.
        """
        found: dict[str, UsableFile] = {}
        for name in self._columns:
            if not _add_file(found, span.serving(COL, name)):
                return None
        for name in self._scored:
            split = span.serving(FTS, name)
            if split is None or split.companion.first <= trimmed:
                return None
            _add_file(found, split)
        primary = self._view.primary
        if self._with_times and primary is not None and (span.primary is None or span.first <= trimmed):
            if not _add_file(found, span.serving(COL, primary)):
                return None
        if not span.is_range and not _add_file(found, next(iter(span.files.get(COL, ())), None)):
            return None
        knows = False
        for clause in self._clauses:
            knows = _add_file(found, self._serving(clause, span)) or knows
        return found if knows else None

    def _serving(self, clause: Clause, span: IndexSpan) -> UsableFile | None:
        """The file that decides a clause best."""
        assert not isinstance(clause, Anywhere)
        exact, column = span.serving(EXACT, clause.field), span.serving(COL, clause.field)
        split = span.serving(FTS, clause.field)
        is_text = self._view.config.fields[clause.field].kind == "text"
        match clause:
            case Equals():
                return exact or column
            case HasValue():
                return column or exact or (split if is_text else None)
            case StartsWith():
                return column or exact or split
            case Compares():
                return column
            case Words() | Phrase():
                return split

    def rules_out(self, span: IndexSpan) -> bool:
        """Whether no row of a span can match, by the times it reaches alone."""
        primary, bounds = self._view.primary, span.primary
        return primary is not None and bounds is not None and is_outside_times(self._query, primary, bounds)


def is_outside_times(query: BoundQuery, primary: str, bounds: tuple[int, int]) -> bool:
    """Whether nothing can match in a place where the times of `primary` lie within bounds."""

    def decide(clause: Clause) -> RowMatches | None:
        if not isinstance(clause, Compares | Equals) or clause.field != primary:
            return None
        comparison = clause.comparison if isinstance(clause, Compares) else "="
        return RowMatches(0, 0) if excludes_bounds(comparison, clause.value, bounds) else None

    return not match_rows(query, 1, decide).maybe


def _add_file(found: dict[str, UsableFile], served: UsableFile | None) -> bool:
    if served is not None:
        found[served.published.key] = served
    return served is not None
