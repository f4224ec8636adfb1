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
from support.watch_client import Live
from tailrace.pipeline.watch.place import Place
from tailrace.watch.deliveries import Batch, decode

BASE = "/v1/databases/default"
LAST = "zz-last"
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


def place_of(server: ServerProcess) -> Place:
    return Place({"endpoint": server.base_url})


def deliveries(call: Caller, stream: str) -> list[Batch]:
    """Everything that was delivered, in the order of the log."""
    found: list[Batch] = []
    offset = "-1"
    while True:
        answer = call("GET", f"/v1/stream/{stream}?offset={offset}")
        assert answer.status == 200, answer.raw
        batches = [decode(json.dumps(entry).encode()) for entry in answer.body]
        found += [batch for batch in batches if batch is not None]
        offset = answer.headers["stream-next-offset"]
        if answer.headers.get("stream-up-to-date") == "true":
            return found


def tuples(batches: list[Batch]) -> list[Tuple]:
    return [
        (batch.partition, item.seq, told.key, told.op, told.reason)
        for batch in batches
        for item in batch.items
        for told in item.subs
    ]
