# pyright: strict
"""The readings of one server: loading, freshness, questions, memory, bytes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path

import msgspec
import orjson

from bench.evlog.compare import wrong
from bench.evlog.events import block_of, bodies
from bench.evlog.queries import Aggregate, QueryClass
from bench.evlog.target import STREAM, Answer, Target
from bench.processes import Peak, PeerError

FRESH_S_MAX = 30.0
CLASS_S_MAX = 20.0
ASKED_MIN = 3


class Asked(msgspec.Struct):
    """One class of questions."""

    p50_ms: float
    p99_ms: float
    asked: int
    timed_out: int
    incomplete: int  # answered without having looked at everything
    failed: int
    wrong: list[str]


class Reading(msgspec.Struct):
    events: int
    ingest_per_s: dict[str, float]  # by the size of the batches
    settle_s: float
    fresh_p50_ms: float
    fresh_max_ms: float
    never_fresh: int
    peak_ingest_mb: float
    peak_queries_mb: float
    peak_ingest_all_mb: float  # with the processes that the server started
    peak_queries_all_mb: float
    at_rest_mb: float
    asked: dict[str, Asked]


class Loaded(msgspec.Struct):
    events: int
    per_s: dict[str, float]
    peak_mb: float
    peak_all_mb: float


def load(target: Target, path: Path, events: int) -> Loaded:
    """The first fifth in batches of 100, the rest in batches of 1,000, from one writer, in order."""
    small = events // 5 // 100 * 100
    sizes = chain(repeat(100, small // 100), repeat(1000))
    done: Counter[int] = Counter()
    spent: Counter[int] = Counter()
    with Peak(target.server) as peak:
        for count, body in bodies(path, sizes):
            size = 100 if done.total() < small else 1000
            spent[size] += _timed_append_ns(target, body)
            done[size] += count
    rates = {str(size): done[size] / spent[size] * 1e9 for size in done}
    return Loaded(done.total(), rates, peak.bytes / 1e6, peak.all_bytes / 1e6)


def _timed_append_ns(target: Target, body: bytes) -> int:
    begun = time.perf_counter_ns()
    target.append(body)
    return time.perf_counter_ns() - begun


def freshness(target: Target, probes: int) -> list[float | None]:
    """From the acknowledgement of an append until a search finds it, in seconds; None for not in time."""
    found: list[float | None] = []
    for event in block_of(99, 0, 0.0)[:probes]:
        # The probes lie behind the day of the others, so that no question finds them.
        body = orjson.dumps([{**event, "timestamp": "2026-02-01T00:00:00.000Z", "service": "probe"}])
        target.append(body)
        acknowledged = time.perf_counter()
        found.append(_until_found(target, str(event["requestId"]), acknowledged))
        if found.count(None) == 2:
            break
    return found


def _until_found(target: Target, request_id: str, since: float) -> float | None:
    while time.perf_counter() - since < FRESH_S_MAX:
        answer = target.search({"q": f"req:{request_id}", "size": 1})
        now = time.perf_counter()
        if answer.body.get("hits"):
            return now - since
        if now - since > 1.0:
            time.sleep(0.1)
    return None


class Interview:
    """Asks every question of a class a few times, and keeps one answer of each for comparison."""

    def __init__(self, target: Target, events: int, counts: dict[int, int], rounds: int) -> None:
        self._target = target
        self._events = events
        self._counts = counts
        self._rounds = rounds
        self.answers: dict[int, Answer] = {}

    def ask(self, one: QueryClass) -> Asked:
        taken: list[float] = []
        asked = Asked(0.0, 0.0, 0, 0, 0, 0, [])
        begun = time.monotonic()
        for turn in range(self._rounds + 1):
            for question in one.questions:
                if time.monotonic() - begun > CLASS_S_MAX and len(taken) >= ASKED_MIN:
                    break
                call = self._target.aggregate if isinstance(question, Aggregate) else self._target.search
                answer = call(question.body)
                if not turn:
                    # The first time warms what can be warmed, and is what the answers are judged by.
                    self.answers[id(question)] = answer
                    error = wrong(question, answer, self._counts[id(question)], self._events)
                    if error is not None:
                        asked.wrong.append(f"{question.body.get('q', one.name)}: {error}")
                    if len(one.questions) > 1 or self._rounds:
                        continue
                taken.append(answer.seconds)
                self._tell(asked, answer)
        asked.p50_ms, asked.p99_ms = percentile_ms(taken, 0.5), percentile_ms(taken, 0.99)
        asked.asked = len(taken)
        return asked

    def _tell(self, asked: Asked, answer: Answer) -> None:
        if answer.timed_out:
            asked.timed_out += 1
        elif answer.status != 200:
            asked.failed += 1
        elif not answer.complete:
            asked.incomplete += 1


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 if ordered else 0.0


def read(
    target: Target,
    directory: Path,
    path: Path,
    events: int,
    classes: Sequence[QueryClass],
    counts: dict[int, int],
    rounds: int,
    patience_s: float,
) -> tuple[Reading, dict[int, Answer]]:
    """All readings of one server, which has been set up."""
    loaded = load(target, path, events)
    target.must("GET", f"/v1/stream/{STREAM}/_details")
    settle_s = target.settle(patience_s)
    interview = Interview(target, events, counts, rounds)
    with Peak(target.server) as peak:
        asked = {one.name: interview.ask(one) for one in classes}
        try:
            fresh = freshness(target, 20)
        except PeerError:
            fresh = [None]  # a server that takes no more appends is not fresh either
    found = [seconds for seconds in fresh if seconds is not None]
    reading = Reading(
        loaded.events,
        loaded.per_s,
        settle_s,
        percentile_ms(found, 0.5),
        percentile_ms(found, 1.0),
        fresh.count(None),
        loaded.peak_mb,
        peak.bytes / 1e6,
        loaded.peak_all_mb,
        peak.all_bytes / 1e6,
        target.bytes_at_rest(directory) / 1e6,
        asked,
    )
    return reading, interview.answers
