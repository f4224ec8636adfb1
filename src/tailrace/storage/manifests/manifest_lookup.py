"""Finds the manifests of a stream that is known by its name only, and shows them to people."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.storage.manifests.manifest import ManifestStore
from tailrace.storage.manifests.model import ManifestHead, encode_manifest
from tailrace.storage.object_store.bucket import list_stream_ids
from tailrace.storage.segments.segments import make_stream_id

if TYPE_CHECKING:
    from tailrace.storage.object_store.objects import ObjectStore

# A name that is deleted and made again counts up; nearly every name has been used a few times at most.
INCARNATIONS_TRIED = 64
_STREAM_ID = re.compile(r"[0-9a-f]{32}")


async def find_heads(objects: ObjectStore, name_or_id: str) -> list[ManifestHead]:
    """The heads of every use of a name, tombstones included, the newest last; or the one with that id."""
    manifests = ManifestStore(objects, 0)
    ids = [make_stream_id(name_or_id, number) for number in range(INCARNATIONS_TRIED)]
    if _STREAM_ID.fullmatch(name_or_id):
        ids.append(name_or_id)
    found = [stored.head for stored in await asyncio.gather(*map(manifests.load, ids)) if stored is not None]
    if not found or found[-1].incarnation == INCARNATIONS_TRIED - 1:
        async for candidate in list_stream_ids(objects):
            stored = await manifests.load(candidate)
            if stored is not None and stored.head.name == name_or_id and stored.head not in found:
                found.append(stored.head)
    return sorted(found, key=lambda head: head.incarnation)


def describe_head(head: ManifestHead, producers: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Everything the head says, with its lists counted instead of printed: they may be long."""
    described: dict[str, Any] = msgspec.json.decode(encode_manifest(head))
    del described["segments"]
    del described["companions"]
    described["pages"] = [msgspec.structs.asdict(page) for page in head.pages]
    described["companion_pages"] = [msgspec.structs.asdict(page) for page in head.companion_pages]
    return described | {
        "segment_count": head.segment_count,
        "segment_bytes": head.segment_bytes,
        "companion_count": head.companion_count,
        "companion_bytes": head.companion_bytes,
        "producers": producers,
    }
