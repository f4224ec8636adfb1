"""What is known of a query without its records: the rows that match for certain, and those that may.

Where both are the same set, nothing has to be decoded. A clause that nobody knows anything about is true of
no row for certain and of all rows perhaps; and, or and not carry that through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tailrace.search.bind import All, AnyOf, Anywhere, BoundQuery, Clause, Negation

ClauseDecider = Callable[[Clause], "Verdict | None"]


class RowMatches(NamedTuple):
    """Sets of rows; `sure` is part of `maybe`."""

    sure: int
    maybe: int

    @property
    def is_final(self) -> bool:
        return self.sure == self.maybe


def certain_match(rows: int) -> RowMatches:
    return RowMatches(rows, rows)


def match_rows(query: BoundQuery, all_rows: int, decide: ClauseDecider) -> RowMatches:
    """`decide` answers for one clause, or None if it cannot tell."""
    match query:
        case All(clauses):
            sure = maybe = all_rows
            for clause in clauses:
                if not maybe:
                    break
                found = match_rows(clause, all_rows, decide)
                sure &= found.sure
                maybe &= found.maybe
            return RowMatches(sure & maybe, maybe)
        case AnyOf(clauses) | Anywhere(clauses):
            sure = maybe = 0
            for clause in clauses:
                found = match_rows(clause, all_rows, decide)
                sure |= found.sure
                maybe |= found.maybe
            return RowMatches(sure, maybe)
        case Negation(clause):
            found = match_rows(clause, all_rows, decide)
            return RowMatches(all_rows & ~found.maybe, all_rows & ~found.sure)
        case _:
            known = decide(query)
            return RowMatches(0, all_rows) if known is None else known
