"""Promises of the hub that hold whatever everybody does: bounds of memory, secrets, traces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.hub_world import World
from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.hub import decide
from tailrace.hub.session import Session
from tailrace.hub.state import OVER_LIMIT_MESSAGES_MAX, HubOptions

A, B, C = "@(t/a)", "@(t/b)", "@(t/c)"
SMALL = Limits(hub_pause_bytes=2000, hub_outbound_bytes=4000, hub_pause_messages=20, hub_outbound_messages=40)
LARGEST = 1500

acts = st.one_of(
    st.tuples(st.just("send"), st.sampled_from([A, C]), st.integers(1, 1000)),
    st.tuples(st.just("ask"), st.sampled_from([A, C]), st.integers(1, 1000)),
    st.tuples(st.just("broadcast"), st.sampled_from([A, C]), st.integers(1, 1000)),
    st.tuples(st.just("nonsense"), st.just(B), st.just(0)),
    st.tuples(st.just("take"), st.just(B), st.integers(0, 5000)),
)


class Slow(World):
    """One of the actors takes only so much; what it was sent beyond that waits in its connection."""

    def __init__(self) -> None:
        super().__init__(limits=SMALL)
        self.slow = self.actor(B, "delivery-notices")
        self.sent_bytes = self.taken_bytes = 0
        self.looked = 0

    def look(self) -> int:
        """The bytes that the hub holds for it."""
        frames = self.said[self.slow]
        for frame in frames[self.looked :]:
            held = self.sent_bytes - self.taken_bytes
            assert frame["type"] != "n" or held <= SMALL.hub_outbound_bytes, "nothing more fits"
            self.sent_bytes += len(json.dumps(frame))
        self.looked = len(frames)
        held = self.unsent[self.slow] = self.sent_bytes - self.taken_bytes
        return held

    def take(self, size: int) -> None:
        self.taken_bytes = min(self.sent_bytes, self.taken_bytes + size)
        self.look()
        self.run(decide.on_drained(self.hub, self.slow, self.now))


@settings(max_examples=60, deadline=None)
@given(program=st.lists(acts, max_size=120))
def test_h35_h36_h37_what_is_held_for_one_connection_is_bounded(program: list[tuple[str, str, int]]) -> None:
    world = Slow()
    others: dict[str, Session] = {A: world.actor(A), C: world.actor(C)}
    routed = 0
    for kind, name, size in program:
        if kind == "take":
            world.take(size)
            continue
        payload = {"to": B, "type": "n", "data": "x" * size}
        if kind == "nonsense":
            world.say(world.slow, "hub:nonsense")
        elif kind == "broadcast":
            world.say(others[name], "hub:broadcast", {"type": "n", "data": "x" * size, "pattern": "t/b"})
        else:
            world.say(others[name], "hub:send", payload, pattern="ask" if kind == "ask" else "tell")
        routed += kind != "nonsense"
        bound = SMALL.hub_outbound_bytes + LARGEST + (OVER_LIMIT_MESSAGES_MAX + 1) * LARGEST
        assert world.look() <= bound
    world.take(world.sent_bytes)
    if not world.slow.alive:
        return  # it let too many answers lie
    frames = world.said[world.slow]
    heard = sum(frame["type"] == "n" for frame in frames)
    dropped = sum(frame["payload"]["count"] for frame in frames if frame["type"] == "hub:dropped")
    refused = sum(
        frame["payload"].get("code") == "rate_limited"
        for session in others.values()
        for frame in world.said[session]
    )
    assert heard + dropped + refused == routed, "what was not heard was told"
    for session in others.values():
        turns = [
            frame["type"] for frame in world.said[session] if frame["type"] in ("hub:pause", "hub:resume")
        ]
        assert turns.count("hub:pause") == turns.count("hub:resume"), "every pause ends"


def test_h11_secrets_stay_with_those_who_have_them() -> None:
    """Of tokens, renewal tokens and resume tokens nothing is in a stream, or in what others are sent."""

    def verify(token: str) -> Identity:
        if not token.startswith("good-"):
            raise TailraceError("unauthorized", "no good")
        return Identity(sub=token[5:], scopes=frozenset(), actor_id=token[5:])

    world = World(options=HubOptions(verify=verify, trace="all"))
    sessions: list[Session] = []
    secrets: list[str] = []
    for name in ("t/a", "t/b"):
        session = world.connect(f"@({name})", "resume", "mailbox", authToken=f"good-{name}")
        world.say(
            session, "hub:register", {"capabilities": ["x"], "durable": True, "actorAddress": f"@({name})"}
        )
        said = world.taken(session)
        secrets += [f"good-{name}", said[0]["payload"]["resumeToken"], said[1]["payload"]["renewalToken"]]
        sessions.append(session)
    one, other = sessions
    leaked: dict[str, Any] = {"authToken": secrets[0], "renewalToken": secrets[2], "resumeToken": secrets[1]}
    leaked |= {"nonce": "n-secret", "kept": "this is the sender's own"}
    for kind, payload in (
        ("hub:send", {"to": B, "type": "n"}),
        ("hub:send", {"to": "@(t/gone)", "type": "n"}),
        ("hub:publish", {"topic": "a", "type": "n", "durable": True}),
    ):
        world.say(one, kind, payload, frm=A, metadata=leaked)
    world.say(one, "hub:refresh_token", None, metadata={"authToken": "bad-token-secret", "nonce": "n-secret"})
    world.wait(2000)
    streams = b"".join(body for entries in world.streams.entries.values() for _, body in entries).decode()
    told = json.dumps(world.said[other])
    assert "this is the sender's own" in streams
    for secret in (*secrets, "n-secret", "bad-token-secret"):
        assert secret not in streams, secret
        assert secret not in told, secret


@pytest.mark.parametrize("mode", ["off", "durable", "all"])
def test_h46_tracing_changes_nothing_that_anybody_is_told(mode: str) -> None:
    def played(trace: str) -> tuple[World, list[Any]]:
        world = World(options=HubOptions(trace=trace))
        sender, plain, kept = world.actor(A), world.actor(B), world.actor(C, durable=True)
        for number in range(5):
            for to in (B, C, "@(t/gone)"):
                world.say(sender, "hub:send", {"to": to, "type": "n", "data": number}, id=f"{to}{number}")
        world.wait(2000)
        told = [
            [(frame["type"], frame["payload"] if frame["type"] == "n" else None) for frame in world.said[one]]
            for one in (sender, plain, kept)
        ]
        return world, told

    world, told = played(mode)
    assert told == played("off")[1]
    events = [(one["ev"], one["to"]) for one in world.streams.bodies("hub/trace")]
    expected = {"off": 0, "durable": 5, "all": 5}[mode]
    assert events.count(("accepted", C)) == expected, "nothing that was accepted is missing"
    assert events.count(("delivered", B)) == (5 if mode == "all" else 0)
