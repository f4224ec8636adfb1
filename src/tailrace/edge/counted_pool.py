"""Connections to an upstream whose use can be seen: what is under way, what waits, what found no room."""

from __future__ import annotations

from tailrace.edge.pool import Pool
from tailrace.errors import TailraceError


class CountedPool(Pool):
    """A pool with numbers for the metrics."""

    refused = 0  # requests for which there was no place in the queue

    @property
    def active(self) -> int:
        """Requests that have a connection; long answers with one of their own are not among them."""
        return len(self._slots)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def _turn(self) -> float:
        try:
            return await super()._turn()
        except TailraceError:
            self.refused += 1
            raise
