"""The hot store's book of the object store: segments, manifests that are behind, streams to be buried.

Written by the checkpointer in the same transactions as everything else. A store made by an older version has
none of these tables until its checkpointer runs; whoever reads it before finds them empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from tailrace.storage.hot_store.hot import HotDatabase

COLD_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments(
    number INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL, last_ns INTEGER NOT NULL,
    info BLOB NOT NULL, footer BLOB NOT NULL, PRIMARY KEY(number, first));
CREATE INDEX IF NOT EXISTS segments_by_time ON segments(number, last_ns, first);
CREATE TABLE IF NOT EXISTS heads(
    number INTEGER PRIMARY KEY, changed_file INTEGER NOT NULL, recorded_file INTEGER NOT NULL,
    generation INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS heads_stale ON heads(number) WHERE changed_file > recorded_file;
CREATE TABLE IF NOT EXISTS graves(
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, stream_id TEXT NOT NULL, image BLOB NOT NULL);
"""


class SegmentRow(NamedTuple):
    first: int
    last: int
    info: bytes
    footer: bytes


class HotRange(NamedTuple):
    """What the hot store holds of one stream's entries."""

    number: int
    first: int
    last: int
    body_bytes: int
    oldest_ns: int


class DeletedStreamRow(NamedTuple):
    number: int
    name: str
    stream_id: str
    image: bytes


