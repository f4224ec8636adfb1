"""Tokens into a tree: OR binds loosest, juxtaposition is AND, NOT and minus bind to what follows.

Parsing is total: any text gives a tree or a refusal. The tree knows no fields; `bind` does.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from tailrace.search.dialect import CLAUSES_MAX, QUERY_BYTES_MAX, QUERY_DEPTH_MAX, Dialect
from tailrace.search.lexer import Token, tokenize

ComparisonOperator = Literal["=", ">", ">=", "<", "<="]

_OPERATORS: Final[dict[str, ComparisonOperator]] = {"=": "=", ">": ">", ">=": ">=", "<": "<", "<=": "<="}
_KEYWORDS: Final = frozenset({"and", "or", "not"})


class LiteralValue(NamedTuple):
    """A value as it was written. Quoted, it is a phrase for text fields, and its `*` is a star."""

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
    """`name:value`, with the comparison that was written, if any."""

    name: str
    comparison: ComparisonOperator | None
    value: LiteralValue


class BareTerm(NamedTuple):
    """A word or a phrase without a field."""

    value: LiteralValue


QueryNode = And | Or | Not | HasField | FieldComparison | BareTerm


def parse_query_text(text: str, dialect: Dialect) -> QueryNode:
    """The tree of a query."""
    if not text or text.isspace():
        raise dialect.refuse(f"{dialect.parameter} must not be empty")
    # Four bytes are the most a character takes: most texts need not be encoded to be measured.
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
        wanted = ("word", "quoted") if quotable else ("word",)
        # `state:OR` names Oregon; in `state: OR ...` the value was forgotten.
        if token is None or token.kind not in wanted or (self._is_keyword(token) and not token.glued):
            raise self._dialect.refuse(message)
        self._at += 1
        return LiteralValue(token.text, token.kind == "quoted")

    def _is_keyword(self, token: Token) -> bool:
        return token.kind == "word" and token.text.lower() in _KEYWORDS
