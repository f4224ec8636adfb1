"""Bucket ownership: claim and fence, and the checks before a claim.

A bucket is owned by one deployment at a time. The fence is a number that only grows: taking a bucket over
increments it, and it is written into every head its owner changes. A head with a higher fence cannot be
changed by an owner with a lower one. See docs/decisions.

Before a server claims a bucket it checks that it knows every stream recorded there: a stream that another
server recorded could not be continued, and its entries could never be sealed. It also checks, with a sample
of streams, that its data directory is not older than the bucket, as after restoring a backup: new entries
would get numbers that the bucket has other entries for. What the sample does not show is found at sealing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.log import system_streams
from tailrace.log.model import Stream
from tailrace.log.records import Sealed
from tailrace.log.stored_streams import StoredStreams
from tailrace.protocol.stream_names import is_system_name
from tailrace.storage.manifest_recording import manifest_facts
from tailrace.storage.manifests.changes import is_same_incarnation
from tailrace.storage.manifests.model import (
    MANIFEST_VERSION,
    FencedError,
    ManifestCorruptError,
    ManifestError,
    ManifestHead,
)
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import (
    ObjectConflictError,
    ObjectMissingError,
    ObjectStoreError,
    open_object_store,
)
from tailrace.storage.object_store.listing import for_each_stream
from tailrace.storage.segments.model import make_stream_id

if TYPE_CHECKING:
    from tailrace.log.log import Log
    from tailrace.storage.object_store.interface import ObjectStore


OWNER_KEY = "meta/owner.json"
# A lost race means that another server became the owner.
CLAIM_ATTEMPTS_MAX = 16


class OwnedElsewhereError(TailraceError):
    """Another deployment owns the bucket, and --take-over was not given."""

    def __init__(self, url: str, owner: OwnerRecord) -> None:
        super().__init__(
            "unavailable",
            f"the object store {url} belongs to deployment {owner.deployment}; stop that server and take "
            "over its bucket, or use another bucket or prefix",
        )
        self.owner = owner


class OwnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `meta/owner.json`."""

    version: int = MANIFEST_VERSION
    deployment: str
    fence: int
    at_ns: int  # when this owner claimed it


class BucketOwnership:
    """Claims a bucket and confirms the claim."""

    def __init__(self, objects: ObjectStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self._objects = objects
        self._clock = clock

    async def current(self) -> OwnerRecord | None:
        found = await self._load()
        return None if found is None else found[0]

    async def claim(self, deployment: str, take_over: bool = False) -> int:
        """Claims the bucket, or confirms that this deployment owns it; returns the fence.

        A deployment has the same fence when it claims again, so a crash in between changes nothing.
        """
        for _attempt in range(CLAIM_ATTEMPTS_MAX):
            found = await self._load()
            if found is not None and found[0].deployment == deployment:
                return found[0].fence
            if found is not None and not take_over:
                raise OwnedElsewhereError(self._objects.url, found[0])
            fence = 1 if found is None else found[0].fence + 1
            owner = OwnerRecord(deployment=deployment, fence=fence, at_ns=self._clock.now_ns())
            data = msgspec.json.encode(owner, order="sorted")
            try:
                await self._objects.replace(OWNER_KEY, data, None if found is None else found[1])
            except ObjectConflictError:
                continue  # another server was first, or it was this one and the response was lost
            return fence
        raise TailraceError(
            "unavailable",
            f"the owner of {self._objects.url} changed {CLAIM_ATTEMPTS_MAX} times during the claim",
        )

    async def confirm(self, deployment: str, fence: int) -> None:
        """Raises once another server owns the bucket."""
        owner = await self.current()
        if owner is None:
            raise FencedError(f"{OWNER_KEY} does not exist: the bucket has no owner")
        if (owner.deployment, owner.fence) != (deployment, fence):
            raise FencedError(
                f"deployment {owner.deployment} has taken over the bucket (fence {owner.fence})"
            )

    async def _load(self) -> tuple[OwnerRecord, str] | None:
        try:
            data, etag = await self._objects.get(OWNER_KEY)
        except ObjectMissingError:
            return None
        try:
            owner = msgspec.json.decode(data, type=OwnerRecord)
        except msgspec.DecodeError as error:
            raise TailraceError("unavailable", f"{OWNER_KEY} cannot be read: {error}") from None
        if owner.version > MANIFEST_VERSION:
            raise TailraceError("unavailable", f"{OWNER_KEY} was written by a newer version of Tailrace")
        return owner, etag


class ForeignStreamsError(TailraceError):
    """The bucket has streams of another server. Nothing was changed."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(
            "unavailable",
            f"the object store {url} has streams that this data directory does not have, such as {name!r}. "
            "To restore them, start with --bootstrap on an empty data directory; to start without them, "
            "name another bucket or prefix",
        )


async def refuse_foreign_streams(objects: ObjectStore, stores: Sequence[StoredStreams]) -> None:
    """Raises at the first stream of the bucket that none of the hot stores has.

    Reads every manifest, a few at a time.
    """
    manifests = ManifestStore(objects, 0)
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, "foreign-streams")

    def is_known(head: ManifestHead) -> bool:
        return any(is_known_stream(store, head) for store in stores)

    async def look(stream_id: str) -> None:
        try:
            stored = await manifests.load(stream_id)
        except ManifestCorruptError:
            raise ForeignStreamsError(objects.url, f"id {stream_id}") from None
        if stored is not None and not await loop.run_in_executor(thread, is_known, stored.head):
            raise ForeignStreamsError(objects.url, stored.head.name)

    try:
        await for_each_stream(objects, look)
    finally:
        thread.shutdown(wait=False)


def is_known_stream(store: StoredStreams, head: ManifestHead) -> bool:
    """Whether the hot store has the stream of a manifest, or knows that it was deleted."""
    with store.snapshot():
        stream = store.stream_by_name(head.name)
        if head.deleted is None:
            same = stream is not None and stream.incarnation == head.incarnation
            if same and stream is not None and is_same_incarnation(manifest_facts(stream, 0), head):
                return True
            return store.db.cold.is_deleted(head.stream_id)
        tombstone = store.tombstone(head.name)
        epoch = max(
            -1 if stream is None else stream.epochs[-1][0], -1 if tombstone is None else tombstone.epoch
        )
        return epoch >= head.deleted.epoch  # no stream here starts in a used epoch


SAMPLED_OF_EACH = 8


class RolledBackError(TailraceError):
    """The bucket is ahead of this directory. Nothing was changed."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(
            "unavailable",
            f"the data directory is older than the object store {url}, which has changes of {name!r} that "
            "are missing here: it is a backup, or a copy of a directory in use. To continue with what the "
            "bucket has, start with --bootstrap on an empty data directory. To go back to the backup, name a "
            "copy of the bucket that was made together with it. To serve this directory nevertheless, add "
            "--take-over: streams that differ are then not sealed",
        )


