"""Copies the rows of a damaged hot store that can be read into a new one.

SQLite gives up on a query when it meets a damaged page. So rows are read in order up to that place, then from
behind it on: by their row numbers where a table has them, else from the end backwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, cast

import apsw

from tailrace.log.journal_salvage import readable_blocks
from tailrace.storage.hot_store.hot import Execute, HotDatabase

# Row numbers in a damaged place that are tried one by one.
TRIED_MAX: Final = 100_000
ROWID_MAX: Final = 2**62
COMMIT_ROWS: Final = 1000
Row = tuple[object, ...]


def copy_file(source: Path, target: Path, copied: Callable[[int], None]) -> int:
    """Copies a file as far as the disk gives it, with zeros for the rest; how many bytes those are."""
    lost = 0
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with target.open("xb") as file:
            target.chmod(0o600)
            for part, missing in readable_blocks(fd):
                file.write(part)
                lost += missing
                copied(len(part))
            file.flush()
            os.fsync(file.fileno())
    finally:
        os.close(fd)
    return lost


def is_sound(path: Path) -> bool:
    """Whether SQLite finds nothing wrong with a copy of a database. What its WAL holds is taken in."""
    connection = apsw.Connection(str(path))
    try:
        execute = cast("Execute", connection.execute)  # pyright: ignore[reportUnknownMemberType]
        return execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
    except apsw.Error:
        return False
    finally:
        connection.close()


def copy_rows(source: Path, target: HotDatabase) -> dict[str, int]:
    """Copies every row that can be read; of each table in which something cannot, how many rows were read."""
    try:
        connection = apsw.Connection(str(source), flags=apsw.SQLITE_OPEN_READWRITE)
        execute = cast("Execute", connection.execute)  # pyright: ignore[reportUnknownMemberType]
        execute("PRAGMA cell_size_check=ON")
        present = {str(row[0]) for row in execute("SELECT name FROM sqlite_schema WHERE type='table'")}
    except apsw.Error:
        return {str(name): 0 for name, _ in _tables(target)}
    damaged: dict[str, int] = {}
    for name, has_rowid in _tables(target):
        if name not in present:
            continue
        reader = TableReader(execute, name, has_rowid=has_rowid)
        count = 0
        pending: list[Row] = []
        for row in reader:
            pending.append(row)
            count += 1
            if len(pending) == COMMIT_ROWS:
                _insert(target, name, pending)
        _insert(target, name, pending)
        if reader.damaged:
            damaged[name] = count
    connection.close()
    return damaged


def _tables(db: HotDatabase) -> list[tuple[str, bool]]:
    rows = db.rows("SELECT name, sql FROM sqlite_schema WHERE type='table'")
    return [(str(name), "WITHOUT ROWID" not in str(sql)) for name, sql in rows]


def _insert(target: HotDatabase, table: str, rows: list[Row]) -> None:
    with target.write():
        for row in rows:
            places = ", ".join("?" * len(row))
            target.execute(f"INSERT OR REPLACE INTO {table} VALUES({places})", row)
    rows.clear()


class TableReader:
    """The rows of one table, as far as they can be read; then `damaged` says whether any cannot."""

    def __init__(self, execute: Execute, table: str, *, has_rowid: bool) -> None:
        self._execute = execute
        self._table = table
        self._has_rowid = has_rowid
        self.damaged = False

    def __iter__(self) -> Iterator[Row]:
        return self._by_rowid() if self._has_rowid else self._from_both_ends()

    def _rows(self, query: str) -> Iterator[Row]:
        try:
            yield from self._execute(query)
        except apsw.Error:
            self.damaged = True

    def _from_both_ends(self) -> Iterator[Row]:
        yield from self._rows(f"SELECT * FROM {self._table}")  # noqa: S608 - names of ours
        if self.damaged:
            key = ", ".join(f"{name} DESC" for name in self._key())
            yield from self._rows(f"SELECT * FROM {self._table} ORDER BY {key}")  # noqa: S608 - names of ours

    def _key(self) -> list[str]:
        rows = self._execute("SELECT name FROM pragma_table_info(?) WHERE pk ORDER BY pk", (self._table,))
        return [str(row[0]) for row in rows]

    def _by_rowid(self) -> Iterator[Row]:
        after = 0
        while after < ROWID_MAX:
            query = f"SELECT rowid, * FROM {self._table} NOT INDEXED WHERE rowid>? ORDER BY rowid"  # noqa: S608
            try:
                for row in self._execute(query, (after,)):
                    after = cast("int", row[0])
                    yield row[1:]
            except apsw.Error:
                self.damaged = True
            else:
                return
            step = 1
            while after + step < ROWID_MAX and not self._can_seek(after + step):
                step *= 2
            for rowid in range(after + 1, after + min(step, TRIED_MAX) + 1):
                yield from self._one(rowid)
            after += step

    def _can_seek(self, rowid: int) -> bool:
        query = f"SELECT * FROM {self._table} NOT INDEXED WHERE rowid>=? ORDER BY rowid LIMIT 1"  # noqa: S608
        try:
            self._execute(query, (rowid,)).fetchone()
        except apsw.Error:
            return False
        return True

    def _one(self, rowid: int) -> Iterator[Row]:
        try:
            query = f"SELECT * FROM {self._table} NOT INDEXED WHERE rowid=?"  # noqa: S608 - names of ours
            row = self._execute(query, (rowid,)).fetchone()
        except apsw.Error:
            return
        if row is not None:
            yield row
