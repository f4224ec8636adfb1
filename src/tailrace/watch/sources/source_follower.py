"""A source at work, whatever its kind: one session after the other, until somebody ends it.

Whatever goes wrong ends the session. The next one, after a pause that grows, finds out from what is durable
where the source was; what it reads again it knows by its position.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Final, NamedTuple

from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.watch.audit import AuditLog
from tailrace.watch.book import CollectionRegistry
from tailrace.watch.collection import Collection
from tailrace.watch.sources.config import SourceConfig
from tailrace.watch.sources.model import GapError, SourceError
from tailrace.watch.sources.source_ingest import SourceIngest, SupersededError
from tailrace.watch.sources.source_seen import SeenKeys
from tailrace.watch.sources.source_states import SourceLifecycle
from tailrace.watch.sources.source_status import SourceStatus

logger = logging.getLogger("tailrace.watch")

RETRY_S_MIN: Final = 1.0
VIEW_ROWS: Final = 500
ERROR_CHARS: Final = 500


class SourceContext(NamedTuple):
    """A source, and all that whoever follows it has to do with."""

    book: CollectionRegistry
    states: SourceLifecycle
    config: SourceConfig
    status: SourceStatus
    limits: Limits
    audit: AuditLog


class SourceRunner(ABC):
    """Runs one source until it is cancelled."""

    def __init__(self, followed: SourceContext) -> None:
        self._book, self._states, self._config, self._status, self._limits, self._audit = followed
        self._retry_s = RETRY_S_MIN

    async def run(self) -> None:
        while True:
            pause_s = await self._once()
            if pause_s is None:
                return
            await asyncio.sleep(pause_s)

    @abstractmethod
    async def _session(self) -> None:
        """Until something is wrong."""

    async def _left(self) -> None:
        """The session is over, and another may follow."""
        self._status.connected = False

    def _explained(self, error: Exception) -> str | None:
        """What an error means that is not ours; None if that is not known."""
        return None

    async def _once(self) -> float | None:
        """One session; for how long to wait before the next, None if there is to be none."""
        status = self._status
        try:
            await self._states.settled()
            await self._session()
        except GapError as gap:
            logger.warning("the source %s has a gap: %s", self._config.name, gap.reason)
            status.gaps += 1
            self._audit.event("source.gap", None, {"source": self._config.name, "reason": gap.reason})
            with suppress(TailraceError):
                await self._states.lose(gap.reason, rescan=self._config.on_gap == "rescan")
            status.error = gap.reason
        except SupersededError as error:
            logger.warning("the source %s: %s", self._config.name, error)
            return None
        except (SourceError, TailraceError) as error:
            status.error = str(error)
            logger.warning("the source %s: %s", self._config.name, error)
        except Exception as error:
            known = self._explained(error)
            status.error = known or _shortened(error)
            logger.warning("the source %s: %s", self._config.name, status.error, exc_info=known is None)
        status.restarts += 1
        await self._left()
        pause_s = self._retry_s
        self._retry_s = min(2 * self._retry_s, self._limits.watch_source_retry_ms / 1000)
        return pause_s

    def _worked(self) -> None:
        """It is in order: the next pause is short."""
        self._status.error = None
        self._retry_s = RETRY_S_MIN

    async def _hold(self, reason: str | None) -> None:
        """Something is missing, and an operator decides."""
        self._status.error = reason
        await asyncio.Event().wait()

    async def _remove_unseen(self, ingest: SourceIngest, collection: Collection, seen: SeenKeys) -> None:
        """Documents that were not mentioned are gone."""
        after = ""
        while rows := self._book.view.now.documents_after(collection.number, after, VIEW_ROWS):
            after = rows[-1].id
            if gone := seen.lacks([row.id for row in rows]):
                await ingest.remove(collection, gone)
            await asyncio.sleep(0)


def _shortened(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:ERROR_CHARS] or type(error).__name__
