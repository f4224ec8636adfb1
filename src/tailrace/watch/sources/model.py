"""Changes, positions, durable progress and status of a source.

What every source gives: changes with a position, in the order in which they were committed there.

How far a source is. Written with every commit of its changes: position and changes are one.

What can be said of a source while the server runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast

import apsw
import msgspec
import orjson

from tailrace.common.clock import Clock
from tailrace.common.timestamps import format_rfc3339, parse_rfc3339_ns
from tailrace.log.journal import JournalScan, files_to_replay
from tailrace.log.records import Meta, decode_plain_append, decode_record
from tailrace.watch.document_view import Execute

_TOKEN: Final = re.compile(r"([0-9a-f]{16})/(-1|[0-9]{1,18})\Z")


class SourcePosition(NamedTuple):
    """How far a source has been read: the commit, the message inside it, and the number of the last change.

    A message can be several changes (a key that changes is a delete and an insert) and then `change`, which
    counts those, is ahead of `ordinal`, which counts messages.
    """

    lsn: int
    ordinal: int
    change: int

    @property
    def token(self) -> str:
        """The position as a source's resume token."""
        return f"{self.lsn:016x}/{self.ordinal}"

    @property
    def place(self) -> tuple[int, int]:
        return self.lsn, self.ordinal


START_POSITION: Final = SourcePosition(0, -1, -1)


# full: as the change left it. lookup: as somebody found it later. missing: it was gone when it was looked up.
ImageKind = Literal["full", "lookup", "missing"]


class SourceChange(NamedTuple):
    """One change as the source says it.

    put: the document is now `data`; the fields in `unchanged` are what they were (in the document `was`, if
    its key was another one). delete: it is gone. clear: all documents of the collection are gone.
    A source whose places have names of their own says them in `token`; one that knows what the document was
    before says it in `before`.
    """

    lsn: int
    ordinal: int
    txn: str | None
    time: str
    op: Literal["put", "delete", "clear"]
    collection: str
    key: str = ""
    data: bytes = b""
    unchanged: tuple[str, ...] = ()
    was: str | None = None
    token: str = ""
    image: ImageKind = "full"
    before: bytes | None = None
    replaces: bool = False  # the whole document was given, not some of its fields


class GapError(Exception):
    """The source cannot go on from where it was: what happened in between is not known."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SourceError(Exception):
    """The source cannot be read as it is set up; the message says what to do about it."""


def read_position_token(token: str) -> tuple[int, int] | None:
    found = _TOKEN.match(token)
    return None if found is None else (int(found[1], 16), int(found[2]))


def format_lsn(lsn: int) -> str:
    """A position as changes carry it: the order of the texts is the order of the positions."""
    return f"{lsn:016x}"


SOURCES_PREFIX: Final = "__sources__/"
_PROGRESS_FACT: Final = "watch/source/"

# new: nothing was read yet. loading: is copied. live: is followed. stale: something is missing.
SourcePhase = Literal["new", "loading", "live", "stale"]


class CollectionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one collection has been read, of a source where each has a log of its own (MongoDB)."""

    token: str
    lsn: int
    ordinal: int = START_POSITION.ordinal
    index: int = START_POSITION.change
    ended: bool = False  # the token is that of the log's end: another one begins behind it

    @property
    def position(self) -> SourcePosition:
        return SourcePosition(self.lsn, self.ordinal, self.index)


class SourceProgress(msgspec.Struct, frozen=True, kw_only=True):
    """All that has to be known after a crash."""

    phase: SourcePhase = "new"
    epoch: int = 0  # rises at every start
    lsn: int = START_POSITION.lsn
    ordinal: int = START_POSITION.ordinal
    index: int = START_POSITION.change
    safe: int = 0  # the slot was never moved further than to here
    system: str | None = None  # which database it was
    keys: dict[str, list[str]] = {}
    reason: str | None = None  # why it is stale
    rescan: bool = False  # a stale source is to be loaded again
    again: int = 0  # of a stream: the entry where a snapshot begins that has not ended
    making: bool = False  # of PostgreSQL: the slot may be there, and then it is ours
    marks: dict[str, CollectionProgress] = {}  # of MongoDB, by collection

    @property
    def position(self) -> SourcePosition:
        """Of MongoDB: where the last change was, of whichever collection."""
        return SourcePosition(self.lsn, self.ordinal, self.index)

    @property
    def tokens(self) -> dict[str, str]:
        return {collection: mark.token for collection, mark in self.marks.items()}

    def at(self, position: SourcePosition) -> SourceProgress:
        return self.replaced(lsn=position.lsn, ordinal=position.ordinal, index=position.change)

    def position_in(self, collection: str) -> SourcePosition:
        mark = self.marks.get(collection)
        return self.position if mark is None else mark.position

    def marked(self, collection: str, position: SourcePosition, token: str, *, ended: bool) -> SourceProgress:
        """One collection was read up to a position, and nothing is behind it up to the token."""
        lsn, ordinal, index = position
        known = self.marks.get(collection)
        ended = ended or (known is not None and known.ended and known.token == token)
        mark = CollectionProgress(token=token, lsn=lsn, ordinal=ordinal, index=index, ended=ended)
        return self.replaced(marks={**self.marks, collection: mark})

    def replaced(self, **changed: Any) -> SourceProgress:
        return msgspec.structs.replace(self, **changed)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def entry(self, now_ns: int) -> bytes:
        """What is said of it in the source's stream."""
        tokens = {"tokens": self.tokens} if self.marks else {}
        return orjson.dumps(
            {
                "v": 1,
                "kind": "progress",
                "phase": self.phase,
                "epoch": self.epoch,
                "token": self.position.token,
                **tokens,
                "lsn": f"{self.lsn:016x}",
                "index": self.index,
                "reason": self.reason,
                "at": format_rfc3339(now_ns),
            }
        )


