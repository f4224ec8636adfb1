"""JSON values: checks of request bodies, pointers (RFC 6901), decoding and encoding of stored records.

There are two decoders of records. `decode_payload` gives a value to every JSON text that an append accepts: a
lone surrogate becomes U+FFFD, a number beyond the range of doubles an infinity, which no field kind accepts.
`decode_json_record` is exact, for lenses and validation, and rejects numbers out of range.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Final, cast

import msgspec
import orjson

from tailrace.common.errors import TailraceError

SHOWN_MAX = 100  # characters of a client's own text in a message


def invalid_request(message: str) -> TailraceError:
    return TailraceError("invalid_request", message)


def shorten(text: str) -> str:
    """A client's text, shortened for a message; what cannot be encoded as UTF-8 is replaced."""
    return text[:SHOWN_MAX].encode("utf-8", "replace").decode()


def expect_object(value: object, path: str, allowed: Collection[str] | None = None) -> dict[str, object]:
    """A JSON object with no keys but the allowed ones."""
    if not isinstance(value, dict):
        raise invalid_request(f"{path} must be an object")
    given = cast("dict[str, object]", value)
    if allowed is not None:
        for key in given:
            if key not in allowed:
                raise invalid_request(f"{path}.{shorten(key)} is not supported")
    return given


def expect_array(value: object, path: str, length_max: int) -> list[object]:
    if not isinstance(value, list):
        raise invalid_request(f"{path} must be an array")
    items = cast("list[object]", value)
    if len(items) > length_max:
        raise invalid_request(f"{path} must have at most {length_max} items")
    return items


def expect_string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise invalid_request(f"{path} must be a string")
    return value


def expect_bool(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise invalid_request(f"{path} must be a boolean")
    return value


_TOKEN = re.compile(r"(?:[^~/]|~0|~1)*+")  # possessive: no backtracking state for each repetition
_INDEX = re.compile(r"0|[1-9][0-9]*")


class Absent:
    """The type of `ABSENT`."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()  # result of a pointer to nothing; a JSON null is a value


def parse_pointer(text: str) -> tuple[str, ...] | None:
    """The unescaped tokens of a pointer; `""` is the root. None if the text is not a pointer."""
    if not text:
        return ()
    if text[0] != "/":
        return None
    tokens = text[1:].split("/")
    if not all(_TOKEN.fullmatch(token) for token in tokens):
        return None
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in tokens)


def resolve_pointer(value: object, tokens: tuple[str, ...]) -> object:
    """The value at a pointer, or `ABSENT`."""
    for token in tokens:
        if isinstance(value, dict):
            value = cast("dict[str, object]", value).get(token, ABSENT)
        elif isinstance(value, list):
            items = cast("list[object]", value)
            # More digits than any array index has.
            if len(token) > 18 or not _INDEX.fullmatch(token) or int(token) >= len(items):
                return ABSENT
            value = items[int(token)]
        else:
            return ABSENT
    return value


_DIGITS_MAX: Final = 400  # a longer integer is beyond the range of doubles
_ESCAPES: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a whole pair
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"  # a lone surrogate
    rb"|\\.",
    re.DOTALL,
)


class UnreadableRecordError(ValueError):
    """The payload is not JSON, or nested too deeply to be decoded."""


def decode_payload(payload: bytes | bytearray | memoryview) -> object:
    """The value of a payload. Numbers beyond the range of doubles are infinite."""
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


_DECODER = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder()


class UnusableRecordError(ValueError):
    """The text is JSON, but cannot be represented exactly."""


def decode_json_record(payload: bytes | memoryview) -> object:
    """The exact value of a JSON text that is known to be well-formed.

    Half a surrogate pair, escaped, is legal JSON; msgspec refuses it, so the slower reader steps in.
    """
    try:
        return _DECODER.decode(payload)
    except (msgspec.MsgspecError, RecursionError):
        pass
    try:
        return json.loads(bytes(payload), parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise UnusableRecordError("record is nested too deeply") from None
    except ValueError:
        raise UnusableRecordError("record has a number out of range") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def encode_json_record(value: object) -> bytes:
    """The value as compact JSON."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        # A lone surrogate has no UTF-8 encoding; it is written as an escape, as it was sent.
        return _dump_escaped(value)


def _dump_escaped(value: object) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        # JSON has no infinity: null, as in the fast encoder.
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(finite, separators=(",", ":")).encode()


def without_surrogates(value: object) -> object:
    """The value with every lone surrogate replaced by U+FFFD."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    return json.loads(text.decode("utf-16-le", "replace"))
