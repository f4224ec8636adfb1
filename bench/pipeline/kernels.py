# pyright: strict
"""What a task of the pipeline does with a segment, without Spark: one segment after the other on one core.

Rates are of the rows counted in what was built. The fast path takes columns out of many records at once; the
slow one, by which it is judged and on which lenses run, every value of every record.
"""

from __future__ import annotations

import hashlib
import resource
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.evlog.events import BLOCK, block_of
from bench.pipeline.place import Figures, Place
from bench.run import say
from tailrace.schema.json_values import encode_json_record
from tailrace.schema.profiles.evlog import Evlog, EvlogConfig
from tailrace.schema.profiles.profile import GENERIC, EvlogProfile, install_profile
from tailrace.schema.registry import Registry
from tailrace.search.index_files.index_plan import BuildPlan, index_plan
from tailrace.spark.index.segment_batches import SegmentBatch
from tailrace.spark.index.segment_build import (
    BuildRequest,
    build_segment,
    create_builders,
    gc_disabled,
    read_batches,
)
from tailrace.storage.segments.model import SegmentRows
from tailrace.storage.segments.parquet import pa, pq
from tailrace.storage.segments.writer import write_segment

STREAM_ID = "ab" * 16
ROWS = 16_000  # about what a segment of 16 MiB holds
SEGMENTS_MAX = 6


def plan() -> BuildPlan:
    registry = install_profile(EvlogProfile({"kind": "evlog"}, "profile"), GENERIC, Registry(name="bench"), 0)
    return BuildPlan(index_plan(registry, "evlog", keyed=True), registry, {"kind": "evlog"})


def segment(path: Path, first: int, count: int) -> tuple[bytes, int]:
    """A segment of generated events, and how large they are."""
    normalise = Evlog(EvlogConfig()).normalise
    events = [event for block in range(count // BLOCK) for event in block_of(7, first // BLOCK + block, 10.0)]
    records = [normalise(event, 0) for event in events]
    payloads = [encode_json_record(record) for record in records]
    ends: array[int] = array("I")
    at = 0
    for payload in payloads:
        at += len(payload)
        ends.append(at)
        at += 1
    keys: list[bytes | None] = [str(record["requestId"]).encode() for record in records]
    rows = SegmentRows(first, b",".join(payloads), ends, array("q", range(count)), keys)
    write_segment([rows], path, name="bench", stream_id=STREAM_ID, epoch=0, json=True)
    return path.read_bytes(), sum(map(len, payloads))


def kernels(place: Place) -> Figures:
    rows = min(ROWS, max(BLOCK, place.events // 4 // BLOCK * BLOCK))
    segments = min(SEGMENTS_MAX, max(1, place.events // rows))
    found = plan()
    paths = {"fast": False, "slow": True}
    totals = {name: defaultdict[str, float](float) for name in paths}
    sizes = defaultdict[str, float](float)
    steps = defaultdict[str, float](float)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for number in range(segments + 1):
            first = 1 + number * rows
            raw, size = segment(directory / f"{number}.parquet", first, rows)
            for path, reference in paths.items():
                request = _request(raw, first, rows, found, directory, reference=reference)
                spent = _spent(raw, request, sizes if number and not reference else None)
                if number:  # the first one warms up
                    _add(totals[path], {**spent, "raw_bytes": size, "segment_bytes": len(raw)})
            if number:
                say(f"segment {number} of {segments}")
            if number == segments:
                _time_families(raw, _request(raw, first, rows, found, directory), steps)
    return {
        "segments": segments,
        **{
            f"{path}_{name}": total["rows"] / total[spent]
            for path, total in totals.items()
            for name, spent in (("rows_per_s", "wall_s"), ("rows_per_cpu_s", "cpu_s"))
        },
        "per_segment_byte": sum(sizes.values()) / totals["fast"]["segment_bytes"],
        "per_raw_byte": sum(sizes.values()) / totals["fast"]["raw_bytes"],
        "family_bytes_per_row": {one: size / totals["fast"]["rows"] for one, size in sizes.items()},
        "cpu_us_per_row_by_step": {one: spent / rows * 1e6 for one, spent in steps.items()},
        "rss_max_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }


def _add(totals: defaultdict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        totals[name] += value


def _request(
    raw: bytes, first: int, rows: int, found: BuildPlan, directory: Path, *, reference: bool = False
) -> BuildRequest:
    sha256 = hashlib.sha256(raw).hexdigest()
    families = frozenset(found.families)
    return BuildRequest(
        STREAM_ID, first, first + rows - 1, rows, sha256, families, found, directory, reference=reference
    )


def _spent(raw: bytes, request: BuildRequest, sizes: defaultdict[str, float] | None) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    built = build_segment(raw, request)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if sizes is not None:
        _add(sizes, {one.family: len(one.data) for one in built})
    (columns,) = (one.data for one in built if one.family == "col")
    rows: int = pq.ParquetFile(pa.BufferReader(columns)).metadata.num_rows
    return {"rows": rows, "wall_s": wall, "cpu_s": cpu}


def _time_families(raw: bytes, request: BuildRequest, into: defaultdict[str, float]) -> None:
    """CPU time of reading, and of each builder; cycles are not looked for, as in a task."""
    with gc_disabled():
        _time_steps(raw, request, into)


def _time_steps(raw: bytes, request: BuildRequest, into: defaultdict[str, float]) -> None:
    builders, reader = create_builders(request)
    for batch in _timed(read_batches(raw, reader), into):
        for builder in builders:
            began = time.process_time()
            builder.add(batch)
            into[type(builder).__name__] += time.process_time() - began
    for builder in builders:
        began = time.process_time()
        builder.finish()
        into[f"{type(builder).__name__}.finish"] += time.process_time() - began


def _timed(batches: Iterator[SegmentBatch], into: defaultdict[str, float]) -> Iterator[SegmentBatch]:
    while True:
        began = time.process_time()
        batch = next(batches, None)
        into["read"] += time.process_time() - began
        if batch is None:
            return
        yield batch
