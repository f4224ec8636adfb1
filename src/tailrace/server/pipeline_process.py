"""State of the index pipeline, and the local pipeline process that the server starts and stops.

How the pipeline is: what it last said of itself, what waits for it, and what was published.

The local pipeline: started when there is work, stopped when there is none, never in anybody's way.

It is a child in a process group of its own. Settings and a token go to it through a pipe that it inherits;
when that closes it ends, so it never outlives the server. Only processes that are started here are signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from tailrace.common import process
from tailrace.common.timestamps import format_rfc3339
from tailrace.routing.context import Context
from tailrace.server.java import find_java
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


logger = logging.getLogger("tailrace.pipeline")

TICK_S: Final = 1.0
AUTOGROUP: Final = Path("/proc/self/autogroup")
JAVA_CHECK_S: Final = 300.0  # between two looks for Java
STOP_S: Final = 10.0  # from the request to end to the end by force
BACKOFF_S_MIN, BACKOFF_S_MAX = 1.0, 300.0
HEALTHY_S: Final = 600.0  # after which a failure counts as the first one
TOKEN_LIFETIME_S: Final = 900.0
NO_JAVA: Final = (
    "pipeline: no Java 17+ found; companions are not built, search stays exact but scans "
    "(see tailrace doctor)"
)


class PipelineProcess:
    """Owned by the loop thread. `grant` makes a token that is good for so many seconds, or None.

    `demand` tells what waits for it, on all workers of the server if there are several.
    """

    def __init__(
        self,
        context: Context,
        demand: Callable[[], PipelineBacklog],
        state: PipelineState,
        grant: Callable[[float], str] | None,
        endpoint: Callable[[], str],
    ) -> None:
        self._context = context
        self._loop = context.loop
        self._demand = demand
        self._state = state
        self._grant = grant
        self._endpoint = endpoint
        self._task: asyncio.Task[None] | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._pipe = -1  # our end of the child's pipe
        self._backoff_s = BACKOFF_S_MIN
        self._started_s = self._again_s = self._java_s = self._idle_s = self._token_s = 0.0
        self._look_again = False
        self._stays_off = False

    def start(self) -> None:
        if self._context.settings.pipeline == "auto":
            self._task = self._loop.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end()

    def hang_up(self) -> None:
        """SIGHUP: Java is looked for again, and one that was drained may run again."""
        self._look_again = True
        self._stays_off = False

    # -- the state machine -------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._look_for_java(at_start=True)
        while True:
            try:
                await self._step(self._loop.time())
            except OSError as error:
                self._fail(f"the pipeline cannot be started: {error}")
            await asyncio.sleep(TICK_S)

    async def _step(self, now_s: float) -> None:
        state = self._state
        if self._child is not None:
            await self._watch(self._child, now_s)
        elif state.state == "unavailable":
            if self._look_again or now_s - self._java_s >= JAVA_CHECK_S:
                await self._look_for_java()
        elif state.state == "backoff":
            if now_s >= self._again_s:
                self._become("off")
        elif not self._stays_off and self._is_due():
            await self._look_for_java()
            if state.state != "unavailable":
                await self._begin(now_s)

    def _is_due(self) -> bool:
        """Whether the work is worth a JVM."""
        demand, limits = self._demand(), self._context.limits
        if not demand.streams:
            return False
        return (
            demand.raw_bytes >= limits.pipeline_start_bytes
            or demand.oldest_ms >= limits.pipeline_start_after
            or demand.upkeep
        )

    async def _watch(self, child: asyncio.subprocess.Process, now_s: float) -> None:
        state = self._state
        if child.returncode is not None:
            drained, code = state.draining, child.returncode
            await self._end()
            if code == 0:
                self._stays_off = drained
                self._become("off")
            else:
                self._fail(f"the pipeline ended with {code}")
            return
        self._renew(now_s)
        heard_s = max(self._started_s, state.beat_s)
        if now_s - heard_s >= HEARTBEAT_FRESH_S:
            await self._end()
            self._fail(f"nothing was heard of the pipeline for {HEARTBEAT_FRESH_S:.0f} s")
            return
        beat = state.beat
        if beat is not None and beat.pid == child.pid and state.beat_s >= self._started_s:
            self._become(beat.state if beat.state in ("idle", "starting") else "running")
            if now_s - self._started_s >= HEALTHY_S:
                self._backoff_s = BACKOFF_S_MIN
        if state.state != "idle" or self._demand().streams:
            self._idle_s = now_s
        elif (now_s - self._idle_s) * 1000 >= self._context.limits.pipeline_idle_stop:
            await self._end()
            self._become("off")

    def _become(self, state: str, reason: str | None = None) -> None:
        if state != self._state.state:
            logger.info("the pipeline is %s", state)
        self._state.state = state
        self._state.reason = reason

    def _fail(self, error: str) -> None:
        """Again after a while, longer each time."""
        now_s = self._loop.time()
        logger.warning("%s; trying again in %.0f s", error, self._backoff_s)
        self._state.last_error = error
        self._state.restarts += 1
        self._again_s = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S_MAX)
        self._become("backoff", error)

    async def _look_for_java(self, *, at_start: bool = False) -> None:
        self._java_s = self._loop.time()
        self._look_again = False
        if find_spec("pyspark") is None:
            self._become("unavailable", "the spark extra is not installed: pip install 'tailrace[spark]'")
            return
        elsewhere = self._context.settings.pipeline_master.startswith("sc://")  # Connect has its own Java
        if not elsewhere and await find_java(ask=not at_start) is None:
            if self._state.state != "unavailable":
                logger.warning(NO_JAVA)
            self._become("unavailable", "no Java 17+ was found")
        elif self._state.state == "unavailable":
            self._become("off")

    # -- the process -------------------------------------------------------------------------------------

    async def _begin(self, now_s: float) -> None:
        reading, self._pipe = os.pipe()
        try:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tailrace",
                "pipeline",
                "run",
                "--supervised",
                str(reading),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[reading],
                preexec_fn=self._step_back,
            )
        finally:
            os.close(reading)
        self._started_s = self._idle_s = now_s
        self._state.gone()
        self._say(msgspec.json.encode(self._orders()))
        self._token_s = now_s
        self._become("starting")

    def _step_back(self) -> None:
        """In the child, before it is one.

        Where the kernel schedules by session, niceness only counts among the processes of one. The pipeline
        has a session of its own, which therefore steps back as a whole. It is begun here: a loop may begin
        the one that it is asked for only later, and then it would be the server that steps back.
        """
        os.setsid()
        niceness = self._context.settings.pipeline_nice
        process.lower_cpu_priority(niceness)
        process.set_idle_io_priority()
        with contextlib.suppress(OSError):  # no such kernel: then niceness is enough
            AUTOGROUP.write_text(str(niceness))

    def _orders(self) -> dict[str, object]:
        settings, limits = self._context.settings, self._context.limits
        master = settings.pipeline_master
        if settings.pipeline_cores and master == "local[*]":
            master = f"local[{settings.pipeline_cores}]"
        return {
            "endpoint": self._endpoint(),
            "token": self._token(),
            "master": master,
            "directory": str(settings.data_dir.absolute() / "pipeline" / "checkpoint"),
            "heap_bytes": limits.pipeline_heap,
            "task_memory_bytes": limits.pipeline_task_memory,
            "batch_segments": limits.pipeline_batch_segments,
            "batch_bytes": limits.pipeline_batch_bytes,
            "group_segments": limits.search_companion_batch_segments,
            "check_ms": limits.index_check_ms,
            "conf": settings.pipeline_conf,
            "log_level": settings.log_level,
            "log_format": settings.log_format,
        }

    def _token(self) -> str | None:
        return None if self._grant is None else self._grant(2 * TOKEN_LIFETIME_S)

    def _renew(self, now_s: float) -> None:
        if self._grant is not None and now_s - self._token_s >= TOKEN_LIFETIME_S:
            self._token_s = now_s
            self._say(msgspec.json.encode({"token": self._token()}))

    def _say(self, line: bytes) -> None:
        """A few hundred bytes: a pipe takes them at once."""
        try:
            os.write(self._pipe, line + b"\n")
        except OSError:
            logger.debug("the pipeline does not listen any more")

    async def _end(self) -> None:
        """SIGTERM to the child, which ends its JVM; later SIGKILL to its whole group, and to no other."""
        child, self._child = self._child, None
        if child is None:
            return
        # Not to its group: a JVM that is gone before the child knows is a failure to the child.
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            pass
        _kill_group(child)  # what it has started and left behind included
        await child.wait()
        os.close(self._pipe)
        self._pipe = -1
        self._state.gone()


def _kill_group(child: asyncio.subprocess.Process) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # all of it has ended
