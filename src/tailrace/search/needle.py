"""Bytes that a payload must hold to match: most rows of a scan are settled without decoding them.

A needle is only taken where it is safe: plain ASCII letters, digits and a few signs that JSON never has to
escape. A payload may still escape them (`\\u0041`), or hold another letter whose lower case is ours; such a
payload is always looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tailrace.schema.search_config import SearchConfig
from tailrace.search.bind import All, AnyOf, Anywhere, BoundQuery, Equals, Phrase, StartsWith, Words

_SAFE = re.compile(r"[A-Za-z0-9_.-]+")
PREFILTER_WORDS_MAX = 8

# U+212A KELVIN SIGN and U+0130 are the only letters outside ASCII whose lower case begins with an ASCII one.
_ODD_LOWER = ("\u212a".encode(), "\u0130".encode())


class PayloadPrefilter:
    """A payload without any of them does not match. They are in lower case if `lower`."""

    __slots__ = ("_lower", "_words")

    def __init__(self, words: Sequence[bytes], lower: bool) -> None:
        self._words = tuple(words)
        self._lower = lower

    def may_match(self, payload: bytes) -> bool:
        text = payload.lower() if self._lower else payload
        for word in self._words:
            if word in text:
                return True
        if b"\\" in payload and b"\\u" in payload:  # a single byte is found much quicker than two
            return True
        return self._lower and not payload.isascii() and any(odd in payload for odd in _ODD_LOWER)


def build_prefilter(query: BoundQuery, config: SearchConfig) -> PayloadPrefilter | None:
    """The needles of a query; None if it can match without any."""
    found = _required_words(query, config)
    if found is None or len(found) > PREFILTER_WORDS_MAX:
        return None
    lower = any(is_lower for _, is_lower in found)
    return PayloadPrefilter([(word.lower() if lower else word).encode() for word, _ in found], lower)


def _required_words(query: BoundQuery, config: SearchConfig) -> set[tuple[str, bool]] | None:
    """Words of which one has to be there, each with whether its case does not matter."""
    match query:
        case All(clauses):
            # One clause is enough: the one with the fewest and longest needles.
            choices = [found for clause in clauses if (found := _required_words(clause, config)) is not None]
            return min(choices, key=_cost, default=None)
        case AnyOf(clauses) | Anywhere(clauses):
            union: set[tuple[str, bool]] = set()
            for clause in clauses:
                found = _required_words(clause, config)
                if found is None:
                    return None
                union |= found
            return union
        case Equals(field, value) if isinstance(value, str):
            return _safe_word(value, config.fields[field].normalizer == "lowercase_v1")
        case StartsWith(field, prefix):
            return _safe_word(prefix, config.fields[field].normalizer == "lowercase_v1")
        case Words(_, tokens, _) | Phrase(_, tokens):
            safe = [token for token in tokens if token.isascii()]
            return _safe_word(max(safe, key=len), True) if safe else None
        case _:
            return None


def _safe_word(text: str, lower: bool) -> set[tuple[str, bool]] | None:
    return {(text, lower)} if _SAFE.fullmatch(text) else None


def _cost(found: set[tuple[str, bool]]) -> tuple[int, int]:
    return len(found), -min(len(word) for word, _ in found)
