"""Salvage: copies everything readable from a damaged data directory into a new one.

The old directory is only read. A log has no gaps: entries after a lost range follow those before it, with new
numbers in a new epoch, so that an offset issued before never resolves to another entry. Missing entries are
counted for each stream.

SQLite aborts a query at a damaged page. So rows of the hot store are read up to that place and then from
after it: by row id if the table has them, else from the end backwards.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, cast

import apsw
import msgspec

from tailrace.common.private_files import sync_directory
from tailrace.log.journal_salvage import SalvagedFile, files_after, read_pieces, readable_blocks
from tailrace.log.model import NO_LIFETIME, Block, Stream
from tailrace.log.records import UNREADABLE_ERRORS, Append, Create, Meta, Op, Recorded, Sealed, decode_record
from tailrace.log.stored_streams import StoredStreams, decode_block, decode_stream
from tailrace.storage.checkpointer import FileCheckpoint
from tailrace.storage.data_directory import make_directory
from tailrace.storage.hot_store.database import BlockRow, Execute, HotDatabase
from tailrace.storage.restore import raise_epoch
from tailrace.storage.retention_rules import put_due, put_stream

# Row numbers in a damaged place that are tried one by one.
TRIED_MAX: Final = 100_000
ROWID_MAX: Final = 2**62
COMMIT_ROWS: Final = 1000
Row = tuple[object, ...]


def copy_file(source: Path, target: Path, copied: Callable[[int], None]) -> int:
    """Copies the readable part of a file, with zeros for the rest; returns the number of unreadable bytes."""
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
    """Whether SQLite finds no damage in a copy of a database, after applying its WAL."""
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
    """The readable rows of one table; afterwards `damaged` is whether some are not readable."""

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


STREAMS_AT_ONCE: Final = 1000
CENTURY_NS: Final = 100 * 365 * 86_400 * 10**9
UNNAMED_PREFIX: Final = "salvaged/"  # streams whose names are lost get their number after this prefix
# Rebuilt by a server: copies of what is in the bucket, and unfinished work.
_DERIVED: Final = frozenset({"cache", "companions", "lexicons", "spool", "lock"})
_DATABASES: Final = ("hot.db", "watch.db")
Hole = tuple[int, int]  # the first and the last entry that are lost


class StreamLoss(msgspec.Struct):
    """What is missing of one stream."""

    stream: str
    entries: int = 0
    reasons: dict[str, int] = {}  # to entries


class SalvageReport(msgspec.Struct):
    """What was copied, and what is missing."""

    streams: int = 0
    entries: int = 0  # in the hot store; sealed ones are in the object store
    files: int = 0
    bytes: int = 0
    journal_records: int = 0
    entries_missing: int = 0
    losses: dict[str, StreamLoss] = {}
    problems: list[str] = []

    @property
    def complete(self) -> bool:
        return not self.losses and not self.problems

    def lost(self, stream: str, entries: int, reason: str) -> None:
        if entries <= 0:
            return
        found = self.losses.setdefault(stream, StreamLoss(stream))
        found.entries += entries
        found.reasons[reason] = found.reasons.get(reason, 0) + entries
        self.entries_missing += entries

    def copied(self, size: int) -> None:
        self.bytes += size


def salvage(old: Path, new: Path, workers: Sequence[tuple[Path, Path]], report: SalvageReport) -> None:
    """Fills `new`, which must not exist. `workers`: the old directory of each, and its new one."""
    make_directory(new)
    new.chmod(0o700)
    for old_worker, new_worker in workers:
        new_worker.mkdir(parents=True, exist_ok=True, mode=0o700)
        DirectorySalvage(old_worker, new_worker, report).run()
    sources = dict(workers) | {old: new}
    for source, target in sources.items():
        skipped = {path for path in sources if path != source}
        copy_rest(source, target, skipped, report)
    for target in dict.fromkeys(sources.values()):
        sync_directory(target)


def copy_rest(source: Path, target: Path, skipped: set[Path], report: SalvageReport) -> None:
    """Everything but the journal, the hot store and what is derived: identity, keys, the local objects."""
    for path in sorted(source.iterdir()):
        name = path.name
        database = next((base for base in _DATABASES if name.startswith(base)), "")
        if name in _DERIVED or name == "journal" or database or name.endswith(".tmp"):
            continue
        if path in skipped or any(path in other.parents for other in skipped):
            continue  # a separate worker
        _copy_tree(path, target / name, report)
    if (source / "watch.db").exists():
        _copy_view(source, target, report)


def _copy_tree(source: Path, target: Path, report: SalvageReport) -> None:
    if source.is_dir() and not source.is_symlink():
        target.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(source.iterdir()):
            _copy_tree(path, target / path.name, report)
        sync_directory(target)
    elif source.is_file():
        try:
            lost = copy_file(source, target, report.copied)
            report.files += 1
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # of the new disk
            report.problems.append(f"{source} cannot be copied: {error.strerror}")
            return
        if lost:
            report.problems.append(f"{lost:,} bytes of {source} cannot be read")


def _copy_view(source: Path, target: Path, report: SalvageReport) -> None:
    """The documents of collections. They are derived from the salvaged streams."""
    for name in ("watch.db", "watch.db-wal"):
        if (source / name).exists():
            _copy_tree(source / name, target / name, report)
    if not is_sound(target / "watch.db"):
        for path in target.glob("watch.db*"):
            path.unlink()
        report.problems.append(
            f"{source / 'watch.db'} is damaged; documents are built again from their streams"
        )


class DirectorySalvage:
    """The journal and the hot store of one server, or of one worker."""

    def __init__(self, old: Path, new: Path, report: SalvageReport) -> None:
        self._old = old
        self._new = new
        self._report = report
        # By number of a stream: what is lost of it, in its old numbers.
        self._holes: dict[int, list[Hole]] = {}
        self._rebuilt = False

    def run(self) -> None:
        seq_known = self._hot_store()
        make_directory(self._new / "journal")
        store = StoredStreams(self._new / "hot.db", writer=True)
        db = store.db
        journal = self._old / "journal"
        seq = db.journal_seq
        files = files_after(journal, seq) if journal.is_dir() else []
        self._note_gaps(files, seq if seq_known else None)
        sealed_later = self._sealed_in(files)
        with db.write():
            for table in (db.cold, db.documents, db.index_files, db.trims):
                table.create()
            self._repair(db, sealed_later)
        for file in files:
            self._fold(store, file)
        with db.write():
            row = db.one("SELECT coalesce(sum(length(body)), 0) FROM blocks")
            db.set_fact("hot_bytes", cast("int", row[0] if row else 0))
        self._count(db)
        db.connection.wal_checkpoint(mode=3)
        db.close()
        sync_directory(self._new)

    # -- the hot store -------------------------------------------------------------------------------------

    def _hot_store(self) -> bool:
        """Copies it, or its readable rows; False if its position in the journal is unknown."""
        lost = 0
        for name in ("hot.db", "hot.db-wal"):
            if (self._old / name).exists():
                lost += copy_file(self._old / name, self._new / name, self._report.copied)
                self._report.files += 1
        path = self._new / "hot.db"
        if not path.exists():
            HotDatabase(path, writer=True).close()
            return True
        if is_sound(path) and not lost:
            return True
        for name in ("hot.db", "hot.db-wal"):
            if (self._new / name).exists():
                (self._new / name).rename(self._new / name.replace("hot", "damaged", 1))
        for leftover in self._new.glob("hot.db-*"):
            leftover.unlink()
        self._rebuilt = True
        db = HotDatabase(path, writer=True)
        damaged = copy_rows(self._new / "damaged.db", db)
        tables = ", ".join(f"{table} ({count:,} rows read)" for table, count in damaged.items())
        self._report.problems.append(f"{self._old / 'hot.db'} is damaged: {tables or 'only its indexes'}")
        number = db.one(
            "SELECT max(n) FROM (SELECT max(number) n FROM streams UNION SELECT max(number) FROM blocks)"
        )
        known = int(str(db.fact("next_number", 1)))
        seq_known = db.fact("journal_seq", None) is not None
        with db.write():
            db.set_fact("next_number", max(known, int(str((number and number[0]) or 0)) + 1))
        db.connection.wal_checkpoint(mode=3)
        db.close()
        for leftover in self._new.glob("damaged.db*"):
            leftover.unlink()
        return seq_known

    def _repair(self, db: HotDatabase, sealed_later: dict[int, int]) -> None:
        """Closes the holes between blocks, parents before their forks, and names streams without a name."""
        number = 0
        while rows := list(
            db.rows(
                "SELECT number, name, image FROM streams WHERE number>? ORDER BY number LIMIT ?",
                number,
                STREAMS_AT_ONCE,
            )
        ):
            for found, name, image in cast("list[tuple[int, str, bytes]]", rows):
                number = found
                try:
                    stream = decode_stream(image)
                except UNREADABLE_ERRORS:
                    self._report.problems.append(f"the image of stream {name!r} cannot be decoded")
                    db.execute("DELETE FROM streams WHERE number=?", (number,))
                    continue
                self._close_holes(db, stream, max(stream.sealed, sealed_later.get(number, 0)))
        query = "SELECT DISTINCT number FROM blocks WHERE number NOT IN (SELECT number FROM streams)"
        for row in list(db.rows(query)):
            self._name(db, cast("int", row[0]))

    def _note_unlisted(self, db: HotDatabase, stream: Stream) -> None:
        """Sealed entries whose segments are not listed any more: they are in the bucket, and not served."""
        begin = max(stream.earliest, stream.fork_entry)
        listed = sum(
            min(row.last, stream.sealed) - max(row.first - 1, begin)
            for row in db.cold.segments_within(stream.number, begin, stream.sealed)
        )
        unlisted = stream.sealed - begin - listed
        self._report.lost(
            stream.name, unlisted, "the list of its segments is damaged; they are in the bucket"
        )

    def _close_holes(self, db: HotDatabase, stream: Stream, sealed: int) -> None:
        if self._rebuilt:
            self._note_unlisted(db, stream)
        own: list[Hole] = []
        reached = sealed
        blocks: list[tuple[int, Block]] = []
        for rowid, block in self._blocks(db, stream.number):
            if block.last <= sealed:
                continue
            if block.first > reached + 1:
                own.append((reached + 1, block.first - 1))
            reached = block.last
            blocks.append((rowid, Block(block.first, b"", block.ends, block.times, None)))
        if reached < stream.tail:
            own.append((reached + 1, stream.tail))
        inherited = [
            (first, min(last, stream.fork_entry))
            for first, last in self._holes.get(stream.parent, ())
            if first <= stream.fork_entry
        ]
        holes = inherited + own
        if not holes:
            return
        self._holes[stream.number] = holes
        lost = sum(last - first + 1 for first, last in own)
        self._report.lost(stream.name, lost, "damaged page of the hot store")
        db.execute("DELETE FROM blocks WHERE number=? AND last<=?", (stream.number, sealed))
        for rowid, block in blocks:
            bounds = (shifted_entry(block.first, holes), shifted_entry(block.last, holes), rowid)
            db.execute("UPDATE blocks SET first=?, last=? WHERE rowid=?", bounds)
        through = shifted_entry(holes[0][0] - 1, holes)
        # What is listed before the gap stays; the first one after it starts the new epoch.
        stream.epochs = raise_epoch(stream.epochs, through)
        stream.tail = stream.visible = stream.stored = shifted_entry(stream.tail, holes)
        stream.fork_entry = shifted_entry(stream.fork_entry, holes)
        stream.sealed = max(shifted_entry(stream.sealed, inherited), stream.fork_entry)
        own_bytes = sum(payload_bytes(block, stream) for _, block in blocks)
        stream.size_bytes = stream.sealed_bytes + own_bytes
        put_stream(db, stream)
        put_due(db, stream)

    def _name(self, db: HotDatabase, number: int) -> None:
        """A stream of which there are entries and nothing else."""
        blocks = list(self._blocks(db, number))
        if not blocks:
            return
        body = db.one("SELECT body FROM blocks WHERE number=? ORDER BY first LIMIT 1", number)
        first = blocks[0][1]
        name = f"{UNNAMED_PREFIX}{number}"
        stream = Stream(number, name, first.times[0])
        stream.bind(guess_type(cast("bytes", body[0]) if body else b"", len(first.ends)))
        holes: list[Hole] = [(1, first.first - 1)] if first.first > 1 else []
        reached = first.first - 1
        for rowid, block in blocks:
            if block.first > reached + 1:
                holes.append((reached + 1, block.first - 1))
            reached = block.last
            bounds = (shifted_entry(block.first, holes), shifted_entry(block.last, holes), rowid)
            db.execute("UPDATE blocks SET first=?, last=? WHERE rowid=?", bounds)
        self._holes[number] = holes
        stream.tail = stream.visible = stream.stored = shifted_entry(reached, holes)
        stream.last_ns = blocks[-1][1].times[-1]
        stream.size_bytes = sum(payload_bytes(block, stream) for _, block in blocks)
        stream.producers_known = False
        self._report.problems.append(f"the name of stream {number} is lost; its entries are in {name!r}")
        self._report.lost(name, sum(last - at + 1 for at, last in holes), "sealed, or damaged page")
        put_stream(db, stream)

    def _blocks(self, db: HotDatabase, number: int) -> Iterator[tuple[int, Block]]:
        """Those that can be decoded, oldest first; the others are deleted."""
        query = "SELECT rowid, first, last, ends, times, keys, body FROM blocks WHERE number=? ORDER BY first"
        for row in list(db.rows("SELECT rowid FROM blocks WHERE number=? ORDER BY first", number)):
            found = db.one(query.replace("number=?", "rowid=?"), row[0])
            if found is None:
                continue
            raw = BlockRow(*cast("tuple[int, int, bytes, bytes, bytes | None, bytes]", found[1:]))
            try:
                block = decode_block(raw)
                fits = bool(block.ends) and block.ends[-1] == len(block.body) == max(block.ends)
            except (*UNREADABLE_ERRORS, ValueError, TypeError):
                fits = False
                block = None
            if block is None or not fits or len(block.times) != len(block.ends):
                db.execute("DELETE FROM blocks WHERE rowid=?", (row[0],))
            else:
                yield cast("int", row[0]), block

    # -- the journal ---------------------------------------------------------------------------------------

    def _note_gaps(self, files: list[SalvagedFile], seq: int | None) -> None:
        """Missing files. Their entries are counted when later entries follow."""
        for file in files:
            before = file.header.previous_seq if file.header is not None else (file.seq - 1 if seq else None)
            if seq is not None and before is not None and before > seq:
                self._report.problems.append(
                    f"journal files {seq + 1} to {before} are missing in {self._old / 'journal'}"
                )
            seq = file.seq

    def _sealed_in(self, files: list[SalvagedFile]) -> dict[int, int]:
        """How far streams are sealed according to the journal: earlier entries need no block."""
        found: dict[int, int] = {}
        for file in files:
            for piece in read_pieces(file):
                for op in () if piece.payload is None else _decode_ops(piece.payload):
                    if isinstance(op, Sealed) and op.segments:
                        found[op.stream] = max(found.get(op.stream, 0), op.segments[-1].last)
        return found

    def _fold(self, store: StoredStreams, file: SalvagedFile) -> None:
        db = store.db
        if file.header is None:
            self._report.problems.append(f"{file.path}: the header is damaged")
        with db.write():
            folding = FileCheckpoint(store, file.seq)
            for piece in read_pieces(file):
                if piece.payload is None:
                    place = f"{piece.bytes:,} bytes at byte {piece.position}"
                    self._report.problems.append(f"{file.path}: {place} are damaged")
                    continue
                self._report.journal_records += 1
                for op in _decode_ops(piece.payload):
                    self._apply(folding, op, f"{file.path}, byte {piece.position}")
            folding.write(CENTURY_NS)
        self._report.copied(file.path.stat().st_size)
        self._report.files += 1

    def _apply(self, folding: FileCheckpoint, op: Op, place: str) -> None:
        try:
            fitting = self._fitted(folding, op)
            if fitting is not None:
                folding.apply(fitting)
        except UNREADABLE_ERRORS as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            self._report.problems.append(f"{place}: {type(op).__name__.lower()} cannot be applied ({why})")

    def _fitted(self, folding: FileCheckpoint, op: Op) -> Op | None:
        """The operation as it can be applied to what is left; None if it cannot."""
        streams = folding.streams
        if isinstance(op, Append):
            stream = streams.get(op.stream) or self._unnamed(folding, op)
            return self._next(stream, op)
        if isinstance(op, Create) and (streams.get(op.stream) or streams.find(op.name)) is not None:
            return None  # the hot store has it
        if isinstance(op, Create) and op.parent:
            if streams.get(op.parent) is None:
                self._report.lost(op.name, op.fork_entry, "its source is lost")
                self._holes[op.stream] = [(1, op.fork_entry)] if op.fork_entry else []
                return msgspec.structs.replace(op, parent=0, fork_entry=0, fork_sub=0, epochs=op.epochs[-1:])
            holes = [hole for hole in self._holes.get(op.parent, ()) if hole[0] <= op.fork_entry]
            if holes:
                holes[-1] = (holes[-1][0], min(holes[-1][1], op.fork_entry))
                self._holes[op.stream] = holes
                entry = shifted_entry(op.fork_entry, holes)
                return msgspec.structs.replace(op, fork_entry=entry, epochs=raise_epoch(op.epochs, entry))
            return op
        if isinstance(op, Create | Meta | Recorded):
            return op
        if streams.get(op.stream) is None:
            self._report.problems.append(
                f"{type(op).__name__.lower()} of stream {op.stream}, whose name is lost, is left out"
            )
            return None
        return op

    def _next(self, stream: Stream, op: Append) -> Append | None:
        """The append moved to follow the last existing entry, with a new number."""
        holes = self._holes.get(stream.number, [])
        lost = sum(last - first + 1 for first, last in holes)
        expected = stream.tail + lost + 1
        if op.first > expected:
            self._report.lost(stream.name, op.first - expected, "damaged record of the journal")
            self._holes[stream.number] = [*holes, (expected, op.first - 1)]
            stream.epochs = raise_epoch(stream.epochs, stream.tail)
        elif op.first < expected and op.count:
            return None  # an earlier record had it
        time_ns = max(op.time_ns, stream.last_ns)
        return msgspec.structs.replace(op, first=stream.tail + 1, time_ns=time_ns)

    def _unnamed(self, folding: FileCheckpoint, op: Append) -> Stream:
        """A stream that was created in a part that is lost."""
        streams = folding.streams
        name = f"{UNNAMED_PREFIX}{op.stream}"
        self._report.problems.append(f"the name of stream {op.stream} is lost; its entries are in {name!r}")
        content_type = op.binds or guess_type(op.body, op.count)
        create = Create(op.stream, name, 0, ((0, 1),), op.time_ns, content_type, NO_LIFETIME, NO_LIFETIME)
        following = streams.next_number
        streams.next_number = op.stream
        folding.apply(create)
        streams.next_number = max(following, op.stream + 1)
        stream = streams.get(op.stream)
        assert stream is not None
        return stream

    def _count(self, db: HotDatabase) -> None:
        self._report.streams += db.count_streams()
        row = db.one("SELECT coalesce(sum(last - first + 1), 0) FROM blocks")
        self._report.entries += cast("int", row[0] if row else 0)


def shifted_entry(entry: int, holes: Sequence[Hole]) -> int:
    """The number of an entry without the gaps; of a lost one, that of the previous entry."""
    return entry - sum(min(last, entry) - first + 1 for first, last in holes if first <= entry)


def payload_bytes(block: Block, stream: Stream) -> int:
    return block.ends[-1] - stream.separator * (len(block.ends) - 1)


def guess_type(body: bytes, entries: int) -> str:
    """Restores a stream from its first entries if nothing else is known of it."""
    try:
        msgspec.json.decode(b"[" + body + b"]" if entries > 1 else body)
    except msgspec.DecodeError:
        return "application/octet-stream"
    return "application/json"


def _decode_ops(payload: bytes) -> list[Op]:
    try:
        return list(decode_record(payload))
    except UNREADABLE_ERRORS:
        return []
