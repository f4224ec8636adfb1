"""Restoring streams from manifests, and the hot store that a bootstrap builds from them.

Entries that were acknowledged after the last recorded one are lost with the disk. So every stream continues
in a new epoch, and an offset of a lost entry never resolves to a new one.

The hot store and the list of what was found are in a separate directory until all is done, so a killed
bootstrap leaves nothing that looks like a hot store. Everything runs on one thread, in large transactions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, cast

import apsw
import msgspec

from tailrace.log import listing
from tailrace.log.model import NO_LIFETIME, ColdTotals, Lifetime, Stream, Tombstone
from tailrace.log.stored_streams import decode_stream, encode_tombstone
from tailrace.storage.hot_store.database import Execute, HotDatabase
from tailrace.storage.hot_store.tables import DeletedStreamRow, SegmentRow
from tailrace.storage.manifest_recording import encode_deleted
from tailrace.storage.manifests.model import ManifestHead, RecordedLifetime
from tailrace.storage.retention_rules import put_due, put_stream
from tailrace.storage.segments.index_files import IndexFile
from tailrace.storage.segments.model import SegmentInfo, make_stream_id

Epochs = tuple[tuple[int, int], ...]
# Consecutive entries: those after the first number, up to and including the second.
RestoredRange = tuple[int, int]


class ForkSource(NamedTuple):
    """What a fork needs from the restored stream it comes from."""

    number: int
    tail: int
    last_ns: int
    runs: tuple[RestoredRange, ...]


class SegmentTotals:
    """Totals of the segments of a stream, added oldest first."""

    def __init__(self, earliest: int = 0) -> None:
        self._earliest = earliest
        self.entries = self.payload_bytes = self.last_ns = 0
        self.segments = self.segment_bytes = 0
        self.runs: list[RestoredRange] = []

    def add(self, info: SegmentInfo) -> None:
        self.entries += info.rows
        self.last_ns = info.last_ns
        if info.last > self._earliest:  # an older one is retained for forks only
            self.payload_bytes += info.payload_bytes
            self.segments += 1
            self.segment_bytes += info.bytes
        if self.runs and self.runs[-1][1] == info.first - 1:
            self.runs[-1] = (self.runs[-1][0], info.last)
        else:
            self.runs.append((info.first - 1, info.last))


def raise_epoch(epochs: Epochs, through: int) -> Epochs:
    """The epochs of a stream that continues after entry `through`. Epochs without entries are skipped."""
    retained = tuple(pair for pair in epochs if pair[1] <= through) or epochs[:1]
    return (*retained, (epochs[-1][0] + 1, through + 1))


def restored_head(head: ManifestHead, source: ForkSource | None) -> ManifestHead:
    """The new head of a restored stream. It is recorded first: the next restore must know of this one."""
    if head.deleted is not None:
        # A later use of the name may be lost without a trace.
        deleted = msgspec.structs.replace(head.deleted, epoch=head.deleted.epoch + 1)
        return msgspec.structs.replace(head, deleted=deleted)
    if source is not None and source.tail < head.fork_entry == head.uploaded_through:
        # Some of what it inherits was never recorded: it ends where its source does.
        through = source.tail
        head = msgspec.structs.replace(head, fork_entry=through, uploaded_through=through, tail=through)
    return msgspec.structs.replace(head, epochs=raise_epoch(head.epochs, head.uploaded_through))


def restored_ranges(
    head: ManifestHead, source: ForkSource | None, sums: SegmentTotals
) -> tuple[RestoredRange, ...]:
    """What is stored of all that a stream and its forks may show: its own entries and what it inherits."""
    if source is None:
        return tuple(sums.runs)
    runs = [(after, min(last, head.fork_entry)) for after, last in source.runs if after < head.fork_entry]
    for after, last in sums.runs:
        if runs and runs[-1][1] == after:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((after, last))
    return tuple(runs)


def restored_earliest(head: ManifestHead, source: ForkSource | None) -> int:
    """The entry after which a restored stream can be read: earlier ones were removed by retention or lost."""
    inherits = () if source is None else source.runs
    stored = (after for after, last in inherits if after < head.fork_entry <= last)
    return max(head.earliest, min(stored, default=head.fork_entry))


def restored_stream(
    number: int, head: ManifestHead, source: ForkSource | None, sums: SegmentTotals, now_ns: int
) -> Stream:
    """The stream as the hot store gets it. All its entries are in segments."""
    stream = Stream(number, head.name, head.created_ns)
    stream.incarnation = head.incarnation
    stream.epochs = head.epochs
    stream.bind(head.content_type)
    stream.lifetime = _restored_lifetime(head.lifetime)
    stream.requested_lifetime = _restored_lifetime(head.asked)
    # When it was last used is not known, so its TTL starts again.
    stream.touched_ns = stream.touched_saved_ns = (
        now_ns if head.lifetime.ttl_s is not None else head.touched_ns
    )
    stream.closed = stream.visible_closed = head.closed
    stream.closed_by = head.closed_by
    stream.tail = stream.visible = stream.stored = stream.sealed = head.uploaded_through
    stream.size_bytes = stream.sealed_bytes = sums.payload_bytes
    stream.cold = ColdTotals(sums.segments, sums.segment_bytes, head.generation)
    stream.last_ns = max(head.tail_ns, sums.last_ns)
    if source is not None and not stream.last_ns:
        stream.last_ns = source.last_ns
    stream.seq = head.seq
    stream.parent = 0 if source is None else source.number
    stream.fork_entry = head.fork_entry
    stream.fork_sub = head.fork_sub
    stream.gone = head.gone
    stream.gone_reason = head.gone_reason
    stream.earliest = restored_earliest(head, source)
    return stream


def _restored_lifetime(recorded: RecordedLifetime) -> Lifetime:
    found = Lifetime(recorded.ttl_s, recorded.expires_ns, recorded.retention_s, recorded.retention_bytes)
    return NO_LIFETIME if found == NO_LIFETIME else found


WAITING, RESTORED, DROPPED = 0, 1, 2

_FOUND = """
CREATE TABLE found(
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL, incarnation INTEGER NOT NULL,
    source TEXT, etag TEXT NOT NULL, head BLOB NOT NULL, state INTEGER NOT NULL DEFAULT 0,
    source_number INTEGER NOT NULL DEFAULT 0, tail INTEGER, last_ns INTEGER, runs BLOB);
