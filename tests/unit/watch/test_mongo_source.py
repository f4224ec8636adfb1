"""What MongoDB says, as changes of documents: values, keys, events, tokens, and what a source may be told."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson import Binary, Code, Decimal128, Int64, MaxKey, ObjectId, Regex, Timestamp
from bson.datetime_ms import DatetimeMS

from tailrace.common.errors import TailraceError
from tailrace.watch.sources.config import read_source_config
from tailrace.watch.sources.model import SourceChange, SourceError
from tailrace.watch.sources.mongo import MongoConnection, import_driver
from tailrace.watch.sources.mongo_decoder import (
    MongoDecoder,
    decode_bson,
    decode_resume_token,
    document_key,
    document_row,
    encode_resume_token,
    format_instant_ms,
    is_event_token,
    token_lsn,
)

HEX = "65a1b2c3d4e5f60718293a4b"
TIME = Timestamp(0x65A1B2C3, 7)
LSN = 0x65A1B2C3_00000007
TOKEN = "8265A1B2C3000000072B022C0100296E5A100446"


def document(value: Any) -> Any:
    """What a value becomes on its way over the wire."""
    _, data = document_row(decode_bson(bson.encode({"_id": 1, "v": value})))
    return json.loads(data)["v"]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (Int64(2**63 - 1), 2**63 - 1),
        (-0.5, -0.5),
        (float("nan"), {"$numberDouble": "NaN"}),
        (float("-inf"), {"$numberDouble": "-Infinity"}),
        ("ä\0", "ä\0"),
        (ObjectId(HEX), HEX),
        (datetime(2026, 1, 2, 3, 4, 5, 6000, tzinfo=UTC), "2026-01-02T03:04:05.006Z"),
        (DatetimeMS(-1), "1969-12-31T23:59:59.999Z"),
        (DatetimeMS(-62_135_596_800_000), "0001-01-01T00:00:00.000Z"),
        (DatetimeMS(2**60), {"$date": {"$numberLong": str(2**60)}}),
        (Decimal128("1.50"), "1.50"),
        (b"\0\xff", "AP8="),
        (Binary(bytes(16), 4), "AAAAAAAAAAAAAAAAAAAAAA=="),
        ([1, {"a": ObjectId(HEX)}], [1, {"a": HEX}]),
        (Timestamp(5, 6), {"$timestamp": {"t": 5, "i": 6}}),
        (Regex("a+", "i"), {"$regularExpression": {"pattern": "a+", "options": "i"}}),
        (Code("x"), {"$code": "x"}),
        (MaxKey(), {"$maxKey": 1}),
        ({"$ref": "c", "$id": ObjectId(HEX)}, {"$ref": "c", "$id": {"$oid": HEX}}),
    ],
)
def test_values(value: Any, wanted: Any) -> None:
    assert document(value) == wanted


def test_what_is_nested_too_deep_becomes_a_text() -> None:
    value: Any = 1
    for _ in range(90):
        value = {"a": value}
    found, depth = document(value), 1
    while isinstance(found, dict):
        found, depth = found["a"], depth + 1
    assert depth <= 62
    assert json.loads(found)["a"]


def test_a_text_that_is_none_stops_nothing() -> None:
    raw = bson.encode({"_id": 1, "v": "ab"}).replace(b"ab", b"\xffb")
    assert json.loads(document_row(decode_bson(raw))[1]) == {"v": "\ufffdb"}


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("order/1", "order/1"),
        ("", '""'),
        (ObjectId(HEX), HEX),
        (7, '{"$numberInt":"7"}'),
        (Int64(7), '{"$numberLong":"7"}'),
        (1.5, '{"$numberDouble":"1.5"}'),
        ({"a": 1, "b": "ä"}, '{"a":{"$numberInt":"1"},"b":"ä"}'),
        (True, "true"),
        (Binary(b"\1", 0), '{"$binary":{"base64":"AQ==","subType":"00"}}'),
    ],
)
def test_keys(key: Any, wanted: str) -> None:
    found, data = document_row(decode_bson(bson.encode({"n": 1, "_id": key})))
    assert found == wanted
    assert data == b'{"n":1}', "the id is no part of the document"


def test_a_key_that_is_too_long_is_refused() -> None:
    assert document_key("k" * 1024) == "k" * 1024
    with pytest.raises(SourceError, match="more than 1024 bytes"):
        document_key("ä" * 513)


def event(kind: str, **more: Any) -> bytes:
    given = {
        "_id": {"_data": TOKEN},
        "operationType": kind,
        "clusterTime": TIME,
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": "k"},
    }
    return bson.encode({name: value for name, value in {**given, **more}.items() if value != "left out"})


def feed(raw: bytes) -> SourceChange:
    change = MongoDecoder("orders", 0, -1).feed(raw)
    assert change is not None
    return change


def test_an_insert_is_what_it_says() -> None:
    wall = datetime(2026, 1, 2, 3, 4, 5, 6000, tzinfo=UTC)
    change = feed(event("insert", fullDocument={"_id": "k", "n": 1}, wallTime=wall))
    assert change == SourceChange(
        LSN, 0, None, "2026-01-02T03:04:05.006Z", "put", "orders", "k", b'{"n":1}', token=TOKEN
    )


def test_an_update_is_what_was_looked_up_later() -> None:
    found = feed(event("update", fullDocument={"_id": "k", "n": 2}))
    assert (found.image, found.data, found.replaces) == ("lookup", b'{"n":2}', False)
    assert found.time == format_instant_ms(0x65A1B2C3 * 1000), "older servers say no more than the second"
    assert feed(event("update", fullDocument=None)).image == "missing"
    assert feed(event("update")).image == "missing"


def test_a_replacement_is_whole() -> None:
    before = {"_id": "k", "n": 1}
    found = feed(event("replace", fullDocument={"_id": "k"}, fullDocumentBeforeChange=before))
    assert (found.image, found.data, found.replaces, found.before) == ("full", b"{}", True, b'{"n":1}')
    assert feed(event("replace", fullDocument={"_id": "k"}, fullDocumentBeforeChange=None)).before is None


def test_a_delete_has_a_key_and_no_document() -> None:
    found = feed(event("delete", documentKey={"_id": ObjectId(HEX), "shard": 3}))
    assert (found.op, found.key, found.data) == ("delete", HEX, b"")


def test_changes_of_one_time_are_counted_and_counting_goes_on() -> None:
    session = {"lsid": {"id": Binary(bytes(range(16)), 4), "uid": b""}, "txnNumber": Int64(3)}
    decoder = MongoDecoder("orders", LSN, 4)
    found = [decoder.feed(event("delete", **session)) for _ in range(2)]
    later = decoder.feed(event("delete", clusterTime=Timestamp(TIME.time, 8)))
    assert [(one.lsn, one.ordinal) for one in [*found, later] if one is not None] == [
        (LSN, 5),
        (LSN, 6),
        (LSN + 1, 0),
    ]
    assert found[0] is not None
    assert found[0].txn == f"{bytes(range(16)).hex()}:3"


def test_the_time_is_in_the_token_as_well() -> None:
    assert feed(event("delete", clusterTime="left out")).lsn == LSN


def test_an_invalidated_stream_has_ended() -> None:
    decoder = MongoDecoder("orders", 0, -1)
    assert decoder.feed(event("drop", documentKey="left out")) is None
    assert decoder.end_token == ""
    assert decoder.feed(event("invalidate", documentKey="left out")) is None
    assert decoder.end_token == TOKEN


def test_tokens_are_texts_and_back() -> None:
    typed = {"_data": TOKEN, "_typeBits": b"\x82\0"}
    for token in ({"_data": TOKEN}, typed):
        assert decode_resume_token(encode_resume_token(token)) == token
        assert token_lsn(encode_resume_token(token)) == LSN
        assert is_event_token(encode_resume_token(token))
    assert not is_event_token("8265A1B2C3000000072B0229296E04"), "nothing but a time"
    with pytest.raises(SourceError, match=r"MongoDB 4\.4 or newer"):
        token_lsn(encode_resume_token({"_data": b"\x01\x02"}))
    with pytest.raises(SourceError, match="more than"):
        encode_resume_token({"_data": "8" * 20_000})


GIVEN: dict[str, Any] = {
    "kind": "mongo",
    "dsn": {"env": "MONGO_DSN"},
    "collections": {"shop.orders.2026": {"collection": "orders"}},
}


def test_what_is_left_out_has_a_default() -> None:
    config = read_source_config("app", "m", GIVEN)
    assert config.value() == {
        **GIVEN,
        "name": "m",
        "initial": "load",
        "onGap": "rescan",
        "batch": {"maxChanges": 1000, "maxBytes": 4194304},
        "limits": {"eventsPerSecond": 50_000, "bytesPerSecond": 67_108_864},
    }
    assert read_source_config("app", "m", config.value()) == config


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot": "x"},
        {"publication": "x"},
        {"numeric": "double"},
        {"stream": "x"},
        {"kind": "mongodb"},
        {"kind": ["mongo"]},
        {"dsn": "mongodb://user:secret@host"},
        {"collections": {"orders": {"collection": "orders"}}},
        {"collections": {"shop.orders": {"collection": "orders", "key": ["id"]}}},
    ],
)
def test_what_a_source_cannot_be_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(TailraceError) as refused:
        read_source_config("app", "m", {**GIVEN, **wrong})
    assert refused.value.status == 400
    assert "secret" not in refused.value.message


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymongo", None)
    with pytest.raises(SourceError, match=r"pip install 'tailrace\[mongo\]'"):
        import_driver()


@pytest.mark.parametrize(
    "dsn",
    [
        "something secret",
        "user:secret@host:27017",
        "mongodb://user:sec/ret@host",
        "mongodb://u:secret@host:notaport",
        "mongodb://",
    ],
)
def test_a_connection_string_that_cannot_be_read_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    monkeypatch.setenv("MONGO_DSN", dsn)
    with pytest.raises(SourceError) as refused:
        MongoConnection(read_source_config("app", "m", GIVEN)).open()
    assert "sec" not in str(refused.value)
    assert refused.value.__cause__ is None
