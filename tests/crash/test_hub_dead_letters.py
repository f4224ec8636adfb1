"""Dead letters on a slow, full or killed disk: one for each message that is not delivered, never two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crash.faults import JOURNAL, SYNC, Disk
from support.calls import Caller, eventually
from support.hub_client import Actor, Frame
from support.server import ServerProcess

A, B = "@(t/a)", "@(t/b)"
LETTERS = "hub/dead-letters"
SLOW_US = 5000  # the server notices, and syncs on a thread
PAUSE_US = 4_000_000
# A message is delivered once: when its commit takes longer than a second, it is due to be dead-lettered.
IMPATIENT: dict[str, Any] = {"durable": True, "commit": "manual", "ackTimeout": 1, "maxDeliver": 1}


class Hub:
    def __init__(self, directory: Path, disk: Disk) -> None:
        self.disk = disk
        self.server = ServerProcess(directory / "data", env=disk.env).start()
        self.call = Caller(self.server)
        self.sender = Actor(self.server, A)

    def receiver(self, **options: Any) -> Actor:
        actor = Actor(self.server, B, words=["mailbox"])
        actor.register(**options)
        return actor

    def send(self, number: int, **more: Any) -> None:
        answer = self.sender.ask(
            "hub:send", {"to": B, "type": "n", "data": number, "ack": "accepted"}, **more
        )
        assert answer["type"] == "hub:delivery_ack", answer

    def kill(self) -> None:
        self.server.kill()
        self.server.start()

    def letters(self) -> list[tuple[str, int]]:
        reply = self.call("GET", f"{LETTERS}?offset=-1")
        if reply.status == 404:
            return []
        return [(letter["reason"], letter["message"]["payload"]) for letter in reply.body]


@pytest.fixture
def hub(tmp_path: Path, disk: Disk) -> Iterator[Hub]:
    started = Hub(tmp_path, disk)
    yield started
    started.server.kill()
    print(started.server.log)


def commit(frame: Frame, name: str) -> dict[str, Any]:
    offset = frame["metadata"]["mailbox"]["offset"]
    return {"actorAddress": B, name: [{"offset": offset}] if name == "reject" else [offset]}


def test_h18_a_reject_that_outlasts_the_ack_timeout_writes_one_letter(hub: Hub) -> None:
    receiver = hub.receiver(**IMPATIENT)
    hub.disk.delay(JOURNAL, SYNC, SLOW_US)
    hub.send(1)
    first = receiver.of("n")
    pause = hub.disk.delay(JOURNAL, SYNC, PAUSE_US, count=2)
    request = receiver.write("hub:mailbox_commit", commit(first, "reject"), pattern="ask")
    eventually(lambda: hub.disk.hits(pause), lambda hits: hits > 0)
    assert receiver.answer(request)["type"] == "hub:mailbox_committed"
    hub.disk.heal()
    # Everything that was decided meanwhile is durable before this message is.
    Actor(hub.server, "@(t/c)").register(durable=True)
    assert hub.letters() == [("rejected", 1)]
    hub.kill()
    assert hub.letters() == [("rejected", 1)]


def test_h18_a_message_that_expires_on_a_full_disk_gets_its_letter_when_there_is_room(hub: Hub) -> None:
    receiver = hub.receiver(durable=True, commit="manual", ackTimeout=1)
    hub.send(1, ttl=2000)
    receiver.of("n")
    hub.disk.fill_up()
    refused = hub.sender.ask("hub:send", {"to": B, "type": "n", "data": 2, "ack": "accepted"})
    assert refused["type"] == "hub:error", refused

    def in_flight() -> int:
        return receiver.ask("hub:queue_stats")["payload"]["inFlight"]

    eventually(in_flight, lambda left: left == 0)  # it was due again, and had expired
    assert hub.letters() == []
    hub.disk.heal()
    eventually(hub.letters, lambda found: found != [])
    assert hub.letters() == [("message_expired", 1)]
    hub.kill()
    again = hub.receiver(durable=True, commit="manual")
    assert again.quiet() == []
    assert hub.letters() == [("message_expired", 1)]
