"""``python -m bench.pipeline``: companions of generated wide events, one segment after the other on one core.

It measures the kernel, which is what a task of the pipeline runs; Spark adds the spreading. Rates are of the
rows counted in what was built. With `--reference` every value comes the slow way. Output is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bench.evlog.events import BLOCK, block_of
from tailrace.pipeline.kernels.batch import Batch
from tailrace.pipeline.kernels.segment import BuildRequest, build_segment, prepare, read_segment
from tailrace.profiles.evlog import Evlog
from tailrace.profiles.evlog_config import EvlogConfig
from tailrace.profiles.profile import GENERIC, EvlogProfile, install
from tailrace.query.index_plan import BuildPlan, index_plan
from tailrace.schema.record import dump_record
from tailrace.schema.registry import Registry
from tailrace.store.segment_writer import write_segment
from tailrace.store.segments import SegmentRows

STREAM_ID = "ab" * 16


def plan() -> BuildPlan:
    registry = install(EvlogProfile({"kind": "evlog"}, "profile"), GENERIC, Registry(name="bench"), 0)
    return BuildPlan(index_plan(registry, "evlog", keyed=True), registry, {"kind": "evlog"})


def segment(path: Path, first: int, count: int) -> tuple[bytes, int]:
    """A segment of generated events, and how large they are."""
    normalise = Evlog(EvlogConfig()).normalise
    events = [event for block in range(count // BLOCK) for event in block_of(7, first // BLOCK + block, 10.0)]
    records = [normalise(event, 0) for event in events]
    payloads = [dump_record(record) for record in records]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--segments", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16_000)
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--by-family", action="store_true", help="also time each family alone")
    arguments = parser.parse_args()
    found = plan()
    totals: dict[str, Any] = {"rows": 0, "raw_bytes": 0, "segment_bytes": 0, "wall_s": 0.0, "cpu_s": 0.0}
    sizes: dict[str, int] = {}
    families: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.segments + 1):
            raw, size = segment(
                Path(directory) / f"{number}.parquet", 1 + number * arguments.rows, arguments.rows
            )
            request = BuildRequest(
                STREAM_ID,
                1 + number * arguments.rows,
                (number + 1) * arguments.rows,
                arguments.rows,
                hashlib.sha256(raw).hexdigest(),
                frozenset(found.families),
                found,
                Path(directory),
                reference=arguments.reference,
            )
            wall, cpu = time.perf_counter(), time.process_time()
            built = build_segment(raw, request)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            if not number:
                continue  # the first one warms up
            totals["rows"] += sum(_rows(one.data) for one in built if one.family == "col")
            totals["raw_bytes"] += size
            totals["segment_bytes"] += len(raw)
            totals["wall_s"] += wall
            totals["cpu_s"] += cpu
            for one in built:
                sizes[one.family] = sizes.get(one.family, 0) + len(one.data)
            if arguments.by_family:
                _time_families(raw, request, families)
    companions = sum(sizes.values())
    print(
        json.dumps(
            {
                **totals,
                "rows_per_s": round(totals["rows"] / totals["wall_s"]),
                "rows_per_cpu_s": round(totals["rows"] / totals["cpu_s"]),
                "companion_bytes": sizes,
                "companions_per_segment_byte": round(companions / totals["segment_bytes"], 3),
                "companions_per_raw_byte": round(companions / totals["raw_bytes"], 3),
                "cpu_s_by_step": {name: round(value, 3) for name, value in families.items()},
                "rss_max_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            },
            indent=1,
        )
    )


def _rows(data: bytes) -> int:
    import io

    return pq.ParquetFile(io.BytesIO(data)).metadata.num_rows


def _time_families(raw: bytes, request: BuildRequest, into: dict[str, float]) -> None:
    """CPU time of reading, and of each builder."""
    builders, reader = prepare(request)
    for batch in _timed(read_segment(raw, reader), into):
        for builder in builders:
            name = type(builder).__name__
            began = time.process_time()
            builder.add(batch)
            into[name] = into.get(name, 0.0) + time.process_time() - began
    for builder in builders:
        name = f"{type(builder).__name__}.finish"
        began = time.process_time()
        builder.finish()
        into[name] = into.get(name, 0.0) + time.process_time() - began


def _timed(batches: Any, into: dict[str, float]) -> Any:
    while True:
        began = time.process_time()
        batch: Batch | None = next(batches, None)
        into["read"] = into.get("read", 0.0) + time.process_time() - began
        if batch is None:
            return
        yield batch


if __name__ == "__main__":
    main()
