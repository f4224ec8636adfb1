"""The members of JSON objects as the text they are written in, and what msgspec does not check about it."""

from __future__ import annotations

import json
import re
from typing import Final, NoReturn, cast

import msgspec
from msgspec import Raw

from tailrace.hub.errors import HubError

DEPTH_MAX: Final = 64
_NAME_SHOWN_MAX: Final = 128
_WHITESPACE: Final = re.compile(r"[ \t\n\r]*")
_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # possessive: no state for each
_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_object_decoder: Final = msgspec.json.Decoder(dict[str, Raw])


def parse_members(text: bytes | Raw) -> dict[str, Raw]:
    """The members of an object that was checked before; `null` has none. Of equal names the last counts."""
    try:
        return {} if len(text) == 4 and bytes(text) == b"null" else _object_decoder.decode(text)
    except msgspec.ValidationError:
        raise HubError("invalid_request", "an object is expected", {"field": "payload"}) from None
    except msgspec.DecodeError:
        # Half a surrogate pair, escaped: legal JSON, and what JavaScript writes; msgspec refuses it.
        return scan_members(bytes(text), twice=True)


def check_frame_text(frame: bytes) -> None:
    """UTF-8 and depth."""
    if not frame.isascii():
        try:
            frame.decode()
        except UnicodeDecodeError as error:
            raise invalid_message(f"not UTF-8: {error.reason} at byte {error.start}") from None
    if frame.count(b"[") + frame.count(b"{") > DEPTH_MAX and _exceeds_depth(frame):
        raise nesting_error()


def _exceeds_depth(frame: bytes) -> bool:
    """Whether brackets are left after the innermost pairs were taken away as often as there may be levels."""
    brackets = _STRINGS.sub(b"", frame).translate(_BRACKETS).translate(None, _NO_BRACKETS)
    for _ in range(DEPTH_MAX):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")
    # What has no pairs is no JSON either, and is told so by whoever parses it.
    return brackets.count(b"[") == brackets.count(b"]") > 0


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


# Numbers are only looked over, however many digits they have.
_value_decoder: Final = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_refuse_constant)


def scan_members(frame: bytes, *, twice: bool = False) -> dict[str, Raw]:
    """The members of an object by a slower way, which sees those that come twice."""
    found: dict[str, Raw] = {}
    text = frame.decode()
    try:
        position = _expect(text, _skip_whitespace(text, 0), "{")
        more = text[position : position + 1] != "}"
        while more:
            name, start, end = _scan_member(text, position)
            if name in found and not twice:
                raise ValueError(f"the member {name[:_NAME_SHOWN_MAX]!r} comes twice")
            found[name] = Raw(text[start:end].encode())
            position = _skip_whitespace(text, end)
            more = text[position : position + 1] == ","
            position = _skip_whitespace(text, position + 1) if more else position
        if text[_expect(text, position, "}") :]:
            raise ValueError(f"something follows the object at character {position}")
    except ValueError as error:
        raise invalid_message(f"not an envelope: {error}") from None
    except RecursionError:
        raise nesting_error() from None
    return found


def _scan_member(text: str, position: int) -> tuple[str, int, int]:
    """The name of a member, and where its value begins and ends."""
    if text[position : position + 1] != '"':
        raise ValueError(f"a name is expected at character {position}")
    name, position = cast("tuple[str, int]", _value_decoder.raw_decode(text, position))
    start = _expect(text, _skip_whitespace(text, position), ":")
    _value, end = cast("tuple[object, int]", _value_decoder.raw_decode(text, start))
    return name, start, end


def _expect(text: str, position: int, mark: str) -> int:
    """The place after a mark and what space follows it."""
    if text[position : position + 1] != mark:
        raise ValueError(f"{mark!r} is expected at character {position}")
    return _skip_whitespace(text, position + 1)


def _skip_whitespace(text: str, position: int) -> int:
    gap = _WHITESPACE.match(text, position)
    return position if gap is None else gap.end()


def compact_json(text: bytes) -> bytes:
    """JSON without the space between its tokens, which stay as they are."""
    if not any(byte in text for byte in (b" ", b"\t", b"\n", b"\r")):
        return text
    parts: list[bytes] = []
    position = 0
    for string in _STRINGS.finditer(text):
        parts.append(text[position : string.start()].translate(None, b" \t\n\r"))
        parts.append(string[0])
        position = string.end()
    parts.append(text[position:].translate(None, b" \t\n\r"))
    return b"".join(parts)


def invalid_message(message: str, *, field: str | None = None) -> HubError:
    return HubError("invalid_message", message, None if field is None else {"field": field})


def nesting_error() -> HubError:
    return invalid_message(f"nested deeper than {DEPTH_MAX} levels")
