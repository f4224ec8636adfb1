"""Further tables of the hot store: segments, manifests, retention, index files, documents, changed facts.

Written by the checkpointer in the same transactions as everything else. A store created by an older version
has none of these tables until its checkpointer runs; reading them before that finds them empty.

Facts that are stored together as one object in the bucket share a subject: a subscription and its links, or
all secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from tailrace.storage.segments.index_files import IndexFile, QuarantinedSegment

if TYPE_CHECKING:
    from tailrace.storage.hot_store.database import HotDatabase


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
    """The range and size of one stream's entries in the hot store."""

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
        """The segment of an entry."""
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
        """Segments with entries after `after`, up to `upto`, oldest first."""
        if self.exist():
            query = (
                "SELECT first, last, info, footer FROM segments WHERE number=? AND first<=? AND last>? "
                "ORDER BY first"
            )
            for row in self._db.rows(query, number, upto, after):
                yield SegmentRow(*cast("tuple[int, int, bytes, bytes]", row))

    def infos_from(self, number: int, entry: int) -> Iterator[bytes]:
        """The recorded fields of the segment of an entry, and of those after it."""
        if self.exist():
            query = (
                "SELECT info FROM segments WHERE number=?1 AND last>=?2 AND first>=coalesce("
                "(SELECT max(first) FROM segments WHERE number=?1 AND first<=?2), 0) ORDER BY first"
            )
            for row in self._db.rows(query, number, entry):
                yield cast("bytes", row[0])

    def infos_within(self, number: int, after: int, upto: int, limit: int) -> list[bytes]:
        """The recorded fields of segments that end after `after`, up to `upto`, oldest first."""
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

    def streams_with_segments_after(self, number: int, count: int, limit: int) -> list[int]:
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
        """Streams whose manifest is stale, by number, with the journal file of the last change.

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

    def deleted_streams(self, after: int, limit: int) -> list[DeletedStreamRow]:
        if not self.exist():
            return []
        rows = self._db.rows(
            "SELECT number, name, stream_id, image FROM graves WHERE number>? ORDER BY number LIMIT ?",
            after,
            limit,
        )
        return [DeletedStreamRow(*cast("tuple[int, str, str, bytes]", row)) for row in rows]

    def is_deleted(self, stream_id: str) -> bool:
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
        """Replaces all segments within a range by one."""
        self._db.execute(
            "DELETE FROM segments WHERE number=? AND first>=? AND last<=?", (number, row.first, row.last)
        )
        self.put_segment(number, row, last_ns)

    def drop_segments(self, number: int, behind: int, upto: int) -> int:
        """Deletes segments between two entries; returns how many."""
        self._db.execute(
            "DELETE FROM segments WHERE number=? AND first>? AND last<=?", (number, behind, upto)
        )
        return self._db.connection.changes()

    def drop_blocks(self, number: int, last: int) -> None:
        """Deletes blocks of sealed entries; a block that also has later entries stays whole."""
        row = self._db.one(
            "SELECT coalesce(sum(length(body)), 0) FROM blocks WHERE number=? AND last<=?", number, last
        )
        assert row is not None
        self._db.execute("DELETE FROM blocks WHERE number=? AND last<=?", (number, last))
        self.add_hot_bytes(-cast("int", row[0]))

    def mark_head_stale(self, number: int, file: int) -> None:
        self._db.execute(
            "INSERT INTO heads VALUES(?, ?, 0, 0) "
            "ON CONFLICT(number) DO UPDATE SET changed_file=max(changed_file, excluded.changed_file)",
            (number, file),
        )

    def mark_head_recorded(self, number: int, file: int, generation: int) -> None:
        self._db.execute(
            "INSERT INTO heads VALUES(?, 0, ?, ?) ON CONFLICT(number) DO UPDATE SET "
            "recorded_file=max(recorded_file, excluded.recorded_file), "
            "generation=max(generation, excluded.generation)",
            (number, file, generation),
        )

    def put_deleted(self, grave: DeletedStreamRow) -> None:
        self._db.execute("INSERT OR REPLACE INTO graves VALUES(?, ?, ?, ?)", tuple(grave))

    def forget_deleted(self, number: int) -> None:
        self._db.execute("DELETE FROM graves WHERE number=?", (number,))

    def delete_stream(self, number: int) -> None:
        self.drop_blocks(number, 2**62)
        for table in ("segments", "heads"):
            self._db.execute(f"DELETE FROM {table} WHERE number=?", (number,))  # noqa: S608 - names of ours


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
        """Times and numbers of streams that retention has to examine, soonest first, after the given one."""
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
        """Streams with unneeded objects, by number, with the journal file of the trim."""
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
        """Objects are deleted as of the journal file; later trims are still to be done."""
        self._db.execute("DELETE FROM trims WHERE number=? AND file<=?", (number, file))

    def delete_stream(self, number: int) -> None:
        if self.exist():
            for table in ("forks", "due", "trims"):
                self._db.execute(f"DELETE FROM {table} WHERE number=?", (number,))  # noqa: S608 - names of ours


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
    """Available as `HotDatabase.companions`."""

    def __init__(self, db: HotDatabase) -> None:
        self._db = db
        self._exist = False

    def exist(self) -> bool:
        if not self._exist:
            self._exist = self._db.one("SELECT 1 FROM sqlite_schema WHERE name='quarantined'") is not None
        return self._exist

    # -- reading ---------------------------------------------------------------------------------------

    def files_of(self, number: int) -> Iterator[IndexFile]:
        if self.exist():
            for row in self._db.rows("SELECT info FROM companions WHERE number=?", number):
                yield _decode_index_file(cast("bytes", row[0]))

    def quarantined(self, number: int) -> Iterator[QuarantinedSegment]:
        if self.exist():
            for row in self._db.rows("SELECT info FROM quarantined WHERE number=?", number):
                yield _decode_quarantined(cast("bytes", row[0]))

    def described_after(self, number: int, limit: int) -> list[int]:
        """Streams with documents that define an index plan, by number."""
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
        """Deletes an index file, or a segment's quarantine."""
        for table in ("companions", "quarantined"):
            self._db.execute(f"DELETE FROM {table} WHERE number=? AND object=?", (number, key))  # noqa: S608

    def trim(self, number: int, earliest: int) -> None:
        """Deletes files of trimmed entries, and aggregates that include some."""
        self._db.execute(
            "DELETE FROM companions WHERE number=?1 AND "
            "(last<=?2 OR (first<=?2 AND object LIKE 'companions/%/agg/%'))",
            (number, earliest),
        )

    def delete_stream(self, number: int) -> None:
        if self.exist():
            for table in ("companions", "quarantined"):
                self._db.execute(f"DELETE FROM {table} WHERE number=?", (number,))  # noqa: S608


