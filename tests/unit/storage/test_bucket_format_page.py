"""docs/formats.md, "Bucket", says what the code does: its examples are decoded, its fields are compared."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tailrace.storage.bucket_ownership import OWNER_KEY, OwnerRecord
from tailrace.storage.manifests.model import (
    ForkParent,
    HeadTombstone,
    ManifestHead,
    RecordedLifetime,
    RecordedProducers,
    SegmentPage,
    SegmentPageRef,
    decode_manifest,
    encode_manifest,
    producers_key,
    segment_page_key,
    sha256_of,
)
from tailrace.storage.manifests.pages import HEAD_SEGMENTS_MAX, SEGMENT_PAGES_MAX
from tailrace.storage.segments.model import SegmentInfo, make_stream_id, segment_name

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "formats.md").read_text(encoding="utf-8")
BUCKET = PAGE[PAGE.index("\n## Bucket\n") :]


def example(kind: str) -> bytes:
    block = re.search(rf"```json {kind}\n(.*?)```", BUCKET, re.DOTALL)
    assert block is not None
    return block[1].replace("\n", "").encode()


def test_the_examples_are_canonical_and_name_each_other() -> None:
    head = decode_manifest(example("head"), ManifestHead, "", "")
    page = decode_manifest(example("page"), SegmentPage, "", "")
    producers = decode_manifest(example("producers"), RecordedProducers, "", "")
    for value, kind in ((head, "head"), (page, "page"), (producers, "producers")):
        assert encode_manifest(value) == example(kind)
    assert head.stream_id == make_stream_id(head.name, head.incarnation)
    assert head.pages[0].key == segment_page_key(1, 10, sha256_of(example("page")))
    assert head.pages[0].sha256 == sha256_of(example("page"))
    assert head.producers_key == producers_key(1, sha256_of(example("producers")))
    assert head.producers_sha256 == sha256_of(encode_manifest(producers.producers))
    for info in (*page.segments, *head.segments):
        assert info.key == segment_name(info.epoch, info.first, info.last, info.sha256)


@pytest.mark.parametrize(
    "kind",
    [ManifestHead, SegmentPage, RecordedProducers, OwnerRecord, HeadTombstone, RecordedLifetime, ForkParent],
)
def test_every_field_is_there(kind: type[msgspec.Struct]) -> None:
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    missing = [name for name in names if f"`{name}`" not in BUCKET]
    assert missing == []


@pytest.mark.parametrize("kind", [SegmentInfo, SegmentPageRef])
def test_arrays_are_in_this_order(kind: type[msgspec.Struct]) -> None:
    assert f"`[{', '.join(field.name for field in msgspec.structs.fields(kind))}]`" in BUCKET


def test_the_sizes_are_those_of_the_code() -> None:
    assert HEAD_SEGMENTS_MAX == SEGMENT_PAGES_MAX == 1000
    assert f"`{OWNER_KEY}`" in BUCKET
