"""A parsed query bound to a stream's search configuration: typed clauses, or a refusal.

Whether a query is accepted depends on the registry alone, never on data or on what is indexed.
"""

from __future__ import annotations

import msgspec

from tailrace.schema.body import shorten
from tailrace.schema.search_config import SearchConfig
from tailrace.schema.search_fields import Field
from tailrace.search.analyze import tokenize_text
from tailrace.search.dialect import Dialect
from tailrace.search.parser import (
    And,
    BareTerm,
    ComparisonOperator,
    FieldComparison,
    HasField,
    LiteralValue,
    Not,
    Or,
    QueryNode,
    parse_query_text,
)
from tailrace.search.values import Value, converter_for

_ORDERED = ("integer", "float", "date")

# Structs, not tuples: `id:x` and `id:x*` have the same parts, and must never be taken for one another.


class All(msgspec.Struct, frozen=True):
    clauses: tuple[BoundQuery, ...]


class AnyOf(msgspec.Struct, frozen=True):
    clauses: tuple[BoundQuery, ...]


class Negation(msgspec.Struct, frozen=True):
    clause: BoundQuery


class HasValue(msgspec.Struct, frozen=True):
    field: str


class Equals(msgspec.Struct, frozen=True):
    """Some value is this one. The value is canonical, as the field's own values are."""

    field: str
    value: Value


class StartsWith(msgspec.Struct, frozen=True):
    """Some value of a keyword field starts like this."""

    field: str
    prefix: str


class Compares(msgspec.Struct, frozen=True):
    """Some value lies on the wanted side."""

    field: str
    comparison: ComparisonOperator
    value: int | float


class Words(msgspec.Struct, frozen=True):
    """One value of a text field has every token; if `prefix`, the last one may be the start of a token."""

    field: str
    tokens: tuple[str, ...]
    prefix: bool


class Phrase(msgspec.Struct, frozen=True):
    """One value of a text field has the tokens one after the other."""

    field: str
    tokens: tuple[str, ...]


class Anywhere(msgspec.Struct, frozen=True):
    """A bare word or phrase: some target field has it, each in its own way. Scores take the best target."""

    targets: tuple[Equals | StartsWith | Words | Phrase, ...]


Clause = HasValue | Equals | StartsWith | Compares | Words | Phrase | Anywhere
BoundQuery = All | AnyOf | Negation | Clause


def bind_query(text: str, config: SearchConfig | None, dialect: Dialect) -> BoundQuery:
    """The text of a filter or a search, ready to be decided on records."""
    tree = parse_query_text(text, dialect)
    if config is None:
        raise dialect.refuse("search is not configured for this stream")
    return bind_tree(tree, config, dialect)


def bind_tree(tree: QueryNode, config: SearchConfig, dialect: Dialect) -> BoundQuery:
    match tree:
        case And(children):
            return All(tuple(bind_tree(child, config, dialect) for child in children))
        case Or(children):
            return AnyOf(tuple(bind_tree(child, config, dialect) for child in children))
        case Not(child):
            return Negation(bind_tree(child, config, dialect))
        case HasField(name):
            return _has(name, config, dialect)
        case FieldComparison():
            return (
                _filter_clause(tree, config, dialect)
                if not dialect.bare
                else _search_clause(tree, config, dialect)
            )
        case BareTerm(value):
            return _bind_bare_term(value, config, dialect)


def _field(name: str, config: SearchConfig, dialect: Dialect) -> tuple[str, Field]:
    resolved = config.resolve(name)
    if resolved is None:
        if dialect.bare:
            raise dialect.refuse(f"unknown search field {shorten(name)}")
        raise dialect.refuse(f"filter field {shorten(name)} is not indexed")
    return resolved, config.fields[resolved]


def _has(name: str, config: SearchConfig, dialect: Dialect) -> HasValue:
    resolved, field = _field(name, config, dialect)
    if not (field.exists or field.exact or field.column):
        raise dialect.refuse(f"{dialect.field} {name} does not support has:")
    return HasValue(resolved)


