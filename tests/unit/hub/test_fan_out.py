"""One message to many: copies are made and written together, and are bounded one by one all the same."""

from __future__ import annotations

import json
import uuid
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.hub_world import START_MS, World
from tailrace.common.limits import Limits
from tailrace.hub import decide
from tailrace.hub.effects import Effect, Send, SendMany
from tailrace.hub.envelope import HEX_PAIRS, ID_RUN_MAX, MessageIds
from tailrace.hub.session import Session

SENDER, TOPIC = "@(t/sender)", "news/all"


def actors(world: World, count: int) -> list[Session]:
    """Registered, and subscribed to the topic."""
    found = [world.actor(f"@(t/r{number})") for number in range(count)]
    for session in found:
        world.ask(session, "hub:subscribe", {"topic": TOPIC})
    return found


def frame(number: int, kind: str) -> bytes:
    payload: dict[str, Any] = {"type": "t", "data": number, "excludeSelf": True}
    if kind == "hub:publish":
        payload["topic"] = TOPIC
    elif kind == "hub:send":
        payload = {"to": "@(t/r0)", "type": "t", "data": number}
    said = {
        "id": f"m-{kind}-{number}",
        "from": SENDER,
        "type": kind,
        "payload": payload,
        "timestamp": START_MS,
    }
    return json.dumps(said).encode()


def said(world: World, session: Session) -> list[int]:
    return [one["payload"] for one in world.taken(session) if one["type"] == "t"]


kinds = st.lists(st.sampled_from(["hub:broadcast", "hub:publish", "hub:send"]), max_size=12)


@given(kinds, st.integers(1, 4))
def test_h21_what_is_decided_in_one_turn_is_written_in_its_order(sent: list[str], count: int) -> None:
    world = World()
    receivers, sender = actors(world, count), world.actor(SENDER)
    effects: list[Effect] = []
    for number, kind in enumerate(sent):
        effects += decide.decide(world.hub, sender, frame(number, kind), world.now)
    world.run(effects)
    for place, session in enumerate(receivers):
        mine = [number for number, kind in enumerate(sent) if place == 0 or kind != "hub:send"]
        assert said(world, session) == mine


@given(st.integers(1, 12), st.integers(0, 12), st.sampled_from(["hub:broadcast", "hub:publish"]))
def test_h35_copies_that_are_decided_and_not_written_count_for_the_bound(
    hard: int, sent: int, kind: str
) -> None:
    world = World(limits=Limits(hub_pause_messages=max(1, hard // 2), hub_outbound_messages=hard))
    (receiver, other), sender = actors(world, 2), world.actor(SENDER)
    effects: list[Effect] = []
    for number in range(sent):
        effects += decide.decide(world.hub, sender, frame(number, kind), world.now)
    decided = min(sent, hard + 1)  # the bound is looked at before, so one message may pass it
    assert receiver.outbox.messages == other.outbox.messages == decided
    assert receiver.dropped[0] == other.dropped[0] == sent - decided
    world.run(effects)
    assert said(world, receiver) == said(world, other) == list(range(decided))
    world.wait(1000)
    letters = world.streams.bodies("hub/dead-letters")
    assert sum(one["count"] for one in letters if one["reason"] == "consumer_slow") == 2 * (sent - decided)


def test_h27_every_recipient_is_counted_as_what_became_of_it() -> None:
    """One takes its copy, one is away for a moment, one takes nothing."""
    world = World(limits=Limits(hub_pause_bytes=1000, hub_outbound_bytes=2000))
    fine, slow = world.actor("@(t/fine)"), world.actor("@(t/slow)")
    resting = world.actor("@(t/resting)", "resume")
    sender = world.actor(SENDER)
    world.unsent[slow] = 5000
    world.lose(resting)
    ack = world.ask(sender, "hub:broadcast", {"type": "t", "data": 1, "excludeSelf": True})["payload"]
    counted = [ack[name] for name in ("deliveredCount", "queuedCount", "failedCount", "total")]
    assert counted == [1, 1, 1, 3]
    assert (said(world, fine), said(world, slow)) == ([1], [])
    assert (slow.dropped[0], len(resting.resume_buffer or ())) == (1, 1)
    assert world.hub.counts["deliveries", "direct"] == 1


def test_copies_differ_in_id_and_address_only() -> None:
    world = World()
    receivers, sender = actors(world, 3), world.actor(SENDER)
    world.run(decide.decide(world.hub, sender, frame(1, "hub:broadcast"), world.now))
    copies = [world.taken(session)[0] for session in receivers]
    assert [one.pop("to") for one in copies] == ["@(t/r0)", "@(t/r1)", "@(t/r2)"]
    ids = [one.pop("id") for one in copies]
    assert all(one < other for one, other in pairwise(ids))
    assert copies[0] == copies[1] == copies[2]


def test_whoever_leaves_before_its_copy_is_written_takes_nothing_from_the_others() -> None:
    world = World()
    (first, gone, last), sender = actors(world, 3), world.actor(SENDER)
    effects = decide.decide(world.hub, sender, frame(1, "hub:publish"), world.now)
    world.lose(gone)
    world.run(effects)
    world.run(decide.decide(world.hub, sender, frame(2, "hub:publish"), world.now))
    assert (said(world, first), said(world, last)) == ([1, 2], [1, 2])
    assert said(world, gone) == [1], "it is the runner that finds nobody to write to"


def test_a_publication_is_one_effect_for_all_plain_subscribers() -> None:
    world = World()
    receivers, sender = actors(world, 40), world.actor(SENDER)
    effects = decide.decide(world.hub, sender, frame(1, "hub:publish"), world.now)
    spread, answer = effects
    assert isinstance(spread, SendMany)
    assert [session for session, _ in spread.copies] == receivers
    assert isinstance(answer, Send)
    world.run(effects)
    (published,) = world.taken(sender)
    assert published["payload"]["subscriberCount"] == 40


@given(st.lists(st.one_of(st.none(), st.integers(1, ID_RUN_MAX)), max_size=40), st.integers(0, 2**17))
def test_ids_of_a_run_are_like_those_that_are_made_one_by_one(steps: list[int | None], begin: int) -> None:
    ids, made = MessageIds(), list[str]()
    ids._count = begin
    for place, length in enumerate(steps):
        now_ms = START_MS + place // 3
        if length is None:
            made.append(ids(now_ms))
            continue
        start, number, end = ids.run(now_ms, length)
        for each in sorted({number, number + length // 2, number + length - 1}):
            made.append((start + HEX_PAIRS[each >> 8] + HEX_PAIRS[each & 255] + end).decode())
    made.append(ids(START_MS))
    assert all(one < other for one, other in pairwise(made))
    assert all(str(uuid.UUID(text)) == text and uuid.UUID(text).version == 7 for text in made)
