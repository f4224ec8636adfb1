"""What an edge knows of streams: existence, extent, lifetime, writes that passed through it.

Everything is learned from upstream responses; times are of the edge's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from email.utils import parsedate_to_datetime
from math import inf
from typing import NamedTuple

from tailrace.common.caches import LruCache
from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.http.client import UpstreamResponse
from tailrace.protocol import offsets

# Streams with a shorter TTL are not cached: there would be no time to renew them.
WINDOW_S_MIN = 4
# `Date` has whole seconds: the owner's clock may be this much ahead.
DATE_S = 1.0


class StreamLifetime(NamedTuple):
    """The lifetime of a stream, fixed at its creation."""

    window_s: int | None = None  # TTL: the stream ends without reads and writes for this long
    ends_at: float = inf  # earliest loop time of its fixed end
    retained: bool = False  # its oldest entries are trimmed, by age or size


NO_EXPIRY = StreamLifetime()


def parse_lifetime(reply: UpstreamResponse, sent_at: float) -> StreamLifetime:
    """From the response to a HEAD sent at loop time `sent_at`."""
    window, expires = reply.get(b"stream-ttl"), reply.get(b"stream-expires-at")
    retained = any(reply.get(name) for name in (b"stream-retention", b"stream-retention-bytes"))
    if window is not None:
        return StreamLifetime(window_s=reply.number(b"stream-ttl") or 0, retained=retained)
    if expires is not None:
        left_s = _remaining_s(expires.decode("latin-1"), reply.get(b"date") or b"")
        return StreamLifetime(ends_at=sent_at + left_s, retained=retained)
    return StreamLifetime(retained=True) if retained else NO_EXPIRY


def _remaining_s(expires: str, date: bytes) -> float:
    """Seconds to an instant of the owner's clock, rounded down; 0 if unknown."""
    instant_ns = parse_rfc3339_ns(expires)
    try:
        owner_s = parsedate_to_datetime(date.decode("latin-1")).timestamp()
    except ValueError:
        return -inf
    return -inf if instant_ns is None else instant_ns / 1e9 - owner_s - DATE_S


def renewal_due_at(window_s: int, renewed_at: float, asked_at: float, now: float) -> float:
    """When to renew the stream for a read that its owner did not see.

    At most once in a quarter of the window, and so early that there is time for two more attempts.
    """
    return max(now, renewed_at + window_s / 4, asked_at + window_s / 4)


STREAMS_KEPT = 100_000


class WriteCounter:
    """Counter of writes to unknown streams, which count for all streams."""

    __slots__ = ("writes",)

    def __init__(self) -> None:
        self.writes = 0


class StreamInfo:
    """What upstreams said of one stream."""

    __slots__ = (
        "_tide",
        "_writes",
        "confirmed_at",
        "earliest",
        "end",
        "epoch",
        "generation",
        "lifetime",
        "read_at",
        "renewal_at",
    )

    def __init__(self, tide: WriteCounter) -> None:
        # Incremented when the stream's slices are dropped: responses in progress are then not cached.
        self.generation = 0
        self._writes = 0
        self._tide = tide
        self.confirmed_at = float("-inf")  # loop time of the last request that showed the stream
        self.epoch = -1
        self.end = ""  # the greatest end seen
        self.earliest = ""  # earliest offset after trimming
        self.lifetime: StreamLifetime | None = None  # None while not known
        # Loop times of the last read at the owner, and of the last renewal.
        self.read_at = float("-inf")
        self.renewal_at = float("-inf")

    @property
    def writes(self) -> int:
        """Incremented by writes through this edge and batches of a channel."""
        return self._writes + self._tide.writes

    def note_written(self) -> None:
        self._writes += 1

    @property
    def retained(self) -> bool:
        """Whether its oldest entries are trimmed."""
        return self.lifetime is not None and self.lifetime.retained

    def lives(self, now: float) -> bool:
        """Whether the stream cannot have expired; if unknown, False."""
        if self.lifetime is None:
            return False
        window_s = self.lifetime.window_s
        if window_s is None:
            return now < self.lifetime.ends_at
        return window_s >= WINDOW_S_MIN and now < self.read_at + window_s

    def note_read(self, sent_at: float, generation: int) -> None:
        """Records a read at the owner, which renews the TTL."""
        if generation == self.generation:
            self.read_at = max(self.read_at, sent_at)


