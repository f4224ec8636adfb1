"""The page of wire examples, played against a hub: what it says is said, what it hears is compared.

Each section has a hub of its own. Comments in the page are stage directions. A text in angle brackets stands
for one that is made up anew each time: the first time it is learnt, from then on it is the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support.hub_world import Frame, World
from tailrace.auth import Identity
from tailrace.common.errors import TailraceError
from tailrace.hub import decide
from tailrace.hub.envelope import ENVELOPE_MEMBERS, encode_envelope, parse_envelope
from tailrace.hub.session import Session
from tailrace.hub.state import HubOptions

_STEP = re.compile(r"^<!-- (?P<stage>.*?) -->$|^```json (?P<way>to|from)\n(?P<lines>.*?)^```$", re.M | re.S)
_NAME = re.compile(r"<[a-z ]+>")
NOBODY = "@(anonymous)"  # whoever came last and has not said who it is


class Step(NamedTuple):
    """One line of JSON on its way `to` or `from` the hub, or a stage direction."""

    kind: str
    text: str


def sections_of(page: Path) -> dict[str, list[Step]]:
    parts = re.split(r"^## (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {title: list(_steps(text)) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def _steps(text: str) -> Iterator[Step]:
    for found in _STEP.finditer(text):
        if found["stage"] is not None:
            yield Step("stage", found["stage"])
        else:
            yield from (Step(found["way"], line) for line in found["lines"].splitlines())


def _verify(token: str) -> Identity:
    """`<path> until <seconds>`, as the page has them."""
    path, _, until = token.partition(" until ")
    if not until:
        raise TailraceError("unauthorized", "the token is not good")
    return Identity(sub=path, scopes=frozenset(), actor_id=path, expires_at=int(until))


class Play:
    """One section."""

    def __init__(self) -> None:
        self.world = World()
        self.sessions: dict[str, Session] = {}
        self.learnt: dict[str, str] = {}

    # -- what happens ----------------------------------------------------------------------------------

    def stage(self, text: str) -> None:
        name, *words = text.split()
        act: Callable[..., None] = getattr(self, f"_{name}")
        act(*words)

    def _guarded(self) -> None:
        assert self.unread() == []
        self.world = World(options=HubOptions(verify=_verify))

    def _actor(self, address: str, *words: str) -> None:
        self.sessions[address] = self.world.actor(address, *words)

    def _crowd(self, count: str) -> None:
        for number in range(int(count)):
            session = self.world.actor(f"@(crowd/{number:04})")
            self.world.said[session] = Unread()

    def _lose(self, address: str) -> None:
        self.world.lose(self.sessions[address])

    def _wait(self, ms: str) -> None:
        self.world.wait(int(ms))

    def _stall(self, address: str, size: str) -> None:
        self.world.unsent[self.sessions[address]] = int(size)

    def _drain(self, address: str) -> None:
        self.world.drain(self.sessions[address])

    def _shutdown(self) -> None:
        self.world.shut_down()

    def _silence(self, address: str) -> None:
        self.world.run(decide.on_silence(self.world.hub, self.sessions[address], self.world.now))

    def _flood(self, address: str, count: str) -> None:
        for _ in range(int(count)):
            self.world.say(self.sessions[address], "hub:discover", {})
        self.world.taken(self.sessions[address])

    def _oversize(self, address: str, message_id: str, size: str) -> None:
        prefix = b'{"id":"%b"' % message_id.encode()
        session = self.sessions[address]
        self.world.run(decide.on_too_large(self.world.hub, session, prefix, int(size), self.world.now))

    def say(self, line: str) -> None:
        """To the hub: what the page leaves out is as it is in every message."""
        shown: Frame = json.loads(_NAME.sub(lambda found: self.learnt[found[0]], line))
        frame = {"to": "@(cloudflare/signal-hub)", "timestamp": self.world.now, **shown}
        text = json.dumps(frame).encode()
        assert_round_trip(text)
        session = self.sessions.get(frame["from"])
        if session is None or frame["type"] == "hub:connect":
            session = self.sessions[frame["from"]] = self.sessions[NOBODY] = self.world.open()
        self.world.run(decide.decide(self.world.hub, session, text, self.world.now))

    # -- what is heard ---------------------------------------------------------------------------------

    def hear(self, line: str) -> Frame:
        """The first of its type that was not heard yet; as the page has it, and in the strict form."""
        shown: Frame = json.loads(line)
        unread = self.world.said[self.sessions[shown["to"]]]
        place = next((n for n, frame in enumerate(unread) if frame["type"] == shown["type"]), None)
        assert place is not None, f"nothing like {line} in {unread}"
        frame = unread.pop(place)
        assert tuple(frame) == ENVELOPE_MEMBERS, "all members, in their order"
        return frame

    def compare(self, shown: Any, found: Any, place: str = "") -> None:
        if isinstance(shown, str) and _NAME.fullmatch(shown):
            assert isinstance(found, str), place
            assert self.learnt.setdefault(shown, found) == found, place
        elif isinstance(shown, dict):
            wanted: Frame = shown
            assert isinstance(found, dict), place
            assert not place or list(wanted) == list(found), f"{place}: {found}"
            for name, value in wanted.items():
                self.compare(value, found[name], f"{place}/{name}")
        elif isinstance(shown, list):
            assert isinstance(found, list), place
            assert len(shown) == len(found), f"{place}: {found}"
            for number, (one, other) in enumerate(zip(shown, found, strict=True)):
                self.compare(one, other, f"{place}/{number}")
        else:
            assert (shown, type(shown)) == (found, type(found)), place

    def unread(self) -> list[Frame]:
        return [frame for frames in self.world.said.values() for frame in frames]


class Unread(list[Frame]):
    """Of one among many, whose copies are like those of others."""

    def append(self, frame: Frame) -> None:
        pass


def assert_round_trip(text: bytes) -> None:
    """What was understood is written in the strict form, and understood as the same again."""
    read = parse_envelope(text)
    written = encode_envelope(
        id=read.id,
        from_=read.from_ or "",
        to=read.to or "",
        type=read.type,
        payload=read.payload,
        timestamp=read.timestamp,
        pattern=read.pattern,
        correlation_id=read.correlation_id,
        metadata=read.metadata,
        ttl=read.ttl,
    )
    assert tuple(json.loads(written)) == ENVELOPE_MEMBERS
    again = parse_envelope(written)
    for name in ("id", "from_", "to", "type", "pattern", "correlation_id", "timestamp", "ttl"):
        assert getattr(again, name) == getattr(read, name), name
    assert bytes(again.payload) == bytes(read.payload)
    assert bytes(again.metadata) == bytes(read.metadata)
