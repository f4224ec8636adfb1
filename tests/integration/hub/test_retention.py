"""Old entries of the hub's streams leave the disk, on a server that seals at once and keeps for seconds."""

from __future__ import annotations

import pytest

from conftest import StartServer
from support.calls import Caller, eventually
from support.hub_client import Actor, registered
from support.sealing import SEALING_ENV
from support.server import ServerProcess

SHORT = {
    "TAILRACE_HUB_SWEEP_MS": "500",
    "TAILRACE_HUB_MAILBOX_KEPT_MS": "1000",
    "TAILRACE_HUB_MAILBOX_MS": "600000",
    "TAILRACE_HUB_TOPIC_MS": "1000",
}


@pytest.fixture
def short_lived(start_server: StartServer) -> ServerProcess:
    return start_server(env={**SEALING_ENV, **SHORT})


def shown(server: ServerProcess, stream: str) -> list[int]:
    return [entry["payload"] for entry in Caller(server)("GET", f"{stream}?offset=-1").body]


def test_what_everybody_has_read_goes_and_what_somebody_has_not_stays(short_lived: ServerProcess) -> None:
    sender = registered(short_lived, "@(keep/s)")
    owner = registered(short_lived, "@(keep/a)", words=["mailbox"], durable=True, commit="manual")
    for address in ("@(keep/one)", "@(keep/two)"):
        subscriber = Actor(short_lived, address)
        subscriber.register()
        subscriber.ask("hub:subscribe", {"topic": "kept", "durable": True})
        subscriber.ask("hub:disconnect")
    offsets: list[str] = []
    for number in range(12):
        ack = sender.ask("hub:send", {"to": "@(keep/a)", "type": "t", "data": number, "ack": "accepted"})
        offsets.append(ack["payload"]["offset"])
        sender.ask("hub:publish", {"topic": "kept", "type": "p", "data": number})
    [owner.of("t") for _ in range(12)]
    owner.ask("hub:mailbox_commit", {"actorAddress": "@(keep/a)", "offset": offsets[5]})
    reader = Actor(short_lived, "@(keep/one)")
    reader.register()
    reader.ask("hub:subscribe", {"topic": "kept", "durable": True})
    assert [reader.of("p")["payload"] for _ in range(12)] == list(range(12))
    # Whole segments go, so what is left begins a little before what has to stay.
    left = eventually(
        lambda: shown(short_lived, "hub/mbox/keep/a"), lambda found: 6 <= len(found) <= 9, patience_s=60
    )
    assert left == list(range(12 - len(left), 12))
    assert shown(short_lived, "hub/topic/kept") == list(range(12)), "one subscriber has read nothing"
    late = Actor(short_lived, "@(keep/two)")
    late.register()
    late.ask("hub:subscribe", {"topic": "kept", "durable": True})
    assert [late.of("p")["payload"] for _ in range(12)] == list(range(12))
    eventually(lambda: shown(short_lived, "hub/topic/kept"), lambda found: len(found) <= 3, patience_s=60)
    for actor in (sender, owner, reader, late):
        actor.close()
