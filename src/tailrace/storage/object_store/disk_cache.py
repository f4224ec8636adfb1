"""A cache of parts of objects on the local disk, least recently used out first, bounded in bytes.

One file per part, named after the object and the bytes it holds. Objects never change, so a part is never
stale; a file that a crash cut short has the wrong size and is thrown away. The index belongs to the loop's
thread; the files are read and written on other threads, and a file that is gone is only a miss.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right, insort
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import xxhash

from tailrace.common import private_files
from tailrace.storage.object_store.request_stats import stream_and_artifact

_PART_FILE_NAME = re.compile(r"([0-9a-f]{32})-(\d+)-(\d+)")
_UNFINISHED = ".new"
OWNER_DIGITS = 16


class ObjectRange(NamedTuple):
    """The bytes [start, stop) of one object. `source` stands for the object's key."""

    source: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def cache_source(key: str) -> str:
    """Half of it stands for the stream and the kind of object, so that one can tell what is held of each."""
    stream_id, artifact = stream_and_artifact(key) or ("", "")
    return _owner_of(stream_id, artifact) + xxhash.xxh3_64_hexdigest(key.encode())


def _owner_of(stream_id: str, artifact: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{stream_id}/{artifact}".encode())


class DiskCache:
    def __init__(self, directory: Path, bytes_max: int) -> None:
        self.directory = directory
        self.bytes_max = bytes_max
        self.bytes = 0
        self.evictions = 0
        self._recent: OrderedDict[ObjectRange, None] = OrderedDict()
        self._by_source: dict[str, list[tuple[int, int]]] = {}
        self._by_owner: dict[str, int] = {}  # bytes

    def __len__(self) -> int:
        return len(self._recent)

    # -- files, on any thread ----------------------------------------------------------------------------

    def scan(self) -> list[ObjectRange]:
        """What an earlier run left behind, the oldest first. Whatever is not a whole part is removed."""
        private_files.make_private_directory(self.directory)
        found: list[tuple[int, ObjectRange]] = []
        for entry in os.scandir(self.directory):
            status = entry.stat()
            named = _PART_FILE_NAME.fullmatch(entry.name)
            part = ObjectRange(named[1], int(named[2]), int(named[3])) if named else None
            if part is None or part.size != status.st_size:
                Path(entry.path).unlink(missing_ok=True)
            else:
                found.append((status.st_mtime_ns, part))
        return [part for _, part in sorted(found)]

    def write(self, part: ObjectRange, data: bytes | memoryview) -> None:
        """Store a part. It is not synced: what a power cut spoils is recognised when it is read."""
        path = self._path(part)
        unfinished = path.with_name(path.name + _UNFINISHED)
        unfinished.write_bytes(data)
        unfinished.rename(path)

    def read(self, part: ObjectRange, start: int, stop: int) -> bytes | None:
        """Bytes of the object that the part holds, or None if the file is gone or not whole."""
        try:
            with self._path(part).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != part.size:
                    return None
                data = os.pread(file.fileno(), stop - start, start - part.start)
        except OSError:
            return None
        return data if len(data) == stop - start else None

    def remove(self, parts: list[ObjectRange]) -> None:
        for part in parts:
            self._path(part).unlink(missing_ok=True)

    def _path(self, part: ObjectRange) -> Path:
        return self.directory / f"{part.source}-{part.start}-{part.stop}"

    # -- the index, on the loop's thread -----------------------------------------------------------------

    def find(self, source: str, start: int, stop: int) -> ObjectRange | None:
        """The part that holds these bytes, from now on the most recently used one."""
        ranges = self._by_source.get(source)
        if not ranges:
            return None
        at = bisect_right(ranges, (start, 1 << 62)) - 1
        if at < 0 or ranges[at][1] < stop:
            return None
        part = ObjectRange(source, *ranges[at])
        self._recent.move_to_end(part)
        return part

    def add(self, part: ObjectRange) -> list[ObjectRange]:
        """Record a part that was written; answers the ones that have to go, whose files are to be removed."""
        if part in self._recent:
            return []
        self._recent[part] = None
        insort(self._by_source.setdefault(part.source, []), (part.start, part.stop))
        self._count(part, part.size)
        leaving: list[ObjectRange] = []
        while self.bytes > self.bytes_max:
            oldest = next(iter(self._recent))
            self.forget(oldest)
            leaving.append(oldest)
            self.evictions += 1
        return leaving

    def parts_of(self, source: str) -> list[ObjectRange]:
        return [ObjectRange(source, *held) for held in self._by_source.get(source, ())]

    def forget(self, part: ObjectRange) -> None:
        if part not in self._recent:
            return
        del self._recent[part]
        self._count(part, -part.size)
        ranges = self._by_source[part.source]
        ranges.remove((part.start, part.stop))
        if not ranges:
            del self._by_source[part.source]

    def bytes_of(self, stream_id: str, artifact: str) -> int:
        """What one stream has in the cache of one kind of object."""
        return self._by_owner.get(_owner_of(stream_id, artifact), 0)

    def _count(self, part: ObjectRange, difference: int) -> None:
        self.bytes += difference
        owner = part.source[:OWNER_DIGITS]
        held = self._by_owner.get(owner, 0) + difference
        if held:
            self._by_owner[owner] = held
        else:
            del self._by_owner[owner]
