# pyright: strict
"""Every class of questions, answered from companions, and each answer compared with a count over the file."""

from __future__ import annotations

import os
import shutil
from itertools import islice
from typing import cast

import msgspec

from bench.evlog.compare import true_counts
from bench.evlog.events import read_events
from bench.evlog.measure import Interview, freshness, percentile_ms
from bench.evlog.queries import QueryClass, aggregate_classes, search_classes
from bench.pipeline.place import Figures, Place, StageError
from bench.processes import Peak
from bench.run import say

ROUNDS = 10
PROBES = 20
SAMPLES = 500


def classes(place: Place) -> tuple[list[QueryClass], list[QueryClass]]:
    some = list(islice(read_events(place.file), 0, None, max(1, place.events // SAMPLES)))
    return search_classes(some), aggregate_classes()


def _questions(place: Place) -> list[QueryClass]:
    searches, aggregates = classes(place)
    return [*searches, *aggregates]


def truth(place: Place) -> Figures:
    """How many events answer each question, in the order of the questions."""
    asked = _questions(place)
    counts = true_counts(place.file, asked)
    return {"counts": [counts[id(question)] for one in asked for question in one.questions]}


def queries(place: Place) -> Figures:
    place.figures("companions")
    counted = cast("list[int]", place.figures("truth")["counts"])
    asked = _questions(place)
    questions = [question for one in asked for question in one.questions]
    counts = {id(question): count for question, count in zip(questions, counted, strict=True)}
    # Nothing is kept in memory for searches: what answers is what was built.
    with place.server({"TAILRACE_TAIL_INDEX_MAX_BYTES": "0"}) as target:
        interview = Interview(target, place.events, counts, ROUNDS)
        found: dict[str, object] = {}
        wrong: list[str] = []
        with Peak(target.server) as peak:
            for one in asked:
                answers = interview.ask(one)
                say(f"{one.name}: p50 {answers.p50_ms:.1f} ms, p99 {answers.p99_ms:.1f} ms")
                found[one.name] = {**msgspec.to_builtins(answers), "goal_ms": one.goal_ms}
                wrong += [f"{one.name}: {error}" for error in answers.wrong]
    if wrong:
        raise StageError(f"answers that are not true: {'; '.join(wrong[:5])}")
    return {
        "classes": found,
        "aggregates": [one.name for one in aggregate_classes()],
        "peak_server_mb": peak.bytes / 1e6,
        "peak_all_mb": peak.all_bytes / 1e6,
    }


def fresh(place: Place) -> Figures:
    """How soon single events are found. They go to a copy of the stream: no other stage shall see them."""
    copy = place.directory / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(place.directory / "server", copy, copy_function=_copied)
    try:
        with place.server(name="copy") as target:
            found = [seconds for seconds in freshness(target, PROBES) if seconds is not None]
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    return {
        "p50_ms": percentile_ms(found, 0.5),
        "max_ms": percentile_ms(found, 1.0),
        "never": PROBES - len(found),
    }


def _copied(source: str, target: str) -> None:
    """Objects never change, so another name for them does."""
    if "/data/objects/" in source:
        os.link(source, target)
    else:
        shutil.copy2(source, target)
