"""When the journal file that is being written ends early: something that is due is only in there.

Only what is in the hot store can be sealed, trimmed or recorded, and it gets there with the checkpoint of a
file that has ended. Left to itself, a file ends when it is full.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.log.log import Log
from tailrace.storage.due import DueStreams
from tailrace.storage.pressure import SealBacklog
from tailrace.storage.retention import is_over_bounds

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
            self._log.move_on()
