"""A pipeline without a server: an owner that keeps its catalogue in memory, and a folder as store."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from support.index_files import STREAM_ID, Stored, segment_of
from tailrace.search.index_files.index_plan import BuildPlan, store_plan
from tailrace.spark.jobs.index_build import SegmentBuild
from tailrace.spark.jobs.messages import (
    Heartbeat,
    HeartbeatResponse,
    IndexBuildWork,
    PlannedSegment,
    PlanRef,
    PlanResponse,
    StreamPlan,
)
from tailrace.spark.jobs.pipeline import Pipeline, PipelineOptions
from tailrace.spark.jobs.pipeline_client import PipelineClient, RequestRefusedError
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.segments.index_files import PublishRequest, plan_name
from tailrace.storage.segments.model import segment_name, stream_prefix

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PREFIX = stream_prefix(STREAM_ID)


class Shelf:
    """One stream on a store of files: its plan and its segments."""

    def __init__(self, directory: Path, plan: BuildPlan) -> None:
        self.url = directory.as_uri()
        self.plan = plan
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        key = PREFIX + plan_name(plan.plan.hash)
        profile = (
            None if plan.profile["kind"] == "generic" else msgspec.json.encode({"profile": plan.profile})
        )
        self.put(key, store_plan(plan.plan, plan.registry, profile))
        self.ref = PlanRef(1, plan.plan.hash, key, plan.families)
        self.segments: list[PlannedSegment] = []

    def put(self, key: str, data: bytes) -> None:
        async def put() -> None:
            store = open_object_store(self.url)
            await store.create(key, data)
            await store.close()

        asyncio.run(put())

    def get(self, key: str) -> bytes:
        return (self.directory / key).read_bytes()

    def seal(self, rows: Sequence[Stored]) -> PlannedSegment:
        raw = segment_of(rows)
        sha256 = hashlib.sha256(raw).hexdigest()
        first, last = rows[0].entry, rows[-1].entry
        key = PREFIX + segment_name(0, first, last, sha256)
        self.put(key, raw)
        segment = PlannedSegment(key, first, last, len(rows), sum(len(row.payload) for row in rows), sha256)
        self.segments.append(segment)
        return segment

    def works(self) -> list[SegmentBuild]:
        return [SegmentBuild("s", STREAM_ID, self.ref, segment) for segment in self.segments]


class FakeOwner:
    """Answers as a server would, for one stream. `faults` are raised, one at each publication."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.published: list[PublishRequest] = []
        self.covered: set[str] = set()
        self.heartbeats: list[Heartbeat] = []
        self.faults: list[Exception] = []
        self.drain = False

    def plan(
        self, jobs: str, *, stream: str | None = None, after: str | None = None, wait: bool = False
    ) -> PlanResponse:
        left = tuple(one for one in self.shelf.segments if one.object not in self.covered)
        work = (IndexBuildWork(left),) if left else ()
        found = StreamPlan("s", STREAM_ID, 0, self.shelf.ref, work=work)
        return PlanResponse(1, self.shelf.url, (found,) if work else ())

    def publish(self, publication: PublishRequest) -> str:
        if self.faults:
            raise self.faults.pop(0)
        if publication.plan_hash != self.shelf.ref.hash:
            raise RequestRefusedError(409, "plan_superseded", "another plan is wanted")
        inputs = {one.object for one in publication.inputs}
        if inputs <= self.covered:
            return "already_published"
        self.covered |= inputs
        self.published.append(publication)
        return "published"

    def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatResponse:
        self.heartbeats.append(heartbeat)
        return HeartbeatResponse(self.drain)


class Unstoppable:
    """The session of all tests, which no pipeline may stop."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "stop" else getattr(self._spark, name)


def run_once(
    owner: FakeOwner | PipelineClient, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Pipeline:
    """Everything there is to do, in this process and its session."""
    monkeypatch.setattr(
        "tailrace.spark.jobs.pipeline.open_session", lambda *_args, **_named: Unstoppable(spark)
    )
    pipeline = Pipeline(
        cast("PipelineClient", owner), PipelineOptions("local[2]", once=True, check_ms=1, **options)
    )
    pipeline.run()
    return pipeline
