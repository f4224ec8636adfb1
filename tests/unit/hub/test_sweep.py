"""What goes when nobody asks for it: messages that waited too long, mailboxes nobody uses, old entries."""

from __future__ import annotations

from typing import Any

import pytest

from support.hub_world import World
from tailrace.common.limits import Limits
from tailrace.hub.delivery_queues import BROADCAST_STREAM
from tailrace.hub.sweep import NAMES_AT_ONCE

A, B, C = "@(t/a)", "@(t/b)", "@(t/c)"
BOX, TOPIC = "hub/mbox/t/b", "hub/topic/news"
UNIT_MS = 12_000
# What are days elsewhere are units of a few seconds here, and a round begins every second.
QUICK = Limits(
    hub_mailbox_ms=7 * UNIT_MS,
    hub_mailbox_kept_ms=7 * UNIT_MS,
    hub_mailbox_unused_ms=30 * UNIT_MS,
    hub_topic_ms=UNIT_MS,
    hub_cursor_ms=7 * UNIT_MS,
    hub_sweep_ms=1000,
)


@pytest.fixture
def world() -> World:
    return World(limits=QUICK)


def tell(world: World, session: Any, to: str, data: Any) -> None:
    world.say(session, "hub:send", {"to": to, "type": "t", "data": data}, pattern="tell")


def away(world: World) -> Any:
    """A sender; the durable actor that it writes to has left."""
    sender, receiver = world.actor(A), world.actor(B, durable=True, ttlSeconds=60)
    world.lose(receiver)
    return sender


def letters(world: World) -> list[tuple[str, Any]]:
    found = world.streams.bodies("hub/dead-letters")
    return [(letter["reason"], letter["message"]["payload"]) for letter in found]


def position(world: World, path: str, stream: str) -> int:
    cursor = world.hub.mailboxes.cursors.get(path, stream)
    assert cursor is not None
    return cursor.committed


def test_what_waited_too_long_for_somebody_away_becomes_dead_letters(world: World) -> None:
    sender = away(world)
    for number in range(250):  # more than a page
        tell(world, sender, B, number)
    world.wait(4 * UNIT_MS)
    tell(world, sender, B, "later")
    world.wait(2 * UNIT_MS)
    assert letters(world) == []
    world.wait(2 * UNIT_MS)
    assert letters(world) == [("mailbox_expired", number) for number in range(250)]
    assert position(world, "t/b", BOX) == 250
    assert not world.hub.mailboxes.queues, "mailboxes of those who are away are not held in memory"
    back = world.connect(B)
    world.say(back, "hub:register", {"actorAddress": B, "capabilities": ["x"], "durable": True})
    assert [frame["payload"] for frame in world.taken(back) if frame["type"] == "t"] == ["later"]
    world.wait(1000)
    world.crash()
    assert position(world, "t/b", BOX) == 251


def test_an_ask_that_waited_too_long_is_told_so(world: World) -> None:
    sender = away(world)
    payload = {"to": B, "type": "t", "data": 1, "expectReply": True}
    asked = world.say(sender, "hub:send", payload, ttl=60 * UNIT_MS)
    world.wait(8 * UNIT_MS)
    answers = [frame for frame in world.taken(sender) if frame["correlationId"] == asked]
    assert [answer["payload"]["code"] for answer in answers] == ["timeout"]
    assert letters(world) == [("mailbox_expired", 1)]


def test_a_request_that_is_kept_may_take_longer_than_memory_allows(world: World) -> None:
    sender = away(world)
    payload = {"to": B, "type": "t", "data": 1, "expectReply": True}
    asked = world.say(sender, "hub:send", payload, ttl=60 * UNIT_MS)
    world.wait(6 * UNIT_MS)
    assert world.taken(sender) == []
    back = world.connect(B)
    world.say(back, "hub:register", {"actorAddress": B, "capabilities": ["x"], "durable": True})
    request = next(frame for frame in world.taken(back) if frame["type"] == "t")
    world.say(back, "hub:reply", {"data": 2}, correlationId=request["id"], pattern="tell")
    assert [(one["type"], one["correlationId"]) for one in world.taken(sender)] == [("hub:reply", asked)]


