"""`format=arrow`: pages that say of each entry which it is, when it came and with which key."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from conftest import StartServer
from support.sealing import SEALING_ENV, wait_sealed
from support.wire import Wire, fresh
from tailrace.protocol import offsets

JSON, TEXT = "application/json", "text/plain"
ARROW = "application/vnd.apache.arrow.stream"


def table(body: bytes) -> list[dict[str, Any]]:
    return pa.ipc.open_stream(body).read_all().to_pylist()


def walk(http: Wire, name: str, query: str = "") -> list[dict[str, Any]]:
    """All rows, page by page."""
    rows: list[dict[str, Any]] = []
    offset = "-1"
    while True:
        page = http.get(f"{name}?format=arrow&offset={offset}{query}")
        assert page.status == 200
        assert page["content-type"] == ARROW
        rows += table(page.body)
        offset = page["stream-next-offset"]
        if "stream-up-to-date" in page:
            return rows


def test_rows_of_a_json_stream(http: Wire) -> None:
    name = fresh("rows")
    http.put(name, JSON)
    http.post(name, JSON, b'[{"n": 1},{"n":2}]', stream_timestamp="1700000000123456789")
    http.post(name, JSON, b'"\\u00e4\xc3\xa4"', stream_key="k", stream_timestamp="1700000000123457001")
    page = http.get(f"{name}?format=arrow")
    assert page["content-type"] == ARROW
    assert "stream-up-to-date" in page
    schema = pa.ipc.open_stream(page.body).schema
    assert schema.names == ["entry", "append_time", "append_ns", "key", "payload", "epoch"]
    assert schema.field("payload").type == pa.string()
    assert schema.field("append_time").type == pa.timestamp("us", "UTC")
    rows = table(page.body)
    assert [row["entry"] for row in rows] == [1, 2, 3]
    assert [row["payload"] for row in rows] == ['{"n": 1}', '{"n":2}', '"\\u00e4ä"']
    assert [row["key"] for row in rows] == [None, None, b"k"]
    assert [row["append_ns"] for row in rows] == [789, 789, 1]
    assert [row["append_time"].microsecond for row in rows] == [123456, 123456, 123457]
    assert [row["epoch"] for row in rows] == [0, 0, 0]
    assert page["stream-next-offset"] == offsets.encode_offset(0, 3)


def test_rows_show_where_the_entries_of_bytes_end(http: Wire) -> None:
    name = fresh("rows")
    http.put(name, TEXT)
    for number in range(20):
        http.post(name, TEXT, b"x" * number + b"\xff\x00", stream_key=f"k{number % 3}")
    rows = table(http.get(f"{name}?format=arrow").body)
    assert [row["payload"] for row in rows] == [b"x" * number + b"\xff\x00" for number in range(20)]
    keyed = table(http.get(f"{name}?format=arrow&key=k1").body)
    assert [row["entry"] for row in keyed] == [2, 5, 8, 11, 14, 17, 20]
    assert {row["key"] for row in keyed} == {b"k1"}
    assert table(http.get(f"{name}/pk/k1?format=arrow").body) == keyed


def test_a_page_of_rows_is_as_large_as_wanted(http: Wire) -> None:
    name = fresh("rows")
    http.put(name, JSON)
    http.post(name, JSON, json.dumps([{"n": number} for number in range(100)]).encode())
    first = http.get(f"{name}?format=arrow&max_entries=7")
    assert [row["entry"] for row in table(first.body)] == [*range(1, 8)]
    assert first["stream-next-offset"] == offsets.encode_offset(0, 7)
    assert len(table(http.get(f"{name}?format=arrow&max_bytes=30").body)) == 3
    assert [row["entry"] for row in walk(http, name, "&max_entries=9")] == [*range(1, 101)]
    for wrong in ("max_entries=0", "max_bytes=-1", "max_bytes=1&max_bytes=2", "max_entries=x"):
        assert http.get(f"{name}?format=arrow&{wrong}").status == 400


def test_an_empty_page_of_rows_has_its_columns(http: Wire) -> None:
    name = fresh("rows")
    http.put(name, JSON)
    for query in ("", "&offset=now"):
        page = http.get(f"{name}?format=arrow{query}")
        assert page.status == 200
        assert table(page.body) == []


@pytest.mark.parametrize("query", ["live=sse&offset=-1", "live=ws&offset=-1"])
def test_rows_do_not_come_as_events(http: Wire, query: str) -> None:
    name = fresh("rows")
    http.put(name, JSON)
    assert http.get(f"{name}?format=arrow&{query}").code == "unsupported_format"


def test_a_long_poll_gives_rows_when_there_are_some(http: Wire) -> None:
    name = fresh("rows")
    http.put(name, JSON)
    http.post(name, JSON, b"[1,2]")
    assert (
        http.get(
            f"{name}?format=arrow&live=long-poll&offset={offsets.encode_offset(0, 2)}&timeout=1ms"
        ).status
        == 204
    )
    page = http.get(f"{name}?format=arrow&live=long-poll&offset=-1")
    assert [row["payload"] for row in table(page.body)] == ["1", "2"]


def test_rows_are_the_same_wherever_they_lie(start_server: StartServer) -> None:
    """From memory, from segments, after a restart, and through a fork; promoted as every reader gets them."""
    server = start_server(env=SEALING_ENV)
    http = Wire(server.port)
    http.put("ev", JSON)
    for number in range(40):
        headers = {"stream_key": f"k{number % 4}"} if number % 3 else {}
        http.post(
            "ev", JSON, json.dumps([{"n": number}, {"n": number, "m": "x" * number}]).encode(), **headers
        )
    young = walk(http, "ev")
    assert len(young) == 80
    assert [json.loads(row["payload"])["n"] for row in young] == [number // 2 for number in range(80)]
    wait_sealed(server.data_dir)
    assert walk(http, "ev", "&max_entries=11") == young
    http.put("fork", JSON, stream_forked_from="/v1/stream/ev")
    http.post("fork", JSON, b'{"n":40}')
    assert walk(http, "fork")[:80] == young
    assert walk(http, "fork")[80]["entry"] == 81
    plain = b"".join(row["payload"].encode() + b"," for row in young)[:-1]
    assert http.get("ev?format=json").body == b"[" + plain + b"]"
    http.close()
    server.restart()
    http = Wire(server.port)
    assert walk(http, "ev") == young
    http.close()


def test_rows_of_older_versions_are_promoted(http: Wire) -> None:
    name = fresh("rows")
    http.put(name, JSON)
    first = {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": False,
    }
    then = {
        "type": "object",
        "required": ["b"],
        "properties": {"b": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert http.post(f"{name}/_schema", JSON, json.dumps({"schema": first})).status == 200
    http.post(name, JSON, b'[{"a":1},{"a":2}]')
    lens = {
        "apiVersion": "durable.lens/v1", "schema": name, "from": 1, "to": 2,
        "ops": [{"op": "rename", "from": "/a", "to": "/b"}],
    }  # fmt: skip
    assert http.post(f"{name}/_schema", JSON, json.dumps({"schema": then, "lens": lens})).status == 200
    http.post(name, JSON, b'{"b":3}')
    page = http.get(f"{name}?format=arrow")
    assert [json.loads(row["payload"]) for row in table(page.body)] == [{"b": 1}, {"b": 2}, {"b": 3}]
    assert page["cache-control"] == "no-cache"
