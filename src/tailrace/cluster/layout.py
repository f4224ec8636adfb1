"""Layout of the data directory: the number of workers, and a directory for each.

A server with one worker has its data in the data directory itself. One with several has a directory for each
below `workers/<generation>/`. `workers.json` names the current generation and is replaced atomically. Another
number of workers is a new generation, created beside the current one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from tailrace.common.errors import TailraceError
from tailrace.common.private_files import replace_file, sync_directory
from tailrace.common.settings import Settings
from tailrace.storage.data_directory import make_directory

LAYOUT_FILE: Final = "workers.json"
WORKERS_DIRECTORY: Final = "workers"
LAYOUT_VERSION: Final = 1
CORES_MIN: Final = 4  # with fewer cores one worker and its helper processes use them all
WORKERS_MAX: Final = 64
# Files and directories of a single worker in the data directory itself.
_ROOT_PARTS: Final = (
    *("journal", "hot.db", "hot.db-wal", "hot.db-shm", "watch.db", "watch.db-wal", "watch.db-shm"),
    *("cache", "companions", "spool"),
)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `workers.json`. Without that file there is one worker, of generation 0."""

    version: int = LAYOUT_VERSION
    workers: int = 1
    generation: int = 0

    def path(self, root: Path, index: int) -> Path:
        """The directory of one worker."""
        assert 0 <= index < self.workers
        return root if self.generation == 0 else root / WORKERS_DIRECTORY / str(self.generation) / str(index)


def read_layout(root: Path) -> Layout:
    file = root / LAYOUT_FILE
    try:
        layout = msgspec.json.decode(file.read_bytes(), type=Layout)
    except FileNotFoundError:
        return Layout()
    except (OSError, msgspec.DecodeError) as error:
        raise TailraceError("unavailable", f"cannot read {file}: {error}") from error
    if layout.version > LAYOUT_VERSION:
        raise TailraceError("unavailable", f"{file} was written by a newer version of Tailrace")
    return layout


def worker_paths(root: Path) -> list[Path]:
    """The directories with a journal and a hot store; the data directory itself if there is one worker."""
    layout = read_layout(root)
    return [layout.path(root, index) for index in range(layout.workers)]


def write_layout(root: Path, layout: Layout) -> None:
    """Switch to this generation."""
    replace_file(root / LAYOUT_FILE, msgspec.json.encode(layout) + b"\n")


def create_worker_directories(root: Path, layout: Layout, deployment: str) -> None:
    """Create the directories of the workers. They share one object store, so they are one deployment."""
    if layout.generation:
        make_directory(root / WORKERS_DIRECTORY)
        make_directory(root / WORKERS_DIRECTORY / str(layout.generation))
    for index in range(layout.workers):
        path = layout.path(root, index)
        make_directory(path)
        if layout.generation:
            replace_file(path / "deployment", deployment.encode() + b"\n")


def refuse_leftover_generation(root: Path, layout: Layout) -> None:
    """Refuse a new generation with files of an earlier attempt: their rows would become streams."""
    path = root / WORKERS_DIRECTORY / str(layout.generation)
    if path.exists():
        raise TailraceError("unavailable", f"{path} is left over from an earlier attempt; remove it")


def remove_other_generations(root: Path, layout: Layout) -> None:
    """Remove unfinished and old generations."""
    for found in (root / WORKERS_DIRECTORY).glob("*"):
        if found.name != str(layout.generation):
            shutil.rmtree(found, ignore_errors=True)
    if layout.generation:
        for part in _ROOT_PARTS:
            path = root / part
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    sync_directory(root)


def choose_worker_count(settings: Settings, cores: int | None = None) -> int:
    """The configured number of workers; by default that of an existing directory, else by the cores."""
    if settings.workers:
        return settings.workers
    root = settings.data_dir
    if (root / LAYOUT_FILE).exists() or not is_unused_directory(root):
        return read_layout(root).workers
    cores = cores or len(os.sched_getaffinity(0))
    return 1 if cores < CORES_MIN else min(cores - 1, WORKERS_MAX)


def is_unused_directory(path: Path) -> bool:
    """Whether no server has ever written to the directory."""
    return not (path / "hot.db").exists() and not any((path / "journal").glob("*.jnl"))
