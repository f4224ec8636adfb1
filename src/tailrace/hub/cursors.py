"""Committed positions: how far each actor is in each of its streams. They only grow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.hub.effects import Append, Settled

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.hub.state import Hub

STREAM: Final = "hub/cursors/0"
DIRTY_MAX: Final = 1000


class Cursor(msgspec.Struct, eq=False):
    """Entries, not offsets: within the life of a stream both say the same."""

    committed: int = 0
    delivered: int = 0  # the last that was handed over; after a restart those up to it are redelivered
    read_upto: int = 0  # by the actor itself; memory only
    # Entries up to here may have been handed over by a process that died before it could write that down.
    unsure_upto: int = 0


class CursorRecord(msgspec.Struct):
    committed: str
    delivered: str


class Cursors:
    """All of them are in memory; changes are written in batches, a commit that is answered at once."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._cursors: dict[str, dict[str, Cursor]] = {}  # by owner, then by stream
        self._dirty: dict[tuple[str, str], int] = {}
        self._moved = 0

    def of(self, path: str, stream: str) -> Cursor | None:
        return self._cursors.get(path, {}).get(stream)

    def put(self, path: str, stream: str, cursor: Cursor) -> None:
        self._cursors.setdefault(path, {})[stream] = cursor

    def streams_of(self, path: str) -> list[str]:
        return list(self._cursors.get(path, ()))

    def forget(self, path: str, stream: str) -> None:
        """Its stream is gone."""
        if self._cursors.get(path, {}).pop(stream, None) is not None:
            self._dirty.pop((path, stream), None)
            self._hub.append(Append(STREAM, _message(path, stream, None), key=path.encode()))

    @property
    def dirty(self) -> bool:
        return bool(self._dirty)

    def moved(self, path: str, stream: str) -> None:
        self._dirty[(path, stream)] = 1
        self._moved += 1
        if self._moved >= DIRTY_MAX:
            self.flush()

    def flush(self) -> None:
        for path, stream in self._dirty:
            self._append(path, stream, None)
        self._dirty.clear()
        self._moved = 0

    def commit(self, path: str, stream: str, then: Callable[[Settled, int], None]) -> None:
        """Written at once: somebody waits for it."""
        self._dirty.pop((path, stream), None)
        self._append(path, stream, then)

    def _append(self, path: str, stream: str, then: Callable[[Settled, int], None] | None) -> None:
        cursor = self.of(path, stream)
        if cursor is None or self._hub.streams.tail(stream) is None:
            return
        streams = self._hub.streams
        record = CursorRecord(
            streams.offset(stream, cursor.committed), streams.offset(stream, cursor.delivered)
        )
        self._hub.append(Append(STREAM, _message(path, stream, record), then, key=path.encode()))


def _message(path: str, stream: str, record: CursorRecord | None) -> bytes:
    key = f"@({path}) {stream}"
    if record is None:
        return msgspec.json.encode({"type": "cursor", "key": key, "headers": {"operation": "delete"}})
    return msgspec.json.encode(
        {"type": "cursor", "key": key, "value": record, "headers": {"operation": "update"}}
    )