class InfoRequest(NamedTuple):
    """The time of an upstream request, and the generation of the stream then."""

    sent_at: float
    generation: int


class StreamInfoCache:
    """LRU cache of stream metadata."""

    def __init__(self, on_drop: Callable[[str, str], None]) -> None:
        self._facts: LruCache[str, StreamInfo] = LruCache(
            entries_max=STREAMS_KEPT, on_evict=lambda name, _: on_drop(name, "forgotten")
        )
        self._on_drop = on_drop  # with the name and the reason
        self._tide = WriteCounter()

    def get(self, name: str) -> StreamInfo:
        facts = self._facts.get(name)
        if facts is None:
            facts = StreamInfo(self._tide)
            self._facts.put(name, facts)
        return facts

    def contains(self, name: str) -> bool:
        """Whether a stream is known to exist."""
        facts = self._facts.peek(name)
        return facts is not None and facts.epoch >= 0

    def asking(self, name: str, now: float) -> InfoRequest:
        return InfoRequest(now, self.get(name).generation)

    def drop(self, name: str, reason: str) -> None:
        """The stream was deleted or replaced: drops everything of it."""
        facts = self.get(name)
        facts.generation += 1
        facts.note_written()
        facts.confirmed_at = float("-inf")
        facts.epoch = -1
        facts.end = facts.earliest = ""
        facts.lifetime = None
        facts.read_at = facts.renewal_at = float("-inf")
        self._on_drop(name, reason)

    def drop_all(self, reason: str) -> list[str]:
        """Drops everything, and returns the names of all known streams."""
        names = list(self._facts)
        for name in names:
            self.drop(name, reason)
        return names

    def note_write(self, name: str, method: bytes, status: int) -> None:
        """Records a write, which later reads must see."""
        self.get(name).note_written()
        if (method == b"DELETE" and status < 300) or (method == b"PUT" and status == 201):
            self.drop(name, "deleted" if method == b"DELETE" else "created")

    def note_change(self, name: str) -> None:
        """As `note_write`, for a sub-resource; an empty name counts for all streams."""
        if name:
            self.get(name).note_written()
        else:
            self._tide.writes += 1

    def note_batch(self, name: str, offset: str) -> None:
        facts = self.get(name)
        facts.note_written()
        self._note_end(name, facts, offset)

    def note_reply(self, name: str, reply: UpstreamResponse, sent_at: float) -> StreamInfo:
        """Updates the stream from the header of any response about it."""
        facts = self.get(name)
        earliest = reply.get(b"stream-earliest-offset")
        if reply.status == 410 and earliest is not None and facts.retained:
            # Only the offset is gone. A new epoch is detected by the next request.
            facts.confirmed_at = float("-inf")
        elif reply.status in (404, 410):
            if reply.status == 404 or facts.epoch >= 0:
                self.drop(name, "gone")
            return facts
        if reply.status < 400:
            facts.confirmed_at = max(facts.confirmed_at, sent_at)
            # The response to a write has only the offset after the written entries.
            end = reply.get(b"stream-end-offset") or reply.get(b"stream-next-offset")
            if end is not None:
                self._note_end(name, facts, end.decode("latin-1"))
        if earliest is not None:
            _note_earliest(facts, earliest.decode("latin-1"))
        return facts

    def note_head(self, name: str, reply: UpstreamResponse, now: float, asking: InfoRequest) -> StreamInfo:
        """As `note_response`; HEAD also has the lifetime."""
        assert asking.sent_at <= now, "a response comes after its request"
        told = reply.status == 200 and self.get(name).generation == asking.generation
        facts = self.note_reply(name, reply, asking.sent_at)
        if told:
            facts.lifetime = parse_lifetime(reply, asking.sent_at)
        return facts

    def _note_end(self, name: str, facts: StreamInfo, end: str) -> None:
        if end == facts.end:
            return
        epoch = offsets.parse_offset(end)[0]
        if facts.epoch >= 0 and epoch > facts.epoch:
            confirmed_at = facts.confirmed_at
            self.drop(name, "epoch")
            facts.confirmed_at = confirmed_at
        facts.epoch = max(facts.epoch, epoch)
        facts.end = max(facts.end, end)


def _note_earliest(facts: StreamInfo, earliest: str) -> None:
    """The earliest offset; empty while nothing was trimmed."""
    if earliest > facts.earliest and offsets.parse_offset(earliest)[1] > 0:
        facts.earliest = earliest
