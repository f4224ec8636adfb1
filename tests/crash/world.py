"""The test's side of world.c: a disk of limited size, and a wall clock that is set while servers run."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("world.c")
CONTROL_BYTES = 16


def build(directory: Path) -> Path:
    """Compiles the shim."""
    library = directory / "world.so"
    flags = ("-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE), "-ldl", "-lpthread"], check=True)
    return library


class World:
    """The surroundings of every process that was started with `env`. `root` lies on the disk."""

    def __init__(self, library: Path, control: Path, root: Path) -> None:
        control.write_bytes(bytes(CONTROL_BYTES))
        self.root = root
        with control.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), CONTROL_BYTES)
        self._disk = ctypes.c_int64.from_buffer(self._shared, 0)
        self._clock = ctypes.c_int64.from_buffer(self._shared, 8)
        self.env = {"LD_PRELOAD": str(library), "WORLD_CONTROL": str(control), "WORLD_ROOT": str(root)}

    def with_faults(self, env: Mapping[str, str]) -> dict[str, str]:
        """The variables for processes that also have the disk of faults.py under them."""
        return {**env, **self.env, "LD_PRELOAD": f"{env['LD_PRELOAD']}:{self.env['LD_PRELOAD']}"}

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def resize_disk(self, size_bytes: int) -> None:
        """0 for a disk without a limit. It may be smaller than what is used: then there is no room at all."""
        self._disk.value = size_bytes

    def set_clock(self, added_s: float) -> None:
        """Sets the wall clock to so many seconds after the true time, or before it."""
        self._clock.value = int(added_s * 1e9)
