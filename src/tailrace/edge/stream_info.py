"""What an edge knows of streams: existence, extent, lifetime, writes that passed through it.

How long a stream and its entries live, as its owner says, by the edge's own monotonic clock.

What an edge knows of streams: whether they exist, how far they go, what was written through it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from math import inf
from typing import NamedTuple

from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.edge.upstream_pool import UpstreamResponse
from tailrace.protocol import offsets

# Of a stream that ends sooner without reads nothing is kept: there would be no time to renew it.
WINDOW_S_MIN = 4
# `Date` has whole seconds: the owner's clock may be this much further.
DATE_S = 1.0


class StreamLifetime(NamedTuple):
    """What bounds a stream. Set when the stream is made, and never changed."""

    window_s: int | None = None  # of a TTL: it ends if nobody reads or writes for this long
    ends_at: float = inf  # loop time before which it cannot have come to its fixed end
    retained: bool = False  # its oldest entries are taken away, by age or by size


NO_EXPIRY = StreamLifetime()


def parse_lifetime(reply: UpstreamResponse, sent_at: float) -> StreamLifetime:
    """What the answer to a HEAD says; `sent_at` is the loop time at which it was asked for."""
    window, expires = reply.get(b"stream-ttl"), reply.get(b"stream-expires-at")
    retained = any(reply.get(name) for name in (b"stream-retention", b"stream-retention-bytes"))
    if window is not None:
        return StreamLifetime(window_s=reply.number(b"stream-ttl") or 0, retained=retained)
    if expires is not None:
        left_s = _remaining_s(expires.decode("latin-1"), reply.get(b"date") or b"")
        return StreamLifetime(ends_at=sent_at + left_s, retained=retained)
    return StreamLifetime(retained=True) if retained else NO_EXPIRY


def _remaining_s(expires: str, date: bytes) -> float:
    """The time to an instant of the owner's clock, rounded down; none if it cannot be told."""
    instant_ns = parse_rfc3339_ns(expires)
    try:
        owner_s = parsedate_to_datetime(date.decode("latin-1")).timestamp()
    except ValueError:
        return -inf
    return -inf if instant_ns is None else instant_ns / 1e9 - owner_s - DATE_S


def renewal_due_at(window_s: int, renewed_at: float, asked_at: float, now: float) -> float:
    """When the stream has to be renewed for a read that its owner did not see.

    At most once in a quarter of the window, and so early that there is time for two more attempts.
    """
    return max(now, renewed_at + window_s / 4, asked_at + window_s / 4)


STREAMS_KEPT = 100_000


class WriteCounter:
    """Writes that went to a stream whose name only the owner knows: they count for all streams."""

    __slots__ = ("writes",)

    def __init__(self) -> None:
        self.writes = 0


class StreamInfo:
    """One stream. The edge has no truth of its own: all of it was said by an upstream."""

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
        # Rises when the stream's slices are dropped: an answer that was on its way is then not kept.
        self.generation = 0
        self._writes = 0
        self._tide = tide
        self.confirmed_at = float("-inf")  # loop time at which was asked what last showed the stream
        self.epoch = -1
        self.end = ""  # the greatest end seen
        self.earliest = ""  # where reading can begin, once something was trimmed
        self.lifetime: StreamLifetime | None = None  # None while not known
        # Loop times at which the last read that reached the owner, and the last renewal, were sent.
        self.read_at = float("-inf")
        self.renewal_at = float("-inf")

    @property
    def writes(self) -> int:
        """Rises when something was written through this edge, or arrived on a channel."""
        return self._writes + self._tide.writes

    def note_written(self) -> None:
        self._writes += 1

    @property
    def retained(self) -> bool:
        """Whether entries are taken away at its start."""
        return self.lifetime is not None and self.lifetime.retained

    def lives(self, now: float) -> bool:
        """Whether the stream cannot have ended by itself: all that is not known to live is asked for."""
        if self.lifetime is None:
            return False
        window_s = self.lifetime.window_s
        if window_s is None:
            return now < self.lifetime.ends_at
        return window_s >= WINDOW_S_MIN and now < self.read_at + window_s

    def note_read(self, sent_at: float, generation: int) -> None:
        """A read has reached the owner, which renews a TTL."""
        if generation == self.generation:
            self.read_at = max(self.read_at, sent_at)


