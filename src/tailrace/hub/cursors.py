"""Committed positions: how far each actor is in each of its streams. They only grow."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.hub.addresses import MAILBOX_PREFIX
from tailrace.hub.effects import Append, AppendOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tailrace.hub.state import Hub

CURSORS_STREAM: Final = "hub/cursors/0"
DIRTY_MAX: Final = 1000
CURSOR_REWRITE_MS: Final = 12 * 3600 * 1000
NEVER_WRITTEN: Final = -1


class Cursor(msgspec.Struct, eq=False):
    """Entries, not offsets: within the life of a stream both say the same."""

    committed: int = 0
    delivered: int = 0  # the last that was handed over; after a restart those up to it are redelivered
    read_upto: int = 0  # by the actor itself
    # Entries up to here may have been handed over by a process that died before it could write that down.
    unsure_upto: int = 0
    moved_ms: int = 0  # when it was last moved, to the second
    passed: set[int] = set()  # beyond the committed position, done with one by one

    def follow_passed(self) -> None:
        """As far as there is no gap, what was passed one by one is committed."""
        while self.committed + 1 in self.passed:
            self.committed += 1
        self.passed = {entry for entry in self.passed if entry > self.committed}
        self.delivered = max(self.delivered, self.committed)


class CursorRecord(msgspec.Struct, rename="camel", omit_defaults=True):
    """What the log keeps of one. `passed` are runs of entries, the first and the last of each."""

    committed: str
    delivered: str
    moved_at: int = 0
    passed: list[tuple[int, int]] = []
    read: str | None = None  # if the actor itself read beyond what was handed to it


class Cursors:
    """All of them are in memory; changes are written in batches, a commit that is answered at once."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._cursors: dict[str, dict[str, Cursor]] = {}  # by owner, then by stream
        self._dirty: dict[tuple[str, str], int] = {}
        self._moved = 0
        self._holders: dict[str, set[str]] = {}  # owners, of streams that many read
        self.now_ms = 0  # as of the last second
        # When each was last written, oldest first: what the log keeps is always younger.
        self._written: OrderedDict[tuple[str, str], int] = OrderedDict()

    def of(self, path: str, stream: str) -> Cursor | None:
        return self._cursors.get(path, {}).get(stream)

    def put(self, path: str, stream: str, cursor: Cursor, *, restored: bool = False) -> None:
        """One from the log may be there since long, and is written again soon."""
        self._cursors.setdefault(path, {})[stream] = cursor
        cursor.moved_ms = cursor.moved_ms or self.now_ms
        if not stream.startswith(MAILBOX_PREFIX):
            self._holders.setdefault(stream, set()).add(path)
        self._written.setdefault((path, stream), 0 if restored else NEVER_WRITTEN)

    def drop(self, path: str, stream: str) -> None:
        """Of a stream that is not there: it says nothing."""
        self._take_out(path, stream)

    def _take_out(self, path: str, stream: str) -> bool:
        found = self._cursors.get(path, {})
        if found.pop(stream, None) is None:
            return False
        self._dirty.pop((path, stream), None)
        self._written.pop((path, stream), None)
        if not found:
            del self._cursors[path]
        holders = self._holders.get(stream, set())
        holders.discard(path)
        if not holders:
            self._holders.pop(stream, None)
        return True

    def streams_of(self, path: str) -> list[str]:
        return list(self._cursors.get(path, ()))

    def holders(self, stream: str) -> Iterator[Cursor]:
        """Everybody who reads a stream that is not a mailbox."""
        for path in self._holders.get(stream, ()):
            yield self._cursors[path][stream]

    def forget(self, path: str, stream: str) -> None:
        """Its stream is gone."""
        if self._take_out(path, stream):
            self._hub.append(
                Append(CURSORS_STREAM, _encode_cursor_event(path, stream, None), key=path.encode())
            )

    def moved(self, path: str, stream: str) -> None:
        cursor = self.of(path, stream)
        if cursor is not None:
            cursor.moved_ms = self.now_ms
        self._dirty[(path, stream)] = 1
        self._hub.unwritten = True
        self._moved += 1
        if self._moved >= DIRTY_MAX:
            self.flush()

    def flush(self) -> None:
        for path, stream in self._dirty:
            self._append(path, stream, None)
        self._dirty.clear()
        self._moved = 0

    def write_again(self, now_ms: int) -> None:
        """Positions that did not move for long, a few at a time. Once a second."""
        self.now_ms = now_ms
        for (path, stream), at_ms in list(islice(self._written.items(), DIRTY_MAX)):
            if at_ms != NEVER_WRITTEN and now_ms - at_ms < CURSOR_REWRITE_MS:
                return
            self._written[(path, stream)] = now_ms
            self._written.move_to_end((path, stream))
            if at_ms != NEVER_WRITTEN:
                self._dirty[(path, stream)] = 1
                self._hub.unwritten = True

    def commit(self, path: str, stream: str, then: Callable[[AppendOutcome, int], None]) -> None:
        """Written at once: somebody waits for it."""
        self._dirty.pop((path, stream), None)
        self._append(path, stream, then)

    def _append(self, path: str, stream: str, then: Callable[[AppendOutcome, int], None] | None) -> None:
        cursor = self.of(path, stream)
        if cursor is None or self._hub.streams.tail(stream) is None:
            return
        streams = self._hub.streams
        record = CursorRecord(
            streams.offset(stream, cursor.committed),
            streams.offset(stream, cursor.delivered),
            cursor.moved_ms,
            to_ranges(cursor.passed),
            streams.offset(stream, cursor.read_upto) if cursor.read_upto > cursor.delivered else None,
        )
        self._hub.append(
            Append(CURSORS_STREAM, _encode_cursor_event(path, stream, record), then, key=path.encode())
        )


def to_ranges(entries: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as runs: most of them follow each other."""
    found: list[tuple[int, int]] = []
    for entry in sorted(entries):
        if found and found[-1][1] == entry - 1:
            found[-1] = (found[-1][0], entry)
        else:
            found.append((entry, entry))
    return found


def cursor_key(path: str, stream: str) -> str:
    """How the log names a position."""
    return f"@({path}) {stream}"


def _encode_cursor_event(path: str, stream: str, record: CursorRecord | None) -> bytes:
    key = cursor_key(path, stream)
    if record is None:
        return msgspec.json.encode({"type": "cursor", "key": key, "headers": {"operation": "delete"}})
    return msgspec.json.encode(
        {"type": "cursor", "key": key, "value": record, "headers": {"operation": "update"}}
    )
