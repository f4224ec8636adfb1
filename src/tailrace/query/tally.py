"""What a scan counts over all rows, told without taking every text apart.

Weights need the number of texts and of their tokens, and how far the times reach. For rows that no word of
the query can be in, that is all there is to know of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from tailrace.query.analyze import tokens_of
from tailrace.query.column_build import column_from
from tailrace.query.needle import NEEDLES_MAX, Needles, words_needed
from tailrace.query.score import scored_tokens
from tailrace.query.search_request import SearchRequest
from tailrace.query.values import Value, earliest_and_latest, to_string
from tailrace.schema.search_config import SearchConfig
from tailrace.schema.search_fields import Field

# Letters and digits stay, everything else of ASCII becomes a space: what is between spaces is a token.
_SPACED: Final = bytes(
    code if code == 10 or (code < 128 and chr(code).isalnum()) else 32 for code in range(256)
)


def tally_needles(request: SearchRequest, config: SearchConfig) -> Needles | None:
    """A payload without any of them neither matches nor has a token that weighs.

    Tokens are letters and digits in lower case, so those of ASCII are safe to look for. None if there is no
    telling, or no token weighs: then taking rows apart costs no more than looking into them first.
    """
    needed = words_needed(request.query, config)
    tokens = {token for found in scored_tokens(request.query).values() for token in found}
    if needed is None or not tokens or not all(map(str.isascii, tokens)):
        return None
    words = {word.lower() for word, _ in needed} | tokens
    if len(words) > NEEDLES_MAX:
        return None
    return Needles([word.encode() for word in sorted(words)], lower=True)


def text_counts(found: Sequence[object]) -> tuple[int, int] | None:
    """How many rows have a token, and how many tokens there are; None if a row may have several values."""
    if list in set(map(type, found)):
        return None
    texts = [leaf for leaf in found if type(leaf) is str]
    joined = "\n".join(texts)
    if not joined.isascii() or joined.count("\n") != max(0, len(texts) - 1):
        counts = [len(tokens_of(cast("str", to_string(text)))) for text in texts]
        return len(counts) - counts.count(0), sum(counts)
    spaced = joined.encode().translate(_SPACED)
    return sum(map(bool, map(bytes.strip, spaced.split(b"\n")))), len(spaced.split())


def bounds_of(field: Field, found: list[object]) -> tuple[Value, Value] | None:
    """The smallest and the largest value of a field; None if no row has one."""
    bounds = earliest_and_latest(found) if field.kind == "date" else None
    if bounds is not None:
        return bounds
    terms = column_from(field, found, lists=False).terms
    return (terms[0], terms[len(terms) - 1]) if len(terms) else None
