"""The data model of the log: streams, blocks of entries, tombstones.

A stream has five positions, always in this order: `earliest <= sealed <= stored <= visible <= tail`.
`tail` is the last entry that was *assigned* a number (its commit may still be running), `visible` the last
one that is durable and *published* to readers, `stored` the last one that is in the hot store, `sealed` the
last one that is in a recorded segment, `earliest` the last one that retention has removed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import msgspec

from tailrace.protocol import offsets
from tailrace.protocol.http_headers import is_json

if TYPE_CHECKING:
    from tailrace.log.group_commit import CommitBatch

FIRST_EPOCH: tuple[tuple[int, int], ...] = ((0, 1),)  # shared by nearly every stream

ReadPart = bytes | memoryview


class Block:
    """Consecutive entries of one stream as one run of bytes, as they are stored and read.

    On JSON streams entries are joined by a comma, so a page is a slice of blocks.
    `ends[i]` is where entry `first + i` ends in `body`.
    """

    __slots__ = ("body", "ends", "file", "first", "keys", "last", "times")

    def __init__(
        self,
        first: int,
        body: bytes,
        ends: array[int],
        times: array[int],
        keys: list[bytes | None] | None,
        file: int = 0,
    ) -> None:
        self.first = first
        self.last = first + len(ends) - 1
        self.body = body
        self.ends = ends
        self.times = times
        self.keys = keys
        self.file = file

    @property
    def memory_bytes(self) -> int:
        return len(self.body) + 12 * len(self.ends) + 200

    def payload(self, entry: int, separator: int) -> bytes:
        """One entry; `separator` is the number of bytes between two."""
        index = entry - self.first
        return self.body[self.ends[index - 1] + separator if index else 0 : self.ends[index]]


class Producer(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    seq: int


class Tombstone(msgspec.Struct, frozen=True, array_like=True):
    """The record of a deleted name: a new stream of that name must not reuse its offsets."""

    epoch: int
    incarnation: int
    deleted_ns: int
    reason: str  # "deleted" or "expired"


class Lifetime(msgspec.Struct, frozen=True, array_like=True):
    """The lifetime headers of a PUT, normalised."""

    ttl_s: int | None = None
    expires_ns: int | None = None
    retention_s: int | None = None
    retention_bytes: int | None = None


NO_LIFETIME = Lifetime()


class ColdTotals(msgspec.Struct, frozen=True, array_like=True):
    """Totals of a stream's segments on the object store."""

    segments: int = 0
    segment_bytes: int = 0  # size of their files
    generation: int = 0  # of the manifest
    recorded_ns: int = 0  # when the last segment was recorded in it


NO_COLD_TOTALS = ColdTotals()


class LiveReader(Protocol):
    """A connection that waits for entries at a stream's tail."""

    def on_published(self, stream: Stream) -> None: ...


