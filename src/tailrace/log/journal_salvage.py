"""Reads what can be read of a damaged journal file, record by record, and says what cannot.

A record is found by its checksum, which starts from the random id of its file: whatever passes it is a record
of this file. Behind a damaged place the next one is searched for. A file whose header is damaged has no id to
start from; it is computed from the records themselves, since a checksum is a linear function of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tailrace.common.errors import TailraceError
from tailrace.log.journal import (
    FRAME,
    FRAME_BYTES,
    HEADER_BYTES,
    MARK,
    JournalCorruptError,
    JournalHeader,
    checksum_seed,
    crc32c_extend,
    last_mark,
    list_files,
    read_header,
)

READ_BYTES: Final = 1 << 20
BLOCK_BYTES: Final = 4096
_NOT_ZERO: Final = re.compile(rb"[^\0]")


class SalvagedPiece(NamedTuple):
    """A record, or a damaged place if there is no payload."""

    position: int
    bytes: int
    payload: bytes | None


class SalvagedFile(NamedTuple):
    seq: int
    path: Path
    header: JournalHeader | None  # None: it is damaged
    end: int | None  # as the next file has recorded it


def files_after(directory: Path, seq: int) -> list[SalvagedFile]:
    """The files that a start would replay, also those without a header that can be read.

    Left out are those that were never used, and those that a later file passes over.
    """
    found: list[tuple[int, Path, JournalHeader | None]] = []
    for number, path in list_files(directory):
        if number <= seq:
            continue
        try:
            header = read_header(path)
            if header is None and not any(read_readable(path)[0]):
                continue  # prepared, not used yet
        except (OSError, JournalCorruptError, TailraceError):
            header = None
        found.append((number, path, header if header is not None and header.seq == number else None))
    kept: list[SalvagedFile] = []
    for number, path, header in found:
        if header is not None:
            while kept and kept[-1].seq > header.previous_seq:
                kept.pop()
            if kept and kept[-1].seq == header.previous_seq:
                kept[-1] = kept[-1]._replace(end=header.previous_end)
        kept.append(SalvagedFile(number, path, header, None))
    return kept


def read_readable(path: Path) -> tuple[bytes, int]:
    """The bytes of a file, with zeros for blocks that the disk does not give; how many bytes those are."""
    with path.open("rb", buffering=0) as file:
        parts = list(readable_blocks(file.fileno()))
    return b"".join(part for part, _ in parts), sum(lost for _, lost in parts)


def readable_blocks(fd: int) -> Iterator[tuple[bytes, int]]:
    """A file in parts; with each, how many of its bytes the disk does not give, which are zeros.

    Where a large read fails, its blocks are read one by one.
    """
    size = os.fstat(fd).st_size
    for at in range(0, size, READ_BYTES):
        length = min(READ_BYTES, size - at)
        part = _read_at(fd, length, at)
        if part is not None:
            yield part, 0
            continue
        for place in range(at, at + length, BLOCK_BYTES):
            wanted = min(BLOCK_BYTES, at + length - place)
            block = _read_at(fd, wanted, place)
            yield block or bytes(wanted), 0 if block else wanted


def _read_at(fd: int, length: int, at: int) -> bytes | None:
    """None if the disk does not give all of it."""
    try:
        found = os.pread(fd, length, at)
    except OSError:
        return None
    return found if len(found) == length else None


def read_pieces(file: SalvagedFile) -> Iterator[SalvagedPiece]:
    """Every record that can be read, and the damaged places between and before them."""
    data, _ = read_readable(file.path)
    seed = find_seed(data) if file.header is None else checksum_seed(file.header.id)
    if seed is None:
        yield SalvagedPiece(0, len(data.rstrip(b"\0")), None)
        return
    # Behind the last record that was acknowledged there may be the beginning of one that was not.
    limit = len(data) if file.end is None else min(file.end, len(data))
    position = HEADER_BYTES
    while position < limit:
        payload = record_at(data, position, limit, seed)
        if payload is None:
            acknowledged = limit if file.end is not None else last_mark(data, position, seed)
            if position >= acknowledged:
                return  # never finished, as after any crash; recovery drops it as well
            position, damaged = next_record(data, position + 1, limit, seed) or acknowledged, position
            yield SalvagedPiece(damaged, position - damaged, None)
            continue
        if payload[0] or len(payload) != MARK.size:
            yield SalvagedPiece(position, len(payload), payload)
        position += FRAME_BYTES + len(payload)


def record_at(data: bytes, position: int, limit: int, seed: int) -> bytes | None:
    if position + FRAME_BYTES > limit:
        return None
    length, crc = FRAME.unpack_from(data, position)
    start = position + FRAME_BYTES
    if not 0 < length <= limit - start:
        return None
    payload = data[start : start + length]
    return payload if crc32c_extend(seed, payload) == crc else None


def next_record(data: bytes, start: int, limit: int, seed: int) -> int | None:
    """Where the next record behind a damaged place begins. Runs of zeros are passed over at once."""
    position = start
    while position + FRAME_BYTES < limit:
        if data[position : position + FRAME_BYTES] == bytes(FRAME_BYTES):
            found = _NOT_ZERO.search(data, position, limit)
            if found is None:
                return None
            position = found.start() - FRAME_BYTES + 1
        # The length of a record is below the size of the file: its highest byte is nearly always zero.
        if data[position + 3] <= limit >> 24 and record_at(data, position, limit, seed) is not None:
            return position
        position += 1
    return None


def find_seed(data: bytes) -> int | None:
    """The checksum's start of a file whose header is damaged; None if no two records agree on one."""
    mark_length = MARK.size.to_bytes(4, "little")
    position = data.find(mark_length)
    while position >= 0:
        start = position + FRAME_BYTES
        payload = data[start : start + MARK.size]
        kind, acknowledged = MARK.unpack(payload) if len(payload) == MARK.size else (1, 0)
        if kind == 0 and HEADER_BYTES <= acknowledged <= position:
            seed = solve_seed(payload, FRAME.unpack_from(data, position)[1])
            if record_at(data, start + MARK.size, len(data), seed) is not None:
                return seed
        position = data.find(mark_length, position + 1)
    return None


def solve_seed(payload: bytes, crc: int) -> int:
    """The start with which a payload has this checksum: 32 linear equations for the bits of the start."""
    base = crc32c_extend(0, payload)
    wanted = crc ^ base
    rows: dict[int, tuple[int, int]] = {}  # highest bit of an image to the image and the bits that make it
    for bit in range(32):
        image, made_of = crc32c_extend(1 << bit, payload) ^ base, 1 << bit
        while image and image.bit_length() in rows:
            other, bits = rows[image.bit_length()]
            image, made_of = image ^ other, made_of ^ bits
        if image:
            rows[image.bit_length()] = (image, made_of)
    seed = 0
    while wanted:
        image, bits = rows[wanted.bit_length()]
        wanted, seed = wanted ^ image, seed ^ bits
    return seed
