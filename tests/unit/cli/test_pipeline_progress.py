"""What whoever watches a backfill sees: how much is done, of how much."""

from __future__ import annotations

import io
import re

from tailrace.cli.pipeline_run import ProgressBar
from tailrace.spark.jobs.messages import PipelineTotals
from tailrace.spark.jobs.pipeline_client import PipelineStatus


def test_a_backlog_of_several_batches_is_one_bar() -> None:
    """What a batch takes is a part of what waits; the bar tells of all of it."""
    seen, status, waiting = io.StringIO(), PipelineStatus("local[2,4]"), [5, 3]
    bar = ProgressBar(lambda: waiting.pop(0), seen)
    bar.starting("local[2,4]")
    for count in (2, 3):
        bar.batch("companions", count)
        for _ in range(count):
            status.totals.segments += 1
            status.totals.rows += 1000
            bar.advance("companions", status)
        bar.done(status)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.getvalue())
    assert "starting Spark at local[2,4]" in shown
    assert "2/5" in shown
    assert "5/5" in shown
    assert "2 segments: 2,000 entries" in shown
    assert "given up" not in shown


def test_merges_have_a_bar_of_their_own_and_losses_are_told() -> None:
    seen, status = io.StringIO(), PipelineStatus("local[2,4]")
    bar = ProgressBar(lambda: 0, seen)
    bar.batch("companions", 1)
    bar.advance("companions", status)
    bar.batch("merge", 4)
    bar.advance("merge", status)
    status.totals = PipelineTotals(segments=1, quarantined=1)
    bar.done(status)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.getvalue())
    assert "merge" in shown
    assert "1/4" in shown
    assert "1 segments given up" in shown
