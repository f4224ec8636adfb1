"""A server whose documents change while somebody watches, for jobs that have to come to the same results."""

from __future__ import annotations

import json
import random
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from websockets.exceptions import ConnectionClosed

from support.calls import Caller
from support.server import ServerProcess
from support.sources import changes
from support.watch_client import Live
from tailrace.protocol import offsets
from tailrace.spark.live_queries.subscription_matcher import (
    CompiledSubscriptions,
    SubscriptionSet,
    match_change,
)
from tailrace.spark.live_queries.subscription_sets import fold_summaries
from tailrace.spark.live_queries.watch_client import WatchClient
from tailrace.watch.document import Change, decode_change
from tailrace.watch.external_matching import DeliveredChange, DeliveredMatch, DeliveryBatch, decode_delivery

BASE = "/v1/databases/default"
LAST = "zz-last"
EXAMINED_EACH = 20  # numbers in one delivery of a job that is no job
QUERIES: dict[str, dict[str, Any]] = {
    "all": {},
    "large": {"filters": [{"field": "n", "op": ">", "value": 50}]},
    "between": {"where": "doc.n >= 20 && doc.n < 70 && doc.kind == 'a'"},
    "kinds": {"filters": [{"field": "kind", "op": "in", "value": ["a", "c"]}]},
    "prefix": {"where": "doc.name.startsWith('x') || doc.n == 7"},
    "tags": {"filters": [{"field": "tags", "op": "contains", "value": "red"}]},
    "library": {"where": "string(doc.n) == '7' || int(doc.name.size()) > 5"},
    "other": {"filters": [{"field": "kind", "op": "!=", "value": "a"}]},
    "two": {"documents": ["d1", "d2"]},
    "mail": {"filters": [{"field": "email", "op": "==", "value": "secret-d3@example.com"}]},
    "mails": {"where": "doc.email.startsWith('secret-d1')"},
}

Tuple = tuple[int, int, str, str, str]  # partition, number, subscription, op, reason


class Watching(NamedTuple):
    """A connection with its subscriptions, and how they are called by others."""

    live: Live
    connection: str

    def events(self) -> set[Tuple]:
        """Everything up to the last write."""
        found: set[Tuple] = set()
        while True:
            event = self.live.take()
            if event["type"] != "event":
                assert event["type"] == "heartbeat", event
                continue
            delta = event["payload"]["delta"]
            found |= {
                (event["partition"], event["seq"], f"{self.connection}/{sub}", delta["op"], delta["reason"])
                for sub in event["subIds"]
            }
            if delta["doc"]["id"] == LAST:
                threading.Thread(target=self._idle, daemon=True).start()
                return found

    def _idle(self) -> None:
        """Takes what still comes, so that the connection stays alive."""
        with suppress(ConnectionClosed, OSError):
            while True:
                with suppress(TimeoutError):
                    self.live.socket.recv(timeout=1)


def watch(server: ServerProcess, collection: str, queries: dict[str, dict[str, Any]]) -> Watching:
    live = Live(server)
    live.send("auth", "a")
    connection = live.take_until("auth_ack")[-1]["payload"]["connectionId"]
    for name, query in queries.items():
        live.send("subscribe", name, query={"collection": collection, **query})
        live.take_until("subscribe_ack")
    return Watching(live, connection)


def change(call: Caller, collection: str, steps: int, seed: int = 1) -> None:
    """Writes that make documents come, change, go, hide and come again."""
    chance = random.Random(seed)
    writes: list[dict[str, Any]] = []
    for _ in range(steps):
        name = f"d{chance.randrange(20)}"
        path = f"{collection}/{name}"
        if chance.random() < 0.15:
            writes.append({"op": "delete", "path": path})
            continue
        data: dict[str, Any] = {
            # Now and then exactly where a query draws its line.
            "n": chance.choice([20, 50, 70.0, chance.randrange(100), chance.randrange(100) + 0.5]),
            "kind": chance.choice("abc"),
            "name": chance.choice(["x1", "y2", "a longer one", "x é 😀"]),
            "tags": chance.sample(["red", "green", "blue"], chance.randrange(3)),
            "email": f"secret-{name}@example.com",
        }
        if chance.random() < 0.2:
            data["hidden"] = True
        writes.append({"op": "put", "path": path, "data": data})
    # The last one in a commit of its own: whoever has seen it has seen all.
    last = [{"op": "put", "path": f"{collection}/{LAST}", "data": {"n": 1}}]
    for page in (*(writes[start : start + 100] for start in range(0, len(writes), 100)), last):
        answer = call("POST", f"{BASE}/batch", {"writes": page})
        assert answer.status == 200, answer.raw


def place_of(server: ServerProcess) -> WatchClient:
    return WatchClient({"endpoint": server.base_url})


