"""What frames do to a hub, with a clock that stands still: sessions, registry, sending, replies."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from support.hub_world import HUB, START_MS, World
from tailrace.common.limits import Limits
from tailrace.hub import decide
from tailrace.hub.decide import ITEMS_PER_SLICE

A, B, C = "@(t/a)", "@(t/b)", "@(t/c)"


def send(world: World, session: Any, to: str, data: Any = None, **more: Any) -> str:
    payload = {"to": to, "type": "t", "data": data, **more.pop("payload", {})}
    return world.say(session, "hub:send", payload, **more)


def kinds(frames: list[dict[str, Any]]) -> list[str]:
    return [frame["type"] for frame in frames]


# -- sessions --------------------------------------------------------------------------------------------


def test_h5_nothing_happens_before_connect() -> None:
    world = World()
    session = world.open()
    answer = world.ask(session, "hub:discover", {"pattern": "*"})
    assert answer["payload"]["code"] == "unauthorized"
    assert answer["payload"]["details"]["reason"] == "not_connected"


def test_whoever_does_not_say_hello_is_sent_away() -> None:
    world = World()
    session = world.open()
    world.wait(4000)
    assert session not in world.closes
    world.wait(1000)
    assert world.closes[session] == 1008
    (refusal,) = world.taken(session)
    # The same client may be in time when it tries again: it is not told that its token is wrong.
    assert (refusal["payload"]["code"], refusal["payload"]["retryable"]) == ("timeout", True)
    assert refusal["payload"]["details"]["outcome"] == "not_applied"


def test_pings_are_answered_in_every_state() -> None:
    world = World()
    session = world.open()
    world.run(decide.decide(world.hub, session, b' {"type" : "ping"}', world.now))
    assert world.taken(session) == [{"type": "pong"}]


def test_malformed_frames_are_answered_until_there_are_too_many() -> None:
    world = World()
    session = world.actor(A)
    for number in range(20):
        assert session not in world.closes
        frame = b'{"id":"x-%d","type":7}' % number
        world.run(decide.decide(world.hub, session, frame, world.now))
    said = world.taken(session)
    assert [frame["correlationId"] for frame in said] == [f"x-{number}" for number in range(20)]
    assert {frame["payload"]["code"] for frame in said} == {"invalid_message"}
    assert world.closes[session] == 1008


def test_h8_a_resumed_session_gets_what_came_meanwhile_in_order_and_once() -> None:
    world = World()
    sender = world.actor(A)
    receiver = world.connect(B, "resume")
    token = world.taken(receiver)[0]["payload"]["resumeToken"]
    world.say(receiver, "hub:register", {"actorAddress": B, "capabilities": ["x"]})
    world.lose(receiver)
    found = world.ask(sender, "hub:discover", {"pattern": B})["payload"]["actors"]
    assert [one["online"] for one in found] == [False]
    for number in range(3):
        answer = world.ask(sender, "hub:send", {"to": B, "type": "t", "data": number})
        assert answer["payload"]["status"] == "queued"
    again = world.connect(B, "resume", resumeToken=token)
    said = world.taken(again)
    assert said[0]["payload"]["resumed"] is True
    assert [frame["payload"] for frame in said[1:]] == [0, 1, 2]
    assert world.ask(sender, "hub:discover", {"pattern": B})["payload"]["actors"][0]["online"] is True
    send(world, sender, B, 3, pattern="tell")
    assert [frame["payload"] for frame in world.taken(again)] == [3]


def test_a_session_that_does_not_come_back_leaves_dead_letters() -> None:
    world = World()
    sender = world.actor(A)
    receiver = world.actor(B, "resume")
    world.lose(receiver)
    send(world, sender, B, 1, pattern="tell")
    world.wait(61_000)
    letters = world.streams.bodies("hub/dead-letters")
    assert [(letter["reason"], letter["message"]["payload"]) for letter in letters] == [("resume_expired", 1)]
    assert world.ask(sender, "hub:discover", {"pattern": B})["payload"]["actors"] == []


def test_shutdown_tells_everybody_when_to_come_back() -> None:
    world = World()
    session = world.actor(A)
    world.shut_down()
    said = world.taken(session)
    assert said[-1]["type"] == "hub:disconnect"
    assert said[-1]["payload"]["reason"] == "server_shutdown"
    assert world.closes[session] == 1001


# -- registry --------------------------------------------------------------------------------------------


def test_h16_an_address_is_found_until_its_time_runs_out_to_the_millisecond() -> None:
    world = World()
    watcher = world.actor(A, ttlSeconds=3600)
    world.actor(B, ttlSeconds=60)
    world.now = START_MS + 59_999
    assert len(world.ask(watcher, "hub:discover", {"pattern": B})["payload"]["actors"]) == 1
    world.now = START_MS + 60_000
    assert world.ask(watcher, "hub:discover", {"pattern": B})["payload"]["actors"] == []
    assert world.ask(watcher, "hub:send", {"to": B, "type": "t"})["type"] == "hub:unknown_actor"


def test_times_to_live_are_brought_within_bounds() -> None:
    world = World()
    session = world.connect(A)
    for asked, given in ((1, 60), (100_000, 3600)):
        payload = {"actorAddress": A, "capabilities": ["x"], "ttlSeconds": asked}
        answer = world.ask(session, "hub:register", payload)
        assert answer["payload"]["expiresAt"] == world.now + given * 1000
        assert answer["metadata"]["renewalToken"] == answer["payload"]["renewalToken"]


def test_a_renewal_token_rotates_and_the_old_one_works_once_more() -> None:
    world = World()
    session = world.connect(A)
    payload = {"actorAddress": A, "capabilities": ["x"], "ttlSeconds": 60}
    first = world.ask(session, "hub:register", payload)["payload"]["renewalToken"]
    world.now += 30_000
    renewed = world.ask(session, "hub:renew", {"renewalToken": first, "ttlSeconds": 120})["payload"]
    assert renewed["expiresAt"] == world.now + 120_000
    assert renewed["newToken"] == renewed["renewalToken"] != first
    world.now += 5000
    again = world.ask(session, "hub:renew", {"renewalToken": first})["payload"]
    assert again["renewalToken"] == renewed["renewalToken"]
    assert world.ask(session, "hub:renew", {"renewalToken": first})["payload"]["code"] == "invalid_token"


def test_nobody_renews_for_somebody_else() -> None:
    world = World()
    owner, thief = world.connect(A), world.actor(B)
    token = world.ask(owner, "hub:register", {"actorAddress": A, "capabilities": ["x"]})["payload"][
        "renewalToken"
    ]
    assert world.ask(thief, "hub:renew", {"renewalToken": token})["payload"]["code"] == "invalid_token"


def test_h15_versions_only_grow() -> None:
    world = World()
    versions: list[int] = []
    for _ in range(3):
        session = world.connect(A)
        for _ in range(2):
            answer = world.ask(session, "hub:register", {"actorAddress": A, "capabilities": ["x"]})
            versions.append(answer["payload"]["version"])
        world.lose(session)
    assert versions == [1, 2, 3, 4, 5, 6]


def test_h6_an_address_that_is_taken_over_is_its_new_owners_alone() -> None:
    world = World()
    old = world.actor(A)
    world.say(old, "hub:register", {"actorAddress": "@(t/a/x)", "capabilities": ["x"]})
    world.say(old, "hub:register", {"actorAddress": A, "capabilities": ["x"]})
    new = world.connect(B)
    world.taken(old)
    world.say(new, "hub:register", {"actorAddress": "@(t/a/x)", "capabilities": ["x"]})
    said = world.taken(old)
    assert said[0]["type"] == "hub:unregistered"
    assert said[0]["payload"]["reason"] == "taken_over"
    world.say(new, "hub:register", {"actorAddress": A, "capabilities": ["x"]})
    assert world.closes[old] == 1000
    assert world.taken(old)[-1]["payload"]["reason"] == "duplicate_connection"
    world.taken(new)
    send(world, world.actor(C), A, 1, pattern="tell")
    assert [frame["payload"] for frame in world.taken(new)] == [1]


def test_the_registry_refuses_new_addresses_when_it_is_full() -> None:
    world = World(limits=Limits(hub_registry_actors=2))
    first = world.actor(A, ttlSeconds=60)
    second = world.actor(B, ttlSeconds=3600)
    third = world.connect(C)
    refused = world.ask(third, "hub:register", {"actorAddress": C, "capabilities": ["x"]})
    assert refused["payload"]["details"]["reason"] == "registry_full"
    again = world.ask(second, "hub:register", {"actorAddress": B, "capabilities": ["x"], "ttlSeconds": 3600})
    assert again["type"] == "hub:registered"
    assert again["metadata"]["registryPressure"] == 1.0
    world.now += 60_000
    assert (
        world.ask(third, "hub:register", {"actorAddress": C, "capabilities": ["x"]})["type"]
        == "hub:registered"
    )
    assert first.addresses == {}


def test_walking_through_the_registry_finds_everybody_once() -> None:
    world = World()
    walker = world.actor("@(walk/er)")
    for number in range(25):
        world.say(walker, "hub:register", {"actorAddress": f"@(n/{number:02})", "capabilities": ["x"]})
    seen: list[str] = []
    cursor = None
    while True:
        payload = {"pattern": "@(n/*)", "limit": 10, "cursor": cursor}
        page = world.ask(walker, "hub:discover", payload)["payload"]
        seen += [one["address"] for one in page["actors"]]
        cursor = page["cursor"]
        if not page["hasMore"]:
            break
    assert seen == [f"@(n/{number:02})" for number in range(25)]
    listed = world.ask(walker, "hub:list_actors", {"offset": 20, "limit": 3})["payload"]
    assert listed["total"] == 26
    assert [one["address"] for one in listed["actors"]] == ["@(n/20)", "@(n/21)", "@(n/22)"]
    assert listed["hasMore"]


def test_discovery_narrows_by_capability_and_metadata() -> None:
    world = World()
    session = world.connect(A)
    for name, words, room in (("x", ["p", "q"], "a"), ("y", ["p"], "b"), ("z", ["q"], 1)):
        payload = {"actorAddress": f"@(d/{name})", "capabilities": words, "metadata": {"room": room}}
        world.say(session, "hub:register", payload)

    def found(**query: Any) -> list[str]:
        actors = world.ask(session, "hub:discover", {"pattern": "@(d/*)", **query})["payload"]["actors"]
        return [one["address"][4:-1] for one in actors]

    assert found(capability="p") == ["x", "y"]
    assert found(capabilities=["p", "q"]) == ["x"]
    assert found(metadata={"room": "b"}) == ["y"]
    assert found(metadata={"room": True}) == []
    assert found(metadata={"room": 1}) == ["z"]


def test_h14_the_registry_as_it_was() -> None:
    world = World()
    watcher = world.actor(A, ttlSeconds=3600)
    before = world.ask(watcher, "hub:discover", {"pattern": "*"})["payload"]["asOf"]
    world.now += 1000
    other = world.actor(B)
    world.now += 1000
    at = world.now
    world.now += 1000
    world.lose(other)

    def then(as_of: Any) -> list[str]:
        answer = world.ask(watcher, "hub:discover", {"pattern": "*", "asOf": as_of})["payload"]
        return [one["address"] for one in answer["actors"]]

    assert then(before) == [A]
    assert then(at) == [A, B]
    assert then(world.now) == [A]


def test_h17_a_watcher_is_told_who_comes_and_goes() -> None:
    world = World()
    watcher = world.actor(A, ttlSeconds=3600)
    snapshot = world.ask(watcher, "hub:presence", {"action": "watch", "pattern": "@(t/*)"})["payload"]
    assert [one["address"] for one in snapshot["actors"]] == [A]
    other = world.actor(B, ttlSeconds=60)
    world.say(other, "hub:register", {"actorAddress": B, "capabilities": ["more"], "ttlSeconds": 60})
    world.wait(61_000)
    third = world.actor(C)
    world.say(third, "hub:unregister", {"actorAddress": C})
    told = [(frame["payload"]["event"], frame["payload"]["actorAddress"]) for frame in world.taken(watcher)]
    assert told == [("joined", B), ("updated", B), ("expired", B), ("joined", C), ("left", C)]
    world.ask(watcher, "hub:presence", {"action": "unwatch", "watchId": snapshot["watchId"]})
    world.actor("@(t/d)")
    assert world.taken(watcher) == []


@pytest.mark.parametrize("noticed", [True, False])
def test_h17_a_resumed_watcher_gets_a_snapshot_for_events_that_its_socket_lost(noticed: bool) -> None:
    world = World()
    gone, updated = world.actor(B), world.actor(C)
    watcher = world.connect(A, "resume")
    token = world.taken(watcher)[0]["payload"]["resumeToken"]
    watch = world.ask(watcher, "hub:presence", {"action": "watch", "pattern": "@(t/*)"})["payload"]
    assert [(one["address"], one["version"]) for one in watch["actors"]] == [(B, 1), (C, 1)]
    world.say(gone, "hub:unregister", {"actorAddress": B})
    assert [frame["payload"]["event"] for frame in world.taken(watcher)] == ["left"]
    # The socket breaks before the client reads the event. The client may notice it before the hub does.
    if noticed:
        world.lose(watcher)
    world.say(updated, "hub:register", {"actorAddress": C, "capabilities": ["more"]})
    again = world.connect(A, "resume", resumeToken=token)
    said = world.taken(again)
    assert said[0]["payload"]["resumed"] is True
    snapshot = said[-1]["payload"]
    assert (snapshot["watchId"], snapshot["resync"]) == (watch["watchId"], True)
    assert [(one["address"], one["version"]) for one in snapshot["actors"]] == [(C, 2)]
    world.actor("@(t/d)")
    assert [frame["payload"]["event"] for frame in world.taken(again)] == ["joined"]


def test_h17_a_snapshot_shows_which_durable_addresses_have_no_session() -> None:
    world = World()
    watcher, owner, resumable = world.actor(A), world.actor(B, durable=True), world.actor(C, "resume")
    world.lose(owner)
    world.lose(resumable)  # it has not left until its time to resume is over
    snapshot = world.ask(watcher, "hub:presence", {"action": "watch", "pattern": "*"})["payload"]
    query = {"pattern": "*", "asOf": snapshot["offset"]}
    then = world.ask(watcher, "hub:discover", query)["payload"]
    for shown in (snapshot, then):
        assert {one["address"]: one["connectionId"] != "" for one in shown["actors"]} == {
            A: True,
            B: False,
            C: True,
        }


# -- sending ---------------------------------------------------------------------------------------------


def test_h22_a_tell_between_online_actors_touches_no_disk() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B)
    before = {name: len(entries) for name, entries in world.streams.entries.items()}
    send(world, sender, B, {"n": 1}, pattern="tell", frm=A, metadata={"priority": 1, "via": "lies"}, ttl=1000)
    frame = world.taken(receiver)[0]
    assert list(frame) == [
        *("id", "from", "to", "type", "payload", "pattern"),
        *("correlationId", "timestamp", "metadata", "ttl", "signature"),
    ]
    assert (frame["from"], frame["to"], frame["type"], frame["payload"]) == (A, B, "t", {"n": 1})
    metadata = frame["metadata"]
    assert metadata["originalFrom"] == A
    assert (metadata["priority"], metadata["forwarded"], metadata["via"]) == (1, True, HUB)
    assert frame["ttl"] == 1000
    assert world.taken(sender) == []
    assert {name: len(entries) for name, entries in world.streams.entries.items()} == before


def test_data_is_passed_on_byte_for_byte() -> None:
    world = World()
    sender = world.actor(A)
    receiver = world.actor(B)
    data = b'{ "n" : 1e400, "a":1, "a":2,\t"s":"\\u0041\\ud800" }'
    world.raw.clear()
    text = b'{"id":"raw","type":"hub:send","timestamp":%d,"payload":{"to":"@(t/b)","type":"t","data":%b}}'
    world.run(decide.decide(world.hub, sender, text % (world.now, data), world.now))
    assert b'"payload":' + data + b"," in world.raw[0]
    assert len(world.said[receiver]) == 1


@pytest.mark.parametrize(
    ("to", "payload"),
    [
        (HUB, {"to": B, "type": "t", "data": 5}),
        (HUB, {"targetAddress": B, "message": {"type": "t", "payload": 5}, "requireAck": True}),
        (B, {"type": "t", "data": 5}),
    ],
)
def test_three_forms_of_a_send_are_understood(to: str, payload: dict[str, Any]) -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B)
    answer = world.ask(sender, "hub:send", payload, to=to)
    assert answer["type"] == "hub:delivery_ack"
    assert answer["payload"]["status"] == answer["payload"]["level"] == "delivered"
    assert [frame["payload"] for frame in world.taken(receiver)] == [5]


@pytest.mark.parametrize("payload", [{"type": "t"}, {"to": B}, {"to": "nobody", "type": "t"}, {"to": 1}])
def test_a_send_without_target_or_type_is_refused(payload: dict[str, Any]) -> None:
    world = World()
    answer = world.ask(world.actor(A), "hub:send", payload)
    assert answer["payload"]["code"] == "invalid_request"
    assert "field" in answer["payload"]["details"]


def test_what_nobody_can_get_is_a_dead_letter() -> None:
    world = World()
    sender = world.actor(A, "delivery-notices")
    assert world.ask(sender, "hub:send", {"to": B, "type": "t"})["type"] == "hub:unknown_actor"
    assert "hub/dead-letters" not in world.streams.entries
    message_id = send(world, sender, B, 7, pattern="tell")
    told = world.taken(sender)[-1]
    assert (told["type"], told["correlationId"]) == ("hub:undeliverable", message_id)
    letter = world.streams.bodies("hub/dead-letters")[0]
    assert (letter["reason"], letter["from"], letter["to"]) == ("unknown_actor", A, B)
    assert letter["message"]["payload"] == 7


def test_a_flood_of_dead_letters_is_merged_with_an_exact_count() -> None:
    world = World()
    sender = world.actor(A)
    for _ in range(300):
        send(world, sender, B, 7, pattern="tell")
    world.wait(1000)
    letters = world.streams.bodies("hub/dead-letters")
    assert len(letters) == 101
    assert sum(letter["count"] for letter in letters) == 300


def test_h23_nothing_is_delivered_after_its_time() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B)
    payload = {"to": B, "type": "t"}
    assert (
        world.ask(sender, "hub:send", payload, timestamp=world.now - 1000, ttl=1000)["type"]
        == "hub:delivery_ack"
    )
    late = world.ask(sender, "hub:send", payload, timestamp=world.now - 1001, ttl=1000)
    assert late["payload"]["code"] == "message_expired"
    assert len(world.taken(receiver)) == 1


def test_a_repeat_is_answered_as_before_and_not_delivered_again() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B)
    payload = {"to": B, "type": "t"}
    first = world.ask(sender, "hub:send", payload, id="same")
    world.now += 59_000
    assert world.ask(sender, "hub:send", payload, id="same") == first
    assert len(world.taken(receiver)) == 1
    world.now += 1000
    assert world.ask(sender, "hub:send", payload, id="same") != first
    assert len(world.taken(receiver)) == 1


def test_a_repeat_of_what_is_in_progress_joins_it() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    world.hold()
    payload = {"to": B, "type": "t", "ack": "accepted"}
    world.say(sender, "hub:send", payload, id="same")
    world.say(sender, "hub:send", payload, id="same")
    assert world.taken(sender) == []
    world.commit_held()
    assert kinds(world.taken(sender)) == ["hub:delivery_ack"]
    assert len(world.taken(receiver)) == 1


def test_h26_a_reply_goes_to_who_asked_and_to_nobody_else() -> None:
    world = World()
    requester, actor, stranger = world.actor(A), world.actor(B), world.actor(C)
    request = send(world, requester, B, {"sku": 7}, payload={"expectReply": True}, ttl=10_000)
    copy = world.taken(actor)[0]
    assert copy["pattern"] == "ask"
    assert copy["metadata"]["replyBy"] == world.now + 10_000
    refused = world.ask(stranger, "hub:reply", {"ok": True}, correlationId=copy["id"])
    assert refused["payload"]["code"] == "unknown_correlation"
    assert world.taken(requester) == []
    for number in range(2):
        payload = {"ok": True, "data": number, "final": False}
        world.say(actor, "hub:reply", payload, correlationId=copy["id"], pattern="tell")
    world.say(actor, "hub:reply", {"data": 2}, correlationId=request, pattern="tell")
    replies = world.taken(requester)
    assert [(frame["from"], frame["to"], frame["correlationId"]) for frame in replies] == [
        (B, A, request)
    ] * 3
    assert [frame["payload"]["data"] for frame in replies] == [0, 1, 2]
    assert [frame["payload"]["final"] for frame in replies] == [False, False, True]
    late = world.ask(actor, "hub:reply", {"data": 3}, correlationId=copy["id"])
    assert late["payload"]["code"] == "unknown_correlation"
    assert world.streams.bodies("hub/dead-letters")[-1]["reason"] == "late_reply"


def test_h25_an_ask_without_a_reply_times_out_once() -> None:
    world = World()
    requester, actor = world.actor(A), world.actor(B)
    request = send(world, requester, B, payload={"expectReply": True, "ack": "delivered"}, ttl=5000)
    assert kinds(world.taken(requester)) == ["hub:delivery_ack"]
    world.wait(10_000)
    said = world.taken(requester)
    assert [(frame["correlationId"], frame["payload"]["code"]) for frame in said] == [(request, "timeout")]
    assert said[0]["payload"]["details"]["reached"] == "delivered"
    assert len(world.taken(actor)) == 1


def test_an_actor_that_leaves_answers_nothing_more() -> None:
    world = World()
    requester, actor = world.actor(A), world.actor(B)
    send(world, requester, B, payload={"expectReply": True})
    world.lose(actor)
    said = world.taken(requester)
    assert said[-1]["payload"]["details"]["reason"] == "recipient_left"
    world.wait(40_000)
    assert world.taken(requester) == []


def test_too_many_open_asks_are_refused() -> None:
    world = World(limits=Limits(hub_session_asks=2))
    requester, _ = world.actor(A), world.actor(B)
    for _ in range(2):
        send(world, requester, B, payload={"expectReply": True})
    refused = world.ask(requester, "hub:send", {"to": B, "type": "t", "expectReply": True})
    assert refused["payload"]["details"]["reason"] == "open_asks"


def test_rates_are_kept_for_each_identity() -> None:
    world = World(limits=Limits(hub_sends_per_s=2))
    sender, other, receiver = world.actor(A), world.actor(C), world.actor(B)
    answers = [world.ask(sender, "hub:send", {"to": B, "type": "t"}) for _ in range(5)]
    assert kinds(answers) == ["hub:delivery_ack"] * 4 + ["hub:rate_limited"]
    assert answers[-1]["payload"]["details"]["retryAfter"] == 500
    assert world.ask(other, "hub:send", {"to": B, "type": "t"})["type"] == "hub:delivery_ack"
    world.now += 500
    assert world.ask(sender, "hub:send", {"to": B, "type": "t"})["type"] == "hub:delivery_ack"
    assert len(world.taken(receiver)) == 6


def test_unknown_types_are_told_so() -> None:
    world = World()
    session = world.actor(A)
    for kind in ("hub:nothing", "hub:list_topics", "my:type"):
        assert world.ask(session, kind)["payload"]["code"] == "unknown_type"
    assert world.ask(session, "hub:connect")["payload"]["code"] == "invalid_request"


# -- broadcast -------------------------------------------------------------------------------------------


def test_h27_a_broadcast_reaches_everybody_once_and_counts_them() -> None:
    world = World()
    sender = world.actor(A)
    receivers = [world.actor(f"@(b/{number:03})") for number in range(250)]
    away = world.actor("@(b/away)", durable=True)
    world.lose(away)
    ack = world.ask(sender, "hub:broadcast", {"type": "news", "data": 1, "excludeSelf": True}, pattern="tell")
    assert ack["type"] == "hub:broadcast_ack"
    counts = ack["payload"]
    assert (counts["deliveredCount"], counts["queuedCount"], counts["failedCount"]) == (250, 1, 0)
    assert counts["total"] == 251
    for session in receivers:
        frames = world.taken(session)
        assert [frame["payload"] for frame in frames] == [1]
        assert frames[0]["metadata"]["broadcast"] is True
    assert world.taken(sender) == []
    assert len(world.streams.entries["hub/broadcast/0"]) == 1
    back = world.connect("@(b/away)")
    world.say(back, "hub:register", {"actorAddress": "@(b/away)", "capabilities": ["x"], "durable": True})
    assert [frame["payload"] for frame in world.taken(back) if frame["type"] == "news"] == [1]


def test_a_broadcast_may_be_narrowed() -> None:
    world = World()
    sender = world.actor(A)
    one, two = (
        world.actor("@(x/1)", capabilities=["render"]),
        world.actor("@(y/2)", capabilities=["render"]),
    )
    payload = {"message": {"type": "news", "payload": 1}, "pattern": "@(x/*)"}
    ack = world.ask(sender, "hub:broadcast", payload, metadata={"targetCapability": "render"})
    assert ack["payload"]["total"] == 1
    assert len(world.taken(one)) == 1
    assert world.taken(two) == []


# -- flow ------------------------------------------------------------------------------------------------


def test_senders_are_paused_and_resumed() -> None:
    world = World()
    sender, slow = world.actor(A), world.actor(B)
    send(world, sender, B, 1, pattern="tell")
    world.unsent[slow] = 1_100_000
    send(world, sender, B, 2, pattern="tell")
    paused = world.taken(sender)
    assert [(frame["type"], frame["payload"]["targets"]) for frame in paused] == [("hub:pause", [B])]
    send(world, sender, B, 3, pattern="tell")
    assert world.taken(sender) == []
    world.drain(slow)
    assert kinds(world.taken(sender)) == ["hub:resume"]
    assert len(world.taken(slow)) == 3


def test_a_slow_session_that_is_resumed_resumes_its_senders() -> None:
    world = World()
    sender, slow = world.actor(A), world.connect(B, "resume")
    token = world.taken(slow)[0]["payload"]["resumeToken"]
    world.say(slow, "hub:register", {"actorAddress": B, "capabilities": ["test"]})
    send(world, sender, B, 1, pattern="tell")
    world.unsent[slow] = 1_100_000
    send(world, sender, B, 2, pattern="tell")
    assert kinds(world.taken(sender)) == ["hub:pause"]
    world.connect(B, "resume", resumeToken=token)  # the hub has not noticed that the old socket is dead
    resumed = world.taken(sender)
    assert [(frame["type"], frame["payload"]["targets"]) for frame in resumed] == [("hub:resume", [B])]


def test_a_session_without_a_socket_is_not_paused() -> None:
    """Its client starts its next connection without pauses, and would wait for a resume for ever."""
    world = World()
    sender, slow, other = world.connect(A, "resume"), world.actor(B), world.actor(C)
    token = world.taken(sender)[0]["payload"]["resumeToken"]
    for sending in (sender, other):
        send(world, sending, B, 1, pattern="tell")
    world.lose(sender)
    world.unsent[slow] = 1_100_000
    send(world, other, B, 2, pattern="tell")
    assert kinds(world.taken(world.connect(A, "resume", resumeToken=token))) == ["hub:connected"]
    assert kinds(world.taken(other)) == ["hub:pause"]


def test_a_slow_actor_is_told_what_it_missed() -> None:
    world = World()
    sender, other, slow = world.actor(A), world.actor(C), world.actor(B, "delivery-notices")
    send(world, sender, B, 1, pattern="tell")
    world.unsent[slow] = 3_000_000
    send(world, other, B, 2, pattern="tell")
    answer = world.ask(other, "hub:send", {"to": B, "type": "t"})
    assert answer["payload"]["code"] == "consumer_slow"
    assert [letter["reason"] for letter in world.streams.bodies("hub/dead-letters")] == ["consumer_slow"] * 2
    world.drain(slow)
    said = world.taken(slow)
    assert said[-1]["type"] == "hub:dropped"
    assert said[-1]["payload"]["count"] == 2


def test_whoever_takes_nothing_for_long_is_sent_away() -> None:
    world = World()
    sender, slow = world.actor(A), world.actor(B)
    world.unsent[slow] = 3_000_000
    send(world, sender, B, 1, pattern="tell")
    world.wait(29_000)
    assert slow not in world.closes
    world.wait(2000)
    assert world.closes[slow] == 1013
    goodbye = world.taken(slow)[-1]
    assert (goodbye["type"], goodbye["payload"]["reason"]) == ("hub:disconnect", "slow_consumer")


def test_queue_stats_and_metrics_are_the_callers_own() -> None:
    world = World()
    session = world.actor(A)
    stats = world.ask(session, "hub:queue_stats")["payload"]
    assert (stats["queueDepth"], stats["pauseThreshold"], stats["mode"]) == (0, 1000, "push")
    world.wait(60_000)
    assert world.ask(session, "hub:metrics")["payload"]["scope"] == "session"


def test_a_tick_looks_at_so_many_sessions_then_others_have_their_turn() -> None:
    world = World()
    actors = [world.actor(f"@(t/a{number})") for number in range(2 * ITEMS_PER_SLICE + 1)]
    for number, actor in enumerate(actors):
        world.say(actor, "hub:send", {"to": "@(t/a0)", "type": "t", "data": number})
    ends = len(actors) - 1
    world.turns = deque()
    world.now += 10 * 60_000
    world.run(decide.tick(world.hub, world.now))
    looked_at = [actor.minute.began_ms > actor.opened_ms for actor in actors]
    assert looked_at == [number < ITEMS_PER_SLICE for number in range(len(actors))]
    assert len(list(world.hub.senders)) == len(actors) - ITEMS_PER_SLICE
    world.lose(actors[ends])
    while world.turn():
        pass
    assert all(actor.minute.began_ms > actor.opened_ms for actor in actors[:ends])
    assert actors[ends].minute.began_ms == actors[ends].opened_ms, "who left meanwhile is not looked at"
    assert not list(world.hub.senders)
