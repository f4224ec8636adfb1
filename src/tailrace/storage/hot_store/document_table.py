"""Documents of streams in the hot store: a stream's registry and what else is said about it as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from tailrace.storage.hot_store.hot import HotDatabase

DOCUMENT_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS documents(
    number INTEGER NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, PRIMARY KEY(number, key));
"""


class DocumentTable:
    def __init__(self, db: HotDatabase) -> None:
        self._db = db

    def of(self, number: int) -> dict[str, bytes]:
        rows = self._db.rows("SELECT key, value FROM documents WHERE number=? ORDER BY key", number)
        return dict(cast("tuple[str, bytes]", row) for row in rows)

    # -- writing (checkpointer only) ---------------------------------------------------------------------

    def create(self) -> None:
        """In a store that an older version left."""
        self._db.execute(DOCUMENT_SCHEMA)

    def put(self, number: int, key: str, value: bytes | None) -> None:
        if value is None:
            self._db.execute("DELETE FROM documents WHERE number=? AND key=?", (number, key))
        else:
            self._db.execute("INSERT OR REPLACE INTO documents VALUES(?, ?, ?)", (number, key, value))

    def delete_stream(self, number: int) -> None:
        self._db.execute("DELETE FROM documents WHERE number=?", (number,))
