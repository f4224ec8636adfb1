"""This server's claim to its bucket: made at start, checked now and then, lost when somebody takes over."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from tailrace.common.errors import TailraceError
from tailrace.log.log import Log
from tailrace.log.records import Sealed
from tailrace.storage.manifests.model import FencedError
from tailrace.storage.object_store.objects import ObjectStoreError, open_object_store
from tailrace.storage.ownership import BucketOwnership, OwnedElsewhereError
from tailrace.storage.rolled_back import RolledBackError, refuse_rolled_back
from tailrace.storage.strangers import ForeignStreamsError, refuse_foreign_streams

logger = logging.getLogger("tailrace.seal")

# A server must come up although its object store does not answer: the claim is then made later.
START_S_MAX = 5.0


class SealedElsewhereError(TailraceError):
    """Streams are sealed, but not to this object store: serving them would be serving holes."""

    def __init__(self, url: str) -> None:
        super().__init__(
            "unavailable",
            f"the object store {url} has nothing of the history that this data directory sealed before; name "
            "the store that has it, or copy all of it there. To go on without it, start with --take-over",
        )


def has_sealed(log: Log) -> bool:
    """Whether there are segments, be it that only the journal knows of them."""
    unfolded = (op for ops in log.streams.unfolded.values() for _, op in ops)
    in_journal = any(isinstance(op, Sealed) and op.segments for op in unfolded)
    return in_journal or log.store.db.cold.any_segments()


class BucketOwner:
    """The fence we write with, 0 while we have none."""

    def __init__(self, url: str, deployment: str, take_over: bool, log: Log) -> None:
        try:
            self._objects = open_object_store(url, limits=log.limits)
        except (ValueError, ObjectStoreError) as error:
            raise TailraceError("unavailable", str(error)) from error
        self._ownership = BucketOwnership(self._objects)
        self._url = url
        self.deployment = deployment
        self._take_over = take_over
        self._log = log
        self._sealed = has_sealed(log)  # there is history to be found there
        self.fence = 0
        self.failure = ""

    @property
    def requests(self) -> Counter[str]:
        return self._objects.requests

    async def start(self) -> None:
        """Refuses to start beside another owner; without an answer, the question stays open."""
        try:
            # Whoever asks for a bucket that is somebody's waits until all that is in it has been looked at.
            async with asyncio.timeout(None if self._take_over else START_S_MAX):
                await self.claim()
        except OwnedElsewhereError as error:
            raise TailraceError(
                "unavailable",
                f"the object store {self._url} belongs to deployment {error.owner.deployment}; give this "
                "server another bucket or prefix. If the disk of the other one is lost, start this one with "
                "--bootstrap to get its streams back; else stop the other one and start this one with "
                "--take-over",
            ) from error
        except (TimeoutError, ObjectStoreError, OSError) as error:
            self.failure = str(error) or "no answer"
            logger.error("the object store %s cannot be used yet: %s", self._url, self.failure)

    async def claim(self) -> None:
        """Before the bucket becomes ours, everything in it must be; found again later, it is not asked."""
        owner = await self._ownership.current()
        if owner is None and self._sealed and not self._take_over:
            raise SealedElsewhereError(self._url)
        if owner is None or (owner.deployment != self.deployment and self._take_over):
            await refuse_foreign_streams(self._objects, [self._log.store])
        if owner is not None and owner.deployment == self.deployment and not self._take_over:
            await refuse_rolled_back(self._objects, self._log, owner.fence)
        self.fence = await self._ownership.claim(self.deployment, self._take_over)
        self.failure = ""

    async def confirm(self) -> None:
        """Raises FencedError once the bucket is somebody else's. A store without an answer says nothing."""
        try:
            if not self.fence:
                await self.claim()
            else:
                await self._ownership.confirm(self.deployment, self.fence)
            self.failure = ""
        except (OwnedElsewhereError, SealedElsewhereError, RolledBackError, ForeignStreamsError) as error:
            raise FencedError(error.message) from error
        except (ObjectStoreError, OSError) as error:
            if not self.failure:
                logger.warning("the owner of %s cannot be confirmed: %s", self._url, error)
            self.failure = str(error)

    async def close(self) -> None:
        await self._objects.close()
