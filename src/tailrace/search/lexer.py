"""Query text into tokens."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from tailrace.search.dialect import Dialect

TokenKind = Literal["(", ")", ":", "-", "op", "word", "quoted", "stray"]

_SPACE: Final = re.compile(r"\s+")
_WORD: Final = re.compile(r"[^\s():<>=]+")
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_OPERATOR: Final = re.compile(r"[<>]=?|=")
_NUMBER: Final = re.compile(r"-[0-9.]")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t"}


class Token(NamedTuple):
    """`glued` means that it follows a colon or a comparison directly: there it can only be a value."""

    kind: TokenKind
    text: str
    glued: bool = False


def tokenize(text: str, dialect: Dialect) -> list[Token]:
    """All tokens of a query. Operators out of place are strays, for the parser to refuse."""
    tokens: list[Token] = []
    position = 0
    spaced = True  # whether something separates this token from the one before
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
    assert word is not None, "what is nothing else is a word"
    return Token("word", word[0], glued), word.end()


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPED.get(match[1], match[1])
