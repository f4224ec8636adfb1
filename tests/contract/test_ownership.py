"""Ownership of a bucket: one deployment at a time, and everybody can tell which."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import pytest

from support.s3 import S3Server
from tailrace.common.clock import FakeClock
from tailrace.common.errors import TailraceError
from tailrace.storage.bucket_ownership import OWNER_KEY, BucketOwnership, OwnedElsewhereError, OwnerRecord
from tailrace.storage.manifests.model import FencedError
from tailrace.storage.object_store.interface import ObjectStore, open_object_store

_NAMES = count()


@pytest.fixture(params=["memory", "file", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    if request.param == "memory":
        return open_object_store(f"memory://owner-{next(_NAMES)}")
    if request.param == "file":
        return open_object_store((tmp_path / "objects").as_uri())
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    return open_object_store(server.url(f"owner-{next(_NAMES)}"))


def test_a_bucket_has_one_owner(objects: ObjectStore) -> None:
    async def run() -> None:
        clock = FakeClock()
        ownership = BucketOwnership(objects, clock)
        assert await ownership.current() is None
        with pytest.raises(FencedError):
            await ownership.confirm("a", 1)
        assert await ownership.claim("a") == 1
        assert await ownership.current() == OwnerRecord(deployment="a", fence=1, at_ns=clock.now_ns())
        assert await ownership.claim("a") == 1
        with pytest.raises(OwnedElsewhereError) as refused:
            await ownership.claim("b")
        assert refused.value.owner.deployment == "a"
        assert await ownership.claim("b", take_over=True) == 2
        assert await ownership.claim("b", take_over=True) == 2
        await ownership.confirm("b", 2)
        with pytest.raises(FencedError):
            await ownership.confirm("a", 1)
        assert await ownership.claim("a", take_over=True) == 3
        await objects.close()

    asyncio.run(run())


def test_of_many_that_claim_at_once_one_wins(objects: ObjectStore) -> None:
    async def run() -> None:
        claims = [BucketOwnership(objects).claim(name) for name in "abcdefgh"]
        answers = await asyncio.gather(*claims, return_exceptions=True)
        assert [answer for answer in answers if not isinstance(answer, OwnedElsewhereError)] == [1]
        takers = [BucketOwnership(objects).claim(name, take_over=True) for name in "ijkl"]
        fences = await asyncio.gather(*takers)
        assert sorted(fences) == [2, 3, 4, 5]
        owner = await BucketOwnership(objects).current()
        assert owner is not None
        assert owner.deployment == "ijkl"[fences.index(5)]
        await objects.close()

    asyncio.run(run())


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version":2,"deployment":"a","fence":1,"at_ns":1}'])
def test_an_owner_that_cannot_be_read_is_not_replaced(objects: ObjectStore, content: bytes) -> None:
    async def run() -> None:
        await objects.create(OWNER_KEY, content)
        with pytest.raises(TailraceError, match=OWNER_KEY):
            await BucketOwnership(objects).claim("a", take_over=True)
        assert (await objects.get(OWNER_KEY))[0] == content
        await objects.close()

    asyncio.run(run())
