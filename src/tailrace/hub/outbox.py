"""What one connection has been sent and not taken yet, in messages and in bytes."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, Protocol

RATE_WINDOW_S: Final = 10
# Of a connection that was given nothing for as long; shared, since most are like that most of the time.
_IDLE_RATES: Final = [0] * RATE_WINDOW_S


class OutboundConnection(Protocol):
    """A connection, as far as it tells what it still holds."""

    @property
    def unsent_bytes(self) -> int: ...
    @property
    def unsent_bytes_most(self) -> int:
        """Not less than `unsent_bytes`, and quicker to ask for."""
        ...


class _NoConnection:
    @property
    def unsent_bytes(self) -> int:
        return 0

    unsent_bytes_most = unsent_bytes


NO_CONNECTION: Final = _NoConnection()


class Outbox:
    """Counts; the bytes themselves are in the transport.

    What was decided and not written yet is `_decided`; what was written is the wire's to know.
    """

    __slots__ = ("_decided", "_ends", "_pushed", "_rates", "_second", "messages_total", "wire")

    def __init__(self, wire: OutboundConnection = NO_CONNECTION) -> None:
        self.wire = wire
        self._decided = 0
        self._pushed = 0  # bytes, ever
        self._ends: list[int] = []  # where each message that may be unsent ends, counted in those
        self.messages_total = 0
        self._rates: list[int] = []  # messages taken in each of the last seconds
        self._second = 0

    @property
    def bytes(self) -> int:
        return self._decided + self.wire.unsent_bytes

    @property
    def messages(self) -> int:
        ends = self._ends
        if not ends:
            return 0
        held = self.bytes
        if not held:
            ends.clear()
            return 0
        taken = self._pushed - held
        if ends[0] <= taken:
            del ends[: bisect_right(ends, taken)]
        return len(ends)

    def is_light(self, bytes_max: int, messages_max: int) -> bool:
        """Whether it certainly holds no more than this. If not, it may all the same: then it is counted."""
        return len(self._ends) <= messages_max and self._decided + self.wire.unsent_bytes_most <= bytes_max

    def push_if_light(self, size: int, bytes_max: int, messages_max: int) -> bool:
        """`push`, if `is_light`: both in one step, for messages that go to very many."""
        ends = self._ends
        if len(ends) > messages_max or self._decided + self.wire.unsent_bytes_most > bytes_max:
            return False
        pushed = self._pushed = self._pushed + size
        self._decided += size
        ends.append(pushed)
        self.messages_total += 1
        return True

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
        if taken == self._second and self._rates is _IDLE_RATES:
            return
        rates = [*self._rates, taken - self._second][-RATE_WINDOW_S:]
        self._rates = _IDLE_RATES if rates == _IDLE_RATES else rates
        self._second = taken

    @property
    def rate(self) -> float:
        """Messages taken per second, over the last ten."""
        return sum(self._rates) / len(self._rates) if self._rates else 0.0
