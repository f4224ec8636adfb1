"""Journal records: the operations and their encoding. See docs/formats.md.

A record is one transaction: one or more operations that become durable together or not at all. The numbers of
kinds and flags are on disk and never change.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from tailrace.log.model import Lifetime
from tailrace.storage.segments.index_files import IndexFile, QuarantinedSegment
from tailrace.storage.segments.model import SegmentInfo

APPEND, CREATE, DELETE, TOUCH, META, BIND, SEALED, TRIM, RECORDED, DESCRIBE = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10
PUBLISHED, COMPACTED = 11, 12

CLOSES, HAS_PRODUCER, HAS_SEQ, HAS_KEY, BINDS, HAS_LENGTHS, HAS_KEYS = 1, 2, 4, 8, 16, 32, 64

_APPEND_HEAD = struct.Struct("<BBQQqII")  # kind, flags, stream, first entry, time ns, count, body bytes
_SMALL_HEAD = struct.Struct("<BI")  # kind, bytes of msgpack that follow
_PRODUCER = struct.Struct("<HQQ")  # id bytes, epoch, seq
_SHORT = struct.Struct("<H")
_LONG = struct.Struct("<I")
APPEND_HEAD_BYTES = _APPEND_HEAD.size
pack_append_head = _APPEND_HEAD.pack


# Raised by decoding or applying a payload that is not a valid record.
UNREADABLE_ERRORS = (AssertionError, LookupError, UnicodeDecodeError, struct.error, msgspec.MsgspecError)


class Append(msgspec.Struct, eq=False, gc=False):
    """Entries added to a stream, with the producer, Stream-Seq, content type and closing of the same commit.

    A Struct for its compiled constructor; `gc=False` because it cannot be part of a reference cycle.
    """

    stream: int
    first: int
    count: int
    body: bytes
    lengths: Sequence[int] | None
    time_ns: int
    key: bytes | None = None
    producer: tuple[str, int, int] | None = None
    seq: bytes | None = None
    binds: str | None = None
    closes: bool = False
    keys: Sequence[bytes | None] | None = None  # of each entry, if they differ

    def encode(self) -> bytes:
        body = self.body
        flags = 0
        parts: list[bytes] = []
        if self.lengths is not None:
            flags |= HAS_LENGTHS
            parts.append(array("I", self.lengths).tobytes())
        if self.producer is not None:
            flags |= HAS_PRODUCER
            name, epoch, seq = self.producer
            raw = name.encode()
            parts.append(_PRODUCER.pack(len(raw), epoch, seq) + raw)
        if self.seq is not None:
            flags |= HAS_SEQ
            parts.append(_SHORT.pack(len(self.seq)) + self.seq)
        if self.key is not None:
            flags |= HAS_KEY
            parts.append(_SHORT.pack(len(self.key)) + self.key)
        if self.binds is not None:
            flags |= BINDS
            raw = self.binds.encode()
            parts.append(_SHORT.pack(len(raw)) + raw)
        if self.keys is not None:
            flags |= HAS_KEYS
            raw = _ENCODER.encode(self.keys)
            parts.append(_LONG.pack(len(raw)) + raw)
        if self.closes:
            flags |= CLOSES
        head = pack_append_head(APPEND, flags, self.stream, self.first, self.time_ns, self.count, len(body))
        return b"".join((head, *parts, body))


def pack_single_append(stream: int, first: int, time_ns: int, body: bytes, key: bytes | None) -> bytes:
    """`Append.encode` for one entry with or without a key, the most common case."""
    if key is None:
        return pack_append_head(APPEND, 0, stream, first, time_ns, 1, len(body)) + body
    head = pack_append_head(APPEND, HAS_KEY, stream, first, time_ns, 1, len(body))
    return b"%b%b%b%b" % (head, _SHORT.pack(len(key)), key, body)


class Create(msgspec.Struct, array_like=True):
    stream: int
    name: str
    incarnation: int
    epochs: tuple[tuple[int, int], ...]
    created_ns: int
    content_type: str | None
    lifetime: Lifetime
    asked: Lifetime
    closed: bool = False
    parent: int = 0
    fork_entry: int = 0
    fork_sub: int = 0
    fork_ns: int = 0


class Delete(msgspec.Struct, array_like=True):
    """`soft` retains the data for forks; a later Delete of the same stream removes it."""

    stream: int
    at_ns: int
    reason: str
    soft: bool


class Touch(msgspec.Struct, array_like=True):
    stream: int
    at_ns: int


class Meta(msgspec.Struct, array_like=True):
    key: str
    value: bytes | None


class Bind(msgspec.Struct, array_like=True):
    stream: int
    content_type: str


class Sealed(msgspec.Struct, array_like=True):
    """Segments that are on the object store and in the stream's manifest: hot copies can be deleted.

    `as_of_file` is the last journal file that the manifest covers, 0 if only its segments are new.
    """

    stream: int
    generation: int
    as_of_file: int
    segments: list[SegmentInfo]
    footers: list[bytes]
    at_ns: int = 0
    keyed: bool = False  # some of their entries have keys


class Trim(msgspec.Struct, array_like=True):
    """Retention: entries up to `earliest` are no longer part of the stream."""

    stream: int
    earliest: int
    payload_bytes: int = 0
    segments: int = 0  # of the stream's own that are no longer visible
    segment_bytes: int = 0


class Recorded(msgspec.Struct, array_like=True):
    """Manifests that are up to date with the hot store as of `as_of_file`, and objects deleted since."""

    as_of_file: int
    heads: list[tuple[int, int]]  # stream, generation
    buried: list[int]  # streams whose objects are all deleted
    trimmed: list[int] = []  # streams whose objects removed by retention are all deleted


class Describe(msgspec.Struct, array_like=True):
    """Sets one document of a stream, such as its schema registry; removes it if the value is nil."""

    stream: int
    key: str
    value: bytes | None


class Published(msgspec.Struct, array_like=True):
    """Index files added to the stream's manifest, and objects removed from it.

    `quarantined` segments are not indexed with the plan they name; one in `removed` is tried again.
    """

    stream: int
    generation: int
    added: list[IndexFile]
    removed: list[str]
    quarantined: list[QuarantinedSegment] = []
    at_ns: int = 0


class Compacted(msgspec.Struct, array_like=True):
    """A segment that has replaced several in the stream's manifest. It has the same entries."""

    stream: int
    generation: int
    segment: SegmentInfo
    footer: bytes
    replaced: list[tuple[int, int]]  # first and last entries of the replaced segments
    replaced_bytes: int = 0  # of their files
    at_ns: int = 0


