"""Evaluates bound queries: on field values (the reference), on stored payloads (compiled), on sets of rows.

`evaluate_record` is the reference, with which all faster implementations must agree. `Matcher` compiles a
query to closures over stored payloads and decodes only the top-level members it needs; payloads that this
decoder rejects (not an object, lone surrogates, numbers beyond a double) are decoded whole.

`match_rows` evaluates a query on an index that may know only some clauses: it yields the rows that match for
certain and those that may. Where both are the same set, no record has to be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, eq, ge, gt, le, lt
from typing import Any, Final, NamedTuple, cast

import msgspec

from tailrace.schema.json_values import UnreadableRecordError, decode_payload, parse_pointer, resolve_pointer
from tailrace.schema.search_config import SearchConfig
from tailrace.search.query_language import (
    All,
    AnyOf,
    Anywhere,
    BoundQuery,
    Clause,
    Compares,
    ComparisonOperator,
    Equals,
    HasValue,
    Negation,
    Phrase,
    StartsWith,
    Words,
)
from tailrace.search.records import Convert, Value, converter_for, field_values, flatten_leaves, tokenize_text

_COMPARISONS: Final[dict[ComparisonOperator, Callable[[Value, int | float], bool]]] = {
    "=": lambda value, bound: value == bound,
    ">": lambda value, bound: not isinstance(value, str) and value > bound,
    ">=": lambda value, bound: not isinstance(value, str) and value >= bound,
    "<": lambda value, bound: not isinstance(value, str) and value < bound,
    "<=": lambda value, bound: not isinstance(value, str) and value <= bound,
}


def evaluate_record(query: BoundQuery, record: object, config: SearchConfig, version: int) -> bool:
    """Whether a record at schema version `version` matches. None is one that could not be promoted."""

    def values(field: str) -> list[Value]:
        return field_values(record, config.fields[field], version)

    return evaluate_values(query, values)


def evaluate_values(query: BoundQuery, values: Callable[[str], list[Value]]) -> bool:
    """Whether a record with these field values matches."""
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
    """Whether a value has every token in any order; with `prefix`, the last one is the start of a token."""
    whole = wanted[:-1] if prefix else wanted
    if not all(token in found for token in whole):
        return False
    return not prefix or any(token.startswith(wanted[-1]) for token in found)


def has_phrase(found: list[str], wanted: tuple[str, ...]) -> bool:
    """Whether a value has the tokens in sequence."""
    length = len(wanted)
    return any(tuple(found[at : at + length]) == wanted for at in range(len(found) - length + 1))


ValueCheck = Callable[[Any], bool]  # on one canonical value
RecordTest = Callable[[Any], bool]  # on the members of a record

_COMPARE_FUNCTIONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": eq,
    ">": gt,
    ">=": ge,
    "<": lt,
    "<=": le,
}


class Matcher:
    """A query compiled for records of one schema version."""

    __slots__ = ("_decode", "_members", "_on_nothing", "_shape", "_test")

    def __init__(self, query: BoundQuery, config: SearchConfig, version: int) -> None:
        compiler = _Compiler(config, version)
        self._test: RecordTest = compiler.compile(query)
        self._members = tuple(compiler.members)
        names = [f"m{index}" for index in range(len(self._members))]
        # A missing member is the same as null: no values.
        self._shape = cast(
            "Callable[..., object]",
            msgspec.defstruct(
                "Members",
                [(name, Any, None) for name in names],
                rename=dict(zip(names, self._members, strict=True)),
                gc=False,
            ),
        )
        self._decode = msgspec.json.Decoder(cast("type[object]", self._shape)).decode
        self._on_nothing = evaluate_values(query, _no_values)

    def matches(self, payload: bytes | memoryview) -> bool:
        """Whether a stored payload, already at this version, matches."""
        try:
            return self._test(self._decode(payload))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        try:
            return self.matches_record(decode_payload(payload))
        except UnreadableRecordError:
            return self._on_nothing

    def matches_record(self, record: object) -> bool:
        """Whether a promoted record matches; None is one that could not be promoted."""
        if not isinstance(record, dict):
            return self._on_nothing
        get = cast("dict[str, object]", record).get
        return self._test(self._shape(*map(get, self._members)))


def _no_values(_field: str) -> list[Value]:
    return []


def _never(_members: object) -> bool:
    return False


class _Compiler:
    def __init__(self, config: SearchConfig, version: int) -> None:
        self._config = config
        self._version = version
        self.members: dict[str, str] = {}  # top-level member to its attribute

    def compile(self, query: BoundQuery) -> RecordTest:
        match query:
            case All(clauses):
                return _all([self.compile(clause) for clause in clauses])
            case AnyOf(clauses):
                return _any([self.compile(clause) for clause in clauses])
            case Anywhere(targets):
                return _any([self._clause(target) for target in targets])
            case Negation(clause):
                return _not(self.compile(clause))
            case _:
                return self._clause(query)

    def _clause(self, clause: Clause) -> RecordTest:
        assert not isinstance(clause, Anywhere)
        field = self._config.fields[clause.field]
        pointer = field.pointer_at(self._version)
        if not pointer:  # no binding yet, or the whole record, which is an object and so has no value
            return _never
        tokens = parse_pointer(pointer)
        assert tokens, "pointers are checked when a registry is installed"
        attribute = self.members.setdefault(tokens[0], f"m{len(self.members)}")
        get = _getter(attribute, tokens[1:])
        test = _some(get, converter_for(field), _check(clause))
        if isinstance(clause, Equals) and isinstance(clause.value, str):
            return _equals(get, clause.value, field.normalizer == "lowercase_v1", test)
        return test


def _all(tests: list[RecordTest]) -> RecordTest:
    if len(tests) == 2:
        first, second = tests
        return lambda members: first(members) and second(members)
    return lambda members: all(test(members) for test in tests)


def _any(tests: list[RecordTest]) -> RecordTest:
    if len(tests) == 2:
        first, second = tests
        return lambda members: first(members) or second(members)
    return lambda members: any(test(members) for test in tests)


def _not(test: RecordTest) -> RecordTest:
    return lambda members: not test(members)


def _getter(attribute: str, rest: tuple[str, ...]) -> Callable[[object], object]:
    get = attrgetter(attribute)
    if not rest:
        return get
    return lambda members: resolve_pointer(get(members), rest)


def _some(get: Callable[[object], object], convert: Convert, check: ValueCheck) -> RecordTest:
    """Test whether some value passes; the usual single leaf makes no list."""

    def test(members: object) -> bool:
        found = get(members)
        if type(found) is not list:
            value = convert(found)
            return value is not None and check(value)
        return any(check(value) for value in _converted(flatten_leaves(cast("object", found)), convert))

    return test


def _equals(get: Callable[[object], object], wanted: str, lower: bool, otherwise: RecordTest) -> RecordTest:
    """Fast path of the most common clause: compares one plain string with another."""

    def test(members: object) -> bool:
        found = get(members)
        if type(found) is str and found.isascii():
            return (found.lower() if lower else found) == wanted
        return otherwise(members)

    return test


def _converted(found: list[object], convert: Convert) -> Iterable[Value]:
    return (value for leaf in found if (value := convert(leaf)) is not None)


def _check(clause: HasValue | Equals | StartsWith | Compares | Words | Phrase) -> ValueCheck:
    match clause:
        case HasValue():
            return lambda _value: True
        case Equals(_, wanted):
            return wanted.__eq__ if isinstance(wanted, str) else lambda value: value == wanted
        case StartsWith(_, prefix):
            return lambda value: value.startswith(prefix)
        case Compares(_, comparison, bound):
            compares = _COMPARE_FUNCTIONS[comparison]
            return lambda value: compares(value, bound)
        case Words(_, tokens, prefix):
            return _words(tokens, prefix)
        case Phrase(_, tokens):
            return lambda value: has_phrase(tokenize_text(value), tokens)


def _words(tokens: tuple[str, ...], prefix: bool) -> ValueCheck:
    # A substring search excludes most texts before they are tokenised.
    needle = max(tokens, key=len)

    def check(value: str) -> bool:
        return needle in value.lower() and has_words(tokenize_text(value), tokens, prefix)

    return check


ClauseDecider = Callable[[Clause], "RowMatches | None"]


class RowMatches(NamedTuple):
    """Sets of rows that match for certain and that may match; `certain` is a subset of `possible`."""

    certain: int
    possible: int

    @property
    def is_final(self) -> bool:
        return self.certain == self.possible


def certain_match(rows: int) -> RowMatches:
    return RowMatches(rows, rows)


def match_rows(query: BoundQuery, all_rows: int, decide: ClauseDecider) -> RowMatches:
    """Evaluate a query on rows. `decide` matches one clause, or returns None if it cannot."""
    match query:
        case All(clauses):
            certain = possible = all_rows
            for clause in clauses:
                if not possible:
                    break
                found = match_rows(clause, all_rows, decide)
                certain &= found.certain
                possible &= found.possible
            return RowMatches(certain & possible, possible)
        case AnyOf(clauses) | Anywhere(clauses):
            certain = possible = 0
            for clause in clauses:
                found = match_rows(clause, all_rows, decide)
                certain |= found.certain
                possible |= found.possible
            return RowMatches(certain, possible)
        case Negation(clause):
            found = match_rows(clause, all_rows, decide)
            return RowMatches(all_rows & ~found.possible, all_rows & ~found.certain)
        case _:
            known = decide(query)
            return RowMatches(0, all_rows) if known is None else known
