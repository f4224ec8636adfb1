"""Followers of live queries against a real server: nothing is missed, and no gap is silent.

Writes, filters, cuts, slow readers, a source, clients that mean harm, jobs that deliver half of what they
found and die, SIGKILL: all at random. When all is quiet, what each follower holds is what the library says
of the documents there are; and each has been told of exactly the changes between its snapshot and the end.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed

from support.calls import Caller
from support.cutting_proxy import CuttingProxy
from support.event_source import EventSources
from support.server import ServerProcess
from support.sources import QUICK, changes, wait_phase
from support.watch_client import Follower, Live
from support.watch_jobs import examine
from tailrace.watch.cel import CelProgram, compile_cel
from tailrace.watch.document import Document, decode_change

BASE = "/v1/databases/default"
PATIENCE_S = 60.0
NATIVE, MIRROR = "things", "mirror"
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
    "TAILRACE_TAIL_MEMORY_MAX_BYTES": "200000",
    "TAILRACE_JOURNAL_FILE_BYTES": "100000",
    # Memory for a few large documents only: writes wait for checkpoints, on a busy machine for long.
    "TAILRACE_APPEND_WAIT_MS": "30s",
    **QUICK,
}
# What happens in a step, and how often of a thousand times.
ACTS = {"write": 600, "mirror": 140, "cut": 80, "open": 80, "stall": 25, "drop": 20, "deliver": 20}
ACTS |= {"hostile": 15, "kill": 15, "reset": 5}
JUNK = ('{"type":"subscribe"', '{"type":"nothing","payload":{}}', "[]", '{"type":"ack","payload":{}}')


class Ordeal:
    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = ServerProcess(directory / "data", env=SMALL).start()
        self.call = Caller(self.server)
        self.patient = True
        self.done: Counter[str] = Counter()
        self._follow_a_stream()
        self.followers = [
            self._follower(NATIVE, where, held=place == 0)
            for place, where in enumerate(self.random.sample(WHERES, 3))
        ]
        self.followers += [self._follower(NATIVE, "true"), self._follower(MIRROR, self.random.choice(WHERES))]
        # Browsers come through a proxy, since nobody but the network cuts an EventSource off.
        self.pages = {f"page{n}": self.random.choice(WHERES) for n in range(2)}
        self._proxy = CuttingProxy(self.server.port)
        self._proxy.__enter__()
        self._sources = EventSources()
        self._hostile: list[Live] = []

    def _follower(self, collection: str, where: str, *, held: bool = False) -> Follower:
        query = {"collection": collection, "where": where}
        patient = (lambda: True) if where == "true" else (lambda: self.patient)
        return Follower(self.server, query, patient=patient, max_unacked=2 if held else 0)

    def _follow_a_stream(self) -> None:
        call = self.call
        assert call("PUT", "state", headers={"Content-Type": "application/json"}).status == 201
        assert call("POST", "state/_profile", {"profile": {"kind": "state-protocol"}}).status == 200
        given = {"kind": "stream", "stream": "state", "collections": {"thing": {"collection": MIRROR}}}
        assert call("PUT", f"{BASE}/sources/state", given).status == 201
        wait_phase(call, "state", "live")

    def begin(self) -> None:
        for follower in self.followers:
            follower.open()
        for name, where in self.pages.items():
            self._sources.open(name, self._proxy.base_url, {"collection": NATIVE, "where": where})

    # -- what happens ----------------------------------------------------------------------------------

    def data(self) -> Document:
        found: Document = {"n": self.random.randrange(12), "tag": self.random.choice("abc")}
        if self.random.random() < 0.3:
            found["extra"] = "x" * self.random.choice((1, 1000, 20_000))
        return found

    def write(self) -> None:
        path = f"{NATIVE}/d{self.random.randrange(12)}"
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
                where = f"{NATIVE}/d{self.random.randrange(12)}"
                writes.append({"op": "put", "path": where, "data": self.data()})
            assert self.call("POST", f"{BASE}/batch", {"atomic": True, "writes": writes}).status == 200

    def mirror(self) -> None:
        key = f"m{self.random.randrange(8)}"
        if self.random.random() < 0.2:
            record: Document = {"type": "thing", "key": key, "headers": {"operation": "delete"}}
        else:
            headers = {"operation": "insert"}
            record = {"type": "thing", "key": key, "value": self.data(), "headers": headers}
        assert self.call("POST", "state", [record]).status in (200, 204)

    def reset(self) -> None:
        assert self.call("POST", "state", [{"headers": {"control": "reset"}}]).status in (200, 204)

    def deliver(self) -> None:
        """A job comes to a part of its work, in any order, some of it twice, and is never heard of again."""
        told, batches = examine(self.call, NATIVE)
        for batch in self.random.choices(batches, k=len(batches)):
            answer = self.call("POST", told["deliveries"], [msgspec.to_builtins(batch)], token=told["token"])
            assert answer.status in (200, 204), answer.raw

    def hostile(self) -> None:
        """Somebody asks for everything, reads nothing, and talks nonsense."""
        with suppress(ConnectionClosed, OSError, TimeoutError):
            live = Live(self.server, window_bytes=4096)
            live.send("subscribe", "s", query={"collection": NATIVE}, sendSnapshot=True)
            for junk in self.random.sample(JUNK, 2):
                live.socket.send(junk)
            self._hostile.append(live)

    def kill(self) -> None:
        self.server.kill()
        self.server.start()

    def step(self) -> None:
        act = self.random.choices(list(ACTS), list(ACTS.values()))[0]
        self.done[act] += 1
        follower = self.random.choice(self.followers)
        if act == "cut":
            follower.cut()
        elif act == "open":
            follower.open()
        elif act == "stall":
            self.patient = not self.patient
        elif act == "drop":
            self._proxy.cut_all()
        else:
            getattr(self, act)()
        self.complain()

    def complain(self) -> None:
        for one in self.followers:
            if one.failure is not None:
                raise one.failure

    # -- what must hold --------------------------------------------------------------------------------

    def expected(self, query: dict[str, Any]) -> dict[str, int]:
        answer = self.call("POST", f"{BASE}/query", {"collection": query["collection"], "limit": 1000})
        program = program_of(query["where"])
        return {one["id"]: one["version"] for one in answer.body["documents"] if holds(program, one)}

    def check(self) -> None:
        """Once it is quiet, everybody holds what is there."""
        self.patient = True
        deadline = time.monotonic() + PATIENCE_S
        for follower in self.followers:
            while follower.held != (wanted := self.expected(follower.query)) or not follower.connected:
                self.complain()
                assert time.monotonic() < deadline, (follower.query, follower.held, wanted, follower.resyncs)
                if not follower.connected:
                    follower.open()
                time.sleep(0.05)
        for name, where in self.pages.items():
            wanted = self.expected({"collection": NATIVE, "where": where})
            while (page := self._sources.state(name))["held"] != wanted or not page["whole"]:
                assert time.monotonic() < deadline, json.dumps([where, wanted, page])
                time.sleep(0.05)

    def check_whole(self) -> None:
        """No gap was silent: between a snapshot and what came last, all that concerned a follower came."""
        for follower in self.followers:
            name = follower.query["collection"]
            info = self.call("GET", f"{BASE}/collections/{name}").body
            concerned = concerning(self.call, name, info["partitions"], follower.query["where"])
            for life in follower.lives:
                for partition, start in life.start.items():
                    seen = {seq for place, seq in life.seen if place == partition}
                    last = max(seen, default=start)
                    assert seen == {seq for seq in concerned[partition] if start < seq <= last}, (name, life)
            assert follower.generation == info["generation"], "another generation is another life"
            if name == NATIVE:
                # The log is kept whole, so there is never a reason to begin again.
                assert follower.resyncs == []
        for name in self.pages:
            page = self._sources.state(name)
            assert page["resyncs"] == []
            assert page["broken"] is None

    def end(self) -> None:
        for live in self._hostile:
            with suppress(OSError):
                live.socket.socket.close()
        for follower in self.followers:
            follower.cut()
        self._sources.__exit__(None, None, None)
        self._proxy.__exit__(None, None, None)
        self.server.stop()


@cache
def program_of(where: str) -> CelProgram:
    return compile_cel(where)[1]


def holds(program: CelProgram, document: Document) -> bool:
    flat = {**document["data"], **{name: document[name] for name in ("id", "version", "collection")}}
    return program.holds(doc=flat)


def concerning(call: Caller, collection: str, partitions: int, where: str) -> list[set[int]]:
    """The changes in the log that are something to whoever watches this, by partition."""
    program, found = program_of(where), list[set[int]]()
    for partition, entries in enumerate(changes(call, collection, partitions)):
        concerned: set[int] = set()
        for seq, entry in enumerate(entries, 1):
            change = decode_change(json.dumps(entry).encode(), partition, seq, 0)
            images = () if change is None else (change.before, change.after)
            if any(image is not None and program.holds(doc=image) for image in images):
                concerned.add(seq)
        found.append(concerned)
    return found


def undergo(directory: Path, seed: int, steps: int) -> Counter[str]:
    ordeal = Ordeal(directory, seed)
    try:
        ordeal.begin()
        for number in range(steps):
            ordeal.step()
            if number % 100 == 99:
                ordeal.check()
        ordeal.check()
        ordeal.check_whole()
    finally:
        ordeal.end()
    return ordeal.done


def test_w1_w27_w30_w38_nobody_misses_anything(tmp_path: Path) -> None:
    done = undergo(tmp_path, 3, 200)
    assert done.keys() == ACTS.keys(), "everything has happened"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 112))
def test_w1_w27_w30_w38_nobody_misses_anything_for_long(tmp_path: Path, seed: int) -> None:
    undergo(tmp_path, seed, 1500)
