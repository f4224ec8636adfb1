"""Look-ups by value: filters spare decoding what a value cannot be in, and never hide one."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.buckets import overwrite
from support.companions import STREAM_ID
from tailrace.common.limits import Limits
from tailrace.search.index_files.file_cache import (
    FileContent,
    IndexFileCache,
    IndexFileRef,
    LoadedContent,
    UnusableFileError,
)
from tailrace.search.index_files.lookup_files import FILTERED_ROWS_MIN, ExactFile
from tailrace.search.index_files.parquet_file import ParquetFile
from tailrace.spark.index.exact import EXACT_SCHEMA, write_exact
from tailrace.storage.object_store.cache import LoopTasks, ObjectCache
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.segments.model import stream_prefix

KEY = stream_prefix(STREAM_ID) + "companions/0/exact/file"
IDS = 3 * FILTERED_ROWS_MIN


def value(number: int) -> bytes:
    return b"req_%08d" % (number * 7919 % 10_000_000)


def tables() -> Iterator[Any]:
    """A field with a value for every entry, and one with few values."""
    by_value = sorted((value(number), [number]) for number in range(1, IDS + 1))
    levels = [(b"error", list(range(1, IDS + 1, 2))), (b"info", list(range(2, IDS + 1, 2)))]
    for field, rows in (("id", by_value), ("level", levels)):
        columns = [[field] * len(rows), [one for one, _ in rows], [entries for _, entries in rows]]
        yield pa.table(columns, schema=EXACT_SCHEMA)


DATA = write_exact(tables(), {"tailrace.family": "exact"})


class Counting(ParquetFile):
    """Says which row groups were decoded."""

    def __init__(self, body: FileContent) -> None:
        super().__init__(body)
        self.decoded: list[int] = []

    def tables(self, groups: Any, columns: Any) -> Iterator[Any]:
        self.decoded += groups
        return super().tables(groups, columns)


def test_what_is_there_is_found_and_what_is_not_is_mostly_not_looked_for() -> None:
    file = Counting(LoadedContent(DATA))
    exact = ExactFile(file)
    before = exact.memory_bytes
    for number in range(1, IDS + 1, 37):
        assert exact.entries("id", value(number)).tolist() == [number]
    file.decoded.clear()
    strange = [b"req_%08d!" % (number * 7919 % 10_000_000) for number in range(1, 1000)]
    assert not any(len(exact.entries("id", one)) for one in strange)
    assert len(file.decoded) < 100
    assert exact.memory_bytes > before


def test_what_a_file_lacks_is_known_without_reading_once_its_filters_are_there() -> None:
    file = Counting(LoadedContent(DATA))
    exact = ExactFile(file)
    assert exact.lacks("id", b"a")  # beyond all bounds
    assert not exact.lacks("id", value(7) + b"!")
    assert exact.lacks("nothing", b"a")
    assert exact.entries("id", value(1)).tolist() == [1]
    file.decoded.clear()
    assert not any(exact.lacks("id", value(number)) for number in range(1, IDS + 1))
    strange = [b"req_%08d!" % (number * 7919 % 10_000_000) for number in range(1, 1000)]
    assert sum(exact.lacks("id", one) for one in strange) > 900
    assert not file.decoded


def test_short_row_groups_are_decoded_at_once() -> None:
    file = Counting(LoadedContent(DATA))
    exact = ExactFile(file)
    assert exact.entries("level", b"error").tolist() == list(range(1, IDS + 1, 2))
    assert not len(exact.entries("level", b"fatal"))
    assert file.filters([0], "value")[0] is not None


@pytest.mark.parametrize("damaged", [False, True])
def test_filters_of_a_file_that_is_read_by_parts_are_checked(tmp_path: Path, damaged: bool) -> None:
    metadata = pq.ParquetFile(pa.BufferReader(DATA)).metadata
    data = bytearray(DATA)
    if damaged:
        data[metadata.row_group(0).column(1).bloom_filter_offset + 40] ^= 0xFF
    published = IndexFileRef(KEY, STREAM_ID, len(data), hashlib.sha256(data).hexdigest())

    async def look() -> list[int]:
        objects = open_object_store((tmp_path / "store").as_uri())
        await overwrite(objects, KEY, bytes(data))
        await objects.close()
        loop = asyncio.get_running_loop()
        fetching, reading = LoopTasks(loop, 2), LoopTasks(loop, 2)
        parts = ObjectCache((tmp_path / "store").as_uri(), tmp_path / "cache", 1 << 20, Limits(), fetching)
        try:
            shelf = IndexFileCache(parts, fetching, reading, whole_bytes_max=1024)
            exact = await shelf.open(published, lambda body: ExactFile(ParquetFile(body)))
            assert isinstance(exact, ExactFile)
            found: Any = await shelf.on_thread(exact.entries, "id", value(5))
            return list(np.asarray(found).tolist())
        finally:
            await reading.end()
            await fetching.end()
            await parts.close()

    if damaged:
        with pytest.raises(UnusableFileError, match="checksum"):
            asyncio.run(look())
    else:
        assert asyncio.run(look()) == [5]
