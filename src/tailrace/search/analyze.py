"""`unicode_word_v1`: a text into tokens. Lower case, runs of letters and numbers, nothing else."""

from __future__ import annotations

import re
from typing import Final

TOKEN_BYTES_MAX: Final = 1024

# Word characters without the underscore are exactly the Unicode categories L* and N*.
_find_words = re.compile(r"[^\W_]+").findall


def tokenize_text(text: str) -> list[str]:
    """The tokens of one value, in order."""
    tokens: list[str] = _find_words(text.lower())
    if len(text) * 4 > TOKEN_BYTES_MAX:
        return [truncate_token(token) for token in tokens]
    return tokens


def truncate_token(token: str) -> str:
    """As much of a token as is kept: whole characters in the first 1024 bytes."""
    if len(token) * 4 <= TOKEN_BYTES_MAX:
        return token
    encoded = token.encode()
    return token if len(encoded) <= TOKEN_BYTES_MAX else encoded[:TOKEN_BYTES_MAX].decode(errors="ignore")
