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
from tailrace.spark.jobs.index_build import Outcome
from tailrace.spark.jobs.messages import Heartbeat, Running, Totals
from tailrace.spark.jobs.owner import Owner, RefusedError, UnreachableError

logger = logging.getLogger("tailrace.pipeline")

INTERVAL_S: Final = 10.0
GIVE_UP_S: Final = 5.0  # of one heartbeat; the next one follows soon
SECONDS_KEPT: Final = 1000

State = Literal["starting", "running", "idle", "stopping"]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Status:
    """Counted by the thread that works, read by the one that tells."""

    def __init__(self, master: str, mode: str = "local") -> None:
        self._lock = threading.Lock()
        self._master = master
        self._mode = mode
        self._started_at = now()
        self._state: State = "starting"
        self._running: list[Running] = []
        self._last_error: str | None = None
        self._last_publish_at: str | None = None
        self._seconds: dict[str, list[float]] = {}
        self.totals = Totals()
        self.spark_version = ""
        self.on_change: Callable[[], None] = lambda: None

    def to(self, state: State, running: list[Running] | None = None) -> None:
        with self._lock:
            changed = state != self._state
            self._state = state
            self._running = running or []
        if changed:
            self.on_change()

    def built(self, outcome: Outcome) -> None:
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
                if len(kept) < SECONDS_KEPT:
                    kept.append(file.seconds)

    def published(self, job: str, result: str) -> None:
        logger.info("%s: %s", job, result)
        with self._lock:
            self.totals.published += 1
            self._last_publish_at = now()

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
                rss_bytes=str(rss_bytes()),
                last_publish_at=self._last_publish_at,
            )


class Heartbeats:
    """Tells the server on a thread of its own; the answer may ask the pipeline to end."""

    def __init__(self, owner: Owner, status: Status, on_drain: Callable[[], None]) -> None:
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
        self._thread.join(GIVE_UP_S * 2)

    def _run(self) -> None:
        while True:
            ending = self._ending
            try:
                answer = self._owner.heartbeat(self._status.heartbeat())
            except (RefusedError, UnreachableError) as error:
                logger.debug("no heartbeat: %s", error)
            else:
                if answer.drain:
                    self._on_drain()
            if ending:
                return
            self._wake.wait(INTERVAL_S)
            self._wake.clear()


def rss_bytes() -> int:
    """Of this process, its JVM and its workers, where the system tells."""
    try:
        children = _children()
    except OSError:
        return 0
    waiting, seen = [os.getpid()], 0
    while waiting:
        pid = waiting.pop()
        seen += _rss_of(pid)
        waiting += children.get(pid, [])
    return seen


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended meanwhile
            found.setdefault(parent, []).append(int(entry.name))
    return found


def _rss_of(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