CREATE INDEX found_by_name ON found(name, incarnation);
CREATE INDEX found_waiting ON found(number) WHERE state=0;
CREATE INDEX found_forks ON found(source) WHERE source IS NOT NULL;
"""
_ROW = (
    "f.number, f.id, f.etag, f.head, "
    "NOT EXISTS (SELECT 1 FROM found n WHERE n.name=f.name AND n.incarnation>f.incarnation)"
)


class FoundHead(NamedTuple):
    stream_id: str
    name: str
    incarnation: int
    source_id: str | None
    etag: str
    head: bytes


class WaitingHead(NamedTuple):
    """A head that was found and has yet to be restored. Only the newest use of a name becomes a stream."""

    number: int
    stream_id: str
    etag: str
    head: bytes
    newest: bool
    source: ForkSource | None


class RestoreOutcome(NamedTuple):
    """The result of a head: a stream, a tombstone, or a deleted stream whose objects remain.

    The tombstone of an earlier use of a name is skipped (`passed`).
    """

    kind: Literal["stream", "tombstone", "grave", "passed"]
    stream: Stream
    generation: int = 0
    producers: Mapping[str, tuple[int, int]] = {}
    tombstone: Tombstone | None = None
    runs: tuple[RestoredRange, ...] = ()


class RestoreStore:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "hot.db"
        self.db = HotDatabase(self.path, writer=True)
        connection = apsw.Connection(str(directory / "found.db"))
        self._found = cast("Execute", connection.execute)  # pyright: ignore[reportUnknownMemberType]
        self._close_found = connection.close
        self._found("PRAGMA journal_mode=OFF")
        self._found("PRAGMA synchronous=OFF")
        for statement in _FOUND.split(";\n"):
            if statement.strip():
                self._found(statement)
        self._encode = msgspec.msgpack.Encoder().encode

    def close(self) -> None:
        """Everything is in the one file afterwards."""
        self.db.close()
        self._close_found()

    # -- what was found --------------------------------------------------------------------------------

    def unknown(self, stream_ids: Sequence[str]) -> list[str]:
        return [
            stream_id
            for stream_id in stream_ids
            if self._found("SELECT 1 FROM found WHERE id=?", (stream_id,)).fetchone() is None
        ]

    def add_found(self, heads: Sequence[FoundHead]) -> None:
        self._found("BEGIN")
        for head in heads:
            self._found(
                "INSERT INTO found(id, name, incarnation, source, etag, head) VALUES(?, ?, ?, ?, ?, ?)",
                tuple(head),
            )
        self._found("COMMIT")

    def next_waiting(self, limit: int) -> list[WaitingHead]:
        """Streams that are no forks first, then forks of what is restored; at last those without a source."""
        rows = self._found(
            f"SELECT {_ROW} FROM found f WHERE state=0 AND source IS NULL ORDER BY number LIMIT ?",  # noqa: S608
            (limit,),
        )
        if found := [_decode_waiting(row) for row in rows]:
            return found
        rows = self._found(
            f"SELECT {_ROW}, s.number, s.tail, s.last_ns, s.runs FROM found f "  # noqa: S608
            "JOIN found s ON s.id=f.source AND s.state=1 WHERE f.state=0 ORDER BY f.number LIMIT ?",
            (limit,),
        )
        if found := [_decode_waiting(row) for row in rows]:
            return found
        rows = self._found(f"SELECT {_ROW} FROM found f WHERE state=0 ORDER BY number LIMIT ?", (limit,))  # noqa: S608
        return [_decode_waiting(row) for row in rows]

    # -- what is restored ------------------------------------------------------------------------------

    def put(
        self,
        outcomes: Sequence[RestoreOutcome],
        segments: Sequence[tuple[int, SegmentInfo]],
        index_files: Sequence[tuple[int, IndexFile]] = (),
    ) -> None:
        db, cold = self.db, self.db.cold
        with db.write():
            for number, info in segments:
                row = SegmentRow(
                    info.first, info.last, self._encode(info), b""
                )  # footers are fetched if read
                cold.put_segment(number, row, info.last_ns)
            for number, index_file in index_files:
                db.index_files.put(number, index_file)
            for outcome in outcomes:
                self._put(outcome)
        self._found("BEGIN")
        for outcome in outcomes:
            stream, state = outcome.stream, RESTORED if outcome.kind == "stream" else DROPPED
            runs = self._encode(outcome.runs)
            self._found(
                "UPDATE found SET head=x'', state=?, source_number=?, tail=?, last_ns=?, runs=? "
                "WHERE number=?",
                (state, stream.parent, stream.tail, stream.last_ns, runs, stream.number),
            )
        self._found("COMMIT")

    def _put(self, outcome: RestoreOutcome) -> None:
        db, stream = self.db, outcome.stream
        if outcome.kind == "grave":
            self._dig(stream, stream.created_ns, "deleted")
        elif outcome.tombstone is not None:
            self._displace(stream)
            image = encode_tombstone(outcome.tombstone)
            db.put_tombstone(stream.name, outcome.tombstone.deleted_ns, image)
        elif outcome.kind == "stream":
            self._displace(stream)
            for producer_id, (epoch, seq) in outcome.producers.items():
                db.put_producer(stream.number, producer_id, epoch, seq)
            stream.producers_known = not outcome.producers
            for key, document in (stream.documents or {}).items():
                db.documents.put(stream.number, key, document)
            self._put_stream(stream)
            db.cold.mark_head_recorded(stream.number, 0, outcome.generation)

    def _displace(self, stream: Stream) -> None:
        """An earlier use of the name that was restored before this one was found, or its tombstone."""
        self.db.delete_tombstone(stream.name)
        raw = self.db.image_by_name(stream.name)
        if raw is not None:
            earlier = decode_stream(raw)
            self.db.delete_stream(earlier.number)
            self._dig(earlier, earlier.created_ns, "deleted")
            self._found("UPDATE found SET state=? WHERE number=?", (DROPPED, earlier.number))

    def _put_stream(self, stream: Stream) -> None:
        put_stream(self.db, stream)
        put_due(self.db, stream)

    def _dig(self, stream: Stream, at_ns: int, reason: str) -> None:
        folder = make_stream_id(stream.name, stream.incarnation)
        grave = DeletedStreamRow(stream.number, stream.name, folder, encode_deleted(stream, at_ns, reason))
        self.db.cold.put_deleted(grave)

    # -- the end ---------------------------------------------------------------------------------------

    def settle_forks(self, now_ns: int) -> int:
        """Counts forks, and removes soft-deleted streams that no fork needs any more; how many those are."""
        with self.db.write():
            rows = self._found(
                "SELECT source_number, count(*) FROM found WHERE state=1 AND source_number>0 "
                "GROUP BY source_number"
            )
            for number, forks in cast("list[tuple[int, int]]", list(rows)):
                stream = self._stream(number)
                stream.forks = forks
                self._put_stream(stream)
            gone = [cast("int", row[0]) for row in self.db.rows("SELECT number FROM streams WHERE gone=1")]
            return sum(self._remove_unneeded(number, now_ns) for number in gone)

    def _remove_unneeded(self, number: int, now_ns: int) -> int:
        removed = 0
        while number:
            raw = self.db.image_by_number(number)
            stream = None if raw is None else decode_stream(raw)
            if stream is None or not stream.gone or stream.forks:
                break
            self.db.delete_stream(number)
            self._dig(stream, now_ns, stream.gone_reason)
            tombstone = Tombstone(stream.epoch, stream.incarnation, now_ns, stream.gone_reason)
            self.db.put_tombstone(stream.name, now_ns, encode_tombstone(tombstone))
            removed += 1
            number = stream.parent
            if number:
                source = self._stream(number)
                source.forks -= 1
                self._put_stream(source)
        return removed

    def _stream(self, number: int) -> Stream:
        raw = self.db.image_by_number(number)
        assert raw is not None
        return decode_stream(raw)

    def finish(self, first_epoch: int, at_ns: int) -> None:
        """Completes the database, so that a server can start from it."""
        row = self._found("SELECT coalesce(max(number), 0) FROM found").fetchone()
        assert row is not None
        with self.db.write():
            self.db.set_fact("next_number", cast("int", row[0]) + 1)
            self.db.set_fact("first_epoch", first_epoch)
            self.db.set_fact("bootstrapped_ns", at_ns)
            if self.db.count_streams():
                self.db.put_meta(listing.REGISTRY_SNAPSHOT_DUE, b"")


def _decode_waiting(row: tuple[object, ...]) -> WaitingHead:
    number, found_id, etag, head, newest, *more = cast("tuple[int, str, str, bytes, int, int]", row)
    source: ForkSource | None = None
    if more:
        source_number, tail, last_ns, runs = cast("tuple[int, int, int, bytes]", more)
        source = ForkSource(
            source_number, tail, last_ns, msgspec.msgpack.decode(runs, type=tuple[RestoredRange, ...])
        )
    return WaitingHead(number, found_id, etag, head, bool(newest), source)
