"""The hub over real sockets: every message type once as it should be, and once refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from support.calls import Caller, eventually
from support.hub_client import HUB, Actor, code, now_ms, registered
from support.server import ServerProcess


@contextmanager
def actors(*found: Actor) -> Iterator[None]:
    try:
        yield
    finally:
        for actor in found:
            actor.close()


def test_the_paths_of_the_hub(server: ServerProcess) -> None:
    call = Caller(server)
    health = call("GET", "/hub/health").body
    assert (health["status"], health["service"], health["version"]) == ("ok", "signal-hub", "0.1.0")
    assert call("GET", "/hub/shards").body["shards"][0]["url"].startswith("ws://")
    refused = call("GET", "/hub/ws")
    assert (refused.status, refused.code, refused.headers["upgrade"]) == (
        426,
        "upgrade_required",
        "websocket",
    )
    assert call("POST", "/hub/ws").status == 405
    with pytest.raises(InvalidStatus):
        Actor(server, path="/ws", hello=False)


def test_connect_heartbeat_disconnect(server: ServerProcess) -> None:
    actor = Actor(server, "@(sock/a)", words=["ui", "resume"])
    said = actor.connected
    assert said["type"] == "hub:connected"
    assert said["from"] == HUB
    assert said["to"] == said["metadata"]["actorIdentity"] == "@(sock/a)"
    assert said["payload"]["maxMessageSize"] == 1048576
    assert said["payload"]["resumeToken"].startswith("rsm-")
    beat = actor.answer(actor.write("hub:heartbeat", {"timestamp": 5}))
    assert beat["type"] == "hub:heartbeat_ack"
    assert beat["payload"]["timestamp"] == 5
    actor.socket.send('{"type":"ping"}')
    assert actor.take() == {"type": "pong"}
    assert code(actor.ask("hub:connect")) == "invalid_request"
    goodbye = actor.ask("hub:disconnect", {"reason": "client_requested"})
    assert goodbye["payload"]["acknowledged"] is True
    assert actor.closed() == 1000


def test_a_refused_connect_ends_the_connection(server: ServerProcess) -> None:
    for metadata, expected in (
        ({"protocolVersion": "9.0.0"}, ("hub:version_mismatch", "version_mismatch")),
        ({"protocolVersion": "0.1.0", "capabilities": "x"}, ("hub:error", "invalid_request")),
    ):
        actor = Actor(server, "@(sock/x)", hello=False)
        answer = actor.ask("hub:connect", None, metadata=metadata)
        assert (answer["type"], code(answer)) == expected
        assert actor.closed() == 1008


def test_older_forms_of_connect_are_understood(server: ServerProcess) -> None:
    actor = Actor(server, "@(sock/old)", hello=False)
    with actors(actor):
        payload = {"version": "0.1.0", "capabilities": ["x"], "jwt": None}
        assert actor.ask("hub:connect", payload)["type"] == "hub:connected"


def test_messages_that_are_too_large_do_no_harm(server: ServerProcess) -> None:
    actor = registered(server, "@(sock/large)")
    with actors(actor):
        fits = actor.ask("hub:send", {"to": "@(sock/large)", "type": "t", "data": "x" * 900_000})
        assert fits["type"] == "hub:delivery_ack"
        assert len(actor.of("t")["payload"]) == 900_000
        message_id = actor.write("hub:send", {"to": "@(sock/large)", "type": "t", "data": "x" * 2_000_000})
        refused = actor.answer(message_id)
        assert (refused["type"], code(refused)) == ("hub:message_too_large", "message_too_large")
        assert refused["payload"]["maxSize"] == 1_048_576
        assert actor.quiet() == []


def test_registering_and_finding(server: ServerProcess) -> None:
    one = registered(server, "@(reg/one)", metadata={"room": "a"})
    two = Actor(server, "@(reg/two)")
    with actors(one, two):
        assert (
            code(two.ask("hub:register", {"actorAddress": "reg/two", "capabilities": ["x"]}))
            == "invalid_request"
        )
        assert code(two.ask("hub:register", {"actorAddress": "@(reg/two)"})) == "invalid_request"
        found = two.ask("hub:discover", {"pattern": "@(reg/*)", "metadata": {"room": "a"}})["payload"]
        assert [actor["address"] for actor in found["actors"]] == ["@(reg/one)"]
        assert found["actors"][0]["online"] is True
        assert "renewalToken" not in json.dumps(found)
        listed = two.ask("hub:list_actors", {"limit": 1})["payload"]
        assert listed["total"] >= 1
        assert code(two.ask("hub:discover", {"pattern": 7})) == "invalid_request"
        assert code(two.ask("hub:list_actors", {"offset": "x"})) == "invalid_request"
        mine = two.register()["payload"]
        renewed = two.ask("hub:renew", {"renewalToken": mine["renewalToken"]})
        assert renewed["type"] == "hub:renewed"
        assert code(two.ask("hub:renew", {"renewalToken": "renewal-stolen"})) == "invalid_token"
        watched = one.ask("hub:presence", {"action": "watch", "pattern": "@(reg/*)"})["payload"]
        assert [actor["address"] for actor in watched["actors"]] == ["@(reg/one)", "@(reg/two)"]
        assert code(one.ask("hub:presence", {"action": "look"})) == "invalid_request"
        gone = two.ask("hub:unregister", {"actorAddress": "@(reg/two)"})
        assert gone["type"] == "hub:unregistered"
        event = one.find(lambda frame: frame["payload"].get("event") == "left")
        assert event["payload"]["actorAddress"] == "@(reg/two)"
        assert event["payload"]["offset"] > watched["offset"]
        assert code(two.ask("hub:unregister", {"actorAddress": "@(reg/one)"})) == "unauthorized"


def test_sending_and_replying(server: ServerProcess) -> None:
    asker, actor = registered(server, "@(send/asker)"), registered(server, "@(send/actor)")
    with actors(asker, actor):
        ack = asker.ask("hub:send", {"to": "@(send/actor)", "type": "t", "data": {"n": 1}})
        assert ack["payload"]["status"] == "delivered"
        assert actor.of("t")["from"] == "@(send/asker)"
        assert asker.ask("hub:send", {"to": "@(send/gone)", "type": "t"})["type"] == "hub:unknown_actor"
        request = asker.write(
            "hub:send", {"to": "@(send/actor)", "type": "q", "expectReply": True}, pattern="ask", ttl=20_000
        )
        asked = actor.of("q")
        actor.write(
            "hub:reply", {"ok": False, "error": {"code": "no", "message": "no"}}, correlationId=asked["id"]
        )
        reply = asker.of("hub:reply")
        assert (reply["correlationId"], reply["payload"]["ok"]) == (request, False)
        assert code(actor.ask("hub:reply", {"ok": True}, correlationId="nothing")) == "unknown_correlation"
        assert code(actor.ask("hub:reply", {"ok": True})) == "invalid_request"


def test_h34_accepted_messages_are_in_the_log_and_read_over_http(server: ServerProcess) -> None:
    call = Caller(server)
    sender, actor = registered(server, "@(log/s)"), registered(server, "@(log/a)", durable=True)
    with actors(sender, actor):
        ack = sender.ask("hub:send", {"to": "@(log/a)", "type": "t", "data": 1, "ack": "accepted"})["payload"]
        assert (ack["status"], ack["stream"]) == ("accepted", "hub/mbox/log/a")
        assert actor.of("t")["metadata"]["mailbox"]["offset"] == ack["offset"]
        entries = call("GET", "hub/mbox/log/a?offset=-1").body
        assert [entry["payload"] for entry in entries] == [1]
        sender.write("hub:send", {"to": "@(log/nobody)", "type": "t", "data": 2})
        letters = eventually(
            lambda: call("GET", "hub/dead-letters?offset=-1"), lambda reply: reply.status == 200
        ).body
        assert [letter["to"] for letter in letters if letter["to"] == "@(log/nobody)"] == ["@(log/nobody)"]
    steps = eventually(
        lambda: call("GET", "hub/trace?offset=-1"),
        lambda reply: reply.status == 200 and ack["offset"] in reply.raw.decode(),
    ).body
    assert [
        step["ev"] for step in steps if (step["stream"], step["offset"]) == (ack["stream"], ack["offset"])
    ] == ["accepted", "delivered"]
    assert call("PUT", "hub/mbox/mine").code == "reserved_name"
    assert call("POST", "hub/mbox/log/a", {"x": 1}).code == "read_only_stream"
    assert call("DELETE", "hub/mbox/log/a").code == "read_only_stream"
    assert call("PUT", "copy-of-a", headers={"Stream-Forked-From": "hub/mbox/log/a"}).status == 201


def test_broadcast_and_topics(server: ServerProcess) -> None:
    one, two = registered(server, "@(cast/one)"), registered(server, "@(cast/two)")
    with actors(one, two):
        payload = {"type": "news", "data": 1, "pattern": "@(cast/*)", "excludeSelf": True}
        ack = one.answer(one.write("hub:broadcast", payload))
        assert (ack["type"], ack["payload"]["deliveredCount"]) == ("hub:broadcast_ack", 1)
        assert two.of("news")["correlationId"] == ack["correlationId"]
        assert code(one.ask("hub:broadcast", {})) == "invalid_request"
        subscribed = two.ask("hub:subscribe", {"topic": "cast/+"})
        assert subscribed["type"] == "hub:subscribed"
        published = one.answer(one.write("hub:publish", {"topic": "cast/x", "type": "t", "data": 1}))
        assert published["payload"]["subscriberCount"] == 1
        assert two.of("t")["metadata"]["topic"] == "cast/x"
        gone = two.ask("hub:unsubscribe", {"subscriptionId": subscribed["payload"]["subscriptionId"]})
        assert gone["type"] == "hub:unsubscribed"
        assert code(two.ask("hub:subscribe", {})) == "invalid_request"
        assert code(two.ask("hub:unsubscribe", {})) == "invalid_request"
        assert code(two.ask("hub:publish", {"topic": "a/#", "type": "t"})) == "invalid_request"


def test_mailbox_commands_stats_and_metrics(server: ServerProcess) -> None:
    actor = registered(server, "@(box/a)", words=["mailbox"], durable=True, commit="manual")
    sender = registered(server, "@(box/s)")
    with actors(actor, sender):
        for number in range(3):
            sender.write("hub:send", {"to": "@(box/a)", "type": "t", "data": number})
        frames = [actor.of("t") for _ in range(3)]
        assert [frame["payload"] for frame in frames] == [0, 1, 2]
        page = actor.ask("hub:mailbox_read", {"actorAddress": "@(box/a)"})["payload"]
        assert [one["message"]["id"] for one in page["messages"]] == [frame["id"] for frame in frames]
        offset = frames[1]["metadata"]["mailbox"]["offset"]
        done = actor.ask("hub:mailbox_commit", {"actorAddress": "@(box/a)", "offset": offset})
        assert (done["type"], done["payload"]["lag"]) == ("hub:mailbox_committed", 1)
        assert code(actor.ask("hub:mailbox_commit", {"actorAddress": "@(box/a)"})) == "invalid_request"
        assert (
            code(actor.ask("hub:mailbox_read", {"actorAddress": "@(box/a)", "offset": "x"}))
            == "invalid_offset"
        )
        stats = actor.ask("hub:queue_stats")["payload"]
        assert (stats["inFlight"], stats["mailboxLag"]) == (1, 1)
        assert actor.ask("hub:metrics")["type"] == "hub:metrics_response"


def test_a_lost_connection_can_be_resumed(server: ServerProcess) -> None:
    actor = Actor(server, "@(back/a)", words=["resume"])
    actor.register()
    sender = registered(server, "@(back/s)")
    actor.cut()
    with actors(sender):
        eventually(
            lambda: sender.ask("hub:discover", {"pattern": "@(back/a)"})["payload"]["actors"],
            lambda found: found[0]["online"] is False,
        )
        sender.write("hub:send", {"to": "@(back/a)", "type": "t", "data": 1})
        again = Actor(server, "@(back/a)", words=["resume"], resume=actor.connected["payload"]["resumeToken"])
        with actors(again):
            assert again.connected["payload"]["resumed"] is True
            assert again.connected["payload"]["sessionId"] == actor.connected["payload"]["sessionId"]
            assert again.of("t")["payload"] == 1


def test_single_messages_over_http(server: ServerProcess) -> None:
    call = Caller(server)
    actor = registered(server, "@(http/a)")

    def post(kind: str, payload: Any, **more: Any) -> Any:
        frame = {
            "id": f"http-{kind}-{now_ms()}",
            "from": "@(http/client)",
            "type": kind,
            "timestamp": now_ms(),
            "payload": payload,
            **more,
        }
        return call("POST", "/hub/messages", frame)

    with actors(actor):
        told = post("hub:send", {"to": "@(http/a)", "type": "t", "data": 1})
        assert (told.status, told.raw) == (202, b"")
        assert actor.of("t")["from"] == "@(http/client)"
        asked = post("hub:send", {"to": "@(http/a)", "type": "t", "ack": "accepted"}, pattern="ask")
        assert asked.body["payload"]["status"] == "accepted"
        assert post("hub:send", {"to": "@(http/b)", "type": "t"}, pattern="ask").code == "unknown_actor"
        found = post("hub:discover", {"pattern": "@(http/*)"}).body
        assert [one["address"] for one in found["payload"]["actors"]] == ["@(http/a)"]
        assert post("hub:publish", {"topic": "x", "type": "t"}).body["type"] == "hub:published"
        ack = post("hub:broadcast", {"type": "t", "pattern": "@(http/*)"}).body
        assert ack["payload"]["deliveredCount"] == 1
        read = post("hub:mailbox_read", {"actorAddress": "@(http/a)", "offset": "-1"}).body["payload"]
        assert len(read["messages"]) == 1
        commit = {"actorAddress": "@(http/a)", "offset": read["nextOffset"]}
        assert post("hub:mailbox_commit", commit).body["type"] == "hub:mailbox_committed"
        assert (
            post("hub:register", {"actorAddress": "@(http/c)", "capabilities": ["x"]}).code == "unknown_type"
        )
    assert call("POST", "/hub/messages", b"nonsense").code == "invalid_message"
    assert call("GET", "/hub/messages").status == 405


def test_the_hub_is_counted(server: ServerProcess) -> None:
    text = Caller(server)("GET", "/metrics").raw.decode()
    assert "tailrace_hub_sessions" in text
    assert 'tailrace_hub_messages_total{kind="send",result="delivered"}' in text
