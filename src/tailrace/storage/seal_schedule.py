"""The seal schedule: due streams, forks that wait for their sources, the unsealed backlog, early rotation.

- `DueStreams`: streams are due by size, count, age, or because they are closed.
- `ForkDependencies`: a fork's manifest must not name entries of its source that are not in the bucket yet, so
  the source is sealed first.
- `SealBacklog`: bytes that wait for the object store; appends are refused above a limit.
- `EarlyRotation`: only what is in the hot store can be sealed, trimmed or recorded, and it gets there with
  the checkpoint of a finished journal file. If due work is in the active file, the file is rotated early.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from typing import TYPE_CHECKING

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.storage.retention import is_over_bounds

if TYPE_CHECKING:
    from tailrace.log.log import Log


class AgingStreams:
    """Streams that got entries in one journal file and are due at the same time: two numbers for each."""

    __slots__ = ("due_s", "lasts", "numbers", "position")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.numbers: array[int] = array("Q")
        self.lasts: array[int] = array("Q")  # sealed up to here, these entries are no longer a reason
        self.position = 0

    def add(self, number: int, last: int) -> None:
        self.numbers.append(number)
        self.lasts.append(last)


class DueStreams:
    """The queue of due streams, and those that wait for their age. Times are those of the loop."""

    def __init__(self, limits: Limits) -> None:
        self._bytes_max = limits.seal_bytes
        self._entries_max = limits.seal_entries
        self._age_s = limits.seal_age_ms / 1000
        self._queue: dict[int, None] = {}
        self._aging: deque[AgingStreams] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, number: int) -> bool:
        return number in self._queue

    def add(self, number: int) -> None:
        self._queue[number] = None

    def pop(self, busy: Set[int]) -> int | None:
        """The one that waits longest, unless it is being sealed already."""
        number = next((number for number in self._queue if number not in busy), None)
        if number is not None:
            del self._queue[number]
        return number

    def checkpointed(self, touched: Iterable[Stream], begun_s: float) -> None:
        """Streams of which the hot store has more now; their new entries came after `begun_s`."""
        group = AgingStreams(begun_s + self._age_s)
        for stream in touched:
            if stream.removed or stream.stored <= stream.sealed:
                continue
            if self.is_due(stream):
                self.add(stream.number)
            else:
                group.add(stream.number, stream.stored)
        self.wait(group)

    def wait(self, group: AgingStreams) -> None:
        """Groups come in the order of their time, or a little late."""
        if group.numbers:
            self._aging.append(group)

    def is_due(self, stream: Stream) -> bool:
        in_memory = stream.recent_bytes + sum(len(block.body) for block in stream.blocks or ())
        return self.is_enough(
            stream.stored - stream.sealed, stream.size_bytes - stream.sealed_bytes - in_memory, stream.closed
        )

    def is_enough(self, entries: int, size_bytes: int, closed: bool) -> bool:
        return closed or entries >= self._entries_max or size_bytes >= self._bytes_max

    def aged(self, now_s: float, count_max: int) -> Iterator[tuple[int, int]]:
        """Streams whose time has come, some at a time, each with the entry that has to be sealed by it."""
        while self._aging and count_max and self._aging[0].due_s <= now_s:
            group = self._aging[0]
            if group.position == len(group.numbers):
                self._aging.popleft()
                continue
            yield group.numbers[group.position], group.lasts[group.position]
            group.position += 1
            count_max -= 1


FindStream = Callable[[int], Stream | None]


def unsealed_source(stream: Stream, find: FindStream) -> Stream | None:
    """The nearest ancestor with entries that the stream shows and that are not sealed yet."""
    earliest, upto = stream.earliest, stream.fork_entry
    while stream.parent and earliest < upto:
        source = find(stream.parent)
        assert source is not None, f"the source of fork {stream.name} is missing"
        if source.fork_entry < upto and source.sealed < upto:
            return source
        upto = min(upto, source.fork_entry)
        stream = source
    return None


class ForkDependencies:
    """Which forks wait for which sources. A source that somebody waits for is due."""

    def __init__(self, due: DueStreams, find: FindStream) -> None:
        self._due = due
        self._find = find
        self._waiting: dict[int, set[int]] = {}

    def must_wait(self, stream: Stream) -> bool:
        """Whether the stream may not be sealed or recorded yet; if so, its source is due from now on."""
        source = unsealed_source(stream, self._find)
        if source is None:
            return False
        self._due.add(source.number)
        return True

    def wait(self, stream: Stream) -> bool:
        """The same, for a fork that is to be due again when its source is sealed."""
        source = unsealed_source(stream, self._find)
        if source is None:
            return False
        self._waiting.setdefault(source.number, set()).add(stream.number)
        self._due.add(source.number)
        return True

    def sealed(self, number: int) -> None:
        """A source came further, or has nothing to seal."""
        for fork in self._waiting.pop(number, ()):
            self._due.add(fork)


logger = logging.getLogger("tailrace.seal")

# Refused from the bound on, until there is some room again: not once for every entry.
RESUME_SHARE = 0.9
URGENT_SHARE = 0.5


class SealBacklog:
    """Counts the entries that are only here.

    What is in the hot store changes with checkpoints and reports of the sealer; the rest of the bound is what
    the log may hold in its queue and in memory, and the log itself sees to that with every append.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._bound = log.limits.spool_bytes
        self._stored_bytes = 0  # in the hot store, as of the last checkpoint
        self._sealed: dict[int, int] = {}  # journal file to bytes that leave the hot store with it
        self._failure = ""
        self.refusing = False

    def start(self) -> None:
        self._log.on_backpressure = self._refuse
        self.checkpointed(0)

    def sealed(self, size_bytes: int) -> None:
        """Entries are on the object store; the journal file being written says so."""
        file = self._log.streams.file
        self._sealed[file] = self._sealed.get(file, 0) + size_bytes
        self._log.room_bytes = self._bound - self._in_hot_store

    def checkpointed(self, seq: int) -> None:
        for file in [file for file in self._sealed if file <= seq]:
            del self._sealed[file]
        self._stored_bytes = self._log.store.db.cold.hot_bytes()
        self._log.room_bytes = self._bound - self._in_hot_store

    @property
    def untrimmed(self) -> bool:
        """Whether a checkpoint would free room in the hot store."""
        return bool(self._sealed)

    @property
    def stored_bytes(self) -> int:
        return self._stored_bytes

    @property
    def waiting_bytes(self) -> int:
        """Payload that is in the journal, in memory or in the hot store, and not on the object store."""
        return self._in_hot_store + self._log.streams.memory_bytes

    @property
    def _in_hot_store(self) -> int:
        return max(0, self._stored_bytes - sum(self._sealed.values()))

    @property
    def hurry(self) -> bool:
        """Half of the room is used: nothing waits for its age any more."""
        return self.waiting_bytes > URGENT_SHARE * self._bound

    def look(self, failure: str) -> None:
        """Closes or opens the gate. The log closes it as well, when an append would not fit."""
        self._failure = failure
        waiting = self.waiting_bytes
        if waiting >= self._bound:
            self._refuse()
        elif self.refusing and waiting < RESUME_SHARE * self._bound:
            self.refusing = False
            logger.warning("the object store has taken enough; appends go on")
            self._log.set_shortage("spool", None)

    def _refuse(self) -> None:
        if self.refusing:
            return
        self.refusing = True
        waiting = self.waiting_bytes + self._log.committer.queued_bytes
        reason = self._failure or "it cannot keep up"
        logger.error("%d bytes wait for the object store (%s); appends are refused", waiting, reason)
        message = "too many entries wait for the object store; appends go on when it has taken them"
        self._log.set_shortage("spool", TailraceError("unavailable", message))


