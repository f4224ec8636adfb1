"""Data directories of servers that were killed, and damage to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from support.calls import Caller, eventually
from support.journals import flip
from support.server import ServerProcess
from tailrace.log.journal_check import inspect_journal

TEXT = {"Content-Type": "text/plain"}
UNSEALED = {"TAILRACE_SEAL_AGE_MS": "3600000"}
PAGE_BYTES = 8192


def filled(
    directory: Path,
    *args: str,
    names: tuple[str, ...] = ("orders",),
    size: int = 0,
    env: Mapping[str, str] | None = None,
) -> Path:
    """A directory that a server was killed on, with records in its journal."""
    server = ServerProcess(directory, args=args, env={**UNSEALED, **(env or {})}).start()
    call = Caller(server)
    for name in names:
        assert call("PUT", name, headers=TEXT).status == 201
        for number in range(20):
            assert call("POST", name, line(number, size), headers=TEXT).status == 204
    if size:
        first = directory / "journal" / "0000000000000001.jnl"
        eventually(first.exists, lambda exists: not exists)  # the hot store has it
    server.kill()
    return directory


def line(number: int, size: int = 0) -> bytes:
    return f"line {number} {'x' * size}\n".encode()


def checkpointed(directory: Path, *args: str) -> Path:
    """A directory with entries in the hot store, of which none are sealed, and nothing in its WAL."""
    filled(directory, *args, size=12_000, env={"TAILRACE_JOURNAL_FILE_BYTES": "64KiB"})
    with closing(sqlite3.connect(directory / "hot.db")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return directory


def damage_journal(directory: Path, record: int = 2) -> Path:
    """One bit of a record in the middle, that was acknowledged."""
    rows = [row for row in inspect_journal(directory) if "ops" in row]
    path = directory / "journal" / str(rows[record]["file"])
    flip(path, int(str(rows[record]["position"])) + 20)
    return path


def overwrite_page(path: Path, page: int) -> None:
    """One page of a database, counted from 0."""
    data = bytearray(path.read_bytes())
    assert len(data) >= (page + 1) * PAGE_BYTES
    data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = b"\xa5" * PAGE_BYTES
    path.write_bytes(data)


def state_of(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file: its mode, when it was changed, and its content."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
