"""Documents of streams in the bucket: `meta/<key>.json` in the stream's folder, named by its manifest.

They are written before the manifest that tells of entries decided by them: a registry in the bucket may be
newer than the entries there, and is never older.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, cast

import msgspec

from tailrace.storage.meta_objects import MetaCorruptError, MetaObject, MetaObjects
from tailrace.storage.segments.segments import stream_prefix

REMEMBERED_DOCUMENTS_MAX: Final = 10_000


class DocumentObject(MetaObject, frozen=True, kw_only=True):
    document: msgspec.Raw  # byte for byte as the stream has it


def document_key(stream_id: str, key: str) -> str:
    return f"{stream_prefix(stream_id)}meta/{key}.json"


class DocumentObjects:
    """The documents of all streams, as one owner sees and changes them."""

    def __init__(self, objects: MetaObjects) -> None:
        self._objects = objects
        self._written: OrderedDict[str, bytes] = OrderedDict()  # hashes, so that nothing is written twice

    async def publish(self, stream_id: str, documents: Mapping[str, bytes], as_of: int) -> None:
        for key, document in documents.items():
            name, digest = document_key(stream_id, key), hashlib.sha256(document).digest()
            if self._written.get(name) == digest:
                continue
            await self._objects.put(name, DocumentObject(as_of=as_of, document=msgspec.Raw(document)))
            self._written[name] = digest
            self._written.move_to_end(name)
            if len(self._written) > REMEMBERED_DOCUMENTS_MAX:
                self._written.popitem(last=False)

    async def take(self, stream_id: str, key: str, tail: int) -> bytes:
        """A document for a stream that goes on behind entry `tail`. The object says so first."""
        name = document_key(stream_id, key)
        found = await self._objects.load(name, DocumentObject)
        if found is None:
            raise MetaCorruptError(f"{name} is missing")

        def become(current: DocumentObject | None) -> DocumentObject:
            document = restored_document(key, bytes((current or found[0]).document), tail)
            return DocumentObject(document=msgspec.Raw(document))

        return bytes((await self._objects.change(name, DocumentObject, become)).document)


def restored_document(key: str, document: bytes, tail: int) -> bytes:
    """A registry whose versions began with entries that are lost: they begin with the next ones instead."""
    if key != "schema":
        return document
    registry = msgspec.json.decode(document, type=dict[str, object])
    boundaries = cast("list[dict[str, int]]", registry["boundaries"])
    if all(boundary["offset"] <= tail for boundary in boundaries):
        return document
    for boundary in boundaries:
        boundary["offset"] = min(boundary["offset"], tail)
    return msgspec.json.encode(registry)


def versions_within(document: bytes, first: int, last: int) -> str:
    """Where versions begin among these entries, as JSON pairs of entry and version; 0 is before the first."""
    boundaries = msgspec.json.decode(document, type=_Boundaries).boundaries
    if not boundaries:
        return ""
    version = 0
    within: list[tuple[int, int]] = []
    for boundary in boundaries:
        begins = boundary["offset"] + 1  # sequence numbers count from 0, entries from 1
        if begins <= first:
            version = boundary["version"]
        elif begins <= last:
            within.append((begins, boundary["version"]))
    return msgspec.json.encode([(first, version), *within]).decode()


def version_cuts(document: bytes) -> list[int]:
    """Entries of which the next one begins another schema version."""
    boundaries = msgspec.json.decode(document, type=_Boundaries).boundaries
    return [boundary["offset"] for boundary in boundaries]  # numbers count from 0, entries from 1


class _Boundaries(msgspec.Struct):
    boundaries: list[dict[str, int]]
