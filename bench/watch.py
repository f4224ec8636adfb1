"""The matcher: changes per second with many subscriptions, beside evaluating every one of them.

    python -m bench.watch [--subscriptions 1000,10000,100000] [--changes 2000]

Documents have about twenty fields. The mix: 45 % equality on a field with many values, 25 % two equalities on
fields with few values and a range, 12 % two ranges and an equality, 13 % `in`, 3 % equality and range, 2 %
ranges only.
"""

from __future__ import annotations

import argparse
import random
import time
import tracemalloc
from typing import Any

from tailrace.watch.change import NULL, Change, ChangeEntry, Images, Prev
from tailrace.watch.document import flat
from tailrace.watch.matcher import Interest, Matcher
from tailrace.watch.predicate import Predicate
from tailrace.watch.query import read_query

USERS = 100_000
NAIVE_CHANGES = 20


def filters(chance: random.Random) -> list[dict[str, Any]]:
    def one(field: str, op: str, value: Any) -> dict[str, Any]:
        return {"field": field, "op": op, "value": value}

    kind = chance.random()
    region, status = f"r{chance.randrange(20)}", f"s{chance.randrange(8)}"
    if kind < 0.45:
        return [one("user", "==", f"u{chance.randrange(USERS)}"), one("status", "==", status)]
    if kind < 0.70:
        return [
            one("region", "==", region),
            one("status", "==", status),
            one("amount", ">", chance.uniform(9_000, 10_000)),
        ]
    if kind < 0.82:
        low, other = chance.uniform(0, 9_950), chance.uniform(0, 990)
        return [
            one("amount", ">=", low),
            one("amount", "<", low + 20),
            one("score", ">", other),
            one("score", "<", other + 10),
            one("region", "==", region),
        ]
    if kind < 0.90:
        return [one("sku", "in", [f"k{chance.randrange(50_000)}"]), one("status", "!=", status)]
    if kind < 0.95:
        return [one("user", "in", [f"u{chance.randrange(USERS)}" for _ in range(4)])]
    if kind < 0.98:
        return [one("sku", "==", f"k{chance.randrange(50_000)}"), one("amount", "<", 5_000)]
    low = chance.uniform(0, 9_999)
    return [one("amount", ">=", low), one("amount", "<=", low + 1)]


def document(chance: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {f"field{number}": chance.randrange(100) for number in range(14)}
    return found | {
        "user": f"u{chance.randrange(USERS)}",
        "region": f"r{chance.randrange(20)}",
        "status": f"s{chance.randrange(8)}",
        "amount": chance.uniform(0, 10_000),
        "score": chance.uniform(0, 1_000),
        "sku": f"k{chance.randrange(50_000)}",
    }


class Prepared(Change):
    """A change whose images are at hand: reading them is not what is measured."""

    __slots__ = ("_images",)

    def __init__(self, before: dict[str, Any], after: dict[str, Any], seq: int) -> None:
        entry = ChangeEntry(
            database="d",
            collection="c",
            documentKey="k",
            op="replace",
            before=NULL,
            after=NULL,
            images=Images("full", "full"),
            version=2,
            createdAt=0,
            prev=Prev(1, 0),
            txn=None,
            commitTime="",
        )
        super().__init__(entry, 0, seq, 0)
        self._before = flat(before, "k", "c", 1, 0, 0)
        self._after = flat(after, "k", "c", 2, 0, 0)


def run(count: int, changes: int) -> None:
    chance = random.Random(7)
    tracemalloc.start()
    matcher: Matcher[int] = Matcher(1000)
    for _ in range(200):
        matcher.index.sample.add(document(chance))
    interests: list[Interest] = []
    begun = time.perf_counter()
    held = tracemalloc.get_traced_memory()[0]
    for number in range(count):
        query = read_query({"collection": "c", "filters": filters(chance)}, live=True)
        interest = Interest(Predicate(query.parts), None)
        interests.append(interest)
        matcher.add(interest, number)
    subscribing_s = time.perf_counter() - begun
    each_bytes = (tracemalloc.get_traced_memory()[0] - held) / count
    tracemalloc.stop()
    prepared = [Prepared(document(chance), document(chance), seq) for seq in range(changes)]
    matcher.candidates = matcher.hits = 0
    times: list[float] = []
    for change in prepared:
        begun = time.perf_counter()
        for _ in matcher.matches(change, set()):
            pass
        times.append(time.perf_counter() - begun)
    total_s = sum(times)
    begun = time.perf_counter()
    tried = prepared[:NAIVE_CHANGES]
    naive = sum(1 for change in tried for interest in interests if interest.event(change) is not None)
    naive_s = (time.perf_counter() - begun) / NAIVE_CHANGES
    times.sort()
    p99_us = times[int(changes * 0.99)] * 1e6
    print(
        f"{count:>8,} subscriptions: {changes / total_s:>8,.0f} changes/s, p99 {p99_us:,.0f} us, "
        f"{matcher.candidates / changes:.1f} candidates and {matcher.hits / changes:.2f} matches per change; "
        f"naive {1 / naive_s:,.1f} changes/s ({naive / NAIVE_CHANGES:.2f} matches); "
        f"{each_bytes:,.0f} bytes per subscription, {count / subscribing_s:,.0f} subscribed/s (traced)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Matching with an index, beside evaluating everything.")
    parser.add_argument("--subscriptions", default="1000,10000,100000")
    parser.add_argument("--changes", type=int, default=2000)
    given = parser.parse_args()
    for count in given.subscriptions.split(","):
        run(int(count), given.changes)


if __name__ == "__main__":
    main()
