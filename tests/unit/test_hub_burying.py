"""Messages that nobody will get, and a process that dies at the worst moment: a dead letter for each (H-18).

A letter and the position behind its message are two entries: a crash can come between them.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.hub_world import Frame, World
from tailrace.hub.session import Session

A, B = "@(t/a)", "@(t/b)"
LETTERS = "hub/dead-letters"


def come(world: World, **options: Any) -> Session:
    session = world.connect(B, "mailbox")
    payload = {"actorAddress": B, "capabilities": ["x"], "durable": True, **options}
    world.say(session, "hub:register", payload)
    return session


def given(world: World, session: Session) -> list[Frame]:
    return [frame for frame in world.taken(session) if frame["type"] == "t"]


def send(world: World, *numbers: int, **more: Any) -> None:
    sender = world.actor(A)
    for number in numbers:
        world.say(sender, "hub:send", {"to": B, "type": "t", "data": number}, pattern="tell", **more)


def buried(world: World) -> list[tuple[str, Any]]:
    return [(letter["reason"], letter["message"]["payload"]) for letter in world.streams.bodies(LETTERS)]


@pytest.mark.parametrize("options", [{}, {"commit": "manual"}], ids=["auto", "manual"])
def test_h18_what_has_expired_is_buried_once(options: dict[str, Any]) -> None:
    world = World()
    world.lose(come(world, **options))
    send(world, 1, 2, ttl=1000)
    world.now += 1001
    for _ in range(3):
        come(world, **options)
        world.crash()  # before anybody has written down how far the actor is
    assert buried(world) == [("message_expired", 1), ("message_expired", 2)]


def test_h18_what_came_too_often_is_buried_once_and_comes_no_more() -> None:
    world = World()
    options = {"commit": "manual", "ackTimeout": 1, "maxDeliver": 2}
    session = come(world, **options)
    send(world, 1)
    while not buried(world):
        world.hold()
        world.wait(1000)
        while world.held and not buried(world):
            world.commit_next()
    assert len(given(world, session)) == 2
    world.crash()
    assert given(world, come(world, **options)) == []
    world.wait(10_000)
    assert buried(world) == [("max_deliveries", 1)]


@pytest.mark.parametrize("durable", range(4))
def test_h18_what_is_rejected_is_buried_before_it_is_passed(durable: int) -> None:
    """However much of it was written when the process died, the message is there or its letter is."""
    world = World()
    session = come(world, commit="manual")
    send(world, 1, 2)
    first, _ = [frame["metadata"]["mailbox"]["offset"] for frame in given(world, session)]
    payload = {"actorAddress": B, "reject": [{"offset": first, "reason": "bad"}]}
    world.hold()
    world.say(session, "hub:mailbox_commit", payload)
    for _ in range(durable):
        world.commit_next()
    world.crash()
    again = come(world, commit="manual")
    came = [frame["payload"] for frame in given(world, again)]
    assert came + [number for _, number in buried(world)] in ([1, 2], [2, 1])
    if 1 in came:
        world.say(again, "hub:mailbox_commit", payload)
    assert buried(world) == [("rejected", 1)]


def test_h18_a_reject_that_is_repeated_meanwhile_buries_once() -> None:
    world = World()
    session = come(world, commit="manual")
    send(world, 1)
    (only,) = given(world, session)
    payload = {"actorAddress": B, "reject": [{"offset": only["metadata"]["mailbox"]["offset"]}]}
    world.hold()
    requests = [world.say(session, "hub:mailbox_commit", payload) for _ in range(2)]
    world.commit_held()
    assert buried(world) == [("rejected", 1)]
    answers = [frame["correlationId"] for frame in world.taken(session)]
    assert answers == requests
