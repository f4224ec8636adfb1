"""Encoding of streams and blocks in the hot store, and reading them."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tailrace.log.model import (
    FIRST_EPOCH,
    NO_COLD_TOTALS,
    NO_LIFETIME,
    Block,
    ColdTotals,
    Lifetime,
    Producer,
    Stream,
    Tombstone,
)
from tailrace.storage.hot_store.database import BlockRow, HotDatabase


class StreamImage(msgspec.Struct, array_like=True):
    """The durable state of a stream except its entries, producers and documents."""

    number: int
    name: str
    incarnation: int
    epochs: tuple[tuple[int, int], ...]
    content_type: str | None
    created_ns: int
    lifetime: Lifetime
    asked: Lifetime
    touched_ns: int
    closed: bool
    closed_by: tuple[str, int, int] | None
    tail: int
    size_bytes: int
    last_ns: int
    seq: bytes | None
    parent: int
    fork_entry: int
    fork_sub: int
    forks: int
    gone: bool
    has_producers: bool
    gone_reason: str
    sealed: int = 0
    sealed_bytes: int = 0
    earliest: int = 0
    cold: ColdTotals = NO_COLD_TOTALS
    has_documents: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StreamImage)
_TOMBSTONE = msgspec.msgpack.Decoder(Tombstone)


def encode_stream(stream: Stream) -> bytes:
    return _ENCODER.encode(
        StreamImage(
            stream.number,
            stream.name,
            stream.incarnation,
            stream.epochs,
            stream.content_type,
            stream.created_ns,
            stream.lifetime,
            stream.requested_lifetime,
            stream.touched_saved_ns,
            stream.closed,
            stream.closed_by,
            stream.tail,
            stream.size_bytes,
            stream.last_ns,
            stream.seq,
            stream.parent,
            stream.fork_entry,
            stream.fork_sub,
            stream.forks,
            stream.gone,
            bool(stream.producers) or not stream.producers_known,
            stream.gone_reason,
            stream.sealed,
            stream.sealed_bytes,
            stream.earliest,
            stream.cold,
            stream.documents is not None,
        )
    )


def decode_stream(raw: bytes) -> Stream:
    image = _DECODER.decode(raw)
    stream = Stream(image.number, image.name, image.created_ns)
    stream.incarnation = image.incarnation
    stream.epochs = FIRST_EPOCH if image.epochs == FIRST_EPOCH else image.epochs
    stream.bind(image.content_type)
    if image.lifetime != NO_LIFETIME:
        stream.lifetime = image.lifetime
    stream.requested_lifetime = image.asked
    stream.touched_ns = stream.touched_saved_ns = image.touched_ns
    stream.closed = stream.visible_closed = image.closed
    stream.closed_by = image.closed_by
    stream.tail = stream.visible = stream.stored = image.tail
    stream.size_bytes = image.size_bytes
    stream.last_ns = image.last_ns
    stream.seq = image.seq
    stream.parent = image.parent
    stream.fork_entry = image.fork_entry
    stream.fork_sub = image.fork_sub
    stream.forks = image.forks
    stream.gone = image.gone
    stream.gone_reason = image.gone_reason
    stream.producers_known = not image.has_producers
    stream.sealed = max(image.sealed, image.fork_entry)
    stream.sealed_bytes = image.sealed_bytes
    stream.earliest = image.earliest
    stream.cold = image.cold
    if image.has_documents:
        stream.documents = stream.visible_documents = {}
    stream.extend_window()
    return stream


def encode_tombstone(tombstone: Tombstone) -> bytes:
    return _ENCODER.encode(tombstone)


def encode_block(block: Block) -> BlockRow:
    keys = None if block.keys is None else _ENCODER.encode(block.keys)
    return BlockRow(block.first, block.last, block.ends.tobytes(), block.times.tobytes(), keys, block.body)


def decode_block(row: BlockRow) -> Block:
    ends: array[int] = array("I")
    ends.frombytes(row.ends)
    times: array[int] = array("q")
    times.frombytes(row.times)
    keys = None if row.keys is None else msgspec.msgpack.decode(row.keys, type=list[bytes | None])
    block = Block(row.first, row.body, ends, times, keys)
    assert block.last == row.last, "a stored block does not match its row"
    return block


class StoredStreams:
    """The hot store as objects of the log. One connection per thread, as SQLite requires."""

    def __init__(self, path: Path, *, writer: bool = False) -> None:
        self._path = path
        self._writer = writer
        self._local = threading.local()
        self.db.count_streams()

    @property
    def db(self) -> HotDatabase:
        found: HotDatabase | None = getattr(self._local, "db", None)
        if found is None:
            found = self._local.db = HotDatabase(self._path, writer=self._writer)
        return found

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """All look-ups of this thread inside the context see the same state of the store."""
        with self.db.connection:
            yield

    def stream_by_name(self, name: str) -> Stream | None:
        raw = self.db.image_by_name(name)
        return None if raw is None else self.load_stream(raw)

    def stream_by_number(self, number: int) -> Stream | None:
        raw = self.db.image_by_number(number)
        return None if raw is None else self.load_stream(raw)

    def load_stream(self, raw: bytes) -> Stream:
        """The stream of an image, with its documents."""
        stream = decode_stream(raw)
        if stream.documents is not None:
            stream.documents = stream.visible_documents = (
                self.db.documents.documents_of(stream.number) or None
            )
        return stream

    def tombstone(self, name: str) -> Tombstone | None:
        raw = self.db.tombstone(name)
        return None if raw is None else _TOMBSTONE.decode(raw)

    def producer(self, number: int, producer_id: str) -> Producer | None:
        found = self.db.producer(number, producer_id)
        return None if found is None else Producer(*found)
