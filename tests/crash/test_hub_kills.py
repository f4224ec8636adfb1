"""A hub with tokens, many actors, and SIGKILL at any moment, against a real server.

Everybody sends, publishes, commits, rejects, comes and goes without waiting for answers, and lies about who
they are. In the end the log has every accepted message once, and each came to one end: committed by whom it
was for, or a dead letter.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from crash.actors import SECRET, TOPIC, Book, Member
from support.calls import Caller, eventually
from support.hub_client import now_ms
from support.server import ServerProcess
from tailrace.auth import create_token

AUTO: dict[str, Any] = {"durable": True}
MANUAL: dict[str, Any] = {"durable": True, "commit": "manual", "ackTimeout": 3600}
KINDS: dict[str, dict[str, Any]] = {
    **{f"plain-{place}": {} for place in range(2)},
    **{f"auto-{place}": AUTO for place in range(3)},
    **{f"careful-{place}": MANUAL for place in range(4)},
}
# What happens in a step, and how often of a hundred times.
ACTS = {"send": 60, "commit": 15, "come": 8, "leave": 6, "attack": 5, "listen": 3, "kill": 3}
MANAGER = create_token(SECRET, sub="manager", scopes=["read", "manage"])


class Ordeal:
    def __init__(self, directory: Path, seed: int, **more: str) -> None:
        self.random = random.Random(seed)
        env = {"TAILRACE_AUTH_JWT_SECRET": SECRET, "TAILRACE_JOURNAL_FILE_BYTES": "200000"}
        self.server = ServerProcess(directory / "data", env={**env, **more}).start()
        self.call = Caller(self.server, MANAGER)
        self.book = Book()
        self.members = [Member(self.server, self.book, name, options) for name, options in KINDS.items()]
        self.done: Counter[str] = Counter()

    def begin(self) -> None:
        for member in self.members:
            member.come()

    def here(self) -> list[Member]:
        return [member for member in self.members if member.actor is not None]

    def step(self) -> None:
        act = self.random.choices(list(ACTS), list(ACTS.values()))[0]
        self.done[act] += 1
        getattr(self, act)()

    # -- what happens ----------------------------------------------------------------------------------

    def send(self) -> None:
        if not self.here():
            return
        member, other = self.random.choice(self.here()), self.random.choice(self.members)
        to = TOPIC if self.random.random() < 0.3 else other.address
        claimed = self.random.choice((member, other)).address
        ttl_ms = self.random.choice((None, None, None, 1, 50)) if to != TOPIC else None
        # A producer's number that is refused leaves a gap, so what may expire has none.
        member.send(to, claimed, producer=ttl_ms is None and other.options != {}, ttl_ms=ttl_ms)

    def commit(self) -> None:
        """Some of what somebody holds of one stream; now and then it is no good."""
        careful = [member for member in self.here() if member.manual]
        if not careful:
            return
        member = self.random.choice(careful)
        member.listen()
        held = list(member.holds)
        if held:
            stream = self.random.choice(held)[0]
            mine = [place for place in held if place[0] == stream]
            member.commit(
                self.random.sample(mine, self.random.randint(1, len(mine))),
                reject=self.random.random() < 0.2,
            )

    def come(self) -> None:
        away = [member for member in self.members if member.actor is None]
        if away:
            self.random.choice(away).come()

    def leave(self) -> None:
        if self.here():
            self.random.choice(self.here()).leave(politely=self.random.random() < 0.5)

    def listen(self) -> None:
        for member in self.here():
            member.listen()

    def attack(self) -> None:
        """Somebody wants what is another's; everything stays as it is."""
        if not self.here():
            return
        member = self.random.choice(self.here())
        victim = self.random.choice([one for one in self.members if one is not member]).address
        kind, payload = self.random.choice(
            [
                ("hub:register", {"actorAddress": victim, "capabilities": ["x"]}),
                ("hub:unregister", {"actorAddress": victim}),
                ("hub:mailbox_read", {"actorAddress": victim, "offset": "-1"}),
                ("hub:mailbox_commit", {"actorAddress": victim, "offset": "0" * 26}),
            ]
        )
        assert member.actor is not None
        answer = member.actor.ask(kind, payload)
        assert answer["payload"].get("code") in ("unauthorized", "unknown_actor"), answer
        assert "messages" not in answer["payload"]

    def kill(self) -> None:
        self._restart()
        for member in self.random.sample(self.members, len(self.members) // 2):
            member.come()

    def _restart(self) -> None:
        self.server.kill()
        self.revive()

    def revive(self) -> None:
        for member in self.members:
            member.gone()
        self.server.start()

    def restart_quietly(self) -> None:
        """H-39: when nothing is under way, a restart changes no answer but who is online."""
        self._settle()
        before = eventually(self._shown, lambda shown: shown == self._shown())
        self._restart()
        assert self._shown() == before

    def _settle(self) -> None:
        """Everything is answered, and what followed from it durable: one commit comes after the other."""
        if not self.here():
            self.come()

        def unanswered() -> int:
            self.listen()
            return sum(len(member.waiting) for member in self.here())

        eventually(unanswered, lambda left: left == 0)
        member = self.here()[0]
        assert member.actor is not None
        member.actor.register(ttlSeconds=3600, **member.options)

    def _shown(self) -> dict[str, Any]:
        discover = {"id": "d", "type": "hub:discover", "pattern": "ask", "payload": {"pattern": "crew/*"}}
        found = self.call("POST", "/hub/messages", {**discover, "timestamp": now_ms()}).body["payload"]
        return {
            "actors": [(one["address"], one["version"], one["durable"]) for one in found["actors"]],
            "letters": [(one["id"], one["offset"]) for one in self._stream("hub/dead-letters")],
            "mailboxes": {member.address: self._numbers(member) for member in self.members},
        }

    # -- what the log says -----------------------------------------------------------------------------

    def _stream(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        offset = "-1"
        while True:
            reply = self.call("GET", f"{name}?offset={offset}")
            if reply.status == 404:
                return []
            assert reply.status == 200, reply.raw
            found += reply.body
            offset = reply.headers["stream-next-offset"]
            if reply.headers.get("stream-up-to-date") == "true":
                return found

    def _numbers(self, member: Member) -> list[int]:
        return [entry["payload"] for entry in self._stream(f"hub/mbox/{member.address[2:-1]}")]

    def finish(self) -> None:
        """Everybody comes back and is done with everything they are given."""
        for member in self.members:
            if member.actor is None:
                member.come()
        for _ in range(1000):
            self.listen()
            busy = [member for member in self.members if member.waiting or (member.manual and member.holds)]
            if not busy:
                return
            for member in busy:
                streams = {stream for stream, _ in member.holds} if member.manual else set[str]()
                for stream in streams:
                    member.commit([place for place in member.holds if place[0] == stream], reject=False)
        raise AssertionError("somebody is not done")

    def check(self) -> None:
        book = self.book
        letters = [one for one in self._stream("hub/dead-letters") if one["stream"] is not None]
        places = Counter((one["stream"], one["offset"], one.get("cursor")) for one in letters)
        assert [place for place, times in places.items() if times > 1] == [], "one letter for a message"
        dead = {one["message"]["payload"] for one in letters}
        kept: Counter[int] = Counter(self._payloads(f"hub/topic/{TOPIC}"))
        for member in self.members:
            numbers = self._numbers(member)
            assert all(book.sent[number][1] == member.address for number in numbers)
            kept.update(numbers)
        assert book.accepted | book.refused | book.unknown == set(book.sent), "every message was answered"
        assert max(kept.values()) == 1, "whoever repeats a message is not heard twice"
        assert book.accepted <= set(kept), "what was accepted is there"
        assert set(kept) <= book.accepted | book.unknown, "what was refused is not"
        careful = {member.address for member in self.members if member.manual} | {TOPIC}
        for number in kept:
            to = book.sent[number][1]
            if to in careful:
                assert number in book.heard[to] or number in dead, "nothing vanishes"
        rejected = {(one["stream"], one["offset"]) for one in letters if one["reason"] == "rejected"}
        assert {place[:2] for place in places} & set(book.done) <= rejected, "committed or dead, not both"
        assert any(one["event"] == "denied" for one in self._stream("hub/audit"))

    def _payloads(self, name: str) -> list[int]:
        return [entry["payload"] for entry in self._stream(name)]

    def end(self) -> None:
        for member in self.members:
            if member.actor is not None:
                member.actor.cut()
        self.server.stop()


def undergo(directory: Path, seed: int, steps: int) -> Counter[str]:
    ordeal = Ordeal(directory, seed)
    try:
        ordeal.begin()
        for _ in range(steps):
            ordeal.step()
        ordeal.restart_quietly()
        ordeal.finish()
        ordeal.check()
    finally:
        ordeal.end()
    return ordeal.done


def test_h9_h10_h15_h18_h19_h20_h21_h33_h38_h39_every_message_comes_to_one_end(tmp_path: Path) -> None:
    done = undergo(tmp_path, 1, 400)
    assert done.keys() == ACTS.keys(), "everything has happened"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 120))
def test_h18_h19_every_message_comes_to_one_end_however_often_it_is_killed(tmp_path: Path, seed: int) -> None:
    undergo(tmp_path, seed, 3000)