def test_a_request_outlives_the_session_that_asked(world: World) -> None:
    requester = world.actor(A, durable=True)
    receiver = world.actor(B, durable=True)
    world.lose(receiver)
    payload = {"to": B, "type": "t", "data": 1, "expectReply": True}
    asked = world.say(requester, "hub:send", payload, ttl=60 * UNIT_MS)
    world.lose(requester)
    back = world.connect(B)
    world.say(back, "hub:register", {"actorAddress": B, "capabilities": ["x"], "durable": True})
    request = next(frame for frame in world.taken(back) if frame["type"] == "t")
    world.say(back, "hub:reply", {"data": 2}, correlationId=request["id"], pattern="tell")
    again = world.connect(A)
    world.say(again, "hub:register", {"actorAddress": A, "capabilities": ["x"], "durable": True})
    replies = [frame for frame in world.taken(again) if frame["type"] == "hub:reply"]
    assert [reply["correlationId"] for reply in replies] == [asked]


def test_somebody_who_is_there_is_left_alone(world: World) -> None:
    sender, reader = (
        world.actor(A),
        world.actor(B, "mailbox", durable=True, commit="manual", ackTimeout=3600),
    )
    tell(world, sender, B, 1)
    world.wait(9 * UNIT_MS)
    assert letters(world) == []
    assert world.hub.mailboxes.queues["t/b"].session is reader


def test_an_empty_mailbox_that_nobody_uses_is_deleted(world: World) -> None:
    sender = away(world)
    tell(world, sender, B, 1)
    world.wait(20 * UNIT_MS)
    assert BOX in world.streams.entries, "it became empty just now"
    world.wait(20 * UNIT_MS)
    assert BOX not in world.streams.entries
    assert world.hub.mailboxes.cursors.streams_of("t/b") == []
    answer = world.ask(sender, "hub:send", {"to": B, "type": "t", "data": 2})
    assert answer["type"] == "hub:unknown_actor"


def test_a_mailbox_whose_owner_is_registered_is_not_deleted(world: World) -> None:
    owner = world.connect(B)
    payload = {"actorAddress": B, "capabilities": ["x"], "durable": True, "ttlSeconds": 3600}
    world.say(owner, "hub:register", payload, metadata={"renewOnHeartbeat": True})
    for _ in range(8):
        world.wait(10 * UNIT_MS)
        world.say(owner, "hub:heartbeat")
    assert BOX in world.streams.entries


def test_committed_messages_may_go_after_a_while(world: World) -> None:
    sender, receiver = (
        world.actor(A),
        world.actor(B, "mailbox", durable=True, commit="manual", ackTimeout=3600),
    )
    tell(world, sender, B, 1)
    tell(world, sender, B, 2)
    offset = world.taken(receiver)[0]["metadata"]["mailbox"]["offset"]
    world.say(receiver, "hub:mailbox_commit", {"actorAddress": B, "offset": offset})
    world.wait(6 * UNIT_MS)
    assert BOX not in world.hub.sweep.bounds
    world.wait(2 * UNIT_MS)
    bound = world.hub.sweep.bounds[BOX]
    assert (bound.upto, bound.age_ms, bound.bytes_max) == (1, QUICK.hub_mailbox_kept_ms, None)


def test_a_topic_keeps_what_a_subscriber_has_yet_to_read(world: World) -> None:
    publisher = world.actor(A)
    for address in (B, C):
        subscriber = world.actor(address)
        world.say(subscriber, "hub:subscribe", {"topic": "news", "durable": True})
        world.lose(subscriber)
    for number in range(4):
        world.say(publisher, "hub:publish", {"topic": "news", "type": "p", "data": number})
    reader = world.actor(B)
    world.say(reader, "hub:subscribe", {"topic": "news", "durable": True})
    assert position(world, "t/b", TOPIC) == 4
    world.wait(2 * UNIT_MS)
    assert TOPIC not in world.hub.sweep.bounds, "one of them has read nothing"
    world.wait(6 * UNIT_MS)
    assert world.hub.sweep.bounds[TOPIC].upto == 4, "and did not come back for long"
    assert world.hub.sweep.bounds[TOPIC].bytes_max == QUICK.hub_topic_bytes


