"""Journal files written by hand, for tests that need to know every byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tailrace.log.journal import (
    JournalHeader,
    checksum_seed,
    encode_header,
    encode_mark,
    file_path,
    frame_record,
)
from tailrace.log.model import NO_LIFETIME
from tailrace.log.records import Append, Create, Op, encode_record

ID = 0x1122334455667788


def write_journal_file(
    directory: Path,
    seq: int,
    records: Sequence[Sequence[Op]],
    *,
    previous: tuple[int, int] = (0, 0),
    padding: int = 256,
    marked: bool = False,
    raw: Sequence[bytes] = (),
) -> list[int]:
    """One file with these records and zeros behind them; where each begins and the last ends.

    With `marked`, each record is a batch of its own, written when the one before was acknowledged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data = bytearray(encode_header(JournalHeader(seq, ID + seq, *previous, created_ns=seq)))
    positions: list[int] = []
    for payload in (*map(encode_record, records), *raw):
        if marked and positions:
            data += encode_mark(len(data), checksum_seed(ID + seq))
        positions.append(len(data))
        data += frame_record(payload, checksum_seed(ID + seq)) + payload
    positions.append(len(data))
    file_path(directory, seq).write_bytes(data + bytes(padding))
    return positions


def create(number: int, name: str, content_type: str | None = "text/plain") -> Create:
    return Create(number, name, 0, ((0, 1),), 1, content_type, NO_LIFETIME, NO_LIFETIME)


def append(number: int, first: int, body: bytes, *, closes: bool = False) -> Append:
    return Append(number, first, 1 if body else 0, body, None, first, closes=closes)


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Damage one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
