"""What of the hub outlives a crash, and who may do what on a server with tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.calls import Caller
from support.hub_client import Actor, registered
from support.server import ServerProcess
from tailrace.auth import create_token
from tailrace.hub.errors import ERROR_TYPES

SECRET = "a-shared-secret-of-more-than-32-bytes!"


def test_mailboxes_registrations_and_subscriptions_outlive_a_crash(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data").start()
    try:
        actor = registered(server, "@(k/a)", words=["mailbox"], durable=True, commit="manual")
        plain, sender = registered(server, "@(k/plain)"), registered(server, "@(k/s)")
        subscriber = Actor(server, "@(k/sub)")
        subscriber.register()
        subscribed = subscriber.ask("hub:subscribe", {"topic": "k/#", "durable": True, "name": "n"})[
            "payload"
        ]
        for number in range(4):
            ack = sender.ask("hub:send", {"to": "@(k/a)", "type": "t", "data": number, "ack": "accepted"})
            assert ack["payload"]["status"] == "accepted"
        offset = [actor.of("t") for _ in range(4)][1]["metadata"]["mailbox"]["offset"]
        assert actor.ask("hub:mailbox_commit", {"actorAddress": "@(k/a)", "offset": offset})["type"] == (
            "hub:mailbox_committed"
        )
        sender.ask("hub:publish", {"topic": "k/1", "type": "p", "data": 1})
        assert subscriber.of("p")["payload"] == 1
        subscriber.ask("hub:disconnect")
        producer = {"producer": {"id": "w", "epoch": 0, "seq": 0}}
        sender.ask(
            "hub:send", {"to": "@(k/a)", "type": "t", "data": "once", "ack": "accepted"}, metadata=producer
        )
        news = {"topic": "k/1", "type": "p", "data": 2}
        sender.ask("hub:publish", news, id="news-2")
        versions = {
            one["address"]: one["version"]
            for one in sender.ask("hub:discover", {"pattern": "@(k/*)"})["payload"]["actors"]
        }
        server.kill()  # before the connections go: who leaves in time is no longer registered
        for client in (actor, plain, sender, subscriber):
            client.cut()
        server.start()
        sender = Actor(server, "@(k/s)")
        found = sender.ask("hub:discover", {"pattern": "@(k/*)"})["payload"]["actors"]
        assert {one["address"] for one in found} >= {"@(k/a)", "@(k/plain)", "@(k/s)"}
        assert [one["online"] for one in found] == [False] * len(found)
        again = sender.ask(
            "hub:send", {"to": "@(k/a)", "type": "t", "data": "once", "ack": "accepted"}, metadata=producer
        )
        assert again["payload"]["duplicate"] is True, "the sender is who it was, by its identity"
        assert sender.ask("hub:publish", news, id="news-2")["type"] == "hub:published"
        assert len(Caller(server)("GET", "hub/topic/k/1?offset=-1").body) == 2, "a repeat is known as one"
        back = Actor(server, "@(k/a)", words=["mailbox"])
        version = back.register(durable=True, commit="manual")["payload"]["version"]
        assert version > versions["@(k/a)"]
        frames = [back.of("t") for _ in range(3)]
        assert [frame["payload"] for frame in frames] == [2, 3, "once"]
        assert back.quiet() == []
        subscriber = Actor(server, "@(k/sub)")
        subscriber.register()
        taken_up = subscriber.ask("hub:subscribe", {"topic": "k/#", "durable": True, "name": "n"})["payload"]
        assert taken_up["subscriptionId"] == subscribed["subscriptionId"]
        assert subscriber.find(lambda frame: frame["type"] == "p" and frame["payload"] == 2)
        for client in (back, sender, subscriber):
            client.close()
    finally:
        server.stop()


@pytest.fixture
def guarded(tmp_path: Path) -> ServerProcess:
    policy = tmp_path / "hub.json"
    policy.write_text('{"actors":[{"match":"@(browser/*)","send":{"deny":["@(svc/admin)"]}}]}')
    env = {"TAILRACE_AUTH_JWT_SECRET": SECRET, "TAILRACE_HUB_POLICY": str(policy)}
    return ServerProcess(tmp_path / "data", env=env)


def test_tokens_and_rules_on_a_guarded_server(guarded: ServerProcess) -> None:
    server = guarded.start()

    def token(actor: str, *scopes: str) -> str:
        return create_token(SECRET, sub=actor, scopes=scopes)

    try:
        refused = Actor(server, "@(svc/a)")
        assert refused.connected["payload"]["code"] == "unauthorized"
        assert refused.closed() == 1008
        forged = Actor(
            server, "@(svc/a)", token=create_token("another-secret-of-more-than-32-bytes", sub="svc/a")
        )
        assert forged.connected["payload"]["code"] == "unauthorized"
        admin = registered(server, "@(svc/admin)", token=token("svc/admin", "read", "manage"), durable=True)
        browser = Actor(server, "@(svc/admin)", token=token("browser/1"))
        assert browser.connected["metadata"]["actorIdentity"] == "@(browser/1)"
        assert (
            browser.ask("hub:send", {"to": "@(svc/admin)", "type": "t"})["payload"]["code"] == "unauthorized"
        )
        taken = browser.ask("hub:register", {"actorAddress": "@(svc/admin)", "capabilities": ["x"]})
        assert taken["payload"]["code"] == "unauthorized"
        browser.address = "@(browser/1)"
        browser.register()
        sent = admin.ask("hub:send", {"to": "@(browser/1)", "type": "t"}, **{"from": "@(browser/1)"})
        assert sent["type"] == "hub:delivery_ack"
        assert browser.of("t")["from"] == "@(svc/admin)", "nobody is who they say they are"
        second = Actor(server, "@(browser/1)", token=token("browser/1"))
        assert browser.of("hub:disconnect")["payload"]["reason"] == "duplicate_connection"
        assert browser.closed() == 1000
        call = Caller(server)
        assert call("GET", "/hub/health").status == 200
        assert call("GET", "/hub/shards").status == 401
        assert call("POST", "/hub/messages", {}).status == 401
        reader = token("browser/1", "read")
        assert call("GET", "hub/mbox/svc/admin?offset=-1", token=reader).status == 403
        assert call("GET", "hub/audit?offset=-1", token=reader).status == 403
        audit = call("GET", "hub/audit?offset=-1", token=token("op", "manage")).body
        assert {"connect", "refuse", "denied", "register"} <= {entry["event"] for entry in audit}
        assert SECRET not in str(audit)
        second.close()
        admin.close()
    finally:
        server.stop()


def test_older_clients_find_the_hub_at_the_root_and_a_stopping_server_says_goodbye(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", env={"TAILRACE_HUB_ROOT": "yes"}).start()
    call = Caller(server)
    assert call("GET", "/health").body["service"] == "signal-hub"
    assert call("GET", "/").status == 404
    other = Actor(server, "@(stop/b)", path="/ws")
    assert other.connected["type"] == "hub:connected"
    other.close()
    actor = Actor(server, "@(stop/a)", path="/")
    actor.register()
    server.stop()
    assert actor.closed() == 1001
    told = actor.of("hub:disconnect")["payload"]
    assert told["reason"] == "server_shutdown"
    assert 0 <= told["reconnectAfter"] <= 30_000


def test_h37_whoever_does_not_read_for_a_while_misses_nothing_that_is_kept(tmp_path: Path) -> None:
    """More than any buffer on the way holds; others are served meanwhile."""
    server = ServerProcess(tmp_path / "data", env={"TAILRACE_HUB_BYTES_PER_S": "1GiB"}).start()
    try:
        kept, plain = registered(server, "@(slow/kept)", durable=True), registered(server, "@(slow/plain)")
        sender, other = registered(server, "@(slow/s)"), registered(server, "@(slow/other)")
        for number in range(50):
            data = {"n": number, "x": "x" * 500_000}
            sender.write("hub:send", {"to": "@(slow/kept)", "type": "t", "data": data})
            sender.write("hub:send", {"to": "@(slow/plain)", "type": "t", "data": data})
        told = [frame["type"] for frame in sender.quiet()]
        assert "hub:pause" in told
        assert other.ask("hub:send", {"to": "@(slow/s)", "type": "hello"})["type"] == "hub:delivery_ack"
        assert [kept.of("t")["payload"]["n"] for _ in range(50)] == list(range(50))
        heard = 0
        dropped = None
        while dropped is None:
            frame = plain.take()
            heard += frame["type"] == "t"
            dropped = frame["payload"]["details"] if frame["type"] == "hub:error" else None
        refused = sum(kind in ERROR_TYPES for kind in told)  # it went on although it was told to pause
        assert heard + dropped["count"] + refused == 50
        for client in (kept, plain, sender, other):
            client.close()
    finally:
        server.stop()
