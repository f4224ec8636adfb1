"""Whether the journal and the hot store of a data directory are sound. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import apsw
import msgspec

from tailrace.common.errors import TailraceError
from tailrace.log.journal_check import JournalCheck, check_journal
from tailrace.log.records import UNREADABLE_ERRORS
from tailrace.log.stored_streams import decode_block, decode_stream
from tailrace.storage.hot_store.hot import BlockRow, HotDatabase

STREAMS_PER_PAGE = 1000
HOT_PROBLEMS_MAX = 100
# A checkpoint may retire files while they are looked at.
CHECK_ATTEMPTS_MAX = 5


class HotStoreProblem(NamedTuple):
    stream: str  # empty where it is not about one
    problem: str


class HotStoreCheck(msgspec.Struct):
    """What was looked at in a hot store, and what is wrong with it."""

    journal_seq: int | None = None  # the last journal file it has; None if it cannot say
    streams: int = 0
    blocks: int = 0
    entries: int = 0
    bytes: int = 0  # payload
    problems: list[HotStoreProblem] = []


def check_directory(path: Path, *, deep: bool) -> tuple[JournalCheck, HotStoreCheck]:
    """The journal, and the hot store: with `deep` all of its pages and blocks, else only that it answers."""
    seq = journal_seq(path / "hot.db")
    journal = check_journal(path / "journal", seq)
    for _ in range(CHECK_ATTEMPTS_MAX):
        seq_before, seq = seq, journal_seq(path / "hot.db")
        if not journal.problems or seq == seq_before:
            break
        journal = check_journal(path / "journal", seq)
    return journal, check_hot_store(path / "hot.db", deep=deep)


def journal_seq(path: Path) -> int | None:
    if not path.exists():
        return 0
    try:
        db = HotDatabase(path, read_only=True)
    except TailraceError:
        return None
    try:
        return db.journal_seq
    except TailraceError:
        return None
    finally:
        db.close()


def check_hot_store(path: Path, *, deep: bool) -> HotStoreCheck:
    found = HotStoreCheck()
    if not path.exists():
        found.journal_seq = 0  # everything is in the journal
        return found
    try:
        db = HotDatabase(path, read_only=True)
    except TailraceError as error:
        found.problems.append(HotStoreProblem("", _cause(error)))
        return found
    try:
        with db.connection:  # one view of everything, whatever is written meanwhile
            _check_streams(db, found, deep=deep)
    except TailraceError as error:
        found.problems.append(HotStoreProblem("", _cause(error)))
    except apsw.Error as error:
        found.problems.append(HotStoreProblem("", f"{type(error).__name__}: {error}"))
    finally:
        db.close()
    return found


def _cause(error: TailraceError) -> str:
    return (
        error.message if error.__cause__ is None else f"{type(error.__cause__).__name__}: {error.__cause__}"
    )


def _check_streams(db: HotDatabase, found: HotStoreCheck, *, deep: bool) -> None:
    found.journal_seq = db.journal_seq
    found.streams = db.count_streams()
    if not deep:
        return
    for row in db.rows(f"PRAGMA integrity_check({HOT_PROBLEMS_MAX})"):
        if row[0] != "ok":
            found.problems.append(HotStoreProblem("", str(row[0]).replace("\n", " ")))
    name = ""
    while images := db.images_after(name, "", STREAMS_PER_PAGE):
        name = images[-1][0]
        for stream_name, image in images:
            for problem in _stream_problems(db, found, stream_name, image):
                if len(found.problems) < HOT_PROBLEMS_MAX:
                    found.problems.append(HotStoreProblem(stream_name, problem))
    unnamed = db.one(
        "SELECT count(DISTINCT number) FROM blocks WHERE number NOT IN (SELECT number FROM streams)"
    )
    if unnamed is not None and unnamed[0]:
        found.problems.append(HotStoreProblem("", f"entries of {unnamed[0]} streams that are not listed"))


def _stream_problems(db: HotDatabase, found: HotStoreCheck, name: str, image: bytes) -> Iterator[str]:
    """What is wrong with one stream: its entries follow the sealed ones without a gap, up to its tail."""
    try:
        stream = decode_stream(image)
    except UNREADABLE_ERRORS as error:
        yield f"its image cannot be decoded: {type(error).__name__}: {error}"
        return
    if stream.name != name:
        yield f"its image is that of {stream.name!r}"
    reached = stream.sealed
    query = "SELECT first, last, ends, times, keys, body FROM blocks WHERE number=? ORDER BY first"
    for row in db.rows(query, stream.number):
        raw = BlockRow(*cast("tuple[int, int, bytes, bytes, bytes | None, bytes]", row))
        try:
            block = decode_block(raw)
        except UNREADABLE_ERRORS as error:
            yield f"the block of entries {raw.first} to {raw.last} cannot be decoded: {error}"
            continue
        found.blocks += 1
        found.entries += len(block.ends)
        found.bytes += len(block.body)
        if not block.ends or block.ends[-1] != len(block.body) or len(block.times) != len(block.ends):
            yield f"the block of entries {raw.first} to {raw.last} has another length than its entries"
        if raw.first > reached + 1:
            yield f"entries {reached + 1} to {raw.first - 1} are missing"
        reached = max(reached, raw.last)
    if reached < stream.tail:
        yield f"entries {reached + 1} to {stream.tail} are missing"
