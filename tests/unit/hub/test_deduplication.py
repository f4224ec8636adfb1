"""What comes a second time: to actors after a crash, marked; from senders, answered as the first time."""

from __future__ import annotations

from typing import Any

import pytest

from support.hub_world import Frame, World
from tailrace.common.limits import Limits
from tailrace.hub.errors import ERROR_TYPES
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


def test_h20_a_repeat_whose_answer_was_let_go_is_told_so_and_not_delivered_again() -> None:
    world = World(limits=Limits(hub_seen_answer_bytes=1000))
    sender, receiver = world.actor(A), world.actor(B)
    payload = {"to": B, "type": "n"}
    for number in range(10):
        assert world.ask(sender, "hub:send", payload, id=f"m-{number}")["type"] == "hub:delivery_ack"
    assert world.hub.seen_messages_of("t/a").answer_bytes <= 1000
    world.taken(receiver)
    again = world.ask(sender, "hub:send", payload, id="m-0")["payload"]
    assert (again["code"], again["details"]["outcome"], again["retryable"]) == (
        "unavailable",
        "applied",
        False,
    )
    assert world.ask(sender, "hub:send", payload, id="m-9")["type"] == "hub:delivery_ack"
    world.say(sender, "hub:send", payload, id="m-1", pattern="tell")
    assert world.taken(sender) == [], "a tell is told nothing"
    assert world.taken(receiver) == []


@pytest.mark.parametrize("durable", [False, True])
def test_h20_when_there_is_no_room_to_remember_messages_wait_and_none_is_forgotten(durable: bool) -> None:
    world = World(limits=Limits(hub_seen_bytes=4000))
    sender, receiver = world.actor(A), world.actor(B, durable=durable)
    payload = {"to": B, "type": "n"}
    kinds = ["tell", "ask"]

    def send(number: int) -> str | None:
        """The code of the refusal, if it was one."""
        world.say(sender, "hub:send", payload, id=f"m-{number}", pattern=kinds[number % 2])
        refusals = [frame for frame in world.taken(sender) if frame["type"] in ERROR_TYPES]
        return refusals[0]["payload"]["code"] if refusals else None

    codes = [send(number) for number in range(30)]
    accepted = codes.index("unavailable")
    assert set(codes[accepted:]) == {"unavailable"}
    assert world.hub.seen_memory.bytes < 5000
    assert len(given(world, receiver)) == accepted
    for number in range(accepted):
        send(number)
    assert given(world, receiver) == [], "all of them are still known"
    world.wait(60_000)
    assert world.hub.seen_memory.bytes == 0
    assert send(29) is None
    assert len(given(world, receiver)) == 1
