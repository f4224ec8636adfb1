# pyright: strict
"""Fills one stream with wide events and seals all of it."""

from __future__ import annotations

import shutil
import time
from itertools import repeat

import duckdb

from bench.evlog.events import bodies, write_events
from bench.evlog.target import Target
from bench.pipeline.place import SEED, Figures, Place, until
from bench.processes import Peak
from bench.run import say

BATCH = 1000
SEAL_S_MAX = 1800.0


def load(place: Place) -> Figures:
    say(f"writing {place.events:,} events to a file, unless it is there")
    write_events(place.file, place.events, SEED)
    shutil.rmtree(place.directory, ignore_errors=True)
    with place.server() as target:
        target.set_up(None)
        with Peak(target.server) as peak:
            rate = _append_all(target, place)
            seal_s = seal(target)
    segments = list((place.folder / "segments").glob("*.parquet"))
    return {
        "events": place.events,
        "ingest_per_s": rate,
        "seal_s": seal_s,
        "peak_server_mb": peak.bytes / 1e6,
        "peak_all_mb": peak.all_bytes / 1e6,
        "segments": len(segments),
        "segment_bytes": sum(path.stat().st_size for path in segments),
        "raw_bytes": payload_bytes(place.segments, place.events),
        "sent_bytes": place.file.stat().st_size - place.events,
    }


def _append_all(target: Target, place: Place) -> float:
    done, spent_s, told = 0, 0.0, 0
    for count, body in bodies(place.file, repeat(BATCH)):
        begun = time.perf_counter()
        target.append(body)
        spent_s += time.perf_counter() - begun
        done += count
        if done * 10 // place.events > told:
            told = done * 10 // place.events
            say(f"loaded {done:,} of {place.events:,}, {done / spent_s:,.0f} a second")
    return done / spent_s


def seal(target: Target) -> float:
    begun = time.monotonic()
    until(
        lambda: target.call("POST", "/v1/server/_seal", patience_s=300.0).status == 200, SEAL_S_MAX, "sealing"
    )
    return time.monotonic() - begun


def payload_bytes(segments: str, events: int) -> int:
    """The payload of all segments; they must hold every event."""
    query = f"SELECT count(*), sum(strlen(payload)) FROM read_parquet('{segments}')"
    rows, size = duckdb.execute(query).fetchall()[0]
    if rows != events:
        raise AssertionError(f"{rows} events are sealed instead of {events}")
    return int(size)
