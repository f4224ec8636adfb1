"""The query language of filters and searches: text to tokens, tokens to a tree, the tree to typed clauses.

Two dialects share lexer, grammar and clauses: `filter=` on reads, and the search queries of `q` and of rollup
includes. They differ in which clauses are allowed and in the error messages. OR binds loosest, juxtaposition
is AND, NOT and minus bind to what follows. Any text gives either a tree or an error.

Binding resolves fields in the stream's search configuration. Whether a query is accepted depends on the
registry alone, never on the data or on which indexes exist.

Events of the `evlog` profile may be queried by undeclared fields: `context.user:u7` matches the text at
`/context/user`. Such a field exists for one query only and has no index: the other clauses narrow the rows,
whose records are then decoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Literal, NamedTuple

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.schema.json_values import shorten
from tailrace.schema.search_config import Binding, Field, Kind, SearchConfig
from tailrace.search.records import RecordView, Value, converter_for, tokenize_text

QUERY_BYTES_MAX: Final = 16 * 1024
CLAUSES_MAX: Final = 1024
QUERY_DEPTH_MAX: Final = 64


class Dialect(NamedTuple):
    """A use of the language: its error code, the words of its messages, and what it allows."""

    code: str
    parameter: str
    called: str
    clause: str
    field: str
    bare: bool  # whether words and phrases without a field, prefixes and text fields are allowed

    def refuse(self, message: str) -> TailraceError:
        return TailraceError(self.code, message)


FILTER_DIALECT: Final = Dialect(
    "invalid_filter", "filter", "filter", "filter clause", "filter field", bare=False
)
SEARCH_DIALECT: Final = Dialect(
    "invalid_request", "q", "search query", "fielded search clause", "search field", bare=True
)


TokenKind = Literal["(", ")", ":", "-", "op", "word", "quoted", "stray"]

_SPACE: Final = re.compile(r"\s+")
_WORD: Final = re.compile(r"[^\s():<>=]+")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_OPERATOR: Final = re.compile(r"[<>]=?|=")
_NUMBER: Final = re.compile(r"-[0-9.]")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t"}


class Token(NamedTuple):
    """`glued`: it follows a colon or a comparison without a space, and so can only be a value."""

    kind: TokenKind
    text: str
    glued: bool = False


def tokenize(text: str, dialect: Dialect) -> list[Token]:
    """All tokens of a query. Misplaced operators have the kind `stray`, which the parser rejects."""
    tokens: list[Token] = []
    position = 0
    spaced = True  # whether white space separates this token from the one before
    while position < len(text):
        if match := _SPACE.match(text, position):
            position = match.end()
            spaced = True
            continue
        before = "" if spaced or not tokens else tokens[-1].kind
        token, position = _next(text, position, before, dialect)
        tokens.append(token)
        spaced = False
    return tokens


def _next(text: str, position: int, before: str, dialect: Dialect) -> tuple[Token, int]:
    first = text[position]
    glued = before in (":", "op")
    if first == "(" or first == ")" or first == ":":
        return Token(first, first, glued), position + 1
    if first == '"':
        quoted = _QUOTED.match(text, position)
        if quoted is None:
            raise dialect.refuse(f"unterminated quoted string in {dialect.called}")
        return Token("quoted", _ESCAPE.sub(_unescape, quoted[1]), glued), quoted.end()
    if operator := _OPERATOR.match(text, position):
        return Token("op" if before == ":" else "stray", operator[0], glued), operator.end()
    if first == "-" and not (glued and _NUMBER.match(text, position)):
        return Token("-", first, glued), position + 1
    word = _WORD.match(text, position)
    assert word is not None, "all other characters form words"
    return Token("word", word[0], glued), word.end()


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPED.get(match[1], match[1])


ComparisonOperator = Literal["=", ">", ">=", "<", "<="]

_OPERATORS: Final[dict[str, ComparisonOperator]] = {"=": "=", ">": ">", ">=": ">=", "<": "<", "<=": "<="}
_KEYWORDS: Final = frozenset({"and", "or", "not"})


class LiteralValue(NamedTuple):
    """A value as written. A quoted one is a phrase in text fields, and its `*` is literal."""

    text: str
    quoted: bool


class And(NamedTuple):
    children: tuple[QueryNode, ...]


class Or(NamedTuple):
    children: tuple[QueryNode, ...]


class Not(NamedTuple):
    child: QueryNode


class HasField(NamedTuple):
    name: str


class FieldComparison(NamedTuple):
    """`name:value`, with its comparison operator if there is one."""

    name: str
    comparison: ComparisonOperator | None
    value: LiteralValue


class BareTerm(NamedTuple):
    """A word or a phrase without a field."""

    value: LiteralValue


QueryNode = And | Or | Not | HasField | FieldComparison | BareTerm


def parse_query_text(text: str, dialect: Dialect) -> QueryNode:
    """Parse a query; the tree does not resolve fields."""
    if not text or text.isspace():
        raise dialect.refuse(f"{dialect.parameter} must not be empty")
    # A character takes at most four bytes: most texts need not be encoded to be measured.
    if len(text) * 4 > QUERY_BYTES_MAX and len(text.encode("utf-8", "surrogatepass")) > QUERY_BYTES_MAX:
        raise dialect.refuse(f"{dialect.parameter} must not be longer than {QUERY_BYTES_MAX} bytes")
    return _Parser(tokenize(text, dialect), dialect).whole()


class _Parser:
    def __init__(self, tokens: list[Token], dialect: Dialect) -> None:
        self._tokens = tokens
        self._at = 0
        self._clauses = 0
        self._depth = 0
        self._dialect = dialect

    def whole(self) -> QueryNode:
        tree = self._or()
        token = self._peek()
        if token is not None:
            hint = " (a value that contains ':' must be quoted)" if token.kind == ":" else ""
            raise self._dialect.refuse(f"unexpected {token.text!r} in {self._dialect.called}{hint}")
        return tree

    def _peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _is(self, keyword: str) -> bool:
        token = self._peek()
        return token is not None and token.kind == "word" and token.text.lower() == keyword

    def _or(self) -> QueryNode:
        children = [self._and()]
        while self._is("or"):
            self._at += 1
            children.append(self._and())
        return children[0] if len(children) == 1 else Or(tuple(children))

    def _and(self) -> QueryNode:
        children = [self._unary()]
        while True:
            if self._is("and"):
                self._at += 1
            elif not self._begins_operand():
                break
            children.append(self._unary())
        return children[0] if len(children) == 1 else And(tuple(children))

    def _begins_operand(self) -> bool:
        token = self._peek()
        return token is not None and token.kind in ("(", "-", "word", "quoted") and not self._is("or")

    def _unary(self) -> QueryNode:
        token = self._peek()
        if token is not None and (token.kind == "-" or self._is("not")):
            self._at += 1
            self._enter()
            child = self._unary()
            self._depth -= 1
            return Not(child)
        if token is not None and token.kind == "(":
            self._at += 1
            self._enter()
            tree = self._or()
            closing = self._peek()
            if closing is None or closing.kind != ")":
                raise self._dialect.refuse(f"missing ')' in {self._dialect.called}")
            self._at += 1
            self._depth -= 1
            return tree
        return self._clause()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > QUERY_DEPTH_MAX:
            raise self._dialect.refuse(
                f"{self._dialect.called} is nested deeper than {QUERY_DEPTH_MAX} levels"
            )

    def _clause(self) -> QueryNode:
        dialect = self._dialect
        token = self._peek()
        if token is None or token.kind not in ("word", "quoted") or self._is_keyword(token):
            raise dialect.refuse(f"expected clause in {dialect.called}")
        self._at += 1
        self._clauses += 1
        if self._clauses > CLAUSES_MAX:
            raise dialect.refuse(f"{dialect.called} has more than {CLAUSES_MAX} clauses")
        following = self._peek()
        if following is not None and following.kind == ":" and token.kind == "word":
            self._at += 1
            return self._fielded(token.text)
        if dialect.bare:
            return BareTerm(LiteralValue(token.text, token.kind == "quoted"))
        if token.kind == "quoted":
            raise dialect.refuse("expected field name in filter")
        raise dialect.refuse("expected ':' in filter clause")

    def _fielded(self, name: str) -> QueryNode:
        dialect = self._dialect
        if name.lower() == "has":
            return HasField(self._value("has: requires a field name", quotable=False).text)
        if name.lower() == "contains" and dialect.bare:
            raise dialect.refuse("contains: is not supported on _search yet")
        comparison: ComparisonOperator | None = None
        token = self._peek()
        if token is not None and token.kind == "op":
            comparison = _OPERATORS[token.text]
            self._at += 1
        return FieldComparison(name, comparison, self._value(f"expected value in {dialect.clause}"))

    def _value(self, message: str, *, quotable: bool = True) -> LiteralValue:
        token = self._peek()
        allowed = ("word", "quoted") if quotable else ("word",)
        # In `state:OR` the value is OR; in `state: OR ...` it is missing.
        if token is None or token.kind not in allowed or (self._is_keyword(token) and not token.glued):
            raise self._dialect.refuse(message)
        self._at += 1
        return LiteralValue(token.text, token.kind == "quoted")

    def _is_keyword(self, token: Token) -> bool:
        return token.kind == "word" and token.text.lower() in _KEYWORDS


_ORDERED = ("integer", "float", "date")

# Structs, not tuples: `id:x` and `id:x*` have the same parts, and must not compare as equal.
# Their names are part of the hash of an index plan.


class All(msgspec.Struct, frozen=True):
    clauses: tuple[BoundQuery, ...]


class AnyOf(msgspec.Struct, frozen=True):
    clauses: tuple[BoundQuery, ...]


class Negation(msgspec.Struct, frozen=True):
    clause: BoundQuery


class HasValue(msgspec.Struct, frozen=True):
    field: str


class Equals(msgspec.Struct, frozen=True):
    """Some value equals this one, which is canonical as the field's values are."""

    field: str
    value: Value


