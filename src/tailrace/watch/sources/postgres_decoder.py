"""PostgreSQL decoding: values as JSON, `pgoutput` messages, and changes of documents.

`TypeConverters` turns the text form of a value into JSON. `decode_message` reads messages of the `pgoutput`
plugin, protocol version 1: numbers are big-endian, strings end in a zero byte, values are in text form.
`PostgresDecoder` turns messages into changes and tracks where each commit ends.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, cast
from urllib.parse import quote

import orjson

from tailrace.watch.sources.model import GapError, SourceChange, SourceError

BOOL, BYTEA, INT8, INT2, INT4, JSON, FLOAT4, FLOAT8 = 16, 17, 20, 21, 23, 114, 700, 701
TIMESTAMPTZ, NUMERIC, JSONB = 1184, 1700, 3802
DEPTH_MAX: Final = 60  # of one value; documents have at most 64 levels
DOMAINS_MAX: Final = 16
USER_TYPES: Final = 16_384  # oids of types that are not built in start here
INT_DIGITS: Final = 20  # sign and digits of a 64-bit integer

_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1
_INSTANT: Final = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)\+00(?::00)?\Z")
_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*+)"|([^",{}]+)', re.DOTALL)
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)

Converter = Callable[[str], Any]


class TypeConverters:
    """Converters by type oid; `arrays` and `domains` map oids to their element or base type."""

    def __init__(
        self,
        arrays: Mapping[int, int],
        domains: Mapping[int, int],
        others: Collection[int] = (),
        *,
        numeric: str = "string",
    ) -> None:
        self._arrays = arrays
        self._domains = domains
        self._others = others
        self._known: dict[int, Converter] = dict(_PLAIN)
        if numeric == "double":
            self._known[NUMERIC] = _double

    def is_new(self, type_oid: int) -> bool:
        """Whether the type was created after the types were loaded."""
        known = type_oid in self._arrays or type_oid in self._domains or type_oid in self._others
        return type_oid >= USER_TYPES and not known

    def converter(self, type_oid: int) -> Converter:
        found = self._known.get(type_oid)
        if found is None:
            found = self._known[type_oid] = self._build(type_oid)
        return found

    def _build(self, type_oid: int) -> Converter:
        for _ in range(DOMAINS_MAX):
            if type_oid not in self._domains:
                break
            type_oid = self._domains[type_oid]
        element = self._arrays.get(type_oid)
        if element is None:
            return self._known.get(type_oid, str)
        of_element = self.converter(element)
        return lambda text: parse_array(text, of_element)


def dump_row(row: Mapping[str, Any]) -> bytes:
    """The row as JSON; lone surrogates, which JSON allows in escapes, become question marks."""
    try:
        return orjson.dumps(row)
    except TypeError:
        return orjson.dumps(_scrubbed(row))


def parse_array(text: str, convert: Converter) -> Any:
    """Parse `{1,NULL,"a b"}` of any depth; explicit lower bounds are ignored."""
    begin = text.find("{")
    if begin < 0:
        return text
    stack: list[list[Any]] = []
    at = begin
    while True:
        mark = text[at]
        if mark == "{":
            stack.append([])
            at += 1
        elif mark == "}":
            done = stack.pop()
            at += 1
            if not stack:
                return done
            stack[-1].append(done)
        elif mark == ",":
            at += 1
        else:
            found = _ELEMENT.match(text, at)
            if found is None:
                return text
            quoted, plain = found.group(1, 2)
            if quoted is not None:
                stack[-1].append(convert(_ESCAPE.sub(r"\1", quoted)))
            else:
                stack[-1].append(None if plain == "NULL" else convert(plain))
            at = found.end()


def _bool(text: str) -> bool:
    return text == "t"


def _double(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _bytes(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode()


def _instant(text: str) -> str:
    """RFC 3339; values outside of it (infinity, BC) stay unchanged."""
    found = _INSTANT.match(text)
    return text if found is None else f"{found[1]}T{found[2]}Z"


def parse_json_value(text: str) -> Any:
    """The parsed value; JSON nested too deep stays a string."""
    try:
        return _finite(json.loads(text, parse_int=_int), DEPTH_MAX)
    except RecursionError:
        return text


def _int(text: str) -> int | float | None:
    """Integers above 64 bits become doubles, above those null."""
    if len(text) > INT_DIGITS:
        return _double(text)
    value = int(text)
    return value if _INT_MIN <= value <= _INT_MAX else _double(text)


def _finite(value: Any, depth: int) -> Any:
    kind = cast("type[Any]", type(value))
    if kind is float:
        return value if math.isfinite(value) else None
    if kind is dict or kind is list:
        if depth == 0:
            raise RecursionError
        if kind is dict:
            items = cast("dict[str, Any]", value).items()
            return {name: _finite(item, depth - 1) for name, item in items}
        return [_finite(item, depth - 1) for item in value]
    return value


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {_scrubbed(name): _scrubbed(item) for name, item in items}
    if isinstance(value, list):
        return [_scrubbed(item) for item in cast("list[Any]", value)]
    return value


_PLAIN: Final[dict[int, Converter]] = {
    BOOL: _bool,
    BYTEA: _bytes,
    INT2: int,
    INT4: int,
    INT8: int,
    FLOAT4: _double,
    FLOAT8: _double,
    JSON: parse_json_value,
    JSONB: parse_json_value,
    TIMESTAMPTZ: _instant,
    NUMERIC: str,
}


_BEGIN: Final = struct.Struct(">xQqI")
_COMMIT: Final = struct.Struct(">xBQQq")
_U32: Final = struct.Struct(">I")
_U16: Final = struct.Struct(">H")
_COLUMN: Final = struct.Struct(">Ii")
# Microseconds from 1970 to 2000, the epoch of PostgreSQL.
EPOCH_US: Final = 946_684_800_000_000


class UnchangedValue:
    """A large value that an update did not change and the log does not repeat."""


UNCHANGED: Final = UnchangedValue()
TupleValues = list[bytes | UnchangedValue | None]


class RelationColumn(NamedTuple):
    name: str
    type_oid: int
    is_key: bool


class Relation(NamedTuple):
    """A table definition in the log. `identity`: d(efault), n(othing), f(ull), i(ndex)."""

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
    """`old` is the whole row, only the key, or None if the key did not change."""

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
    """The message; None for kinds that are not about rows (types, origins, messages)."""
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
    raise ValueError(f"unknown pgoutput message {kind!r}")


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
    # An empty name is the schema pg_catalog.
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
                raise ValueError("truncated pgoutput row")
            found.append(value)
            at += size
        elif mark == 0x6E:  # n
            found.append(None)
        elif mark == 0x75:  # u
            found.append(UNCHANGED)
        else:
            raise ValueError(f"unknown pgoutput value kind {mark:#x}")
    return found, at


def _read_text(raw: bytes, at: int) -> tuple[str, int]:
    end = raw.index(b"\0", at)
    return raw[at:end].decode(), end + 1


def _expect(raw: bytes, at: int, marks: bytes) -> None:
    if raw[at : at + 1] not in (marks[n : n + 1] for n in range(len(marks))):
        raise ValueError(f"unexpected {raw[at : at + 1]!r} in pgoutput message")


KEY_BYTES_MAX: Final = 1024
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class TableTarget(NamedTuple):
    """The collection of a table, and its key columns."""

    collection: str
    key: tuple[str, ...]


class _KnownTable(NamedTuple):
    """A table definition with the converters of its columns."""

    collection: str
    names: tuple[str, ...]
    converts: tuple[Converter, ...]
    key: tuple[int, ...]


class PostgresDecoder:
    """Decodes the messages of one session in order; each session repeats the table definitions."""

    def __init__(
        self,
        tables: Mapping[str, TableTarget],
        types: TypeConverters,
        learn: Callable[[], TypeConverters] | None = None,
    ) -> None:
        self._tables = tables
        self._types = types
        self._reload_types = learn  # loads the types again
        self._known: dict[int, _KnownTable | None] = {}
        self._begin: BeginMessage | None = None
        self._time = ""
        self._ordinal = 0
        self.end = 0  # of the last complete commit

    def feed(self, raw: bytes) -> Sequence[SourceChange]:
        """The changes of one message."""
        message = decode_message(raw)
        if isinstance(message, InsertMessage):
            known = self._known[message.relation]
            return () if known is None else (self._put(known, message.new),)
        if isinstance(message, UpdateMessage):
            known = self._known[message.relation]
            return () if known is None else self._update(known, message)
        if isinstance(message, DeleteMessage):
            known = self._known[message.relation]
            return () if known is None else (self._delete(known, message.old),)
        if isinstance(message, BeginMessage):
            self._begin, self._ordinal = message, 0
            self._time = format_instant_us(message.time_us)
        elif isinstance(message, CommitMessage):
            self._begin, self.end = None, message.end
        elif isinstance(message, Relation):
            self._known[message.id] = self._describe(message)
        elif isinstance(message, TruncateMessage):
            return self._truncate(message)
        return ()

    def _describe(self, relation: Relation) -> _KnownTable | None:
        table = f"{relation.schema}.{relation.name}"
        expected = self._tables.get(table)
        if expected is None:
            return None
        names = tuple(column.name for column in relation.columns)
        if not set(expected.key) <= set(names):
            raise GapError(f"the key of {table} has changed")
        indexes = tuple(names.index(column) for column in expected.key)
        if relation.identity != "f" and not all(relation.columns[index].is_key for index in indexes):
            # Deletes could not be identified. The table was altered after it was checked.
            raise GapError(f"the log of {table} does not have the key of changed rows")
        if self._reload_types is not None and any(
            self._types.is_new(column.type_oid) for column in relation.columns
        ):
            self._types = self._reload_types()
        converts = tuple(self._types.converter(column.type_oid) for column in relation.columns)
        return _KnownTable(expected.collection, names, converts, indexes)

    # -- changes ---------------------------------------------------------------------------------------

    def _put(self, known: _KnownTable, new: TupleValues) -> SourceChange:
        row = {
            name: None if value is None else convert(_decode_text(value))
            for name, convert, value in zip(known.names, known.converts, new, strict=True)
        }
        return self._change("put", known, _key(known, new), dump_row(row))

    def _update(self, known: _KnownTable, message: UpdateMessage) -> Sequence[SourceChange]:
        new, old = message.new, message.old
        unchanged: list[str] = []
        row: dict[str, Any] = {}
        for index, value in enumerate(new):
            if value is UNCHANGED and old is not None and message.whole:
                value = old[index]
            name = known.names[index]
            if value is None:
                row[name] = None
            elif isinstance(value, UnchangedValue):
                row[name] = None  # reserves its position among the fields
                unchanged.append(name)
            else:
                row[name] = known.converts[index](value.decode())
        key = _key(known, new, old)
        was = key if old is None else _key(known, old)
        if was == key:
            return (self._change("put", known, key, dump_row(row), tuple(unchanged)),)
        ordinal = self._ordinal
        gone = self._change("delete", known, was)
        self._ordinal = ordinal  # one message
        return gone, self._change("put", known, key, dump_row(row), tuple(unchanged), was)

    def _delete(self, known: _KnownTable, old: TupleValues) -> SourceChange:
        return self._change("delete", known, _key(known, old))

    def _truncate(self, message: TruncateMessage) -> Sequence[SourceChange]:
        found = [self._known[relation] for relation in message.relations]
        return [self._change("clear", known, "") for known in found if known is not None]

    def _change(
        self,
        op: Any,
        known: _KnownTable,
        key: str,
        data: bytes = b"",
        unchanged: tuple[str, ...] = (),
        was: str | None = None,
    ) -> SourceChange:
        begin = self._begin
        assert begin is not None, "a row belongs to a transaction"
        ordinal = self._ordinal
        self._ordinal += 1
        collection = known.collection
        return SourceChange(
            begin.lsn, ordinal, str(begin.xid), self._time, op, collection, key, data, unchanged, was
        )


def _key(known: _KnownTable, values: TupleValues, old: TupleValues | None = None) -> str:
    texts: list[str] = []
    for index in known.key:
        value = values[index]
        if isinstance(value, UnchangedValue) and old is not None:
            value = old[index]
        if value is None or isinstance(value, UnchangedValue):
            raise SourceError(
                f"a row of {known.collection} has no value for its key column {known.names[index]}"
            )
        texts.append(value.decode())
    return document_key(texts)


def document_key(texts: Sequence[str]) -> str:
    """The document key: the column's text, or several of them, percent-encoded."""
    key = texts[0] if len(texts) == 1 else ",".join(quote(text, safe="") for text in texts)
    if len(key.encode()) > KEY_BYTES_MAX:
        raise SourceError(f"the key of a row must not have more than {KEY_BYTES_MAX} bytes: {key[:40]}...")
    return key


def document_row(
    names: Sequence[str], converts: Sequence[Converter], key: Iterable[int], texts: Sequence[str | None]
) -> tuple[str, bytes]:
    """Key and document of a copied row, in the same form as from the log."""
    found: list[str] = []
    for index in key:
        text = texts[index]
        if text is None:
            raise SourceError(f"a row has no value for its key column {names[index]}")
        found.append(text)
    row = {
        name: None if text is None else convert(text)
        for name, convert, text in zip(names, converts, texts, strict=True)
    }
    return document_key(found), dump_row(row)


def format_instant_us(time_us: int) -> str:
    instant = _EPOCH + timedelta(microseconds=time_us)
    return f"{instant:%Y-%m-%dT%H:%M:%S.%f}Z"


def _decode_text(value: bytes | UnchangedValue) -> str:
    assert isinstance(value, bytes), "a new row is whole"
    return value.decode()
