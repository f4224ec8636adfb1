"""What comes a second time: to actors after a crash, marked; from senders, answered as the first time."""

from __future__ import annotations

from typing import Any

import pytest

from support.hub_world import Frame, World
from tailrace.hub.session import Session

A, B = "@(t/a)", "@(t/b)"


def follower(world: World) -> Session:
    """Durable, committing by hand, and a subscriber."""
    session = world.connect(B, "mailbox")
    payload = {"actorAddress": B, "capabilities": ["x"], "durable": True, "commit": "manual"}
    world.say(session, "hub:register", payload)
    world.say(session, "hub:subscribe", {"topic": "jobs/#", "durable": True})
    return session


def given(world: World, session: Session) -> list[Frame]:
    return [frame for frame in world.taken(session) if frame["type"] == "n"]


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("hub:send", {"to": B, "type": "n"}),
        ("hub:broadcast", {"type": "n", "excludeSelf": True}),
        ("hub:publish", {"topic": "jobs/x", "type": "n"}),
    ],
)
def test_h20_h33_what_may_have_been_heard_before_a_crash_is_marked(
    kind: str, payload: dict[str, Any]
) -> None:
    """Also what was handed over a moment before, when nobody had written down that it was."""
    world = World()
    session = follower(world)
    world.ask(world.actor(A), kind, payload)
    (first,) = given(world, session)
    assert "redelivered" not in first["metadata"]
    world.crash()
    again = follower(world)
    (second,) = given(world, again)
    assert second["metadata"]["redelivered"] is True
    world.ask(world.actor(A), kind, payload)
    (fresh,) = given(world, again)
    assert "redelivered" not in fresh["metadata"], "this one nobody can have heard"


@pytest.mark.parametrize(
    ("kind", "payload", "answer"),
    [
        ("hub:send", {"to": B, "type": "n", "ack": "accepted"}, "hub:delivery_ack"),
        ("hub:publish", {"topic": "jobs/x", "type": "n"}, "hub:published"),
        ("hub:broadcast", {"type": "n"}, "hub:broadcast_ack"),
    ],
)
def test_h38_a_late_repeat_of_what_was_accepted_is_not_refused(
    kind: str, payload: dict[str, Any], answer: str
) -> None:
    """Its time is over, and it is in the log: `message_expired` would say that it was not applied."""
    world = World()
    follower(world)
    sender, at = world.actor(A), world.now
    for _ in range(2):
        assert world.ask(sender, kind, payload, id="one", ttl=50, timestamp=at)["type"] == answer
        world.now += 100
    late = world.ask(sender, kind, payload, ttl=50, timestamp=world.now - 100)
    assert late["payload"]["code"] == "message_expired"
