"""How the pipeline is, told to the server every few seconds."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import msgspec

from tailrace.spark.index.worker import BUILT
from tailrace.spark.jobs.index_build import SegmentBuildResult
from tailrace.spark.jobs.messages import Heartbeat, PipelineTotals, RunningJob
from tailrace.spark.jobs.owner import PipelineClient, RequestRefusedError, ServerUnreachableError

logger = logging.getLogger("tailrace.pipeline")

HEARTBEAT_INTERVAL_S: Final = 10.0
HEARTBEAT_GIVE_UP_S: Final = 5.0  # of one heartbeat; the next one follows soon
BUILD_SECONDS_MAX: Final = 1000

PipelinePhase = Literal["starting", "running", "idle", "stopping"]


def utc_timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class PipelineStatus:
    """Counted by the thread that works, read by the one that tells."""

    def __init__(self, master: str, mode: str = "local") -> None:
        self._lock = threading.Lock()
        self._master = master
        self._mode = mode
        self._started_at = utc_timestamp()
        self._state: PipelinePhase = "starting"
        self._running: list[RunningJob] = []
        self._last_error: str | None = None
        self._last_publish_at: str | None = None
        self._seconds: dict[str, list[float]] = {}
        self.totals = PipelineTotals()
        self.spark_version = ""
        self.on_change: Callable[[], None] = lambda: None

    def to(self, state: PipelinePhase, running: list[RunningJob] | None = None) -> None:
        with self._lock:
            changed = state != self._state
            self._state = state
            self._running = running or []
        if changed:
            self.on_change()

    def built(self, outcome: SegmentBuildResult) -> None:
        """A segment that was published, or given up."""
        with self._lock:
            self.totals.segments += 1
            self.totals.rows += outcome.work.segment.rows
            self.totals.bytes_in += outcome.work.segment.raw_bytes
            self.totals.bytes_out += sum(file.bytes for file in outcome.files)
            if outcome.status != BUILT:
                self.totals.quarantined += 1
                self._last_error = f"{outcome.status}: {outcome.error}"
            for file in outcome.files:
                kept = self._seconds.setdefault(file.family, [])
                if len(kept) < BUILD_SECONDS_MAX:
                    kept.append(file.seconds)

    def published(self, job: str, result: str) -> None:
        logger.info("%s: %s", job, result)
        with self._lock:
            self.totals.published += 1
            self._last_publish_at = utc_timestamp()

    def dropped(self, job: str, code: str) -> None:
        self.failed(f"{job}: {code}")

    def failed(self, message: str) -> None:
        with self._lock:
            self._last_error = message

    def heartbeat(self) -> Heartbeat:
        with self._lock:
            seconds, self._seconds = self._seconds, {}
            totals = msgspec.structs.asdict(self.totals)
            return Heartbeat(
                mode=self._mode,
                state=self._state,
                master=self._master,
                spark_version=self.spark_version,
                pid=os.getpid(),
                started_at=self._started_at,
                last_error=self._last_error,
                running=list(self._running),
                totals={
                    name: str(value) if name in ("rows", "bytes_in", "bytes_out") else value
                    for name, value in totals.items()
                },
                seconds=seconds,
                rss_bytes=str(process_tree_rss_bytes()),
                last_publish_at=self._last_publish_at,
            )


class HeartbeatThread:
    """Tells the server on a thread of its own; the answer may ask the pipeline to end."""

    def __init__(self, owner: PipelineClient, status: PipelineStatus, on_drain: Callable[[], None]) -> None:
        self._owner = owner
        self._status = status
        self._on_drain = on_drain
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        status.on_change = self._wake.set

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Tells once more how things are."""
        self._ending = True
        self._wake.set()
        self._thread.join(HEARTBEAT_GIVE_UP_S * 2)

    def _run(self) -> None:
        while True:
            ending = self._ending
            try:
                answer = self._owner.heartbeat(self._status.heartbeat())
            except (RequestRefusedError, ServerUnreachableError) as error:
                logger.debug("no heartbeat: %s", error)
            else:
                if answer.drain:
                    self._on_drain()
            if ending:
                return
            self._wake.wait(HEARTBEAT_INTERVAL_S)
            self._wake.clear()


def process_tree_rss_bytes() -> int:
    """Of this process, its JVM and its workers, where the system tells."""
    try:
        children = _child_pids()
    except OSError:
        return 0
    waiting, seen = [os.getpid()], 0
    while waiting:
        pid = waiting.pop()
        seen += _process_rss_bytes(pid)
        waiting += children.get(pid, [])
    return seen


def _child_pids() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended meanwhile
            found.setdefault(parent, []).append(int(entry.name))
    return found


def _process_rss_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
