"""Names of databases, collections and documents, and the partition a document belongs to."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import xxhash

from tailrace.common.errors import TailraceError

DATABASE_DEFAULT: Final = "default"
PATH_BYTES_MAX: Final = 1024
SEGMENTS_MAX: Final = 16
PARTITIONS_MAX: Final = 256
CHANGES_PREFIX: Final = "__changes__/"
COLLECTIONS_PREFIX: Final = "__collections__/"

_DATABASE: Final = re.compile(r"[a-z][a-z0-9_-]{0,62}\Z")
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
# These would collide with subpaths of a stream.
_RESERVED: Final = frozenset({"pk", "touch"})


class DocumentPath(NamedTuple):
    collection: str
    id: str


def check_database(name: str) -> str:
    if not _DATABASE.match(name):
        raise TailraceError(
            "invalid_path", "the name of a database must be a letter a-z and up to 62 of a-z, 0-9, '_', '-'"
        )
    return name


def check_collection(path: str) -> str:
    """Validate the path of a collection: an odd number of segments."""
    segments = _segments(path)
    if len(segments) % 2 == 0:
        raise TailraceError("invalid_path", "the path of a collection must have an odd number of segments")
    return path


def split_document_path(path: str) -> DocumentPath:
    """Split the path of a document into collection and id."""
    segments = _segments(path)
    if len(segments) % 2:
        raise TailraceError("invalid_path", "the path of a document must have an even number of segments")
    return DocumentPath(path.rpartition("/")[0], segments[-1])


def _segments(path: str) -> list[str]:
    segments = path.split("/")
    if len(path) > PATH_BYTES_MAX or len(segments) > SEGMENTS_MAX:
        raise TailraceError(
            "invalid_path", f"a path must have at most {PATH_BYTES_MAX} bytes and {SEGMENTS_MAX} segments"
        )
    for index, segment in enumerate(segments):
        if not _SEGMENT.match(segment) or segment in (".", ".."):
            raise TailraceError(
                "invalid_path",
                "a segment must be 1 to 64 of A-Z, a-z, 0-9, '_', '.', '-', and not '.' or '..'",
            )
        if index % 2 == 0 and (segment.startswith("_") or segment in _RESERVED):
            raise TailraceError("invalid_path", f"the name {segment!r} is reserved")
    return segments


def partition_for_key(key: str, partitions: int) -> int:
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")) % partitions


def change_stream_name(database: str, collection: str, partition: int) -> str:
    return f"{CHANGES_PREFIX}{database}/{collection}/{partition}"


def collections_stream_name(database: str) -> str:
    return f"{COLLECTIONS_PREFIX}{database}"


class PartitionPatterns:
    """The number of partitions of new collections by path: `rooms/*/messages=1, logs=64`."""

    def __init__(self, text: str, default: int) -> None:
        self._default = default
        self._patterns: list[tuple[list[str], int]] = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            pattern, _, count = item.partition("=")
            if not count.strip().isdecimal() or not 1 <= int(count) <= PARTITIONS_MAX:
                raise TailraceError(
                    "invalid_request",
                    f"watch_partition_patterns: {item!r} must be a path with =1 to ={PARTITIONS_MAX}",
                )
            self._patterns.append((pattern.strip().split("/"), int(count)))

    def __call__(self, collection: str) -> int:
        segments = collection.split("/")
        for pattern, count in self._patterns:
            if len(pattern) == len(segments) and all(
                one in ("*", segment) for one, segment in zip(pattern, segments, strict=True)
            ):
                return count
        return self._default