SmallOp = Create | Delete | Touch | Meta | Bind | Sealed | Trim | Recorded | Describe | Published | Compacted
Op = Append | SmallOp

_KIND: dict[type, int] = {
    Create: CREATE,
    Delete: DELETE,
    Touch: TOUCH,
    Meta: META,
    Bind: BIND,
    Sealed: SEALED,
    Trim: TRIM,
    Recorded: RECORDED,
    Describe: DESCRIBE,
    Published: PUBLISHED,
    Compacted: COMPACTED,
}
_DECODERS: dict[int, msgspec.msgpack.Decoder[SmallOp]] = {
    kind: msgspec.msgpack.Decoder(cls) for cls, kind in _KIND.items()
}
_ENCODER = msgspec.msgpack.Encoder()
_KEYS = msgspec.msgpack.Decoder(list[bytes | None])


def encode_record(ops: Sequence[Op]) -> bytes:
    """The payload of one record."""
    parts: list[bytes] = []
    for op in ops:
        if isinstance(op, Append):
            parts.append(op.encode())
        else:
            raw = _ENCODER.encode(op)
            parts.append(_SMALL_HEAD.pack(_KIND[type(op)], len(raw)) + raw)
    return b"".join(parts)


def decode_record(payload: bytes) -> Iterator[Op]:
    """The operations of one record. Its checksum is valid, so an error here is a bug and not disk damage."""
    position = 0
    while position < len(payload):
        if payload[position] == APPEND:
            op, position = _decode_append(payload, position)
            yield op
            continue
        kind, length = _SMALL_HEAD.unpack_from(payload, position)
        position += _SMALL_HEAD.size
        yield _DECODERS[kind].decode(payload[position : position + length])
        position += length
    assert position == len(payload), "record ends inside an operation"


def decode_plain_append(payload: bytes) -> Append | None:
    """The operation of a record with one plain entry, as most are; None for any other record."""
    if payload[0] != APPEND or payload[1] or len(payload) < APPEND_HEAD_BYTES:
        return None
    _, _, stream, first, time_ns, count, body_bytes = _APPEND_HEAD.unpack_from(payload)
    if len(payload) != APPEND_HEAD_BYTES + body_bytes:
        return None
    return Append(stream, first, count, payload[APPEND_HEAD_BYTES:], None, time_ns)


def _decode_append(payload: bytes, position: int) -> tuple[Append, int]:
    _, flags, stream, first, time_ns, count, body_bytes = _APPEND_HEAD.unpack_from(payload, position)
    position += APPEND_HEAD_BYTES
    lengths: Sequence[int] | None = None
    producer: tuple[str, int, int] | None = None
    if flags & HAS_LENGTHS:
        lengths = array("I")
        lengths.frombytes(payload[position : position + 4 * count])
        position += 4 * count
    if flags & HAS_PRODUCER:
        id_bytes, epoch, number = _PRODUCER.unpack_from(payload, position)
        position += _PRODUCER.size
        producer = (payload[position : position + id_bytes].decode(), epoch, number)
        position += id_bytes
    seq, position = _decode_short(payload, position, flags & HAS_SEQ)
    key, position = _decode_short(payload, position, flags & HAS_KEY)
    binds, position = _decode_short(payload, position, flags & BINDS)
    keys: list[bytes | None] | None = None
    if flags & HAS_KEYS:
        (length,) = _LONG.unpack_from(payload, position)
        position += _LONG.size
        keys = _KEYS.decode(payload[position : position + length])
        assert len(keys) == count, "a key for each entry"
        position += length
    body = payload[position : position + body_bytes]
    return Append(
        stream,
        first,
        count,
        body,
        lengths,
        time_ns,
        key,
        producer,
        seq,
        None if binds is None else binds.decode(),
        bool(flags & CLOSES),
        keys,
    ), position + body_bytes


def _decode_short(payload: bytes, position: int, present: int) -> tuple[bytes | None, int]:
    if not present:
        return None, position
    (length,) = _SHORT.unpack_from(payload, position)
    position += 2
    return payload[position : position + length], position + length
