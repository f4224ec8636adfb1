"""Every message type of the protocol, once as it should be and once refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from support.hub_world import World
from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.hub.decide import HANDLERS
from tailrace.hub.session import Session
from tailrace.hub.state import HubOptions

A, B = "@(t/a)", "@(t/b)"


class Room:
    """An actor that asks, another one, and what each test needs of what happened before."""

    def __init__(self) -> None:
        self.world = World()
        self.one = self.world.actor(A, "mailbox", durable=True, commit="manual")
        self.other = self.world.actor(B)

    def renewal(self) -> str:
        return self.world.hub.registry.by_path["t/a"].renewal

    def question(self) -> str:
        """The id of a question that waits for the actor's answer."""
        payload = {"to": A, "type": "ask", "data": 1, "expectReply": True}
        self.world.say(self.other, "hub:send", payload)
        return next(frame["id"] for frame in self.world.taken(self.one) if frame["type"] == "ask")

    def delivered(self) -> str:
        """The offset of a message that the actor has not committed."""
        self.world.say(self.other, "hub:send", {"to": A, "type": "t"}, pattern="tell")
        found = [frame for frame in self.world.taken(self.one) if frame["type"] == "t"]
        return found[-1]["metadata"]["mailbox"]["offset"]


class Case(NamedTuple):
    answer: str
    payload: Callable[[Room], dict[str, Any]]
    refused: Callable[[Room], dict[str, Any]]
    code: str


def plain(**payload: Any) -> Callable[[Room], dict[str, Any]]:
    return lambda _: payload


NO_ADDRESS = plain(actorAddress="nobody")
CASES: dict[str, Case] = {
    "hub:register": Case(
        "hub:registered", plain(actorAddress="@(t/c)", capabilities=["x"]), NO_ADDRESS, "invalid_request"
    ),
    "hub:renew": Case(
        "hub:renewed", lambda room: {"renewalToken": room.renewal()}, plain(renewalToken="x"), "invalid_token"
    ),
    "hub:unregister": Case(
        "hub:unregistered", plain(actorAddress=A), plain(actorAddress="@(t/gone)"), "unknown_actor"
    ),
    "hub:discover": Case("hub:discovered", plain(pattern="t/*"), plain(pattern="*" * 9), "invalid_request"),
    "hub:list_actors": Case("hub:actor_list", plain(limit=1), plain(limit="many"), "invalid_request"),
    "hub:presence": Case("hub:presence", plain(action="watch"), plain(action="stare"), "invalid_request"),
    "hub:send": Case(
        "hub:delivery_ack", plain(to=B, type="t"), plain(to="@(t/gone)", type="t"), "unknown_actor"
    ),
    "hub:broadcast": Case("hub:broadcast_ack", plain(type="t"), plain(data=1), "invalid_request"),
    "hub:subscribe": Case("hub:subscribed", plain(topic="a/+"), plain(topic="a/b#"), "invalid_request"),
    "hub:unsubscribe": Case("hub:unsubscribed", plain(topic="a"), plain(), "invalid_request"),
    "hub:publish": Case(
        "hub:published", plain(topic="a", type="t"), plain(topic="a/#", type="t"), "invalid_request"
    ),
    "hub:mailbox_read": Case(
        "hub:mailbox_messages", plain(actorAddress=A), plain(actorAddress=A, offset="x"), "invalid_offset"
    ),
    "hub:mailbox_commit": Case(
        "hub:mailbox_committed",
        lambda room: {"actorAddress": A, "offset": room.delivered()},
        lambda room: {"actorAddress": A, "offset": room.world.streams.offset("", 99)},
        "invalid_offset",
    ),
    "hub:queue_stats": Case("hub:queue_stats_response", plain(), plain(), "rate_limited"),
    "hub:metrics": Case("hub:metrics_response", plain(), plain(), "rate_limited"),
    "hub:heartbeat": Case(
        "hub:heartbeat_ack", plain(timestamp=1), plain(timestamp="late"), "invalid_request"
    ),
}
# Those with a test of their own below: they need more than one session, or end it.
APART = {"hub:reply", "hub:refresh_token", "hub:disconnect"}


def test_the_table_has_every_type() -> None:
    assert set(CASES) | APART == set(HANDLERS)


@pytest.mark.parametrize("kind", CASES)
def test_a_message_is_answered(kind: str) -> None:
    room, case = Room(), CASES[kind]
    answer = room.world.ask(room.one, kind, case.payload(room))
    assert answer["type"] == case.answer, answer
    assert answer["from"] == room.world.hub.options.address
    assert answer["to"] == A


@pytest.mark.parametrize("kind", CASES)
def test_a_message_is_refused_with_its_id_and_a_code(kind: str) -> None:
    room, case = Room(), CASES[kind]
    if case.code == "rate_limited":
        for _ in range(200):
            room.world.say(room.one, kind, {})
    answer = room.world.ask(room.one, kind, case.refused(room))
    assert answer["payload"]["code"] == case.code, answer
    assert answer["payload"]["message"]


def test_a_reply_is_passed_on_and_one_to_nothing_is_refused() -> None:
    room = Room()
    room.world.say(room.one, "hub:reply", {"data": 2}, correlationId=room.question(), pattern="tell")
    assert [frame["type"] for frame in room.world.taken(room.other)] == ["hub:reply"]
    refused = room.world.ask(room.one, "hub:reply", {"data": 2}, correlationId="nothing")
    assert refused["payload"]["code"] == "unknown_correlation"


def test_a_token_is_refreshed_and_a_bad_one_is_refused() -> None:
    def verify(token: str) -> Identity:
        if token != "good":
            raise TailraceError("unauthorized", "no good")
        return Identity(sub="t/a", scopes=frozenset(), actor_id="t/a")

    world = World(options=HubOptions(verify=verify))
    session = world.connect(A, authToken="good")
    assert world.taken(session)[0]["type"] == "hub:connected"
    refused = world.ask(session, "hub:refresh_token", None, metadata={"authToken": "bad"})
    assert refused["payload"]["code"] == "invalid_token"
    answer = world.ask(session, "hub:refresh_token", None, metadata={"authToken": "good"})
    assert answer["type"] == "hub:token_refreshed"


def test_a_session_begins_and_ends_and_is_refused_with_another_version() -> None:
    world = World()
    session = world.connect(A)
    assert world.taken(session)[0]["type"] == "hub:connected"
    assert world.ask(session, "hub:disconnect")["payload"]["acknowledged"] is True
    assert world.closes[session] == 1000
    other: Session = world.open()
    refused = world.ask(
        other, "hub:connect", None, metadata={"protocolVersion": "7.0.0", "capabilities": ["x"]}
    )
    assert refused["payload"]["code"] == "version_mismatch"
