"""What every object store must do alike, whatever stands behind its URL."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from support.s3 import S3Server
from tailrace.storage.object_store.interface import (
    ObjectConflictError,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    ObjectStore,
    open_object_store,
)

MIB = 1024 * 1024
Scenario = Callable[[ObjectStore], Awaitable[None]]


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/objects"
    unique = secrets.token_hex(8)
    if request.param == "memory":
        return f"memory://{unique}"
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    return server.url(f"contract/{unique}")


def play(url: str, scenario: Scenario) -> None:
    async def run() -> None:
        objects = open_object_store(url)
        try:
            await scenario(objects)
        finally:
            await objects.close()

    asyncio.run(run())


async def all_keys(objects: ObjectStore, prefix: str = "", limit: int = 1000) -> list[str]:
    """Page by page, as callers do."""
    keys: list[str] = []
    while True:
        page = await objects.list_after(prefix, keys[-1] if keys else "", limit)
        assert len(page) <= limit
        keys.extend(info.key for info in page)
        if len(page) < limit:
            return keys


def test_what_is_created_is_read_back(url: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        tag = await objects.create("a/b/c", b"content")
        await objects.create("a/view", memoryview(b"xviewx")[1:5])
        await objects.create("a/empty", b"")
        assert tag
        assert await objects.get("a/b/c") == (b"content", tag)
        assert (await objects.get("a/view"))[0] == b"view"
        assert (await objects.get("a/empty"))[0] == b""
        info = await objects.head("a/b/c")
        assert (info.key, info.size, info.etag) == ("a/b/c", 7, tag)
        assert info.modified_ns > 1_700_000_000_000_000_000

    play(url, scenario)


def test_another_handle_sees_the_same_objects(url: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        other = open_object_store(url)
        tag = await objects.create("a", b"1")
        new = await other.replace("a", b"2", tag)
        assert await objects.get("a") == (b"2", new)
        await other.close()

    play(url, scenario)


def test_create_leaves_what_exists(url: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        await objects.create("a/b", b"first")
        for data in (b"second", b"first"):
            with pytest.raises(ObjectExistsError) as caught:
                await objects.create("a/b", data)
            assert caught.value.key == "a/b"
        assert (await objects.get("a/b"))[0] == b"first"

    play(url, scenario)


def test_of_20_racing_creators_one_wins(url: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        handles = [open_object_store(url) for _ in range(20)]
        for turn in range(2):  # the S3 server hands its locks on once a second
            data = [f"creator {index}".encode() for index in range(20)]
            results = await asyncio.gather(
                *(handle.create(f"race/{turn}", mine) for handle, mine in zip(handles, data, strict=True)),
                return_exceptions=True,
            )
            winners = [index for index, result in enumerate(results) if isinstance(result, str)]
            losers = [result for result in results if isinstance(result, ObjectExistsError)]
            assert (len(winners), len(losers)) == (1, 19), results
            assert (await objects.get(f"race/{turn}")) == (data[winners[0]], results[winners[0]])
        for handle in handles:
            await handle.close()

    play(url, scenario)


def test_replace_wants_the_version_that_is_there(url: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        first = await objects.replace("head", b"1", None)
        with pytest.raises(ObjectConflictError):
            await objects.replace("head", b"other", None)
        second = await objects.replace("head", b"2", first)
        assert second != first
        with pytest.raises(ObjectConflictError):
            await objects.replace("head", b"3", first)
        assert await objects.get("head") == (b"2", second)
        await objects.delete(["head"])
        with pytest.raises(ObjectConflictError):
            await objects.replace("head", b"3", second)
        with pytest.raises(ObjectMissingError):
            await objects.get("head")

    play(url, scenario)


def test_racing_replacements_lose_nothing(url: str) -> None:
    async def add(objects: ObjectStore, times: int) -> None:
        while times:
            data, tag = await objects.get("count")
            try:
                await objects.replace("count", str(int(data) + 1).encode(), tag)
            except ObjectConflictError:
                continue
            times -= 1

    async def scenario(objects: ObjectStore) -> None:
        await objects.create("count", b"0")
        await asyncio.gather(*(add(objects, 10) for _ in range(6)))
        assert (await objects.get("count"))[0] == b"60"

    play(url, scenario)


def test_ranges_are_exact(url: str) -> None:
    data = random.Random(1).randbytes(100_000)

    async def scenario(objects: ObjectStore) -> None:
        await objects.create("r", data)
        for start, stop in ((0, 1), (0, 100_000), (99_999, 100_000), (12_345, 54_321), (7, 7)):
            assert await objects.get_range("r", start, stop) == data[start:stop]
        for start, stop in ((99_999, 100_001), (100_000, 100_001), (500_000, 500_001)):
            with pytest.raises(ObjectMissingError):
                await objects.get_range("r", start, stop)
        with pytest.raises(ObjectMissingError):
            await objects.get_range("nothing", 0, 1)

    play(url, scenario)


def test_listing_pages_through_every_key_once(url: str) -> None:
    wanted = [
        *(f"streams/{number % 3:02x}/{number:04d}/manifest.json" for number in range(12)),
        *(f"streams/{number % 3:02x}/{number:04d}/manifest/0.json" for number in range(12)),
        *(f"streams/00/0000/segments/{number:020d}.parquet" for number in range(9)),
        "a", "b.json", "b/c", "b-", "meta/x", "streams.txt", "zz",
    ]  # fmt: skip

    async def scenario(objects: ObjectStore) -> None:
        assert await objects.list_after("") == []
        for key in random.Random(2).sample(wanted, len(wanted)):
            await objects.create(key, key.encode())
        for limit in (1, 2, 3, 7, len(wanted), 1000):
            assert sorted(await all_keys(objects, limit=limit)) == sorted(wanted), limit
        for prefix in (
            "streams/",
            "streams/00/",
            "streams/00/0000/",
            "streams/00/0000/segments/",
            "b/",
            "no/",
        ):
            below = [key for key in wanted if key.startswith(prefix)]
            assert sorted(await all_keys(objects, prefix, 2)) == sorted(below), prefix
        sizes = {info.key: info.size for info in await objects.list_after("")}
        assert sizes == {key: len(key) for key in wanted}
        # A whole stream is skipped by a key behind all of its own.
        found = await objects.list_after("streams/", "streams/00/0000/~", 1)
        assert found[0].key.startswith("streams/00/0003/")

    play(url, scenario)


def test_a_directory_is_listed_in_order_over_many_pages(url: str) -> None:
    wanted = [f"d/{number:05d}" for number in range(1100)]

    async def scenario(objects: ObjectStore) -> None:
        shuffled = random.Random(3).sample(wanted, len(wanted))
        for at in range(0, len(shuffled), 50):
            await asyncio.gather(*(objects.create(key, b"x") for key in shuffled[at : at + 50]))
        assert await all_keys(objects, "d/", 1000) == wanted
        assert await all_keys(objects, "d/", 333) == wanted
        assert [info.key for info in await objects.list_after("d/", "d/00498x", 3)] == wanted[499:502]
        assert len(await objects.list_after("d/", "", 1100)) == 1100
        await objects.delete(wanted)
        assert await objects.list_after("") == []

    play(url, scenario)


def test_deleting_what_is_not_there_is_fine(url: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        await objects.delete([])
        await objects.delete(["never/was"])
        await objects.create("a/1", b"")
        await objects.create("a/2", b"")
        await objects.delete(["a/1", "a/none", "a/2", "a/1"])
        assert await objects.list_after("") == []
        await objects.create("a/1", b"again")
        assert (await objects.get("a/1"))[0] == b"again"

    play(url, scenario)


def test_what_is_missing_is_missing(url: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        await objects.create("a/b", b"")
        for ask in (objects.get, objects.head):
            for key in ("a", "a/c", "a/b/c"):
                with pytest.raises(ObjectMissingError) as caught:
                    await ask(key)
                assert caught.value.key == key

    play(url, scenario)


def test_a_big_object(url: str) -> None:
    data = random.Random(4).randbytes(24 * MIB)

    async def scenario(objects: ObjectStore) -> None:
        tag = await objects.create("big", data)
        assert await objects.get("big") == (data, tag)
        assert await objects.get_range("big", 23 * MIB, 24 * MIB) == data[23 * MIB :]
        assert (await objects.head("big")).size == len(data)
        assert objects.bytes_out == len(data)
        assert objects.bytes_in == 25 * MIB

    play(url, scenario)


ODD = [
    "sp ace", "pct%20x", "%", "ümlaut", "\u65e5\u672c", "\U0001f600", "a+b", "q?x=1", "h#x", "~t", "quote'\"",
    "[b]{c}", "*", "a:b@c&d=e,f;g$h!", "..dots", ".hidden", "a..b", "x" * 255, "^`|<>",
]  # fmt: skip


def test_odd_keys_are_kept_apart(url: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        for name in ODD:
            await objects.create(f"odd/{name}/x", name.encode())
            assert (await objects.get(f"odd/{name}/x"))[0] == name.encode()
        listed: list[ObjectInfo] = await objects.list_after("odd/")
        assert sorted(info.key for info in listed) == sorted(f"odd/{name}/x" for name in ODD)
        assert await all_keys(objects, "odd/", 4) == [info.key for info in listed]
        await objects.delete([info.key for info in listed])
        assert await objects.list_after("") == []

    play(url, scenario)


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "nul\0", "line\n", "back\\slash", "x" * 256,
     "a/" * 600 + "a", ".tailrace/new-1", "\ud800"],
)  # fmt: skip
def test_keys_that_cannot_be_kept_are_refused(key: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        with pytest.raises(ValueError):
            await objects.create(key, b"")

    play("memory://refused", scenario)


def test_requests_are_counted(url: str) -> None:
    async def scenario(objects: ObjectStore) -> None:
        tag = await objects.create("a", b"123")
        await objects.replace("a", b"4567", tag)
        await objects.get("a")
        await objects.get_range("a", 1, 3)
        await objects.head("a")
        await objects.list_after("")
        await objects.delete(["a"])
        kinds = ("create", "replace", "get", "range", "head", "list", "delete")
        assert dict(objects.requests) == dict.fromkeys(kinds, 1)
        assert (objects.bytes_out, objects.bytes_in) == (7, 6)

    play(url, scenario)


@pytest.mark.parametrize(
    "wrong",
    ["", "/a", "ftp://a/b", "s3://", "s3:///key", "file://host/a", "file:a", "memory://a/b", "s3://b/p?x=1"],
)
def test_urls_that_name_no_store_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        open_object_store(wrong)
