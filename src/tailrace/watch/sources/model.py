"""Changes, positions, durable progress and runtime status of a source.

A source yields changes with positions in commit order. Its progress is committed together with the changes.
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
    """A position in a source: the commit, the message in it, and the number of the last change.

    One message may be several changes (a changed key is a delete and an insert); then `change` is ahead of
    `ordinal`, which counts messages.
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


# full: as of the change. lookup: read later. missing: deleted before it was looked up.
ImageKind = Literal["full", "lookup", "missing"]


class SourceChange(NamedTuple):
    """One change of a source.

    put: the document is now `data`; the fields in `unchanged` keep their value (of the document `was`, if the
    key changed). delete: the document was deleted. clear: all documents of the collection were deleted.
    `token` is the source's own name of the position, `before` the document before the change, if known.
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
    replaces: bool = False  # the whole document was replaced


class GapError(Exception):
    """The source cannot continue at its position: changes are missing."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SourceError(Exception):
    """The source cannot be read; the message says how to fix its setup."""


def read_position_token(token: str) -> tuple[int, int] | None:
    found = _TOKEN.match(token)
    return None if found is None else (int(found[1], 16), int(found[2]))


def format_lsn(lsn: int) -> str:
    """The LSN as text that sorts like the number."""
    return f"{lsn:016x}"


SOURCES_PREFIX: Final = "__sources__/"
_PROGRESS_FACT: Final = "watch/source/"

# new: nothing was read yet. loading: being copied. live: followed. stale: changes are missing.
SourcePhase = Literal["new", "loading", "live", "stale"]


class CollectionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one collection, for sources with a log per collection (MongoDB)."""

    token: str
    lsn: int
    ordinal: int = START_POSITION.ordinal
    index: int = START_POSITION.change
    ended: bool = False  # the log ended at the token; another one follows

    @property
    def position(self) -> SourcePosition:
        return SourcePosition(self.lsn, self.ordinal, self.index)


class SourceProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The durable state of a source."""

    phase: SourcePhase = "new"
    epoch: int = 0  # increases at every start
    lsn: int = START_POSITION.lsn
    ordinal: int = START_POSITION.ordinal
    index: int = START_POSITION.change
    safe: int = 0  # the slot was never advanced beyond
    system: str | None = None  # identifier of the database
    keys: dict[str, list[str]] = {}
    reason: str | None = None  # why it is stale
    rescan: bool = False  # load a stale source again
    again: int = 0  # stream: first entry of an unfinished snapshot
    making: bool = False  # PostgreSQL: the slot may have been created by us
    marks: dict[str, CollectionProgress] = {}  # MongoDB: by collection

    @property
    def position(self) -> SourcePosition:
        """The position of the last change; for MongoDB the newest of all collections."""
        return SourcePosition(self.lsn, self.ordinal, self.index)

    @property
    def tokens(self) -> dict[str, str]:
        return {collection: mark.token for collection, mark in self.marks.items()}

    def with_position(self, position: SourcePosition) -> SourceProgress:
        return self.with_changes(lsn=position.lsn, ordinal=position.ordinal, index=position.change)

    def position_in(self, collection: str) -> SourcePosition:
        mark = self.marks.get(collection)
        return self.position if mark is None else mark.position

    def with_mark(
        self, collection: str, position: SourcePosition, token: str, *, ended: bool
    ) -> SourceProgress:
        """Set the progress of one collection: its last change, and the token up to which it was read."""
        lsn, ordinal, index = position
        known = self.marks.get(collection)
        ended = ended or (known is not None and known.ended and known.token == token)
        mark = CollectionProgress(token=token, lsn=lsn, ordinal=ordinal, index=index, ended=ended)
        return self.with_changes(marks={**self.marks, collection: mark})

    def with_changes(self, **changed: Any) -> SourceProgress:
        return msgspec.structs.replace(self, **changed)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def entry(self, now_ns: int) -> bytes:
        """The entry for the source's stream."""
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
    """The progress of all sources in a data directory, by database and name; a server may be running."""
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
    """The runtime status of a source; not durable."""

    clock: Clock
    connected: bool = False
    error: str | None = None
    restarts: int = 0
    gaps: int = 0
    loaded: int | None = None  # rows of the last copy by this process
    confirmed: int = 0  # position of the slot
    lag_bytes: int | None = None
    wal_status: str | None = None
    retained_bytes: int | None = None
    last_ns: int = 0  # commit time of the last change at the source
    behind: bool = True  # there may be more to read
    lag_changes: int = 0  # known changes that are not committed yet

    def record_change(self, time: str) -> None:
        self.last_ns = parse_rfc3339_ns(time) or self.last_ns

    def set_caught_up(self, all_read: bool) -> None:
        self.behind = not all_read
        # The database does not say how many more: at least one.
        self.lag_changes = 0 if all_read else max(1, self.lag_changes)

    @property
    def lag_s(self) -> float:
        """The age of the newest change that was read, while there may be more."""
        if not self.behind or not self.last_ns:
            return 0.0
        return max(0, self.clock.now_ns() - self.last_ns) / 1e9

    def to_json(self) -> dict[str, Any]:
        """Unknown values are null, e.g. the lag of a source that is not reachable."""
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
