"""Buckets that fail: every fault is outlived, or ends in one clear error in time; nothing happens twice."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest

from support.faulty_s3 import ANYTIME, Fault, FaultyS3
from support.ports import free_port
from support.s3 import S3Server
from tailrace.common.limits import Limits
from tailrace.storage.object_store.interface import (
    ObjectConflictError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    ObjectStoreRefusedError,
    ObjectStoreUnavailableError,
    open_object_store,
)

LIMITS = Limits(object_ms=50_000, object_try_ms=10_000, object_tries=6, object_retry_ms=20)
# For requests that hang: nothing else may depend on how fast the machine is.
HASTY = Limits(object_ms=50_000, object_try_ms=400, object_tries=20, object_retry_ms=20)
DATA = random.Random(5).randbytes(300_000)


class Bench:
    """A proxy, and handles on the bucket through it and around it."""

    def __init__(self, proxy: FaultyS3, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proxy = proxy
        self._s3 = s3
        self._env = monkeypatch
        self._url = s3.url(f"faults/{secrets.token_hex(8)}")

    def open(self, limits: Limits = LIMITS) -> ObjectStore:
        return self._open(self.proxy.endpoint, limits)

    def open_around(self) -> ObjectStore:
        return self._open(self._s3.endpoint, LIMITS)

    def _open(self, endpoint: str, limits: Limits) -> ObjectStore:
        for name, value in self._s3.env(endpoint).items():
            self._env.setenv(name, value)
        return open_object_store(self._url, limits=limits)


@pytest.fixture
def bench(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with FaultyS3(s3.port) as proxy:
        yield Bench(proxy, s3, monkeypatch)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        # Far beyond every deadline here: it only keeps a call that never ends from hanging the run.
        async with asyncio.timeout(100):
            await scenario()

    asyncio.run(run())


PASSING = {
    "hang": Fault("hang", times=2),
    "reset": Fault("reset", times=3),
    "500": Fault("answer", times=3, status=500, code="InternalError"),
    "503": Fault("answer", times=3, status=503, code="SlowDown"),
    "429": Fault("answer", times=3, status=429, code="TooManyRequests"),
    "400 of a time-out": Fault("answer", methods="GET|PUT|POST", times=2, status=400, code="RequestTimeout"),
    "408": Fault("answer", times=2, status=408, code="RequestTimeout"),
    "lost": Fault("lost", times=2),
    "lost with 500": Fault("lost_answer", times=2, status=500, code="InternalError"),
    "cut": Fault("cut", methods="GET", times=2),
    "delay": Fault("delay", times=2, delay_s=0.05),
}


@pytest.mark.parametrize("name", PASSING)
def test_every_call_outlives_a_passing_fault(bench: Bench, name: str) -> None:
    def hurt() -> None:
        bench.proxy.heal()
        bench.proxy.inject(replace(PASSING[name]))

    async def scenario() -> None:
        objects = bench.open(HASTY if name == "hang" else LIMITS)
        hurt()
        tag = await objects.create("a/b", DATA)
        hurt()
        tag = await objects.replace("a/b", DATA[1:], tag)
        hurt()
        assert await objects.get("a/b") == (DATA[1:], tag)
        hurt()
        assert await objects.get_range("a/b", 1000, 200_000) == DATA[1001:200_001]
        hurt()
        assert (await objects.head("a/b")).etag == tag
        hurt()
        assert [info.key for info in await objects.list_after("a/")] == ["a/b"]
        hurt()
        await objects.delete(["a/b", "a/c"])
        bench.proxy.heal()
        assert await objects.list_after("") == []
        assert bench.proxy.harmed > 0
        assert objects.requests["error"] == 0
        assert bool(objects.requests["retry"]) == (name != "delay")

    play(scenario)


@pytest.mark.parametrize("name", ["lost", "lost with 500"])
def test_a_write_whose_answer_was_lost_happens_once(bench: Bench, name: str) -> None:
    async def scenario() -> None:
        objects = bench.open()
        bench.proxy.inject(replace(PASSING[name], times=1))
        tag = await objects.create("a", b"mine")
        assert await objects.get("a") == (b"mine", tag)
        bench.proxy.inject(replace(PASSING[name], times=1))
        tag = await objects.replace("a", b"new", tag)
        assert await objects.get("a") == (b"new", tag)
        bench.proxy.inject(replace(PASSING[name], times=1))
        other = await objects.replace("b", b"born", None)
        assert await objects.get("b") == (b"born", other)
        assert [one.status for one in bench.proxy.passed("PUT", "/a$")] == [200, 412, 200, 412]
        assert [one.status for one in bench.proxy.passed("PUT", "/b$")] == [200, 412]

    play(scenario)


def test_what_another_wrote_after_a_lost_request_is_not_taken_for_ours(bench: Bench) -> None:
    async def next_write_hangs() -> None:
        """The write under way has not been sent yet: nobody gave it a chance to."""
        before = bench.proxy.harmed
        bench.proxy.inject(Fault("hang", methods="PUT"))
        await asyncio.to_thread(bench.proxy.wait_for, lambda proxy: proxy.harmed > before)

    async def scenario() -> None:
        objects, other = bench.open(HASTY), bench.open_around()
        for theirs in (b"not mine", b"mine!"):  # of another size, and of the same
            mine = asyncio.ensure_future(objects.create("a", b"mine?"))
            await next_write_hangs()
            tag = await other.create("a", theirs)
            with pytest.raises(ObjectExistsError):
                await mine
            change = asyncio.ensure_future(objects.replace("a", b"new", tag))
            await next_write_hangs()
            newer = await other.replace("a", b"n3w", tag)
            with pytest.raises(ObjectConflictError):
                await change
            assert await other.get("a") == (b"n3w", newer)
            await other.delete(["a"])

    play(scenario)


def test_a_replacement_that_was_itself_replaced_is_a_conflict(bench: Bench) -> None:
    """Ours happened, its answer was lost, and somebody built on it: only the caller can sort that out."""

    async def scenario() -> None:
        objects, other = bench.open(), bench.open_around()
        tag = await objects.create("a", b"1")
        bench.proxy.inject(Fault("lost", methods="PUT"), Fault("hold", methods="PUT"))
        mine = asyncio.ensure_future(objects.replace("a", b"2", tag))
        await asyncio.to_thread(bench.proxy.wait_for, lambda proxy: len(proxy.passed("PUT", "/a$")) == 2)
        await other.replace("a", b"3", (await other.get("a"))[1])
        bench.proxy.let_go()
        with pytest.raises(ObjectConflictError):
            await mine
        assert (await other.get("a"))[0] == b"3"

    play(scenario)


def test_a_conflict_with_a_request_under_way_is_tried_again(bench: Bench) -> None:
    """409 says that somebody writes the same object right now, not that it is there."""
    busy = {"status": 409, "code": "ConditionalRequestConflict", "methods": "PUT"}

    async def scenario() -> None:
        objects = bench.open()
        bench.proxy.inject(Fault("answer", times=2, **busy))
        tag = await objects.create("a", b"1")
        bench.proxy.inject(Fault("answer", times=2, **busy))
        tag = await objects.replace("a", b"2", tag)
        assert await objects.get("a") == (b"2", tag)
        bench.proxy.inject(Fault("answer", times=1, **busy))
        with pytest.raises(ObjectExistsError):
            await objects.create("a", b"3")
        bench.proxy.inject(Fault("answer", times=1, **busy))
        with pytest.raises(ObjectConflictError):
            await objects.replace("a", b"3", '"other"')

    play(scenario)


def test_a_conflict_is_told_at_once(bench: Bench) -> None:
    async def scenario() -> None:
        objects = bench.open()
        tag = await objects.create("a", b"1")
        bench.proxy.inject(Fault("answer", methods="PUT", status=412, code="PreconditionFailed", times=2))
        with pytest.raises(ObjectConflictError):
            await objects.replace("a", b"2", tag)
        with pytest.raises(ObjectExistsError):
            await objects.create("new", b"2")
        assert objects.requests["retry"] == 0
        assert await objects.get("a") == (b"1", tag)

    play(scenario)


OUTAGES = {
    "hang": Fault("hang", times=ANYTIME),
    "reset": Fault("reset", times=ANYTIME),
    "503": Fault("answer", times=ANYTIME),
    "cut": Fault("cut", times=ANYTIME),
}


def calls(objects: ObjectStore) -> list[Callable[[], Awaitable[object]]]:
    return [
        lambda: objects.create("new", b"1"),
        lambda: objects.replace("a", b"2", '"0"'),
        lambda: objects.get("a"),
        lambda: objects.get_range("a", 10, 100_000),
        lambda: objects.head("a"),
        lambda: objects.list_after(""),
        lambda: objects.delete(["b"]),
    ]


@pytest.mark.parametrize("name", ["hang", "reset", "503"])
def test_an_outage_ends_in_one_error_after_the_last_try(bench: Bench, name: str) -> None:
    async def scenario() -> None:
        limits = Limits(object_ms=50_000, object_try_ms=200, object_tries=3, object_retry_ms=10)
        await bench.open_around().create("a", DATA)
        objects = bench.open(limits)
        bench.proxy.inject(replace(OUTAGES[name]))
        for count, call in enumerate(calls(objects), start=1):
            with pytest.raises(ObjectStoreUnavailableError, match="after 3 tries"):
                await call()
            assert (objects.requests["error"], objects.requests["retry"]) == (count, 2 * count)
        assert not bench.proxy.passed()

    play(scenario)


def test_an_outage_ends_at_the_deadline_however_many_tries_are_left(bench: Bench) -> None:
    async def scenario() -> None:
        limits = Limits(object_ms=400, object_try_ms=100_000, object_tries=ANYTIME, object_retry_ms=10)
        objects = bench.open(limits)
        for name in ("hang", "503"):
            bench.proxy.heal()
            bench.proxy.inject(replace(OUTAGES[name]))
            for call in calls(objects):
                with pytest.raises(ObjectStoreUnavailableError):
                    await call()

    play(scenario)


def test_a_body_that_never_comes_whole_is_not_handed_out(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.open_around().create("a", DATA)
        objects = bench.open()
        bench.proxy.inject(Fault("cut", methods="GET", times=ANYTIME))
        with pytest.raises(ObjectStoreUnavailableError):
            await objects.get("a")
        with pytest.raises(ObjectStoreUnavailableError):
            await objects.get_range("a", 0, 200_000)
        with pytest.raises(ObjectStoreUnavailableError):
            await objects.list_after("")

    play(scenario)


def test_a_refusal_is_told_at_once_and_in_words(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        objects = bench.open()
        for status, code in ((403, "AccessDenied"), (401, "Unauthorized"), (400, "InvalidArgument")):
            bench.proxy.heal()
            bench.proxy.inject(Fault("answer", times=ANYTIME, status=status, code=code))
            for call in calls(objects):
                with pytest.raises(ObjectStoreRefusedError, match=f"refuses access.*{status}"):
                    await call()
        assert objects.requests["retry"] == 0
        bench.proxy.heal()
        bench.open()
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(ObjectStoreRefusedError, match=r"403.*SignatureDoesNotMatch"):
            await open_object_store("s3://tailrace/x", limits=LIMITS).create("a", b"")
        bench.open()
        nowhere = open_object_store("s3://no-such-bucket/x", limits=LIMITS)
        for call in (nowhere.create("a", b""), nowhere.get("a"), nowhere.replace("a", b"", None)):
            with pytest.raises(ObjectStoreRefusedError, match="NoSuchBucket"):
                await call

    play(scenario)


def test_a_server_that_is_not_there_is_unavailable(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        bench.open()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
        objects = open_object_store("s3://tailrace/x", limits=LIMITS)
        with pytest.raises(ObjectStoreUnavailableError, match="after 6 tries") as caught:
            await objects.create("a", b"")
        assert not isinstance(caught.value, ObjectStoreRefusedError)

    play(scenario)


def test_a_stale_listing_names_what_is_gone(bench: Bench) -> None:
    """Nothing can be done about it here: who lists has to bear a key that is missing, or not listed yet."""

    async def scenario() -> None:
        objects = bench.open()
        await objects.create("a", b"")
        assert len(await objects.list_after("")) == 1
        await objects.delete(["a"])
        await objects.create("b", b"")
        bench.proxy.inject(Fault("stale", listings=True))
        assert [info.key for info in await objects.list_after("")] == ["a"]
        with pytest.raises(ObjectMissingError):
            await objects.get("a")
        assert [info.key for info in await objects.list_after("")] == ["b"]

    play(scenario)


def test_many_writers_in_bad_weather_lose_and_double_nothing(bench: Bench) -> None:
    async def add(objects: ObjectStore, times: int) -> None:
        while times:
            data, tag = await objects.get("count")
            lines = data + f"{secrets.token_hex(8)}\n".encode()
            try:
                await objects.replace("count", lines, tag)
            except ObjectConflictError:
                # It may have happened and been built upon. Then our line is in it.
                if lines.splitlines()[-1] not in (await objects.get("count"))[0].splitlines():
                    continue
            times -= 1

    async def scenario() -> None:
        limits = Limits(object_ms=60_000, object_try_ms=5000, object_tries=50, object_retry_ms=20)
        objects = bench.open(limits)
        await objects.create("count", b"")
        chance = random.Random(6)
        for _ in range(150):
            kind = chance.choice(("reset", "answer", "lost", "lost_answer", "cut", "delay"))
            method, status = chance.choice(("GET", "PUT", "PUT", "HEAD")), chance.choice((500, 503, 429))
            skip = chance.randrange(100)
            bench.proxy.inject(Fault(kind, methods=method, status=status, delay_s=0.02, skip=skip))
        keys = [f"k/{number:03d}" for number in range(40)]
        await asyncio.gather(
            *(objects.create(key, key.encode()) for key in keys), *(add(objects, 4) for _ in range(3))
        )
        assert bench.proxy.harmed > 20
        bench.proxy.heal()
        assert [info.key for info in await objects.list_after("k/")] == keys
        for key in keys:
            assert (await objects.get(key))[0] == key.encode()
            assert [one.status for one in bench.proxy.passed("PUT", key)].count(200) == 1
        lines = (await objects.get("count"))[0].splitlines()
        assert len(lines) == len(set(lines)) == 12

    play(scenario)
