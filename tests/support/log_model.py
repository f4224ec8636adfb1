"""The log in a hundred lines: what streams are, without disks, batches, blocks or recovery."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from tailrace.protocol.http_headers import is_json, media_type
from tailrace.protocol.offsets import encode_offset

AHEAD_NS = 300 * 10**9
Lifetime = tuple[int | None, int | None]  # TTL in seconds, fixed expiry in ns
_numbers = itertools.count(1)


class RefusedError(Exception):
    """The code of the refusal is its message."""


@dataclass
class Entry:
    payload: bytes
    time_ns: int
    key: bytes | None
    epoch: int


@dataclass
class ModelStream:
    """All entries, inherited ones included: a fork is a copy of a prefix."""

    name: str
    epoch: int
    content_type: str | None
    lifetime: Lifetime
    asked: Lifetime
    touched_ns: int
    entries: list[Entry] = field(default_factory=list[Entry])
    closed: bool = False
    closed_by: tuple[str, int, int] | None = None
    producers: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    seq: bytes | None = None
    parent: ModelStream | None = None
    anchor: int = 0
    sub: int = 0
    inherited: int = 0
    forks: int = 0
    gone: bool = False
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def tail(self) -> int:
        return len(self.entries)

    def offset(self, entry: int) -> str:
        if entry == 0:
            return encode_offset(self.entries[0].epoch if self.entries else self.epoch, 0)
        return encode_offset(self.entries[entry - 1].epoch, entry)

    def deadline_ns(self) -> int | None:
        ttl_s, expires_ns = self.lifetime
        return expires_ns if ttl_s is None else self.touched_ns + ttl_s * 10**9

    def resolve(self, epoch: int, entry: int) -> int:
        if (epoch, entry) == (0, 0):
            return 0
        if epoch > self.epoch or (epoch == self.epoch and entry > self.tail):
            raise RefusedError("offset_beyond_tail")
        if epoch < self.epoch:
            written = [n for n, found in enumerate(self.entries, 1) if found.epoch <= epoch]
            if not written or entry > written[-1]:
                raise RefusedError("offset_gone")
        return entry

    def since(self, instant_ns: int) -> int:
        later = (n for n, entry in enumerate(self.entries) if entry.time_ns >= instant_ns)
        return next(later, self.tail)


@dataclass
class Append:
    payloads: list[bytes]
    content_type: str | None
    closes: bool = False
    key: bytes | None = None
    hint_ns: int | None = None
    seq: bytes | None = None
    producer: tuple[str, int, int] | None = None


class Model:
    """Every rule of the protocol that concerns state; time is handed in."""

    def __init__(self) -> None:
        self.streams: dict[str, ModelStream] = {}
        self.tombstones: dict[str, tuple[int, str]] = {}
        self.events: list[tuple[str, str, bool | None, str | None]] = []

    def find(self, name: str, now_ns: int) -> ModelStream | None:
        stream = self.streams.get(name)
        if stream is not None and not stream.gone:
            deadline_ns = stream.deadline_ns()
            if deadline_ns is not None and now_ns >= deadline_ns:
                self._remove(stream, "expired")
        return self.streams.get(name)

    def existing(self, name: str, now_ns: int) -> ModelStream:
        stream = self.find(name, now_ns)
        if stream is None:
            raise RefusedError("not_found")
        if stream.gone:
            raise RefusedError("stream_gone")
        return stream

    def append(self, name: str, append: Append, now_ns: int) -> int:
        """The number of entries added; 0 for a duplicate or a close alone."""
        stream = self.existing(name, now_ns)
        known = None if append.producer is None else stream.producers.get(append.producer[0])
        if stream.closed:
            if append.producer is not None:
                if known is not None and append.producer[1] < known[0]:
                    raise RefusedError("stale_epoch")
                if append.producer == stream.closed_by:
                    return 0
            elif append.closes and not append.payloads:
                return 0
            raise RefusedError("stream_closed")
        typed = append.content_type if append.payloads else None
        if typed is not None and stream.content_type is not None:
            if media_type(typed) != media_type(stream.content_type):
                raise RefusedError("content_type_mismatch")
        if append.producer is not None and _is_duplicate(append.producer, known):
            return 0
        if append.seq is not None and stream.seq is not None and append.seq <= stream.seq:
            raise RefusedError("seq_conflict")
        binds = typed is not None and stream.content_type is None
        if binds:
            stream.content_type = typed
        self._extend(stream, append, now_ns)
        if append.closes:
            stream.closed, stream.closed_by = True, append.producer
        if append.closes or binds:
            self._event("update", stream)
        return len(append.payloads)

    def _extend(self, stream: ModelStream, append: Append, now_ns: int) -> None:
        wanted_ns = now_ns if append.hint_ns is None else min(append.hint_ns, now_ns + AHEAD_NS)
        time_ns = max(stream.entries[-1].time_ns if stream.entries else 0, wanted_ns)
        stream.entries += [Entry(payload, time_ns, append.key, stream.epoch) for payload in append.payloads]
        stream.touched_ns = now_ns
        if append.seq is not None:
            stream.seq = append.seq
        if append.producer is not None:
            stream.producers[append.producer[0]] = append.producer[1:]

    def create(
        self,
        name: str,
        content_type: str | None,
        lifetime: Lifetime,
        initial: Append,
        fork: tuple[str, tuple[int, int] | None, int] | None,
        now_ns: int,
    ) -> bool:
        """True if the stream is new."""
        stream = self.find(name, now_ns)
        source = None if fork is None else self.find(fork[0], now_ns)
        if stream is not None:
            self._confirm(stream, content_type, lifetime, initial.closes, fork, source)
            return False
        epoch = self.tombstones[name][0] + 1 if name in self.tombstones else 0
        created = ModelStream(name, epoch, content_type, lifetime, lifetime, now_ns)
        if fork is not None:
            self._inherit(created, source, fork[1], fork[2])
        if initial.payloads:
            self._extend(created, initial, now_ns)
        created.closed = initial.closes
        self.streams[name] = created
        self.tombstones.pop(name, None)
        self._event("insert", created)
        return True

    def _inherit(
        self, created: ModelStream, source: ModelStream | None, position: tuple[int, int] | None, sub: int
    ) -> None:
        if source is None:
            raise RefusedError("not_found")
        if source.gone:
            raise RefusedError("source_deleted")
        anchor = source.tail if position is None else source.resolve(*position)
        part = b""
        kept = anchor
        if sub:
            if is_json(source.content_type):
                kept = anchor + sub
            if kept > source.tail or anchor >= source.tail:
                raise RefusedError("invalid_fork")
            if kept == anchor:
                part = source.entries[anchor].payload[:sub]
                if len(part) < sub:
                    raise RefusedError("invalid_fork")
        if created.content_type is not None and source.content_type is not None:
            if media_type(created.content_type) != media_type(source.content_type):
                raise RefusedError("content_type_mismatch")
        source_epoch = source.entries[kept - 1].epoch if kept else source.epoch
        if kept == 0 and source.entries:
            source_epoch = source.entries[0].epoch
        created.epoch = max(created.epoch, source_epoch)
        created.content_type = source.content_type or created.content_type
        created.parent, created.anchor, created.sub, created.inherited = source, anchor, sub, kept
        created.entries = source.entries[:kept]
        if created.asked == (None, None):
            created.lifetime = source.lifetime
        if part:
            self._extend(created, Append([part], created.content_type), created.touched_ns)
        source.forks += 1

    def _confirm(
        self,
        stream: ModelStream,
        content_type: str | None,
        lifetime: Lifetime,
        closed: bool,
        fork: tuple[str, tuple[int, int] | None, int] | None,
        source: ModelStream | None,
    ) -> None:
        if stream.gone:
            raise RefusedError("name_retained")
        typed = content_type is not None and stream.content_type is not None
        if typed and media_type(content_type or "") != media_type(stream.content_type or ""):
            raise RefusedError("stream_exists")
        if lifetime != stream.asked or closed != stream.closed or (fork is None) != (stream.parent is None):
            raise RefusedError("stream_exists")
        if fork is not None:
            if source is None or source is not stream.parent or fork[2] != stream.sub:
                raise RefusedError("stream_exists")
            if fork[1] is not None and source.resolve(*fork[1]) != stream.anchor:
                raise RefusedError("stream_exists")
        if content_type is not None and stream.content_type is None:
            stream.content_type = content_type
            self._event("update", stream)

    def delete(self, name: str, now_ns: int) -> None:
        stream = self.find(name, now_ns)
        if stream is None:
            if self.tombstones.get(name, (0, ""))[1] == "deleted":
                return
            raise RefusedError("not_found")
        if stream.gone:
            raise RefusedError("stream_gone")
        self._remove(stream, "deleted")

    def _remove(self, stream: ModelStream, reason: str) -> None:
        self.events.append(("delete", stream.name, None, reason))
        gone, stream.gone = stream, True
        self.tombstones[stream.name] = (stream.epoch, reason)
        while gone.gone and not gone.forks:
            del self.streams[gone.name]
            if gone.parent is None:
                return
            gone = gone.parent
            gone.forks -= 1

    def _event(self, operation: str, stream: ModelStream) -> None:
        self.events.append((operation, stream.name, stream.closed, stream.content_type))


def _is_duplicate(producer: tuple[str, int, int], known: tuple[int, int] | None) -> bool:
    _, epoch, seq = producer
    if known is not None and epoch < known[0]:
        raise RefusedError("stale_epoch")
    if known is None or epoch > known[0]:
        if seq:
            raise RefusedError("producer_gap" if known is None else "invalid_header")
        return False
    if seq > known[1] + 1:
        raise RefusedError("producer_gap")
    return seq <= known[1]
