"""The server's side of the sealer: jobs and reports as lines of JSON, and the child process.

The process is started for the first job and stopped when idle.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from typing import Literal

import msgspec

from tailrace.common.limits import Limits
from tailrace.storage.object_store.request_stats import RequestCount, RequestTiming, UploadedHead
from tailrace.storage.segments.index_files import IndexFile
from tailrace.storage.segments.model import SegmentInfo
from tailrace.storage.sweep import SweepReport, SweepShare

JobKind = Literal["seal", "heads", "bury", "trim", "meta", "sweep", "publish", "plan", "compact"]

# The sealer's environment variable for the only setting that is not an argument.
RECOVERY_KEY_VARIABLE = "TAILRACE_RECOVERY_KEY"


class SealerSetup(msgspec.Struct, kw_only=True):
    """The argument of the sealer process."""

    data_dir: str
    url: str
    deployment: str
    fence: int
    limits: Limits
    share: SweepShare = "all"  # of the sweep


class ManifestPublication(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a `publish` adds to and removes from a manifest; the objects that a `plan` creates."""

    stream_id: str
    added: list[IndexFile] = []
    removed: list[str] = []
    objects: dict[str, bytes] = {}  # by name in the folder of the stream
    segment: SegmentInfo | None = None  # of a `compact`: replaces those in `replaced`
    replaced: list[SegmentInfo] = []


class SealerJob(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request to the sealer. `heads`, `bury` (deleted streams) and `trim` are for several streams.

    `seal`: one stream, from the entry after `sealed`. `meta`: facts that changed after the journal file
    `sealed`. `sweep`: one step of the sweep, after the key `after`. `publish`, `plan`, `compact`: one stream,
    and the objects for its folder or manifest.
    """

    id: int
    kind: JobKind
    numbers: list[int]
    sealed: int = 0
    after: str = ""
    publication: ManifestPublication | None = None


class SealerUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sealer's object store requests: totals, and by stream since its last report."""

    requests: dict[str, int] = {}
    bytes_out: int = 0
    bytes_in: int = 0
    by_stream: list[RequestCount] = []
    heads: list[UploadedHead] = []
    timings: list[RequestTiming] = []


class SealerReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The outcome of a job. Of a `seal`: what to journal; `more` if there was too much for one job.

    `as_of` is the journal file that the manifests cover. `trouble` classifies `error`: the store is
    unavailable, another server owns it, the sealer exited, the bucket has other entries of this stream than
    the hot store, or another failure. `after`, of a `sweep`, is the last key, empty at the end of the bucket.
    """

    id: int
    as_of: int = 0
    generation: int = 0
    segments: list[SegmentInfo] = []
    footers: list[bytes] = []
    more: bool = False
    after: str = ""
    swept: SweepReport = msgspec.field(default_factory=SweepReport)
    keyed: bool = False  # of a `seal`: some entries have keys
    added: list[IndexFile] = []  # of a `publish`: those not listed in the manifest before
    refused: str = ""  # why nothing was changed: `missing`, `changed`; of a `seal` as well: `buried`
    detail: str = ""
    done: list[tuple[int, int]] = []  # heads: stream and generation; others: stream and 0
    error: str = ""
    trouble: Literal["", "unavailable", "fenced", "ended", "conflict", "failed"] = ""
    usage: SealerUsage = msgspec.field(default_factory=SealerUsage)


logger = logging.getLogger("tailrace.seal")

# A report holds the footers of a few segments.
LINE_BYTES_MAX = 256 * 1024 * 1024


class SealerProcess:
    """Sends jobs to the child process and returns its reports. If the child exits, its jobs fail."""

    def __init__(self, setup: SealerSetup, recovery_key: str = "") -> None:
        self._setup = setup
        # An idle child uses some 40 MB, and starting one is fast.
        self._idle_s = setup.limits.helper_idle_ms / 1000
        self._recovery_key = recovery_key
        self._child: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._pending: dict[int, asyncio.Future[SealerReport]] = {}
        self._last_id = 0
        self._idle: asyncio.TimerHandle | None = None
        self._earlier: Counter[str] = Counter()  # requests of earlier children
        self._current: Counter[str] = Counter()
        self._bytes = [0, 0, 0, 0]  # out and in, of earlier children and of the current one

    @property
    def requests(self) -> Counter[str]:
        """Requests to the object store, by kind."""
        return self._earlier + self._current

    @property
    def bytes_out(self) -> int:
        return self._bytes[0] + self._bytes[2]

    @property
    def bytes_in(self) -> int:
        return self._bytes[1] + self._bytes[3]

    async def run_job(
        self,
        kind: JobKind,
        numbers: list[int],
        sealed: int = 0,
        after: str = "",
        publication: ManifestPublication | None = None,
    ) -> SealerReport:
        """Runs a job. If the child exits before its report, the report has `trouble="ended"`."""
        child = await self._running()
        self._last_id += 1
        job = SealerJob(
            id=self._last_id, kind=kind, numbers=numbers, sealed=sealed, after=after, publication=publication
        )
        pending: asyncio.Future[SealerReport] = asyncio.get_running_loop().create_future()
        self._pending[job.id] = pending
        try:
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(job) + b"\n")
            await child.stdin.drain()
            return await pending
        except OSError as error:
            message = f"cannot send a job to the sealer process: {error}"
            return SealerReport(id=job.id, error=message, trouble="ended")
        finally:
            self._pending.pop(job.id, None)
            self._schedule_idle_stop()

    def _schedule_idle_stop(self) -> None:
        """Stops the child if it has no jobs for a while."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if not self._pending:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle)

    def _end_idle(self) -> None:
        self._idle = None
        child = self._child
        if not self._pending and child is not None and child.returncode is None:
            child.kill()
            self._child = None  # so that the next job starts a new one

    async def stop(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._child is not None and self._child.returncode is None:
            self._child.kill()
            await self._child.wait()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _running(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._child is None or self._child.returncode is not None:
                if self._reading is not None:
                    await self._reading  # so that the exit of the last child does not fail jobs of this one
                self._child = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tailrace.storage.sealer",
                    msgspec.json.encode(self._setup).decode(),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=LINE_BYTES_MAX,
                    env={**os.environ, RECOVERY_KEY_VARIABLE: self._recovery_key},
                )
                self._reading = asyncio.create_task(self._read(self._child))
            return self._child

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout is not None
        try:
            while line := await child.stdout.readline():
                report = msgspec.json.decode(line, type=SealerReport)
                self._current = Counter(report.usage.requests)
                self._bytes[2:] = [report.usage.bytes_out, report.usage.bytes_in]
                pending = self._pending.get(report.id)
                if pending is not None and not pending.done():
                    pending.set_result(report)
        except (ValueError, msgspec.MsgspecError):
            logger.exception("invalid message from sealer process")
            child.kill()
        await child.wait()
        self._earlier += self._current
        self._current = Counter()
        self._bytes = [self._bytes[0] + self._bytes[2], self._bytes[1] + self._bytes[3], 0, 0]
        for number, pending in list(self._pending.items()):
            if not pending.done():
                report = SealerReport(id=number, error="the sealer process exited", trouble="ended")
                pending.set_result(report)
