"""What the server asks of the sealer, and what it is told. One JSON object per line, either way."""

from __future__ import annotations

from typing import Literal

import msgspec

from tailrace.common.limits import Limits
from tailrace.storage.object_store.request_stats import RequestCount, RequestTiming, UploadedHead
from tailrace.storage.segments.companions import IndexFile
from tailrace.storage.segments.segments import SegmentInfo
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
