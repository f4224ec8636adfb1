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

# Where the sealer finds the one setting that is no argument.
RECOVERY_KEY_VARIABLE = "TAILRACE_RECOVERY_KEY"


class SealerSetup(msgspec.Struct, kw_only=True):
    """How a sealer is started: its only argument."""

    data_dir: str
    url: str
    deployment: str
    fence: int
    limits: Limits
    share: SweepShare = "all"  # of the sweep


class ManifestPublication(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a `publish` adds to the manifest of a stream and takes out of it; objects a `plan` has created."""

    stream_id: str
    added: list[IndexFile] = []
    removed: list[str] = []
    objects: dict[str, bytes] = {}  # by their names in the folder of the stream
    segment: SegmentInfo | None = None  # of a `compact`: what takes the place of `replaced`
    replaced: list[SegmentInfo] = []


class SealerJob(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`seal`: one stream, from the entry behind `sealed`. `heads`, `bury`, `trim`: several streams at once.

    `meta`: facts of the server that changed after the journal file `sealed`. `sweep`: one turn of the sweep,
    behind the key `after`. `publish`, `plan`, `compact`: one stream, and what belongs into its folder or
    manifest.
    """

    id: int
    kind: JobKind
    numbers: list[int]
    sealed: int = 0
    after: str = ""
    publication: ManifestPublication | None = None


class SealerUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the sealer has asked of the object store so far; by stream, since its last report."""

    requests: dict[str, int] = {}
    bytes_out: int = 0
    bytes_in: int = 0
    by_stream: list[RequestCount] = []
    heads: list[UploadedHead] = []
    timings: list[RequestTiming] = []


class SealerReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The outcome of a job. Of a `seal`: what to journal; `more` if there was too much for one job.

    `as_of` is the journal file the manifests speak for. `trouble` tells what kind of failure `error` is:
    the store cannot be used, somebody else owns it, the sealer died, the bucket has other entries of this
    stream than we have, or something else is wrong with it.
    Of a `sweep`: the key it has come to, empty at the end of the bucket.
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
    added: list[IndexFile] = []  # of a `publish`: those that the manifest did not list before
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
    """Asks jobs of the child and hands out its reports. A child that ends fails what it was asked."""

    def __init__(self, setup: SealerSetup, recovery_key: str = "") -> None:
        self._setup = setup
        # A child with nothing to do holds some 40 MB; the next one is there in a blink.
        self._idle_s = setup.limits.helper_idle_ms / 1000
        self._recovery_key = recovery_key
        self._child: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[SealerReport]] = {}
        self._last_id = 0
        self._idle: asyncio.TimerHandle | None = None
        self._earlier: Counter[str] = Counter()  # what children that have ended did
        self._present: Counter[str] = Counter()
        self._bytes = [0, 0, 0, 0]  # out and in, of earlier children and of the present one

    @property
    def requests(self) -> Counter[str]:
        """Requests to the object store, by kind."""
        return self._earlier + self._present

    @property
    def bytes_out(self) -> int:
        return self._bytes[0] + self._bytes[2]

    @property
    def bytes_in(self) -> int:
        return self._bytes[1] + self._bytes[3]

    async def ask(
        self,
        kind: JobKind,
        numbers: list[int],
        sealed: int = 0,
        after: str = "",
        publication: ManifestPublication | None = None,
    ) -> SealerReport:
        """The report of a job; if the child ends before it, one that says so."""
        child = await self._running()
        self._last_id += 1
        job = SealerJob(
            id=self._last_id, kind=kind, numbers=numbers, sealed=sealed, after=after, publication=publication
        )
        answer: asyncio.Future[SealerReport] = asyncio.get_running_loop().create_future()
        self._asked[job.id] = answer
        try:
            assert child.stdin is not None
            child.stdin.write(msgspec.json.encode(job) + b"\n")
            await child.stdin.drain()
            return await answer
        except OSError as error:
            return SealerReport(id=job.id, error=f"the sealer cannot be asked: {error}", trouble="ended")
        finally:
            self._asked.pop(job.id, None)
            self._rest()

    def _rest(self) -> None:
        """Ends the child when nothing is asked of it for a while."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if not self._asked:
            self._idle = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle)

    def _end_idle(self) -> None:
        self._idle = None
        child = self._child
        if not self._asked and child is not None and child.returncode is None:
            child.kill()
            self._child = None  # the next job finds none, rather than one that is about to end

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
                    await self._reading  # so that the end of the last child is not taken for this one's
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
                self._present = Counter(report.usage.requests)
                self._bytes[2:] = [report.usage.bytes_out, report.usage.bytes_in]
                answer = self._asked.get(report.id)
                if answer is not None and not answer.done():
                    answer.set_result(report)
        except (ValueError, msgspec.MsgspecError):
            logger.exception("the sealer said something that cannot be understood")
            child.kill()
        await child.wait()
        self._earlier += self._present
        self._present = Counter()
        self._bytes = [self._bytes[0] + self._bytes[2], self._bytes[1] + self._bytes[3], 0, 0]
        for number, answer in list(self._asked.items()):
            if not answer.done():
                answer.set_result(SealerReport(id=number, error="the sealer ended", trouble="ended"))
