"""One sender, many receivers, real sockets: copies of one turn are written together, in order, to each."""

from __future__ import annotations

import json
from typing import Any

from support.hub_client import HUB, Actor, now_ms
from support.server import ServerProcess

TOPIC = "many/all"
RECEIVERS = 25
ROUNDS = 15


def _frame(sender: str, number: int, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": f"{sender}-{number}",
        "from": sender,
        "to": HUB,
        "type": kind,
        "payload": payload,
        "pattern": "tell",
        "correlationId": None,
        "timestamp": now_ms(),
        "metadata": {},
        "ttl": None,
        "signature": None,
    }


def _all_of_it(sender: str) -> list[dict[str, Any]]:
    """Broadcasts, publications, plain and kept sends in turn; each says which it is."""
    frames: list[dict[str, Any]] = []
    for number in range(0, 4 * ROUNDS, 4):
        said = {"type": "one"}
        to_all = {"excludeSelf": True, "pattern": "@(many/r*)"}
        kept = {"to": "@(many/kept)", "ack": "accepted"}
        frames += [
            _frame(sender, number, "hub:broadcast", {**said, "data": number, **to_all}),
            _frame(sender, number + 1, "hub:publish", {"topic": TOPIC, **said, "data": number + 1}),
            _frame(sender, number + 2, "hub:send", {"to": "@(many/r0)", **said, "data": number + 2}),
            _frame(sender, number + 3, "hub:send", {**said, "data": number + 3, **kept}),
        ]
    return frames


def _receiver(server: ServerProcess, place: int) -> Actor:
    actor = Actor(server, f"@(many/r{place})")
    actor.register()
    actor.ask("hub:subscribe", {"topic": TOPIC})
    return actor


def test_h21_each_receiver_gets_its_copies_in_order_though_others_leave(server: ServerProcess) -> None:
    receivers = [_receiver(server, place) for place in range(RECEIVERS)]
    leaving = [_receiver(server, RECEIVERS + place) for place in range(3)]
    kept = Actor(server, "@(many/kept)")
    kept.register(durable=True)
    kept.cut()
    sender = Actor(server, "@(many/sender)")
    frames = _all_of_it("@(many/sender)")
    for place, frame in enumerate(frames):
        sender.socket.send(json.dumps(frame, separators=(",", ":")))
        if place % 20 == 10 and leaving:
            leaving.pop().cut()
    answers = [sender.answer(frame["id"]) for frame in frames if frame["payload"].get("to") != "@(many/r0)"]
    assert {one["type"] for one in answers} == {"hub:broadcast_ack", "hub:published", "hub:delivery_ack"}
    for place, actor in enumerate(receivers):
        heard = [one["payload"] for one in actor.quiet() if one["type"] == "one"]
        broadcasts_and_sends = [number for number in heard if number % 4 != 1]
        expected = [
            number for number in range(4 * ROUNDS) if number % 4 == 0 or (number % 4 == 2 and not place)
        ]
        assert broadcasts_and_sends == expected
        assert [number for number in heard if number % 4 == 1] == list(range(1, 4 * ROUNDS, 4))
    back = Actor(server, "@(many/kept)")
    back.register(durable=True)
    stored = [back.of("one")["payload"] for _ in range(ROUNDS)]
    assert stored == list(range(3, 4 * ROUNDS, 4))
    for actor in (*receivers, sender, back):
        actor.close()
