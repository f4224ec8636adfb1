"""Request and response bodies of the server's pipeline routes: plan and heartbeat."""

from __future__ import annotations

from typing import Literal

import msgspec


class PlanRef(msgspec.Struct, frozen=True):
    """The plan that index files are built by."""

    generation: int
    hash: str
    object: str | None
    families: tuple[str, ...]


class PlannedSegment(msgspec.Struct, frozen=True):
    object: str
    first: int
    last: int
    rows: int
    raw_bytes: int
    sha256: str
    epoch: int = 0
    bytes: int = 0
    families: tuple[str, ...] | None = None  # the missing ones; None: all of the plan


class IndexBuildWork(msgspec.Struct, frozen=True, tag_field="job", tag="companions"):
    segments: tuple[PlannedSegment, ...]
    priority: int = 0
    replace: tuple[str, ...] = ()  # objects that the built files of all segments replace in one step


class IndexMergeWork(msgspec.Struct, frozen=True, tag_field="job", tag="merge"):
    family: str
    level: int
    first: int
    last: int
    inputs: tuple[str, ...]
    input_sha256: tuple[str, ...] = ()


class CompactionWork(msgspec.Struct, frozen=True, tag_field="job", tag="compact"):
    first: int
    last: int
    segments: tuple[PlannedSegment, ...]


Work = IndexBuildWork | IndexMergeWork | CompactionWork


class StreamPlan(msgspec.Struct, frozen=True):
    stream: str
    stream_id: str
    epoch: int
    plan: PlanRef
    earliest: int = 1
    content_type: str | None = None
    profile: str = "generic"
    work: tuple[Work, ...] = ()


class PlanResponse(msgspec.Struct, frozen=True):
    layout: int
    store: str
    streams: tuple[StreamPlan, ...]
    next_after: str | None = None


class RunningJob(msgspec.Struct, frozen=True):
    job: str
    stream: str
    segments: int
    since: str


class PipelineTotals(msgspec.Struct):
    segments: int = 0
    rows: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    quarantined: int = 0
    published: int = 0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The status of the pipeline. Integers that may exceed a double are strings, as in every response."""

    mode: str
    state: Literal["starting", "running", "idle", "stopping"]
    master: str
    spark_version: str
    pid: int
    started_at: str
    last_error: str | None
    running: list[RunningJob]
    totals: dict[str, int | str]
    seconds: dict[str, list[float]]  # by family, the build times of segments since the last heartbeat
    rss_bytes: str
    last_publish_at: str | None


class HeartbeatResponse(msgspec.Struct, frozen=True):
    drain: bool = False
