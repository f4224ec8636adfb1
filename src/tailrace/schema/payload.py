"""Decoding one stored JSON payload. Whatever JSON an append accepts has a value here.

The fast decoder refuses two things that are legal JSON: half a surrogate pair, escaped, and numbers beyond
the doubles. Such records take a slower way: half a pair becomes U+FFFD, the number an infinity that no field
kind accepts. The stored payload keeps its bytes.
"""

from __future__ import annotations

import json
import math
import re
from typing import Final

import orjson

_DIGITS_MAX: Final = 400  # a longer integer is beyond the doubles
_ESCAPES: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a whole pair
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"  # half of one
    rb"|\\.",
    re.DOTALL,
)


class UnreadableRecordError(ValueError):
    """The payload is no JSON text, or is nested too deep to be decoded."""


def decode_payload(payload: bytes | bytearray | memoryview) -> object:
    """The value of a payload. Numbers beyond the doubles are infinite."""
    try:
        return orjson.loads(payload)
    except orjson.JSONDecodeError:
        return _decode_anything(bytes(payload))


def _decode_anything(payload: bytes) -> object:
    text = _ESCAPES.sub(_whole, payload) if b"\\u" in payload else payload
    try:
        return json.loads(text.decode(), parse_int=_integer, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UnreadableRecordError(str(error)) from None


def _whole(match: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if match[1] else match[0]


def _integer(text: str) -> int | float:
    if len(text) <= _DIGITS_MAX:
        return int(text)
    return -math.inf if text[0] == "-" else math.inf


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
