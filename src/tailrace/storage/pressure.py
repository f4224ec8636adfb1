"""How much is waiting for the object store, and the refusal of more when that is too much."""

from __future__ import annotations

import logging

from tailrace.common.errors import TailraceError
from tailrace.log.log import Log

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
        self._log.on_no_room = self._refuse
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
