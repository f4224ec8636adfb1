"""The server's part of `meta/` objects: knows how far the bucket is behind, and has the sealer catch up.

That is a fact of the log itself, so nothing is written again after a restart.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from tailrace.log.durable import await_commit
from tailrace.log.log import Log
from tailrace.storage.hot_store.meta_tables import MetaTables
from tailrace.storage.meta_objects import key_fingerprint

if TYPE_CHECKING:
    from tailrace.storage.seal import SealingService

META_RECORDED_FACT: Final = "recorded/meta"


class MetaRecorder:
    def __init__(self, sealing: SealingService, log: Log, recovery_key: str) -> None:
        self._sealing = sealing
        self._log = log
        self._fingerprint = key_fingerprint(recovery_key)
        self._age_s = log.limits.seal_age_ms / 1000
        self._waits_since_s: float | None = None

    def waits_for_checkpoint(self, seq: int, now_s: float) -> bool:
        """Whether facts have been in the journal only for as long as entries may be."""
        if not self.unfolded(seq):
            self._waits_since_s = None
            return False
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        return now_s - self._waits_since_s >= self._age_s

    def unfolded(self, seq: int) -> bool:
        """Whether there are facts behind this journal file."""
        return self._log.streams.meta_file > seq

    async def record(self) -> bool:
        """True if the bucket has what the hot store has."""
        file, _, key = self._log.streams.meta.get(META_RECORDED_FACT, b"-1").decode().partition(" ")
        newest = await self._sealing.on_thread(lambda: MetaTables(self._log.store.db).newest_file())
        if newest < 0 or (newest <= int(file) and key == self._fingerprint):
            return True
        report = await self._sealing.ask("meta", [], int(file))
        if report.error:
            return False
        value = f"{report.as_of} {self._fingerprint}".encode()
        await await_commit(partial(self._log.put_meta, META_RECORDED_FACT, value))
        return True
