"""Slices in memory: the least recently used go first."""

from __future__ import annotations

import re
from collections import OrderedDict
from math import inf

from tailrace.edge.connection import UpstreamResponse
from tailrace.edge.headers import response_lines, without_request_id
from tailrace.edge.metrics import EdgeTelemetry
from tailrace.protocol.http_headers import is_json, slice_etag_start

ENTRY_OVERHEAD_BYTES = 1024


class Slice:
    """A 200 answer to a catch-up read, ready to be given again."""

    __slots__ = (
        "body",
        "cache_control",
        "closed",
        "content_type",
        "earliest",
        "end",
        "epoch",
        "fields",
        "lines",
        "next",
        "queued_s",
        "start",
        "stored_at",
        "tag",
        "timing",
        "until",
        "up_to_date",
    )

    def __init__(
        self, fields: list[tuple[bytes, bytes]], body: bytes, stored_at: float, epoch: int = -1
    ) -> None:
        found = {name.lower(): value.decode("latin-1") for name, value in fields}
        self.fields = fields
        self.body = body
        self.stored_at = stored_at  # loop time
        self.until = inf  # loop time at which its owner wants to be asked again
        self.epoch = epoch
        # Of the upstream request that brought it: how long that waited, and what the owner said it took.
        self.queued_s = 0.0
        self.timing = b""
        self.content_type = found.get(b"content-type", "")
        self.cache_control = found.get(b"cache-control", "")
        self.tag = found.get(b"etag", "")
        self.start = slice_etag_start(self.tag)
        self.next = found.get(b"stream-next-offset", "")
        self.end = found.get(b"stream-end-offset", "")
        self.earliest = found.get(b"stream-earliest-offset", "")
        self.up_to_date = b"stream-up-to-date" in found
        self.closed = b"stream-closed" in found
        kept = [field for field in without_request_id(fields) if field[0].lower() not in _SEPARATE]
        self.lines = response_lines(kept)

    @classmethod
    def of(cls, reply: UpstreamResponse, body: bytes, now: float, sent_at: float) -> Slice:
        return cls(reply.fields, body, now).brought_by(reply, sent_at)

    def confirmed(self, reply: UpstreamResponse, now: float, sent_at: float) -> Slice:
        """The same body with the head of a 304, which leaves out what has not changed."""
        head = {name.lower(): (name, value) for name, value in (*self.fields, *reply.fields)}
        return Slice([*head.values()], self.body, now).brought_by(reply, sent_at)

    def brought_by(self, reply: UpstreamResponse, sent_at: float) -> Slice:
        """Notes how it came here, for Server-Timing, and how long it may stay."""
        self.queued_s = reply.queued_s
        self.timing = reply.get(b"server-timing") or b""
        if not self.is_immutable:
            stated = _MAX_AGE.search(self.cache_control)
            spent_s = reply.number(b"age") or 0  # of an answer that another edge had kept
            # Counted from when it was asked for, so that it is over here before it is at the owner.
            self.until = -inf if stated is None else sent_at + int(stated[1]) - spent_s
        return self

    @property
    def is_immutable(self) -> bool:
        return "immutable" in self.cache_control

    @property
    def is_open(self) -> bool:
        """The tail of a stream that still grows."""
        return self.cache_control == "no-cache"

    @property
    def is_empty(self) -> bool:
        return self.body == (b"[]" if is_json(self.content_type) else b"")

    @property
    def size(self) -> int:
        return len(self.body) + len(self.lines) + ENTRY_OVERHEAD_BYTES


_MAX_AGE = re.compile(r"max-age=([0-9]{1,12})")
_SEPARATE = frozenset(
    (
        b"content-type",
        b"stream-end-offset",
        b"stream-earliest-offset",
        b"age",
        b"vary",
    )
)


class MemoryCache:
    """Bounded in bytes. A stream's slices can be dropped together."""

    def __init__(self, bytes_max: int, telemetry: EdgeTelemetry) -> None:
        self._bytes_max = bytes_max
        self._telemetry = telemetry
        self._slices: OrderedDict[tuple[str, ...], Slice] = OrderedDict()
        self._by_name: dict[str, set[tuple[str, ...]]] = {}
        self.bytes = 0
        telemetry.edge_cache_bytes.reads[("memory",)] = lambda: self.bytes

    def __contains__(self, key: tuple[str, ...]) -> bool:
        return key in self._slices

    def get(self, key: tuple[str, ...]) -> Slice | None:
        found = self._slices.get(key)
        if found is not None:
            self._slices.move_to_end(key)
        return found

    def put(self, key: tuple[str, ...], found: Slice) -> None:
        self._take(key)
        if found.size > self._bytes_max:
            return
        self._slices[key] = found
        self._by_name.setdefault(key[0], set()).add(key)
        self.bytes += found.size
        while self.bytes > self._bytes_max:
            self._take(next(iter(self._slices)))
            self._telemetry.edge_cache_evictions.add("memory")

    def discard(self, key: tuple[str, ...]) -> None:
        self._take(key)

    def drop(self, name: str) -> None:
        for key in list(self._by_name.get(name, ())):
            self._take(key)

    def _take(self, key: tuple[str, ...]) -> None:
        found = self._slices.pop(key, None)
        if found is not None:
            self.bytes -= found.size
            keys = self._by_name[key[0]]
            keys.discard(key)
            if not keys:
                del self._by_name[key[0]]
