"""Messages that nobody will get, and a process that dies at the worst moment: a dead letter for each (H-18).

A letter and the position behind its message are two entries: a crash can come between them.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.hub_world import Frame, World
from tailrace.common.limits import Limits
from tailrace.hub.delivery_queues import Cursor
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


# -- one letter, whatever happens while it is written ----------------------------------------------------


def offsets(frames: list[Frame]) -> list[str]:
    return [frame["metadata"]["mailbox"]["offset"] for frame in frames]


def reject(world: World, session: Session, *rejected: str, **more: Any) -> str:
    payload = {"actorAddress": B, "reject": [{"offset": offset} for offset in rejected], **more}
    return world.say(session, "hub:mailbox_commit", payload)


def test_h18_a_reject_repeated_between_two_letters_of_a_commit_writes_no_second_letter() -> None:
    world = World()
    session = come(world, commit="manual")
    send(world, 1, 2)
    first, second = offsets(given(world, session))
    world.hold()
    requests = [reject(world, session, first, second)]
    world.commit_next()
    assert buried(world) == [("rejected", 1)]
    requests.append(reject(world, session, first))
    world.commit_held()
    assert buried(world) == [("rejected", 1), ("rejected", 2)]
    assert sorted(frame["correlationId"] for frame in world.taken(session)) == sorted(requests)


def test_h18_an_ack_timeout_while_the_letter_is_written_writes_no_second_letter() -> None:
    world = World()
    session = come(world, commit="manual", ackTimeout=1, maxDeliver=1)
    send(world, 1)
    (only,) = offsets(given(world, session))
    world.hold()
    reject(world, session, only)
    world.wait(3000)
    world.commit_held()
    world.wait(3000)
    assert buried(world) == [("rejected", 1)]
    assert given(world, session) == []


def test_h18_a_message_that_expires_while_its_rejection_is_read_has_one_letter() -> None:
    """A read from disk takes longer than a reconnect, which judges the message again."""
    world = World()
    session = come(world, commit="manual")
    send(world, 1, ttl=1000)
    (only,) = offsets(given(world, session))
    world.hold_reads()
    reject(world, session, only)
    world.lose(session)
    world.now += 1001
    come(world, commit="manual")
    world.read_held()
    come(world, commit="manual")
    assert buried(world) == [("rejected", 1)]
    world.crash()
    come(world, commit="manual")
    assert buried(world) == [("rejected", 1)]


def test_h18_a_member_that_leaves_while_the_letter_is_written_causes_no_second_letter() -> None:
    world = World()
    publisher = world.actor(A)
    group = {"topic": "jobs/#", "durable": True, "group": "workers"}
    sessions: list[Session] = []
    for address in (B, "@(t/c)"):
        session = world.actor(address, "mailbox", durable=True, commit="manual", maxDeliver=1)
        assert world.ask(session, "hub:subscribe", group)["type"] == "hub:subscribed"
        sessions.append(session)
    world.ask(publisher, "hub:publish", {"topic": "jobs/eu", "type": "t", "data": 1})
    ((session, frame),) = [(one, frame) for one in sessions for frame in given(world, one)]
    mailbox = frame["metadata"]["mailbox"]
    world.hold()
    more = {key: mailbox[key] for key in ("stream", "subscriptionId")}
    reject(world, session, mailbox["offset"], **{**more, "actorAddress": frame["to"]})
    world.lose(session)
    world.wait(1000)
    world.commit_held()
    assert buried(world) == [("rejected", 1)]


def test_h18_a_commit_while_the_letter_is_written_does_not_end_the_message_twice() -> None:
    world = World()
    session = come(world, commit="manual")
    send(world, 1)
    (only,) = offsets(given(world, session))
    world.hold()
    requests = [reject(world, session, only)]
    requests.append(world.say(session, "hub:mailbox_commit", {"actorAddress": B, "offset": only}))
    requests.append(world.say(session, "hub:mailbox_commit", {"actorAddress": B, "offsets": [only]}))
    world.commit_held()
    world.wait(1000)
    assert sorted(frame["correlationId"] for frame in world.taken(session)) == sorted(requests)
    ends = [one["ev"] for one in world.streams.bodies("hub/trace") if one["ev"] in ("processed", "dead")]
    assert ends == ["dead"]


@pytest.mark.parametrize("options", [{}, {"commit": "manual"}], ids=["auto", "manual"])
@pytest.mark.parametrize("also", [[], [2]], ids=["alone", "with-another"])
def test_h18_a_letter_that_cannot_be_written_does_not_lose_its_message(
    options: dict[str, Any], also: list[int]
) -> None:
    world = World()
    world.lose(come(world, **options))
    send(world, 1, ttl=1000)
    send(world, *also)
    world.now += 1001
    world.full_streams.add(LETTERS)
    session = come(world, **options)
    got = given(world, session)
    assert [frame["payload"] for frame in got] == also
    if options and also:
        passing = world.say(session, "hub:mailbox_commit", {"actorAddress": B, "offset": offsets(got)[0]})
        world.wait(1000)
        (answer,) = world.taken(session)
        assert (answer["type"], answer["correlationId"]) == ("hub:error", passing), "it waits for the letter"
        single = {"actorAddress": B, "offsets": offsets(got)}
        assert world.ask(session, "hub:mailbox_commit", single)["type"] == "hub:mailbox_committed"
    world.wait(2000)
    world.full_streams.clear()
    world.crash()
    world.wait(1000)
    assert buried(world) == []
    again = come(world, **options)
    world.wait(1000)
    assert buried(world) == [("message_expired", 1)]
    assert given(world, again) == []


def test_h18_a_letter_that_could_not_be_written_is_written_later() -> None:
    world = World()
    world.lose(come(world))
    send(world, 1, ttl=1000)
    world.now += 1001
    world.full_streams.add(LETTERS)
    come(world)
    world.wait(3000)
    world.full_streams.clear()
    world.wait(1000)
    assert buried(world) == [("message_expired", 1)]
    assert world.hub.counts["dead_letters", "message_expired"] == 1


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_h18_a_rejection_that_cannot_be_written_leaves_the_message_to_its_reader(leaves: bool) -> None:
    world = World()
    session = come(world, commit="manual")
    send(world, 1, 2)
    first, second = offsets(given(world, session))
    world.full_streams.add(LETTERS)
    world.hold()
    request = reject(world, session, first, second)
    if leaves:
        world.lose(session)
        session = come(world, commit="manual")
    world.commit_held()
    world.full_streams.clear()
    answers = world.taken(session)
    if leaves:
        assert [frame["payload"] for frame in answers if frame["type"] == "t"] == [1, 2]
    else:
        assert [(one["type"], one["correlationId"]) for one in answers] == [("hub:error", request)]
    assert buried(world) == []
    reject(world, session, first, second)
    assert buried(world) == [("rejected", 1), ("rejected", 2)]


# -- letters and positions after a crash -----------------------------------------------------------------


def test_h18_a_restored_letter_is_written_to_its_cursor_at_once() -> None:
    """Replay reads only the last letters: a thousand other cursors must not delay this one."""
    world = World()
    for number in range(1500):
        name = f"t/other-{number}"
        world.streams.make(f"hub/mbox/{name}", world.now)
        world.hub.mailboxes.cursors.set(name, f"hub/mbox/{name}", Cursor())
        world.hub.mailboxes.cursors.mark_dirty(name, f"hub/mbox/{name}")
    world.wait(1000)
    world.lose(come(world))
    send(world, 1, ttl=1000)
    world.now += 1001
    come(world)
    assert buried(world) == [("message_expired", 1)]
    world.crash()
    world.wait(1000)
    latest = {one["key"]: one.get("value") for one in world.streams.bodies("hub/cursors/0")}
    assert latest[f"{B} hub/mbox/t/b"]["committed"] == world.streams.offset("hub/mbox/t/b", 1)


def test_h18_a_rejected_publication_has_one_letter_though_its_group_had_no_cursor() -> None:
    world = World()
    group = {"topic": "jobs/#", "durable": True, "group": "workers"}

    def join() -> tuple[Session, list[Frame]]:
        session = world.connect(B, "mailbox")
        payload = {"actorAddress": B, "capabilities": ["x"], "durable": True, "commit": "manual"}
        world.say(session, "hub:register", payload)
        world.say(session, "hub:subscribe", group)
        return session, given(world, session)

    session, _ = join()
    world.ask(world.actor(A), "hub:publish", {"topic": "jobs/eu", "type": "t", "data": 1})
    world.ask(world.actor(A), "hub:publish", {"topic": "jobs/eu", "type": "t", "data": 2})
    frame, other = given(world, session)
    mailbox = frame["metadata"]["mailbox"]
    world.hold()
    more = {key: mailbox[key] for key in ("stream", "subscriptionId")}
    reject(world, session, mailbox["offset"], **more)
    while not buried(world):
        world.commit_next()
    assert world.streams.bodies("hub/cursors/0") == []
    world.crash()
    _, came = join()
    assert [one["payload"] for one in came] == [other["payload"]]


def test_h18_letters_of_a_deleted_mailbox_do_not_pass_messages_of_a_new_one() -> None:
    world = World()
    session = come(world, commit="manual")
    send(world, 1, 2)
    world.ask(session, "hub:unregister", {"actorAddress": B, "deleteMailbox": True})
    assert buried(world) == [("mailbox_expired", 1), ("mailbox_expired", 2)]
    world.now += 1
    world.lose(come(world, commit="manual"))
    send(world, 3, 4)
    world.crash()
    assert [frame["payload"] for frame in given(world, come(world, commit="manual"))] == [3, 4]


def test_h18_a_crash_between_a_mailbox_and_its_cursor_does_not_lose_messages_of_a_new_one() -> None:
    world = World()
    session = come(world)
    send(world, 1, 2)
    world.wait(1000)
    world.hold()
    world.say(session, "hub:unregister", {"actorAddress": B, "deleteMailbox": True})
    while world.streams.tail("hub/mbox/t/b") is not None:
        world.commit_next()
    world.crash()
    world.now += 1
    world.lose(come(world))
    send(world, 3, 4)
    world.crash()
    assert [frame["payload"] for frame in given(world, come(world))] == [3, 4]


def test_h18_a_crash_while_a_subscription_ends_does_not_deliver_it_from_its_beginning() -> None:
    world = World()
    publisher, wanted = world.actor(A), {"topic": "jobs", "durable": True}
    session = come(world)
    world.say(session, "hub:subscribe", wanted)
    world.ask(publisher, "hub:publish", {"topic": "jobs", "type": "t", "data": 1})
    assert len(given(world, session)) == 1
    world.wait(1000)
    world.hold()
    world.say(session, "hub:unsubscribe", {"topic": "jobs"})
    world.commit_next()
    world.crash()
    again = come(world)
    world.say(again, "hub:subscribe", wanted)
    assert given(world, again) == []


def test_h18_a_cursor_that_could_not_be_written_is_written_later() -> None:
    world = World()
    session = come(world)
    world.full_streams.add("hub/cursors/0")
    send(world, 1)
    assert len(given(world, session)) == 1
    world.wait(1000)
    world.full_streams.clear()
    world.wait(1000)
    latest = {one["key"]: one.get("value") for one in world.streams.bodies("hub/cursors/0")}
    assert latest[f"{B} hub/mbox/t/b"]["committed"] == world.streams.offset("hub/mbox/t/b", 1)


# -- messages that were committed singly -----------------------------------------------------------------


def commit_second_of(world: World, numbers: int) -> Session:
    session = come(world, commit="manual")
    send(world, *range(1, numbers + 1))
    second = offsets(given(world, session))[1]
    answer = world.ask(session, "hub:mailbox_commit", {"actorAddress": B, "offsets": [second]})
    assert answer["type"] == "hub:mailbox_committed"
    return session


def test_h18_a_rejection_by_a_reader_without_push_does_not_pass_the_message_before_it() -> None:
    world = World()
    session = come(world, push=False)
    send(world, 1, 2)
    world.taken(session)
    read = {"actorAddress": B, "offset": "committed"}
    found = world.ask(session, "hub:mailbox_read", read)["payload"]["messages"]
    reject(world, session, found[1]["offset"])
    assert buried(world) == [("rejected", 2)]
    world.crash()
    assert [frame["payload"] for frame in given(world, come(world))] == [1]


def test_h18_deleting_a_mailbox_writes_letters_only_for_what_was_not_committed() -> None:
    world = World()
    session = commit_second_of(world, 3)
    world.ask(session, "hub:unregister", {"actorAddress": B, "deleteMailbox": True})
    assert buried(world) == [("mailbox_expired", 1), ("mailbox_expired", 3)]
    assert world.streams.tail("hub/mbox/t/b") is None


def test_h18_a_mailbox_is_deleted_only_after_its_letters_are_written() -> None:
    world = World()
    session = come(world, commit="manual")
    send(world, 1)
    world.full_streams.add(LETTERS)
    world.ask(session, "hub:unregister", {"actorAddress": B, "deleteMailbox": True})
    world.wait(2000)
    assert world.streams.tail("hub/mbox/t/b") == 1
    world.full_streams.clear()
    world.wait(2000)
    assert buried(world) == [("mailbox_expired", 1)]
    assert world.streams.tail("hub/mbox/t/b") is None


def test_h18_a_message_that_is_being_stored_while_its_mailbox_is_deleted_has_a_letter() -> None:
    world = World()
    session = come(world, commit="manual")
    send(world, 1)
    sender = world.actor(A)
    world.hold()
    world.say(session, "hub:unregister", {"actorAddress": B, "deleteMailbox": True})
    world.say(sender, "hub:send", {"to": B, "type": "t", "data": 2, "ack": "accepted"})
    world.commit_next()
    world.commit_held()
    assert buried(world) == [("mailbox_expired", 1), ("mailbox_expired", 2)]
    assert world.streams.tail("hub/mbox/t/b") is None


def test_h18_an_expired_mailbox_writes_letters_only_for_what_was_not_committed() -> None:
    world = World(limits=Limits(hub_mailbox_ms=10_000, hub_sweep_ms=1000))
    world.lose(commit_second_of(world, 3))
    world.wait(15_000)
    assert buried(world) == [("mailbox_expired", 1), ("mailbox_expired", 3)]
