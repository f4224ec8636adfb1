"""The test's side of writeback.c: a disk that loses what was not synced, and whose write-back can fail."""

from __future__ import annotations

import mmap
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from crash.faults import JOURNAL, Disk

SOURCE = Path(__file__).with_name("writeback.c")
CONTROL = struct.Struct("<QQqqqqqq")  # next id, random, sync us, skip, count, mode, failures, die
CONTROL_BYTES = CONTROL.size + 4096 * 16
RECORD = struct.Struct("<IIQQQ")  # kind, bytes of the path, id, position, bytes of data
WRITE, SYNC, LOST, TRUNCATE, CREATE = range(1, 6)
ANY, OVERTAKEN = 0, 1
SECTOR_BYTES = 512


def build(directory: Path) -> Path:
    """Compiles the shim."""
    library = directory / "writeback.so"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE), "-ldl", "-lpthread"], check=True)
    return library


class Version(NamedTuple):
    """A sector's content after a write that no sync has made durable yet."""

    id: int
    content: bytes


class File:
    """One file: what is on the disk for certain, and what may be."""

    def __init__(self, content: bytes = b"") -> None:
        self.disk = bytearray(content)
        self.cache = bytearray(content)
        self.size = len(content)  # on the disk
        self.sizes: list[tuple[int, int]] = []  # id and size of truncations that are not durable yet
        self.dirty: dict[int, list[Version]] = {}  # by number of the sector, oldest first

    def write(self, number: int, at: int, data: bytes) -> None:
        self._extend(at + len(data))
        self.cache[at : at + len(data)] = data
        self._change(number, at, at + len(data))

    def truncate(self, number: int, size: int) -> None:
        """The rest of the last sector is zeroed, which is a change of that sector like any other."""
        self._extend(size)
        end = min(len(self.cache), -(-size // SECTOR_BYTES) * SECTOR_BYTES)
        if size < end:
            self.cache[size:end] = bytes(end - size)
            self._change(number, size, end)
        del self.cache[size:]
        self.sizes.append((number, size))

    def sync(self, upto: int) -> None:
        """Everything that was written up to this id, and is not lost, is on the disk."""
        for sector, versions in list(self.dirty.items()):
            durable = [version for version in versions if version.id <= upto]
            if durable:
                self._store(sector, durable[-1].content)
                self.dirty[sector] = versions[len(durable) :]
                if not self.dirty[sector]:
                    del self.dirty[sector]
        for number, size in self.sizes:
            if number <= upto:
                self._set_size(number, size)
        self.sizes = [(number, size) for number, size in self.sizes if number > upto]

    def lose(self, number: int) -> None:
        """Write-back of this write failed: the cache has it, the disk never gets it."""
        for sector, versions in list(self.dirty.items()):
            self.dirty[sector] = [version for version in versions if version.id != number]
            if not self.dirty[sector]:
                del self.dirty[sector]
        self.sizes = [(known, size) for known, size in self.sizes if known != number]

    def cut_power(self, chance: random.Random) -> bytes:
        """What the disk holds afterwards. Each sector has one of its versions: torn and reordered."""
        for sector, versions in self.dirty.items():
            chosen = chance.randint(0, len(versions))
            if chosen:
                self._store(sector, versions[chosen - 1].content)
        if self.sizes and (chosen := chance.randint(0, len(self.sizes))):
            self._set_size(*self.sizes[chosen - 1])
        return bytes(self.disk[: self.size]).ljust(self.size, b"\0")

    def _extend(self, size: int) -> None:
        """Allocation is durable at once: whether a file has its full length is not what is tested."""
        if size > len(self.cache):
            self.cache.extend(bytes(size - len(self.cache)))
        if not self.sizes:
            self.size = max(self.size, size)

    def _change(self, number: int, start: int, end: int) -> None:
        for sector in range(start // SECTOR_BYTES, -(-end // SECTOR_BYTES)):
            content = bytes(self.cache[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES])
            self.dirty.setdefault(sector, []).append(Version(number, content))

    def _store(self, sector: int, content: bytes) -> None:
        at = sector * SECTOR_BYTES
        if len(self.disk) < at + len(content):
            self.disk.extend(bytes(at + len(content) - len(self.disk)))
        self.disk[at : at + len(content)] = content
        self.size = max(self.size, at + len(content))

    def _set_size(self, number: int, size: int) -> None:
        del self.disk[size:]
        self.size = size
        for sector, versions in list(self.dirty.items()):
            if sector * SECTOR_BYTES >= size:
                self.dirty[sector] = [version for version in versions if version.id > number]


class WritebackDisk(Disk):
    """A `Disk` that also has a page cache of its own for journal files."""

    def __init__(self, faults: Path, writeback: Path, directory: Path, seed: int) -> None:
        super().__init__(faults, directory / "faults")
        self.seed = seed
        self.random = random.Random(seed)
        self._log = directory / "writeback.log"
        self._log.write_bytes(b"")
        control = directory / "writeback"
        control.write_bytes(bytes(CONTROL_BYTES))
        with control.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), CONTROL_BYTES)
        self._set(1, self.random.getrandbits(63) | 1)
        self._files: dict[Path, File] = {}
        self.env = {
            "LD_PRELOAD": f"{faults}:{writeback}",
            "FAULTS_CONTROL": str(directory / "faults"),
            "WRITEBACK_CONTROL": str(control),
            "WRITEBACK_LOG": str(self._log),
            "WRITEBACK_TEXT": JOURNAL,
        }

    def slow_syncs(self, us_max: int) -> None:
        """Every sync takes a random time up to this: several are in flight, and end in any order."""
        self._set(2, us_max)

    def fail_writeback(self, mode: int = ANY, *, skip: int = 0, count: int = 1, die: bool = False) -> None:
        """Write-back fails at one of the next syncs; each open file description reports it once.

        With `die` the process is killed as soon as the first of them has reported it.
        """
        self._set(5, mode)
        self._set(7, die)
        self._set(3, skip)
        self._set(4, count)

    @property
    def failures(self) -> int:
        """How often write-back has failed."""
        return CONTROL.unpack_from(self._control)[6]

    def heal(self, rule: int | None = None) -> None:
        super().heal(rule)
        if rule is None:
            self._set(2, 0)
            self._set(4, 0)

    def cut_power(self, directory: Path) -> None:
        """Leaves in the directory what the disk holds, when every process is dead and the cache is gone."""
        self._follow()
        for path, file in self._files.items():
            if path.exists():
                path.write_bytes(file.cut_power(self.random))
        # The errors of the files are forgotten as well: they were in the memory of the kernel.
        self._control[CONTROL.size :] = bytes(CONTROL_BYTES - CONTROL.size)
        self._log.write_bytes(b"")
        self._files = {path: File(path.read_bytes()) for path in directory.glob("*.jnl")}

    def _follow(self) -> None:
        """Takes in what was done to the files."""
        for kind, path, number, at, data in _records(self._log.read_bytes()):
            if kind == CREATE:
                self._files[path] = File()
                continue
            file = self._files.setdefault(path, File())
            if kind == WRITE:
                file.write(number, at, data)
            elif kind == TRUNCATE:
                file.truncate(number, at)
            elif kind == SYNC:
                file.sync(number)
            else:
                file.lose(number)

    def _set(self, field: int, value: int) -> None:
        struct.pack_into("<Q" if field < 2 else "<q", self._control, 8 * field, value)


def _records(log: bytes) -> Iterator[tuple[int, Path, int, int, bytes]]:
    """Every record that was written whole."""
    position = 0
    while position + RECORD.size <= len(log):
        kind, path_bytes, number, at, data_bytes = RECORD.unpack_from(log, position)
        position += RECORD.size
        path = Path(log[position : position + path_bytes].decode())
        position += path_bytes
        data = log[position : position + data_bytes]
        position += data_bytes
        if position <= len(log):
            yield kind, path, number, at, data
