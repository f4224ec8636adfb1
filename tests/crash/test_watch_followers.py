"""Followers of live queries against a real server: writes, cuts, slow readers, SIGKILL; nothing is missed.

At the end, when all is quiet, what each follower holds is what the library says of the documents there are.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller
from support.server import ServerProcess
from support.watch_client import Follower
from tailrace.watch.cel import Program, compile_text

BASE = "/v1/databases/default"
PATIENCE_S = 60.0
WHERES = (
    "doc.n > 5",
    "doc.n <= 5 && doc.tag == 'b'",
    "doc.tag in ['a', 'c']",
    "has(doc.extra)",
    "doc.tag.startsWith('a') || doc.n == 3",
    "doc.tag != 'a'",
    "!has(doc.extra) && doc.n % 2 == 0",
)
SMALL = {
    "TAILRACE_WATCH_PARTITIONS": "2",
    "TAILRACE_WATCH_OUTBOUND_BYTES": "4000",
    "TAILRACE_WATCH_SNAPSHOT_DOCUMENTS": "2",
    "TAILRACE_WATCH_STALL_MS": "5000",
    "TAILRACE_TAIL_MEMORY_BYTES": "200000",
    "TAILRACE_JOURNAL_FILE_BYTES": "100000",
}


class Ordeal:
    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = ServerProcess(directory / "data", env=SMALL).start()
        self.call = Caller(self.server)
        self.patient = True
        self.followers = [
            Follower(self.server, {"collection": "things", "where": where}, patient=lambda: self.patient)
            for where in self.random.sample(WHERES, 3)
        ]
        self.followers.append(Follower(self.server, {"collection": "things"}, patient=lambda: True))
        self.counts = {"write": 0, "cut": 0, "kill": 0, "stall": 0}

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = {"n": self.random.randrange(12), "tag": self.random.choice("abc")}
        if self.random.random() < 0.3:
            found["extra"] = "x" * self.random.choice((1, 1000, 20_000))
        return found

    def write(self) -> None:
        self.counts["write"] += 1
        path = f"things/d{self.random.randrange(12)}"
        kind = self.random.random()
        if kind < 0.5:
            self.call("PUT", f"{BASE}/docs/{path}", self.data())
        elif kind < 0.65:
            self.call("PATCH", f"{BASE}/docs/{path}", {"n": self.random.randrange(12), "extra": None})
        elif kind < 0.8:
            self.call("DELETE", f"{BASE}/docs/{path}")
        else:
            writes: list[dict[str, Any]] = []
            for _ in range(self.random.randrange(1, 6)):
                where = f"things/d{self.random.randrange(12)}"
                writes.append({"op": "put", "path": where, "data": self.data()})
            assert self.call("POST", f"{BASE}/batch", {"atomic": True, "writes": writes}).status == 200

    def step(self) -> None:
        kind = self.random.random()
        follower = self.random.choice(self.followers)
        if kind < 0.8:
            self.write()
        elif kind < 0.88:
            self.counts["cut"] += 1
            follower.cut()
        elif kind < 0.96:
            follower.open()
        elif kind < 0.985:
            self.patient = not self.patient
            self.counts["stall"] += 1
        else:
            self.counts["kill"] += 1
            self.server.kill()
            self.server.start()
        for one in self.followers:
            if one.failure is not None:
                raise one.failure

    def documents(self) -> list[dict[str, Any]]:
        answer = self.call("POST", f"{BASE}/query", {"collection": "things", "limit": 1000})
        return answer.body["documents"]

    def check(self) -> None:
        """Once it is quiet, everybody holds what is there."""
        self.patient = True
        documents = self.documents()
        for follower in self.followers:
            where = follower.query.get("where", "true")
            expected = {one["id"]: one["version"] for one in documents if holds(compile_text(where)[1], one)}
            deadline = time.monotonic() + PATIENCE_S
            while follower.held != expected or not follower.connected:
                if follower.failure is not None:
                    raise follower.failure
                assert time.monotonic() < deadline, (where, follower.held, expected, follower.resyncs)
                if not follower.connected:
                    follower.open()
                time.sleep(0.05)

    def end(self) -> None:
        for follower in self.followers:
            follower.cut()
        self.server.stop()


def holds(program: Program, document: dict[str, Any]) -> bool:
    flat = {**document["data"], **{name: document[name] for name in ("id", "version", "collection")}}
    return program.holds(doc=flat)


def undergo(directory: Path, seed: int, steps: int) -> None:
    ordeal = Ordeal(directory, seed)
    try:
        for follower in ordeal.followers:
            follower.open()
        for number in range(steps):
            ordeal.step()
            if number % 60 == 59:
                ordeal.check()
        ordeal.check()
        for follower in ordeal.followers:
            # The log is kept whole, so there is never a reason to begin again.
            assert follower.resyncs == []
    finally:
        ordeal.end()


def test_w1_w27_nobody_misses_anything(tmp_path: Path) -> None:
    undergo(tmp_path, 1, 120)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 112))
def test_w1_w27_nobody_misses_anything_for_long(tmp_path: Path, seed: int) -> None:
    undergo(tmp_path, seed, 1500)
