"""Whether everything that a bucket records is known here: asked before a server makes a bucket its own.

A stream that somebody else recorded cannot be gone on with by a server that does not have it: whatever that
server made under the same name could never be sealed, and nobody would notice before the disk is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tailrace.common.errors import TailraceError
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.facts import manifest_facts
from tailrace.storage.manifests.manifest import ManifestStore
from tailrace.storage.manifests.manifest_resolve import is_same_incarnation
from tailrace.storage.manifests.model import ManifestCorruptError, ManifestHead
from tailrace.storage.object_store.crowd import for_each_stream

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore


class ForeignStreamsError(TailraceError):
    """The bucket has streams of somebody else. Nothing was changed."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(
            "unavailable",
            f"the object store {url} holds streams that this data directory does not have, such as {name!r}. "
            "To go on with them, start with --bootstrap on an empty data directory; to begin without them, "
            "name another bucket or prefix",
        )


async def refuse_foreign_streams(objects: ObjectStore, stores: Sequence[StoredStreams]) -> None:
    """Raises at the first stream of the bucket that none of our hot stores has.

    Reads every manifest, a few at a time.
    """
    manifests = ManifestStore(objects, 0)
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, "strangers")

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
    """Whether the hot store has the very stream a manifest speaks of, or knows that it is gone."""
    with store.snapshot():
        stream = store.stream_by_name(head.name)
        if head.deleted is None:
            same = stream is not None and stream.incarnation == head.incarnation
            if same and stream is not None and is_same_incarnation(manifest_facts(stream, 0), head):
                return True
            return store.db.cold.has_grave(head.stream_id)
        tombstone = store.tombstone(head.name)
        epoch = max(
            -1 if stream is None else stream.epochs[-1][0], -1 if tombstone is None else tombstone.epoch
        )
        return epoch >= head.deleted.epoch  # nobody here begins in one that was used
