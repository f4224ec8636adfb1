# pyright: strict
"""The Prisma server with the same events, as far as it gets in its time: what it takes and answers.

Its answers are not compared: of events that it has not taken nothing can be found.
"""

from __future__ import annotations

import shutil
import time
from itertools import repeat
from typing import cast

from bench import install
from bench.evlog.events import bodies
from bench.evlog.queries import Aggregate, QueryClass
from bench.evlog.target import Json, Target
from bench.peers import ALL
from bench.pipeline.asking import classes
from bench.pipeline.place import Figures, Place
from bench.processes import Peak
from bench.run import say
from tailrace.schema.profiles.canonical_registries import EVLOG_REGISTRY

PEER = "prisma-raised"
LOAD_S_MAX = 300.0
SETTLE_S_MAX = 60.0
BATCH = 1000


def peer(place: Place) -> Figures:
    install.npm_peers()
    directory = place.directory / "peer"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    running = ALL[PEER].start(directory, None, {})
    target = Target(ALL[PEER], running)
    try:
        target.set_up(cast("Json", EVLOG_REGISTRY["search"]))
        with Peak(running) as loading:
            events, seconds = _filled(target, place)
        settled_s = target.settle(SETTLE_S_MAX)
        with Peak(running) as asking:
            searches, aggregates = classes(place)
            asked = {one.name: _asked(target, one) for one in (*searches, *aggregates)}
        at_rest = target.bytes_at_rest(directory)
    finally:
        running.stop()
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "events": events,
        "ingest_per_s": events / seconds,
        "peak_loading_mb": loading.bytes / 1e6,
        "peak_asked_mb": asking.bytes / 1e6,
        "settled_s": settled_s,
        "bytes_at_rest": at_rest,
        "classes": asked,
    }


def _filled(target: Target, place: Place) -> tuple[int, float]:
    begun, taken = time.monotonic(), 0
    for count, body in bodies(place.file, repeat(BATCH)):
        target.append(body)
        taken += count
        if time.monotonic() - begun > LOAD_S_MAX or taken >= place.events:
            break
    seconds = time.monotonic() - begun
    say(f"the peer took {taken:,} events in {seconds:,.0f} s")
    return taken, seconds


def _asked(target: Target, one: QueryClass) -> dict[str, object]:
    """The first question of a class, warm: most of the time is spent waiting for the end of its patience."""
    [question, *_] = one.questions
    call = target.aggregate if isinstance(question, Aggregate) else target.search
    call(question.body)
    answer = call(question.body)
    say(f"the peer, {one.name}: {answer.seconds * 1000:,.1f} ms, in full: {answer.complete}")
    return {"ms": answer.seconds * 1000, "complete": answer.complete}
