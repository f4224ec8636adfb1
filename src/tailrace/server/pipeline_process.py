"""State of the index pipeline, and the local pipeline process that the server starts and stops.

`PipelineState` joins the last heartbeat, the backlog and the published totals. `PipelineProcess` starts a
local pipeline when there is enough work and stops it when it is idle. It is a child in a session of its own,
with low priority. It receives its settings and tokens as lines of JSON through an inherited pipe and exits
when the pipe closes, so it never outlives the server. Only processes started here are signalled.
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
from tailrace.common.backoff import Backoff
from tailrace.common.logging_setup import log_fields
from tailrace.common.tasks import TaskSet
from tailrace.common.timestamps import format_rfc3339
from tailrace.routing.context import Context
from tailrace.server.java import find_java
from tailrace.storage.index_publication import PublicationService
from tailrace.storage.index_work import IndexWork

HEARTBEAT_FRESH_S: Final = 60.0  # an older heartbeat is ignored
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
    """Sent by a pipeline every few seconds. Unknown fields are ignored."""

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
    drain: bool = False  # sent by `tailrace pipeline drain`, not by a pipeline


class PipelineBacklog(msgspec.Struct, frozen=True):
    """Work that waits for a pipeline; decides whether one is started."""

    streams: int = 0
    raw_bytes: int = 0
    oldest_ms: int = 0
    upkeep: bool = False  # there are merges, compactions or rewrites

    def __add__(self, other: PipelineBacklog) -> PipelineBacklog:
        return PipelineBacklog(
            self.streams + other.streams,
            self.raw_bytes + other.raw_bytes,
            max(self.oldest_ms, other.oldest_ms),
            self.upkeep or other.upkeep,
        )


class PipelineState:
    """The state of the pipeline as shown to clients; `PipelineProcess` sets that of a supervised one."""

    def __init__(
        self,
        context: Context,
        work: IndexWork,
        publishing: PublicationService,
        on_heartbeat: Callable[[PipelineHeartbeat], None] | None,
    ) -> None:
        self._context = context
        self._work = work
        self._publishing = publishing
        self._heartbeat: PipelineHeartbeat | None = None
        self._heartbeat_s = 0.0
        self.mode: Final = context.settings.pipeline
        self.state = "off"  # of a supervised pipeline
        self.reason: str | None = None
        self.restarts = 0
        self.draining = False
        self.last_error: str | None = None
        self._on_heartbeat = on_heartbeat

    # -- heartbeats --------------------------------------------------------------------------------------

    def record_heartbeat(self, heartbeat: PipelineHeartbeat) -> Json:
        """Record a heartbeat; the response says whether the pipeline shall exit."""
        self._heartbeat = heartbeat
        self._heartbeat_s = self._context.loop.time()
        if self._on_heartbeat is not None:
            self._on_heartbeat(heartbeat)
        for family, seconds in heartbeat.seconds.items():
            if family in FAMILIES:
                self.observe(family, seconds)
        drain = self.draining
        if heartbeat.state == "stopping":
            self._heartbeat = None
            self.draining = self.draining and self.mode == "auto"
        return {"drain": drain}

    def observe(self, family: str, seconds: list[float]) -> None:
        timings = self._context.telemetry.pipeline_segment_seconds
        for value in seconds[:SECONDS_MAX]:
            timings.observe(value, family)

    def mark_gone(self) -> None:
        """The pipeline has exited."""
        self._heartbeat = None
        self.draining = False

    @property
    def fresh(self) -> bool:
        return (
            self._heartbeat is not None and self._context.loop.time() - self._heartbeat_s < HEARTBEAT_FRESH_S
        )

    @property
    def heartbeat(self) -> PipelineHeartbeat | None:
        """The last heartbeat, if it is fresh."""
        return self._heartbeat if self.fresh else None

    @property
    def heartbeat_s(self) -> float:
        return self._heartbeat_s

    # -- status ----------------------------------------------------------------------------------------

    @property
    def displayed_state(self) -> str:
        """One of STATES."""
        if self.mode == "auto" and self.state != "off":
            return self.state
        return "external" if self.fresh else self.state

    def backlog(self) -> tuple[int, int, int]:
        """Segments without index files, their payload bytes, and the age of the oldest in ms."""
        works = self._work.by_stream.values()
        oldest_ns = min((work.oldest_ns for work in works if work.oldest_ns), default=0)
        age_ms = max(0, self._context.clock.now_ns() - oldest_ns) // 1_000_000 if oldest_ns else 0
        return sum(work.segments for work in works), sum(work.raw_bytes for work in works), age_ms

    def concurrency(self) -> dict[str, int]:
        """Segments indexed at once, in progress and queued."""
        heartbeat, limit = self.heartbeat, self._context.limits.pipeline_batch_segments
        active = 0 if heartbeat is None else sum(one.segments for one in heartbeat.running)
        return {
            "configured_limit": 0 if self.mode == "off" else limit,
            "current_limit": 0 if heartbeat is None else limit,
            "active": active,
            "queued": max(0, self.backlog()[0] - active),
        }

    def demand(self) -> PipelineBacklog:
        works = self._work.by_stream.values()
        _, raw_bytes, oldest_ms = self.backlog()
        upkeep = any(work.merges or work.compactions or work.rewrites for work in works)
        return PipelineBacklog(len(works), raw_bytes, oldest_ms, upkeep)

    @property
    def quarantined(self) -> int:
        return sum(self._work.given_up.values())

    def details(self) -> Json:
        """`runtime.pipeline` of the server's details."""
        heartbeat = self.heartbeat
        segments, raw_bytes, oldest_ms = self.backlog()
        published = self._publishing
        mode = {"auto": "local", "off": "off", "external": "external"}[self.mode]
        return {
            "mode": mode,
            "state": self.displayed_state,
            "reason": self.reason,
            "master": None if heartbeat is None else heartbeat.master[:TEXT_MAX],
            "spark_version": None if heartbeat is None else heartbeat.spark_version[:TEXT_MAX],
            "pid": None if heartbeat is None else heartbeat.pid,
            "started_at": None if heartbeat is None else heartbeat.started_at,
            "restarts": self.restarts,
            "last_error": self.last_error if heartbeat is None else (heartbeat.last_error or self.last_error),
            "draining": self.draining,
            "backlog": {"segments": segments, "bytes": str(raw_bytes), "oldest_ms": str(oldest_ms)},
            "running": []
            if heartbeat is None
            else [msgspec.to_builtins(one) for one in heartbeat.running[:100]],
            "totals": {
                "segments": published.segments,
                "rows": str(published.rows),
                "bytes_in": str(published.bytes_in),
                "bytes_out": str(published.bytes_out),
                "quarantined": self.quarantined,
            },
            "rss_bytes": "0" if heartbeat is None else heartbeat.rss_bytes[:32],
            "last_publish_at": format_rfc3339(published.last_ns) if published.last_ns else None,
        }


