# pyright: strict
"""A server with a pipeline of its own, under steady appends: how long segments wait for companions."""

from __future__ import annotations

import shutil
import time
from datetime import datetime
from itertools import repeat
from typing import cast

from bench.evlog.events import bodies
from bench.evlog.measure import percentile_ms
from bench.evlog.target import Json, Target
from bench.pipeline.place import Figures, Place, StageError, until
from bench.processes import tree_cpu_seconds
from bench.run import say
from tailrace.client import Client

# Segments of a quarter of the usual size: as many readings in a quarter of the time.
SETTINGS = {
    "TAILRACE_SEAL_BYTES": str(4 << 20),
    "TAILRACE_PIPELINE_START_BYTES": str(1 << 20),
    "TAILRACE_PIPELINE_START_AFTER": "1000",
}
BATCH = 500
EVENTS_PER_S = 2000
EVENTS_MAX = 240_000
IDLE_S = 30.0
PATIENCE_S = 300.0


def live(place: Place) -> Figures:
    directory = place.directory / "live"
    shutil.rmtree(directory, ignore_errors=True)
    try:
        with place.server(SETTINGS, name="live", pipeline="auto") as target:
            target.set_up(None)
            events = _append(target, place)
            until(lambda: _is_covered(target), PATIENCE_S, "the last companions")
            waits = _waits(target)
            busy_share = _idle_share(target)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "events": events,
        "events_per_s": EVENTS_PER_S,
        "segments": len(waits),
        "p50_s": percentile_ms(waits, 0.5) / 1000,
        "p95_s": percentile_ms(waits, 0.95) / 1000,
        "max_s": percentile_ms(waits, 1.0) / 1000,
        "idle_core_share": busy_share,
    }


def _append(target: Target, place: Place) -> int:
    done, due = 0, time.monotonic()
    for count, body in bodies(place.file, repeat(BATCH)):
        target.append(body)
        done += count
        if done >= EVENTS_MAX:
            break
        due = max(due + BATCH / EVENTS_PER_S, time.monotonic() - 1.0)
        time.sleep(max(0.0, due - time.monotonic()))
        if done % (EVENTS_MAX // 10) == 0:
            say(f"{done:,} events")
    target.must("POST", "/v1/server/_seal")
    return done


def _pipeline(target: Target) -> Json:
    runtime = cast("dict[str, Json]", target.must("GET", "/v1/server/_details").body["runtime"])
    return runtime["pipeline"]


def _is_covered(target: Target) -> bool:
    found = _pipeline(target)
    if found["state"] == "unavailable":
        raise StageError(f"there is no pipeline: {found['reason']}")
    return cast("Json", found["backlog"])["segments"] == 0 and found["state"] == "idle"


def _waits(target: Target) -> list[float]:
    """Seconds from the record of a segment to its companions, of those sealed when the session was up."""
    sealed: dict[str, datetime] = {}
    published: dict[str, datetime] = {}
    for event in _segment_events(target):
        headers = cast("Json", event["headers"])
        if headers["operation"] != "insert":
            continue
        at = datetime.fromisoformat(str(headers["timestamp"]))
        place = str(event["key"]).rpartition("/")[2]
        if event["type"] == "segment":
            sealed[place.partition("-")[2]] = at
        elif event["type"] == "companion":
            published.setdefault(place, at)
    if not published:
        raise StageError("no companions were published")
    begun = min(published.values())
    waits = [
        (published[one] - at).total_seconds() for one, at in sealed.items() if one in published and at > begun
    ]
    if not waits:
        # So few events that everything was sealed while Spark started.
        waits = [(published[one] - at).total_seconds() for one, at in sealed.items() if one in published]
    return waits


def _segment_events(target: Target) -> list[Json]:
    with Client(f"http://127.0.0.1:{target.server.port}") as client:
        return list(client.stream("__segments__").entries())


def _idle_share(target: Target) -> float:
    """Of one core, that the pipeline takes while there is nothing to do."""
    pid = _pipeline(target)["pid"]
    if not isinstance(pid, int):
        raise StageError("the pipeline has ended already")
    before = tree_cpu_seconds(pid)
    time.sleep(IDLE_S)
    return (tree_cpu_seconds(pid) - before) / IDLE_S
