"""Which keys a copy has shown: kept in a file that nobody else sees, however many they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import apsw

from tailrace.watch.view import Execute


class SeenKeys:
    def __init__(self) -> None:
        self._connection = apsw.Connection("")  # a temporary file, gone when it is closed
        self._execute = cast("Execute", self._connection.execute)  # pyright: ignore[reportUnknownMemberType]
        self._execute("PRAGMA journal_mode=OFF")
        self._execute("PRAGMA cache_size=-4096")
        self._execute("CREATE TABLE seen(key TEXT PRIMARY KEY) WITHOUT ROWID")

    def add(self, keys: Iterable[str]) -> None:
        self._execute("BEGIN")
        for key in keys:
            self._execute("INSERT OR IGNORE INTO seen VALUES(?)", (key,))
        self._execute("COMMIT")

    def lacks(self, keys: Sequence[str]) -> list[str]:
        """Those that were not shown."""
        find = "SELECT 1 FROM seen WHERE key=?"
        return [key for key in keys if self._execute(find, (key,)).fetchone() is None]

    def close(self) -> None:
        self._connection.close()