def progress_fact(database: str, name: str) -> str:
    return f"{_PROGRESS_FACT}{database}/{name}"


def source_stream_name(database: str, name: str) -> str:
    return f"{SOURCES_PREFIX}{database}/{name}"


def decode_progress(raw: bytes | None) -> SourceProgress:
    return SourceProgress() if raw is None else msgspec.json.decode(raw, type=SourceProgress)


def read_source_progress(data_dir: Path) -> dict[str, SourceProgress]:
    """The progress of all sources in a data directory, by database and name. A server may be at work."""
    found: dict[str, bytes] = {}
    checkpoint_seq = 0
    if (data_dir / "hot.db").is_file():
        connection = apsw.Connection(str(data_dir / "hot.db"), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            execute = cast("Execute", connection.execute)  # pyright: ignore[reportUnknownMemberType]
            for key, value in execute("SELECT key, value FROM meta"):
                found[str(key)] = cast("bytes", value)
            row = execute("SELECT value FROM facts WHERE key='journal_seq'").fetchone()
            checkpoint_seq = 0 if row is None else int(str(row[0]))
        finally:
            connection.close()
    for path, header, end in files_to_replay(data_dir / "journal", checkpoint_seq):
        for _, payload in JournalScan(path, header, end):
            if decode_plain_append(payload) is None:
                for op in decode_record(payload):
                    if isinstance(op, Meta):
                        found[op.key] = op.value or b""
    return {
        key.removeprefix(_PROGRESS_FACT): decode_progress(value)
        for key, value in sorted(found.items())
        if key.startswith(_PROGRESS_FACT) and value
    }


class SourceStatus(msgspec.Struct, kw_only=True):
    """Numbers of one process; what has to outlive it is in the progress."""

    clock: Clock
    connected: bool = False
    error: str | None = None
    restarts: int = 0
    gaps: int = 0
    loaded: int | None = None  # rows of the last copy that this process made
    confirmed: int = 0  # where the slot is
    lag_bytes: int | None = None
    wal_status: str | None = None
    retained_bytes: int | None = None
    last_ns: int = 0  # when the last change was committed at the source
    behind: bool = True  # there may be more to read
    lag_changes: int = 0  # that the source is known to have and that are not written down yet

    def changed(self, time: str) -> None:
        self.last_ns = parse_rfc3339_ns(time) or self.last_ns

    def caught_up(self, all_read: bool) -> None:
        self.behind = not all_read
        # How many more a database has it does not say: at least one.
        self.lag_changes = 0 if all_read else max(1, self.lag_changes)

    @property
    def lag_s(self) -> float:
        """How old the newest change is that was read, as long as there may be more."""
        if not self.behind or not self.last_ns:
            return 0.0
        return max(0, self.clock.now_ns() - self.last_ns) / 1e9

    def to_json(self) -> dict[str, Any]:
        """What is not known is null: the lag of a source that cannot be reached, or was not read yet."""
        is_measured = self.connected and (not self.behind or self.lag_changes > 0)
        is_timed = self.connected and (not self.behind or self.last_ns > 0)
        return {
            "connected": self.connected,
            "error": self.error,
            "restarts": self.restarts,
            "gaps": self.gaps,
            "loaded": self.loaded,
            "lagBytes": self.lag_bytes,
            "lagChanges": self.lag_changes if is_measured else None,
            "lagSeconds": round(self.lag_s, 3) if is_timed else None,
            "walStatus": self.wal_status,
            "retainedBytes": self.retained_bytes,
            "lastChangeAt": format_rfc3339(self.last_ns) if self.last_ns else None,
        }