async def refuse_rolled_back(objects: ObjectStore, log: Log, fence: int) -> None:
    """Raises if a manifest is ahead of this directory. The fence is that of this deployment."""
    manifests = ManifestStore(objects, fence)

    async def look(stream: Stream) -> bool:
        try:
            stored = await manifests.load(make_stream_id(stream.name, stream.incarnation))
        except ManifestError:
            return False  # reported when the stream is used
        return stored is not None and is_manifest_ahead(stored.head, stream, fence, log.recovered.seq)

    streams = sampled_streams(log)
    ahead = await asyncio.gather(*map(look, streams))
    names = [stream.name for stream, found in zip(streams, ahead, strict=True) if found]
    if names:
        raise RolledBackError(objects.url, min(names, key=is_system_name))  # a known stream, if possible


def is_manifest_ahead(head: ManifestHead, stream: Stream, fence: int, journal_seq: int) -> bool:
    """Whether a manifest has entries, or a journal file, that this directory never had."""
    later_file = head.fence == fence and head.as_of > journal_seq
    return is_same_incarnation(manifest_facts(stream, 0), head) and (
        later_file or head.uploaded_through > stream.tail
    )


def sampled_streams(log: Log) -> list[Stream]:
    """Streams of which a server that continued would most likely have sealed more."""
    found = (log.streams.get(number) for number in dict.fromkeys(_sampled_numbers(log)))
    return [stream for stream in found if stream is not None]


def _sampled_numbers(log: Log) -> Iterator[int]:
    for name in (
        system_streams.BOUNDED_STREAMS
    ):  # is written as long as the server runs, or whenever something happens
        stream = log.streams.find(name + log.own_suffix)
        if stream is not None:
            yield stream.number
    yield from tuple(islice(log.streams.by_number, SAMPLED_OF_EACH))  # with records in the journal
    yield from log.store.db.cold.hot_numbers(0, SAMPLED_OF_EACH)
    yield from log.store.db.newest_numbers(SAMPLED_OF_EACH)


logger = logging.getLogger("tailrace.seal")

# A server starts even if its object store does not respond: the bucket is then claimed later.
START_S_MAX = 5.0


class SealedElsewhereError(TailraceError):
    """Streams are sealed, but not to this object store: serving them would be serving holes."""

    def __init__(self, url: str) -> None:
        super().__init__(
            "unavailable",
            f"the object store {url} does not have the segments that this data directory has sealed; name "
            "the store that has it, or copy all of it there. To continue without it, start with --take-over",
        )


def has_sealed(log: Log) -> bool:
    """Whether there are segments, including those that only the journal knows."""
    uncheckpointed = (op for ops in log.streams.uncheckpointed.values() for _, op in ops)
    in_journal = any(isinstance(op, Sealed) and op.segments for op in uncheckpointed)
    return in_journal or log.store.db.cold.any_segments()


class BucketOwner:
    """The fence to write with, 0 without one."""

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
        """Raises if another server owns the bucket; if the store is unavailable, it is claimed later."""
        try:
            # A start with --take-over waits until the whole bucket is checked.
            async with asyncio.timeout(None if self._take_over else START_S_MAX):
                await self.claim()
        except OwnedElsewhereError as error:
            raise TailraceError(
                "unavailable",
                f"the object store {self._url} belongs to deployment {error.owner.deployment}; use another "
                "bucket or prefix. If the disk of the other server is lost, start this one with --bootstrap "
                "to restore its streams; otherwise stop it and start this one with --take-over",
            ) from error
        except (TimeoutError, ObjectStoreError, OSError) as error:
            self.failure = str(error) or "no response"
            fields = log_fields(url=self._url, error=self.failure)
            logger.error("object store unavailable at start, retrying", extra=fields)

    async def claim(self) -> None:
        """Claims the bucket. Before the first claim every stream in it must be known here."""
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
        """Raises FencedError once another server owns the bucket. An unavailable store is only recorded."""
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
                fields = log_fields(url=self._url, error=str(error))
                logger.warning("cannot confirm the owner of the object store, retrying", extra=fields)
            self.failure = str(error)

    async def close(self) -> None:
        await self._objects.close()
