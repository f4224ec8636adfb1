"""How many syncs may be under way at once.

On a quick disk one is enough. On a slow one several at once multiply the throughput, if the disk works on
them together; if it does them one after the other, each only waits for those before it, and small batches
queue where one large batch would do. Which of the two it is shows in how long syncs take.
"""

from __future__ import annotations

# Above this a sync is slow enough that waiting for it to end before writing the next batch costs throughput.
SLOW_SYNC_S = 0.0015
SYNC_TIME_WEIGHT = 0.1  # of one sync among those before it
# Of the time that other syncs take, the part that is waited for: 0 if they run together, 1 if in turn.
SYNC_WAIT_SHARE_MAX = 0.5
SYNCS_PER_PROBE = 64  # syncs; disks change their ways


class SyncConcurrency:
    """Learns from every sync; `permitted` is what it has come to."""

    __slots__ = ("_alone_s", "_count", "_most", "_waited", "permitted", "sync_s")

    def __init__(self, most: int) -> None:
        self._most = most
        self._alone_s = 0.0  # smoothed, of syncs that began while no other was under way
        self._waited = 0.0
        self._count = 0
        self.sync_s = 0.0  # smoothed, of all
        self.permitted = 1

    def note(self, sync_s: float, under_way: int) -> None:
        """One sync took this long, and began as the last of so many."""
        self._count += 1
        self.sync_s += (sync_s - self.sync_s) * SYNC_TIME_WEIGHT
        if under_way == 1:
            self._alone_s += (sync_s - self._alone_s) * (SYNC_TIME_WEIGHT if self._alone_s else 1.0)
        elif self._alone_s:
            waited = (sync_s / self._alone_s - 1.0) / (under_way - 1)
            self._waited += (min(max(waited, 0.0), 1.0) - self._waited) * SYNC_TIME_WEIGHT
        if self.sync_s <= SLOW_SYNC_S:
            self.permitted = 1
        elif self._waited <= SYNC_WAIT_SHARE_MAX:
            self.permitted = self._most
        else:
            self.permitted = min(2, self._most) if self._count % SYNCS_PER_PROBE == 0 else 1
