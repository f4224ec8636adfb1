"""What every hub has to stand: coming back, delivering, fanning out, registering, and all of it together."""

from __future__ import annotations

import signal
from collections import deque
from typing import Any

from conftest import StartServer
from support.calls import eventually
from support.hub_client import Actor, registered
from support.hub_clients import QUICK, next_of
from support.hub_world import World
from support.server import ServerProcess
from tailrace.client.hub import Hub, Timeouts
from tailrace.common.limits import Limits

A, B, C = "@(t/a)", "@(t/b)", "@(t/c)"


def told(frames: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [frame for frame in frames if frame["type"] == kind]


# -- coming back -------------------------------------------------------------------------------------------


def test_a_connection_that_breaks_during_a_send_leaves_a_message_whole_or_unsent(
    server: ServerProcess,
) -> None:
    receiver = registered(server, "@(plan/receiver)")
    sender = Actor(server, "@(plan/sender)")
    sender.write("hub:send", {"to": "@(plan/receiver)", "type": "whole", "data": 1})
    sender.quiet()
    cut = b'{"id":"half","type":"hub:send","timestamp":1,"payload":{"to":"@(plan/receiver)"'
    sender.socket.socket.sendall(
        bytes((0x81, 0x80 | 125)) + b"\0\0\0\0" + cut
    )  # of 125 bytes, some never come
    sender.cut()
    again = Actor(server, "@(plan/sender)")
    assert again.ask("hub:send", {"to": "@(plan/receiver)", "type": "next"})["type"] == "hub:delivery_ack"
    assert [receiver.take()["type"], receiver.take()["type"]] == ["whole", "next"]
    again.close()
    receiver.close()


def test_a_session_that_slept_is_preserved_with_what_came_meanwhile(server: ServerProcess) -> None:
    sender = registered(server, "@(plan/awake)")
    sleeper = Actor(server, "@(plan/sleeper)", words=["resume"])
    sleeper.register()
    token = sleeper.connected["payload"]["resumeToken"]
    sleeper.cut()
    found = {"pattern": "@(plan/sleeper)"}
    eventually(
        lambda: sender.ask("hub:discover", found)["payload"]["actors"][0]["online"], lambda online: not online
    )
    sender.write("hub:send", {"to": "@(plan/sleeper)", "type": "meanwhile"})
    again = Actor(server, "@(plan/sleeper)", words=["resume"], resume=token)
    assert again.connected["payload"]["resumed"] is True
    assert again.take()["type"] == "meanwhile"
    again.close()
    sender.close()


def test_of_two_connections_for_one_address_the_first_is_closed(server: ServerProcess) -> None:
    first, second = registered(server, "@(plan/twice)"), registered(server, "@(plan/twice)")
    assert first.of("hub:disconnect")["payload"]["reason"] == "duplicate_connection"
    assert first.closed() == 1000
    assert second.quiet() == []
    second.close()


def test_a_client_whose_heartbeats_are_not_answered_connects_again(start_server: StartServer) -> None:
    server = start_server(env={"TAILRACE_HUB_HEARTBEAT_MS": "1000"})
    timeouts = Timeouts(heartbeat_s=1.0, connect_s=2.0)
    with Hub(server.base_url, address="@(plan/beats)", retries=QUICK, timeouts=timeouts) as hub:
        hub.register()
        session = hub._hub._resources.session
        server.signal(signal.SIGSTOP)
        try:
            eventually(lambda: session._connection, lambda connection: connection is None)
        finally:
            server.signal(signal.SIGCONT)
        assert hub.send("@(plan/beats)", "t", 1, ack="delivered").status == "delivered"
        assert hub.resumed


# -- delivering --------------------------------------------------------------------------------------------


def test_at_most_once_is_sent_and_never_acknowledged() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B)
    world.say(sender, "hub:send", {"to": B, "type": "t", "data": 1}, pattern="tell")
    assert (len(told(world.taken(receiver), "t")), world.taken(sender)) == (1, [])


def test_at_least_once_is_asked_for_and_acknowledged() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B)
    answer = world.ask(sender, "hub:send", {"to": B, "type": "t", "data": 1})
    assert (answer["type"], answer["payload"]["status"]) == ("hub:delivery_ack", "delivered")
    assert len(told(world.taken(receiver), "t")) == 1


def test_the_same_id_twice_is_processed_once() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B)
    for _ in range(2):
        world.say(sender, "hub:send", {"to": B, "type": "t", "data": 1}, id="same")
    assert len(told(world.taken(receiver), "t")) == 1
    assert len(told(world.taken(sender), "hub:delivery_ack")) == 2


def test_a_ttl_of_100_ms_that_has_passed_before_delivery() -> None:
    world = World()
    sender, receiver = world.actor(A), world.actor(B, durable=True)
    world.lose(receiver)
    world.say(sender, "hub:send", {"to": B, "type": "t", "data": 1}, ttl=100, pattern="tell")
    world.wait(1000)
    again = world.actor(B, durable=True)
    assert told(world.taken(again), "t") == []
    assert [letter["reason"] for letter in world.streams.bodies("hub/dead-letters")] == ["message_expired"]


# -- fanning out -------------------------------------------------------------------------------------------


