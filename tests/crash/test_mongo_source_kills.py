"""A MongoDB source while the server and the database are killed: no change is lost, none is there twice.

The oplog of the stand-in remembers all that was ever written. At the end our log has to say the same, change
by change. The driver is the real one.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from crash.source_ordeal import SMALL, SourceWriter, reopen, settle
from support.calls import Caller
from support.mongo_server import MongoServer
from support.mongo_store import MongoStore, Writes
from support.server import ServerProcess
from support.sources import (
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

NAMES = ("orders", "lines")
TABLES = {f"shop.{name}": {"collection": name} for name in NAMES}


class Writer(SourceWriter):
    """Writes, alone and in transactions."""

    def __init__(self, store: MongoStore, seed: int) -> None:
        self._store = store
        super().__init__(seed)

    def write(self) -> None:
        chance = self.random
        while not self.ended.is_set():
            with chance.choice((self._store.writing, self._store.transaction))() as writes:
                for _ in range(chance.choice((1, 1, 2, 5, 25))):
                    self._step(writes, f"shop.{chance.choice(NAMES)}", f"k{chance.randrange(40)}")
            self.noted()

    def _step(self, writes: Writes, namespace: str, key: str) -> None:
        chance = self.random
        note = "x" * chance.choice((1, 100, 5000))
        if self._store.made(namespace).find(key) is None:
            writes.insert(namespace, {"_id": key, "n": 0, "note": note})
        elif chance.random() < 0.55:
            writes.update(namespace, key, n=chance.randrange(1000))
        elif chance.random() < 0.5:
            writes.replace(namespace, {"_id": key, "n": 0, "note": note, "whole": True})
        else:
            writes.delete(namespace, key)


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
        followers = {name: Follower(server, {"collection": name}, patient=lambda: True) for name in NAMES}
        reopen(followers.values())
        writer = Writer(mongo.store, seed)
        for number in range(kills):
            writer.wait_for(chance.randrange(10, 40))
            if number % 3 == 0:
                server.restart(kill=True)
            elif number % 3 == 1:
                mongo.crash()
                mongo.start()
            else:
                mongo.cut()
            reopen(followers.values())
        writer.end()
        store = mongo.store
        settle(
            call,
            followers,
            lambda name: store.documents(f"shop.{name}"),
            lambda name: store.history(f"shop.{name}"),
        )
        assert status(call, "m")["gaps"] == 0
    finally:
        if server.running:
            server.stop()
        mongo.crash()


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
