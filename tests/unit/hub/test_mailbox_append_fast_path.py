"""Plain sends to durable actors go a shorter way to the disk; nobody can tell by what comes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.hub_world import HUB, START_MS, World
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.hub import decide
from tailrace.hub.effects import Append, AppendOutcome
from tailrace.hub.session import Session

A, KEPT, AWAY, PLAIN = "@(t/a)", "@(t/kept)", "@(t/away)", "@(t/plain)"
MAILBOX = "hub/mbox/t/away"


def plain(number: int, to: str = AWAY, ack: str | None = "accepted", **more: Any) -> dict[str, Any]:
    frame: dict[str, Any] = {
        "id": f"m-{number}",
        "from": A,
        "to": HUB,
        "type": "hub:send",
        "payload": {"to": to, "type": "t", "data": {"n": number}},
        "pattern": "tell" if ack is None else "ask",
        "correlationId": None,
        "timestamp": START_MS,
        "metadata": {},
        "ttl": None,
        "signature": None,
    }
    if ack is not None:
        frame["payload"]["ack"] = ack
    return frame | more


def compact(frame: Any) -> bytes:
    return json.dumps(frame, separators=(",", ":"), ensure_ascii=False).encode()


def short_ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each frame that could go the short way did."""
    taken: list[bool] = []
    keep = decide.store_plain_send

    def noted(*given: Any) -> Append | None:
        kept = keep(*given)
        taken.append(kept is not None)
        return kept

    monkeypatch.setattr(decide, "store_plain_send", noted)
    return taken


def send(world: World, sender: Session, *frames: Any) -> None:
    for frame in frames:
        world.run(decide.decide(world.hub, sender, compact(frame), world.now))


def a_sender(world: World) -> Session:
    """And an actor that is away, with a mailbox."""
    world.lose(world.actor(AWAY, durable=True))
    return world.actor(A)


