"""Nobody waits for ever: a commit that takes too long is answered, though it may still succeed."""

from __future__ import annotations

import asyncio

from tailrace.common.errors import TailraceError
from tailrace.log.commit import Committer
from tailrace.log.transaction import Transaction, ignore_reply

STALL_CHECK_S = 0.5
APPEND_TIMED_OUT = TailraceError(
    "append_timeout",
    "append timed out; append outcome is unknown, check Stream-Next-Offset before retrying",
)


class StalledCommits:
    """Looks at the batches on their way now and then, and only while there are any."""

    def __init__(self, committer: Committer, patience_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._committer = committer
        self._patience_s = patience_s
        self._loop = loop
        self.timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        self.timer = self._loop.call_later(STALL_CHECK_S, self._check)

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def _check(self) -> None:
        self.timer = None
        for batch in self._committer.older_than(self._patience_s):
            waiting, batch.waiting = batch.waiting, []
            for item in batch.items:
                assert type(item) is Transaction
                reply, item.reply = item.reply, ignore_reply
                reply(item, APPEND_TIMED_OUT)
            for settled in waiting:
                settled(APPEND_TIMED_OUT)
        if not self._committer.idle:
            self.watch()
