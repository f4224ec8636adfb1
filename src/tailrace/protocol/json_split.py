"""Splits a JSON body into entries without decoding it: the client's bytes are stored unchanged.

Memory is a small multiple of the body and time is linear, for any body. So no pattern here repeats a group
(`re` stores a state for every repetition until the match ends), and short elements do not become objects in
large numbers.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from tailrace.common.errors import TailraceError

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE = msgspec.json.Decoder(msgspec.Raw)
_SPACE = b" \t\n\r"
_SEPARATOR = re.compile(rb"[ \t\n\r,]*")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
# A large body is processed in blocks of this size.
_BLOCK_BYTES = 256 * 1024
# An element costs an object of 56 bytes while its body is split; a large body with smaller elements is split
# in pieces.
_ELEMENT_BYTES_MIN = 16


def split_to_block(body: bytes, depth_max: int, entries_max: int) -> tuple[bytes, Sequence[int]]:
    """The entries of one JSON text as one block body (joined by commas) and their lengths."""
    if len(body) > _BLOCK_BYTES and body.count(b",") * _ELEMENT_BYTES_MIN > len(body):
        text = body.strip(_SPACE)
        if text[:1] == b"[":
            return _join_pieces(text, depth_max, entries_max)
    found = split_entries(body, depth_max)
    if len(found) == 1:
        entry = bytes(found[0])
        return entry, (len(entry),)
    if len(found) > entries_max:
        raise _too_many(entries_max)
    return join_entries(found)


def split_entries(body: bytes, depth_max: int) -> list[msgspec.Raw]:
    """The entries of one JSON text: an array loses one level, any other value is one entry.

    msgspec checks the grammar while splitting, but neither UTF-8 inside strings nor depth; this does.
    """
    try:
        try:
            found = _split_grammar(body)
        except msgspec.DecodeError:
            if b"\\u" not in body:
                raise
            found = _split_past_surrogates(body)
        if not body.isascii():
            _check_utf8(found)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TailraceError("invalid_json", f"body is not valid JSON: {error}") from None
    except RecursionError:
        raise _too_deep(depth_max) from None
    inside = depth_max - 1 if body.lstrip(_SPACE)[:1] == b"[" else depth_max
    if any(_is_deeper(bytes(entry), inside) for entry in found if len(entry) > 2 * inside):
        raise _too_deep(depth_max)
    return found


def join_entries(found: list[msgspec.Raw]) -> tuple[bytes, Sequence[int]]:
    """The entries as one block body (joined by commas) and their lengths."""
    parts = cast("list[bytes]", found)  # Raw offers its bytes through the buffer protocol
    return b",".join(parts), [len(part) for part in parts]


def _check_utf8(found: list[msgspec.Raw]) -> None:
    """Check the entries that are not ASCII; between entries the grammar allows only ASCII."""
    for entry in map(bytes, found):
        if not entry.isascii():
            entry.decode()


def _is_deeper(entry: bytes, depth_max: int) -> bool:
    """Whether an entry is nested too deeply. Counting brackets first avoids the exact check for most."""
    return entry.count(b"[") + entry.count(b"{") > depth_max and _depth(entry) > depth_max


def _split_grammar(body: bytes) -> list[msgspec.Raw]:
    text = body.lstrip(_SPACE)
    if text[:1] == b"[":
        return _ELEMENTS.decode(text)
    return [_VALUE.decode(text.rstrip(_SPACE))]


def _split_past_surrogates(body: bytes) -> list[msgspec.Raw]:
    """An escaped half of a surrogate pair is legal JSON and written by JavaScript, but msgspec rejects it.

    So the grammar is checked, and the splits are found, on a copy with other escapes of the same length.
    """
    found: list[msgspec.Raw] = []
    text = body.lstrip(_SPACE)
    position = len(body) - len(text) + (1 if text[:1] == b"[" else 0)
    for copy in _split_grammar(_without_surrogates(body)):
        gap = _SEPARATOR.match(body, position)
        start = position if gap is None else gap.end()
        position = start + len(copy)
        found.append(msgspec.Raw(body[start:position]))
    return found


def _without_surrogates(body: bytes) -> bytes:
    """A text of the same length and structure, in which each escaped surrogate is an escaped space.

    An escaped backslash becomes two letters: then every backslash starts an escape, and a block may end
    before any of them.
    """
    text = body.replace(b"\\\\", b"__")
    blocks: list[bytes] = []
    start = 0
    while start < len(text):
        end = text.find(b"\\", start + _BLOCK_BYTES)
        end = len(text) if end < 0 else end
        blocks.append(_SURROGATE.sub(rb"\\u0020", text[start:end]))
        start = end
    return b"".join(blocks)


def _join_pieces(text: bytes, depth_max: int, entries_max: int) -> tuple[bytes, Sequence[int]]:
    """`split_entries` for an array of many short elements, split in pieces that are arrays of their own."""
    bodies: list[bytes] = []
    lengths = array("I")
    start = 1
    for end in (*_commas(text), len(text) - 1):
        joined, more = join_entries(split_entries(b"[%b]" % text[start:end], depth_max))
        if not more or text[-1:] != b"]":
            raise TailraceError("invalid_json", f"body is not valid JSON: no value before byte {end}")
        bodies.append(joined)
        lengths.extend(more)
        if len(lengths) > entries_max:
            raise _too_many(entries_max)
        start = end + 1
    return b",".join(bodies), lengths


def _commas(text: bytes) -> Iterator[int]:
    """For each block of an array, the last comma between two of its elements, if there is one."""
    import numpy

    for start, codes, depths in _depths(text):
        found = numpy.flatnonzero((codes == ord(",")) & (depths == 1))
        if len(found):
            yield start + int(found[-1])


def _depth(text: bytes) -> int:
    return max(int(depths.max()) for _, _, depths in _depths(text))


def _depths(text: bytes) -> Iterator[tuple[int, NDArray[numpy.uint8], NDArray[numpy.int32]]]:
    """For each block: its start, its bytes, and how many brackets are open after each of them.

    Inside a string the depth is below zero.
    """
    import numpy

    steps = numpy.zeros(256, numpy.int32)
    steps[list(b"[{")], steps[list(b"]}")] = 1, -1
    # Without escaped quotes, every quote starts or ends a string.
    plain = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    depth, quoted = 0, numpy.uint8(0)
    for start in range(0, len(plain), _BLOCK_BYTES):
        codes = numpy.frombuffer(plain, numpy.uint8, min(_BLOCK_BYTES, len(plain) - start), start)
        inside = numpy.bitwise_xor.accumulate((codes == ord('"')).view(numpy.uint8)) ^ quoted
        depths = numpy.cumsum(steps[codes] * (inside == 0), dtype=numpy.int32) + numpy.int32(depth)
        depth, quoted = int(depths[-1]), inside[-1]
        depths[inside == 1] = -1
        yield start, codes, depths


def _too_many(entries_max: int) -> TailraceError:
    message = f"the array has more than {entries_max} entries; append them in several requests"
    return TailraceError("payload_too_large", message, limit_entries=entries_max)


def _too_deep(depth_max: int) -> TailraceError:
    return TailraceError("invalid_json", f"JSON is nested deeper than {depth_max} levels")
