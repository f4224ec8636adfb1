"""Deliveries that reach the gateway from outside: those who are behind are told all, in order and once."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from support.calls import Caller, eventually
from support.server import ServerProcess
from support.watch_client import Live
from support.watch_jobs import BASE, Held, Tuple, change, metric, watch
from tailrace.protocol import offsets
from tailrace.watch.external_matching import DeliveredChange, DeliveredMatch, DeliveryBatch

PARTITIONS = 2
QUERIES: dict[str, dict[str, Any]] = {
    "rare": {"where": "doc.n == 50 || doc.id == 'zz-last'"},
    "never": {"where": "doc.n == -1 || doc.id == 'zz-last'"},
    "often": {"where": "doc.n >= 0"},
}


class Scene:
    """Somebody is held back while much happens; somebody else has seen all of it."""

    def __init__(self, server: ServerProcess, collection: str) -> None:
        self.call = Caller(server)
        self._collection = collection
        self.call("PUT", f"{BASE}/collections/{collection}", {"partitions": PARTITIONS})
        self.held = Held(server, collection, QUERIES)
        self.call("PUT", f"{BASE}/docs/{collection}/zz-last", {"n": 0})
        self.held.take_first()
        other = watch(server, collection, QUERIES)
        body = {"seconds": 60}
        self.announced = self.call("POST", f"{BASE}/summaries", body).body
        change(self.call, collection, 120)
        seen = other.events()
        self.expected: set[Tuple] = {
            (partition, seq, f"{self.held.connection}/{key.partition('/')[2]}", op, reason)
            for partition, seq, key, op, reason in seen
        }
        info = self.call("GET", f"{BASE}/collections/{collection}").body
        self.positions: list[int] = info["positions"]
        self.generation: int = info["generation"]

    def batches(self, chance: random.Random) -> list[DeliveryBatch]:
        """What a job would deliver, cut anywhere."""
        found: list[DeliveryBatch] = []
        for partition, upto in enumerate(self.positions):
            cuts = sorted(chance.sample(range(1, upto), 5))
            for first, last in zip([0, *cuts], [*cuts, upto], strict=True):
                found.append(self.batch(partition, first + 1, last))
        return found

    def batch(self, partition: int, first: int, last: int) -> DeliveryBatch:
        items: dict[int, list[DeliveredMatch]] = {}
        for place, seq, key, op, reason in self.expected:
            if place == partition and first <= seq <= last:
                items.setdefault(seq, []).append(DeliveredMatch(key, op, reason))
        return DeliveryBatch(
            database="default",
            collection=self._collection,
            partition=partition,
            owner="test",
            generation=self.generation,
            asOf=offsets.parse_offset(self.announced["offset"])[1],
            first=first,
            last=last,
            items=[DeliveredChange(seq, "", "replace", told, {}) for seq, told in sorted(items.items())],
        )

    def deliver(self, batches: list[DeliveryBatch]) -> None:
        """Returns when the gateway has read them."""
        before = metric(self.call, "tailrace_watch_delivered_batches_total")
        for batch in batches:
            self.append(msgspec.to_builtins(batch))
        eventually(
            lambda: metric(self.call, "tailrace_watch_delivered_batches_total"),
            lambda count: count >= before + len(batches),
        )

    def append(self, delivery: dict[str, Any]) -> None:
        token, stream = self.announced["token"], self.announced["deliveries"]
        assert self.call("POST", stream, [delivery], token=token).status == 204

    def check(self) -> None:
        """Those who were held back are told the same as who was not."""
        told = self.held.catch_up(len(self.expected))
        assert max(Counter(told).values()) == 1, "nobody is told twice"
        assert set(told) == self.expected
        for key in QUERIES:
            for partition in range(PARTITIONS):
                name = f"{self.held.connection}/{key}"
                seqs = [seq for place, seq, who, *_ in told if (place, who) == (partition, name)]
                assert seqs == sorted(seqs)
        self.call("PUT", f"{BASE}/docs/{self._collection}/zz-last", {"n": 50})
        assert {one[2].partition("/")[2] for one in self.held.catch_up(3)} == set(QUERIES)
        self.held.live.close()


def test_w40_those_who_are_behind_take_the_way_that_was_examined(server: ServerProcess) -> None:
    scene = Scene(server, "examined")
    before = metric(scene.call, "tailrace_watch_delivered_skipped_total")
    scene.deliver(scene.batches(random.Random(1)))
    scene.check()
    assert metric(scene.call, "tailrace_watch_delivered_skipped_total") > before + 50


@pytest.mark.parametrize("seed", range(3))
def test_w40_batches_get_lost_repeat_and_overtake_each_other(server: ServerProcess, seed: int) -> None:
    chance = random.Random(seed)
    scene = Scene(server, f"shuffled{seed}")
    batches = scene.batches(chance) + scene.batches(chance)
    chance.shuffle(batches)
    kept = chance.sample(batches, len(batches) * 2 // 3)
    scene.deliver([*kept, *kept[:4]])
    scene.check()


def test_what_is_wrong_is_not_believed(server: ServerProcess) -> None:
    """A change that does not concern somebody is not sent to them, whoever says so."""
    scene = Scene(server, "wrong")
    good = scene.batch(0, 1, scene.positions[0])
    lie = DeliveredMatch(f"{scene.held.connection}/never", "insert", "entered")
    first, *rest = good.items
    items = [msgspec.structs.replace(first, subs=[*first.subs, lie]), *rest]
    others = [
        msgspec.structs.replace(good, items=items),
        msgspec.structs.replace(good, partition=7),
        msgspec.structs.replace(good, collection="nobody-watches"),
        msgspec.structs.replace(good, generation=good.generation + 1),
    ]
    scene.deliver(others)
    scene.append({"v": 1, "from": "one"})
    scene.check()
    assert metric(scene.call, 'tailrace_watch_delivered_batches_total{result="wrong"}') >= 1
    assert metric(scene.call, 'tailrace_watch_delivered_batches_total{result="malformed"}') >= 1


def test_whoever_came_later_reads_for_itself(server: ServerProcess) -> None:
    """A job that did not know of a subscription has examined nothing for it."""
    scene = Scene(server, "later")
    late = Live(server)
    late.send("auth", "a")
    connection = late.take_until("auth_ack")[-1]["payload"]["connectionId"]
    late.send("subscribe", "rare", query={"collection": "later", **QUERIES["often"]}, maxUnacked=1)
    late.take_until("subscribe_ack")
    scene.call("PUT", f"{BASE}/docs/later/first", {"n": 1})
    first = late.take_until("event")[-1]
    scene.call("PUT", f"{BASE}/docs/later/second", {"n": 2})
    upto = scene.call("GET", f"{BASE}/collections/later").body["positions"]
    scene.deliver([scene.batch(partition, 1, last) for partition, last in enumerate(upto)])
    late.send("ack", subId="rare", positions={str(first["partition"]): first["seq"]})
    assert late.take_until("event")[-1]["payload"]["delta"]["doc"]["id"] == "second"
    assert connection != scene.held.connection
    late.close()
    scene.held.live.close()
