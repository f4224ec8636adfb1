"""Verifying a bucket: whatever is damaged is found, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest

from support.buckets import fill, named, overwrite, upload
from support.manifests import CREATED_NS, segment
from tailrace.storage.manifests.model import ManifestHead, encode_manifest
from tailrace.storage.manifests.store import ManifestStore
from tailrace.storage.object_store.interface import ObjectStore, open_object_store
from tailrace.storage.segments.model import SegmentInfo, stream_prefix
from tailrace.storage.verify import Verifier, VerifyFinding, VerifyReport

_NAMES = count()

Damage = Callable[[ObjectStore, ManifestHead], Awaitable[None]]


def verify(
    work: Callable[[ObjectStore, ManifestStore], Awaitable[None]], stream: str = ""
) -> tuple[VerifyReport, list[VerifyFinding]]:
    async def run() -> tuple[VerifyReport, list[VerifyFinding]]:
        objects = open_object_store(f"memory://verify-{next(_NAMES)}")
        findings: list[VerifyFinding] = []
        await work(objects, ManifestStore(objects, 1, segments_max=2, pages_max=2))
        verifier = Verifier(objects, findings.append, bytes_at_once=10_000)
        if stream:
            assert await verifier.named(stream)
        else:
            await verifier.bucket()
        await objects.close()
        return verifier.seen, findings

    return asyncio.run(run())


def test_a_whole_bucket_is_clean(tmp_path: Path) -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await fill(objects, manifests, tmp_path, "orders", 9)
        await fill(objects, manifests, tmp_path, "empty", 0)
        await fill(objects, manifests, tmp_path, "trimmed", 7)
        await manifests.trim(named("trimmed", 0).stream_id, 35)
        await fill(objects, manifests, tmp_path, "deleted", 3)
        await manifests.delete_stream(named("deleted", 30), CREATED_NS + 1, "deleted")
        await upload(objects, tmp_path, "orders", 91, 5)  # not recorded yet
        await upload(objects, tmp_path, "headless", 1, 5)
        await objects.create("meta/owner.json", b"{}")

    seen, findings = verify(work)
    assert findings == []
    assert (seen.streams, seen.tombstones, seen.segments, seen.entries) == (4, 1, 13, 130)
    assert seen.bytes == seen.bytes_known > 0
    seen, findings = verify(work, "orders")
    assert (seen.streams, seen.segments, findings) == (1, 9, [])
    seen, findings = verify(work, named("trimmed", 0).stream_id)
    assert (seen.streams, seen.segments, findings) == (1, 4, [])


async def _flip(objects: ObjectStore, head: ManifestHead) -> None:
    key = stream_prefix(head.stream_id) + head.segments[0].key
    data = bytearray((await objects.get(key))[0])
    data[len(data) // 3] ^= 1
    await overwrite(objects, key, bytes(data))


async def _cut(objects: ObjectStore, head: ManifestHead) -> None:
    key = stream_prefix(head.stream_id) + head.segments[0].key
    await overwrite(objects, key, (await objects.get(key))[0][:-100])


async def _remove(objects: ObjectStore, head: ManifestHead) -> None:
    await objects.delete([stream_prefix(head.stream_id) + head.segments[0].key])


async def _remove_page(objects: ObjectStore, head: ManifestHead) -> None:
    await objects.delete([stream_prefix(head.stream_id) + head.pages[-1].key])


async def _change_page(objects: ObjectStore, head: ManifestHead) -> None:
    await overwrite(
        objects, stream_prefix(head.stream_id) + head.pages[-1].key, b'{"attempt":"","version":1}'
    )


async def _remove_producers(objects: ObjectStore, head: ManifestHead) -> None:
    await objects.delete([stream_prefix(head.stream_id) + (head.producers_key or "")])


async def _garble_head(objects: ObjectStore, head: ManifestHead) -> None:
    await overwrite(objects, stream_prefix(head.stream_id) + "manifest.json", b"{")


def _with(**changes: object) -> Damage:
    async def damage(objects: ObjectStore, head: ManifestHead) -> None:
        changed = msgspec.structs.replace(head, **changes)
        await overwrite(objects, stream_prefix(head.stream_id) + "manifest.json", encode_manifest(changed))

    return damage


def _with_segments(change: Callable[[tuple[SegmentInfo, ...]], tuple[SegmentInfo, ...]]) -> Damage:
    async def damage(objects: ObjectStore, head: ManifestHead) -> None:
        await _with(segments=change(head.segments))(objects, head)

    return damage


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_flip, "SHA-256|checksum"),
        (_cut, "not the end|bytes"),
        (_remove, "it does not exist"),
        (_remove_page, "named but does not exist"),
        (_change_page, "does not match its hash"),
        (_remove_producers, "named but does not exist"),
        (_garble_head, "cannot be read"),
        (_with(uploaded_through=120), "segments end at 80"),
        (_with(tail=90), "not uploaded"),
        (_with(name="other"), "stream id does not match"),
        (_with_segments(lambda segments: segments[1:]), "the previous segment ends at 60"),
        (_with_segments(lambda segments: (*segments, segments[-1])), "the previous segment ends at 80"),
        (_with_segments(lambda segments: (*segments[:-1], segment(71, 80))), "it does not exist"),
        (
            _with_segments(
                lambda segments: (*segments[:-1], msgspec.structs.replace(segments[-1], payload_bytes=1))
            ),
            "payload bytes",
        ),
    ],
)
def test_damage_is_found(tmp_path: Path, damage: Damage, problem: str) -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await fill(objects, manifests, tmp_path, "whole", 4)
        await damage(objects, await fill(objects, manifests, tmp_path, "orders", 8))

    seen, findings = verify(work)
    assert findings
    assert seen.findings == len(findings)
    assert {finding.stream_id for finding in findings} == {named("orders", 0).stream_id}
    assert any(_matches(problem, finding.problem) for finding in findings), findings


def _matches(pattern: str, text: str) -> bool:
    return any(part in text for part in pattern.split("|"))


def test_what_forks_keep_of_trimmed_entries_is_no_finding(tmp_path: Path) -> None:
    async def work(objects: ObjectStore, manifests: ManifestStore) -> None:
        await fill(objects, manifests, tmp_path, "orders", 8)
        await manifests.trim(named("orders", 0).stream_id, 55, [(10, 12), (30, 40)])

    seen, findings = verify(work)
    assert (seen.segments, findings) == (5, [])
