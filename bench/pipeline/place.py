# pyright: strict
"""Where the bench of one size keeps its events, the data of its server, and what it found."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from bench.evlog.target import STREAM, Target
from bench.peers import ALL, US
from bench.places import BUILD

SEED = 1
SEGMENTS = "segments/*.parquet"  # in the folder of a stream
COLUMNS = "companions/*/col/*.parquet"
Figures = dict[str, object]


class Place:
    def __init__(self, events: int, data: Path, out: Path) -> None:
        self.events = events
        self.directory = data / f"pipeline-{events}"
        self.results = out / "pipeline" / str(events)
        self.file = BUILD / "evlog" / f"events-{SEED}-{events}.ndjson"

    @contextmanager
    def server(
        self, env: Mapping[str, str] | None = None, *, name: str = "server", pipeline: str = "off"
    ) -> Generator[Target]:
        """Tailrace on what the directory holds; no pipeline runs unless it is asked for."""
        directory = self.directory / name
        directory.mkdir(parents=True, exist_ok=True)
        own = {"TAILRACE_PIPELINE": pipeline, "TAILRACE_METRICS_FLUSH_MS": "0"}
        running = ALL[US].start(directory, None, {**own, **(env or {})})
        try:
            yield Target(ALL[US], running)
        finally:
            running.stop()

    @property
    def folder(self) -> Path:
        """The stream's own folder in the object store."""
        stream = xxhash.xxh3_128_hexdigest(STREAM.encode() + b"\0" + bytes(8))
        return self.directory / "server" / "data" / "objects" / "streams" / stream[:2] / stream

    @property
    def segments(self) -> str:
        return str(self.folder / SEGMENTS)

    @property
    def columns(self) -> str:
        return str(self.folder / COLUMNS)

    def figures(self, stage: str) -> Figures:
        """What an earlier stage found."""
        found = read_record(self.results / f"{stage}.json")
        if found is None or found.failed is not None:
            raise StageError(f"the stage {stage} has to be run first")
        return found.figures


class StageError(Exception):
    """A stage cannot be run, or found something that must not be."""


class Record(msgspec.Struct, frozen=True):
    """What one stage found, or why it found nothing."""

    stage: str
    date: str
    commit: str
    seconds: float
    other_cores: float  # processor time that others took meanwhile
    figures: Figures = {}
    failed: str | None = None


def read_record(path: Path) -> Record | None:
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.DecodeError:
        return None  # of another version of the bench


def until(condition: Callable[[], bool], patience_s: float, what: str) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise StageError(f"waited {patience_s:.0f} s in vain: {what}")
        time.sleep(0.25)
