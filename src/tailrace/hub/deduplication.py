"""Recently accepted messages by sender: a repeated message gets the stored answers of the first.

Each sender has a limit in number and age, all senders share a limit in bytes. At the shared limit new
messages are refused, because evicting an id could let a repeat in twice. Answers are evicted first: a repeat
is then still detected, but gets an error instead of the answers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

import msgspec

TTL_MS_DEFAULT: Final = 60_000
TTL_MS_MAX: Final = 300_000
ENTRIES_MAX: Final = 10_000
BYTES_MAX: Final = 512 * 1024 * 1024  # of all senders
ANSWER_BYTES_MAX: Final = 1024 * 1024  # of one sender
ANSWERS_FRACTION: Final = 4  # answers have at most this fraction of the shared limit
WAITERS_MAX: Final = 16
# What an entry costs besides its id and its answers, roughly.
_ENTRY_BYTES: Final = 400
_BARE_ENTRY_BYTES: Final = 250


class SeenMessage(msgspec.Struct, eq=False, gc=False):
    """An accepted message. Until it is finished, sessions that repeat it wait for its answers.

    There are many of them, none in a reference cycle: gc is off.
    """

    id: str
    seen_ms: int
    timestamp_ms: int
    answers: tuple[bytes, ...] = ()
    finished: bool = False
    waiters: tuple[object, ...] = ()
    answers_dropped: bool = False  # its answers were evicted

    @property
    def answer_bytes(self) -> int:
        return sum(map(len, self.answers))

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.id) + self.answer_bytes


class SeenMemory:
    """The memory of all senders of a hub."""

    __slots__ = ("answer_bytes", "answer_bytes_max", "bytes", "bytes_max")

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.answer_bytes_max = bytes_max // ANSWERS_FRACTION
        self.bytes = 0
        self.answer_bytes = 0  # of these

    @property
    def is_full(self) -> bool:
        return self.bytes >= self.bytes_max


class SeenMessages:
    """The newest messages of one sender, bounded in age and number; the oldest are evicted first."""

    __slots__ = (
        "_answer_bytes_max",
        "_answered",
        "_entries",
        "_entries_max",
        "_expiry_ms",
        "_memory",
        "_ttl_ms",
        "answer_bytes",
        "floor_ms",
        "size_bytes",
    )

    def __init__(
        self,
        *,
        entries_max: int = ENTRIES_MAX,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
        ttl_ms: int = TTL_MS_DEFAULT,
        memory: SeenMemory | None = None,
    ) -> None:
        # Not a dict: finding its first key is slow after many removals at the front.
        # A message without answers is stored as its time only.
        self._entries: OrderedDict[str, SeenMessage | int] = OrderedDict()
        self._entries_max = entries_max
        self._answer_bytes_max = answer_bytes_max
        self._answered: deque[SeenMessage] = deque()  # those with answers, oldest first
        self._ttl_ms = min(ttl_ms, TTL_MS_MAX)
        self._memory = memory or SeenMemory()
        self.size_bytes = 0
        self.answer_bytes = 0  # of these
        self._expiry_ms = 0  # nothing expires before
        # The newest timestamp that was evicted early: at or below it, it is unknown whether a
        # message is a repeat.
        self.floor_ms = -1

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, identifier: str) -> bool:
        """Whether the id is stored, expired or not."""
        return identifier in self._entries

    def get(self, identifier: str, now_ms: int) -> SeenMessage | None:
        """The stored message of this id, unless expired."""
        found = self._entries.get(identifier)
        if found is None or now_ms - _time_seen_ms(found) >= self._ttl_ms:
            return None
        return (
            found if isinstance(found, SeenMessage) else SeenMessage(identifier, found, found, finished=True)
        )

    def add_bare(self, identifier: str, now_ms: int) -> bool:
        """Records a message without answers, in little memory. False if the id is stored already,
        or no room.

        Its timestamp is not stored and never becomes `floor_ms`: where that matters, call `add`.
        """
        entries = self._entries
        memory = self._memory
        if identifier in entries or memory.bytes >= memory.bytes_max:
            return False
        if now_ms >= self._expiry_ms:
            self.expire(now_ms)
        entries[identifier] = now_ms
        size_bytes = _BARE_ENTRY_BYTES + len(identifier)
        self.size_bytes += size_bytes
        memory.bytes += size_bytes
        if len(entries) > self._entries_max:
            self._make_room()
        return True

    def add(
        self, identifier: str, now_ms: int, timestamp_ms: int, *, answers: tuple[bytes, ...] = ()
    ) -> SeenMessage:
        """Records an accepted message, which must be new. `answers` if it is finished at once."""
        if now_ms >= self._expiry_ms:
            self.expire(now_ms)
        # An expired one may still be stored if the clock was set back.
        if identifier in self._entries:
            self.forget(identifier)
        entry = SeenMessage(identifier, now_ms, timestamp_ms)
        self._entries[identifier] = entry
        self._account(_ENTRY_BYTES + len(identifier))
        for answer in answers:
            self.answer(entry, answer)
        if len(self._entries) > self._entries_max:
            self._make_room()
        return entry

    def add_waiter(self, entry: SeenMessage, waiter: object) -> bool:
        """Adds a session that waits for the answers of an unfinished message. False if too many wait."""
        assert not entry.finished
        if waiter not in entry.waiters:
            if len(entry.waiters) >= WAITERS_MAX:
                return False
            entry.waiters = (*entry.waiters, waiter)
        return True

    def answer(self, entry: SeenMessage, answer: bytes, *, final: bool = True) -> tuple[object, ...]:
        """Stores one of several answers for repeats, and returns the waiters."""
        if not entry.answers_dropped and self._entries.get(entry.id) is entry:
            if not entry.answers:
                self._answered.append(entry)
            entry.answers = (*entry.answers, answer)
            self._account(len(answer), len(answer))
            self._drop_oldest_answers()
        entry.finished = final
        waiting = entry.waiters
        if final:
            entry.waiters = ()
        return waiting

    def forget(self, identifier: str) -> None:
        """Removes a message that was not accepted: it may be sent again."""
        entry = self._entries.pop(identifier, None)
        if entry is not None:
            self._left(identifier, entry)

    def expire(self, now_ms: int) -> None:
        entries = self._entries
        while entries:
            identifier = next(iter(entries))
            seen_ms = _time_seen_ms(entries[identifier])
            if now_ms - seen_ms < self._ttl_ms:
                self._expiry_ms = seen_ms + self._ttl_ms
                return
            self.forget(identifier)

    def _make_room(self) -> None:
        entries, memory = self._entries, self._memory
        while len(entries) > self._entries_max:
            identifier, entry = entries.popitem(last=False)
            if isinstance(entry, SeenMessage):
                self.floor_ms = max(self.floor_ms, entry.timestamp_ms)
                self._left(identifier, entry)
            else:  # most messages
                size_bytes = _BARE_ENTRY_BYTES + len(identifier)
                self.size_bytes -= size_bytes
                memory.bytes -= size_bytes

    def _left(self, identifier: str, entry: SeenMessage | int) -> None:
        if not isinstance(entry, SeenMessage):
            self._account(-_BARE_ENTRY_BYTES - len(identifier))
            return
        self._account(-entry.size_bytes, -entry.answer_bytes)
        entry.answers, entry.answers_dropped = (), True
        while self._answered and self._answered[0].answers_dropped:
            self._answered.popleft()

    def _drop_oldest_answers(self) -> None:
        """Evicts the oldest answers above the limits, the newest too if it alone is above them."""
        memory = self._memory
        while self.answer_bytes > self._answer_bytes_max or memory.answer_bytes > memory.answer_bytes_max:
            if not self._answered:
                return
            entry = self._answered.popleft()
            self._account(-entry.answer_bytes, -entry.answer_bytes)
            entry.answers, entry.answers_dropped = (), True

    def _account(self, size_bytes: int, answer_bytes: int = 0) -> None:
        memory = self._memory
        self.size_bytes += size_bytes
        memory.bytes += size_bytes
        if answer_bytes:
            self.answer_bytes += answer_bytes
            memory.answer_bytes += answer_bytes


def _time_seen_ms(entry: SeenMessage | int) -> int:
    return entry.seen_ms if isinstance(entry, SeenMessage) else entry
