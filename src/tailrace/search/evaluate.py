"""The reference: a bound query decided on one promoted record, in the plainest way.

Every faster way (closures, indexes, scans over columns) has to agree with this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tailrace.schema.search_config import SearchConfig
from tailrace.search.analyze import tokenize_text
from tailrace.search.bind import (
    All,
    AnyOf,
    Anywhere,
    BoundQuery,
    Compares,
    Equals,
    HasValue,
    Negation,
    Phrase,
    StartsWith,
    Words,
)
from tailrace.search.parser import ComparisonOperator
from tailrace.search.values import Value, field_values

_COMPARISONS: Final[dict[ComparisonOperator, Callable[[Value, int | float], bool]]] = {
    "=": lambda value, bound: value == bound,
    ">": lambda value, bound: not isinstance(value, str) and value > bound,
    ">=": lambda value, bound: not isinstance(value, str) and value >= bound,
    "<": lambda value, bound: not isinstance(value, str) and value < bound,
    "<=": lambda value, bound: not isinstance(value, str) and value <= bound,
}


def evaluate_record(query: BoundQuery, record: object, config: SearchConfig, version: int) -> bool:
    """Whether a record, promoted to `version`, matches. None stands for one that could not be promoted."""

    def values(field: str) -> list[Value]:
        return field_values(record, config.fields[field], version)

    return evaluate_values(query, values)


def evaluate_values(query: BoundQuery, values: Callable[[str], list[Value]]) -> bool:
    """Whether the query holds for a record that has these values."""
    match query:
        case All(clauses):
            return all(evaluate_values(clause, values) for clause in clauses)
        case AnyOf(clauses):
            return any(evaluate_values(clause, values) for clause in clauses)
        case Anywhere(targets):
            return any(evaluate_values(target, values) for target in targets)
        case Negation(clause):
            return not evaluate_values(clause, values)
        case HasValue(field):
            return bool(values(field))
        case Equals(field, wanted):
            return any(value == wanted for value in values(field))
        case StartsWith(field, prefix):
            return any(str(value).startswith(prefix) for value in values(field))
        case Compares(field, comparison, bound):
            return any(_COMPARISONS[comparison](value, bound) for value in values(field))
        case Words(field, tokens, prefix):
            return any(has_words(tokenize_text(str(value)), tokens, prefix) for value in values(field))
        case Phrase(field, tokens):
            return any(has_phrase(tokenize_text(str(value)), tokens) for value in values(field))


def has_words(found: list[str], wanted: tuple[str, ...], prefix: bool) -> bool:
    """Whether a value has every token, the last one perhaps as a prefix, in any order."""
    whole = wanted[:-1] if prefix else wanted
    if not all(token in found for token in whole):
        return False
    return not prefix or any(token.startswith(wanted[-1]) for token in found)


def has_phrase(found: list[str], wanted: tuple[str, ...]) -> bool:
    """Whether a value has the tokens one after the other."""
    length = len(wanted)
    return any(tuple(found[at : at + length]) == wanted for at in range(len(found) - length + 1))
