"""Mailboxes, durable topics and tokens of a hub, with a clock that stands still."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.hub_world import START_MS, World
from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.hub.policy import Policy, PolicyRules
from tailrace.hub.state import HubOptions

A, B, C = "@(t/a)", "@(t/b)", "@(t/c)"
BOX = "hub/mbox/t/b"


def send(world: World, session: Any, to: str, data: Any = None, **more: Any) -> str:
    payload = {"to": to, "type": "t", "data": data, **more.pop("payload", {})}
    return world.say(session, "hub:send", payload, **more)


def data(frames: list[dict[str, Any]]) -> list[Any]:
    return [frame["payload"] for frame in frames if not frame["type"].startswith("hub:")]


def manual(world: World, **more: Any) -> Any:
    return world.actor(B, "mailbox", durable=True, commit="manual", **more)


# -- mailboxes -------------------------------------------------------------------------------------------


def test_h19_nobody_sees_a_message_before_it_is_durable() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    world.hold()
    send(world, sender, B, 1, payload={"ack": ["delivered", "accepted"]})
    send(world, sender, B, 2, pattern="tell")
    assert world.taken(receiver) == world.taken(sender) == []
    world.commit_held()
    frames = world.taken(receiver)
    assert data(frames) == [1, 2]
    assert frames[0]["metadata"]["mailbox"] == {"stream": BOX, "offset": world.streams.offset(BOX, 1)}
    acks = [frame["payload"] for frame in world.taken(sender)]
    assert [(ack["status"], ack["offset"]) for ack in acks] == [
        ("accepted", world.streams.offset(BOX, 1)),
        ("delivered", world.streams.offset(BOX, 1)),
    ]


def test_an_ephemeral_actor_gets_a_mailbox_when_somebody_wants_to_be_sure() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B)
    answer = world.ask(sender, "hub:send", {"to": B, "type": "t", "data": 1, "ack": "accepted"})
    assert answer["payload"]["stream"] == BOX
    assert data(world.taken(receiver)) == [1]
    world.hold()
    send(world, sender, B, 2, payload={"ack": "accepted"})
    send(world, sender, B, 3, pattern="tell")  # waits behind it
    assert world.taken(receiver) == []
    world.commit_held()
    assert data(world.taken(receiver)) == [2, 3]


def test_messages_wait_for_an_actor_that_is_away() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    world.lose(receiver)
    answer = world.ask(sender, "hub:send", {"to": B, "type": "t", "data": 1})["payload"]
    assert (answer["status"], answer["level"], answer["stream"]) == ("queued", "accepted", BOX)
    send(world, sender, B, 2, pattern="tell")
    again = world.connect(B)
    world.say(again, "hub:register", {"actorAddress": B, "capabilities": ["x"], "durable": True})
    assert data(world.taken(again)) == [1, 2]
    send(world, sender, B, 3, pattern="tell")
    assert data(world.taken(again)) == [3]
    third = world.connect(B)
    world.say(third, "hub:register", {"actorAddress": B, "capabilities": ["x"], "durable": True})
    assert data(world.taken(third)) == [], "what was handed over is committed"


def test_h33_what_is_not_committed_comes_again_and_is_marked() -> None:
    world = World()
    sender, receiver = world.actor(A), manual(world, ackTimeout=5)
    send(world, sender, B, 1, pattern="tell")
    send(world, sender, B, 2, pattern="tell")
    first = world.taken(receiver)
    assert data(first) == [1, 2]
    world.wait(4000)
    assert world.taken(receiver) == []
    world.wait(2000)
    again = world.taken(receiver)
    assert data(again) == [1, 2]
    assert [frame["metadata"]["deliveryCount"] for frame in again] == [2, 2]
    assert again[0]["metadata"]["redelivered"] is True
    offset = first[0]["metadata"]["mailbox"]["offset"]
    done = world.ask(receiver, "hub:mailbox_commit", {"actorAddress": B, "offset": offset})["payload"]
    assert (done["committed"], done["lag"]) == (offset, 1)
    world.wait(6000)
    assert data(world.taken(receiver)) == [2]


def test_after_too_many_deliveries_a_message_is_a_dead_letter() -> None:
    world = World()
    sender, receiver = world.actor(A), manual(world, ackTimeout=1, maxDeliver=2)
    send(world, sender, B, 1, pattern="tell")
    world.wait(10_000)
    assert data(world.taken(receiver)) == [1, 1]
    letter = world.streams.bodies("hub/dead-letters")[0]
    assert (letter["reason"], letter["attempts"], letter["stream"]) == ("max_deliveries", 2, BOX)
    read = world.ask(receiver, "hub:mailbox_read", {"actorAddress": B})["payload"]
    assert (read["lag"], read["messages"]) == (0, [])


def test_an_actor_that_comes_back_gets_what_it_did_not_commit() -> None:
    world = World()
    sender, receiver = world.actor(A), manual(world)
    for number in range(3):
        send(world, sender, B, number, pattern="tell")
    offsets = [frame["metadata"]["mailbox"]["offset"] for frame in world.taken(receiver)]
    world.say(receiver, "hub:mailbox_commit", {"actorAddress": B, "offset": offsets[0]})
    world.lose(receiver)
    again = world.connect(B, "mailbox")
    world.say(
        again,
        "hub:register",
        {"actorAddress": B, "capabilities": ["x"], "durable": True, "commit": "manual"},
    )
    frames = [frame for frame in world.taken(again) if frame["type"] == "t"]
    assert data(frames) == [1, 2]
    assert all(frame["metadata"]["redelivered"] for frame in frames)


def test_h32_a_commit_never_goes_backwards_nor_past_what_was_delivered() -> None:
    world = World()
    sender, receiver = world.actor(A), manual(world, maxInFlight=2)
    for number in range(4):
        send(world, sender, B, number, pattern="tell")
    frames = world.taken(receiver)
    assert data(frames) == [0, 1], "no more than that is in flight"
    ends = [world.streams.offset(BOX, entry) for entry in range(5)]

    def commit(offset: str) -> dict[str, Any]:
        return world.ask(receiver, "hub:mailbox_commit", {"actorAddress": B, "offset": offset})["payload"]

    assert commit(ends[3])["code"] == "invalid_offset"
    assert commit(ends[2])["committed"] == ends[2]
    assert commit(ends[1])["committed"] == ends[2]
    assert data(world.taken(receiver)) == [2, 3]
    assert commit("nonsense")["code"] == "invalid_offset"


def test_processed_means_committed() -> None:
    world = World()
    sender, receiver = world.actor(A), manual(world)
    request = send(world, sender, B, 1, payload={"ack": ["accepted", "processed"]})
    assert [frame["payload"]["status"] for frame in world.taken(sender)] == ["accepted"]
    offset = world.taken(receiver)[0]["metadata"]["mailbox"]["offset"]
    world.say(receiver, "hub:mailbox_commit", {"actorAddress": B, "offset": offset})
    said = world.taken(sender)
    assert [(frame["correlationId"], frame["payload"]["status"]) for frame in said] == [
        (request, "processed")
    ]
    late = send(world, sender, B, 2, payload={"ack": "processed"}, ttl=5000)
    world.wait(6000)
    said = world.taken(sender)
    assert [(frame["correlationId"], frame["payload"]["code"]) for frame in said] == [(late, "timeout")]
    assert said[0]["payload"]["details"]["reached"] == "delivered"


def test_a_rejected_message_is_a_dead_letter_and_passed() -> None:
    world = World()
    sender, receiver = world.actor(A), manual(world)
    send(world, sender, B, "bad", pattern="tell")
    send(world, sender, B, "good", pattern="tell")
    offsets = [frame["metadata"]["mailbox"]["offset"] for frame in world.taken(receiver)]
    payload = {"actorAddress": B, "reject": [{"offset": offsets[0], "reason": "bad schema"}]}
    done = world.ask(receiver, "hub:mailbox_commit", payload)["payload"]
    assert done["committed"] == offsets[0]
    letter = world.streams.bodies("hub/dead-letters")[0]
    assert (letter["reason"], letter["message"]["payload"]) == ("rejected", "bad")


def test_an_expired_message_is_not_handed_over() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    world.lose(receiver)
    send(world, sender, B, "late", pattern="tell", ttl=1000)
    send(world, sender, B, "fine", pattern="tell")
    world.now += 1001
    again = world.connect(B)
    world.say(again, "hub:register", {"actorAddress": B, "capabilities": ["x"], "durable": True})
    assert data(world.taken(again)) == ["fine"]
    assert world.streams.bodies("hub/dead-letters")[0]["reason"] == "message_expired"


def test_a_full_mailbox_refuses() -> None:
    world = World(limits=Limits(hub_mailbox_entries=2))
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    world.lose(receiver)
    answers = [world.ask(sender, "hub:send", {"to": B, "type": "t"}) for _ in range(3)]
    assert [answer["type"] for answer in answers] == ["hub:delivery_ack"] * 2 + ["hub:error"]
    assert answers[-1]["payload"]["code"] == "mailbox_full"
    assert answers[-1]["payload"]["retryable"] is True


def test_a_tell_to_a_full_mailbox_is_a_dead_letter() -> None:
    world = World(limits=Limits(hub_mailbox_entries=1))
    sender, receiver = world.actor(A, "delivery-notices"), world.actor(B, durable=True)
    world.lose(receiver)
    first, second = (send(world, sender, B, number, pattern="tell") for number in range(2))
    [told] = world.taken(sender)
    assert (told["type"], told["correlationId"]) == ("hub:undeliverable", second)
    assert told["payload"]["reason"] == "mailbox_full"
    [letter] = world.streams.bodies("hub/dead-letters")
    assert (letter["reason"], letter["message"]["payload"]) == ("mailbox_full", 1)
    assert [one["metadata"]["originalMessageId"] for one in world.streams.bodies(BOX)] == [first]


def test_messages_on_their_way_to_the_disk_do_not_count_more_than_once() -> None:
    world = World(limits=Limits(hub_mailbox_bytes=100_000))
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    send(world, sender, B, 0, pattern="tell")
    world.hold()
    for number in range(1, 11):
        send(world, sender, B, [number, "x" * 5_000], pattern="tell")
    world.commit_held()
    assert [found if found == 0 else found[0] for found in data(world.taken(receiver))] == list(range(11))


def test_a_slow_actor_with_a_mailbox_misses_nothing() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    send(world, sender, B, 0, pattern="tell")
    world.unsent[receiver] = 3_000_000
    for number in range(1, 6):
        send(world, sender, B, number, pattern="tell")
    assert world.hub.mailboxes.session_lag(receiver)[2] is False
    world.drain(receiver)
    assert data(world.taken(receiver)) == [0, 1, 2, 3, 4, 5]
    assert "hub/dead-letters" not in world.streams.entries


def test_a_producer_is_recognised_for_ever() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True)

    def produce(seq: int) -> dict[str, Any]:
        metadata = {"producer": {"id": "w1", "epoch": 0, "seq": seq}}
        return world.ask(
            sender, "hub:send", {"to": B, "type": "t", "data": seq, "ack": "accepted"}, metadata=metadata
        )

    assert produce(0)["payload"]["duplicate"] is False
    world.now += 1_000_000
    again = produce(0)["payload"]
    assert (again["status"], again["duplicate"]) == ("accepted", True)
    assert produce(5)["payload"]["code"] == "producer_gap"
    assert produce(1)["payload"]["duplicate"] is False
    assert data(world.taken(receiver)) == [0, 1]


def test_a_reply_waits_for_a_durable_asker() -> None:
    world = World()
    requester, actor = world.actor(A, durable=True), world.actor(B, durable=True)
    request = send(world, requester, B, 1, payload={"expectReply": True}, ttl=100_000)
    copy = world.taken(actor)[0]
    world.lose(requester)
    world.say(actor, "hub:reply", {"data": 2}, correlationId=copy["id"], pattern="tell")
    back = world.connect(A)
    world.say(back, "hub:register", {"actorAddress": A, "capabilities": ["x"], "durable": True})
    replies = [frame for frame in world.taken(back) if frame["type"] == "hub:reply"]
    assert [(frame["correlationId"], frame["payload"]["data"]) for frame in replies] == [(request, 2)]


def test_what_an_actor_read_by_itself_can_be_committed_after_a_restart() -> None:
    world = World()
    sender, receiver = (
        world.actor(A),
        world.actor(B, "mailbox", durable=True, push=False, commit="manual"),
    )
    for number in range(3):
        send(world, sender, B, number)
    page = world.ask(receiver, "hub:mailbox_read", {"actorAddress": B, "limit": 2})["payload"]
    world.wait(1000)
    world.crash()
    back = world.actor(B, "mailbox", durable=True, push=False, commit="manual")
    wanted = {"actorAddress": B, "offset": page["nextOffset"]}
    done = world.ask(back, "hub:mailbox_commit", wanted)
    assert (done["type"], done["payload"]["lag"]) == ("hub:mailbox_committed", 1), done
    beyond = {"actorAddress": B, "offset": world.streams.offset("hub/mbox/t/b", 3)}
    assert world.ask(back, "hub:mailbox_commit", beyond)["payload"]["code"] == "invalid_offset"


def test_a_mailbox_is_read_by_its_owner() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True, push=False)
    for number in range(3):
        send(world, sender, B, number, pattern="tell")
    assert world.taken(receiver) == []
    page = world.ask(receiver, "hub:mailbox_read", {"actorAddress": B, "limit": 2})["payload"]
    assert [one["message"]["payload"] for one in page["messages"]] == [0, 1]
    assert (page["upToDate"], page["lag"]) == (False, 3)
    rest = world.ask(receiver, "hub:mailbox_read", {"actorAddress": B, "offset": page["nextOffset"]})[
        "payload"
    ]
    assert [one["message"]["payload"] for one in rest["messages"]] == [2]
    assert rest["upToDate"]
    done = world.ask(receiver, "hub:mailbox_commit", {"actorAddress": B, "offset": rest["nextOffset"]})
    assert done["payload"]["lag"] == 0
    assert world.ask(receiver, "hub:mailbox_read", {"actorAddress": B})["payload"]["messages"] == []


def test_unregistering_may_end_the_mailbox() -> None:
    world = World()
    sender, receiver = world.actor(A), manual(world)
    send(world, sender, B, 1, pattern="tell")
    world.ask(receiver, "hub:unregister", {"actorAddress": B, "deleteMailbox": True})
    assert BOX not in world.streams.entries
    assert [letter["message"]["payload"] for letter in world.streams.bodies("hub/dead-letters")] == [1]
    assert world.ask(sender, "hub:send", {"to": B, "type": "t"})["type"] == "hub:unknown_actor"


def test_what_still_holds_is_written_again_before_the_log_lets_go_of_it() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    send(world, sender, B, 1, pattern="tell")
    world.wait(2000)
    before = len(world.streams.entries["hub/cursors/0"])
    world.now += 13 * 3600 * 1000
    world.wait(1000)
    assert len(world.streams.entries["hub/cursors/0"]) == before + 1
    assert json.loads(world.streams.entries["hub/cursors/0"][-1][1])["key"] == f"{B} {BOX}"
    assert not receiver.queues, "its registration has expired, its mailbox has not"


def test_a_broadcast_waits_for_an_actor_over_a_crash() -> None:
    world = World()
    sender = world.actor(A)
    world.lose(world.actor(B, durable=True))
    world.crash()
    sender = world.actor(A)
    for number in range(2):
        ack = world.ask(sender, "hub:broadcast", {"type": "news", "data": number, "excludeSelf": True})
        assert (ack["payload"]["queuedCount"], ack["payload"]["total"]) == (1, 1)
        world.crash()
        sender = world.actor(A)
    for expected in ([0, 1], []):
        back = world.connect(B)
        world.say(back, "hub:register", {"actorAddress": B, "capabilities": ["x"], "durable": True})
        assert data(world.taken(back)) == expected
        world.lose(back)


def test_the_steps_of_a_kept_message_can_be_followed() -> None:
    world = World()
    sender, receiver, other = world.actor(A), manual(world), world.actor(C)
    send(world, sender, C, 0, pattern="tell")  # is not kept
    request = send(world, sender, B, 1, pattern="tell", metadata={"traceId": "abc"})
    frame = world.taken(receiver)[0]
    offset = frame["metadata"]["mailbox"]["offset"]
    world.say(receiver, "hub:mailbox_commit", {"actorAddress": B, "offset": offset})
    send(world, sender, "@(t/nobody)", 2, pattern="tell")
    world.wait(1000)
    steps = world.streams.bodies("hub/trace")
    assert [step["ev"] for step in steps] == ["accepted", "delivered", "processed", "dead"]
    assert {step["copy"] for step in steps[:3]} == {frame["id"]}
    assert {(step["id"], step["traceId"], step["from"], step["to"]) for step in steps[:3]} == {
        (request, "abc", A, B)
    }
    assert {step["offset"] for step in steps[:3]} == {offset}
    assert steps[3]["reason"] == "unknown_actor"
    assert len(world.taken(other)) == 1


def test_a_renewal_is_logged_once_a_day() -> None:
    world = World()
    session = world.connect(A)
    payload = {"actorAddress": A, "capabilities": ["x"], "ttlSeconds": 3600}
    world.say(session, "hub:register", payload, metadata={"renewOnHeartbeat": True})
    for _ in range(49):
        world.now += 30 * 60 * 1000
        world.say(session, "hub:heartbeat")
    reasons = [event["headers"]["reason"] for event in world.streams.bodies("hub/registry")]
    assert reasons == ["registered", "renewed"]


def test_looking_into_mailboxes_that_are_not_there_leaves_nothing_behind() -> None:
    world = World()
    session = world.actor(A)
    for number in range(10):
        page = world.ask(session, "hub:mailbox_read", {"actorAddress": f"@(t/a/{number})"})["payload"]
        assert page["messages"] == []
    assert world.hub.mailboxes.queues == {}
    assert world.hub.mailboxes.cursors.streams_of("t/a/1") == []


def test_a_repeat_is_known_as_one_after_a_crash() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    world.lose(receiver)
    first = world.ask(sender, "hub:send", {"to": B, "type": "t", "data": 1, "ack": "accepted"}, id="same")
    world.ask(sender, "hub:publish", {"topic": "kept", "type": "p", "durable": True}, id="news")
    world.crash()
    world.now += 10_000
    sender = world.actor(A)
    again = world.ask(sender, "hub:send", {"to": B, "type": "t", "data": 1, "ack": "accepted"}, id="same")
    assert again["payload"]["offset"] == first["payload"]["offset"]
    assert again["payload"]["duplicate"] is True
    assert (
        world.ask(sender, "hub:publish", {"topic": "kept", "type": "p"}, id="news")["type"] == "hub:published"
    )
    assert len(world.streams.entries[BOX]) == len(world.streams.entries["hub/topic/kept"]) == 1
    world.now += 60_000
    world.ask(sender, "hub:send", {"to": B, "type": "t", "data": 1, "ack": "accepted"}, id="same")
    assert len(world.streams.entries[BOX]) == 2


# -- topics ----------------------------------------------------------------------------------------------


def publish(world: World, session: Any, topic: str, value: Any, **payload: Any) -> dict[str, Any]:
    given = {"topic": topic, "type": "p", "data": value, **payload}
    return world.ask(session, "hub:publish", given)["payload"]


def test_h30_a_publication_reaches_whom_a_filter_matches() -> None:
    world = World()
    one, two, shop = world.actor(A), world.actor(B), world.actor(C)
    first = world.ask(one, "hub:subscribe", {"topic": "orders/+/created"})["payload"]
    assert world.ask(one, "hub:subscribe", {"topic": "orders/+/created"})["payload"] == first
    world.ask(two, "hub:subscribe", {"topic": "orders/#"})
    world.ask(two, "hub:subscribe", {"topic": "orders/eu/created"})
    found = publish(world, shop, "orders/eu/created", 1)
    assert (found["subscriberCount"], found["queuedCount"], found["stream"]) == (2, 0, None)
    frames = world.taken(two)
    assert data(frames) == [1], "one copy for a session, however many of its filters match"
    assert len(frames[0]["metadata"]["subscriptionIds"]) == 2
    copy = world.taken(one)[0]
    assert (copy["to"], copy["from"]) == (A, C)
    assert copy["metadata"]["topic"] == "orders/eu/created"
    assert publish(world, shop, "orders", 2)["subscriberCount"] == 1
    world.ask(one, "hub:unsubscribe", {"subscriptionId": "orders/+/created"})
    assert publish(world, shop, "orders/us/created", 3)["subscriberCount"] == 1
    assert world.taken(one) == []
    assert not [name for name in world.streams.entries if name.startswith("hub/topic/")]
    assert publish(world, shop, "orders/+", 1)["code"] == "invalid_request"
    assert world.ask(one, "hub:subscribe", {"topic": "a/#/b"})["payload"]["code"] == "invalid_request"


def test_a_group_shares_the_work() -> None:
    world = World()
    members = [world.actor(f"@(w/{number})") for number in range(3)]
    shop = world.actor(C)
    for member in members:
        world.ask(member, "hub:subscribe", {"topic": "jobs", "group": "workers"})
    for number in range(9):
        assert publish(world, shop, "jobs", number)["subscriberCount"] == 1
    got = [data(world.taken(member)) for member in members]
    assert sorted(one for part in got for one in part) == list(range(9))
    assert [len(part) for part in got] == [3, 3, 3]
    world.lose(members[0])
    world.lose(members[1])
    publish(world, shop, "jobs", 9)
    assert data(world.taken(members[2])) == [9]


def test_one_member_of_a_group_answers_an_ask() -> None:
    world = World()
    worker, shop = world.actor(A), world.actor(C)
    world.ask(worker, "hub:subscribe", {"topic": "jobs", "group": "workers"})
    request = world.say(shop, "hub:publish", {"topic": "jobs", "type": "p", "data": 1, "expectReply": True})
    copy = world.taken(worker)[0]
    world.say(worker, "hub:reply", {"data": 2}, correlationId=copy["id"], pattern="tell")
    said = world.taken(shop)
    assert [frame["type"] for frame in said] == ["hub:published", "hub:reply"]
    assert {frame["correlationId"] for frame in said} == {request}


def test_a_durable_subscription_goes_on_where_it_was() -> None:
    world = World()
    shop, owner = world.actor(C), world.actor(A)
    subscribed = world.ask(owner, "hub:subscribe", {"topic": "orders/#", "durable": True, "name": "bill"})
    assert subscribed["payload"]["durable"] is True
    found = publish(world, shop, "orders/eu", 1)
    assert (found["subscriberCount"], found["stream"]) == (1, "hub/topic/orders/eu")
    copy = world.taken(owner)[0]
    mailbox = copy["metadata"]["mailbox"]
    assert (mailbox["stream"], mailbox["subscriptionId"]) == (
        "hub/topic/orders/eu",
        subscribed["payload"]["subscriptionId"],
    )
    world.lose(owner)
    assert publish(world, shop, "orders/eu", 2)["queuedCount"] == 1
    assert publish(world, shop, "orders/us", 3)["queuedCount"] == 1
    back = world.actor(A)
    again = world.ask(back, "hub:subscribe", {"topic": "orders/#", "durable": True, "name": "bill"})
    assert again["payload"]["subscriptionId"] == subscribed["payload"]["subscriptionId"]
    assert data(world.taken(back)) == [2, 3]
    world.ask(back, "hub:unsubscribe", {"subscriptionId": again["payload"]["subscriptionId"]})
    publish(world, shop, "orders/eu", 4)
    assert world.taken(back) == []


@pytest.mark.parametrize(("begin", "expected"), [("now", [3]), ("-1", [1, 2, 3]), (START_MS + 1000, [2, 3])])
def test_a_durable_subscription_begins_where_it_is_asked_to(begin: Any, expected: list[int]) -> None:
    world = World()
    shop, owner = world.actor(C), world.actor(A)
    publish(world, shop, "kept", 1, durable=True)
    world.now += 1000
    publish(world, shop, "kept", 2)
    world.ask(owner, "hub:subscribe", {"topic": "kept", "durable": True, "from": begin})
    publish(world, shop, "kept", 3)
    assert data(world.taken(owner)) == expected


# -- identity --------------------------------------------------------------------------------------------


class Tokens:
    """Tokens that are JSON: what they say is so."""

    @staticmethod
    def verify(token: str) -> Identity:
        if not token.startswith("{"):
            raise TailraceError("unauthorized", "the token is not good")
        claims = json.loads(token)
        return Identity(
            sub=claims["sub"],
            scopes=frozenset(claims.get("scope", "").split()),
            actor_id=claims["sub"],
            expires_at=claims.get("exp"),
            claims=token.encode(),
        )


def guarded(**more: Any) -> World:
    return World(options=HubOptions(verify=Tokens.verify), **more)


def token(sub: str, **claims: Any) -> str:
    return json.dumps({"sub": sub, **claims})


def test_a_token_decides_who_somebody_is() -> None:
    world = guarded()
    session = world.connect("@(evil/claim)", authToken="bearer " + token("t/a"))
    said = world.taken(session)[0]
    assert said["metadata"]["actorIdentity"] == A
    refused = world.connect(A, authToken="nonsense")
    assert world.taken(refused)[0]["payload"]["code"] == "unauthorized"
    assert world.closes[refused] == 1008
    without = world.connect(A)
    assert world.taken(without)[0]["payload"]["details"]["reason"] == "no token"


def test_h9_h10_nobody_speaks_or_registers_as_somebody_else() -> None:
    world = guarded()
    mallory = world.connect(B, authToken=token("t/b"))
    victim = world.connect(A, authToken=token("t/a"))
    world.say(victim, "hub:register", {"actorAddress": A, "capabilities": ["x"]})
    world.taken(victim)
    for address in (A, "@(t/a/x)", "@(t/bb)"):
        answer = world.ask(mallory, "hub:register", {"actorAddress": address, "capabilities": ["x"]})
        assert answer["payload"]["code"] == "unauthorized"
        assert answer["payload"]["details"]["errorCode"] == "PERMISSION_DENIED"
    assert world.ask(mallory, "hub:register", {"actorAddress": "@(t/b/x)", "capabilities": ["x"]})[
        "type"
    ] == ("hub:registered")
    send(world, mallory, A, 1, frm=A, pattern="tell")
    frame = world.taken(victim)[0]
    assert frame["from"] == frame["metadata"]["originalFrom"] == B
    for kind, payload in (
        ("hub:unregister", {"actorAddress": A}),
        ("hub:mailbox_read", {"actorAddress": A}),
        ("hub:mailbox_commit", {"actorAddress": A, "offset": world.streams.offset(BOX, 0)}),
        ("hub:broadcast", {"type": "t"}),
    ):
        assert world.ask(mallory, kind, payload)["payload"]["code"] == "unauthorized", kind
    denials = [entry for entry in world.streams.bodies("hub/audit") if entry["event"] == "denied"]
    assert len(denials) == 7
    assert {entry["identity"] for entry in denials} == {B}


def test_h10_a_denial_is_told_when_it_is_in_the_audit() -> None:
    world = guarded()
    mallory = world.connect(B, authToken=token("t/b"))
    world.taken(mallory)
    world.hold()
    world.say(mallory, "hub:unregister", {"actorAddress": A})
    assert world.taken(mallory) == [], "an attempt that a crash could hide is not answered yet"
    world.commit_held()
    assert world.taken(mallory)[0]["payload"]["code"] == "unauthorized"
    assert world.streams.bodies("hub/audit")[-1]["event"] == "denied"


def test_one_more_session_of_an_identity_ends_the_oldest() -> None:
    world = guarded()
    first = world.connect(A, authToken=token("t/a"))
    world.connect(A, authToken=token("t/a"))
    assert world.closes[first] == 1000
    assert world.taken(first)[-1]["payload"]["reason"] == "duplicate_connection"


def test_h12_an_expired_token_leaves_a_minute_to_bring_another() -> None:
    world = guarded()
    expires = START_MS // 1000 + 120
    session = world.connect(A, "token-refresh", authToken=token("t/a", exp=expires))
    other = world.connect(B, authToken=token("t/b"))
    world.say(session, "hub:register", {"actorAddress": A, "capabilities": ["x"]})
    world.wait(61_000)
    assert world.taken(session)[-1]["type"] == "hub:token_expiring"
    world.wait(60_000)
    assert world.ask(session, "hub:discover", {})["payload"]["code"] == "unauthorized"
    send(world, other, A, 1, pattern="tell")
    assert world.taken(session) == []
    stranger = world.ask(
        session, "hub:refresh_token", None, metadata={"authToken": token("t/b"), "nonce": "1"}
    )
    assert stranger["payload"]["code"] == "unauthorized"
    fresh = token("t/a", exp=expires + 3600)
    good = world.ask(session, "hub:refresh_token", None, metadata={"authToken": fresh, "nonce": "2"})
    assert good["payload"]["tokenExpiresAt"] == (expires + 3600) * 1000
    assert data(world.taken(session)) == [1]
    soon = world.ask(session, "hub:refresh_token", None, metadata={"authToken": fresh, "nonce": "3"})
    assert soon["payload"]["code"] == "rate_limited"
    world.wait(3600 * 1000 + 58_000)
    assert session not in world.closes
    world.wait(3000)
    assert world.closes[session] == 1008


def test_old_and_future_messages_are_refused_with_authentication() -> None:
    world = guarded()
    session = world.connect(A, authToken=token("t/a"))
    assert (
        world.ask(session, "hub:discover", {}, timestamp=world.now - 300_001)["payload"]["code"]
        == "replay_detected"
    )
    ahead = world.ask(session, "hub:discover", {}, timestamp=world.now + 300_001)["payload"]
    assert (ahead["code"], ahead["details"]["serverTime"]) == ("clock_skew", world.now)


def test_rules_from_a_file_decide() -> None:
    rules = {
        "actors": [
            {
                "match": "@(browser/*)",
                "send": {"allow": ["@(local/*)"], "deny": ["@(local/admin)"]},
                "register": ["@(browser/*)"],
                "broadcast": False,
            }
        ],
        "topics": [{"topic": "orders/#", "publishers": ["@(svc/*)"], "subscribers": ["@(svc/*)"]}],
    }
    import msgspec

    world = guarded(policy=Policy(msgspec.convert(rules, PolicyRules)))
    browser = world.connect("@(browser/1)", authToken=token("browser/1"))
    for name in ("local/x", "local/admin", "svc/x"):
        session = world.connect(f"@({name})", authToken=token(name))
        world.say(session, "hub:register", {"actorAddress": f"@({name})", "capabilities": ["x"]})

    def sent(to: str) -> str:
        answer = world.ask(browser, "hub:send", {"to": to, "type": "t"})
        return answer["payload"].get("code", "ok")

    assert [sent("@(local/x)"), sent("@(local/admin)"), sent("@(svc/x)")] == [
        "ok",
        "unauthorized",
        "unauthorized",
    ]
    answer = world.ask(browser, "hub:register", {"actorAddress": "@(browser/2)", "capabilities": ["x"]})
    assert answer["type"] == "hub:registered"
    assert world.ask(browser, "hub:broadcast", {"type": "t"})["payload"]["code"] == "unauthorized"
    assert publish(world, browser, "orders/1", 1)["code"] == "unauthorized"
    assert world.ask(browser, "hub:subscribe", {"topic": "orders/1"})["payload"]["code"] == "unauthorized"
    assert world.ask(browser, "hub:subscribe", {"topic": "#"})["type"] == "hub:subscribed"
    svc = world.connect("@(svc/y)", authToken=token("svc/y"))
    assert publish(world, svc, "orders/1", 1)["subscriberCount"] == 0
    assert publish(world, svc, "other", 1)["subscriberCount"] == 1
