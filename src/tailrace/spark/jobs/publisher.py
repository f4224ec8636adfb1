"""Publishes what was built, a few segments at a time, and remembers what became of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from tailrace.spark.failpoints import hit_failpoint
from tailrace.spark.index.parquet import WRITER
from tailrace.spark.index.worker import BUILT, FAILED, UNDECODABLE
from tailrace.spark.jobs.index_build import SegmentBuildResult
from tailrace.spark.jobs.owner import PipelineClient, RequestRefusedError
from tailrace.spark.jobs.status import PipelineStatus
from tailrace.storage.segments.index_files import (
    PublishedObject,
    PublishInput,
    PublishRequest,
    UnbuildableInput,
)

logger = logging.getLogger("tailrace.pipeline")

# What the pipeline did was right when it began: the plan, the inputs or the stream are others by now.
OUTDATED_CODES: Final = frozenset(
    {"plan_superseded", "inputs_changed", "range_conflict", "object_missing", "not_found", "stream_gone"}
)
_QUARANTINE_STATUSES: Final = frozenset({UNDECODABLE, FAILED})
_GroupKey = tuple[str, str, tuple[str, ...]]  # stream, plan, and what is replaced


class IndexPublisher:
    """Groups outcomes by stream. All families of a segment are published together, or none."""

    def __init__(self, owner: PipelineClient, status: PipelineStatus, group_segments: int) -> None:
        self._owner = owner
        self._status = status
        self._group_segments = group_segments
        self._waiting: dict[_GroupKey, list[SegmentBuildResult]] = {}
        self.put_off: list[SegmentBuildResult] = []  # segments that could not be had this time

    def add(self, outcome: SegmentBuildResult) -> None:
        work = outcome.work
        # Of segments that are published together, one that fails leaves everything as it is.
        good = outcome.status == BUILT or (outcome.status in _QUARANTINE_STATUSES and not work.together)
        if not good:
            self.put_off.append(outcome)
            self._status.failed(f"{outcome.status}: {outcome.error}")
            return
        key = (work.stream_id, work.plan.hash, work.replace)
        waiting = self._waiting.setdefault(key, [])
        waiting.append(outcome)
        if len(waiting) >= (work.together or self._group_segments):
            self._publish(self._waiting.pop(key))

    def flush(self) -> None:
        while self._waiting:
            key, outcomes = self._waiting.popitem()
            if not key[2]:
                self._publish(outcomes)

    def _publish(self, outcomes: Sequence[SegmentBuildResult]) -> None:
        send_publish_request(self._owner, self._status, index_publish_request(outcomes))
        for outcome in outcomes:
            self._status.built(outcome)


def send_publish_request(
    owner: PipelineClient, status: PipelineStatus, publication: PublishRequest
) -> str | None:
    """The result; None if what was built is not wanted any more."""
    hit_failpoint("before_publish", "driver")
    try:
        result = owner.publish(publication)
    except RequestRefusedError as refusal:
        if refusal.code not in OUTDATED_CODES:
            raise
        logger.info("a publication of %s was dropped: %s", publication.job, refusal.code)
        status.dropped(publication.job, refusal.code)
        return None
    hit_failpoint("after_publish", "driver")
    status.published(publication.job, result)
    return result


def index_publish_request(outcomes: Sequence[SegmentBuildResult]) -> PublishRequest:
    """Segments of one stream and plan. The same outcomes give the same bytes."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.work.segment.first)
    work = ordered[0].work
    return PublishRequest(
        stream_id=work.stream_id,
        job="companions",
        plan_hash=work.plan.hash,
        writer=WRITER,
        inputs=[PublishInput(one.work.segment.object, one.work.segment.sha256) for one in ordered],
        add=[added for outcome in ordered for added in _added_objects(outcome)],
        replace=list(work.replace),
        quarantine=[
            UnbuildableInput(one.work.segment.object, one.status, one.error)
            for one in ordered
            if one.status != BUILT
        ],
    )


def _added_objects(outcome: SegmentBuildResult) -> list[PublishedObject]:
    segment = outcome.work.segment
    return [
        PublishedObject(
            file.family,
            segment.first,
            segment.last,
            file.rows,
            file.object,
            file.bytes,
            file.sha256,
            file.stats,
        )
        for file in outcome.files
    ]