class StartsWith(msgspec.Struct, frozen=True):
    """Some value of a keyword field starts with this prefix."""

    field: str
    prefix: str


class Compares(msgspec.Struct, frozen=True):
    """The comparison holds for some value."""

    field: str
    comparison: ComparisonOperator
    value: int | float


class Words(msgspec.Struct, frozen=True):
    """One value of a text field has every token; with `prefix`, the last one is the start of a token."""

    field: str
    tokens: tuple[str, ...]
    prefix: bool


class Phrase(msgspec.Struct, frozen=True):
    """One value of a text field has the tokens in sequence."""

    field: str
    tokens: tuple[str, ...]


class Anywhere(msgspec.Struct, frozen=True):
    """A word or phrase without a field: matches if some target does. The best target gives the score."""

    targets: tuple[Equals | StartsWith | Words | Phrase, ...]


Clause = HasValue | Equals | StartsWith | Compares | Words | Phrase | Anywhere
BoundQuery = All | AnyOf | Negation | Clause


def bind_query(text: str, config: SearchConfig | None, dialect: Dialect) -> BoundQuery:
    """Parse and bind the text of a filter or a search."""
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
    # A star is literal here: filters have no prefixes.
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
    """Convert the text of a value as the same text in a record would be."""
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
    """None if the value has no letter or digit."""
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


