"""The queue of segments hands them out in batches: in their order, few at a time, and each once."""

from __future__ import annotations

from tailrace.spark.jobs.index_build import TASK_SEGMENTS_MAX, SegmentBuild, SegmentQueue
from tailrace.spark.jobs.messages import PlannedSegment, PlanRef


def _works(count: int) -> list[SegmentBuild]:
    plan = PlanRef(1, "sha256:00", "plan", ("col",))
    return [
        SegmentBuild("stream", "id", plan, PlannedSegment(f"segment {at}", at, at, 1, 1, "00"))
        for at in range(count)
    ]


def _sizes(count: int, cores: int) -> list[int]:
    works = _works(count)
    queue = SegmentQueue(works, cores)
    found: list[SegmentBuild] = []
    sizes: list[int] = []
    while batch := queue.take_batch():
        sizes.append(len(batch))
        found += batch
    assert found == works
    return sizes


def test_much_is_handed_out_in_groups_and_the_rest_one_by_one() -> None:
    assert _sizes(20, 2) == [5, 4, 3, 2, 2, 1, 1, 1, 1]
    assert max(_sizes(1000, 2)) == TASK_SEGMENTS_MAX


def test_few_segments_keep_all_cores_busy() -> None:
    assert _sizes(3, 2) == [1, 1, 1]
    assert _sizes(16, 8) == [1] * 16
    assert _sizes(0, 2) == []


def test_nothing_is_handed_out_after_a_stop() -> None:
    queue = SegmentQueue(_works(9), 1)
    assert queue.take_batch()
    queue.stop()
    assert not queue.take_batch()
