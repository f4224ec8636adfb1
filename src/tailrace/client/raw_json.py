"""The parts of a JSON text as they are written, also where fast decoders give up.

They refuse lone surrogates, which JavaScript writes for text that was cut within a character, and round or
refuse numbers beyond 64 bits. Records may hold both, and whoever passes them on must not change them.
"""

from __future__ import annotations

import json
import re
from typing import Final

# Numbers are not converted: they may have any number of digits, and the texts around them are wanted.
_RAW_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)
_BETWEEN: Final = re.compile(r"[ \t\r\n,:]*")


def raw_elements(body: bytes) -> list[bytes]:
    """Those of an array."""
    return [text.encode() for text in _scan_values(body, "[", "]")]


def raw_members(body: bytes) -> dict[str, bytes]:
    """Those of an object, by name."""
    values = iter(_scan_values(body, "{", "}"))
    return {json.loads(name): text.encode() for name, text in zip(values, values, strict=True)}


def _scan_values(body: bytes, opening: str, closing: str) -> list[str]:
    """One after the other; of an object names and values in turn."""
    text, found = body.decode(), list[str]()
    _RAW_DECODER.decode(text)
    place = _skip_separators(text, text.index(opening) + 1)
    while text[place] != closing:
        end = _RAW_DECODER.raw_decode(text, place)[1]
        found.append(text[place:end])
        place = _skip_separators(text, end)
    return found


def _skip_separators(text: str, place: int) -> int:
    between = _BETWEEN.match(text, place)
    assert between is not None, "it matches nothing, too"
    return between.end()
