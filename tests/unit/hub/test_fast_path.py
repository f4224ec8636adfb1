"""Plain messages go a shorter way; nobody can tell by what comes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.hub_world import HUB, START_MS, World
from tailrace.common.limits import Limits
from tailrace.hub import decide
from tailrace.hub.effects import Send

A, B, C, GONE = "@(t/a)", "@(t/b)", "@(t/c)", "@(t/gone)"


def plain(number: int, **more: Any) -> dict[str, Any]:
    frame: dict[str, Any] = {
        "id": f"m-{number}",
        "from": A,
        "to": HUB,
        "type": "hub:send",
        "payload": {"to": B, "type": "t", "data": {"n": number}},
        "pattern": "tell",
        "correlationId": None,
        "timestamp": START_MS,
        "metadata": {},
        "ttl": None,
        "signature": None,
    }
    return frame | more


def compact(frame: Any) -> bytes:
    return json.dumps(frame, separators=(",", ":"), ensure_ascii=False).encode()


def short_ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each frame that could go the short way did."""
    taken: list[bool] = []
    relay = decide.relay_plain_send

    def noted(*given: Any) -> Send | None:
        sent = relay(*given)
        taken.append(sent is not None)
        return sent

    monkeypatch.setattr(decide, "relay_plain_send", noted)
    return taken


def test_a_plain_tell_goes_the_short_way_byte_for_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = short_ways(monkeypatch)
    world = World()
    sender, receiver = world.actor(A), world.actor(B)
    data = b'{"big":1e400, "a":1,"a":2,"t":"\\u00e9"}'
    frame = compact(plain(1)).replace(b'{"n":1}', data)
    world.run(decide.decide(world.hub, sender, frame, world.now))
    assert taken == [True]
    assert data in world.raw[-1]
    (copy,) = world.taken(receiver)
    assert list(copy) == list(plain(1))
    assert (copy["from"], copy["to"], copy["type"]) == (A, B, "t")
    own = {"forwarded": True, "via": HUB, "originalFrom": A, "originalMessageId": "m-1"}
    assert copy["metadata"] == own
    world.run(decide.decide(world.hub, sender, frame, world.now))
    assert (taken, world.taken(receiver)) == ([True, False], []), "a repeat is known"


ODD: list[Callable[[bytes], bytes]] = [
    lambda frame: frame.replace(b'"pattern":"tell"', b'"pattern":"tell","pattern":"tell"'),
    lambda frame: frame.replace(b',"signature":null', b',"pattern":"tell"'),
    lambda frame: frame.replace(b'"metadata":{}', b'"metadata":{"traceId":"x"}'),
    lambda frame: frame.replace(b'"metadata":{}', b'"metadata":{ }'),
    lambda frame: frame.replace(b'"type":"t"', b'"type":"t\\n"'),
    lambda frame: frame.replace(b'"type":"t"', '"type":"ü"'.encode()),
    lambda frame: frame.replace(b'"type":"t"', b'"type":"t","type":"t"'),
    lambda frame: frame.replace(b'{"n":1}', b'"\xff"'),
    lambda frame: frame.replace(b'{"n":1}', b"[" * 70 + b"]" * 70),
    lambda frame: frame.replace(b'{"n":1}', b'1,"ack":"delivered"'),
    lambda frame: frame.replace(b'"ttl":null', b'"ttl":5'),
    lambda frame: frame.replace(b"@(t/b)", b"@(t/_b)"),
    lambda frame: frame.replace(b"@(t/b)", b"@(t/gone)"),
    lambda frame: frame.replace(b"@(t/b)", b"@(t/kept)"),
    lambda frame: frame.replace(b"@(t/a)", b"@(t/b)"),
    lambda frame: frame.replace(b'"id":"m-1"', b'"id":""'),
    lambda frame: frame + b" ",
    lambda frame: frame[:-1],
    lambda frame: frame.replace(b"{", b"{ ", 1),
    lambda frame: frame.replace(b'"correlationId":null', b'"correlationId":"c"'),
    lambda frame: frame.replace(b'"pattern":"tell"', b'"pattern":"ask"'),
]


def outcome(world: World, frames: list[bytes]) -> tuple[Any, ...]:
    """Everything that comes of some frames, but for ids that are made anew."""
    sender, receiver = world.actor(A), world.actor(B)
    world.actor("@(t/kept)", durable=True)
    other = world.actor(C)
    for frame in frames:
        world.run(decide.decide(world.hub, sender, frame, world.now))
    said = [world.taken(session) for session in (sender, receiver, other)]
    for copies in said:
        for copy in copies:
            del copy["id"]
    letters = [(one["reason"], one["message"]["payload"]) for one in world.streams.bodies("hub/dead-letters")]
    stored = [entry["payload"] for entry in world.streams.bodies("hub/mbox/t/kept")]
    counted = [(one.received, one.delivered, one.errors) for one in (sender, receiver)]
    return said, letters, stored, dict(world.hub.counts), counted


def both_ways(monkeypatch: pytest.MonkeyPatch, frames: list[bytes], limits: Limits) -> None:
    short = outcome(World(limits=limits), frames)
    for step in ("relay_plain_send", "parse_plain_send"):
        with monkeypatch.context() as only_long:
            only_long.setattr(decide, step, lambda *_: None)
            assert short == outcome(World(limits=limits), frames)


@pytest.mark.parametrize("place", range(len(ODD)))
def test_what_is_not_quite_plain_goes_the_long_way(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    taken = short_ways(monkeypatch)
    frame = ODD[place](compact(plain(1)))
    assert frame != compact(plain(1))
    outcome(World(), [frame])
    assert not any(taken)


payloads = st.fixed_dictionaries(
    {"to": st.sampled_from([A, B, C, GONE, "@(t/kept)", "x"]), "type": st.sampled_from(["t", "ü", '"', ""])},
    optional={
        "data": st.one_of(st.none(), st.text(), st.lists(st.integers())),
        "ack": st.sampled_from(["none", "accepted", "accepted", None]),
    },
)
frames = st.builds(
    plain,
    st.integers(0, 5),
    **{"from": st.sampled_from([A, B, None]), "to": st.sampled_from([HUB, B, None])},
    payload=payloads,
    pattern=st.sampled_from(["tell", "tell", "ask"]),
    correlationId=st.sampled_from([None, None, "c"]),
    metadata=st.sampled_from([{}, {}, {"traceId": "x"}, {"via": "me"}, None]),
    ttl=st.sampled_from([None, None, 1000]),
)


@given(st.lists(frames, max_size=12), st.sampled_from([2, 1000]))
def test_both_ways_come_to_the_same(sent: list[dict[str, Any]], sends_per_s: int) -> None:
    with pytest.MonkeyPatch.context() as patching:
        both_ways(patching, [compact(frame) for frame in sent], Limits(hub_sends_per_s=sends_per_s))
