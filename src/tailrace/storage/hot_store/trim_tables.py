"""The hot store's book of retention: who forked whom, when a stream is due, what has yet to be deleted.

Written by the checkpointer in the same transactions as everything else. A store made by an older version has
none of these tables until its checkpointer runs; whoever reads it before finds them empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from tailrace.storage.hot_store.hot import HotDatabase

RETENTION_SCHEMA = """
CREATE TABLE IF NOT EXISTS forks(
    number INTEGER PRIMARY KEY, parent INTEGER NOT NULL, fork_entry INTEGER NOT NULL,
    earliest INTEGER NOT NULL, gone INTEGER NOT NULL, forks INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS forks_by_parent ON forks(parent);
CREATE TABLE IF NOT EXISTS due(number INTEGER PRIMARY KEY, at_ns INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS due_by_time ON due(at_ns, number);
CREATE TABLE IF NOT EXISTS trims(number INTEGER PRIMARY KEY, file INTEGER NOT NULL);
"""


class ForkRow(NamedTuple):
    number: int
    fork_entry: int
    earliest: int
    gone: bool
    forks: int


class RetentionTables:
    """Reached as `HotDb.trims`."""

    def __init__(self, db: HotDatabase) -> None:
        self._db = db
        self._exist = False

    def exist(self) -> bool:
        if not self._exist:
            self._exist = self._db.one("SELECT 1 FROM sqlite_schema WHERE name='trims'") is not None
        return self._exist

    # -- reading ---------------------------------------------------------------------------------------

    def forks_of(self, parent: int) -> list[ForkRow]:
        if not self.exist():
            return []
        rows = self._db.rows(
            "SELECT number, fork_entry, earliest, gone, forks FROM forks WHERE parent=?", parent
        )
        return [
            ForkRow(number, fork_entry, earliest, bool(gone), forks)
            for number, fork_entry, earliest, gone, forks in (
                cast("tuple[int, int, int, int, int]", row) for row in rows
            )
        ]

    def forks_among(self, numbers: Sequence[int]) -> set[int]:
        """Those of some streams that are forks."""
        if not numbers or not self.exist():
            return set()
        marks = ",".join("?" * len(numbers))
        rows = self._db.rows(f"SELECT number FROM forks WHERE number IN ({marks})", *numbers)  # noqa: S608
        return {cast("int", row[0]) for row in rows}

    def due_after(self, at_ns: int, number: int, limit: int) -> list[tuple[int, int]]:
        """Times and numbers of streams that retention has to look at, soonest first, behind the one named."""
        if not self.exist():
            return []
        rows = self._db.rows(
            "SELECT at_ns, number FROM due WHERE (at_ns, number)>(?, ?) ORDER BY at_ns, number LIMIT ?",
            at_ns,
            number,
            limit,
        )
        return [cast("tuple[int, int]", row) for row in rows]

    def pending(self, after: int, limit: int) -> list[tuple[int, int]]:
        """Streams with objects that nobody needs any more, by number, with the journal file that says so."""
        if not self.exist():
            return []
        rows = self._db.rows(
            "SELECT number, file FROM trims WHERE number>? ORDER BY number LIMIT ?", after, limit
        )
        return [cast("tuple[int, int]", row) for row in rows]

    # -- writing (checkpointer only) ---------------------------------------------------------------------

    def create(self) -> bool:
        """In a store of an older version; True if there was something to do, and rows have to follow."""
        if self.exist():
            return False
        for statement in RETENTION_SCHEMA.split(";\n"):
            if statement.strip():
                self._db.execute(statement)
        return True

    def put_fork(self, parent: int, row: ForkRow) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO forks VALUES(?, ?, ?, ?, ?, ?)",
            (row.number, parent, row.fork_entry, row.earliest, int(row.gone), row.forks),
        )

    def put_due(self, number: int, at_ns: int | None) -> None:
        if at_ns is None:
            self._db.execute("DELETE FROM due WHERE number=?", (number,))
        else:
            self._db.execute("INSERT OR REPLACE INTO due VALUES(?, ?)", (number, at_ns))

    def put_pending(self, number: int, file: int) -> None:
        self._db.execute(
            "INSERT INTO trims VALUES(?, ?) ON CONFLICT(number) DO UPDATE SET file=max(file, excluded.file)",
            (number, file),
        )

    def delete_pending(self, number: int, file: int) -> None:
        """Objects are deleted as of the journal file; what a later one took away is still to be done."""
        self._db.execute("DELETE FROM trims WHERE number=? AND file<=?", (number, file))

    def delete_stream(self, number: int) -> None:
        if self.exist():
            for table in ("forks", "due", "trims"):
                self._db.execute(f"DELETE FROM {table} WHERE number=?", (number,))  # noqa: S608 - names of ours
