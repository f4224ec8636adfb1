"""Builds the companions of one segment as a task does, and tells how much memory that took.

python task_memory.py <shape of the records>
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.aggregate_model import rollup_view
from support.index_files import Stored, build, plan_of
from support.queries import payload_of
from tailrace.spark.index.segment_build import TASK_MEMORY_BYTES

SHAPES: dict[str, Callable[[], list[Stored]]] = {
    "one large payload": lambda: [Stored(1, payload_of({"at": 1, "message": "word " * (2 << 20)}), b"k")],
    "many small rows": lambda: [
        Stored(entry, payload_of({"at": entry, "id": str(entry % 9)}), b"k") for entry in range(1, 100_001)
    ],
    "many keys in a record": lambda: [
        Stored(entry, payload_of({f"key{number}": number for number in range(10_000)} | {"at": entry}))
        for entry in range(1, 101)
    ],
    "all keys distinct": lambda: [
        Stored(entry, payload_of({"at": entry, "id": f"i{entry}", "message": f"m{entry}"}), b"%d" % entry)
        for entry in range(1, 50_001)
    ],
}


def resident(name: str) -> int:
    """`VmRSS`, or `VmHWM`: the most there was."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def main(shape: str) -> None:
    rows = SHAPES[shape]()
    plan = plan_of(rollup_view().registry)
    build(rows[:1], plan)  # what the libraries take once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most there was, from now on
    build(rows, plan, memory_bytes=TASK_MEMORY_BYTES, group_rows=4096)
    print(resident("VmHWM") - before, TASK_MEMORY_BYTES)


if __name__ == "__main__":
    main(*sys.argv[1:])
