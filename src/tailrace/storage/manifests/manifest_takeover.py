"""Manifests as somebody sees them who restores streams: each is taken over before it is served."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tailrace.storage.manifests.manifest import HeadChange, ManifestStore, StoredHead
from tailrace.storage.manifests.model import ManifestConflictError, ManifestHead


class TakeoverManifestStore(ManifestStore):
    """An owner that came after others and goes on where they were."""

    async def take(
        self,
        stream_id: str,
        become: Callable[[ManifestHead], ManifestHead],
        *,
        known: StoredHead | None = None,
    ) -> ManifestHead:
        """Put our fence on a head and record what it becomes. Nobody before us can change it afterwards.

        `become` makes the head to go on with out of the one that is there; it is asked again if that has
        changed meanwhile. Snapshots are numbered anew by each owner.
        """

        async def plan(current: ManifestHead | None) -> HeadChange:
            if current is None:
                raise ManifestConflictError(stream_id, "its head is gone")
            return HeadChange(msgspec.structs.replace(become(current), as_of=0))

        return await self._change(stream_id, plan, known, adopting=True)
