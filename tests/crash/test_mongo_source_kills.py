"""A MongoDB source while the server and the database are killed: no change is lost, none is there twice.

The oplog of the stand-in remembers all that was ever written. At the end our log has to say the same, change
by change. The driver is the real one.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from support.calls import Caller
from support.mongo_server import MongoServer
from support.mongo_store import MongoStore, Writes
from support.server import ServerProcess
from support.sources import (
    QUICK,
    add_mongo,
    changes,
    check_log,
    count,
    documents,
    status,
    wait_phase,
    wait_until,
)
from support.watch_client import Follower, Live

SMALL = {**QUICK, "TAILRACE_WATCH_PARTITIONS": "2", "TAILRACE_JOURNAL_FILE_BYTES": "200000"}
NAMES = ("orders", "lines")
TABLES = {f"shop.{name}": {"collection": name} for name in NAMES}


class Writer:
    """Writes, alone and in transactions, and knows nothing of the server."""

    def __init__(self, store: MongoStore, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._ended = threading.Event()
        self.committed = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def _write(self) -> None:
        chance = self._random
        try:
            while not self._ended.is_set():
                with chance.choice((self._store.writing, self._store.transaction))() as writes:
                    for _ in range(chance.choice((1, 1, 2, 5, 25))):
                        self._step(writes, f"shop.{chance.choice(NAMES)}", f"k{chance.randrange(40)}")
                self.committed += 1
                self._ended.wait(chance.random() * 0.01)
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.failure = error

    def _step(self, writes: Writes, namespace: str, key: str) -> None:
        chance = self._random
        note = "x" * chance.choice((1, 100, 5000))
        if self._store.made(namespace).find(key) is None:
            writes.insert(namespace, {"_id": key, "n": 0, "note": note})
        elif chance.random() < 0.55:
            writes.update(namespace, key, n=chance.randrange(1000))
        elif chance.random() < 0.5:
            writes.replace(namespace, {"_id": key, "n": 0, "note": note, "whole": True})
        else:
            writes.delete(namespace, key)


def followed(log: list[list[dict[str, Any]]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entries in log:
        for entry in entries:
            if entry["kind"] == "change":
                found.setdefault(entry["documentKey"], []).append(entry["op"])
    return found


def undergo(directory: Path, seed: int, kills: int) -> None:
    chance = random.Random(seed)
    mongo = MongoServer().start()
    for name in NAMES:
        mongo.store.made(f"shop.{name}").keeps_before = chance.random() < 0.5
    server = ServerProcess(directory / "data", env={**SMALL, "MONGO_DSN": mongo.dsn})
    try:
        call = Caller(server.start())
        add_mongo(call, "m", TABLES, batch={"maxChanges": 20})
        wait_phase(call, "m", "live")
        followers = [Follower(server, {"collection": name}, patient=lambda: True) for name in NAMES]
        for follower in followers:
            follower.open()
        writer = Writer(mongo.store, seed)
        for number in range(kills):
            goal = writer.committed + chance.randrange(10, 40)
            wait_until(
                lambda: (writer.committed, writer.failure), lambda seen, goal=goal: seen[0] >= goal or seen[1]
            )
            if number % 3 == 0:
                server.restart(kill=True)
            elif number % 3 == 1:
                mongo.crash()
                mongo.start()
            else:
                mongo.cut()
            for follower in followers:
                if not follower.connected:
                    follower.open()
        writer.end()
        settle(call, mongo.store, followers)
        assert status(call, "m")["gaps"] == 0
    finally:
        if server.running:
            server.stop()
        mongo.crash()


def settle(call: Caller, store: MongoStore, followers: list[Follower]) -> None:
    """When all is quiet, the collection, the view, the log and whoever follows say the same."""
    for name, follower in zip(NAMES, followers, strict=True):
        wanted = store.documents(f"shop.{name}")
        wait_until(lambda name=name: documents(call, name), lambda seen, wanted=wanted: seen == wanted)
        log = changes(call, name, 2)
        check_log(log)
        assert followed(log) == store.history(f"shop.{name}")

        def held(follower: Follower = follower) -> set[str]:
            if not follower.connected:
                follower.open()
            if follower.failure is not None:
                raise follower.failure
            return set(follower.held)

        wait_until(held, lambda seen, wanted=wanted: seen == set(wanted))
        assert follower.resyncs == [], "nothing was missing at any time"
        follower.cut()


def test_w3_w13_nothing_is_lost_and_nothing_is_there_twice(tmp_path: Path) -> None:
    undergo(tmp_path, 1, 5)


def test_w12_a_copy_races_with_writes(tmp_path: Path) -> None:
    """Copied while it changes, and killed meanwhile; nobody is told anything before it is live."""
    mongo = MongoServer().start()
    store = mongo.store
    server = ServerProcess(tmp_path / "data", env={**SMALL, "MONGO_DSN": mongo.dsn})
    try:
        store.insert("shop.orders", *({"_id": f"old{n}", "n": n} for n in range(1000)))
        store.insert("shop.lines", {"_id": "old"})
        writer = Writer(store, 3)
        call = Caller(server.start())
        add_mongo(call, "m", TABLES, batch={"maxChanges": 50}, limits={"eventsPerSecond": 1000})
        wait_until(lambda: count(call, "orders"), lambda seen: seen > 100)
        server.restart(kill=True)
        live = Live(server)
        live.send("subscribe", "s", query={"collection": "orders"}, sendSnapshot=True)
        assert live.take()["payload"]["state"] == "loading"
        writer.end()
        first = live.take_until("snapshot-end")
        assert first[0]["type"] == "snapshot"
        assert first[-1]["payload"]["count"] >= 1000, "whole, or not at all"
        live.close()
        wait_phase(call, "m", "live")
        for name in NAMES:
            wanted = store.documents(f"shop.{name}")
            wait_until(lambda name=name: documents(call, name), lambda seen, wanted=wanted: seen == wanted)
            check_log(changes(call, name, 2))
    finally:
        if server.running:
            server.stop()
        mongo.crash()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 8))
def test_w3_w13_nothing_is_lost_however_often_it_is_killed(tmp_path: Path, seed: int) -> None:
    undergo(tmp_path, seed, 40)
