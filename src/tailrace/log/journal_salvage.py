"""Reading what is readable of a damaged journal file, record by record, and reporting the rest.

A record is recognized by its checksum, which is seeded with the random id of its file. After a damaged place
the next record is searched for. If the header is damaged the id is unknown; the seed is then computed from
the records themselves, since the checksum is a linear function of it.
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
    """A record, or a damaged range if there is no payload."""

    position: int
    bytes: int
    payload: bytes | None


class SalvagedFile(NamedTuple):
    seq: int
    path: Path
    header: JournalHeader | None  # None if it is damaged
    end: int | None  # as recorded in the next file


def files_after(directory: Path, seq: int) -> list[SalvagedFile]:
    """The files that a start would replay, including those with an unreadable header.

    Files that were never used and files that a later one skips are left out.
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
    chain: list[SalvagedFile] = []
    for number, path, header in found:
        if header is not None:
            while chain and chain[-1].seq > header.previous_seq:
                chain.pop()
            if chain and chain[-1].seq == header.previous_seq:
                chain[-1] = chain[-1]._replace(end=header.previous_end)
        chain.append(SalvagedFile(number, path, header, None))
    return chain


def read_readable(path: Path) -> tuple[bytes, int]:
    """The bytes of a file, with zeros for unreadable blocks, and the number of unreadable bytes."""
    with path.open("rb", buffering=0) as file:
        parts = list(readable_blocks(file.fileno()))
    return b"".join(part for part, _ in parts), sum(lost for _, lost in parts)


def readable_blocks(fd: int) -> Iterator[tuple[bytes, int]]:
    """A file in parts, each with the number of its unreadable bytes, which are zeros.

    If a large read fails, its blocks are read one by one.
    """
    size = os.fstat(fd).st_size
    for at in range(0, size, READ_BYTES):
        length = min(READ_BYTES, size - at)
        part = _read_at(fd, length, at)
        if part is not None:
            yield part, 0
            continue
        for block_at in range(at, at + length, BLOCK_BYTES):
            size_bytes = min(BLOCK_BYTES, at + length - block_at)
            block = _read_at(fd, size_bytes, block_at)
            yield block or bytes(size_bytes), 0 if block else size_bytes


def _read_at(fd: int, length: int, at: int) -> bytes | None:
    """None if not all of it can be read."""
    try:
        found = os.pread(fd, length, at)
    except OSError:
        return None
    return found if len(found) == length else None


def read_pieces(file: SalvagedFile) -> Iterator[SalvagedPiece]:
    """Every readable record, and the damaged ranges between and before them."""
    data, _ = read_readable(file.path)
    seed = find_seed(data) if file.header is None else checksum_seed(file.header.id)
    if seed is None:
        yield SalvagedPiece(0, len(data.rstrip(b"\0")), None)
        return
    # After the last acknowledged record there may be the start of one that was not acknowledged.
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
    """The position of the next record after a damaged place. Runs of zeros are skipped at once."""
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
    """The checksum seed of a file whose header is damaged; None if no two records agree on one."""
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
    """The seed with which a payload has this checksum: 32 linear equations for the bits of the seed."""
    base = crc32c_extend(0, payload)
    remaining = crc ^ base
    rows: dict[int, tuple[int, int]] = {}  # highest bit of an image to the image and the bits that make it
    for bit in range(32):
        image, made_of = crc32c_extend(1 << bit, payload) ^ base, 1 << bit
        while image and image.bit_length() in rows:
            other, bits = rows[image.bit_length()]
            image, made_of = image ^ other, made_of ^ bits
        if image:
            rows[image.bit_length()] = (image, made_of)
    seed = 0
    while remaining:
        image, bits = rows[remaining.bit_length()]
        remaining, seed = remaining ^ image, seed ^ bits
    return seed
