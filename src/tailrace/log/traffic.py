"""What was appended to which stream since somebody last asked."""

from __future__ import annotations

from tailrace.log.model import Stream

TRAFFIC_STREAMS_MAX = 4096  # counted one by one; all further streams are one


class StreamTraffic:
    """What one stream got."""

    __slots__ = ("bytes", "entries")

    def __init__(self) -> None:
        self.entries = 0
        self.bytes = 0


class TrafficCounts:
    """Counted when entries are published. The server's own streams do not count."""

    def __init__(self, streams_max: int = TRAFFIC_STREAMS_MAX) -> None:
        self._streams_max = streams_max
        self.shares: dict[Stream, StreamTraffic] = {}
        self._others = StreamTraffic()

    def add(self, stream: Stream, entries: int, size_bytes: int) -> None:
        share = self.shares.get(stream) or self.begin(stream)
        share.entries += entries
        share.bytes += size_bytes

    def begin(self, stream: Stream) -> StreamTraffic:
        """The share of a stream that has none yet."""
        if stream.name.startswith("__"):
            return StreamTraffic()
        if len(self.shares) >= self._streams_max:
            return self._others
        share = self.shares[stream] = StreamTraffic()
        return share

    def take(self) -> tuple[dict[str, StreamTraffic], StreamTraffic]:
        """Shares by name, and that of all further streams; the next ones begin at nothing."""
        shares, others = self.shares, self._others
        self.shares, self._others = {}, StreamTraffic()
        return {stream.name: share for stream, share in shares.items()}, others
