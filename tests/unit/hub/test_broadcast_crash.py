"""A broadcast to more than one batch, and a process that dies between two of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from support.hub_world import Frame, World
from tailrace.common.limits import Limits
from tailrace.hub.session import Session

SENDER = "@(t/sender)"
ONLINE = [f"@(on/{number:03})" for number in range(250)]
AWAY = [f"@(away/{number:03})" for number in range(250)]
NEWS = {"type": "news", "data": {"n": 1}}
DAY_MS = 24 * 3600 * 1000


def crashed_midway(world: World, batches: int) -> str:
    """The id of a broadcast of which so many batches were given out before the process died."""
    sender = world.actor(SENDER)
    for address in ONLINE:
        world.actor(address, durable=True, ttlSeconds=3600)
    for address in AWAY:
        world.lose(world.actor(address, durable=True, ttlSeconds=3600))
    world.actor("@(plain/one)")
    world.turns = deque()
    request = world.say(sender, "hub:broadcast", {**NEWS, "excludeSelf": True})
    for _ in range(batches):
        assert world.turn()
    assert [frame["type"] for frame in world.taken(sender)] == [], "it is not done"
    world.turns = None
    world.crash()
    return request


def come_back(world: World, address: str) -> tuple[Session, list[Frame]]:
    session = world.connect(address)
    world.say(session, "hub:register", {"actorAddress": address, "capabilities": ["x"], "durable": True})
    return session, [frame for frame in world.taken(session) if frame["type"] == "news"]


@pytest.mark.parametrize("batches", range(5))
def test_h18_every_durable_recipient_gets_a_broadcast_whose_process_died_midway(batches: int) -> None:
    world = World(limits=Limits(hub_registers_per_s=10_000))
    request = crashed_midway(world, batches)
    for address in (*ONLINE, *AWAY):
        _, news = come_back(world, address)
        assert [frame["correlationId"] for frame in news] == [request], address
    sender, _ = come_back(world, SENDER)
    again = world.ask(sender, "hub:broadcast", {**NEWS, "excludeSelf": True}, id=request)["payload"]
    assert again["messageId"] == request
    assert again["deliveredCount"] + again["queuedCount"] + again["failedCount"] == again["total"]
    assert len(world.streams.entries["hub/broadcast/0"]) == 1, "a repeat adds no second entry"


@pytest.mark.parametrize("down_ms", [0, 3_600_000])
def test_a_broadcast_is_kept_for_recipients_that_were_not_reached_before_the_crash(down_ms: int) -> None:
    """Retention keeps what a durable recipient has yet to read, as it does without a crash."""
    world = World(limits=Limits(hub_registers_per_s=10_000))
    crashed_midway(world, 0)
    world.now += down_ms
    world.crash()
    come_back(world, "@(on/000)")
    world.wait(2000)
    world.now += 2 * DAY_MS
    world.wait(120_000)
    bounds: Any = world.hub.sweep.bounds.get("hub/broadcast/0")
    assert bounds is None, "a recipient has yet to read it"