def deliveries(call: Caller, stream: str) -> list[DeliveryBatch]:
    """Everything that was delivered, in the order of the log."""
    batches = [decode_delivery(json.dumps(entry).encode()) for entry in _entries(call, stream)]
    return [batch for batch in batches if batch is not None]


def tuples(batches: list[DeliveryBatch]) -> list[Tuple]:
    return [
        (batch.partition, item.seq, told.key, told.op, told.reason)
        for batch in batches
        for item in batch.items
        for told in item.subs
    ]


def metric(call: Caller, name: str) -> float:
    """A number that the server counts; without its labels, all of them together."""
    lines = call("GET", "/metrics").raw.decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines]
    return sum(float(value) for found, value in pairs if found == name or found.startswith(f"{name}{{"))


class Held:
    """Subscriptions that are sent one event at a time: what happens meanwhile they read from the log."""

    def __init__(self, server: ServerProcess, collection: str, queries: dict[str, dict[str, Any]]) -> None:
        self.live = Live(server)
        self.live.send("auth", "a")
        self.connection: str = self.live.take_until("auth_ack")[-1]["payload"]["connectionId"]
        self._waiting = dict.fromkeys(queries, (0, 0))  # by subscription: what is not acknowledged
        for name, query in queries.items():
            self.live.send("subscribe", name, query={"collection": collection, **query}, maxUnacked=1)
            self.live.take_until("subscribe_ack")

    def take_first(self) -> None:
        """From here on they are held back."""
        while not all(seq for _, seq in self._waiting.values()):
            self._take()

    def catch_up(self, count: int) -> list[Tuple]:
        """So many events, in the order in which they came."""
        for name in self._waiting:
            self._acknowledge(name)
        found: list[Tuple] = []
        while len(found) < count:
            taken = self._take()
            found += taken
            for one in taken:
                self._acknowledge(one[2].partition("/")[2])
        return found

    def _take(self) -> list[Tuple]:
        event = self.live.take_until("event")[-1]
        partition, seq, delta = event["partition"], event["seq"], event["payload"]["delta"]
        for sub in event["subIds"]:
            self._waiting[sub] = (partition, seq)
        return [
            (partition, seq, f"{self.connection}/{sub}", delta["op"], delta["reason"])
            for sub in event["subIds"]
        ]

    def _acknowledge(self, name: str) -> None:
        partition, seq = self._waiting[name]
        self.live.send("ack", subId=name, positions={str(partition): seq})


def examine(call: Caller, collection: str) -> tuple[dict[str, Any], list[DeliveryBatch]]:
    """What a job would deliver of a collection, by the same matcher without Spark; and what it was told."""
    answer = call("POST", f"{BASE}/summaries", {"seconds": 60})
    assert answer.status == 200, answer.raw
    announced, info = answer.body, call("GET", f"{BASE}/collections/{collection}").body
    upto = offsets.parse_offset(announced["offset"])[1]
    summaries = fold_summaries(json.dumps(one).encode() for one in _entries(call, announced["stream"])[:upto])
    subs = {key: one for key, one in summaries.items() if one.collection == collection}
    matcher = CompiledSubscriptions(SubscriptionSet(subs)).matchers.get(collection)
    found: list[DeliveryBatch] = []
    for partition, entries in enumerate(changes(call, collection, info["partitions"])):
        told: dict[int, tuple[Change, list[DeliveredMatch]]] = {}
        for seq, entry in enumerate(entries, 1):
            change = decode_change(json.dumps(entry).encode(), partition, seq, 0)
            if change is not None and (subs_told := match_change(matcher, change)):
                told[seq] = (change, subs_told)
        for first in range(1, len(entries) + 1, EXAMINED_EACH):
            last = min(len(entries), first + EXAMINED_EACH - 1)
            items = [item_of(*told[seq]) for seq in range(first, last + 1) if seq in told]
            found.append(
                DeliveryBatch(
                    database="default",
                    collection=collection,
                    partition=partition,
                    owner="test",
                    generation=info["generation"],
                    asOf=upto,
                    first=first,
                    last=last,
                    items=items,
                )
            )
    return announced, found


def item_of(change: Change, told: list[DeliveredMatch]) -> DeliveredChange:
    return DeliveredChange(
        change.seq, change.lsn or "", change.entry.op, told, {"id": change.entry.documentKey}
    )


def _entries(call: Caller, stream: str) -> list[Any]:
    found: list[Any] = []
    offset = "-1"
    while True:
        answer = call("GET", f"{stream}?offset={offset}")
        assert answer.status == 200, answer.raw
        found += answer.body
        offset = answer.headers["stream-next-offset"]
        if answer.headers.get("stream-up-to-date") == "true":
            return found
