"""Transactions of PostgreSQL as changes of documents, and where each commit ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from tailrace.watch.sources import pgoutput
from tailrace.watch.sources.model import GapError, SourceChange, SourceError
from tailrace.watch.sources.pgoutput import UNCHANGED, Relation, TupleValues, UnchangedValue
from tailrace.watch.sources.pgtypes import Converter, TypeConverters, dump_row

KEY_BYTES_MAX: Final = 1024
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class TableTarget(NamedTuple):
    """A table that is followed: the collection it becomes, and the columns that make a document's key."""

    collection: str
    key: tuple[str, ...]


class _KnownTable(NamedTuple):
    """A table as the log describes it, made ready for its rows."""

    collection: str
    names: tuple[str, ...]
    converts: tuple[Converter, ...]
    key: tuple[int, ...]


class PostgresDecoder:
    """Reads one session's messages, in order. Every session says again what its tables look like."""

    def __init__(
        self,
        tables: Mapping[str, TableTarget],
        types: TypeConverters,
        learn: Callable[[], TypeConverters] | None = None,
    ) -> None:
        self._tables = tables
        self._types = types
        self._learn = learn  # looks at the types again
        self._known: dict[int, _KnownTable | None] = {}
        self._begin: pgoutput.BeginMessage | None = None
        self._time = ""
        self._ordinal = 0
        self.end = 0  # of the last commit that was read to its end

    def feed(self, raw: bytes) -> Sequence[SourceChange]:
        """What one message says about documents."""
        message = pgoutput.decode_message(raw)
        if isinstance(message, pgoutput.InsertMessage):
            known = self._known[message.relation]
            return () if known is None else (self._put(known, message.new),)
        if isinstance(message, pgoutput.UpdateMessage):
            known = self._known[message.relation]
            return () if known is None else self._update(known, message)
        if isinstance(message, pgoutput.DeleteMessage):
            known = self._known[message.relation]
            return () if known is None else (self._delete(known, message.old),)
        if isinstance(message, pgoutput.BeginMessage):
            self._begin, self._ordinal = message, 0
            self._time = format_instant_us(message.time_us)
        elif isinstance(message, pgoutput.CommitMessage):
            self._begin, self.end = None, message.end
        elif isinstance(message, Relation):
            self._known[message.id] = self._described(message)
        elif isinstance(message, pgoutput.TruncateMessage):
            return self._truncate(message)
        return ()

    def _described(self, relation: Relation) -> _KnownTable | None:
        table = f"{relation.schema}.{relation.name}"
        wanted = self._tables.get(table)
        if wanted is None:
            return None
        names = tuple(column.name for column in relation.columns)
        if not set(wanted.key) <= set(names):
            raise GapError(f"the key of {table} has changed")
        places = tuple(names.index(column) for column in wanted.key)
        if relation.identity != "f" and not all(relation.columns[place].is_key for place in places):
            # What is deleted could not be told. It was different, or checked and changed since.
            raise GapError(f"the log of {table} does not have the key of what was changed")
        if self._learn is not None and any(
            self._types.is_new(column.type_oid) for column in relation.columns
        ):
            self._types = self._learn()
        converts = tuple(self._types.converter(column.type_oid) for column in relation.columns)
        return _KnownTable(wanted.collection, names, converts, places)

    # -- changes ---------------------------------------------------------------------------------------

    def _put(self, known: _KnownTable, new: TupleValues) -> SourceChange:
        row = {
            name: None if value is None else convert(_decode_text(value))
            for name, convert, value in zip(known.names, known.converts, new, strict=True)
        }
        return self._change("put", known, _key(known, new), dump_row(row))

    def _update(self, known: _KnownTable, message: pgoutput.UpdateMessage) -> Sequence[SourceChange]:
        new, old = message.new, message.old
        unchanged: list[str] = []
        row: dict[str, Any] = {}
        for place, value in enumerate(new):
            if value is UNCHANGED and old is not None and message.whole:
                value = old[place]
            name = known.names[place]
            if value is None:
                row[name] = None
            elif isinstance(value, UnchangedValue):
                row[name] = None  # keeps its place among the fields
                unchanged.append(name)
            else:
                row[name] = known.converts[place](value.decode())
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

    def _truncate(self, message: pgoutput.TruncateMessage) -> Sequence[SourceChange]:
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
    for place in known.key:
        value = values[place]
        if isinstance(value, UnchangedValue) and old is not None:
            value = old[place]
        if value is None or isinstance(value, UnchangedValue):
            raise SourceError(f"a row of {known.collection} has no value for {known.names[place]}, its key")
        texts.append(value.decode())
    return document_key(texts)


def document_key(texts: Sequence[str]) -> str:
    """The key of a document: the column's text, or several of them, each percent-encoded."""
    key = texts[0] if len(texts) == 1 else ",".join(quote(text, safe="") for text in texts)
    if len(key.encode()) > KEY_BYTES_MAX:
        raise SourceError(f"the key of a row has more than {KEY_BYTES_MAX} bytes: {key[:40]}...")
    return key


def document_row(
    names: Sequence[str], converts: Sequence[Converter], key: Iterable[int], texts: Sequence[str | None]
) -> tuple[str, bytes]:
    """A row that was copied: the document's key and the document, as the log would give them."""
    found: list[str] = []
    for place in key:
        text = texts[place]
        if text is None:
            raise SourceError(f"a row has no value for {names[place]}, its key")
        found.append(text)
    row = {
        name: None if text is None else convert(text)
        for name, convert, text in zip(names, converts, texts, strict=True)
    }
    return document_key(found), dump_row(row)


def format_instant_us(time_us: int) -> str:
    moment = _EPOCH + timedelta(microseconds=time_us)
    return f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z"


def _decode_text(value: bytes | UnchangedValue) -> str:
    assert isinstance(value, bytes), "a new row is whole"
    return value.decode()
