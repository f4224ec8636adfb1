"""What one connection has been sent and not taken yet, in messages and in bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

RATE_WINDOW_S = 10


class Outbox:
    """Counts; the bytes themselves are in the transport.

    `unsent` says how much the transport still holds. What was decided and not written yet is `_decided`.
    """

    __slots__ = ("_decided", "_ends", "_pushed", "_rates", "_second", "messages_total", "unsent")

    def __init__(self, unsent: Callable[[], int]) -> None:
        self.unsent = unsent
        self._decided = 0
        self._pushed = 0  # bytes, ever
        self._ends: list[int] = []  # where each message that may be unsent ends, counted in those
        self.messages_total = 0
        self._rates: list[int] = []  # messages taken in each of the last seconds
        self._second = 0

    @property
    def bytes(self) -> int:
        return self._decided + self.unsent()

    @property
    def messages(self) -> int:
        held = self.bytes
        ends = self._ends
        if not held:
            ends.clear()
            return 0
        taken = self._pushed - held
        if ends and ends[0] <= taken:
            del ends[: bisect_right(ends, taken)]
        return len(ends)

    def push(self, size: int) -> None:
        """A message was decided on."""
        self._pushed += size
        self._decided += size
        self._ends.append(self._pushed)
        self.messages_total += 1

    def written(self, size: int) -> None:
        """The transport has it now."""
        self._decided -= size
        if len(self._ends) > 256:
            _ = self.messages  # lets go of what was taken long ago

    def on_second(self) -> None:
        taken = self.messages_total - self.messages
        self._rates.append(taken - self._second)
        del self._rates[:-RATE_WINDOW_S]
        self._second = taken

    @property
    def rate(self) -> float:
        """Messages taken per second, over the last ten."""
        return sum(self._rates) / len(self._rates) if self._rates else 0.0