DOCUMENT_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS documents(
    number INTEGER NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, PRIMARY KEY(number, key));
"""


class DocumentTable:
    def __init__(self, db: HotDatabase) -> None:
        self._db = db

    def documents_of(self, number: int) -> dict[str, bytes]:
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


SUBSCRIPTION_PREFIX: Final = "subscription/"
LINK_PREFIX: Final = "subscription-link/"
SECRETS_PREFIX: Final = "secret/"

_META_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS meta_changes(subject TEXT PRIMARY KEY, file INTEGER NOT NULL) WITHOUT ROWID"
)


def meta_subject(key: str) -> str | None:
    """None: not stored on the object store."""
    if key.startswith(SUBSCRIPTION_PREFIX):
        return key
    if key.startswith(LINK_PREFIX):
        return SUBSCRIPTION_PREFIX + key[len(LINK_PREFIX) :].partition("/")[0]
    return SECRETS_PREFIX if key.startswith(SECRETS_PREFIX) else None


class MetaTables:
    def __init__(self, db: HotDatabase) -> None:
        self._db = db

    def exist(self) -> bool:
        return self._db.one("SELECT 1 FROM sqlite_schema WHERE name='meta_changes'") is not None

    # -- reading ---------------------------------------------------------------------------------------

    def newest_file(self) -> int:
        """The last journal file with a change, -1 if there is none."""
        row = self._db.one("SELECT max(file) FROM meta_changes") if self.exist() else None
        return -1 if row is None or row[0] is None else cast("int", row[0])

    def changed_since(self, file: int, after: str, limit: int) -> list[str]:
        """Subjects with changes in later journal files, in order, after the given one."""
        if not self.exist():
            return []
        query = "SELECT subject FROM meta_changes WHERE file>? AND subject>? ORDER BY subject LIMIT ?"
        return [cast("str", row[0]) for row in self._db.rows(query, file, after, limit)]

    def facts_of(self, subject: str) -> dict[str, bytes]:
        """All facts of a subject by key; none if it was removed."""
        if subject == SECRETS_PREFIX:
            return self._below(SECRETS_PREFIX)
        row = self._db.one("SELECT value FROM meta WHERE key=?", subject)
        if row is None:
            return {}
        return {
            subject: cast("bytes", row[0]),
            **self._below(LINK_PREFIX + subject[len(SUBSCRIPTION_PREFIX) :] + "/"),
        }

    def _below(self, prefix: str) -> dict[str, bytes]:
        """The end of a key range: '0' comes right after '/'."""
        query = "SELECT key, value FROM meta WHERE key>? AND key<? ORDER BY key"
        rows = self._db.rows(query, prefix, prefix[:-1] + "0")
        return dict(cast("tuple[str, bytes]", row) for row in rows)

    # -- writing (checkpointer only) ---------------------------------------------------------------------

    def changed(self, keys: Iterable[str], file: int) -> None:
        """Before the facts themselves are written. A journal file changed these."""
        if not self.exist():
            self._db.execute(_META_SCHEMA)
            keys = [*keys, *self._db.meta()]
        for subject in {meta_subject(key) for key in keys} - {None}:
            self._db.execute("INSERT OR REPLACE INTO meta_changes VALUES(?, ?)", (subject, file))
