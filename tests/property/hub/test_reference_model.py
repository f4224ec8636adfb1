"""A hub under everything that can happen to it, beside a small model of what it promises.

Clients come, register, send, commit, lose their sockets; appends wait for their commit; the process dies.
Whatever happens, nobody hears of a message before it is durable, nobody hears it twice without being told so,
each recipient hears each sender in order, and every ask has one outcome.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.hub_world import World
from tailrace.hub.errors import ERROR_TYPES
from tailrace.hub.session import Session

NAMES = ("@(m/plain)", "@(m/kept)", "@(m/careful)")
OPTIONS: dict[str, dict[str, Any]] = {
    "@(m/plain)": {},
    "@(m/kept)": {"durable": True},
    "@(m/careful)": {"durable": True, "commit": "manual", "ackTimeout": 5},
}
STREAMS = {name: f"hub/mbox/{name[2:-1]}" for name in NAMES}


class HubMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.live: dict[str, Session] = {}
        self.seen: dict[Session, int] = {}  # frames that were looked at
        self.number = 0
        self.sent: dict[int, tuple[str, str]] = {}  # number to sender and recipient
        self.accepted: dict[int, str] = {}  # numbers that were acknowledged as accepted, and their recipient
        self.heard: dict[str, list[int]] = defaultdict(list)  # by recipient, redeliveries left out
        self.offsets: dict[int, str] = {}  # where a number is in its recipient's mailbox
        self.committed: dict[str, int] = defaultdict(int)
        self.asks: dict[str, tuple[Session, int, list[str]]] = {}  # session, levels wanted, outcomes
        self.versions: dict[str, int] = {}

    # -- looking ---------------------------------------------------------------------------------------

    def look(self) -> None:
        """Takes in what everybody was sent."""
        for session, frames in self.world.said.items():
            for frame in frames[self.seen.get(session, 0) :]:
                self._frame(session, frame)
            self.seen[session] = len(frames)

    def _frame(self, session: Session, frame: dict[str, Any]) -> None:
        kind, payload = frame["type"], frame["payload"]
        if kind == "hub:registered":
            name = payload["actorAddress"]
            assert payload["version"] > self.versions.get(name, 0), "versions only grow"
            self.versions[name] = payload["version"]
        elif kind == "hub:delivery_ack" or kind in ERROR_TYPES:
            asked = self.asks.get(frame["correlationId"])
            if asked is not None:
                assert asked[0] is session or session.id == asked[0].id
                asked[2].append(payload.get("status", "error"))
                assert len(asked[2]) <= asked[1], "one outcome for each level"
            if payload.get("status") == "accepted":
                number = int(frame["correlationId"].partition("-")[2])
                self.accepted[number] = self.sent[number][1]
        elif kind == "n":
            self._message(frame, payload)

    def _message(self, frame: dict[str, Any], number: int) -> None:
        sender, recipient = self.sent[number]
        assert frame["from"] == sender, "nobody is who they say they are"
        assert frame["to"] == recipient
        metadata = frame["metadata"]
        if "mailbox" in metadata:
            self.offsets[number] = metadata["mailbox"]["offset"]
            bodies = self.world.streams.bodies(STREAMS[recipient])
            assert number in [body["payload"] for body in bodies], "durable before it is seen"
        if number in self.heard[recipient]:
            assert metadata.get("redelivered"), "told that it comes again"
            return
        earlier = [one for one in self.heard[recipient] if self.sent[one][0] == sender]
        assert not earlier or earlier[-1] < number, "in the order in which they were sent"
        self.heard[recipient].append(number)

    # -- what happens ----------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), words=st.sampled_from([(), ("resume",)]))
    def come(self, name: str, words: tuple[str, ...]) -> None:
        session = self.world.connect(name, "mailbox", *words)
        payload = {"actorAddress": name, "capabilities": ["x"], "ttlSeconds": 3600, **OPTIONS[name]}
        self.world.say(session, "hub:register", payload, frm=name)
        self.live[name] = session

    @precondition(lambda self: self.live)
    @rule(data=st.data(), code=st.sampled_from([1000, 1006]))
    def leave(self, data: st.DataObject, code: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.world.lose(self.live.pop(name), code)

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        to=st.sampled_from(NAMES),
        ack=st.sampled_from([None, "delivered", "accepted", ["accepted", "processed"]]),
    )
    def send(self, data: st.DataObject, to: str, ack: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        session = self.live[name]
        if not session.alive or name[2:-1] not in session.addresses:
            return
        self.number += 1
        self.sent[self.number] = (name, to)
        message_id = f"n-{self.number}"
        levels = 0 if ack is None else 1 if isinstance(ack, str) else len(ack)
        if levels:
            self.asks[message_id] = (session, levels, [])
        payload = {"to": to, "type": "n", "data": self.number, "ack": ack}
        pattern = "ask" if levels else "tell"
        self.world.say(session, "hub:send", payload, frm=name, id=message_id, pattern=pattern)

    @precondition(lambda self: self.live.get("@(m/careful)") is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = "@(m/careful)"
        self.look()
        had = [number for number in self.heard[name] if number in self.offsets]
        if not had:
            return
        offset = self.offsets[data.draw(st.sampled_from(had))]
        entry = self.world.streams.resolve(STREAMS[name], offset)
        self.world.say(self.live[name], "hub:mailbox_commit", {"actorAddress": name, "offset": offset})
        if self.world.held is None:
            self.committed[name] = max(self.committed[name], entry)

    @rule()
    def hold(self) -> None:
        if self.world.held is None:
            self.world.hold()

    @rule()
    def settle(self) -> None:
        self.world.commit_held()

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.world.wait(seconds * 1000)

    @rule()
    def crash(self) -> None:
        self.look()
        self.asks.clear()  # whoever asked has lost its connection
        self.live.clear()
        self.world.crash()

    # -- what always holds -----------------------------------------------------------------------------

    @invariant()
    def everything_is_as_promised(self) -> None:
        self.look()
        world = self.world
        for name, session in list(self.live.items()):
            if not session.alive:
                del self.live[name]
        for path, found in world.hub.registry.by_path.items():
            if found.session is not None:
                assert found.session.addresses.get(path) is found, "one owner for each address"
        for name, entry in self.committed.items():
            cursor = world.hub.mailboxes.cursors.get(name[2:-1], STREAMS[name])
            assert cursor is not None
            assert cursor.committed >= entry, "committed positions never go back"
        for number, recipient in self.accepted.items():
            bodies = [body["payload"] for body in world.streams.bodies(STREAMS[recipient])]
            assert bodies.count(number) == 1, "what was accepted is there, once"

    def teardown(self) -> None:
        """Everybody comes back: what was accepted arrives, and every ask has its outcomes."""
        world = self.world
        world.commit_held()
        for name in NAMES:
            self.come(name, ())
        world.wait(80_000)
        self.look()
        for number, recipient in self.accepted.items():
            entry = [body["payload"] for body in world.streams.bodies(STREAMS[recipient])].index(number) + 1
            cursor = world.hub.mailboxes.cursors.get(recipient[2:-1], STREAMS[recipient])
            dead = [letter["message"]["payload"] for letter in world.streams.bodies("hub/dead-letters")]
            passed = cursor is not None and entry <= cursor.committed
            assert number in self.heard[recipient] or number in dead or passed, "nothing accepted is lost"
        for message_id, (session, levels, outcomes) in self.asks.items():
            if session.alive:
                assert len(outcomes) == levels, f"{message_id}: one outcome for each level, got {outcomes}"


TestHub = HubMachine.TestCase
TestHub.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