def check_rollup_includes(config: SearchConfig) -> None:
    """Reject a search configuration with an invalid include, so that it cannot fail at query time."""
    for name, rollup in config.rollups.items():
        path = f"search.rollups.{name}"
        if rollup.include is not None:
            bind_rollup_include(rollup.include, config, f"{path}.include")
        for called, measure in rollup.measures.items():
            if measure.include is not None:
                bind_rollup_include(measure.include, config, f"{path}.measures.{called}.include")


def bind_rollup_include(text: str, config: SearchConfig, path: str) -> BoundQuery:
    try:
        return bind_query(text, config, SEARCH_DIALECT)
    except TailraceError as refusal:
        raise TailraceError(refusal.code, f"{path}: {refusal.message}") from None


CONTEXT_PREFIX: Final = "context."
CONTEXT_PROFILE: Final = "evlog"
_KINDS: Final[tuple[Kind, ...]] = ("float", "bool")
_VIEWS_CACHED_MAX: Final = 64


def add_context_fields(view: RecordView, text: str, dialect: Dialect = SEARCH_DIALECT) -> RecordView:
    """The view extended by the `context` fields that a query names; the same view if there are none."""
    if view.config.profile != CONTEXT_PROFILE or CONTEXT_PREFIX not in text:
        return view
    try:
        tree = parse_query_text(text, dialect)
    except TailraceError:
        return view  # binding reports the error
    kinds: dict[str, Kind] = {}
    for clause in _field_comparisons(tree):
        if not clause.name.startswith(CONTEXT_PREFIX) or view.config.resolve(clause.name) is not None:
            continue
        kind = _infer_kind(clause)
        if kinds.setdefault(clause.name, kind) != kind:
            raise dialect.refuse(
                f"{dialect.field} {shorten(clause.name)} is compared with values of two kinds; quote numbers "
                "that are meant as text"
            )
    return _extend_view(view, tuple(sorted(kinds.items()))) if kinds else view


def _field_comparisons(tree: QueryNode) -> Iterator[FieldComparison]:
    match tree:
        case And(children) | Or(children):
            for child in children:
                yield from _field_comparisons(child)
        case Not(child):
            yield from _field_comparisons(child)
        case FieldComparison():
            yield tree
        case _:
            pass


def _infer_kind(clause: FieldComparison) -> Kind:
    """A number or a boolean if it is written as one, else a keyword."""
    if clause.value.quoted:
        return "keyword"
    for kind in _KINDS:
        if converter_for(Field(kind, ()))(clause.value.text) is not None:
            return kind
    return "keyword"


@lru_cache(_VIEWS_CACHED_MAX)
def _extend_view(view: RecordView, kinds: tuple[tuple[str, Kind], ...]) -> RecordView:
    fields = dict(view.config.fields)
    for name, kind in kinds:
        pointer = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in name.split("."))
        bindings = (Binding(1, pointer),)
        fields[name] = (
            Field(kind, bindings, exact=True, prefix=True)
            if kind == "keyword"
            else Field(kind, bindings, exact=True, column=True)
        )
    search = msgspec.structs.replace(view.config, fields=fields)
    extended = RecordView(msgspec.structs.replace(view.registry, search=search))
    extended.indexed = view
    return extended
