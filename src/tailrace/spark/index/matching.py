"""Which rows of a batch a query matches, decided on its columns.

A clause holds for a row if it holds for one of the row's values. So each different value of a column is
decided once, by the reference evaluator.
"""

from __future__ import annotations

from typing import Any

from tailrace.search.language import All, AnyOf, Anywhere, BoundQuery, HasValue, Negation
from tailrace.search.matching import evaluate_values
from tailrace.search.records import Value
from tailrace.spark.index.arrays import np
from tailrace.spark.index.batch import SegmentBatch
from tailrace.spark.index.columns import distinct_values


def match_batch(query: BoundQuery, batch: SegmentBatch) -> Any:
    """A numpy array of truth values, one for each row."""
    match query:
        case All(clauses):
            found = np.ones(batch.count, dtype=bool)
            for clause in clauses:
                found &= match_batch(clause, batch)
            return found
        case AnyOf(clauses) | Anywhere(clauses):
            found = np.zeros(batch.count, dtype=bool)
            for clause in clauses:
                found |= match_batch(clause, batch)
            return found
        case Negation(clause):
            return ~match_batch(clause, batch)
        case HasValue(field):
            return batch.column(field).counts > 0
        case _:
            column = batch.column(query.field)
            values, which = distinct_values(column)
            held = np.array([_clause_holds(query, value) for value in values], dtype=bool)
            found = np.zeros(batch.count, dtype=bool)
            if len(which):
                found[column.rows[held[which]]] = True
            return found


def _clause_holds(clause: BoundQuery, value: Value) -> bool:
    return evaluate_values(clause, lambda _field: [value])


def bound_query_fields(query: BoundQuery) -> set[str]:
    """The fields that a query asks about."""
    match query:
        case All(clauses) | AnyOf(clauses) | Anywhere(clauses):
            return {name for clause in clauses for name in bound_query_fields(clause)}
        case Negation(clause):
            return bound_query_fields(clause)
        case _:
            return {query.field}
