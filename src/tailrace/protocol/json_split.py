"""Cutting a JSON body into entries without decoding it: stored bytes are the client's own bytes."""

from __future__ import annotations

import re
from typing import cast

import msgspec

from tailrace.errors import TailraceError

_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE = msgspec.json.Decoder(msgspec.Raw)
_SPACE = b" \t\n\r"
_GAP = re.compile(rb"[ \t\n\r,]*")
_ESCAPES = re.compile(rb"\\(?:u[dD][89a-fA-F][0-9a-fA-F]{2}|.)", re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def split(body: bytes, depth_max: int) -> list[msgspec.Raw]:
    """The entries of one JSON text: an array loses one level, any other value is one entry.

    msgspec checks the grammar while it cuts, but not UTF-8 inside strings, nor depth; those are ours.
    """
    try:
        try:
            entries = _cut(body)
        except msgspec.DecodeError:
            if b"\\u" not in body:
                raise
            entries = _cut_past_surrogates(body)
        if not body.isascii():
            _check_utf8(entries)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TailraceError("invalid_json", f"body is not valid JSON: {error}") from None
    except RecursionError:
        raise _too_deep(depth_max) from None
    inside = depth_max - 1 if body.lstrip(_SPACE)[:1] == b"[" else depth_max
    if any(_is_deeper(bytes(entry), inside) for entry in entries if len(entry) > 2 * inside):
        raise _too_deep(depth_max)
    return entries


def _check_utf8(entries: list[msgspec.Raw]) -> None:
    """Between entries the grammar has nothing but ASCII. Most of them have nothing else either."""
    for entry in map(bytes, entries):
        if not entry.isascii():
            entry.decode()


def _is_deeper(entry: bytes, depth_max: int) -> bool:
    """Each level has two brackets, so few entries are long enough; and few of these have that many."""
    return entry.count(b"[") + entry.count(b"{") > depth_max and _depth(entry) > depth_max


def _cut(body: bytes) -> list[msgspec.Raw]:
    text = body.lstrip(_SPACE)
    if text[:1] == b"[":
        return _ELEMENTS.decode(text)
    return [_VALUE.decode(text.rstrip(_SPACE))]


def _cut_past_surrogates(body: bytes) -> list[msgspec.Raw]:
    """Half a surrogate pair, escaped, is legal JSON, and what JavaScript writes; msgspec refuses it.

    So the grammar is checked, and the cuts are found, on a copy with plain escapes of the same length.
    """

    def plain(match: re.Match[bytes]) -> bytes:
        return b"\\u0020" if len(match[0]) == 6 else match[0]

    entries: list[msgspec.Raw] = []
    text = body.lstrip(_SPACE)
    position = len(body) - len(text) + (1 if text[:1] == b"[" else 0)
    for copy in _cut(_ESCAPES.sub(plain, body)):
        gap = _GAP.match(body, position)
        start = position if gap is None else gap.end()
        position = start + len(bytes(copy))
        entries.append(msgspec.Raw(body[start:position]))
    return entries


def join(entries: list[msgspec.Raw]) -> tuple[bytes, list[int]]:
    """The entries as one block body (joined by commas) and their lengths."""
    parts = cast("list[bytes]", entries)  # Raw offers its bytes through the buffer protocol
    return b",".join(parts), [len(part) for part in parts]


def _depth(body: bytes) -> int:
    deepest = depth = 0
    for byte in _STRINGS.sub(b"", body).translate(None, _NO_BRACKETS):
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


def _too_deep(depth_max: int) -> TailraceError:
    return TailraceError("invalid_json", f"JSON is nested deeper than {depth_max} levels")
