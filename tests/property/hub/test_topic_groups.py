"""H-29 for durable groups: whatever members do, and whenever the server dies, each entry is done with."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.hub_world import World

GROUP = {"topic": "jobs/#", "durable": True, "group": "workers"}
NAMES = ("@(t/a)", "@(t/b)", "@(t/c)")


class Groups(RuleBasedStateMachine):
    """Members come, go and commit; publications go on. `held` is what each member could still commit."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.members: dict[str, Any] = {}
        self.held: dict[str, list[dict[str, Any]]] = {}
        self.published = 0
        self.committed: set[int] = set()

    @initialize()
    def begin(self) -> None:
        self.publisher = self.world.actor("@(t/shop)")
        self.join(NAMES[0], 2)  # the group begins with its first member

    @precondition(lambda self: len(self.members) < len(NAMES))
    @rule(name=st.sampled_from(NAMES), in_flight=st.integers(1, 4))
    def join(self, name: str, in_flight: int) -> None:
        if name in self.members:
            return
        options = {"durable": True, "commit": "manual", "maxInFlight": in_flight, "ackTimeout": 5}
        self.members[name] = self.world.actor(name, "mailbox", **options)
        self.held[name] = []
        answer = self.world.ask(self.members[name], "hub:subscribe", GROUP)
        assert answer["type"] == "hub:subscribed"

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.members)))
        self.take()
        self.world.lose(self.members.pop(name))
        del self.held[name]

    @rule(count=st.integers(1, 3), topic=st.sampled_from(["jobs/eu", "jobs/us"]))
    def publish(self, count: int, topic: str) -> None:
        for _ in range(count):
            payload = {"topic": topic, "type": "job", "data": self.published}
            assert self.world.ask(self.publisher, "hub:publish", payload)["type"] == "hub:published"
            self.published += 1

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, held in self.held.items() if held)))
        frame = data.draw(st.sampled_from(self.held[name]))
        self.held[name].remove(frame)
        mailbox = frame["metadata"]["mailbox"]
        payload = {"actorAddress": name, "stream": mailbox["stream"], "offsets": [mailbox["offset"]]}
        payload["subscriptionId"] = mailbox["subscriptionId"]
        answer = self.world.ask(self.members[name], "hub:mailbox_commit", payload)
        assert answer["type"] == "hub:mailbox_committed", answer
        self.committed.add(frame["payload"])

    @rule(seconds=st.sampled_from([1, 6]))
    def wait(self, seconds: int) -> None:
        self.take()
        self.world.wait(1000 * seconds)

    @rule()
    def crash(self) -> None:
        self.take()
        self.members.clear()
        self.held.clear()
        self.world.crash()
        self.publisher = self.world.actor("@(t/shop)")

    @invariant()
    def take(self) -> None:
        """Nobody is given what was committed."""
        for name, session in self.members.items():
            for frame in self.world.taken(session):
                if frame["type"] == "job":
                    assert frame["to"] == name
                    assert frame["payload"] not in self.committed
                    self.held[name].append(frame)

    def dead(self) -> list[int]:
        return [letter["message"]["payload"] for letter in self.world.streams.bodies("hub/dead-letters")]

    def teardown(self) -> None:
        """In the end everything was committed, or given up once after too many deliveries."""
        while len(self.members) < len(NAMES):
            self.join(next(name for name in NAMES if name not in self.members), 4)
        for _ in range(20 * (self.published + 1)):
            self.take()
            for name, held in self.held.items():
                for frame in held:
                    mailbox = frame["metadata"]["mailbox"]
                    payload = {"actorAddress": name, **mailbox}
                    self.world.ask(self.members[name], "hub:mailbox_commit", payload)
                    self.committed.add(frame["payload"])
                held.clear()
            if len(self.committed | set(self.dead())) == self.published:
                break
            self.world.wait(1000)
        assert sorted(self.committed | set(self.dead())) == list(range(self.published))
        assert len(self.dead()) == len(set(self.dead()))


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