class ColdTables:
    """Reached as `HotDb.cold`."""

    def __init__(self, db: HotDatabase) -> None:
        self._db = db
        self._exist = False

    def exist(self) -> bool:
        if not self._exist:
            self._exist = self._db.one("SELECT 1 FROM sqlite_schema WHERE name='graves'") is not None
        return self._exist

    # -- reading ---------------------------------------------------------------------------------------

    def segment_at(self, number: int, entry: int) -> SegmentRow | None:
        """The segment that holds an entry."""
        if not self.exist():
            return None
        row = self._db.one(
            "SELECT first, last, info, footer FROM segments WHERE number=? AND first<=? "
            "ORDER BY first DESC LIMIT 1",
            number,
            entry,
        )
        found = None if row is None else SegmentRow(*cast("tuple[int, int, bytes, bytes]", row))
        return None if found is None or found.last < entry else found

    def any_segments(self) -> bool:
        return self.exist() and self._db.one("SELECT 1 FROM segments LIMIT 1") is not None

    def segment_since(self, number: int, since_ns: int) -> SegmentRow | None:
        """The first segment with an entry appended at or after the instant; times never decrease."""
        if not self.exist():
            return None
        row = self._db.one(
            "SELECT first, last, info, footer FROM segments WHERE number=? AND last_ns>=? "
            "ORDER BY last_ns, first LIMIT 1",
            number,
            since_ns,
        )
        return None if row is None else SegmentRow(*cast("tuple[int, int, bytes, bytes]", row))

    def segments(self, number: int) -> Iterator[SegmentRow]:
        """All segments of a stream, oldest first."""
        if self.exist():
            query = "SELECT first, last, info, footer FROM segments WHERE number=? ORDER BY first"
            for row in self._db.rows(query, number):
                yield SegmentRow(*cast("tuple[int, int, bytes, bytes]", row))

    def segments_within(self, number: int, after: int, upto: int) -> Iterator[SegmentRow]:
        """Segments with entries behind `after`, up to `upto`, oldest first."""
        if self.exist():
            query = (
                "SELECT first, last, info, footer FROM segments WHERE number=? AND first<=? AND last>? "
                "ORDER BY first"
            )
            for row in self._db.rows(query, number, upto, after):
                yield SegmentRow(*cast("tuple[int, int, bytes, bytes]", row))

    def infos_from(self, number: int, entry: int) -> Iterator[bytes]:
        """What is recorded about the segment that holds an entry, and about those behind it."""
        if self.exist():
            query = (
                "SELECT info FROM segments WHERE number=?1 AND last>=?2 AND first>=coalesce("
                "(SELECT max(first) FROM segments WHERE number=?1 AND first<=?2), 0) ORDER BY first"
            )
            for row in self._db.rows(query, number, entry):
                yield cast("bytes", row[0])

    def infos_within(self, number: int, after: int, upto: int, limit: int) -> list[bytes]:
        """What is recorded about segments that end behind `after`, up to `upto`, oldest first."""
        if not self.exist():
            return []
        rows = self._db.rows(
            "SELECT info FROM segments WHERE number=? AND first<=? AND last>? AND last<=? "
            "ORDER BY first LIMIT ?",
            number,
            upto,
            after,
            upto,
            limit,
        )
        return [cast("bytes", row[0]) for row in rows]

    def crowded_after(self, number: int, count: int, limit: int) -> list[int]:
        """Streams with at least so many segments, by number."""
        if not self.exist():
            return []
        rows = self._db.rows(
            "SELECT number FROM segments WHERE number>? GROUP BY number HAVING count(*)>=? "
            "ORDER BY number LIMIT ?",
            number,
            count,
            limit,
        )
        return [cast("int", row[0]) for row in rows]

    def stale_heads(self, after: int, limit: int) -> list[tuple[int, int]]:
        """Streams whose manifest is behind, by number, with the journal file of the last change.

        Those with entries in the hot store are left out: their manifest is written when they are sealed.
        """
        if not self.exist():
            return []
        rows = self._db.rows(
            "SELECT number, changed_file FROM heads WHERE changed_file > recorded_file AND number>? "
            "AND NOT EXISTS (SELECT 1 FROM blocks WHERE blocks.number = heads.number) "
            "ORDER BY number LIMIT ?",
            after,
            limit,
        )
        return [cast("tuple[int, int]", row) for row in rows]

    def generation(self, number: int) -> int:
        """Of the manifest that was recorded last; 0 if there is none."""
        row = self._db.one("SELECT generation FROM heads WHERE number=?", number) if self.exist() else None
        return 0 if row is None else cast("int", row[0])

    def graves(self, after: int, limit: int) -> list[DeletedStreamRow]:
        if not self.exist():
            return []
        rows = self._db.rows(
            "SELECT number, name, stream_id, image FROM graves WHERE number>? ORDER BY number LIMIT ?",
            after,
            limit,
        )
        return [DeletedStreamRow(*cast("tuple[int, str, str, bytes]", row)) for row in rows]

    def has_grave(self, stream_id: str) -> bool:
        found = self._db.one("SELECT 1 FROM graves WHERE stream_id=?", stream_id) if self.exist() else None
        return found is not None

    def hot_ranges(self, after: int, limit: int) -> list[HotRange]:
        """Streams with entries in the hot store, by number."""
        return [self.hot_range(number) for number in self.hot_numbers(after, limit)]

    def hot_numbers(self, after: int, limit: int) -> list[int]:
        """Their numbers alone. One jump in the index for each of them."""
        found: list[int] = []
        while len(found) < limit:
            row = self._db.one("SELECT min(number) FROM blocks WHERE number>?", after)
            if row is None or row[0] is None:
                break
            after = cast("int", row[0])
            found.append(after)
        return found

    def hot_range(self, number: int) -> HotRange:
        row = self._db.one(
            "SELECT min(first), max(last), coalesce(sum(length(body)), 0) FROM blocks WHERE number=?", number
        )
        assert row is not None
        first, last, body_bytes = cast("tuple[int | None, int | None, int]", row)
        if first is None or last is None:
            return HotRange(number, 0, 0, 0, 0)
        row = self._db.one("SELECT substr(times, 1, 8) FROM blocks WHERE number=? AND first=?", number, first)
        oldest_ns = 0 if row is None else int.from_bytes(cast("bytes", row[0]), "little", signed=True)
        return HotRange(number, first, last, body_bytes, oldest_ns)

    def hot_time_ns(self, number: int, entry: int) -> int | None:
        """When an entry of the hot store was appended. Bodies, which may be large, are not read."""
        row = self._db.one(
            "SELECT substr(times, 1 + 8 * (?2 - first), 8), last FROM blocks WHERE number=?1 AND first<=?2 "
            "ORDER BY first DESC LIMIT 1",
            number,
            entry,
        )
        if row is None or cast("int", row[1]) < entry:
            return None
        return int.from_bytes(cast("bytes", row[0]), "little", signed=True)

    def hot_bytes(self) -> int:
        """Payload in the hot store, as of its last checkpoint."""
        return int(str(self._db.fact("hot_bytes", 0)))

    # -- writing (checkpointer only) ---------------------------------------------------------------------

    def create(self) -> None:
        """In a store of an older version; what is in it is counted once, and has yet to be recorded."""
        if self.exist():
            return
        for statement in COLD_SCHEMA.split(";\n"):
            if statement.strip():
                self._db.execute(statement)
        row = self._db.one("SELECT coalesce(sum(length(body)), 0) FROM blocks")
        assert row is not None
        self._db.set_fact("hot_bytes", cast("int", row[0]))
        self._db.execute("INSERT OR IGNORE INTO heads SELECT number, 1, 0, 0 FROM streams")

    def add_hot_bytes(self, difference: int) -> None:
        if difference:
            self._db.set_fact("hot_bytes", max(0, self.hot_bytes() + difference))

    def put_segment(self, number: int, row: SegmentRow, last_ns: int) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO segments VALUES(?, ?, ?, ?, ?, ?)",
            (number, row.first, row.last, last_ns, row.info, row.footer),
        )

    def join_segments(self, number: int, row: SegmentRow, last_ns: int) -> None:
        """One segment in the place of all that lie within its range."""
        self._db.execute(
            "DELETE FROM segments WHERE number=? AND first>=? AND last<=?", (number, row.first, row.last)
        )
        self.put_segment(number, row, last_ns)

    def drop_segments(self, number: int, behind: int, upto: int) -> int:
        """Segments that lie between two entries; how many there were."""
        self._db.execute(
            "DELETE FROM segments WHERE number=? AND first>? AND last<=?", (number, behind, upto)
        )
        return self._db.connection.changes()

    def drop_blocks(self, number: int, last: int) -> None:
        """Entries that are in segments now; a block that goes beyond them stays whole."""
        row = self._db.one(
            "SELECT coalesce(sum(length(body)), 0) FROM blocks WHERE number=? AND last<=?", number, last
        )
        assert row is not None
        self._db.execute("DELETE FROM blocks WHERE number=? AND last<=?", (number, last))
        self.add_hot_bytes(-cast("int", row[0]))

    def head_changed(self, number: int, file: int) -> None:
        self._db.execute(
            "INSERT INTO heads VALUES(?, ?, 0, 0) "
            "ON CONFLICT(number) DO UPDATE SET changed_file=max(changed_file, excluded.changed_file)",
            (number, file),
        )

    def head_recorded(self, number: int, file: int, generation: int) -> None:
        self._db.execute(
            "INSERT INTO heads VALUES(?, 0, ?, ?) ON CONFLICT(number) DO UPDATE SET "
            "recorded_file=max(recorded_file, excluded.recorded_file), "
            "generation=max(generation, excluded.generation)",
            (number, file, generation),
        )

    def put_grave(self, grave: DeletedStreamRow) -> None:
        self._db.execute("INSERT OR REPLACE INTO graves VALUES(?, ?, ?, ?)", tuple(grave))

    def delete_grave(self, number: int) -> None:
        self._db.execute("DELETE FROM graves WHERE number=?", (number,))

    def delete_stream(self, number: int) -> None:
        self.drop_blocks(number, 2**62)
        for table in ("segments", "heads"):
            self._db.execute(f"DELETE FROM {table} WHERE number=?", (number,))  # noqa: S608 - names of ours
