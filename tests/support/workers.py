"""Servers with several workers: which of them owns what, and their processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from support.server import ServerProcess
from tailrace.workers.placement import Placement

MODULE = b"tailrace.workers.child"


def names_of(worker: int, workers: int, prefix: str = "s") -> Iterator[str]:
    """Names that belong to one worker."""
    placement = Placement(workers)
    return (name for number in count() if placement.home(name := f"{prefix}{number}") == worker)


def pid_of(server: ServerProcess, worker: int) -> int | None:
    """The process of a worker, None while it has none."""
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if MODULE in words and int(words[words.index(MODULE) + 1]) == worker:
                return int(pid)
    return None
