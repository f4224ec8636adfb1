"""Which streams are due to be sealed: by size, by count, by age, or because they are closed."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Set

from tailrace.common.limits import Limits
from tailrace.log.model import Stream


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
