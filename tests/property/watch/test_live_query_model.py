"""Live queries against a plain model, over writes, cuts, stalls, acks, rules, deletions and crashes.

The model is the list of changes as they came out of the log. What a client holds at a position is compared
with what the library says of the documents there; each event with what the two images of its change are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.watch_room import DATABASE, Heard, PacedWire, Room
from tailrace.auth import Identity
from tailrace.watch.cel import CelProgram, compile_cel
from tailrace.watch.realtime.session import RealtimeSession
from tailrace.watch.realtime.subscription import MessageRefusedError, acknowledge, resume, subscribe

WHERES = ("true", "doc.n > 5", "doc.n <= 5 && doc.tag == 'b'", "has(doc.extra)", "doc.tag != 'a'")
RULES = (None, "doc.org == request.auth.claims.org", "doc.n < 9")
NAME = "things"


def identity(org: str) -> Identity:
    return Identity(
        sub=org, scopes=frozenset({"read"}), dbs=(DATABASE,), claims=json.dumps({"org": org}).encode()
    )


@cache
def _rule(source: str) -> CelProgram:
    return compile_cel(source, rule=True)[1]


class Judge:
    """What the language says of a document, for somebody."""

    def __init__(self, where: str, org: str) -> None:
        self._program = compile_cel(where)[1]
        self._auth = {
            "auth": {"userId": org, "claims": {"org": org}, "roles": []},
            "method": "read",
        }
        self.rule: str | None = None

    def readable(self, document: dict[str, Any] | None) -> bool:
        if document is None or self.rule is None:
            return document is not None
        return _rule(self.rule).holds(doc=document, request=self._auth)

    def holds(self, document: dict[str, Any] | None) -> bool:
        return document is not None and self.readable(document) and self._program.holds(doc=document)

    def event(self, heard: Heard) -> tuple[str, str] | None:
        """The table of events: what the change is to the subscriber, and why."""
        was, now = self.holds(heard.before), self.holds(heard.after)
        if was and now:
            return "update", "changed"
        if now:
            reason = "created" if heard.before is None else "visible"
            return "insert", "entered" if heard.before is not None and self.readable(heard.before) else reason
        if was:
            reason = "deleted" if heard.after is None else "hidden"
            return "delete", "left" if heard.after is not None and self.readable(heard.after) else reason
        return None


class Client:
    """Applies what it is told, and checks it."""

    def __init__(self, room: Room, where: str, org: str, priority: str) -> None:
        self._room = room
        self.judge = Judge(where, org)
        self.query = {"collection": NAME, "where": where}
        self.priority = priority
        self._identity = identity(org)
        self.session: RealtimeSession | None = None
        self.wire = PacedWire()
        self.held: dict[str, int] = {}
        self.positions: list[int] = []
        self.token: str | None = None
        self._since: dict[str, int] = {}
        self._pages: dict[str, int] | None = None
        self._state = "none"  # none, asked, snapshot, live, invalid
        self._last: dict[int, int] = {}
        self.resyncs: list[str] = []
        self.max_unacked = 0
        self._life = ""

    def _begin(self) -> None:
        """What is true from here on: the rule of this moment, and the changes of this life."""
        self._state = "asked"
        self.judge.rule = self._room.rule_of(NAME)
        self._life = self._room.life_of(NAME)

    def open(self, max_unacked: int) -> None:
        self.cut()
        self.max_unacked = max_unacked
        self.session, self.wire = self._room.connect(self._identity)
        self.session.tokens_each = True
        self._last = {}
        self._begin()
        if self.token is None:
            self._subscribe()
            return
        given = {
            "subId": "s",
            "token": self.token,
            "positions": dict(self._since),
            "query": self.query,
            "priority": self.priority,
            "maxUnacked": max_unacked,
        }
        session = self.session
        self._ask(lambda: resume(session, "r", given))

    def _subscribe(self) -> None:
        session = self.session
        assert session is not None
        given = {
            "query": self.query,
            "sendSnapshot": True,
            "priority": self.priority,
            "maxUnacked": self.max_unacked,
        }
        self._begin()
        self._ask(lambda: subscribe(session, "s", given))

    def _ask(self, request: Callable[[], None]) -> None:
        try:
            self._room.harness.call(request)
        except MessageRefusedError as refused:
            if refused.code != "overloaded":
                raise
            self.cut()  # and comes back later

    def cut(self) -> None:
        if self.session is not None:
            self._room.harness.call(self.session.on_gone)
            self._room.turn(2)
            self.session = None

    def read(self, count: int) -> None:
        session = self.session
        if session is None:
            return
        for envelope in self.wire.read(count):
            if self.session is session:
                self._take(envelope)
        if self.session is not None:
            self._room.harness.call(session.on_drain)

    def _take(self, envelope: dict[str, Any]) -> None:
        kind, payload = envelope["type"], envelope["payload"]
        if kind == "subscribe_ack":
            assert self._state == "asked"
            assert payload["token"] is None
            self._state, self._pages = "snapshot", {}
        elif kind == "resume-ack":
            assert self._state == "asked"
            self._state = "live" if payload["status"] == "ok" else "failed"
        elif kind == "snapshot":
            assert self._state == "snapshot", "no frame before its acknowledgement"
            if payload["page"] == 0:
                self._pages = {}
            assert self._pages is not None
            for row in payload["documents"]:
                assert row["version"] >= self._pages.get(row["id"], 0), "no row goes back"
                self._pages[row["id"]] = row["version"]
        elif kind == "snapshot-end":
            assert self._pages is not None
            self.held, self._pages, self._state = self._pages, None, "live"
            self.positions, self._last = list(payload["positions"]), {}
            self._keep(payload["token"])
        elif kind == "event":
            self._event(envelope)
        elif kind == "resync-required":
            self.resyncs.append(payload["reason"])
            self.token, self._state, self._last = None, "invalid", {}
            self._subscribe()
        else:
            assert kind == "heartbeat", envelope

    def _keep(self, token: str) -> None:
        """A token covers exactly what was sent before it: the set is the result at that position."""
        self.token, self._since = token, {}
        self.check(self.positions)

    def _event(self, envelope: dict[str, Any]) -> None:
        partition, seq, delta = envelope["partition"], envelope["seq"], envelope["payload"]["delta"]
        assert self._state in ("snapshot", "live"), "no frame outside of a subscription"
        assert seq > self._last.get(partition, 0), "on a connection they only grow"
        self._last[partition] = seq
        held = self.held if self._pages is None else self._pages
        if self._pages is None:
            if seq <= self.positions[partition]:
                return  # a repeat after a resume
            self._check_between(partition, self.positions[partition], seq)
            self.positions[partition] = seq
            self._since[str(partition)] = seq
            assert self.judge.event(self._heard(partition, seq)) == (delta["op"], delta["reason"])
        if delta["op"] == "delete":
            assert "data" not in delta["doc"]
            held.pop(delta["doc"]["id"], None)
        else:
            held[delta["doc"]["id"]] = delta["doc"]["version"]
        if self._pages is None and seq % 3:
            self._keep(envelope["payload"]["token"])
            if self.max_unacked:
                self._acknowledge()

    def is_done(self) -> bool:
        """Reads all there is; whether that was all."""
        self.read(1000)
        session = self.session
        if session is None:
            self.open(0)
            return False
        if self.max_unacked and self._state == "live":
            self._acknowledge()
        found = session.subscriptions.get("s")
        return found is not None and found.state == "live" and not self.wire.frames

    def _acknowledge(self) -> None:
        session = self.session
        assert session is not None
        given = {"subId": "s", "positions": {str(place): seq for place, seq in enumerate(self.positions)}}
        self._room.harness.call(lambda: acknowledge(session, given))

    def _heard(self, partition: int, seq: int) -> Heard:
        (found,) = [one for one in self._all() if (one.partition, one.seq) == (partition, seq)]
        return found

    def _all(self) -> list[Heard]:
        return self._room.heard.get(self._life, [])

    def _check_between(self, partition: int, after: int, before: int) -> None:
        """What was passed over concerned nobody."""
        for one in self._all():
            if one.partition == partition and after < one.seq < before:
                assert self.judge.event(one) is None, (one, self.judge.rule)

    def reference(self, positions: list[int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for one in self._all():
            if one.seq <= positions[one.partition]:
                if self.judge.holds(one.after):
                    found[one.id] = one.version
                else:
                    found.pop(one.id, None)
        return found

    def check(self, positions: list[int]) -> None:
        assert self.held == self.reference(positions)


class Ordeal:
    def __init__(self, directory: Path, seed: int, *, stores_before: bool = True) -> None:
        self._stores_before = stores_before
        self.random = random.Random(seed)
        self.room = Room(
            directory,
            watch_partitions=2,
            watch_outbound_bytes=2000,
            watch_outbound_total_bytes=40_000,
            watch_snapshot_documents=2,
            watch_audit_retention_ms=0,
            watch_stall_ms=600_000,
            watch_overflow_ms=600_000,
            watch_window_changes=5,
        )
        self.clients = [
            Client(
                self.room,
                self.random.choice(WHERES),
                self.random.choice(("one", "two")),
                self.random.choice(("low", "normal")),
            )
            for _ in range(4)
        ]
        self.kinds: dict[str, int] = {}

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "n": self.random.randrange(12),
            "tag": self.random.choice("abc"),
            "org": self.random.choice(("one", "two")),
        }
        if self.random.random() < 0.3:
            found["extra"] = "x" * self.random.choice((1, 300, 3000))
        return found

    def write(self) -> None:
        if not self._stores_before and self.room.book.find(DATABASE, NAME) is None:
            self.room.configure(NAME, storeBefore=False)
        writes: list[tuple[str, str, Any]] = []
        for _ in range(self.random.choice((1, 1, 1, 3))):
            path = f"{NAME}/d{self.random.randrange(8)}"
            op = self.random.choice(("put", "put", "patch", "delete"))
            writes.append((op, path, self.data()))
        self.room.write(*writes, atomic=self.random.random() < 0.3)

    def step(self) -> None:
        kind = self.random.choices(
            ("write", "read", "open", "cut", "turn", "rule", "crash", "checkpoint", "remove"),
            (40, 30, 8, 6, 10, 2, 1.5, 3, 0.7),
        )[0]
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        client = self.random.choice(self.clients)
        if kind == "write":
            self.write()
        elif kind == "read":
            client.read(self.random.choice((1, 3, 100)))
        elif kind == "open":
            client.open(self.random.choice((0, 0, 2)))
        elif kind == "cut":
            client.cut()
        elif kind == "turn":
            self.room.turn(self.random.randrange(1, 5))
        elif kind == "rule":
            self.room.configure(NAME, readRule=self.random.choice(RULES))
        elif kind == "checkpoint":
            self.room.checkpoint()
        elif kind == "remove":
            if self.room.book.find(DATABASE, NAME) is not None:
                assert self.room.remove(NAME) == 204
        else:
            self.crash()

    def crash(self) -> None:
        for one in self.clients:
            one.session = None
        heard = dict(self.room.heard)
        self.room.crash(self.random.randrange(3))
        # The view may be ahead of what is told again; the changes are the same as before.
        self.room.heard.update(heard)

    def settle(self) -> None:
        """Everybody is connected, reads, and follows what they are told."""
        collection = self.room.book.find(DATABASE, NAME)
        for client in self.clients:
            if client.session is None:
                client.open(0)

        def done() -> bool:
            return sum(client.is_done() for client in self.clients) == len(self.clients)

        self.room.until(done)
        positions = [0, 0] if collection is None else collection.applied
        for client in self.clients:
            client.check(positions)
        self.check_befores()

    def check_befores(self) -> None:
        """What a change says was there is what the one before it left."""
        for life in self.room.heard.values():
            left: dict[str, dict[str, Any] | None] = {}
            for one in life:
                assert one.before == left.get(one.id)
                left[one.id] = one.after

    def run(self, steps: int) -> None:
        try:
            for number in range(steps):
                self.step()
                if number % 50 == 49:
                    self.settle()
            self.settle()
        finally:
            self.room.close()


@pytest.mark.parametrize("seed", range(3))
def test_w1_w2_w18_w20_w22_w25_w26_every_schedule_ends_in_the_result(tmp_path: Path, seed: int) -> None:
    Ordeal(tmp_path, seed).run(120)


@pytest.mark.parametrize("seed", range(3, 6))
def test_w1_w2_w28_changes_that_do_not_say_what_was_there(tmp_path: Path, seed: int) -> None:
    """Only a few of them are remembered: whoever is further behind is told so."""
    ordeal = Ordeal(tmp_path, seed, stores_before=False)
    ordeal.run(120)
    assert "too-far-behind" in {reason for client in ordeal.clients for reason in client.resyncs}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 140))
def test_w1_long_schedules(tmp_path: Path, seed: int) -> None:
    Ordeal(tmp_path, seed, stores_before=seed % 4 > 0).run(2000)
