"""How long somebody whose socket ended waits before the next: longer each time that it gets nowhere.

An upstream's own back-off is for connections that fail. One that answers with a no, or closes the socket that
it has just opened, is well, and would be asked again at once for as long as that goes on.
"""

from __future__ import annotations

import asyncio
import random

from tailrace.edge.upstreams import BACKOFF_S_MAX, BACKOFF_S_MIN

# A socket that was open so long did its work: what happens to it then is the first setback of a new row.
SETTLED_S = 10.0


class ReconnectBackoff:
    """Of one follower, in a row."""

    def __init__(self) -> None:
        self._count = 0

    def note(self) -> None:
        """An attempt was answered, and led nowhere."""
        self._count = min(self._count + 1, 10)

    def note_ended(self, open_s: float) -> bool:
        """A socket ended after so long; true if that is the first setback."""
        if open_s >= SETTLED_S:
            self._count = 0
        self.note()
        return self._count == 1

    async def pause(self) -> None:
        """Not at all after the first, then up to twice as long each time, all of it random."""
        if self._count > 1:
            most = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** (self._count - 1))
            await asyncio.sleep(random.uniform(0, most))  # noqa: S311 - spreads load
