"""The matcher alone: changes per second with many subscriptions, beside evaluating every one of them.

Documents have about twenty fields. The reference mix: 45 % equality on a field with many values, 25 % two
equalities on fields with few values and a range, 12 % two ranges and an equality, 8 % prefix, 5 % `in`, 3 %
with OR, 2 % ranges only. The broad one has few values, so that very many subscriptions match each change.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from typing import Any, NamedTuple

from tailrace.watch.cel import Call
from tailrace.watch.document import (
    RAW_NULL,
    Change,
    ChangeEntry,
    ChangeImages,
    PreviousVersion,
    flatten_document,
)
from tailrace.watch.external_matching import BloomFilter, bloom_key
from tailrace.watch.matcher import Interest, Matcher
from tailrace.watch.predicate import Predicate, PredicatePart, equality_class
from tailrace.watch.query import read_query

USERS = 100_000
BROAD_USERS = 400
FILED = 2000
PAGE = 256
NAIVE_CHANGES = 10
SHARED_PREDICATES = 1000


def _one(field: str, op: str, value: Any) -> dict[str, Any]:
    return {"field": field, "op": op, "value": value}


def filters(chance: random.Random, users: int) -> list[dict[str, Any]]:
    kind = chance.random()
    region, status = f"r{chance.randrange(20)}", f"s{chance.randrange(8)}"
    user = f"u{chance.randrange(users)}"
    if kind < 0.45:
        more = [_one("status", "==", status), _one("amount", "<", 9_000)][: chance.randrange(3)]
        return [_one("user", "==", user), *more]
    if kind < 0.70:
        low = chance.uniform(9_800, 10_000)
        return [_one("region", "==", region), _one("status", "==", status), _one("amount", ">", low)]
    if kind < 0.82:
        low, other = chance.uniform(0, 9_950), chance.uniform(0, 990)
        return [
            _one("amount", ">=", low),
            _one("amount", "<", low + 20),
            _one("score", ">", other),
            _one("score", "<", other + 10),
            _one("region", "==", region),
        ]
    if kind < 0.93:
        return [_one("user", "in", [f"u{chance.randrange(users)}" for _ in range(4)])]
    low = chance.uniform(0, 9_999)
    return [_one("amount", ">=", low), _one("amount", "<=", low + 1)]


def parts(chance: random.Random, users: int) -> list[PredicatePart]:
    """A query; prefixes and ORs are no filters, so their trees are put together here."""
    kind = chance.random()
    listed = filters(chance, users)
    if kind < 0.08:
        asked = [_one("sku", "==", f"k{chance.randrange(50_000)}")]
        (part,) = read_query({"collection": "c", "filters": asked}, live=True).parts
        node = part.node
        assert isinstance(node, Call)
        return [PredicatePart(Call("startsWith", node.args))]
    if kind < 0.11:
        user, sku = f"u{chance.randrange(users)}", f"k{chance.randrange(50_000)}"
        asked = [_one("user", "==", user), _one("sku", "==", sku)]
        one, other = read_query({"collection": "c", "filters": asked}, live=True).parts
        return [PredicatePart(Call("_||_", (one.node, other.node)))]
    return list(read_query({"collection": "c", "filters": listed}, live=True).parts)


def document(chance: random.Random, users: int) -> dict[str, Any]:
    found: dict[str, Any] = {f"field{number}": chance.randrange(100) for number in range(14)}
    return found | {
        "user": f"u{chance.randrange(users)}",
        "region": f"r{chance.randrange(20)}",
        "status": f"s{chance.randrange(8)}",
        "amount": chance.uniform(0, 10_000),
        "score": chance.uniform(0, 1_000),
        "sku": f"k{chance.randrange(50_000)}",
    }


class Prepared(Change):
    """A change whose images are at hand: reading them is not what is measured."""

    __slots__ = ()

    def __init__(self, before: dict[str, Any], after: dict[str, Any], seq: int) -> None:
        entry = ChangeEntry(
            database="d",
            collection="c",
            documentKey="k",
            op="replace",
            before=RAW_NULL,
            after=RAW_NULL,
            images=ChangeImages("full", "full"),
            version=2,
            createdAt=0,
            prev=PreviousVersion(1, 0),
            txn=None,
            commitTime="",
        )
        super().__init__(entry, 0, seq, 0)
        self._before = flatten_document(before, "k", "c", 1, 0, 0)
        self._after = flatten_document(after, "k", "c", 2, 0, 0)


def changes(chance: random.Random, users: int, count: int) -> list[Prepared]:
    """Updates: most fields stay as they are."""
    found: list[Prepared] = []
    for seq in range(count):
        before = document(chance, users)
        other = document(chance, users)
        changed = {name: other[name] for name in ("status", "amount", "score", "field1")}
        found.append(Prepared(before, before | changed, seq))
    return found


class Matched(NamedTuple):
    """One set of subscriptions, and what the matcher does with it."""

    subscriptions: int
    broad: bool
    per_s: float
    together_per_s: float  # of changes that come many at a time
    p99_us: float
    candidates: float  # for each change
    matches: float
    each_bytes: float
    filed_per_s: float
    naive_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.subscriptions:>8,} subscriptions{' (broad)' if self.broad else ''}: "
            f"{self.per_s:,.0f} changes/s, {self.together_per_s:,.0f} together, p99 {self.p99_us:,.0f} us, "
            f"{self.candidates:.1f} candidates and "
            f"{self.matches:.2f} matches per change; {self.each_bytes:,.0f} bytes per subscription; "
            f"{self.filed_per_s:,.0f} filed/s; all evaluated: {self.naive_per_s:,.1f} changes/s, "
            f"{self.per_s / self.naive_per_s:,.0f} times slower"
        )


def run(count: int, change_count: int, *, broad: bool) -> Matched:
    chance = random.Random(7)
    users = BROAD_USERS if broad else USERS
    matcher: Matcher[int] = Matcher(1000)
    for _ in range(2000):
        matcher.index.sample.add(document(chance, users))
    interests, each_bytes = _filled(matcher, chance, users, count)
    filed_per_s = _filing(matcher, chance, users, count)
    prepared = changes(chance, users, change_count)
    matcher.candidates = matcher.hits = 0
    times = _timed(matcher, prepared)
    candidates, hits = matcher.candidates, matcher.hits
    together_per_s = _together(matcher, prepared)
    found = Matched(
        count,
        broad,
        change_count / sum(times),
        together_per_s,
        sorted(times)[int(change_count * 0.99)] * 1e6,
        candidates / change_count,
        hits / change_count,
        each_bytes,
        filed_per_s,
        _naive(interests, prepared[:NAIVE_CHANGES]),
    )
    print(found)
    return found


def _filled(
    matcher: Matcher[int], chance: random.Random, users: int, count: int
) -> tuple[list[Interest], float]:
    """Subscriptions, and how much memory each has taken."""
    gc.collect()
    tracemalloc.start()
    held = tracemalloc.get_traced_memory()[0]
    interests: list[Interest] = []
    for number in range(count):
        interest = Interest(Predicate(parts(chance, users)), None)
        interests.append(interest)
        matcher.add(interest, number)
    each_bytes = (tracemalloc.get_traced_memory()[0] - held) / count
    tracemalloc.stop()
    return interests, each_bytes


def _filing(matcher: Matcher[int], chance: random.Random, users: int, count: int) -> float:
    """How many more can be filed in a second."""
    more = [Interest(Predicate(parts(chance, users)), None) for _ in range(FILED)]
    begun = time.process_time()
    for number, interest in enumerate(more):
        matcher.add(interest, count + number)
    spent_s = time.process_time() - begun
    for number, interest in enumerate(more):
        matcher.discard(interest, count + number)
    return FILED / spent_s


def _timed(matcher: Matcher[int], prepared: list[Prepared]) -> list[float]:
    gc.collect()
    gc.disable()
    times: list[float] = []
    for change in prepared:
        begun = time.process_time()
        matcher.match(change)
        times.append(time.process_time() - begun)
    gc.enable()
    return times


def _together(matcher: Matcher[int], prepared: list[Prepared]) -> float:
    """As the server takes a page of changes; the first round gives the predicates their rows."""
    pages = [prepared[begin : begin + PAGE] for begin in range(0, len(prepared), PAGE)]
    spent_s = 0.0
    gc.disable()
    for _ in range(2):
        begun = time.process_time()
        for page in pages:
            matcher.match_batch(page)
        spent_s = time.process_time() - begun
    gc.enable()
    return len(prepared) / spent_s


def shared(each: int, change_count: int) -> tuple[int, int, float]:
    """Many who watch the same: subscriptions, different predicates, changes per second."""
    chance = random.Random(7)
    matcher: Matcher[int] = Matcher(1000)
    for _ in range(2000):
        matcher.index.sample.add(document(chance, BROAD_USERS))
    for number in range(SHARED_PREDICATES):
        interest = Interest(Predicate(parts(chance, BROAD_USERS)), None)
        for one in range(each):
            matcher.add(interest, number * each + one)
    times = _timed(matcher, changes(chance, BROAD_USERS, change_count))
    found = (SHARED_PREDICATES * each, len(matcher), change_count / sum(times))
    print(f"{found[0]:>9,} subscriptions on {found[1]:,} predicates: {found[2]:,.0f} changes/s")
    return found


def _naive(interests: list[Interest], prepared: list[Prepared]) -> float:
    """Changes per second if every subscription is evaluated."""
    begun = time.process_time()
    for change in prepared:
        for interest in interests:
            interest.classify(change)
    return len(prepared) / (time.process_time() - begun)


def bloom(keys: int, asked: int) -> None:
    """What a filter in front of the exact lookup would save in one process."""
    chance = random.Random(3)
    exact: dict[tuple[tuple[str, ...], Any], int] = {}
    filtered = BloomFilter(0.0)
    for number in range(keys):
        exact[("user",), equality_class(f"u{number}")] = number
        filtered.add(bloom_key(("user",), f"u{number}"))
    probes = [f"u{chance.randrange(20 * keys)}" for _ in range(asked)]
    begun = time.process_time()
    hits = sum((("user",), equality_class(value)) in exact for value in probes)
    exact_s = time.process_time() - begun
    begun = time.process_time()
    found = sum(bloom_key(("user",), value) in filtered for value in probes)
    bloom_s = time.process_time() - begun
    wrong = (found - hits) / max(1, asked - hits)
    print(
        f"{keys:>8,} keys: exact lookup {exact_s / asked * 1e9:,.0f} ns, "
        f"Bloom filter {bloom_s / asked * 1e9:,.0f} ns "
        f"({filtered.size_bytes / 1024:,.0f} KiB, {wrong:.2%} found wrongly)"
    )
