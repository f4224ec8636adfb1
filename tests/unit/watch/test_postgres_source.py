"""What PostgreSQL says, as changes of documents: messages, values, keys, and what a source may be told."""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

import pytest

from tailrace.common.errors import TailraceError
from tailrace.watch.sources import postgres_decoder
from tailrace.watch.sources.config import SourceConfig, read_source_config
from tailrace.watch.sources.model import GapError, SourceError, SourcePosition, read_position_token
from tailrace.watch.sources.postgres import PostgresConnection, import_driver
from tailrace.watch.sources.postgres_decoder import (
    PostgresDecoder,
    TableTarget,
    TypeConverters,
    document_key,
    dump_row,
    format_instant_us,
)

INT4, TEXT, INT4S, JSONB, MOOD = 23, 25, 1007, 3802, 90001
TYPES = TypeConverters({INT4S: INT4, 1009: TEXT}, {MOOD: INT4})


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def row(*values: str | postgres_decoder.UnchangedValue | None) -> bytes:
    found = struct.pack(">H", len(values))
    for value in values:
        if value is None:
            found += b"n"
        elif isinstance(value, postgres_decoder.UnchangedValue):
            found += b"u"
        else:
            raw = value.encode()
            found += b"t" + struct.pack(">I", len(raw)) + raw
    return found


def begin(lsn: int, xid: int = 7) -> bytes:
    return b"B" + struct.pack(">QqI", lsn, 1_000_000, xid)


def commit(lsn: int, end: int) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, lsn, end, 1_000_000)


def relation(number: int, name: str, *columns: tuple[str, int, int], identity: str = "d") -> bytes:
    found = b"R" + struct.pack(">I", number) + text("public") + text(name) + identity.encode()
    found += struct.pack(">H", len(columns))
    for column, oid, flags in columns:
        found += struct.pack(">B", flags) + text(column) + struct.pack(">Ii", oid, -1)
    return found


def change(kind: str, number: int, *parts: bytes) -> bytes:
    return kind.encode() + struct.pack(">I", number) + b"".join(parts)


ORDERS = relation(1, "orders", ("id", INT4, 1), ("note", TEXT, 0), ("tags", INT4S, 0))


def decoder(**tables: tuple[str, ...]) -> PostgresDecoder:
    wanted = {
        f"public.{name}": TableTarget(name, key) for name, key in (tables or {"orders": ("id",)}).items()
    }
    return PostgresDecoder(wanted, TYPES)


def fed(reader: PostgresDecoder, *messages: bytes) -> list[Any]:
    return [one for message in messages for one in reader.feed(message)]


def test_rows_become_documents_in_the_order_of_the_log() -> None:
    reader = decoder()
    found = fed(
        reader,
        begin(100),
        ORDERS,
        change("I", 1, b"N", row("1", "a", "{1,NULL,3}")),
        change("U", 1, b"N", row("1", "b", None)),
        change("D", 1, b"K", row("1", None, None)),
    )
    assert [(one.op, one.key, one.lsn, one.ordinal, one.txn) for one in found] == [
        ("put", "1", 100, 0, "7"),
        ("put", "1", 100, 1, "7"),
        ("delete", "1", 100, 2, "7"),
    ]
    assert json.loads(found[0].data) == {"id": 1, "note": "a", "tags": [1, None, 3]}
    assert json.loads(found[1].data) == {"id": 1, "note": "b", "tags": None}
    assert found[0].time == "2000-01-01T00:00:01.000000Z"
    assert reader.end == 0
    assert fed(reader, commit(100, 140)) == []
    assert reader.end == 140
    again = fed(reader, begin(200, 8), change("I", 1, b"N", row("2", "", None)))
    assert (again[0].lsn, again[0].ordinal) == (200, 0)


