"""docs/open-format.md, executed: other engines read a stream's segments, byte for byte what was written."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson
import pyarrow
import pytest

from conftest import StartServer
from support.segments import NAME, STREAM_ID, Entry, runs_of, write
from support.wire import Wire
from tailrace.protocol.offsets import encode_offset
from tailrace.storage.segments.model import stream_prefix

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[3]
PRINTED_OBJECTS = "tailrace-data/objects"
SEGMENT_ROWS = 2500


@pytest.fixture
def spark_in_lima(spark: SparkSession) -> Iterator[None]:
    """The page's `getOrCreate` finds this session, whose time zone must not matter."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/Lima")
    yield
    spark.conf.set("spark.sql.session.timeZone", str(before))


def page_blocks() -> dict[str, str]:
    """The code of the page by what it imports."""
    text = (ROOT / "docs" / "open-format.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return {re.split(r"[ .\n]", block)[1]: block for block in blocks}


def json_entries() -> list[Entry]:
    draw = random.Random(4)
    texts = ["plain", "ünïcödé", "\u2028 \U0001f600", 'quotes " and \\', "", "x" * 5000]
    return [
        Entry(
            orjson.dumps({"n": index, "text": draw.choice(texts)}),
            1_790_000_000_000_000_000 + index * 1_000_003,
            draw.choice([None, b"a", b"b", b"\x00\xff"]),
        )
        for index in range(6000)
    ]


def byte_entries() -> list[Entry]:
    draw = random.Random(5)
    return [
        Entry(draw.randbytes(draw.choice([0, 1, 7, 300])), 999 + index * 7, None) for index in range(6000)
    ]


def write_folder(objects: Path, entries: list[Entry], json: bool) -> None:
    folder = objects / stream_prefix(STREAM_ID)
    (folder / "segments").mkdir(parents=True)
    for at in range(0, len(entries), SEGMENT_ROWS):
        runs = runs_of(at + 1, entries[at : at + SEGMENT_ROWS], json)
        made = write(folder / "new", runs, json)
        (folder / "new").rename(folder / made.info.key)


def as_bytes(value: str | bytes | bytearray | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else None if value is None else bytes(value)


def read_by_page(library: str, objects: Path) -> list[tuple[int, int, bytes | None, bytes | None]]:
    """What one of the page's readers finds, with the page's printed directory exchanged for the test's."""
    blocks = page_blocks()
    assert f'"{NAME}"' in blocks["xxhash"]
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, about each other
        for block in (blocks["xxhash"], blocks[library]):
            exec(block.replace(PRINTED_OBJECTS, str(objects)), names)
    rows: Iterable[Any] = names["rows"]
    return [(entry, time_ns, as_bytes(key), as_bytes(payload)) for entry, time_ns, key, payload in rows]


@pytest.mark.parametrize("kind", ["json", "bytes"])
@pytest.mark.parametrize("library", ["duckdb", "polars", "pyspark"])
@pytest.mark.usefixtures("spark_in_lima")
def test_the_page_reads_what_was_written(library: str, kind: str, tmp_path: Path) -> None:
    json = kind == "json"
    entries = json_entries() if json else byte_entries()
    write_folder(tmp_path / "objects", entries, json)
    expected = [(number, entry.time_ns, entry.key, entry.payload) for number, entry in enumerate(entries, 1)]
    assert read_by_page(library, tmp_path / "objects") == expected


# -- the same, by way of a server -------------------------------------------------------------------------

Row = tuple[int, int, bytes | None, bytes]


def append_all(http: Wire, entries: list[Entry], content_type: str) -> None:
    assert http.put(NAME, content_type).status == 201
    for entry in entries:
        more = {} if entry.key is None else {"stream_key": entry.key.decode("latin-1")}
        answer = http.post(NAME, content_type, entry.payload, stream_timestamp=str(entry.time_ns), **more)
        assert answer.status == 204, answer
    assert http.post(NAME, content_type, stream_closed="true").status == 204
    while (answer := http.call("POST", f"/v1/server/_seal?stream={NAME}")).status == 202:
        pass
    assert answer.json == {"sealed": True}


def http_rows(http: Wire) -> list[Row]:
    """Every entry as HTTP tells it; offsets are checked on the way, and so are plain pages."""
    rows: list[Row] = []
    offset = "-1"
    while True:
        page = http.get(f"{NAME}?offset={offset}&format=arrow")
        assert page.status == 200, page
        read = pyarrow.ipc.open_stream(page.body).read_all().to_pylist()
        for row in read:
            time_ns = int(row["append_time"].timestamp() * 1_000_000 + 0.5) * 1000 + row["append_ns"]
            rows.append((row["entry"], time_ns, as_bytes(row["key"]), as_bytes(row["payload"]) or b""))
        offset = page["stream-next-offset"]
        assert offset == encode_offset(0, rows[-1][0])
        if page.get("stream-up-to-date") == "true":
            return rows


def http_payloads(http: Wire, query: str = "") -> bytes:
    """What plain pages give, joined as their entries are within a page."""
    bodies: list[bytes] = []
    json, offset = False, "-1"
    while True:
        page = http.get(f"{NAME}?offset={offset}{query}")
        assert page.status == 200, page
        json = page["content-type"] == "application/json"
        bodies += [page.body[1:-1] if json else page.body]
        offset = page["stream-next-offset"]
        if page.get("stream-up-to-date") == "true":
            return (b"," if json else b"").join(body for body in bodies if body)


def appended(kind: str) -> list[Entry]:
    draw = random.Random(6)
    start_ns = 1_790_000_000_000_000_001
    keys = [None, b"a", b"b", b"key with spaces"]
    texts = ["plain", "ünïcödé", "\u2028 \U0001f600", 'quotes " and \\', "", "x" * 3000]
    made: list[Entry] = []
    for index in range(120):
        payload = (
            b' {"n" : %d, "text":%s }' % (index, orjson.dumps(draw.choice(texts)))
            if kind == "json"
            else draw.randbytes(draw.choice([1, 7, 300]))
        )
        made.append(Entry(payload, start_ns + index * 1_000_003, draw.choice(keys)))
    return made


@pytest.mark.parametrize("kind", ["json", "bytes"])
@pytest.mark.usefixtures("spark_in_lima")
def test_the_readers_find_what_http_answers(start_server: StartServer, kind: str) -> None:
    server = start_server(env={"TAILRACE_SEAL_ENTRIES": "25", "TAILRACE_READ_PAGE_ENTRIES": "40"})
    http = Wire(server.port)
    entries = appended(kind)
    append_all(http, entries, "application/json" if kind == "json" else "application/octet-stream")
    shown = http_rows(http)
    assert [(row[1], row[2]) for row in shown] == [(entry.time_ns, entry.key) for entry in entries]
    if kind == "bytes":
        assert [row[3] for row in shown] == [entry.payload for entry in entries]
    glue = b"," if kind == "json" else b""
    assert http_payloads(http) == glue.join(row[3] for row in shown)
    for key in {entry.key for entry in entries if entry.key}:
        of_key = glue.join(row[3] for row in shown if row[2] == key)
        assert http_payloads(http, f"&key={quote(key)}") == of_key
    http.close()
    server.stop()
    objects = server.data_dir / "objects"
    for library in ("duckdb", "polars", "pyspark"):
        assert read_by_page(library, objects) == shown, library


def test_the_page_shows_three_readers() -> None:
    assert list(page_blocks()) == ["xxhash", "duckdb", "polars", "pyspark"]