def without_ids(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """But for what is made anew each time."""
    for one in found:
        one.pop("id", None)
        one.pop("copy", None)
        one.get("metadata", {}).pop("hubSeq", None)
        one.get("message", {}).pop("id", None)
    return found


def test_the_entry_the_answer_and_the_trace_are_as_on_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = short_ways(monkeypatch)
    world = World()
    sender = a_sender(world)
    send(world, sender, plain(1))
    assert taken == [True]
    (entry,) = world.streams.bodies(MAILBOX)
    assert list(entry) == list(plain(1))
    assert (entry["from"], entry["to"], entry["type"], entry["payload"]) == (A, AWAY, "t", {"n": 1})
    own = {"forwarded": True, "via": HUB, "originalFrom": A, "originalMessageId": "m-1"}
    assert {**own, "hubSeq": entry["metadata"]["hubSeq"]} == entry["metadata"]
    (ack,) = world.taken(sender)
    assert list(ack) == list(plain(1))
    assert (ack["type"], ack["from"], ack["to"], ack["correlationId"]) == ("hub:delivery_ack", HUB, A, "m-1")
    offset = world.streams.offset(MAILBOX, 1)
    assert ack["payload"] == {
        "messageId": "m-1",
        "deliveredAt": world.now,
        "status": "accepted",
        "level": "accepted",
        "stream": MAILBOX,
        "offset": offset,
        "duplicate": False,
    }
    world.wait(1000)
    (record,) = world.streams.bodies("hub/trace")
    assert (record["id"], record["copy"], record["stream"], record["offset"]) == (
        "m-1",
        entry["id"],
        MAILBOX,
        offset,
    )


def outcome(frames: list[bytes], limits: Limits, *, held: bool) -> tuple[Any, ...]:
    """Everything that comes of some frames, whether each is durable at once or all together."""
    world = World(limits=limits)
    sender, kept, other = a_sender(world), world.actor(KEPT, durable=True), world.actor(PLAIN)
    if held:
        world.hold()
    for frame in frames:
        world.run(decide.decide(world.hub, sender, frame, world.now))
    if held:
        world.commit_held()
    said = [without_ids(world.taken(session)) for session in (sender, kept, other)]
    counted = [
        (one.received, one.delivered, one.errors, len(one.sent_requests)) for one in (sender, kept, other)
    ]
    counts = dict(world.hub.counts)
    world.wait(1000)
    streams = [without_ids(world.streams.bodies(name)) for name in sorted(world.streams.entries)]
    return said, counted, counts, len(world.hub.pending), sorted(world.hub.mailboxes.queues), streams


payloads = st.fixed_dictionaries(
    {
        "to": st.sampled_from([KEPT, AWAY, AWAY, PLAIN, "@(t/gone)"]),
        "type": st.sampled_from(["t", "ü"]),
        "data": st.one_of(st.none(), st.text(), st.lists(st.integers())),
    },
    optional={"ack": st.sampled_from(["accepted", "accepted", "delivered", "none"])},
)
frames_of_all_kinds = st.builds(
    plain,
    st.integers(0, 5),
    payload=payloads,
    pattern=st.sampled_from(["tell", "ask"]),
    metadata=st.sampled_from([{}, {}, {}, {"traceId": "x"}]),
)
bounds = st.sampled_from([{}, {"hub_sends_per_s": 2}, {"hub_session_asks": 1}, {"hub_mailbox_entries": 2}])


@given(st.lists(frames_of_all_kinds, max_size=10), bounds, st.booleans())
def test_both_ways_come_to_the_same(sent: list[dict[str, Any]], bound: dict[str, int], held: bool) -> None:
    frames, limits = [compact(frame) for frame in sent], Limits(**bound)
    short = outcome(frames, limits, held=held)
    with pytest.MonkeyPatch.context() as only_long:
        only_long.setattr(decide, "store_plain_send", lambda *_: None)
        assert short == outcome(frames, limits, held=held)


def test_h19_nothing_is_said_before_it_is_durable_and_a_repeat_waits_for_the_first() -> None:
    world = World()
    sender = a_sender(world)
    world.hold()
    send(world, sender, plain(1), plain(2), plain(1))
    assert world.taken(sender) == []
    world.commit_held()
    assert [one["correlationId"] for one in world.taken(sender)] == ["m-1", "m-2"]
    send(world, sender, plain(1))
    (again,) = world.taken(sender)
    assert (again["correlationId"], again["payload"]["status"]) == ("m-1", "accepted")
    assert len(world.streams.bodies(MAILBOX)) == 2


def test_h21_a_message_for_which_nothing_is_asked_keeps_its_place_among_those_that_are_kept() -> None:
    world = World()
    sender, kept = world.actor(A), world.actor(KEPT, durable=True)
    world.hold()
    send(world, sender, plain(1, KEPT), plain(2, KEPT, None), plain(3, KEPT))
    assert world.taken(kept) == []
    world.commit_held()
    assert [one["payload"]["n"] for one in world.taken(kept)] == [1, 2, 3]


def test_what_cannot_be_written_is_refused_and_may_be_sent_again() -> None:
    world = World()
    sender = a_sender(world)
    world.hold()
    send(world, sender, plain(1), plain(2, ack=None))
    assert world.held is not None
    for effect in world.held:
        assert effect.then is not None
        effect.then(AppendOutcome(error=TailraceError("unavailable", "the disk is full")), world.now)
    world.held = None
    world.run(decide.collect_effects(world.hub, world.now))
    said = world.taken(sender)
    assert [one["correlationId"] for one in said] == ["m-1", "m-2"]
    assert {one["payload"]["code"] for one in said} == {"unavailable"}
    assert (len(world.hub.pending), sender.sent_requests, world.hub.mailboxes.queues) == (0, {}, {})
    send(world, sender, plain(1), plain(2, ack=None))
    assert [one["correlationId"] for one in world.taken(sender)] == ["m-1"]
    assert len(world.streams.bodies(MAILBOX)) == 2


def test_whoever_leaves_before_it_is_durable_is_told_nothing_and_loses_nothing() -> None:
    world = World()
    sender = a_sender(world)
    world.hold()
    send(world, sender, plain(1))
    world.lose(sender)
    world.commit_held()
    assert world.taken(sender) == []
    assert len(world.streams.bodies(MAILBOX)) == 1
    assert (len(world.hub.pending), sender.sent_requests) == (0, {})


@pytest.mark.parametrize("is_durable_before", [True, False])
@pytest.mark.parametrize("ttl", [None, 300_000], ids=["short", "long"])
def test_h20_whoever_comes_back_and_repeats_it_hears_what_became_of_it(
    is_durable_before: bool, ttl: int | None
) -> None:
    world = World()
    sender = a_sender(world)
    world.hold()
    send(world, sender, plain(1, ttl=ttl))
    world.lose(sender)
    if is_durable_before:
        world.commit_held()
    back = world.actor(A) if is_durable_before else world.connect(A)
    world.taken(back)
    send(world, back, plain(1, ttl=ttl))
    if not is_durable_before:
        world.commit_held()
    (ack,) = world.taken(back)
    assert (ack["correlationId"], ack["payload"]["status"]) == ("m-1", "accepted")
    assert len(world.streams.bodies(MAILBOX)) == 1
    assert (len(world.hub.pending), len(world.hub.pending.deadlines)) == (0, 0)


def test_h25_a_disk_that_takes_too_long_is_told_once() -> None:
    world = World()
    sender = a_sender(world)
    world.hold()
    send(world, sender, plain(1))
    world.wait(world.limits.hub_ask_ms + 1000)
    (late,) = world.taken(sender)
    assert (late["payload"]["code"], late["correlationId"]) == ("timeout", "m-1")
    world.commit_held()
    assert world.taken(sender) == []
    assert len(world.streams.bodies(MAILBOX)) == 1


def test_h25_deadlines_are_kept_in_order_and_those_that_were_answered_are_not_held() -> None:
    world = World()
    sender = a_sender(world)
    send(world, sender, *(plain(number) for number in range(50)))
    assert len(world.taken(sender)) == 50
    assert len(world.hub.pending.deadlines) == 0
    world.hold()
    for ttl in (5000, 1500, 3000, 1200):
        payload = {"to": AWAY, "type": "t", "data": 1, "ack": "accepted"}
        world.say(sender, "hub:send", payload, id=f"d-{ttl}", ttl=ttl)
    world.wait(1200)
    assert [one["correlationId"] for one in world.taken(sender)] == ["d-1200"]
    world.wait(4000)
    assert [one["correlationId"] for one in world.taken(sender)] == ["d-1500", "d-3000", "d-5000"]
    assert len(world.hub.pending.deadlines) == 0


def test_a_mailbox_nobody_attends_is_let_go_of_a_moment_later() -> None:
    world = World()
    sender = a_sender(world)
    send(world, sender, plain(1))
    assert list(world.hub.mailboxes.queues) == ["t/away"]
    owner = world.connect(AWAY)
    world.say(owner, "hub:register", {"actorAddress": AWAY, "capabilities": ["test"], "durable": True})
    assert [one["payload"]["n"] for one in world.taken(owner) if one["type"] == "t"] == [1]
    send(world, sender, plain(2))
    assert [one["payload"]["n"] for one in world.taken(owner)] == [2]
    world.lose(owner)
    send(world, sender, plain(3))
    world.wait(1000)
    assert not world.hub.mailboxes.queues