def test_a_broadcast_to_100_is_done_in_one_go_and_one_to_1000_in_turns() -> None:
    for count in (100, 1000):
        world = World(limits=Limits(hub_registry_actors=5000))
        sender = world.actor(A, "broadcast-progress")
        actors = [world.actor(f"@(many/{number})") for number in range(count)]
        ack = world.ask(sender, "hub:broadcast", {"type": "news", "data": 1, "excludeSelf": True})["payload"]
        assert (ack["deliveredCount"], ack["failedCount"], ack["total"]) == (count, 0, count)
        assert all(len(told(world.taken(actor), "news")) == 1 for actor in actors)


def test_h28_queues_fill_batch_by_batch_in_a_broadcast_to_1000_and_others_are_served_in_between() -> None:
    world = World()
    sender, other = world.actor(A), world.actor(B)
    actors = [world.actor(f"@(many/{number:04})") for number in range(1000)]
    assert not any(actor.outbox.messages for actor in actors)
    world.unsent.update(dict.fromkeys(actors, 1))  # from here on nobody takes anything
    world.turns = deque()
    payload = {"type": "news", "data": 1, "pattern": "many/*"}
    request = world.say(sender, "hub:broadcast", payload, pattern="tell")
    held = world.say(sender, "hub:queue_stats")
    for batches in range(1, 10):
        depths = [actor.outbox.messages for actor in actors]
        assert depths == [1] * 100 * batches + [0] * (1000 - 100 * batches)
        assert world.ask(other, "hub:queue_stats")["payload"]["queueDepth"] == 0
        assert world.taken(sender) == [], "what it says later waits for its broadcast"
        assert world.turn()
    assert not world.turn()
    answers = [frame["correlationId"] for frame in world.taken(sender)]
    assert answers == [request, held]
    assert [world.ask(actor, "hub:queue_stats")["payload"]["queueDepth"] for actor in actors[:3]] == [1, 1, 1]


def test_a_fast_producer_is_told_to_pause_for_a_slow_consumer_which_can_see_its_queue() -> None:
    world = World()
    producer, consumer = world.actor(A), world.actor(B)
    world.unsent[consumer] = 2**20  # nothing of it is taken
    for number in range(1002):
        world.say(producer, "hub:send", {"to": B, "type": "t", "data": number}, pattern="tell")
    (pause,) = told(world.taken(producer), "hub:pause")
    assert pause["payload"]["targets"] == [B]
    stats = world.ask(consumer, "hub:queue_stats")["payload"]
    assert (stats["paused"], stats["queueBytes"] >= 2**20, stats["queueDepth"] > 0) == (True, True, True)
    world.drain(consumer)
    world.wait(2000)
    assert told(world.taken(producer), "hub:resume")
    assert world.ask(consumer, "hub:queue_stats")["payload"]["processingRate"] > 0


# -- registering -------------------------------------------------------------------------------------------


def test_registering_twice_counts_versions_and_the_last_one_has_it() -> None:
    world = World()
    first, second = world.connect(C), world.connect("@(t/d)")
    versions = [
        world.ask(one, "hub:register", {"actorAddress": B, "capabilities": ["x"]})["payload"]["version"]
        for one in (first, second)
    ]
    assert versions == [1, 2]
    sender = world.actor(A)
    world.say(sender, "hub:send", {"to": B, "type": "t"}, pattern="tell")
    assert (told(world.taken(first), "t"), len(told(world.taken(second), "t"))) == ([], 1)


def test_registrations_at_the_same_time_leave_one_owner() -> None:
    world = World()
    sessions = [world.connect(f"@(at-once/{number})") for number in range(5)]
    world.hold()
    for session in sessions:
        world.say(session, "hub:register", {"actorAddress": B, "capabilities": ["x"]})
    world.commit_held()
    assert [B[2:-1] in session.addresses for session in sessions] == [False] * 4 + [True]
    assert world.hub.registry.by_path[B[2:-1]].version == 5


def test_an_actor_that_does_not_renew_is_gone_after_five_minutes() -> None:
    world = World()
    world.actor(B)
    asker = world.connect(A)
    world.wait(299_000)
    assert len(world.ask(asker, "hub:discover", {"pattern": B})["payload"]["actors"]) == 1
    world.wait(1000)
    assert world.ask(asker, "hub:discover", {"pattern": B})["payload"]["actors"] == []


def test_a_full_registry_refuses_new_addresses_and_keeps_known_ones() -> None:
    world = World(limits=Limits(hub_registry_actors=3))
    actors = [world.actor(address) for address in (A, B, C)]
    late = world.connect("@(t/late)")
    refused = world.ask(late, "hub:register", {"actorAddress": "@(t/late)", "capabilities": ["x"]})["payload"]
    assert (refused["code"], refused["details"]["reason"]) == ("rate_limited", "registry_full")
    again = world.ask(actors[0], "hub:register", {"actorAddress": A, "capabilities": ["x"]})
    assert again["type"] == "hub:registered"


# -- together ----------------------------------------------------------------------------------------------


def test_from_a_local_actor_through_the_hub_to_a_browser(server: ServerProcess) -> None:
    """The browser's part is taken by frames as browsers write them; Chromium itself has its own test."""
    browser = registered(server, "@(browser/widget-123)")
    with Hub(server.base_url, address="@(seag/local)", retries=QUICK) as seag:
        seag.register()
        assert (
            seag.send("@(browser/widget-123)", "render", {"data": [1, 2]}, ack="delivered").status
            == "delivered"
        )
        received = browser.of("render")
        assert (received["from"], received["payload"]) == ("@(seag/local)", {"data": [1, 2]})
        browser.write("hub:send", {"to": "@(seag/local)", "type": "clicked", "data": {"x": 1}})
        assert next_of(seag).data == {"x": 1}
    browser.close()
