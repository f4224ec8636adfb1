"""Small segments joined into one: every entry keeps its number, time, key and bytes, proven twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from tailrace.storage.segments.model import CorruptSegmentError, SegmentInfo, SegmentRows
from tailrace.storage.segments.reader import Footer, file_footer, read_all_rows
from tailrace.storage.segments.writer import write_segment

RAW_BYTES_MAX: Final = 256 << 20  # unpacked, all columns; whoever plans keeps well below

# What has to be the same in all segments that are joined, and is the same in the joined one.
_COMMON_FACTS: Final = ("name", "stream_id", "epoch", "content_type")
_MODULUS: Final = 1 << 128


class EntriesChecksum(NamedTuple):
    """The sum of the hashes of all entries: the same whatever segments they lie in."""

    total: int
    entries: int

    def add(self, rows: SegmentRows, json: bool) -> EntriesChecksum:
        total, start, separator = self.total, 0, 1 if json else 0
        for index, end in enumerate(rows.ends):
            key = None if rows.keys is None else rows.keys[index]
            total += _hash_entry(rows.first + index, rows.times[index], key, rows.body[start:end])
            start = end + separator
        return EntriesChecksum(total % _MODULUS, self.entries + len(rows.ends))


EMPTY_CHECKSUM: Final = EntriesChecksum(0, 0)


def _hash_entry(entry: int, time_ns: int, key: bytes | None, payload: bytes) -> int:
    head = entry.to_bytes(8, "big") + time_ns.to_bytes(8, "big", signed=True)
    # The length tells no key from an empty one, and where the key ends.
    length = -1 if key is None else len(key)
    hashed = xxhash.xxh3_128(head + length.to_bytes(4, "big", signed=True) + (key or b""))
    hashed.update(payload)
    return hashed.intdigest()


def compute_checksum(raw: bytes) -> EntriesChecksum:
    footer = file_footer(raw)
    found = EMPTY_CHECKSUM
    for rows in read_all_rows(raw, footer):
        found = found.add(rows, footer.json)
    return found


def compact_segments(raws: Sequence[bytes], path: Path, attempt: str = "") -> SegmentInfo:
    """Adjacent segments of one epoch and schema version, oldest first, as one file at `path`.

    CorruptSegmentError if they are not that, or if the file does not hold exactly what went in.
    """
    footers = [file_footer(raw) for raw in raws]
    facts = _check_common_facts(footers)
    if sum(_raw_bytes(footer) for footer in footers) > RAW_BYTES_MAX:
        raise CorruptSegmentError("together the segments are too large")
    seen = [EMPTY_CHECKSUM]
    written = write_segment(
        _rows_with_checksum(zip(raws, footers, strict=True), seen),
        path,
        name=facts["name"],
        stream_id=facts["stream_id"],
        epoch=footers[0].epoch,
        json=footers[0].json,
        content_type=facts["content_type"] or None,
        schema_versions=_joined_schema_versions(footers),
        attempt=attempt,
    )
    if compute_checksum(path.read_bytes()) != seen[0]:
        raise CorruptSegmentError("the joined segment does not hold the entries of its inputs")
    return written.info


def _check_common_facts(footers: Sequence[Footer]) -> dict[str, str]:
    facts = {name: footers[0].facts.get(name, "") for name in _COMMON_FACTS}
    following = footers[0].first
    for footer in footers:
        if any(footer.facts.get(name, "") != value for name, value in facts.items()):
            raise CorruptSegmentError("segments of different streams or epochs are never joined")
        if footer.first != following or footer.json != footers[0].json:
            raise CorruptSegmentError(f"entry {following} is missing between two segments")
        following = footer.last + 1
    return facts


def _joined_schema_versions(footers: Sequence[Footer]) -> str:
    """Where schema versions begin in the joined segment: with its first entry, and nowhere else.

    Segments from before there was a schema say nothing; later ones say that version 0 goes on.
    """
    said = [footer.facts.get("schema_versions", "") for footer in footers]
    if not any(said):
        return ""
    found = {_schema_version(one) for one in said}
    if len(found) != 1:
        raise CorruptSegmentError("segments of different schema versions are never joined")
    return msgspec.json.encode([(footers[0].first, *found)]).decode()


def _schema_version(said: str) -> int:
    try:
        pairs = msgspec.json.decode(said, type=list[tuple[int, int]]) if said else [(0, 0)]
    except msgspec.MsgspecError as error:
        raise CorruptSegmentError(f"its schema versions cannot be read: {error}") from None
    if len(pairs) != 1:
        raise CorruptSegmentError("a segment with several schema versions is never joined")
    return pairs[0][1]


def _raw_bytes(footer: Footer) -> int:
    return sum(footer.group_bytes(index) for index in range(footer.count))


def _rows_with_checksum(
    segments: Iterable[tuple[bytes, Footer]], seen: list[EntriesChecksum]
) -> Iterator[SegmentRows]:
    for raw, footer in segments:
        for rows in read_all_rows(raw, footer):
            seen[0] = seen[0].add(rows, footer.json)
            yield rows
