"""docs/open-format.md, executed: other engines read a stream's segments, byte for byte what was written."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.segments import NAME, STREAM_ID, Entry, runs_of, write
from tailrace.store.segments import stream_prefix

ROOT = Path(__file__).resolve().parents[2]
PRINTED_OBJECTS = "tailrace-data/objects"
SEGMENT_ROWS = 2500


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """The one session of this file, small; the page's `getOrCreate` finds it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pyspark.sql import SparkSession

        session = (
            SparkSession.builder.master("local[1]")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "1")
            .config("spark.driver.memory", "512m")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.session.timeZone", "America/Lima")  # an engine's zone must not matter
            .getOrCreate()
        )
        yield session
        session.stop()


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
@pytest.mark.usefixtures("spark")
def test_the_page_reads_what_was_written(library: str, kind: str, tmp_path: Path) -> None:
    json = kind == "json"
    entries = json_entries() if json else byte_entries()
    write_folder(tmp_path / "objects", entries, json)
    expected = [(number, entry.time_ns, entry.key, entry.payload) for number, entry in enumerate(entries, 1)]
    assert read_by_page(library, tmp_path / "objects") == expected


def test_the_page_shows_three_readers() -> None:
    assert list(page_blocks()) == ["xxhash", "duckdb", "polars", "pyspark"]