class Stream:
    """One stream's state: read by `decide`, changed by `Streams`. Owned by the loop thread."""

    __slots__ = (
        "batch",
        "blocks",
        "closed",
        "closed_by",
        "cold",
        "content_type",
        "created_ns",
        "documents",
        "earliest",
        "epochs",
        "fork_entry",
        "fork_sub",
        "forks",
        "gone",
        "gone_reason",
        "incarnation",
        "is_system",
        "json",
        "last_ns",
        "leaving",
        "lifetime",
        "live",
        "name",
        "number",
        "parent",
        "producers",
        "producers_known",
        "queued_bytes",
        "readers",
        "recent",
        "recent_bytes",
        "recent_file",
        "removed",
        "requested_lifetime",
        "sealed",
        "sealed_bytes",
        "seq",
        "size_bytes",
        "stored",
        "tail",
        "touched_ns",
        "touched_saved_ns",
        "visible",
        "visible_closed",
        "visible_documents",
    )

    def __init__(self, number: int, name: str, created_ns: int) -> None:
        self.number = number
        self.name = name
        self.is_system = name.startswith("__")
        self.incarnation = 0
        self.epochs = FIRST_EPOCH
        self.content_type: str | None = None
        self.json = False
        self.created_ns = created_ns
        self.lifetime = NO_LIFETIME
        self.requested_lifetime = NO_LIFETIME  # of the creating request; a fork may inherit another
        self.touched_ns = created_ns
        self.touched_saved_ns = created_ns
        self.closed = False
        self.closed_by: tuple[str, int, int] | None = None
        self.tail = 0
        self.size_bytes = 0
        self.last_ns = 0
        self.seq: bytes | None = None
        self.producers: dict[str, Producer] | None = None
        self.producers_known = True  # False once some may be in the hot store only
        self.parent = 0
        self.fork_entry = 0
        self.fork_sub = 0
        self.forks = 0
        self.leaving = 0  # forks whose deletion is decided and not yet durable
        self.gone = False  # soft-deleted: only forks may read it
        self.gone_reason = ""  # "deleted" or "expired", once it is
        self.removed = False
        # Documents about the stream by key (schema, profile, index plans); None for nearly every stream.
        # The dictionaries are never changed in place. Empty: there are some, which are not loaded yet.
        self.documents: dict[str, bytes] | None = None
        self.visible_documents: dict[str, bytes] | None = None  # the durable ones
        # Publication and memory.
        self.visible = -1  # -1 until the creation itself is durable
        self.visible_closed = False
        self.stored = 0
        self.sealed = 0  # of the stream's own entries: a fork starts with its fork point
        self.sealed_bytes = 0  # payload in recorded segments
        self.cold = NO_COLD_TOTALS
        self.earliest = 0
        self.blocks: list[Block] | None = None
        self.recent: list[AppendRecord] | None = None
        self.recent_bytes = 0
        self.recent_file = 0
        self.batch: CommitBatch | None = None
        self.queued_bytes = 0
        self.readers: list[LiveReader] | None = None  # never empty
        self.live = 0

    def bind(self, content_type: str | None) -> None:
        self.content_type = content_type
        self.json = is_json(content_type)

    def add_reader(self, reader: LiveReader) -> None:
        """Call `on_published` of a reader after each publication, until it is removed."""
        if self.readers is None:
            self.readers = [reader]
        else:
            self.readers.append(reader)

    def remove_reader(self, reader: LiveReader) -> None:
        """Remove a reader. The list is replaced, because the publisher may be iterating over it."""
        if self.readers is not None:
            self.readers = [other for other in self.readers if other is not reader] or None

    @property
    def epoch(self) -> int:
        return self.epochs[-1][0]

    @property
    def separator(self) -> int:
        """Bytes between two entries of a block."""
        return 1 if self.json else 0

    def offset(self, entry: int) -> str:
        """The offset of the position after `entry`."""
        epochs = self.epochs
        if len(epochs) == 1 or entry >= epochs[-1][1]:
            return offsets.encode_offset(epochs[-1][0], entry)
        for epoch, first in reversed(epochs):
            if entry >= first:
                return offsets.encode_offset(epoch, entry)
        return offsets.encode_offset(epochs[0][0], entry)

    def deadline_ns(self) -> int | None:
        """When the stream ends, if nothing renews it."""
        if self.lifetime.expires_ns is not None:
            return self.lifetime.expires_ns
        if self.lifetime.ttl_s is not None:
            return self.touched_ns + self.lifetime.ttl_s * 1_000_000_000
        return None

    def extend_window(self) -> None:
        """Extends a TTL loaded from disk by a tenth, because renewals by reads are journaled late."""
        if self.lifetime.ttl_s is not None:
            self.touched_ns = self.touched_saved_ns + self.lifetime.ttl_s * 100_000_000

    def expired(self, now_ns: int) -> bool:
        """Whether the stream has expired. A TTL does not end while a live reader is connected."""
        lifetime = self.lifetime
        if lifetime.expires_ns is not None:
            return now_ns >= lifetime.expires_ns
        if lifetime.ttl_s is not None:
            return self.live == 0 and now_ns >= self.touched_ns + lifetime.ttl_s * 1_000_000_000
        return False


class AppendRecord(Protocol):
    """A published append in the memory tail, until it is folded into a block."""

    first: int
    count: int
    body: bytes
    lengths: Sequence[int] | None
    time_ns: int
    key: bytes | None
    keys: Sequence[bytes | None] | None


def fold_records(records: Sequence[AppendRecord], separator: int, file: int) -> Block:
    """Makes one block of consecutive appends."""
    ends: array[int] = array("I")
    times: array[int] = array("q")
    keys: list[bytes | None] | None = None
    position = 0
    for record in records:
        lengths = record.lengths
        if lengths is None:
            position += len(record.body)
            ends.append(position)
            position += separator
            times.append(record.time_ns)
        else:
            steps = [length + separator for length in lengths]
            steps[0] += position - separator
            ends.extend(accumulate(steps))
            position = ends[-1] + separator
            times.extend([record.time_ns] * record.count)
        if record.key is not None or keys is not None or record.keys is not None:
            if keys is None:
                keys = list[bytes | None]([None]) * (len(ends) - record.count)
            keys.extend([record.key] * record.count if record.keys is None else record.keys)
    glue = b"," if separator else b""
    return Block(records[0].first, glue.join([record.body for record in records]), ends, times, keys, file)