logger = logging.getLogger("tailrace.pipeline")

TICK_S: Final = 1.0
AUTOGROUP: Final = Path("/proc/self/autogroup")
JAVA_CHECK_S: Final = 300.0
STOP_S: Final = 10.0  # from SIGTERM to SIGKILL
BACKOFF_S_MIN, BACKOFF_S_MAX = 1.0, 300.0
HEALTHY_S: Final = 600.0  # after this long the back-off starts from its minimum again
TOKEN_LIFETIME_S: Final = 900.0
NO_JAVA: Final = "no Java 17+ found: index files are not built, searches scan (see tailrace doctor)"


class PipelineProcess:
    """Starts, watches and stops the local pipeline. Used on the event loop only.

    `grant` issues a token that is valid for a number of seconds; it is None without authentication. `demand`
    returns the backlog of all workers of the server.
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
        self._tasks = TaskSet()
        self._child: asyncio.subprocess.Process | None = None
        self._pipe = -1  # our end of the child's pipe
        self._backoff = Backoff(BACKOFF_S_MIN, BACKOFF_S_MAX)
        self._started_s = self._again_s = self._java_s = self._idle_s = self._token_s = 0.0
        self._recheck_java = False
        self._drained = False

    def start(self) -> None:
        if self._context.settings.pipeline == "auto":
            self._tasks.start(self._run())

    async def stop(self) -> None:
        await self._tasks.close()
        await self._terminate()

    def recheck_java(self) -> None:
        """SIGHUP: check for Java again, and allow a drained pipeline to start again."""
        self._recheck_java = True
        self._drained = False

    # -- the state machine -------------------------------------------------------------------------------

    async def _run(self) -> None:
        await self._check_java(at_start=True)
        while True:
            try:
                await self._step(self._loop.time())
            except OSError as error:
                self._fail(f"cannot start the pipeline: {error}")
            await asyncio.sleep(TICK_S)

    async def _step(self, now_s: float) -> None:
        state = self._state
        if self._child is not None:
            await self._watch(self._child, now_s)
        elif state.state == "unavailable":
            if self._recheck_java or now_s - self._java_s >= JAVA_CHECK_S:
                await self._check_java()
        elif state.state == "backoff":
            if now_s >= self._again_s:
                self._set_state("off")
        elif not self._drained and self._is_due():
            await self._check_java()
            if state.state != "unavailable":
                await self._launch(now_s)

    def _is_due(self) -> bool:
        """Whether there is enough work to start a JVM."""
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
            await self._terminate()
            if code == 0:
                self._drained = drained
                self._set_state("off")
            else:
                self._fail(f"the pipeline exited with {code}")
            return
        self._renew(now_s)
        heard_s = max(self._started_s, state.heartbeat_s)
        if now_s - heard_s >= HEARTBEAT_FRESH_S:
            await self._terminate()
            self._fail(f"no heartbeat from the pipeline for {HEARTBEAT_FRESH_S:.0f} s")
            return
        heartbeat = state.heartbeat
        if heartbeat is not None and heartbeat.pid == child.pid and state.heartbeat_s >= self._started_s:
            self._set_state(heartbeat.state if heartbeat.state in ("idle", "starting") else "running")
            if now_s - self._started_s >= HEALTHY_S:
                self._backoff.reset()
        if state.state != "idle" or self._demand().streams:
            self._idle_s = now_s
        elif (now_s - self._idle_s) * 1000 >= self._context.limits.pipeline_idle_stop:
            await self._terminate()
            self._set_state("off")

    def _set_state(self, state: str, reason: str | None = None) -> None:
        if state != self._state.state:
            logger.info("pipeline state changed", extra=log_fields(state=state, reason=reason))
        self._state.state = state
        self._state.reason = reason

    def _fail(self, error: str) -> None:
        """Back off before the next start."""
        pause_s = self._backoff.next_s()
        logger.warning("pipeline failed, retrying", extra=log_fields(error=error, retry_s=pause_s))
        self._state.last_error = error
        self._state.restarts += 1
        self._again_s = self._loop.time() + pause_s
        self._set_state("backoff", error)

    async def _check_java(self, *, at_start: bool = False) -> None:
        self._java_s = self._loop.time()
        self._recheck_java = False
        if find_spec("pyspark") is None:
            self._set_state("unavailable", "the spark extra is not installed: pip install 'tailrace[spark]'")
            return
        is_remote = self._context.settings.pipeline_master.startswith(
            "sc://"
        )  # Spark Connect has its own Java
        if not is_remote and await find_java(check_version=not at_start) is None:
            if self._state.state != "unavailable":
                logger.warning(NO_JAVA)
            self._set_state("unavailable", "no Java 17+ found")
        elif self._state.state == "unavailable":
            self._set_state("off")

    # -- the process -------------------------------------------------------------------------------------

    async def _launch(self, now_s: float) -> None:
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
                preexec_fn=self._lower_priority,
            )
        finally:
            os.close(reading)
        self._started_s = self._idle_s = now_s
        self._state.mark_gone()
        self._send_line(msgspec.json.encode(self._configuration()))
        self._token_s = now_s
        self._set_state("starting")

    def _lower_priority(self) -> None:
        """Lower the priority of the child; runs in it between fork and exec.

        Where the kernel schedules by session (autogroup), niceness only counts within one session, so the
        pipeline gets a session of its own, whose priority is lowered as a whole. The session is created here
        and not by `start_new_session`: that may happen only after this function, which would then lower the
        server's session.
        """
        os.setsid()
        niceness = self._context.settings.pipeline_nice
        process.lower_cpu_priority(niceness)
        process.set_idle_io_priority()
        with contextlib.suppress(OSError):  # without autogroup niceness is enough
            AUTOGROUP.write_text(str(niceness))

    def _configuration(self) -> dict[str, object]:
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
            self._send_line(msgspec.json.encode({"token": self._token()}))

    def _send_line(self, line: bytes) -> None:
        """Write a few hundred bytes, which never block on a pipe."""
        try:
            os.write(self._pipe, line + b"\n")
        except OSError:
            logger.debug("pipeline has closed its pipe")

    async def _terminate(self) -> None:
        """Send SIGTERM to the child, which ends its JVM, and later SIGKILL to its process group."""
        child, self._child = self._child, None
        if child is None:
            return
        # Not to its group: the child would report a JVM that ends first as a failure.
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            pass
        _kill_group(child)  # with any processes it left behind
        await child.wait()
        os.close(self._pipe)
        self._pipe = -1
        self._state.mark_gone()


def _kill_group(child: asyncio.subprocess.Process) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # the group has ended already
