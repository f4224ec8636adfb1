"""E-17: an upstream that comes back is not run over by those who waited for it."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.common.limits import Limits
from tailrace.edge.reconnect import FIRST_SHARE, OPENING_MAX, RAMP_S, LoadRamp, OpenLimiter
from tailrace.edge.upstream_pool import parse_upstreams
from tailrace.edge.upstreams import Upstreams

STREAMS = [f"s/{number}" for number in range(2000)]


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_share_grows_and_keeps_what_it_has() -> None:
    time = Time()
    ramp = LoadRamp(time)
    assert ramp.share == 1.0
    ramp.begin()
    before: set[str] = set()
    for tenth in range(11):
        time.now = 100.0 + RAMP_S * tenth / 10
        taken = {name for name in STREAMS if ramp.includes(name)}
        assert before <= taken
        assert len(taken) == pytest.approx(len(STREAMS) * ramp.share, rel=0.25)
        before = taken
    assert len(before) == len(STREAMS)


def test_sockets_are_opened_a_few_at_a_time_and_then_more() -> None:
    async def most_at_once(time: Time, count: int) -> int:
        ramp = LoadRamp(time)
        ramp.begin()
        opening = OpenLimiter(ramp)
        most = 0

        async def open_one() -> None:
            nonlocal most
            async with opening:
                most = max(most, opening.active)
                assert opening.active <= opening.allowed
                time.now += RAMP_S / 500
                await asyncio.sleep(0)

        await asyncio.gather(*(open_one() for _ in range(10)))
        assert most <= OPENING_MAX * FIRST_SHARE + 1, "at first"
        await asyncio.gather(*(open_one() for _ in range(count)))
        assert opening.active == 0
        return most

    assert asyncio.run(most_at_once(Time(), 10_000)) == OPENING_MAX


def test_who_gives_up_gives_the_turn_back() -> None:
    async def run() -> None:
        opening = OpenLimiter(LoadRamp(Time()))

        async def hold(until: asyncio.Event) -> None:
            async with opening:
                await until.wait()

        until = asyncio.Event()
        tasks = [asyncio.ensure_future(hold(until)) for _ in range(OPENING_MAX + 2)]
        await asyncio.sleep(0)
        assert opening.active == OPENING_MAX
        tasks[-1].cancel()
        tasks[0].cancel()  # its turn goes to one of those who wait, who is then told to leave, too
        await asyncio.sleep(0)
        tasks[-2].cancel()
        await asyncio.gather(*tasks[:1], *tasks[-2:], return_exceptions=True)
        assert opening.active == OPENING_MAX - 1
        until.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert opening.active == 0

    asyncio.run(run())


def test_a_door_that_is_back_gets_a_tenth_of_its_streams_first() -> None:
    async def run() -> None:
        origins = parse_upstreams("a=http://127.0.0.1:1,b=http://127.0.0.1:2")
        upstreams = Upstreams(origins, "any", Limits(), b"edge")
        first = {name for name in STREAMS if upstreams.for_stream(name).id == "a"}
        door = upstreams.all[0]
        time = Time()
        door.ramp = LoadRamp(time)
        door.healthy = False
        assert not any(upstreams.for_stream(name) is door for name in STREAMS)
        door.healthy = True
        door.ramp.begin()
        back = {name for name in STREAMS if upstreams.for_stream(name) is door}
        assert back < first
        assert len(back) == pytest.approx(len(first) * FIRST_SHARE, rel=0.4)
        time.now += RAMP_S
        assert {name for name in STREAMS if upstreams.for_stream(name) is door} == first
        upstreams.all[1].healthy = False
        door.ramp.begin()
        assert {upstreams.for_stream(name) for name in STREAMS} == {door}, "there is no other"
        await upstreams.stop()

    asyncio.run(run())
