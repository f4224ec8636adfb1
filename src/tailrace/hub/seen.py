"""Messages that one sender has sent lately: a repeat is answered as the first one was."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

TTL_MS_DEFAULT: Final = 60_000
TTL_MS_MAX: Final = 300_000
ENTRIES_MAX: Final = 10_000
BYTES_MAX: Final = 8 * 1024 * 1024
WAITERS_MAX: Final = 16
# What an entry costs besides its id and its answers, roughly.
_ENTRY_BYTES: Final = 400
_NOTE_BYTES: Final = 250


class Seen(msgspec.Struct, eq=False, gc=False):
    """A message that was accepted. Until it is finished, those who repeat it wait for its answers.

    There are very many, and none is part of a cycle: the collector need not look at them.
    """

    id: str
    seen_ms: int
    timestamp_ms: int
    answers: tuple[bytes, ...] = ()
    finished: bool = False
    waiters: tuple[object, ...] = ()

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.id) + sum(map(len, self.answers))


class SeenSet:
    """The newest messages of one sender, bounded in age, number and bytes; the oldest leave first."""

    __slots__ = ("_bytes", "_bytes_max", "_entries", "_entries_max", "_expiry_ms", "_ttl_ms", "floor_ms")

    def __init__(
        self,
        *,
        entries_max: int = ENTRIES_MAX,
        bytes_max: int = BYTES_MAX,
        ttl_ms: int = TTL_MS_DEFAULT,
    ) -> None:
        # Not a dict: that one looks for its first entry among all places that were left before it.
        # A message that has no answer is only the time at which it came.
        self._entries: OrderedDict[str, Seen | int] = OrderedDict()
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._ttl_ms = min(ttl_ms, TTL_MS_MAX)
        self._bytes = 0
        self._expiry_ms = 0  # nothing is over before
        # The newest timestamp that was forgotten before its time: at or below it, nobody can say whether a
        # message is a repeat.
        self.floor_ms = -1

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, identifier: str) -> bool:
        """Whether there is anything under this id, be its time over or not."""
        return identifier in self._entries

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def get(self, identifier: str, now_ms: int) -> Seen | None:
        """The first of this id, if it is still known."""
        found = self._entries.get(identifier)
        if found is None or now_ms - _seen_ms(found) >= self._ttl_ms:
            return None
        return found if isinstance(found, Seen) else Seen(identifier, found, found, finished=True)

    def note(self, identifier: str, now_ms: int) -> bool:
        """Remember a message that has no answer, at little cost. False if there is anything under its id.

        Its own timestamp is not kept, and never becomes the `floor_ms`: where that counts, `add` is called.
        """
        entries = self._entries
        if identifier in entries:
            return False
        if now_ms >= self._expiry_ms:
            self.expire(now_ms)
        entries[identifier] = now_ms
        self._bytes += _NOTE_BYTES + len(identifier)
        if len(entries) > self._entries_max or self._bytes > self._bytes_max:
            self._make_room()
        return True

    def add(
        self, identifier: str, now_ms: int, timestamp_ms: int, *, answers: tuple[bytes, ...] = ()
    ) -> Seen:
        """Remember an accepted message, which must not be known. `answers` if it is finished at once."""
        if now_ms >= self._expiry_ms:
            self.expire(now_ms)
        # One whose time is over may still be there if the clock was set back after younger ones came.
        if identifier in self._entries:
            self.forget(identifier)
        entry = Seen(identifier, now_ms, timestamp_ms, answers, finished=bool(answers))
        self._entries[identifier] = entry
        self._bytes += entry.size_bytes if answers else _ENTRY_BYTES + len(identifier)
        if len(self._entries) > self._entries_max or self._bytes > self._bytes_max:
            self._make_room()
        return entry

    def join(self, entry: Seen, waiter: object) -> bool:
        """Wait for the answers of a message that is not finished. False if too many do."""
        assert not entry.finished
        if waiter not in entry.waiters:
            if len(entry.waiters) >= WAITERS_MAX:
                return False
            entry.waiters = (*entry.waiters, waiter)
        return True

    def answer(self, entry: Seen, answer: bytes, *, final: bool = True) -> tuple[object, ...]:
        """Keep an answer for repeats, and learn who waits for it. A message may have several answers."""
        if self._entries.get(entry.id) is entry:
            self._bytes += len(answer)
        entry.answers = (*entry.answers, answer) if entry.answers else (answer,)
        entry.finished = final
        waiting = entry.waiters
        if final:
            entry.waiters = ()
        if self._bytes > self._bytes_max:
            self._make_room()
        return waiting

    def forget(self, identifier: str) -> None:
        """A message that was not accepted after all may be sent again."""
        entry = self._entries.pop(identifier, None)
        if entry is not None:
            self._bytes -= _size_bytes(identifier, entry)

    def expire(self, now_ms: int) -> None:
        entries = self._entries
        while entries:
            identifier = next(iter(entries))
            seen_ms = _seen_ms(entries[identifier])
            if now_ms - seen_ms < self._ttl_ms:
                self._expiry_ms = seen_ms + self._ttl_ms
                return
            self.forget(identifier)

    def _make_room(self) -> None:
        entries = self._entries
        while len(entries) > self._entries_max or (self._bytes > self._bytes_max and len(entries) > 1):
            identifier, entry = entries.popitem(last=False)
            self._bytes -= _size_bytes(identifier, entry)
            if isinstance(entry, Seen):
                self.floor_ms = max(self.floor_ms, entry.timestamp_ms)


def _seen_ms(entry: Seen | int) -> int:
    return entry.seen_ms if isinstance(entry, Seen) else entry


def _size_bytes(identifier: str, entry: Seen | int) -> int:
    return entry.size_bytes if isinstance(entry, Seen) else _NOTE_BYTES + len(identifier)
