"""Large companions: no more of them is fetched than what is asked for, and nothing is read unchecked."""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.aggregate_model import rollup_view
from support.buckets import overwrite
from support.companions import STREAM_ID, Stored, build, plan_of
from support.queries import payload_of
from support.s3 import S3Server
from tailrace.common.limits import Limits
from tailrace.search.index_files import file_cache as bodies
from tailrace.search.index_files.file_cache import (
    FileContent,
    IndexFileCache,
    IndexFileRef,
    LoadedContent,
    OpenedFile,
    UnusableFileError,
    join_ranges,
    split_by_size,
)
from tailrace.search.index_files.format import FTS
from tailrace.search.index_files.full_text import FullTextFile
from tailrace.search.index_files.parquet_file import ParquetFile
from tailrace.spark.index.file_writer import IndexFileWriter
from tailrace.storage.object_store.cache import LoopTasks, ObjectCache
from tailrace.storage.object_store.interface import open_object_store
from tailrace.storage.segments.model import stream_prefix

T = TypeVar("T")
KEY = stream_prefix(STREAM_ID) + "companions/0/col/file"
CACHE_BYTES = 64 << 20
GROUPS, ROWS = 6, 2048


def _written(tables: list[pa.Table]) -> bytes:
    with IndexFileWriter(tables[0].schema, {"tailrace.family": "col"}) as writer:
        for table in tables:
            writer.write(table)
        return writer.finish()


def _tables() -> list[pa.Table]:
    """Two narrow columns and a wide one between them, which is most of the file."""
    generator = random.Random(7)
    return [
        pa.table(
            {
                "a": pa.array(range(group * ROWS, (group + 1) * ROWS), pa.int64()),
                "wide": pa.array([generator.randbytes(300) for _ in range(ROWS)], pa.binary()),
                "b": pa.array([[generator.randrange(9)] for _ in range(ROWS)], pa.list_(pa.int64())),
            }
        )
        for group in range(GROUPS)
    ]


TABLES = _tables()
DATA = _written(TABLES)


class Place(NamedTuple):
    """An object store, and a cache for what is fetched from it."""

    url: str
    cache_dir: Path

    def put(self, data: bytes, key: str = KEY) -> IndexFileRef:
        async def create() -> None:
            objects = open_object_store(self.url)
            try:
                await overwrite(objects, key, data)
            finally:
                await objects.close()

        asyncio.run(create())
        return IndexFileRef(key, STREAM_ID, len(data), hashlib.sha256(data).hexdigest())

    def run(
        self, work: Callable[[IndexFileCache, ObjectCache], Awaitable[T]], whole_bytes_max: int = 512 << 10
    ) -> T:
        """Do something with a file cache of its own, as a server would after a restart."""

        async def running() -> T:
            loop = asyncio.get_running_loop()
            fetching, reading = LoopTasks(loop, 2), LoopTasks(loop, 2)
            parts = ObjectCache(self.url, self.cache_dir, CACHE_BYTES, Limits(), fetching)
            try:
                files = IndexFileCache(parts, fetching, reading, whole_bytes_max=whole_bytes_max)
                return await work(files, parts)
            finally:
                await reading.end()
                await fetching.end()
                await parts.close()

        return asyncio.run(running())


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return _bucket(request, tmp_path, monkeypatch) if request.param == "s3" else _directory(tmp_path)


@pytest.fixture
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return _bucket(request, tmp_path, monkeypatch)


def _directory(tmp_path: Path) -> Place:
    return Place((tmp_path / "store").as_uri(), tmp_path / "cache")


def _bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    s3 = cast("S3Server", request.getfixturevalue("s3"))
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    return Place(s3.url(f"companion-parts/{secrets.token_hex(8)}"), tmp_path / "cache")


def test_lexicons_have_a_cache_of_their_own(bucket: Place) -> None:
    """Large companions do not push them out, and they take no room from those."""
    folder = stream_prefix(STREAM_ID) + "companions/0/"
    lexicons_put = [bucket.put(DATA, f"{folder}routing_key_lexicon/{number}") for number in range(3)]
    others_put = [bucket.put(DATA, f"{folder}col/{number}") for number in range(2)]
    size = len(DATA)

    async def read_all() -> tuple[list[int], list[int]]:
        loop = asyncio.get_running_loop()
        fetching, reading = LoopTasks(loop, 2), LoopTasks(loop, 2)
        parts, lexicons = (
            ObjectCache(bucket.url, bucket.cache_dir.with_name(name), held, Limits(), fetching)
            for name, held in (("companions", size), ("lexicons", 2 * size))
        )
        files = IndexFileCache(parts, fetching, reading, lexicons=lexicons, whole_bytes_max=size)
        seen: list[int] = []
        try:
            for published in (*lexicons_put, *others_put):
                assert await files.open(published, ParquetFile) is not None
                wanted = published.part(0, size)
                while parts.find(*wanted) is None and lexicons.find(*wanted) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)  # it is on its way into the cache
                seen.append(lexicons.cached_bytes)
            return seen, [parts.cached_bytes, lexicons.cached_bytes]
        finally:
            await reading.end()
            await fetching.end()
            await parts.close()
            await lexicons.close()

    seen, at_last = asyncio.run(read_all())
    assert seen == [size, 2 * size, 2 * size, 2 * size, 2 * size], "never more than it may hold"
    assert at_last == [size, 2 * size]


