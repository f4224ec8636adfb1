"""Documents in the bucket: written once, fenced, and moved back to where the entries end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tailrace.storage.manifests.model import FencedError
from tailrace.storage.meta_objects import (
    DocumentObjects,
    MetaCorruptError,
    MetaObjects,
    document_key,
    restored_document,
    versions_within,
)
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.object_store.request_stats import CountingObjectStore, RequestStats

ID = "ab" * 16
REGISTRY = (
    b'{"schema":"s","boundaries":[{"offset":0,"version":1},{"offset":150,"version":2}],"schemas":{"1":1.50}}'
)


def test_boundaries_never_lie_behind_the_end() -> None:
    assert restored_document("profile", b"anything", 5) == b"anything"
    assert restored_document("schema", REGISTRY, 150) is REGISTRY
    moved = json.loads(restored_document("schema", REGISTRY, 100))
    assert moved["boundaries"] == [{"offset": 0, "version": 1}, {"offset": 100, "version": 2}]


@pytest.mark.parametrize(
    ("first", "last", "shown"),
    [
        (1, 150, "[[1,1]]"),
        (1, 151, "[[1,1],[151,2]]"),
        (151, 151, "[[151,2]]"),
        (151, 900, "[[151,2]]"),
        (100, 200, "[[100,1],[151,2]]"),
    ],
)
def test_a_segment_knows_the_versions_of_its_entries(first: int, last: int, shown: str) -> None:
    assert versions_within(REGISTRY, first, last) == shown
    assert versions_within(b'{"boundaries":[]}', first, last) == ""
    later = b'{"boundaries":[{"offset":149,"version":1}]}'
    assert versions_within(later, 149, 150) == "[[149,0],[150,1]]"


def test_what_was_published_is_taken_over(tmp_path: Path) -> None:
    async def main() -> None:
        objects = CountingObjectStore(open_object_store(tmp_path.as_uri()), RequestStats())
        first = DocumentObjects(MetaObjects(objects, 1))
        await first.publish(ID, {"schema": REGISTRY, "profile": b'{"kind": "generic"}'}, 7)
        stored = json.loads((await objects.get(document_key(ID, "schema")))[0])
        assert (stored["fence"], stored["generation"], stored["as_of"]) == (1, 1, 7)
        asked = dict(objects.requests)
        await first.publish(ID, {"schema": REGISTRY}, 8)
        assert dict(objects.requests) == asked, "nothing changed, nothing is asked"
        second = DocumentObjects(MetaObjects(objects, 2))
        assert await second.restore(ID, "profile", 9) == b'{"kind": "generic"}'
        assert json.loads(await second.restore(ID, "schema", 100))["boundaries"][1]["offset"] == 100
        with pytest.raises(FencedError):
            await first.publish(ID, {"schema": b"{}"}, 9)
        with pytest.raises(MetaCorruptError):
            await second.restore(ID, "touch", 0)
        await objects.close()

    asyncio.run(main())
