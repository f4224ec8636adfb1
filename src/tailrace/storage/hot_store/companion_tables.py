"""The hot store's book of companions: which files count for a stream, and which segments have none.

Written by the checkpointer in the same transactions as everything else. A store made by an older version has
none of these tables until its checkpointer runs; whoever reads it before finds them empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, cast

import msgspec

from tailrace.storage.segments.companions import IndexFile, QuarantinedSegment

if TYPE_CHECKING:
    from tailrace.storage.hot_store.hot import HotDatabase

INDEX_FILE_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS companions(
    number INTEGER NOT NULL, object TEXT NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    info BLOB NOT NULL, PRIMARY KEY(number, object)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS quarantined(
    number INTEGER NOT NULL, object TEXT NOT NULL, info BLOB NOT NULL, PRIMARY KEY(number, object))
    WITHOUT ROWID;
"""
_encode_row = msgspec.msgpack.Encoder().encode
_decode_index_file = msgspec.msgpack.Decoder(IndexFile).decode
_decode_quarantined = msgspec.msgpack.Decoder(QuarantinedSegment).decode


class IndexFileTables:
    """Reached as `HotDb.companions`."""

    def __init__(self, db: HotDatabase) -> None:
        self._db = db
        self._exist = False

    def exist(self) -> bool:
        if not self._exist:
            self._exist = self._db.one("SELECT 1 FROM sqlite_schema WHERE name='quarantined'") is not None
        return self._exist

    # -- reading ---------------------------------------------------------------------------------------

    def of(self, number: int) -> Iterator[IndexFile]:
        if self.exist():
            for row in self._db.rows("SELECT info FROM companions WHERE number=?", number):
                yield _decode_index_file(cast("bytes", row[0]))

    def quarantined(self, number: int) -> Iterator[QuarantinedSegment]:
        if self.exist():
            for row in self._db.rows("SELECT info FROM quarantined WHERE number=?", number):
                yield _decode_quarantined(cast("bytes", row[0]))

    def described_after(self, number: int, limit: int) -> list[int]:
        """Streams with documents that an index plan is made of, by number."""
        rows = self._db.rows(
            "SELECT DISTINCT number FROM documents WHERE number>? AND key IN ('index', 'profile', 'schema') "
            "ORDER BY number LIMIT ?",
            number,
            limit,
        )
        return [cast("int", row[0]) for row in rows]

    # -- writing (checkpointer only) ---------------------------------------------------------------------

    def create(self) -> None:
        """In a store that an older version left."""
        if not self.exist():
            for statement in INDEX_FILE_SCHEMA.split(";\n"):
                if statement.strip():
                    self._db.execute(statement)

    def put(self, number: int, companion: IndexFile) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO companions VALUES(?, ?, ?, ?, ?)",
            (number, companion.object, companion.first, companion.last, _encode_row(companion)),
        )

    def put_quarantine(self, number: int, found: QuarantinedSegment) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO quarantined VALUES(?, ?, ?)", (number, found.object, _encode_row(found))
        )

    def drop(self, number: int, key: str) -> None:
        """A companion, or a segment's quarantine."""
        for table in ("companions", "quarantined"):
            self._db.execute(f"DELETE FROM {table} WHERE number=? AND object=?", (number, key))  # noqa: S608

    def trim(self, number: int, earliest: int) -> None:
        """What speaks of trimmed entries: sums that hold some of them are no longer right."""
        self._db.execute(
            "DELETE FROM companions WHERE number=?1 AND "
            "(last<=?2 OR (first<=?2 AND object LIKE 'companions/%/agg/%'))",
            (number, earliest),
        )

    def delete_stream(self, number: int) -> None:
        if self.exist():
            for table in ("companions", "quarantined"):
                self._db.execute(f"DELETE FROM {table} WHERE number=?", (number,))  # noqa: S608
