"""Workers that die, as the TAILRACE_PIPELINE_FAILPOINT says or at a segment of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from tailrace.spark.failpoints import FAILPOINT_VARIABLE
from tailrace.spark.index import segment_build

VALUE = ""


def build_companions(batches: Iterator[Any]) -> Iterator[Any]:
    os.environ[FAILPOINT_VARIABLE] = VALUE
    try:
        yield from segment_build.build_index_files(batches)
    finally:
        del os.environ[FAILPOINT_VARIABLE]


def die_at_entry_11(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        for row in batch.to_pylist():
            if row["first"] == 11:
                os.kill(os.getpid(), signal.SIGKILL)
        yield from segment_build.build_index_files(iter([batch]))
