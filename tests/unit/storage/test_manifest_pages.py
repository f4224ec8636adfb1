"""Manifests of long streams, with the real sizes of pages."""

from __future__ import annotations

import asyncio

from support.manifests import facts, run_of, segment
from tailrace.storage.manifests.pages import HEAD_SEGMENTS_MAX, SEGMENT_PAGES_MAX
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import open_object_store


def test_a_thousand_segments_fill_a_page() -> None:
    async def run() -> None:
        objects = open_object_store("memory://manifest-sizes-segments")
        manifests = ManifestStore(objects, 1)
        head = await manifests.publish(facts(HEAD_SEGMENTS_MAX), run_of(1, HEAD_SEGMENTS_MAX))
        assert (len(head.pages), len(head.segments)) == (0, HEAD_SEGMENTS_MAX)
        head = await manifests.publish(
            facts(HEAD_SEGMENTS_MAX + 1), [segment(HEAD_SEGMENTS_MAX + 1, HEAD_SEGMENTS_MAX + 1)]
        )
        assert (len(head.pages), len(head.segments)) == (1, 1)
        head = await manifests.publish(facts(3500), run_of(HEAD_SEGMENTS_MAX + 2, 3500))
        assert [(ref.first, ref.last, ref.segments) for ref in head.pages] == [
            (1, 1000, 1000),
            (1001, 2000, 1000),
            (2001, 3000, 1000),
        ]
        assert [info async for info in manifests.segments(head)] == run_of(1, 3500)
        head = await manifests.trim(head.stream_id, 1234)
        assert [info.first async for info in manifests.segments(head)] == list(range(1235, 3501))
        await objects.close()

    asyncio.run(run())


def test_a_thousand_pages_fill_a_page_of_pages_and_publishing_costs_the_same() -> None:
    async def run() -> None:
        objects = open_object_store("memory://manifest-sizes-pages")
        manifests = ManifestStore(objects, 1, segments_max=2)
        entries = 2 * (2 * SEGMENT_PAGES_MAX + 3)
        head = await manifests.publish(facts(entries), run_of(1, entries))
        assert [ref.level for ref in head.pages] == [1, 1, 0, 0]
        assert head.segment_count == entries
        assert [info async for info in manifests.segments(head)] == run_of(1, entries)
        costs: set[int] = set()
        for entry in range(entries + 1, entries + 5):
            before = objects.requests.total()
            await manifests.publish(facts(entry), [segment(entry, entry)])
            costs.add(objects.requests.total() - before)
        assert costs <= {2, 3}  # a get, a replacement, at times a page
        await objects.close()

    asyncio.run(run())
