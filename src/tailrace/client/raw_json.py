"""The parts of a JSON text as they are written, also where fast decoders give up.

They refuse lone surrogates, which JavaScript writes for text that was cut within a character, and round or
refuse numbers beyond 64 bits. Records may hold both, and whoever passes them on must not change them.
"""

from __future__ import annotations

import json
import re
from typing import Final

# Numbers are not converted: they may have any number of digits, and the texts around them are wanted.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)
_BETWEEN: Final = re.compile(r"[ \t\r\n,:]*")


def elements(body: bytes) -> list[bytes]:
    """Those of an array."""
    return [text.encode() for text in _values(body, "[", "]")]


def members(body: bytes) -> dict[str, bytes]:
    """Those of an object, by name."""
    values = iter(_values(body, "{", "}"))
    return {json.loads(name): text.encode() for name, text in zip(values, values, strict=True)}


def _values(body: bytes, opening: str, closing: str) -> list[str]:
    """One after the other; of an object names and values in turn."""
    text, found = body.decode(), list[str]()
    _DECODER.decode(text)
    place = _next(text, text.index(opening) + 1)
    while text[place] != closing:
        end = _DECODER.raw_decode(text, place)[1]
        found.append(text[place:end])
        place = _next(text, end)
    return found


def _next(text: str, place: int) -> int:
    between = _BETWEEN.match(text, place)
    assert between is not None, "it matches nothing, too"
    return between.end()
