"""The server's side of the checkpointer: runs the process, feeds it retired journal files, reports
progress."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from typing import TYPE_CHECKING

from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.tasks import TaskSet, wait_event
from tailrace.storage.checkpointer import is_vacuum_due

if TYPE_CHECKING:
    from tailrace.log.log import Log

logger = logging.getLogger("tailrace.checkpoint")

RETRY_S = 1.0
VACUUM_RETRY_S = 60.0  # after a vacuum that could not free anything
# A restart need not fold a journal that replays in a blink.
CHECKPOINT_AT_START_BYTES = 4 * 1024 * 1024


class CheckpointService:
    """Checkpoints one file at a time, oldest first. The child runs while there is work."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._files: deque[tuple[int, int]] = deque()
        self._backlog: list[tuple[int, int]] = []  # replayed at the start; goes along with the next file
        self._last_seq = 0
        self._wake = asyncio.Event()
        self._tasks = TaskSet()
        self._child: asyncio.subprocess.Process | None = None
        self._disk_short = False
        self._rebuilding = False  # the child rewrites the whole file; a journal file does not wait for that
        self._vacuum_after_s = 0.0
        self.done = 0
        self.failures = 0

    def register_metrics(self, metrics: ServerMetrics) -> None:
        metrics.checkpoint_lag_bytes.read = lambda: self.lag_bytes
        metrics.checkpoints.read = lambda: self.done

    @property
    def files_pending(self) -> int:
        return len(self._files)

    @property
    def lag_bytes(self) -> int:
        """Journal bytes the hot store does not have yet, the file being written included."""
        active = self._log.journal.active
        return sum(end for _, end in self._files) + (0 if active is None else active.end)

    def start(self) -> None:
        self._log.on_file_retired = self.retired
        replayed = self._log.recovered.files
        if sum(end for _, end in replayed) >= CHECKPOINT_AT_START_BYTES or len(replayed) > 4:
            for seq, end in replayed:
                self.retired(seq, end)
        else:
            self._backlog = list(replayed)
        self._tasks.start(self._run())

    async def stop(self) -> None:
        await self._tasks.close()
        await self._end_child()

    async def _end_child(self) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
            await self._child.wait()

    def retired(self, seq: int, end: int) -> None:
        for file in (*self._backlog, (seq, end)):
            if file[0] > self._last_seq:
                self._last_seq = file[0]
                self._files.append(file)
        self._backlog = []
        self._log.checkpoint_pending = True
        self._wake.set()

        if self._rebuilding and self._child is not None and self._child.stdin is not None:
            self._child.stdin.write(b"stop\n")

    def disk_short(self, short: bool) -> None:
        """Whether the disk has less room than its reserve: then every free page of the hot store counts."""
        self._disk_short = short
        self._vacuum_after_s = 0.0
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._vacuum()
            if not await wait_event(self._wake, self._log.limits.helper_idle_ms / 1000):
                # An idle child uses some 50 MB, and starting one is fast.
                await self._end_child()
                await self._wake.wait()
            while self._files:
                seq, end = self._files[0]
                response = await self._request(f"{seq} {end}")
                if response == f"done {seq}":
                    self._files.popleft()
                    self.done += 1
                    self._log.checkpoint_pending = bool(self._files)
                    self._log.checkpointed(seq)
                    continue
                self.failures += 1
                fields = log_fields(file=seq, error=response or "the process exited")
                logger.error("checkpoint failed, retrying", extra=fields)
                await asyncio.sleep(RETRY_S)
            self._wake.clear()

    async def _vacuum(self) -> None:
        """Returns free pages of the hot store to the file system, in steps, while no journal file waits."""
        loop = asyncio.get_running_loop()
        while not self._wake.is_set() and loop.time() >= self._vacuum_after_s and self._vacuum_due():
            response = await self._request(f"vacuum {int(self._disk_short)}")
            self._rebuilding = False
            verdict, _, detail = response.partition(" ")
            if verdict == "vacuumed" and int(detail) > 0:
                logger.debug("hot store vacuumed", extra=log_fields(pages=int(detail)))
                continue
            if verdict != "vacuumed":
                self.failures += 1
                fields = log_fields(error=response or "the process exited")
                logger.error("hot store vacuum failed", extra=fields)
            self._vacuum_after_s = loop.time() + VACUUM_RETRY_S
            loop.call_later(VACUUM_RETRY_S, self._wake.set)

    def _vacuum_due(self) -> bool:
        try:
            space = self._log.store.db.space()
        except TailraceError:
            return False  # already logged; reads report it as well
        due = is_vacuum_due(space, short=self._disk_short)
        self._rebuilding = due and not space.incremental
        return due

    async def _request(self, line: str) -> str:
        """The child's response; empty if it exited, `failed` if the line could not be sent."""
        try:
            if self._child is None or self._child.returncode is not None:
                self._child = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tailrace.storage.checkpointer",
                    str(self._log.directory),
                    str(self._log.limits.tombstone_ms),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.write(f"{line}\n".encode())
            await self._child.stdin.drain()
            return (await self._child.stdout.readline()).decode().strip()
        except OSError as error:
            return f"failed {line} {error}"