EARLY_ROTATION_S_MAX = 1.0
LARGE_PER_TURN = 1000


class EarlyRotation:
    """Looks into the file now and then, and ends it if need be, but not too often. Times are the loop's."""

    def __init__(
        self,
        log: Log,
        due: DueStreams,
        pressure: SealBacklog,
        others_wait: Callable[[float], bool],
        now_s: float,
    ) -> None:
        self._log = log
        self._due = due
        self._pressure = pressure
        self._others_wait = others_wait  # whether anybody else needs a checkpoint
        self._interval_s = log.limits.seal_interval_ms / 1000
        self._age_s = log.limits.seal_age_ms / 1000
        self.checkpointed_seq = 0
        self._begun_s: dict[int, float] = {}  # when a journal file was first seen to hold something
        self._turned_s = now_s
        self._looked_at = 0  # how many streams of the present journal file were asked for their size
        self._large = False

    def checkpointed(self, seq: int, now_s: float) -> float:
        """The hot store has these files; since when they held something, as far as was seen."""
        self.checkpointed_seq = seq
        return min((self._begun_s.pop(file) for file in list(self._begun_s) if file <= seq), default=now_s)

    def look(self, now_s: float) -> None:
        self._look_for_large(now_s)
        self._turn_if_due(now_s)

    def _look_for_large(self, now_s: float) -> None:
        """Some streams at a time of those in the present journal file: is one due by what is in memory?"""
        file = self._log.streams.file
        touched = self._log.streams.touched.get(file, ())
        held_s = now_s - self._begun_s.get(file, now_s)
        if self._looked_at >= len(touched):
            self._looked_at = 0
        for stream in touched[self._looked_at : self._looked_at + LARGE_PER_TURN]:
            entries, size_bytes = stream.visible - stream.sealed, stream.size_bytes - stream.sealed_bytes
            self._large = (
                self._large
                or self._due.is_enough(entries, size_bytes, closed=False)
                or (entries > 0 and is_over_bounds(stream.lifetime, size_bytes, held_s))
            )
        self._looked_at += LARGE_PER_TURN

    def _turn_if_due(self, now_s: float) -> None:
        streams = self._log.streams
        pending = [file for file, touched in streams.touched.items() if touched]
        for file in pending:
            self._begun_s.setdefault(file, now_s)
        hurry = self._pressure.hurry and streams.memory_bytes > 0
        if now_s - self._turned_s < (
            min(EARLY_ROTATION_S_MAX, self._interval_s) if hurry else self._interval_s
        ):
            return
        if self._log.checkpoint_pending or self._log.refusal is not None:
            return
        aged = any(now_s - self._begun_s[file] >= self._age_s for file in pending)
        closed = streams.closed_file > self.checkpointed_seq and streams.closed_file in pending
        wanted = self._others_wait(now_s)
        if aged or closed or hurry or self._large or wanted:
            self._turned_s = now_s
            self._looked_at, self._large = 0, False
            self._log.rotate_journal()
