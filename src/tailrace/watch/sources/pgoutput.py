"""The messages of PostgreSQL's `pgoutput` plugin, protocol version 1.

All numbers are big-endian, all texts end in a zero byte, and values come as the text that the database
prints for them.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

_BEGIN: Final = struct.Struct(">xQqI")
_COMMIT: Final = struct.Struct(">xBQQq")
_U32: Final = struct.Struct(">I")
_U16: Final = struct.Struct(">H")
_COLUMN: Final = struct.Struct(">Ii")
# Microseconds from 1970 to 2000, where PostgreSQL's clock begins.
EPOCH_US: Final = 946_684_800_000_000


class UnchangedValue:
    """Stands for a large value that an update left as it was, and that is therefore not repeated."""


UNCHANGED: Final = UnchangedValue()
TupleValues = list[bytes | UnchangedValue | None]


class RelationColumn(NamedTuple):
    name: str
    type_oid: int
    is_key: bool


class Relation(NamedTuple):
    """A table as it is at this point of the log. `identity`: d(efault), n(othing), f(ull), i(ndex)."""

    id: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


class BeginMessage(NamedTuple):
    lsn: int  # of the commit
    time_us: int  # since 1970
    xid: int


class CommitMessage(NamedTuple):
    lsn: int
    end: int


class InsertMessage(NamedTuple):
    relation: int
    new: TupleValues


class UpdateMessage(NamedTuple):
    """`old` is the whole row, or the key alone, or nothing if the key did not change."""

    relation: int
    old: TupleValues | None
    whole: bool
    new: TupleValues


class DeleteMessage(NamedTuple):
    relation: int
    old: TupleValues
    whole: bool


class TruncateMessage(NamedTuple):
    relations: tuple[int, ...]


PgoutputMessage = (
    BeginMessage | CommitMessage | Relation | InsertMessage | UpdateMessage | DeleteMessage | TruncateMessage
)


def decode_message(raw: bytes) -> PgoutputMessage | None:
    """The message; None for those that say nothing about rows (types, origins, messages)."""
    kind = raw[:1]
    if kind == b"I":
        (relation,) = _U32.unpack_from(raw, 1)
        _expect(raw, 5, b"N")
        return InsertMessage(relation, _read_values(raw, 6)[0])
    if kind == b"U":
        return _read_update(raw)
    if kind == b"D":
        (relation,) = _U32.unpack_from(raw, 1)
        _expect(raw, 5, b"KO")
        return DeleteMessage(relation, _read_values(raw, 6)[0], raw[5:6] == b"O")
    if kind == b"B":
        lsn, time_us, xid = _BEGIN.unpack_from(raw)
        return BeginMessage(lsn, time_us + EPOCH_US, xid)
    if kind == b"C":
        _, lsn, end, _ = _COMMIT.unpack_from(raw)
        return CommitMessage(lsn, end)
    if kind == b"R":
        return _read_relation(raw)
    if kind == b"T":
        (count,) = _U32.unpack_from(raw, 1)
        return TruncateMessage(struct.unpack_from(f">{count}I", raw, 6))
    if kind in (b"Y", b"O", b"M"):
        return None
    raise ValueError(f"pgoutput has no message {kind!r}")


def _read_update(raw: bytes) -> UpdateMessage:
    (relation,) = _U32.unpack_from(raw, 1)
    old: TupleValues | None = None
    at = 5
    mark = raw[at : at + 1]
    if mark in (b"K", b"O"):
        old, at = _read_values(raw, at + 1)
    _expect(raw, at, b"N")
    return UpdateMessage(relation, old, mark == b"O", _read_values(raw, at + 1)[0])


def _read_relation(raw: bytes) -> Relation:
    (number,) = _U32.unpack_from(raw, 1)
    schema, at = _read_text(raw, 5)
    name, at = _read_text(raw, at)
    identity = chr(raw[at])
    (count,) = _U16.unpack_from(raw, at + 1)
    at += 3
    columns: list[RelationColumn] = []
    for _ in range(count):
        is_key = bool(raw[at] & 1)
        column, at = _read_text(raw, at + 1)
        type_oid, _ = _COLUMN.unpack_from(raw, at)
        at += 8
        columns.append(RelationColumn(column, type_oid, is_key))
    # An empty name stands for the schema of the system's own tables.
    return Relation(number, schema or "pg_catalog", name, identity, tuple(columns))


def _read_values(raw: bytes, at: int) -> tuple[TupleValues, int]:
    (count,) = _U16.unpack_from(raw, at)
    at += 2
    found: TupleValues = []
    for _ in range(count):
        mark = raw[at]
        at += 1
        if mark == 0x74:  # t: a text follows
            (size,) = _U32.unpack_from(raw, at)
            at += 4
            value = raw[at : at + size]
            if len(value) != size:
                raise ValueError("a row of pgoutput is cut off")
            found.append(value)
            at += size
        elif mark == 0x6E:  # n
            found.append(None)
        elif mark == 0x75:  # u
            found.append(UNCHANGED)
        else:
            raise ValueError(f"pgoutput has no value {mark:#x}")
    return found, at


def _read_text(raw: bytes, at: int) -> tuple[str, int]:
    end = raw.index(b"\0", at)
    return raw[at:end].decode(), end + 1


def _expect(raw: bytes, at: int, marks: bytes) -> None:
    if raw[at : at + 1] not in (marks[n : n + 1] for n in range(len(marks))):
        raise ValueError(f"pgoutput has no {raw[at : at + 1]!r} here")
