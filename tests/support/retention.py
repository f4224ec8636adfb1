"""Streams with retention on a server that seals at once, and what is left of them on the object store."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from support.sealing import hot, wait_until
from support.wire import Wire
from tailrace.protocol.offsets import parse_offset
from tailrace.storage.object_store.listing import entry_range_of_key
from tailrace.storage.segments.model import make_stream_id, stream_prefix

TEXT = "text/plain"
ENTRY_BYTES = 4


def text_of(entry: int) -> str:
    return f"{entry:0{ENTRY_BYTES}}"


def texts(first: int, last: int) -> bytes:
    """Entries by their numbers, both included."""
    return "".join(text_of(entry) for entry in range(first, last + 1)).encode()


def append(http: Wire, name: str, first: int, last: int, **more: str) -> None:
    for entry in range(first, last + 1):
        assert http.post(name, TEXT, text_of(entry), **more).status == 204


def earliest(http: Wire, name: str) -> int:
    """The last entry that is gone."""
    answer = http.head(name)
    assert answer.status == 200
    return parse_offset(answer["stream-earliest-offset"])[1]


def folder(data_dir: Path, name: str, incarnation: int = 0) -> Path:
    return data_dir / "objects" / stream_prefix(make_stream_id(name, incarnation))


def stored(data_dir: Path, name: str, incarnation: int = 0) -> set[int]:
    """The entries of a stream that are in segments on the object store."""
    entries: set[int] = set()
    for path in (folder(data_dir, name, incarnation) / "segments").glob("*.parquet"):
        found = entry_range_of_key(f"segments/{path.name}")
        assert found is not None
        entries |= set(range(found[0], found[1] + 1))
    return entries


def wait_trimmed(http: Wire, data_dir: Path, name: str, tail: int) -> int:
    """Waits until retention is through with a stream that ends there; how many entries are gone.

    With the first look that finds something it need not be: on a slow machine segments are small, and there
    are looks between the last appends.
    """
    wait_until(lambda: earliest(http, name) and _is_settled(data_dir, name, tail), f"{name} trimmed")
    return earliest(http, name)


def _is_settled(data_dir: Path, name: str, tail: int) -> bool:
    """Whether the hot store knows of segments up to the tail, and of nothing that is due."""
    database = sqlite3.connect(f"file:{data_dir / 'hot.db'}?mode=ro", uri=True, timeout=10)
    try:
        query = (
            "SELECT max(last), (SELECT at_ns FROM due WHERE due.number = streams.number)"
            " FROM streams JOIN segments USING(number) WHERE name = ?"
        )
        sealed, due_ns = database.execute(query, (name,)).fetchone()
    finally:
        database.close()
    return sealed == tail and (due_ns is None or due_ns > time.time_ns())


def wait_deleted(data_dir: Path, name: str, kept: set[int]) -> None:
    """Waits until of the sealed entries exactly those are left, give or take a segment's neighbours."""

    def done() -> bool:
        found = stored(data_dir, name)
        return kept <= found and len(found) <= len(kept) + 4

    wait_until(done, f"only {sorted(kept)} of {name} left, and not {sorted(stored(data_dir, name))}")


def wait_idle(data_dir: Path) -> None:
    """Waits until nothing is left to be sealed or deleted."""

    def done() -> bool:
        rows = hot(data_dir)
        return bool(rows) and not rows["blocks"] and not rows["graves"] and not rows["trims"]

    wait_until(done, "nothing left to do")
