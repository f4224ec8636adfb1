"""Which plans in the folder of a stream are still needed. All others may be swept."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from tailrace.log.catalogue import INDEX_DOCUMENT, decode_plans
from tailrace.log.stored_streams import StoredStreams
from tailrace.storage.document_objects import DocumentObject, document_key
from tailrace.storage.manifests.model import ManifestHead
from tailrace.storage.meta_objects import MetaCorruptError, MetaObjects
from tailrace.storage.object_store.objects import ObjectMissingError
from tailrace.storage.segments.companions import IndexFile, PlanHistory, plan_name
from tailrace.storage.segments.segments import stream_prefix

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectInfo, ObjectStore

_PLAN: Final = re.compile(r"plans/[0-9a-f]{64}\.json")

# The plans that the server itself remembers of a stream; those in the bucket may be behind.
LookUpPlans = Callable[[ManifestHead], Awaitable[PlanHistory]]


def has_same_stream(store: StoredStreams, head: ManifestHead) -> bool:
    """On a thread: whether the hot store has the very stream of a manifest."""
    stream = store.stream_by_name(head.name)
    return stream is not None and stream.incarnation == head.incarnation


def stored_plans(store: StoredStreams, head: ManifestHead) -> PlanHistory:
    """On a thread: the plans of a stream in the hot store."""
    stream = store.stream_by_name(head.name)
    if stream is None or stream.incarnation != head.incarnation:
        return PlanHistory()
    return decode_plans(stream.documents)


async def superseded_plans(
    objects: ObjectStore,
    head: ManifestHead,
    companions: AsyncIterator[IndexFile],
    found: Sequence[ObjectInfo],
    oldest_ns: int,
    remembered: LookUpPlans | None,
) -> list[ObjectInfo]:
    """Plans that are not the wanted one and no companion was built by. No plan may be stored meanwhile.

    A stream remembers the fingerprints of some plans before the wanted one; the object of such a plan is
    needed only as long as a companion was built by it. One that is wanted again is stored again, so each is
    looked at once more: the listing is of before.
    """
    prefix = stream_prefix(head.stream_id)
    plans = [info for info in found if _PLAN.fullmatch(info.key.removeprefix(prefix))]
    book = await _recorded_plans(objects, head) if plans else None
    if book is None:
        return []
    books = [book] if remembered is None else [book, await remembered(head)]
    known = {each.wanted.hash for each in books if each.wanted is not None}
    known |= {one.plan_hash async for one in companions}
    named = {prefix + plan_name(plan_hash) for plan_hash in known}
    return [
        info for info in plans if info.key not in named and await _is_older_than(objects, info.key, oldest_ns)
    ]


async def _recorded_plans(objects: ObjectStore, head: ManifestHead) -> PlanHistory | None:
    """The plans that the bucket remembers of a stream; None if that cannot be told."""
    if INDEX_DOCUMENT not in head.meta_keys:
        return PlanHistory()
    try:
        found = await MetaObjects(objects, 0).load(
            document_key(head.stream_id, INDEX_DOCUMENT), DocumentObject
        )
        return None if found is None else decode_plans({INDEX_DOCUMENT: bytes(found[0].document)})
    except (MetaCorruptError, msgspec.DecodeError):
        return None


async def _is_older_than(objects: ObjectStore, key: str, oldest_ns: int) -> bool:
    try:
        return (await objects.head(key)).modified_ns <= oldest_ns
    except ObjectMissingError:
        return False
