"""SIGKILL midway in a broadcast to more than one batch of recipients, against a real server.

Every durable recipient gets the message, and not twice without being told so. A sender that repeats it adds
nothing.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from support.calls import Caller, eventually
from support.hub_client import Actor, Frame
from support.server import ServerProcess

BROADCAST_STEPS = ("hub.before_batch", "hub.before_broadcast_ack")
# The 230 recipients are three batches.
FAILPOINTS = (
    "hub.before_message:1",
    "hub.after_message:1",
    *(f"hub.before_batch:{number}" for number in (1, 2, 3)),
    "hub.before_broadcast_ack:1",
)
ONLINE, AWAY, PLAIN = 120, 100, 10
NEWS = {"type": "news", "data": {"n": 1}, "excludeSelf": True}
DURABLE: dict[str, Any] = {"durable": True, "ttlSeconds": 3600}


def come(server: ServerProcess, address: str, **options: Any) -> Actor:
    actor = Actor(server, address, words=["mailbox"])
    actor.register(**options)
    return actor


def rest_of(actor: Actor) -> list[Frame]:
    """What it was sent before the server died."""
    found: list[Frame] = []
    with suppress(ConnectionClosed, OSError):
        while True:
            found.append(actor.take())
    return found


def news(frames: list[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame["type"] == "news"]


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_h18_h20_h39_a_broadcast_survives_a_crash_midway_for_durable_recipients(
    tmp_path: Path, failpoint: str
) -> None:
    env = {"TAILRACE_FAILPOINT": failpoint, "TAILRACE_HUB_CONNECTS_PER_S": "0"}
    env |= {"TAILRACE_HUB_REGISTERS_PER_S": "10000"}
    server = ServerProcess(tmp_path / "data", env=env).start()
    try:
        online = {f"@(on/{number})": DURABLE for number in range(ONLINE)}
        online |= {f"@(plain/{number})": {} for number in range(PLAIN)}
        away = [f"@(away/{number})" for number in range(AWAY)]
        for address in away:
            come(server, address, **DURABLE).close()
        actors = {address: come(server, address, **options) for address, options in online.items()}
        sender = come(server, "@(cast/sender)")
        call = Caller(server)
        found = {"id": "d", "type": "hub:discover", "timestamp": 1, "payload": {"pattern": "away/*"}}
        eventually(
            lambda: call("POST", "/hub/messages", found).body["payload"]["actors"],
            lambda listed: len(listed) == AWAY and not any(one["online"] for one in listed),
        )

        request = sender.write("hub:broadcast", NEWS)
        server.wait_exit()
        assert not any(frame["type"] == "hub:broadcast_ack" for frame in rest_of(sender))
        before = {address: news(rest_of(actor)) for address, actor in actors.items()}

        del server.env["TAILRACE_FAILPOINT"]
        server.start()
        sender = come(server, "@(cast/sender)")
        ack = sender.answer(sender.write("hub:broadcast", NEWS, id=request))
        assert ack["type"] == "hub:broadcast_ack"
        for address in (*away, *(address for address, options in online.items() if options)):
            actor = come(server, address, **DURABLE)
            again = news(actor.quiet())
            if not before.get(address) and not again:
                again = [actor.of("news")]  # it is pushed when it was read
            assert len(again) <= 1, address
            for frame in again:
                assert frame["correlationId"] == request
                assert frame["metadata"].get("redelivered") or not before.get(address), "heard twice"
            actor.close()
        entries = Caller(server)("GET", "hub/broadcast/0?offset=-1").body
        assert [entry["message"]["correlationId"] for entry in entries] == [request]
        sender.close()
    finally:
        server.stop()