def test_a_value_that_did_not_change_is_taken_from_the_old_row_or_left_to_the_view() -> None:
    reader = decoder()
    fed(
        reader,
        begin(1),
        relation(1, "orders", ("id", INT4, 1), ("note", TEXT, 1), ("tags", INT4S, 1), identity="f"),
    )
    whole = fed(
        reader,
        change("U", 1, b"O", row("1", "long", "{1}"), b"N", row("1", postgres_decoder.UNCHANGED, "{2}")),
        change("U", 1, b"N", row("1", postgres_decoder.UNCHANGED, "{3}")),
    )
    assert json.loads(whole[0].data) == {"id": 1, "note": "long", "tags": [2]}
    assert whole[0].unchanged == ()
    assert whole[1].unchanged == ("note",)
    assert list(json.loads(whole[1].data)) == ["id", "note", "tags"], "it keeps its place"


def test_a_key_that_changes_is_a_delete_and_an_insert() -> None:
    reader = decoder()
    fed(reader, begin(1), ORDERS)
    gone, put = fed(
        reader, change("U", 1, b"K", row("1", None, None), b"N", row("2", postgres_decoder.UNCHANGED, None))
    )
    assert (gone.op, gone.key, gone.ordinal) == ("delete", "1", 0)
    assert (put.op, put.key, put.ordinal, put.was, put.unchanged) == ("put", "2", 0, "1", ("note",))
    (later,) = fed(reader, change("D", 1, b"K", row("2", None, None)))
    assert later.ordinal == 1


def test_tables_that_nobody_asked_for_do_not_count() -> None:
    reader = decoder(orders=("id",), lines=("id",))
    other = relation(2, "other", ("id", INT4, 1))
    lines = relation(3, "lines", ("id", INT4, 1))
    fed(reader, begin(1), other, ORDERS, lines)
    assert fed(reader, change("I", 2, b"N", row("9"))) == []
    truncated = fed(reader, b"T" + struct.pack(">IB3I", 3, 0, 1, 2, 3))
    assert [(one.op, one.collection, one.ordinal) for one in truncated] == [
        ("clear", "orders", 0),
        ("clear", "lines", 1),
    ]
    for silent in (
        b"Y" + struct.pack(">I", 1) + text("a") + text("b"),
        b"O" + struct.pack(">Q", 1) + text("x"),
    ):
        assert fed(reader, silent) == []


def test_a_log_without_the_key_is_a_gap() -> None:
    with pytest.raises(GapError, match=r"key of public\.orders has changed"):
        fed(decoder(), begin(1), relation(1, "orders", ("other", INT4, 1)))
    with pytest.raises(GapError, match="does not have the key"):
        fed(decoder(), begin(1), relation(1, "orders", ("id", INT4, 0), ("other", INT4, 1)))


def test_damage_is_not_read_as_something_else() -> None:
    for raw in (b"", b"X", b"I\0\0\0\1K\0\0", b"I\0\0\0\1N\0\1t\0\0\0\5abc", b"I\0\0\0\1N\0\1z"):
        with pytest.raises(ValueError, match="pgoutput"):
            postgres_decoder.decode_message(raw)


def test_keys() -> None:
    assert document_key(["a b/ü"]) == "a b/ü"
    assert document_key(["a,b", "ü/"]) == "a%2Cb,%C3%BC%2F"
    with pytest.raises(SourceError, match="1024 bytes"):
        document_key(["x" * 1025])


@pytest.mark.parametrize(
    ("oid", "given", "expected"),
    [
        (16, "t", True),
        (16, "f", False),
        (20, "-9223372036854775808", -(2**63)),
        (701, "1.5e10", 1.5e10),
        (701, "NaN", None),
        (700, "-Infinity", None),
        (1700, "12345678901234567890.10", "12345678901234567890.10"),
        (17, "\\x00ff", "AP8="),
        (1184, "2026-01-02 03:04:05.678901+00", "2026-01-02T03:04:05.678901Z"),
        (1184, "infinity", "infinity"),
        (1184, "0044-03-15 12:00:00+00 BC", "0044-03-15 12:00:00+00 BC"),
        (1082, "2026-01-02", "2026-01-02"),
        (
            3802,
            '{"a": [1, 2.5, null], "b": 12345678901234567890123}',
            {"a": [1, 2.5, None], "b": 1.2345678901234568e22},
        ),
        (114, "1e400", None),
        (114, "[" * 70 + "]" * 70, "[" * 70 + "]" * 70),
        (INT4S, "{}", []),
        (INT4S, "[0:1][1:2]={{1,2},{3,4}}", [[1, 2], [3, 4]]),
        (
            1009,
            '{"a,b","\\"q\\\\",NULL,"NULL",plain,"{x}",""}',
            ["a,b", '"q\\', None, "NULL", "plain", "{x}", ""],
        ),
        (MOOD, "5", 5),
        (99999, "happy", "happy"),
    ],
)
def test_values(oid: int, given: str, expected: Any) -> None:
    found = TYPES.converter(oid)(given)
    assert found == expected
    assert type(found) is type(expected)


