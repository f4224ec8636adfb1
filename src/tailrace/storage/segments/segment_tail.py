"""The end of a segment: what lies behind its row groups, checked, and as it is kept in the hot store.

    ... last row group | Bloom filters, page indexes | footer | its length, u32 | PAR1
                         `------------------- the tail, kept -------------------------'

Two of the footer's facts are checksums of this part itself. `footer_xxh3` is over the footer to the end of
the file with its own digits as zeros, so that it can be checked before anything is parsed; `index_xxh3` is
over what lies between the row groups and the footer.
"""

from __future__ import annotations

import struct
from typing import Any

import xxhash

from tailrace.storage.segments.arrow import pa, pq
from tailrace.storage.segments.segments import FOOTER_GUESS_BYTES, CorruptSegmentError

BLANK_CHECKSUM = "0" * 16
GUESS_BYTES = FOOTER_GUESS_BYTES
_END = struct.Struct("<I4s")
_PACKED_LENGTH = struct.Struct("<I")
_MAGIC = b"PAR1"
_TAIL_BYTES_MAX = 256 << 20


def stamp_checksums(tail: bytearray) -> None:
    """Fill in the checksums of a tail that was just written."""
    start = _footer_start(tail)
    at = _digits(tail, start, b"tailrace.index_xxh3")
    tail[at : at + 16] = xxhash.xxh3_64_hexdigest(memoryview(tail)[:start]).encode()
    at = _digits(tail, start, b"tailrace.footer_xxh3")
    tail[at : at + 16] = xxhash.xxh3_64_hexdigest(memoryview(tail)[start:]).encode()


def pack_tail(tail: bytes | bytearray) -> bytes:
    """The form in which a tail is kept: footers repeat themselves and shrink to a quarter."""
    return _PACKED_LENGTH.pack(len(tail)) + pa.compress(tail, codec="zstd", asbytes=True)


def unpack_tail(kept: bytes) -> bytes:
    try:
        (size,) = _PACKED_LENGTH.unpack_from(kept)
        if size > _TAIL_BYTES_MAX:
            raise CorruptSegmentError(f"a footer of {size} bytes")
        return pa.decompress(kept[_PACKED_LENGTH.size :], decompressed_size=size, codec="zstd", asbytes=True)
    except (struct.error, OSError, ValueError) as error:
        raise CorruptSegmentError(f"the kept footer cannot be unpacked: {error}") from error


def parse_tail(tail: bytes) -> Any:
    """The footer, parsed, if the checksum of the footer is right. `tail` may begin anywhere before it."""
    try:
        start = _footer_start(tail)
        at = _digits(tail, start, b"tailrace.footer_xxh3")
    except ValueError as error:
        raise CorruptSegmentError(f"this is not the end of a segment: {error}") from error
    blank = bytearray(tail[start:])
    blank[at - start : at - start + 16] = BLANK_CHECKSUM.encode()
    if xxhash.xxh3_64_hexdigest(blank).encode() != tail[at : at + 16]:
        raise CorruptSegmentError("the footer does not have its checksum")
    # The library takes nothing shorter than a file: the magic and the footer are one.
    return pq.ParquetFile(pa.BufferReader(_MAGIC + tail[start:])).metadata


def check_index(tail: bytes, facts: dict[str, str]) -> None:
    """Bloom filters and page indexes are as they were written; `tail` begins at the first of them."""
    if xxhash.xxh3_64_hexdigest(memoryview(tail)[: _footer_start(tail)]) != facts.get("index_xxh3"):
        raise CorruptSegmentError("the indexes do not have their checksum")


def find_tail(end: bytes, size: int) -> bytes | int:
    """The tail of a file of `size` bytes, found in its last bytes; or from where on more are needed."""
    length = len(end)
    if length < _END.size:
        raise CorruptSegmentError(f"a file of {size} bytes is not a segment")
    footer_bytes, magic = _END.unpack_from(end, length - _END.size)
    footer_start = size - _END.size - footer_bytes
    if magic != _MAGIC or footer_start < len(_MAGIC):
        raise CorruptSegmentError("this is not the end of a segment")
    if footer_start < size - length:
        return max(footer_start - GUESS_BYTES, 0)
    start = row_groups_end(parse_tail(end))
    if start < size - length:
        return start
    return end[start - (size - length) :]


def footer_facts(metadata: Any) -> dict[str, str]:
    """What the footer says about the segment, without the common prefix of the names."""
    pairs: dict[bytes, bytes] = metadata.metadata or {}
    return {key[9:].decode(): value.decode() for key, value in pairs.items() if key.startswith(b"tailrace.")}


def column_range(column: Any) -> tuple[int, int]:
    """The bytes of one column of one row group."""
    start: int = column.data_page_offset
    if column.has_dictionary_page:
        start = min(start, column.dictionary_page_offset)
    return start, start + column.total_compressed_size


def row_groups_end(metadata: Any) -> int:
    """Where the last row group ends and the tail begins."""
    last = metadata.row_group(metadata.num_row_groups - 1)
    return max(column_range(last.column(index))[1] for index in range(last.num_columns))


def _footer_start(tail: bytes | bytearray) -> int:
    if len(tail) < _END.size:
        raise ValueError("too short")
    footer_bytes, magic = _END.unpack_from(tail, len(tail) - _END.size)
    start = len(tail) - _END.size - footer_bytes
    if magic != _MAGIC or start < 0:
        raise ValueError("no footer")
    return start


def _digits(tail: bytes | bytearray, start: int, key: bytes) -> int:
    """Where the 16 digits of a checksum are: behind its key, a type byte and a length byte."""
    marker = key + b"\x18\x10"
    at = tail.rindex(marker, start) + len(marker)
    if at + 16 > len(tail):
        raise ValueError("cut off")
    return at
