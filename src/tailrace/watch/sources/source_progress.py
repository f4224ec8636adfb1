"""How far a source is. Written with every commit of its changes: position and changes are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, cast

import apsw
import msgspec
import orjson

from tailrace.common.timestamps import format_rfc3339
from tailrace.log.journal import JournalScan, files_to_replay
from tailrace.log.records import Meta, decode_plain_append, decode_record
from tailrace.watch.sources.model import START_POSITION, SourcePosition
from tailrace.watch.view import Execute

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
