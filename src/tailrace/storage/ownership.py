"""Who owns a bucket: one deployment at a time, by a number that only grows.

The number, the fence, is written into every head its owner changes. Taking a bucket over raises it, and a
head with a higher fence refuses everybody with a lower one. See docs/decisions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError
from tailrace.storage.manifests.model import MANIFEST_VERSION, FencedError
from tailrace.storage.object_store.objects import ObjectConflictError, ObjectMissingError

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore

OWNER_KEY = "meta/owner.json"
# Each lost race means that somebody else became the owner meanwhile.
CLAIM_ATTEMPTS_MAX = 16


class OwnedElsewhereError(TailraceError):
    """Another deployment owns the bucket, and nobody asked to take it over."""

    def __init__(self, url: str, owner: OwnerRecord) -> None:
        super().__init__(
            "unavailable",
            f"the object store {url} belongs to deployment {owner.deployment}; stop that server and take its "
            "bucket over, or use another bucket or prefix",
        )
        self.owner = owner


class OwnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `meta/owner.json`."""

    version: int = MANIFEST_VERSION
    deployment: str
    fence: int
    at_ns: int  # when this owner took it


class BucketOwnership:
    """Claims a bucket, and says whether the claim still holds."""

    def __init__(self, objects: ObjectStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self._objects = objects
        self._clock = clock

    async def current(self) -> OwnerRecord | None:
        found = await self._load()
        return None if found is None else found[0]

    async def claim(self, deployment: str, take_over: bool = False) -> int:
        """Become the owner, or find that we are; the fence to write with.

        A deployment keeps its fence when it claims again, so a crash in between changes nothing.
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
                continue  # somebody else was first, or it was us and the answer got lost
            return fence
        raise TailraceError(
            "unavailable", f"{CLAIM_ATTEMPTS_MAX} others took {self._objects.url} over meanwhile"
        )

    async def confirm(self, deployment: str, fence: int) -> None:
        """Raises once somebody else owns the bucket."""
        owner = await self.current()
        if owner is None:
            raise FencedError(f"{OWNER_KEY} is gone: nobody owns the bucket any more")
        if (owner.deployment, owner.fence) != (deployment, fence):
            raise FencedError(f"deployment {owner.deployment} took the bucket over (fence {owner.fence})")

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
