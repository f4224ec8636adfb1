"""Broadcasts that follow each other: in order for everybody, and side by side where they go to the same."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.hub_world import World
from tailrace.hub import broadcast, decide
from tailrace.hub.session import Session

SENDER = "@(t/sender)"


def crowd(world: World, count: int) -> list[Session]:
    return [world.actor(f"@(crowd/{number:04})") for number in range(count)]


def cast(world: World, sender: Session, data: int, pattern: str = "crowd/*", **more: Any) -> str:
    return world.say(sender, "hub:broadcast", {"type": "n", "data": data, "pattern": pattern}, **more)


def heard(world: World, session: Session) -> list[Any]:
    return [frame["payload"] for frame in world.said[session] if frame["type"] == "n"]


def test_those_to_the_same_reach_a_connection_in_the_same_turn() -> None:
    world = World()
    sender, actors = world.actor(SENDER), crowd(world, 500)
    world.turns = deque()
    ids = [cast(world, sender, number) for number in (1, 2)]
    assert [heard(world, actor) for actor in actors] == [[1, 2]] * 100 + [[]] * 400
    copies = 200
    while world.turn():
        now = [heard(world, actor) for actor in actors]
        assert all(one in ([], [1, 2]) for one in now), "both, or none"
        assert sum(map(len, now)) - copies == 100, "as many in a turn as one alone"
        copies += 100
    assert copies == 1000
    acks = [frame for frame in world.taken(sender) if frame["type"] == "hub:broadcast_ack"]
    assert [ack["correlationId"] for ack in acks] == ids
    assert [ack["payload"]["deliveredCount"] for ack in acks] == [500, 500]


def test_one_that_comes_a_little_later_catches_up_and_one_much_later_waits() -> None:
    world = World()
    sender, actors = world.actor(SENDER), crowd(world, 700)
    world.turns = deque()
    cast(world, sender, 1)
    world.turn()
    cast(world, sender, 2)
    assert heard(world, actors[0]) == [1]
    world.turn()
    world.turn()
    assert [heard(world, actors[place]) for place in (0, 199, 200)] == [[1, 2], [1, 2], []]
    while world.turn():
        assert all(heard(world, actor) in ([], [1, 2]) for actor in actors)
    cast(world, sender, 3)
    for _ in range(3):
        world.turn()
    cast(world, sender, 4)
    assert [heard(world, actors[place]) for place in (0, 399, 400)] == [[1, 2, 3], [1, 2, 3], [1, 2]]
    while world.turn():
        # Nobody is given the fourth before everybody has the third.
        begun = any(4 in heard(world, actor) for actor in actors)
        assert not begun or all(3 in heard(world, actor) for actor in actors)
    assert all(heard(world, actor) == [1, 2, 3, 4] for actor in actors)


def test_what_only_looks_like_a_broadcast_waits() -> None:
    world = World()
    sender, actors = world.actor(SENDER), crowd(world, 150)
    world.turns = deque()
    cast(world, sender, 1)
    disguise = {"to": "@(crowd/0149)", "type": "n", "data": {"type": "hub:broadcast"}}
    world.say(sender, "hub:send", disguise, pattern="tell")
    world.run(decide.decide(world.hub, sender, b'{"type":"hub:broadcast"', world.now))
    assert heard(world, actors[149]) == []
    while world.turn():
        pass
    assert heard(world, actors[149]) == [1, {"type": "hub:broadcast"}]


acts = st.one_of(
    st.tuples(st.just("cast"), st.sampled_from(["crowd/*", "crowd/*", "crowd/000*"])),
    st.tuples(st.just("send"), st.integers(0, 11)),
    st.tuples(st.just("turn"), st.none()),
    st.tuples(st.just("leave"), st.integers(0, 11)),
    st.tuples(st.just("come"), st.integers(0, 11)),
    st.tuples(st.just("keep"), st.integers(0, 11)),
)


@settings(max_examples=150, deadline=None)
@given(program=st.lists(acts, max_size=40))
def test_h21_h27_everybody_hears_one_sender_in_order_and_acks_are_exact(
    program: list[tuple[str, Any]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "BATCH_RECIPIENTS", 4)
        patch.setattr(broadcast, "JOIN_RECIPIENTS_MAX", 8)
        world = World()
        sender = world.actor(SENDER)
        sessions = dict(enumerate(crowd(world, 12)))
        world.turns = deque()
        asked: list[str] = []
        for number, (act, value) in enumerate(program):
            if act == "cast":
                asked.append(cast(world, sender, number, value))
            elif act == "send":
                payload = {"to": f"@(crowd/{value:04})", "type": "n", "data": number}
                world.say(sender, "hub:send", payload, pattern="tell")
            elif act == "turn":
                world.turn()
            elif act == "leave":
                if value in sessions:
                    world.lose(sessions.pop(value))
            elif value not in sessions:
                address = f"@(crowd/{value:04})"
                sessions[value] = world.actor(address, durable=act == "keep")
        while world.turn():
            pass
        acks = [frame for frame in world.said[sender] if frame["type"] == "hub:broadcast_ack"]
        assert [ack["correlationId"] for ack in acks] == asked, "each once, in order"
        for ack in acks:
            told = ack["payload"]
            assert told["deliveredCount"] + told["queuedCount"] + told["failedCount"] == told["total"]
        for session, frames in world.said.items():
            if session is not sender:
                numbers = [frame["payload"] for frame in frames if frame["type"] == "n"]
                assert numbers == sorted(numbers), json.dumps(numbers)
        assert not sender.broadcasting
        assert not sender.held_frames
