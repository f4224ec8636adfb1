"""Servers with several workers: which of them owns what, and their processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from support.server import ServerProcess
from tailrace.cluster.peers import Placement

MODULE = b"tailrace.cluster.worker_process"


def names_of(worker: int, workers: int, prefix: str = "s") -> Iterator[str]:
    """Names that belong to one worker."""
    placement = Placement(workers)
    return (name for number in count() if placement.owner(name := f"{prefix}{number}") == worker)


def pid_of(server: ServerProcess, worker: int) -> int | None:
    """The process of a worker, None while it has none."""
    for pid in _children(server.pid):
        with suppress(OSError):  # it is over
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if MODULE in words and int(words[words.index(MODULE) + 1]) == worker:
                return pid
    return None


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that ends while its process goes on
            yield from map(int, (task / "children").read_text().split())
