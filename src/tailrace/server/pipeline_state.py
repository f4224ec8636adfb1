"""How the pipeline is: what it last said of itself, what waits for it, and what was published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from tailrace.common.timestamps import format_rfc3339
from tailrace.routing.context import Context
from tailrace.storage.index_publication import PublicationService
from tailrace.storage.index_work import IndexWork

HEARTBEAT_FRESH_S: Final = 60.0  # a heartbeat that is older counts for nothing
FAMILIES: Final = ("routing_key_index", "routing_key_lexicon", "exact", "col", "fts", "agg", "mblk")
SECONDS_MAX: Final = 10_000
STATES: Final = ("off", "starting", "running", "idle", "backoff", "unavailable", "external")
TEXT_MAX: Final = 1000

Json = dict[str, object]


class RunningJob(msgspec.Struct, frozen=True):
    job: str
    stream: str
    segments: int = 0
    since: str = ""


class PipelineHeartbeat(msgspec.Struct, frozen=True):
    """What a pipeline tells every few seconds. Whatever else it says is not looked at."""

    state: str = "running"
    master: str = ""
    spark_version: str = ""
    pid: int = 0
    started_at: str | None = None
    last_error: str | None = None
    running: list[RunningJob] = []
    totals: dict[str, int | str] = {}
    seconds: dict[str, list[float]] = {}
    rss_bytes: str = "0"
    last_publish_at: str | None = None
    drain: bool = False  # asked by whoever wants the pipeline to end, not by the pipeline


class PipelineBacklog(msgspec.Struct, frozen=True):
    """What waits for the pipeline: whether one is worth its while is decided by this."""

    streams: int = 0
    raw_bytes: int = 0
    oldest_ms: int = 0
    upkeep: bool = False  # something is to be put together, or to be written anew

    def __add__(self, other: PipelineBacklog) -> PipelineBacklog:
        return PipelineBacklog(
            self.streams + other.streams,
            self.raw_bytes + other.raw_bytes,
            max(self.oldest_ms, other.oldest_ms),
            self.upkeep or other.upkeep,
        )


class PipelineState:
    """The pipeline as everybody is shown it. A supervised one adds what its supervisor knows."""

    def __init__(self, context: Context, work: IndexWork, publishing: PublicationService) -> None:
        self._context = context
        self._work = work
        self._publishing = publishing
        self._beat: PipelineHeartbeat | None = None
        self._beat_s = 0.0
        self.mode: Final = context.settings.pipeline
        self.state = "off"  # of a supervised one
        self.reason: str | None = None
        self.restarts = 0
        self.draining = False
        self.last_error: str | None = None
        self.on_beat: Callable[[PipelineHeartbeat], None] | None = None

    # -- heartbeats --------------------------------------------------------------------------------------

    def take(self, beat: PipelineHeartbeat) -> Json:
        """The answer tells the pipeline whether it is to end."""
        self._beat = beat
        self._beat_s = self._context.loop.time()
        if self.on_beat is not None:
            self.on_beat(beat)
        for family, seconds in beat.seconds.items():
            if family in FAMILIES:
                self.observe(family, seconds)
        drain = self.draining
        if beat.state == "stopping":
            self._beat = None
            self.draining = self.draining and self.mode == "auto"
        return {"drain": drain}

    def observe(self, family: str, seconds: list[float]) -> None:
        timings = self._context.telemetry.pipeline_segment_seconds
        for value in seconds[:SECONDS_MAX]:
            timings.observe(value, family)

    def gone(self) -> None:
        """The pipeline has ended."""
        self._beat = None
        self.draining = False

    @property
    def fresh(self) -> bool:
        return self._beat is not None and self._context.loop.time() - self._beat_s < HEARTBEAT_FRESH_S

    @property
    def beat(self) -> PipelineHeartbeat | None:
        """The last one, if it is fresh."""
        return self._beat if self.fresh else None

    @property
    def beat_s(self) -> float:
        return self._beat_s

    # -- for people ------------------------------------------------------------------------------------

    @property
    def shown(self) -> str:
        """One of STATES."""
        if self.mode == "auto" and self.state != "off":
            return self.state
        return "external" if self.fresh else self.state

    def backlog(self) -> tuple[int, int, int]:
        """Segments without companions, their payload, and the age of the oldest in ms."""
        works = self._work.by_stream.values()
        oldest_ns = min((work.oldest_ns for work in works if work.oldest_ns), default=0)
        age_ms = max(0, self._context.clock.now_ns() - oldest_ns) // 1_000_000 if oldest_ns else 0
        return sum(work.segments for work in works), sum(work.raw_bytes for work in works), age_ms

    def gate(self) -> dict[str, int]:
        """Segments that are indexed at once, those that are under way, and those that wait."""
        beat, most = self.beat, self._context.limits.pipeline_batch_segments
        active = 0 if beat is None else sum(one.segments for one in beat.running)
        return {
            "configured_limit": 0 if self.mode == "off" else most,
            "current_limit": 0 if beat is None else most,
            "active": active,
            "queued": max(0, self.backlog()[0] - active),
        }

    def demand(self) -> PipelineBacklog:
        works = self._work.by_stream.values()
        _, raw_bytes, oldest_ms = self.backlog()
        upkeep = any(work.merges or work.compactions or work.rewrites for work in works)
        return PipelineBacklog(len(works), raw_bytes, oldest_ms, upkeep)

    @property
    def given_up(self) -> int:
        return sum(self._work.given_up.values())

    def details(self) -> Json:
        """`runtime.pipeline` of the server's details."""
        beat = self.beat
        segments, raw_bytes, oldest_ms = self.backlog()
        published = self._publishing
        mode = {"auto": "local", "off": "off", "external": "external"}[self.mode]
        return {
            "mode": mode,
            "state": self.shown,
            "reason": self.reason,
            "master": None if beat is None else beat.master[:TEXT_MAX],
            "spark_version": None if beat is None else beat.spark_version[:TEXT_MAX],
            "pid": None if beat is None else beat.pid,
            "started_at": None if beat is None else beat.started_at,
            "restarts": self.restarts,
            "last_error": self.last_error if beat is None else (beat.last_error or self.last_error),
            "draining": self.draining,
            "backlog": {"segments": segments, "bytes": str(raw_bytes), "oldest_ms": str(oldest_ms)},
            "running": [] if beat is None else [msgspec.to_builtins(one) for one in beat.running[:100]],
            "totals": {
                "segments": published.segments,
                "rows": str(published.rows),
                "bytes_in": str(published.bytes_in),
                "bytes_out": str(published.bytes_out),
                "quarantined": self.given_up,
            },
            "rss_bytes": "0" if beat is None else beat.rss_bytes[:32],
            "last_publish_at": format_rfc3339(published.last_ns) if published.last_ns else None,
        }
