"""Stores a deployment of the present version for the tests of all later ones: `make archive`.

Writes `stored/<version>-<date>/<layout>.tar.xz`. An archive is made once, by the version that it is named
after, and never changed: it stands for the directories and buckets that this version has left with its users.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import sys
import tarfile
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tailrace
from compatibility.answers import dumped, everything, streams
from compatibility.contents import append, events, history, hot, registrations, seal_one, tail
from compatibility.deployment import ADMIN, LAYOUTS, TEXT, Deployment, Facts, Layout, server_on, token_for
from support.calls import eventually
from support.pipeline_process import Station
from support.server import ServerProcess

STORED = Path(__file__).with_name("stored")
PARTS = ("data", "bucket", "tailrace.toml", "expected.json")
# Segments are joined as soon as there are three of them.
JOINING = {
    "TAILRACE_PIPELINE": "external",
    "TAILRACE_COMPACT_SEGMENTS": "3",
    "TAILRACE_COMPACT_AGE_MS": "0",
    "TAILRACE_SEAL_INTERVAL_MS": "100",
    # Index files of three segments are merged, and documents are published at once.
    "TAILRACE_INDEX_L0_SPAN": "3",
    "TAILRACE_WATCH_VIEW_MS": "100",
    "TAILRACE_WATCH_CARE_MS": "100",
    "TAILRACE_METRICS_FLUSH_MS": "500",
}


def write(layout: Layout, directory: Path) -> None:
    """A deployment in `directory`, as a server leaves it that was killed in the middle of its work."""
    (directory / "tailrace.toml").write_text(layout.settings)
    workers = {"TAILRACE_WORKERS": str(layout.workers)}
    server = server_on(directory, **JOINING, **workers).start()
    to = Deployment(server, layout)
    try:
        facts = history(to)
        eventually(lambda: list((directory / "bucket" / "watch").rglob("*.parquet")), len)
        if layout.indexed:
            _index(to, directory)
        hot(to, 1)
        _checkpoint(to, directory / "data")
        server.env = {name: value for name, value in server.env.items() if name not in JOINING}
        server.restart()
        facts |= tail(to)
        facts["answers"] = everything(to)
        facts |= registrations(to)
    finally:
        _crash(server)
    for connection in to.connections:
        connection.cut()
    facts |= {"layout": layout.name, "written_ns": time.time_ns()}
    facts["bootstrapped"] = _bootstrapped(layout, directory)
    (directory / "expected.json").write_bytes(dumped(facts))


def _crash(server: ServerProcess) -> None:
    """SIGKILL for all processes at once: a worker that outlives its parent would end in good order."""
    others = _descendants(server.pid)
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    server.kill()
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: [pid for pid in others if Path(f"/proc/{pid}/exe").exists()], lambda left: not left)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _index(to: Deployment, directory: Path) -> None:
    """Index files and joined segments by a real pipeline, then segments that no index has."""
    station = Station(to.server.base_url, directory)
    try:
        for _ in range(2):  # the first run indexes, the second joins what the first has indexed
            station.run(env={"TAILRACE_TOKEN": token_for(ADMIN)}, master="local[1]")
    finally:
        station.close()
    append(to, "profile/evlog", *events(100))
    seal_one(to, "profile/evlog")


def _checkpoint(to: Deployment, data: Path) -> None:
    """Seals a few streams, which retires the journal file of each worker, and waits for the checkpoints."""
    for number in range(4 * to.layout.workers):
        to.ask("PUT", f"checkpoint/{number}", b"sealed", 201, **TEXT)
        seal_one(to, f"checkpoint/{number}")

    def found() -> list[int]:
        return [_blocks(path) for path in data.rglob("hot.db")]

    eventually(found, lambda counts: counts and all(counts))


def _blocks(path: Path) -> int:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        query = "SELECT count(*) FROM blocks JOIN streams USING(number) WHERE substr(name, 1, 2) != '__'"
        return int(database.execute(query).fetchone()[0])


def _bootstrapped(layout: Layout, directory: Path) -> list[dict[str, Any]]:
    """The streams that a server restores from the bucket alone."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch)
        shutil.copytree(directory / "bucket", copy / "bucket")
        shutil.copy(directory / "tailrace.toml", copy)
        workers = {"TAILRACE_WORKERS": str(layout.workers)}
        with server_on(copy, "data", "--bootstrap", **workers) as server:
            # What the restored server notes about itself has other times with each restore.
            return streams(Deployment(server, layout), "__", "hub/")


def pack(directory: Path, archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9, format=tarfile.PAX_FORMAT) as tar:
        for part in PARTS:
            tar.add(directory / part, part, filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def unpack(archive: Path, directory: Path) -> Facts:
    """What it must be read back as."""
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    return json.loads((directory / "expected.json").read_bytes())


def main() -> int:
    folder = STORED / f"{tailrace.__version__}-{datetime.now(UTC):%Y-%m-%d}"
    if folder.exists():
        print(f"{folder} exists: archives are never changed; delete it first if it was not committed")
        return 1
    for layout in LAYOUTS.values():
        archive = folder / f"{layout.name}.tar.xz"
        with tempfile.TemporaryDirectory() as scratch:
            write(layout, Path(scratch))
            pack(Path(scratch), archive)
        print(f"{archive}: {archive.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