def _filter_clause(clause: FieldComparison, config: SearchConfig, dialect: Dialect) -> Clause:
    name, comparison, value = clause
    resolved, field = _field(name, config, dialect)
    if field.kind == "text":
        raise dialect.refuse("invalid value for filter field")
    if comparison not in (None, "="):
        return _compares(clause, resolved, field, dialect)
    if not (field.exact or field.column):
        raise dialect.refuse(f"filter field {name} does not support equality filters")
    # A star is a star here: filters know no prefixes.
    return Equals(resolved, _value(value.text, field, dialect))


def _search_clause(clause: FieldComparison, config: SearchConfig, dialect: Dialect) -> Clause:
    name, comparison, value = clause
    resolved, field = _field(name, config, dialect)
    if comparison not in (None, "="):
        return _compares(clause, resolved, field, dialect)
    if field.kind == "text":
        if comparison is not None:
            raise dialect.refuse(f"search field {name} does not support exact queries")
        if value.quoted and not field.positions:
            raise dialect.refuse(f"search field {name} does not support phrase queries")
        bound = _text_clause(resolved, value)
        if bound is None:
            raise dialect.refuse("search text clause did not produce any searchable tokens")
        return bound
    if field.kind == "keyword" and _is_prefix(value):
        if not field.prefix:
            raise dialect.refuse(f"search field {name} does not support prefix queries")
        return _keyword_clause(resolved, field, value, dialect)
    if not (field.exact or field.column):
        raise dialect.refuse(f"search field {name} does not support exact queries")
    return Equals(resolved, _value(value.text, field, dialect))


def _compares(clause: FieldComparison, resolved: str, field: Field, dialect: Dialect) -> Compares:
    ordered = field.kind in _ORDERED
    if not field.column or (dialect.bare and not ordered):
        raise dialect.refuse(f"{dialect.field} {clause.name} does not support comparisons")
    if not ordered:
        raise dialect.refuse("comparison operator not supported for filter field")
    value = _value(clause.value.text, field, dialect)
    assert not isinstance(value, str)
    assert clause.comparison is not None
    return Compares(resolved, clause.comparison, value)


def _value(text: str, field: Field, dialect: Dialect) -> Value:
    """A value in a query is text, and is read as the same text in a record would be."""
    value = converter_for(field)(text)
    if value is None:
        raise dialect.refuse(f"invalid value for {dialect.field}")
    return value


def _is_prefix(value: LiteralValue) -> bool:
    return not value.quoted and value.text.endswith("*")


def _keyword_clause(name: str, field: Field, value: LiteralValue, dialect: Dialect) -> Equals | StartsWith:
    if _is_prefix(value):
        return StartsWith(name, str(_value(value.text[:-1], field, dialect)))
    return Equals(name, _value(value.text, field, dialect))


def _text_clause(name: str, value: LiteralValue) -> Words | Phrase | None:
    """None if nothing in the value is a letter or a number."""
    tokens = tuple(tokenize_text(value.text))
    if not tokens:
        return None
    return Phrase(name, tokens) if value.quoted else Words(name, tokens, _is_prefix(value))


def _bind_bare_term(value: LiteralValue, config: SearchConfig, dialect: Dialect) -> Anywhere:
    names = [entry.field for entry in config.default_fields]
    if not names:
        names = [name for name, field in config.fields.items() if field.kind == "text"]
    if not names:
        raise dialect.refuse("search.defaultFields must include at least one text or keyword field")
    targets: list[Equals | StartsWith | Words | Phrase] = []
    without_positions = False
    for name in names:
        field = config.fields[name]
        if field.kind == "keyword":
            targets.append(_keyword_clause(name, field, value, dialect))
        elif value.quoted and not field.positions:
            without_positions = True
        elif (clause := _text_clause(name, value)) is not None:
            targets.append(clause)
    if targets:
        return Anywhere(tuple(targets))
    if without_positions:
        raise dialect.refuse("field does not support phrase queries")
    raise dialect.refuse("search text clause did not produce any searchable tokens")