def test_a_subscriber_goes_on_behind_what_was_trimmed(world: World) -> None:
    publisher, subscriber = world.actor(A), world.actor(B)
    world.say(subscriber, "hub:subscribe", {"topic": "news", "durable": True})
    world.lose(subscriber)
    for number in range(4):
        world.say(publisher, "hub:publish", {"topic": "news", "type": "p", "data": number})
    world.streams.trimmed[TOPIC] = 3
    again = world.connect(B)
    world.say(again, "hub:subscribe", {"topic": "news", "durable": True}, frm=B)
    assert [frame["payload"] for frame in world.taken(again) if frame["type"] == "p"] == [3]


def test_broadcasts_are_kept_until_durable_actors_have_read_them(world: World) -> None:
    sender, receiver = world.actor(A), world.actor(B, durable=True, ttlSeconds=3600)
    world.lose(receiver)
    world.say(sender, "hub:broadcast", {"type": "news", "data": 1, "excludeSelf": True})
    world.wait(2 * UNIT_MS)
    assert BROADCAST_STREAM not in world.hub.sweep.bounds
    back = world.connect(B)
    world.say(back, "hub:register", {"actorAddress": B, "capabilities": ["x"], "durable": True})
    world.wait(6000)
    assert world.hub.sweep.bounds[BROADCAST_STREAM].upto == 1


def test_all_mailboxes_are_looked_at_a_few_each_second(world: World) -> None:
    sender = world.actor(A)
    count = 2 * NAMES_AT_ONCE + 7
    for number in range(count):
        actor = world.actor(f"@(many/{number})", durable=True)
        world.lose(actor)
        tell(world, sender, f"@(many/{number})", number)
    world.wait(8 * UNIT_MS)
    assert len(letters(world)) == count


def test_an_ask_is_taken_up_again_after_a_crash(world: World) -> None:
    requester, worker = world.connect(A), world.actor(B, durable=True)
    payload = {"to": B, "type": "t", "data": 1, "expectReply": True}
    asked = world.say(requester, "hub:send", payload, frm=A, ttl=UNIT_MS)
    request = next(frame for frame in world.taken(worker) if frame["type"] == "t")
    world.crash()
    requester, worker = world.connect(A), world.actor(B, durable=True)
    world.say(requester, "hub:send", payload, frm=A, ttl=UNIT_MS, id=asked)
    assert [frame["type"] for frame in world.taken(requester)] == ["hub:connected"], "it waits for its reply"
    world.say(worker, "hub:reply", {"data": 2}, correlationId=request["id"], pattern="tell")
    (reply,) = world.taken(requester)
    assert (reply["type"], reply["correlationId"], reply["payload"]["data"]) == ("hub:reply", asked, 2)
    assert len(world.streams.entries[BOX]) == 1, "and was kept once"
    world.say(requester, "hub:send", payload, frm=A, ttl=UNIT_MS, id=asked)
    assert [frame["type"] for frame in world.taken(requester)] == ["hub:reply"], "a third time it is known"


def test_durable_subscriptions_are_written_again_once_a_day_and_mean_the_same(world: World) -> None:
    subscriber = world.actor(B)
    given = world.ask(subscriber, "hub:subscribe", {"topic": "news", "durable": True})["payload"]
    world.lose(subscriber)
    world.wait(10_000)
    assert len(world.streams.entries["hub/subscriptions"]) == 1
    world.now += 24 * 3600 * 1000
    world.wait(10_000)
    assert len(world.streams.entries["hub/subscriptions"]) == 2
    del world.streams.entries["hub/subscriptions"][0]  # as if the old one had been trimmed
    world.crash()
    again = world.actor(B)
    taken_up = world.ask(again, "hub:subscribe", {"topic": "news", "durable": True})["payload"]
    assert taken_up["subscriptionId"] == given["subscriptionId"]
    assert len(world.hub.topics.durable) == 1