class InfoRequest(NamedTuple):
    """When a question about a stream was sent, and what its slices were then."""

    sent_at: float
    generation: int


class StreamInfoCache:
    """The streams that were asked for lately."""

    def __init__(self, on_drop: Callable[[str, str], None]) -> None:
        self._facts: OrderedDict[str, StreamInfo] = OrderedDict()
        self._on_drop = on_drop  # with the name and the reason
        self._tide = WriteCounter()

    def of(self, name: str) -> StreamInfo:
        facts = self._facts.get(name)
        if facts is None:
            facts = self._facts[name] = StreamInfo(self._tide)
            if len(self._facts) > STREAMS_KEPT:
                oldest, _ = self._facts.popitem(last=False)
                self._on_drop(oldest, "forgotten")
        else:
            self._facts.move_to_end(name)
        return facts

    def knows(self, name: str) -> bool:
        """Whether the owner has shown a stream, and nothing has said since that it is gone."""
        facts = self._facts.get(name)
        return facts is not None and facts.epoch >= 0

    def asking(self, name: str, now: float) -> InfoRequest:
        return InfoRequest(now, self.of(name).generation)

    def drop(self, name: str, reason: str) -> None:
        """The stream is gone, or another has its name: nothing of it may be served again."""
        facts = self.of(name)
        facts.generation += 1
        facts.note_written()
        facts.confirmed_at = float("-inf")
        facts.epoch = -1
        facts.end = facts.earliest = ""
        facts.lifetime = None
        facts.read_at = facts.renewal_at = float("-inf")
        self._on_drop(name, reason)

    def drop_all(self, reason: str) -> list[str]:
        """Nothing that was said holds any more; the names of all streams that something was known of."""
        names = list(self._facts)
        for name in names:
            self.drop(name, reason)
        return names

    def note_write(self, name: str, method: bytes, status: int) -> None:
        """The answer to a write came back: reads that begin from now on have to see it."""
        self.of(name).note_written()
        if (method == b"DELETE" and status < 300) or (method == b"PUT" and status == 201):
            self.drop(name, "deleted" if method == b"DELETE" else "created")

    def note_change(self, name: str) -> None:
        """As `note_write`, of something that belongs to a stream; with no name it may be any of them."""
        if name:
            self.of(name).note_written()
        else:
            self._tide.writes += 1

    def note_batch(self, name: str, offset: str) -> None:
        facts = self.of(name)
        facts.note_written()
        self._note_end(name, facts, offset)

    def note_reply(self, name: str, reply: UpstreamResponse, sent_at: float) -> StreamInfo:
        """What the head of any answer about a stream tells: how it was when that was asked, or later."""
        facts = self.of(name)
        earliest = reply.get(b"stream-earliest-offset")
        if reply.status == 410 and earliest is not None and facts.retained:
            # Only the offset is gone. If that is because of a new epoch, the next look tells.
            facts.confirmed_at = float("-inf")
        elif reply.status in (404, 410):
            if reply.status == 404 or facts.epoch >= 0:
                self.drop(name, "gone")
            return facts
        if reply.status < 400:
            facts.confirmed_at = max(facts.confirmed_at, sent_at)
            # The answer to a write has only the offset behind what was written.
            end = reply.get(b"stream-end-offset") or reply.get(b"stream-next-offset")
            if end is not None:
                self._note_end(name, facts, end.decode("latin-1"))
        if earliest is not None:
            _note_earliest(facts, earliest.decode("latin-1"))
        return facts

    def note_head(self, name: str, reply: UpstreamResponse, now: float, asking: InfoRequest) -> StreamInfo:
        """HEAD also tells how long the stream and its entries live."""
        assert asking.sent_at <= now, "an answer comes after its question"
        told = reply.status == 200 and self.of(name).generation == asking.generation
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
    """HEAD names it always: as long as nothing was trimmed it is the start."""
    if earliest > facts.earliest and offsets.parse_offset(earliest)[1] > 0:
        facts.earliest = earliest
