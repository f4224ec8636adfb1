"""The test's side of faults.c: a disk that can be told to fail, and to be well again, while it is used."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("faults.c")
RULES = 16
RULE = struct.Struct("<24sIIqqqq")  # text, operations, action, skip, count, argument, hits

WRITE, SYNC, ALLOCATE, READ = 1, 2, 4, 8
OFF, FAIL, TEAR, DELAY, JITTER, DIE = range(6)

JOURNAL = ".jnl"
HOT = "hot.db"


def build(directory: Path) -> Path:
    """Compiles the shim."""
    library = directory / "faults.so"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


class Disk:
    """Rules shared with every process that was started with `env`."""

    def __init__(self, library: Path, control: Path) -> None:
        control.write_bytes(bytes(RULES * RULE.size))
        with control.open("r+b") as file:
            self._rules = mmap.mmap(file.fileno(), RULES * RULE.size)
        self.env = {"LD_PRELOAD": str(library), "FAULTS_CONTROL": str(control)}

    def fail(
        self, text: str, operations: int, error: int = errno.EIO, *, skip: int = 0, count: int = -1
    ) -> int:
        """Matching operations fail: the next `count` after `skip`, or all until `heal`."""
        return self._arm(text, operations, FAIL, error, skip, count)

    def fill_up(self) -> None:
        """No room for anything: neither for the journal nor for the hot store."""
        for text in (JOURNAL, HOT):
            self.fail(text, WRITE | ALLOCATE, errno.ENOSPC)

    def tear(self, text: str, kept_bytes: int, *, skip: int = 0) -> int:
        """One write keeps only its first bytes, and the process is killed on the spot."""
        return self._arm(text, WRITE, TEAR, kept_bytes, skip, 1)

    def die(self, text: str, operations: int, *, skip: int = 0) -> int:
        """The process is killed instead of doing the operation."""
        return self._arm(text, operations, DIE, 0, skip, 1)

    def delay(self, text: str, operations: int, us: int, *, skip: int = 0, count: int = -1) -> int:
        return self._arm(text, operations, DELAY, us, skip, count)

    def jitter(self, text: str, operations: int, us_max: int) -> int:
        """Each operation waits a random time first, so that threads overtake each other."""
        return self._arm(text, operations, JITTER, us_max, 0, -1)

    def heal(self, rule: int | None = None) -> None:
        """Forgets one rule, or all."""
        for index in range(RULES) if rule is None else (rule,):
            self._rules[index * RULE.size : (index + 1) * RULE.size] = bytes(RULE.size)

    def hits(self, rule: int) -> int:
        """How often a rule has acted."""
        return self._read(rule)[6]

    def _read(self, index: int) -> tuple[bytes, int, int, int, int, int, int]:
        return RULE.unpack_from(self._rules, index * RULE.size)

    def _arm(self, text: str, operations: int, action: int, argument: int, skip: int, count: int) -> int:
        index = next(index for index in range(RULES) if self._read(index)[2] == OFF)
        fields = (text.encode(), operations, OFF, skip, count, argument, 0)
        RULE.pack_into(self._rules, index * RULE.size, *fields)
        # The action makes the rule take effect, so it comes last and at once.
        ctypes.c_uint32.from_buffer(self._rules, index * RULE.size + 28).value = action
        return index


def children(pid: int) -> list[int]:
    """The processes a server has started: its checkpointer, if it runs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.extend(int(child) for child in (task / "children").read_text().split())
        except OSError:
            continue
    return found


def kill_process(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass
