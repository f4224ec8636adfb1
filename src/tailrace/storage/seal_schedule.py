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
from tailrace.common.logging_setup import log_fields
from tailrace.log.model import Stream
from tailrace.storage.retention_rules import is_over_bounds

if TYPE_CHECKING:
    from tailrace.log.log import Log


class AgingStreams:
    """Streams with new entries in one journal file, which are due at the same time."""

    __slots__ = ("due_s", "lasts", "numbers", "position")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.numbers: array[int] = array("Q")
        self.lasts: array[int] = array("Q")  # the last new entry: once sealed, the stream is not due
        self.position = 0

    def add(self, number: int, last: int) -> None:
        self.numbers.append(number)
        self.lasts.append(last)


class DueStreams:
    """The queue of due streams, and streams that become due by age. Times are those of the loop."""

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
        """Removes and returns the stream that waits longest and is not being sealed."""
        number = next((number for number in self._queue if number not in busy), None)
        if number is not None:
            del self._queue[number]
        return number

    def checkpointed(self, touched: Iterable[Stream], started_s: float) -> None:
        """Adds streams with new entries in the hot store, appended after `started_s`."""
        group = AgingStreams(started_s + self._age_s)
        for stream in touched:
            if stream.removed or stream.stored <= stream.sealed:
                continue
            if self.is_due(stream):
                self.add(stream.number)
            else:
                group.add(stream.number, stream.stored)
        self.wait(group)

    def wait(self, group: AgingStreams) -> None:
        """Adds a group. Groups are in order of their time, or slightly late."""
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
        """Up to `count_max` streams that are due by age, each with the entry to seal up to."""
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
    """The nearest ancestor with unsealed entries that the stream shows."""
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
    """Forks that wait for their sources. A source that a fork waits for is due."""

    def __init__(self, due: DueStreams, find: FindStream) -> None:
        self._due = due
        self._find = find
        self._waiting: dict[int, set[int]] = {}

    def must_wait(self, stream: Stream) -> bool:
        """Whether the stream may not be sealed or recorded yet; if so, its source becomes due."""
        source = unsealed_source(stream, self._find)
        if source is None:
            return False
        self._due.add(source.number)
        return True

    def wait(self, stream: Stream) -> bool:
        """As `must_wait`; the fork becomes due again when its source is sealed."""
        source = unsealed_source(stream, self._find)
        if source is None:
            return False
        self._waiting.setdefault(source.number, set()).add(stream.number)
        self._due.add(source.number)
        return True

    def sealed(self, number: int) -> None:
        """A source was sealed further, or has nothing to seal: its forks are due."""
        for fork in self._waiting.pop(number, ()):
            self._due.add(fork)


logger = logging.getLogger("tailrace.seal")

# Appends are refused from the limit on, and accepted again below this share of it.
RESUME_SHARE = 0.9
URGENT_SHARE = 0.5


class SealBacklog:
    """Counts the bytes that are not on the object store yet, and refuses appends above the limit.

    The bytes in the hot store change with checkpoints and seals. The rest of the limit is set as
    `Log.room_bytes` for the queue and memory, which the log checks with every append.
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
        """Entries were sealed; they leave the hot store with the checkpoint of the active journal file."""
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
        """Whether a checkpoint would free space in the hot store."""
        return bool(self._sealed)

    @property
    def stored_bytes(self) -> int:
        return self._stored_bytes

    @property
    def waiting_bytes(self) -> int:
        """Payload bytes that are only in memory or in the hot store."""
        return self._in_hot_store + self._log.streams.memory_bytes

    @property
    def _in_hot_store(self) -> int:
        return max(0, self._stored_bytes - sum(self._sealed.values()))

    @property
    def urgent(self) -> bool:
        """Whether half of the limit is used: streams are then sealed regardless of their age."""
        return self.waiting_bytes > URGENT_SHARE * self._bound

    def update(self, failure: str) -> None:
        """Refuses or accepts appends. The log calls `_refuse` as well, if an append does not fit."""
        self._failure = failure
        waiting = self.waiting_bytes
        if waiting >= self._bound:
            self._refuse()
        elif self.refusing and waiting < RESUME_SHARE * self._bound:
            self.refusing = False
            logger.warning("seal backlog below limit, accepting appends", extra=log_fields(bytes=waiting))
            self._log.set_shortage("spool", None)

    def _refuse(self) -> None:
        if self.refusing:
            return
        self.refusing = True
        waiting = self.waiting_bytes + self._log.committer.queued_bytes
        fields = log_fields(
            bytes=waiting, limit=self._bound, reason=self._failure or "sealing is slower than appends"
        )
        logger.error("seal backlog above limit, refusing appends", extra=fields)
        message = "too many entries wait for the object store; retry later"
        self._log.set_shortage("spool", TailraceError("unavailable", message))


EARLY_ROTATION_S_MAX = 1.0
LARGE_PER_POLL = 1000


class EarlyRotation:
    """Rotates the active journal file if due work is in it, at most once per interval (loop time)."""

    def __init__(
        self,
        log: Log,
        due: DueStreams,
        backlog: SealBacklog,
        checkpoint_needed: Callable[[float], bool],
        now_s: float,
    ) -> None:
        self._log = log
        self._due = due
        self._backlog = backlog
        self._checkpoint_needed = checkpoint_needed  # whether other work waits for a checkpoint
        self._interval_s = log.limits.seal_interval_ms / 1000
        self._age_s = log.limits.seal_age_ms / 1000
        self.checkpointed_seq = 0
        self._started_s: dict[int, float] = {}  # when records were first seen in a journal file
        self._rotated_s = now_s
        self._checked = 0  # streams of the active journal file whose size was checked
        self._large = False

    def checkpointed(self, seq: int, now_s: float) -> float:
        """The hot store has these files; returns when records were first seen in them."""
        self.checkpointed_seq = seq
        return min(
            (self._started_s.pop(file) for file in list(self._started_s) if file <= seq), default=now_s
        )

    def poll(self, now_s: float) -> None:
        self._check_sizes(now_s)
        self._rotate_if_due(now_s)

    def _check_sizes(self, now_s: float) -> None:
        """Checks some streams of the active journal file: is one due by what is in memory?"""
        file = self._log.streams.file
        touched = self._log.streams.touched.get(file, ())
        age_s = now_s - self._started_s.get(file, now_s)
        if self._checked >= len(touched):
            self._checked = 0
        for stream in touched[self._checked : self._checked + LARGE_PER_POLL]:
            entries, size_bytes = stream.visible - stream.sealed, stream.size_bytes - stream.sealed_bytes
            self._large = (
                self._large
                or self._due.is_enough(entries, size_bytes, closed=False)
                or (entries > 0 and is_over_bounds(stream.lifetime, size_bytes, age_s))
            )
        self._checked += LARGE_PER_POLL

    def _rotate_if_due(self, now_s: float) -> None:
        streams = self._log.streams
        pending = [file for file, touched in streams.touched.items() if touched]
        for file in pending:
            self._started_s.setdefault(file, now_s)
        urgent = self._backlog.urgent and streams.memory_bytes > 0
        if now_s - self._rotated_s < (
            min(EARLY_ROTATION_S_MAX, self._interval_s) if urgent else self._interval_s
        ):
            return
        if self._log.checkpoint_pending or self._log.refusal is not None:
            return
        aged = any(now_s - self._started_s[file] >= self._age_s for file in pending)
        closed = streams.closed_file > self.checkpointed_seq and streams.closed_file in pending
        needed = self._checkpoint_needed(now_s)
        if aged or closed or urgent or self._large or needed:
            self._rotated_s = now_s
            self._checked, self._large = 0, False
            self._log.rotate_journal()
