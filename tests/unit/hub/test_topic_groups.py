"""Durable groups: members share the entries of a topic, commit them one by one, and can all be away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from support.hub_world import World
from tailrace.hub.policy import Policy, PolicyRules

A, B, C = "@(t/a)", "@(t/b)", "@(t/c)"
GROUP = {"topic": "jobs/#", "durable": True, "group": "workers"}


@pytest.fixture
def world() -> World:
    return World()


def member(world: World, address: str, **more: Any) -> Any:
    """An actor that takes part, committing by hand."""
    session = world.actor(address, "mailbox", durable=True, commit="manual", **more)
    assert world.ask(session, "hub:subscribe", GROUP)["type"] == "hub:subscribed"
    return session


def publish(world: World, session: Any, *numbers: int, topic: str = "jobs/eu") -> None:
    for number in numbers:
        answer = world.ask(session, "hub:publish", {"topic": topic, "type": "job", "data": number})
        assert answer["type"] == "hub:published", answer


def jobs(world: World, session: Any) -> list[dict[str, Any]]:
    return [frame for frame in world.taken(session) if frame["type"] == "job"]


def data(frames: list[dict[str, Any]]) -> list[int]:
    return [frame["payload"] for frame in frames]


def commit(world: World, session: Any, *frames: dict[str, Any]) -> dict[str, Any]:
    mailbox = frames[0]["metadata"]["mailbox"]
    payload = {
        "actorAddress": frames[0]["to"],
        "stream": mailbox["stream"],
        "subscriptionId": mailbox["subscriptionId"],
        "offsets": [frame["metadata"]["mailbox"]["offset"] for frame in frames],
    }
    return world.ask(session, "hub:mailbox_commit", payload)


def test_each_entry_goes_to_one_member_under_its_own_address(world: World) -> None:
    publisher, one, two = world.actor(A), member(world, B), member(world, C)
    publish(world, publisher, *range(6))
    first, second = jobs(world, one), jobs(world, two)
    assert sorted(data(first) + data(second)) == list(range(6))
    assert len(first) == len(second) == 3, "whoever has the fewest in flight is next"
    assert {frame["to"] for frame in first} == {B}
    assert {frame["to"] for frame in second} == {C}
    counts = world.ask(publisher, "hub:publish", {"topic": "jobs/eu", "type": "job", "data": 6})["payload"]
    assert (counts["subscriberCount"], counts["queuedCount"]) == (1, 0), "a group counts as one"


def test_h29_entries_are_committed_one_by_one_and_never_come_again(world: World) -> None:
    publisher, one = world.actor(A), member(world, B)
    publish(world, publisher, *range(4))
    frames = jobs(world, one)
    done = commit(world, one, frames[1], frames[3])["payload"]
    assert (done["committed"], done["lag"]) == (world.streams.offset("hub/topic/jobs/eu", 0), 4)
    world.crash()
    again = member(world, C)
    frames = jobs(world, again)
    assert data(frames) == [0, 2], "what was committed stays so, though older ones are not"
    assert all(frame["metadata"]["redelivered"] for frame in frames)
    done = commit(world, again, *frames)["payload"]
    assert (done["committed"], done["lag"]) == (world.streams.offset("hub/topic/jobs/eu", 4), 0)


def test_a_single_offset_of_a_group_is_that_entry_alone(world: World) -> None:
    publisher, one = world.actor(A), member(world, B)
    publish(world, publisher, 0, 1)
    mailbox = jobs(world, one)[1]["metadata"]["mailbox"]
    world.ask(one, "hub:mailbox_commit", {"actorAddress": B, **mailbox})
    world.lose(one)
    assert data(jobs(world, member(world, C))) == [0]


def test_what_a_member_had_goes_to_another_when_it_leaves(world: World) -> None:
    publisher, one, two = world.actor(A), member(world, B), member(world, C)
    publish(world, publisher, *range(4))
    had, kept = jobs(world, one), jobs(world, two)
    world.lose(one)
    world.wait(1000)
    moved = jobs(world, two)
    assert data(moved) == data(had)
    assert [frame["metadata"]["deliveryCount"] for frame in moved] == [2, 2]
    commit(world, two, *moved, *kept)
    assert world.hub.mailboxes.queues["_group/workers/jobs/#"].in_flight() == 0


def test_what_is_not_committed_in_time_goes_to_whoever_is_next(world: World) -> None:
    publisher, one = world.actor(A), member(world, B, ackTimeout=5, maxDeliver=2)
    publish(world, publisher, 0)
    assert data(jobs(world, one)) == [0]
    world.wait(6000)
    assert data(jobs(world, one)) == [0]
    world.wait(6000)
    assert jobs(world, one) == []
    letter = world.streams.bodies("hub/dead-letters")[0]
    assert (letter["reason"], letter["attempts"]) == ("max_deliveries", 2)


def test_without_members_everything_waits_also_over_a_restart(world: World) -> None:
    publisher, one = world.actor(A), member(world, B)
    world.lose(one)
    counts = world.ask(publisher, "hub:publish", {"topic": "jobs/eu", "type": "job", "data": 0})["payload"]
    assert (counts["subscriberCount"], counts["queuedCount"]) == (0, 1)
    world.crash()
    publisher = world.actor(A)
    publish(world, publisher, 1, topic="jobs/us")  # a topic that began while nobody was here
    frames = jobs(world, member(world, C))
    assert sorted(data(frames)) == [0, 1]


def test_members_that_commit_by_themselves_are_never_given_anything_twice(world: World) -> None:
    publisher = world.actor(A)
    sessions = [world.actor(address) for address in (B, C)]
    for session in sessions:
        world.ask(session, "hub:subscribe", GROUP)
    publish(world, publisher, *range(6))
    assert sorted(number for session in sessions for number in data(jobs(world, session))) == list(range(6))
    for session in sessions:
        world.lose(session)
    assert jobs(world, member(world, "@(t/d)")) == []


def test_a_member_is_given_no_more_than_it_asked_for(world: World) -> None:
    publisher, one = world.actor(A), member(world, B, maxInFlight=2)
    publish(world, publisher, *range(5))
    frames = jobs(world, one)
    assert data(frames) == [0, 1]
    two = member(world, C)
    assert data(jobs(world, two)) == [2, 3, 4]
    commit(world, one, *frames)
    publish(world, publisher, 5)
    assert data(jobs(world, one)) == [5]


def test_members_that_come_together_make_one_group(world: World) -> None:
    publisher, one, two = world.actor(A), world.actor(B), world.actor(C)
    world.hold()
    world.say(one, "hub:subscribe", GROUP)
    world.say(two, "hub:subscribe", GROUP)
    assert world.taken(one) == world.taken(two) == []
    world.commit_held()
    assert [world.taken(session)[0]["type"] for session in (one, two)] == ["hub:subscribed"] * 2
    publish(world, publisher, 0, 1)
    assert sorted(data(jobs(world, one)) + data(jobs(world, two))) == [0, 1]
    assert len(world.hub.topics.durable) == 1


def test_subscribing_twice_is_one_part_and_the_last_who_unsubscribes_ends_the_group(world: World) -> None:
    publisher, one, two = world.actor(A), member(world, B), member(world, C)
    ids = {world.ask(one, "hub:subscribe", GROUP)["payload"]["subscriptionId"] for _ in range(2)}
    assert len(ids) == 1
    world.ask(one, "hub:unsubscribe", {"subscriptionId": ids.pop()})
    publish(world, publisher, 0)
    assert jobs(world, one) == []
    assert data(jobs(world, two)) == [0]
    world.ask(two, "hub:unsubscribe", {"subscriptionId": "jobs/#"})
    assert len(world.hub.topics.durable) == 0
    publish(world, publisher, 1)
    world.crash()
    assert jobs(world, member(world, B)) == [], "a new group begins now"


def test_commits_of_entries_that_were_not_given_out_are_refused(world: World) -> None:
    publisher, one = world.actor(A), member(world, B, maxInFlight=1)
    publish(world, publisher, 0, 1)
    frame = jobs(world, one)[0]
    mailbox = {**frame["metadata"]["mailbox"], "offset": world.streams.offset("hub/topic/jobs/eu", 2)}
    refused = world.ask(one, "hub:mailbox_commit", {"actorAddress": B, **mailbox})["payload"]
    assert refused["code"] == "invalid_offset"
    mailbox["stream"] = "hub/topic/other"
    refused = world.ask(one, "hub:mailbox_commit", {"actorAddress": B, **mailbox})["payload"]
    assert (refused["code"], refused["details"]["field"]) == ("invalid_request", "stream")
    plain = world.actor(C, durable=True)
    payload = {"actorAddress": C, "offsets": [mailbox["offset"]]}
    refused = world.ask(plain, "hub:mailbox_commit", payload)["payload"]
    assert (refused["code"], refused["details"]["field"]) == ("invalid_request", "offsets")


def test_a_message_waits_for_a_member_that_may_have_it() -> None:
    rules = {"topics": [{"topic": "jobs/secret", "subscribers": [C], "publicRead": False}]}
    world = World(policy=Policy(msgspec.convert(rules, PolicyRules)))
    publisher, one = world.actor(A), member(world, B)
    publish(world, publisher, 0, topic="jobs/secret")
    assert jobs(world, one) == []
    stream = {"actorAddress": B, "stream": "hub/topic/jobs/secret", "offset": "-1"}
    (mine,) = (found.id for found in one.subscriptions.values())
    refused = world.ask(one, "hub:mailbox_read", {**stream, "subscriptionId": mine})
    assert refused["payload"]["code"] == "unauthorized", "nor is it read by another way"
    assert data(jobs(world, member(world, C))) == [0]


def test_rejected_entries_of_a_group_are_dead_letters_once(world: World) -> None:
    publisher, one = world.actor(A), member(world, B)
    publish(world, publisher, 0, 1)
    frames = jobs(world, one)
    mailbox = frames[1]["metadata"]["mailbox"]
    for _ in range(2):
        payload = {"stream": mailbox["stream"], "subscriptionId": mailbox["subscriptionId"]}
        payload |= {"actorAddress": B, "reject": [{"offset": mailbox["offset"], "reason": "bad"}]}
        assert world.ask(one, "hub:mailbox_commit", payload)["type"] == "hub:mailbox_committed"
    assert [letter["reason"] for letter in world.streams.bodies("hub/dead-letters")] == ["rejected"]


def test_a_member_that_resumes_is_given_what_may_have_been_lost(world: World) -> None:
    publisher = world.actor(A)
    one = world.actor(B, "mailbox", "resume", durable=True, commit="manual")
    token = one.resume_token
    world.ask(one, "hub:subscribe", GROUP)
    publish(world, publisher, 0)
    assert data(jobs(world, one)) == [0]
    world.lose(one)
    publish(world, publisher, 1)
    again = world.connect(B, "mailbox", "resume", resumeToken=token)
    assert sorted(data(jobs(world, again))) == [0, 1]


def ask_workers(world: World, requester: Any, number: int, **more: Any) -> str:
    payload = {"topic": "jobs/eu", "type": "job", "data": number, "expectReply": True}
    return world.say(requester, "hub:publish", payload, **more)


def test_an_ask_is_answered_by_the_member_that_was_given_it(world: World) -> None:
    requester, one, two, reader = (
        world.actor(A),
        member(world, B),
        member(world, C),
        world.actor("@(t/d)"),
    )
    world.ask(reader, "hub:subscribe", {"topic": "jobs/#", "durable": True})
    request = ask_workers(world, requester, 1)
    copies = [(session, *jobs(world, session)) for session in (one, two)]
    ((given, copy),) = [found for found in copies if len(found) == 2]
    assert (copy["pattern"], copy["metadata"]["originalMessageId"]) == ("ask", request)
    assert copy["metadata"]["replyBy"] == world.now + 30_000
    (seen,) = jobs(world, reader)
    assert (seen["pattern"], "replyBy" in seen["metadata"]) == ("tell", False), "nobody asked this one"
    for other in (reader, two if given is one else one):
        refused = world.ask(other, "hub:reply", {"data": 0}, correlationId=copy["id"])
        assert refused["payload"]["code"] == "unknown_correlation"
    world.say(given, "hub:reply", {"data": 2}, correlationId=copy["id"], pattern="tell")
    said = world.taken(requester)
    assert [(frame["type"], frame["correlationId"]) for frame in said] == [
        ("hub:published", request),
        ("hub:reply", request),
    ]
    assert said[1]["payload"] == {"ok": True, "data": 2, "final": True}
    world.wait(60_000)
    assert world.taken(requester) == [], "one outcome is enough"


def test_an_ask_goes_to_another_member_with_the_message(world: World) -> None:
    requester, one = world.actor(A), member(world, B)
    request = ask_workers(world, requester, 1)
    assert data(jobs(world, one)) == [1]
    world.lose(one)
    two = member(world, C)
    (copy,) = jobs(world, two)
    assert (copy["pattern"], copy["to"]) == ("ask", C)
    world.say(two, "hub:reply", {"data": 2}, correlationId=copy["id"], pattern="tell")
    assert [frame["type"] for frame in world.taken(requester)] == ["hub:published", "hub:reply"]
    later = ask_workers(world, requester, 2, ttl=5000)
    world.wait(6000)
    failed = world.taken(requester)[-1]
    assert (failed["correlationId"], failed["payload"]["code"]) == (later, "timeout")
    assert request != later


def test_an_ask_that_a_member_rejects_is_over(world: World) -> None:
    requester, one = world.actor(A), member(world, B)
    request = ask_workers(world, requester, 1)
    (copy,) = jobs(world, one)
    mailbox = copy["metadata"]["mailbox"]
    payload = {
        "actorAddress": B,
        "stream": mailbox["stream"],
        "subscriptionId": mailbox["subscriptionId"],
        "reject": [{"offset": mailbox["offset"], "reason": "no"}],
    }
    assert world.ask(one, "hub:mailbox_commit", payload)["type"] == "hub:mailbox_committed"
    failed = world.taken(requester)[-1]
    assert (failed["correlationId"], failed["payload"]["code"]) == (request, "timeout")