def test_numeric_as_a_double() -> None:
    converter = TypeConverters({}, {}, numeric="double").converter(1700)
    assert [converter("1.25"), converter("NaN")] == [1.25, None]


def test_half_a_pair_does_not_stop_a_document() -> None:
    assert json.loads(dump_row({"a": TYPES.converter(114)('["\\ud800x"]')})) == {"a": ["?x"]}


def test_positions() -> None:
    position = SourcePosition(0x16B3748, 0, 4)
    assert position.token == "00000000016b3748/0"
    assert read_position_token(position.token) == (0x16B3748, 0)
    assert read_position_token("00000000016b3748/-1") == (0x16B3748, -1)
    assert read_position_token("16b3748/0") is None
    assert format_instant_us(1_767_225_600_123_456) == "2026-01-01T00:00:00.123456Z"


GIVEN: dict[str, Any] = {
    "kind": "postgres",
    "dsn": {"env": "PG_DSN"},
    "collections": {"public.orders": {"collection": "orders"}},
}


def test_what_is_left_out_has_a_default() -> None:
    config = read_source_config("app", "pg-1", GIVEN)
    assert (config.slot, config.publication, config.on_gap, config.initial) == (
        "tailrace_app_pg_1",
        "tailrace",
        "rescan",
        "load",
    )
    assert read_source_config("app", "pg-1", config.value()) == config


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "oracle"},
        {"dsn": "host=localhost password=secret"},
        {"dsn": {"env": "PG DSN"}},
        {"dsn": {"file": "relative"}},
        {"dsn": {"env": "A", "file": "/b"}},
        {"slot": "Upper"},
        {"publication": ""},
        {"collections": {}},
        {"collections": {"orders": {"collection": "orders"}}},
        {"collections": {"public.orders": {"collection": "_orders"}}},
        {"collections": {"public.orders": {"collection": "orders", "key": "id"}}},
        {"collections": {"public.orders": {"collection": "orders", "partitions": 257}}},
        {"collections": {"public.a": {"collection": "x"}, "public.b": {"collection": "x"}}},
        {"batch": {"maxChanges": 0}},
        {"limits": {"eventsPerSecond": "many"}},
        {"onGap": "ignore"},
        {"initial": "later"},
        {"numeric": "float"},
        {"name": "other"},
        {"surprise": 1},
    ],
)
def test_what_a_source_cannot_be_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(TailraceError) as refused:
        read_source_config("app", "pg1", {**GIVEN, **wrong})
    assert refused.value.status == 400
    assert "secret" not in refused.value.message


def dsn_of(config: SourceConfig) -> str:
    assert config.dsn is not None
    return config.dsn.read()


def test_secrets_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    config = read_source_config("app", "pg1", GIVEN)
    monkeypatch.delenv("PG_DSN", raising=False)
    with pytest.raises(SourceError, match="no PG_DSN"):
        dsn_of(config)
    monkeypatch.setenv("PG_DSN", "host=here")
    assert dsn_of(config) == "host=here"
    place = tmp_path / "dsn"
    place.write_text("host=there\n")
    assert dsn_of(read_source_config("app", "pg1", {**GIVEN, "dsn": {"file": str(place)}})) == "host=there"


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SourceError, match=r"pip install 'tailrace\[postgres\]'"):
        import_driver()


def test_a_connection_string_that_cannot_be_read_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "something secret")
    with pytest.raises(SourceError) as refused:
        PostgresConnection(read_source_config("app", "pg1", GIVEN)).open()
    assert "secret" not in str(refused.value)