async def _opened(files: IndexFileCache, published: IndexFileRef) -> ParquetFile:
    found = await files.open(published, ParquetFile)
    assert isinstance(found, ParquetFile)
    return found


def _whole(name: str) -> pa.ChunkedArray:
    return pa.concat_tables(TABLES).column(name)


def test_only_what_is_wanted_is_fetched(place: Place) -> None:
    published = place.put(DATA)

    async def read(files: IndexFileCache, parts: ObjectCache) -> None:
        file = await _opened(files, published)
        group = await files.on_thread(file.group, 3, ("a",))
        assert group.column("a").combine_chunks() == TABLES[3].column("a").combine_chunks()
        assert parts.fetches == 2  # the end of the file, and the column
        column = await files.on_thread(file.read, ("b",))
        assert column.column("b").to_pylist() == _whole("b").to_pylist()
        assert parts.fetched_bytes < len(DATA) / 2
        assert file.memory_bytes < len(DATA) / 4
        wide = await files.on_thread(file.read, ("wide", "a"))
        assert wide.column("wide").to_pylist() == _whole("wide").to_pylist()

    place.run(read)


def test_near_row_groups_come_with_one_request(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    published = place.put(DATA)

    async def read(files: IndexFileCache, parts: ObjectCache) -> int:
        file = await _opened(files, published)
        before = parts.fetches
        found = await files.on_thread(lambda: list(file.tables(range(GROUPS), ("wide",))))
        assert [table.column("wide").to_pylist() for table in found] == [
            table.column("wide").to_pylist() for table in TABLES
        ]
        return parts.fetches - before

    assert place.run(read) == 1
    # Those that are too many for one turn are fetched one after the other.
    monkeypatch.setattr(bodies, "BATCH_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(bodies, "FETCH_BYTES_MAX", 1 << 20)
    uncached = place._replace(cache_dir=place.cache_dir.with_name("other"))
    assert uncached.run(read) == GROUPS


def test_the_cache_is_only_a_shortcut(bucket: Place) -> None:
    published = bucket.put(DATA)

    async def read(files: IndexFileCache, parts: ObjectCache) -> int:
        file = await _opened(files, published)
        found = await files.on_thread(file.read, ("a", "b"))
        assert found.column("a").to_pylist() == _whole("a").to_pylist()
        assert found.column("b").to_pylist() == _whole("b").to_pylist()
        return parts.fetches

    assert bucket.run(read) > 0
    assert bucket.run(read) == 0
    for path in bucket.cache_dir.iterdir():
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        raw[-20] ^= 1
        path.write_bytes(raw)
    assert bucket.run(read) > 0


def test_a_damaged_part_is_never_read(place: Place) -> None:
    group = pq.ParquetFile(pa.BufferReader(DATA)).metadata.row_group(2)
    damaged = bytearray(DATA)
    damaged[group.column(1).data_page_offset + 1000] ^= 1
    published = place.put(bytes(damaged))._replace(sha256=hashlib.sha256(DATA).hexdigest())

    async def read(files: IndexFileCache, parts: ObjectCache) -> None:
        file = await _opened(files, published)
        assert (await files.on_thread(file.group, 5, ("wide",))).num_rows == ROWS
        assert files.get(published) is file
        with pytest.raises(UnusableFileError, match="checksum"):
            await files.on_thread(file.group, 2, ("wide",))
        # Nobody tries again for a while.
        assert files.get(published) is None
        assert not files.can_retry(published)
        assert (files.counts.unusable, files.bytes) == (1, 0)

    place.run(read)


@pytest.mark.parametrize("at", [-9, -200, -2])
def test_a_damaged_footer_is_never_parsed(place: Place, at: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= 1
    published = place.put(bytes(damaged))

    async def read(files: IndexFileCache, parts: ObjectCache) -> None:
        assert await files.open(published, ParquetFile) is None
        assert files.counts.unusable == 1

    place.run(read)


def test_an_object_that_is_gone_is_left_alone(place: Place) -> None:
    published = place.put(DATA)

    async def read(files: IndexFileCache, parts: ObjectCache) -> None:
        file = await _opened(files, published)
        objects = await parts.opened()
        await objects.delete([KEY])
        with pytest.raises(UnusableFileError, match="cannot be fetched"):
            await files.on_thread(file.group, 0, ("wide",))
        assert not files.can_retry(published)
        assert await files.open(published._replace(key=KEY + "2"), ParquetFile) is None
        assert files.counts.unusable == 2

    place.run(read)


def test_a_file_without_checksums_is_fetched_whole(place: Place) -> None:
    """As all were that versions before this one wrote."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.concat_tables(TABLES), sink, row_group_size=ROWS)
    data = sink.getvalue().to_pybytes()
    published = place.put(data)

    async def read(files: IndexFileCache, parts: ObjectCache) -> None:
        file = await _opened(files, published)
        assert parts.fetched_bytes >= len(data)
        found = await files.on_thread(file.group, 1, ("a",))
        assert found.column("a").to_pylist() == TABLES[1].column("a").to_pylist()
        assert file.memory_bytes >= len(data)

    place.run(read)


def test_a_small_file_is_fetched_whole(place: Place) -> None:
    published = place.put(DATA)

    async def read(files: IndexFileCache, parts: ObjectCache) -> None:
        await _opened(files, published)
        assert (parts.fetches, parts.fetched_bytes) == (1, len(DATA))

    place.run(read, whole_bytes_max=len(DATA))


def test_a_long_footer_is_fetched_with_a_second_request(place: Place) -> None:
    table = pa.table({f"column {number}": pa.array([number], pa.int64()) for number in range(600)})
    data = _written([table, table])
    published = place.put(data)

    async def read(files: IndexFileCache, parts: ObjectCache) -> None:
        file = await _opened(files, published)
        assert parts.fetches == 2
        found = await files.on_thread(file.read, ("column 599",))
        assert found.column("column 599").to_pylist() == [599, 599]

    place.run(read, whole_bytes_max=0)


def test_an_empty_file_has_nothing_to_fetch(place: Place) -> None:
    with IndexFileWriter(TABLES[0].schema, {}) as writer:
        published = place.put(writer.finish())

    async def read(files: IndexFileCache, parts: ObjectCache) -> None:
        file = await _opened(files, published)
        assert (await files.on_thread(file.read, ("a", "b"))).num_rows == 0

    place.run(read, whole_bytes_max=0)


def test_a_split_is_read_by_parts(place: Place) -> None:
    rows = [
        Stored(number, payload_of({"message": f"the {number} quick brown fox {number % 5}", "note": "word"}))
        for number in range(1, 200)
    ]
    data = build(rows, plan_of(rollup_view(None).registry), families=[FTS])[FTS].data
    published = place.put(data)
    whole = FullTextFile(LoadedContent(data), STREAM_ID, 1, 199)

    def opened(body: FileContent) -> OpenedFile:
        return FullTextFile(body, STREAM_ID, 1, 199)

    def asked(split: FullTextFile) -> list[Any]:
        found: list[Any] = []
        for field, text in sorted(split.texts.items()):
            found += [split.postings(field, token).entries.tolist() for token in ("quick", "3", "none")]
            found += [split.starting_with(field, "1").tolist(), split.lengths(field).tolist()]
            found.append(split.phrase(field, ["brown", "fox"]).tolist() if text.positions else None)
        return found

    async def read(files: IndexFileCache, parts: ObjectCache) -> None:
        split = await files.open(published, opened)
        assert isinstance(split, FullTextFile)
        assert split.memory_bytes < whole.memory_bytes
        assert await files.on_thread(asked, split) == asked(whole)

    place.run(read, whole_bytes_max=0)


RANGES = st.lists(
    st.tuples(st.integers(0, 1 << 26), st.integers(1, 1 << 23)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=20,
)


@given(RANGES)
def test_near_ranges_are_joined(ranges: list[tuple[int, int]]) -> None:
    found = join_ranges(ranges)
    assert all(one[1] <= other[0] for one, other in pairwise(found))
    assert all(any(begin <= start and stop <= end for begin, end in found) for start, stop in ranges)
    # Beyond what lies in two of them at once, no more is fetched than the gaps that are allowed.
    wanted = sum(stop - start for start, stop in ranges)
    assert sum(end - begin for begin, end in found) <= wanted + bodies.GAP_BYTES_MAX * len(ranges)


@given(st.lists(st.integers(0, 1 << 25), max_size=20))
def test_turns_are_bounded(sizes: list[int]) -> None:
    found = split_by_size(sizes)
    assert [place for turn in found for place in turn] == list(range(len(sizes)))
    for turn in found:
        assert len(turn) == 1 or sum(sizes[place] for place in turn) <= bodies.BATCH_BYTES_MAX


def test_who_waits_for_bytes_goes_on_when_the_server_ends() -> None:
    begun = threading.Event()

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        work, reading = LoopTasks(loop, 1), LoopTasks(loop, 1)

        def wait() -> str:
            try:
                work.wait(never, 60)
            except CancelledError:
                return "cancelled"
            return "done"

        waiting = asyncio.ensure_future(reading.on_thread(wait))
        await loop.run_in_executor(None, begun.wait)
        await work.end()
        assert await waiting == "cancelled"
        assert await reading.on_thread(wait) == "cancelled"  # nothing is begun any more
        await reading.end()

    asyncio.run(main())
