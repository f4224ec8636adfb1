# pyright: strict
"""Whether two servers give the same answers, and whether the answers are true of the events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from bench.evlog.events import read_events
from bench.evlog.queries import Aggregate, QueryClass, Search
from bench.evlog.target import Answer, Json

Question = Search | Aggregate


def true_counts(path: Path, classes: Sequence[QueryClass]) -> dict[int, int]:
    """By the identity of a question: how many events answer it."""
    questions = [question for one in classes for question in one.questions]
    counts = {id(question): 0 for question in questions}
    for event in read_events(path):
        for question in questions:
            if question.truth(event):
                counts[id(question)] += 1
    return counts


def wrong(question: Question, answer: Answer, expected: int, loaded: int) -> str | None:
    """What is untrue in an answer; None if nothing is, or if it says itself that it is not complete."""
    if not answer.complete:
        return None
    if isinstance(question, Aggregate):
        found = _requests(answer)
        return None if found == expected else f"{found} events instead of {expected}"
    total = cast("Json", answer.body.get("total", {}))
    value, relation = total.get("value"), total.get("relation")
    if not isinstance(value, int) or (value != expected if relation == "eq" else value > expected):
        return f"total {relation} {value} instead of {expected}"
    size = cast("int", question.body["size"])
    hits = _ids(answer)
    if len(hits) != min(expected, size):
        return f"{len(hits)} hits instead of {min(expected, size)} (of {loaded} events)"
    return None


def agree(question: Question, ours: Answer, theirs: Answer) -> bool | None:
    """None where the two cannot be compared: one of them did not finish, or words are weighed differently."""
    if not ours.complete or not theirs.complete:
        return None
    if isinstance(question, Aggregate):
        return _close(_groups(ours), _groups(theirs))
    if question.ranked:
        both_exact = _relation(ours) == _relation(theirs) == "eq"
        return ours.body.get("total") == theirs.body.get("total") if both_exact else None
    return _ids(ours) == _ids(theirs)


def _relation(answer: Answer) -> object:
    return cast("Json", answer.body.get("total", {})).get("relation")


def _ids(answer: Answer) -> list[object]:
    hits = cast("list[Json]", answer.body.get("hits", []))
    return [cast("Json", hit.get("source", {})).get("requestId") for hit in hits]


def _requests(answer: Answer) -> int:
    return sum(count for count, _ in _groups(answer).values())


def _groups(answer: Answer) -> dict[tuple[str, str], tuple[int, float]]:
    """By window and key, how many requests and the sum of their durations."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for bucket in cast("list[Json]", answer.body.get("buckets", [])):
        for group in cast("list[Json]", bucket["groups"]):
            measures = cast("dict[str, Json]", group["measures"])
            count = cast("int", measures["requests"]["count"])
            total = float(cast("float", measures["latency"]["sum"]))
            found[str(bucket["start"]), str(sorted(cast("Json", group["key"]).items()))] = count, total
    return found


def _close(
    ours: dict[tuple[str, str], tuple[int, float]], theirs: dict[tuple[str, str], tuple[int, float]]
) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[key][0] == theirs[key][0]
        and math.isclose(ours[key][1], theirs[key][1], rel_tol=1e-6, abs_tol=1e-6)
        for key in ours
    )
