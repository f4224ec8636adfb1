"""Cold reads: one fetch for everybody, a cache that is only ever a shortcut, and errors with a name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import pytest

from support.http_app import until
from support.ports import free_port
from support.segments import STREAM_ID, Entry, entries_of, runs_of, write
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.storage.object_store import cache as object_parts
from tailrace.storage.object_store.interface import ObjectStore, open_object_store
from tailrace.storage.segments import cold_reader
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.segments.model import SegmentInfo, SegmentRows, stream_prefix
from tailrace.storage.segments.reader import Footer

T = TypeVar("T")
PREFIX = stream_prefix(STREAM_ID)
CACHE_BYTES = 64 << 20


class Stored(NamedTuple):
    """One segment on an object store, and what the server would know of it."""

    url: str
    cache_dir: Path
    info: SegmentInfo
    footer: bytes
    entries: list[Entry]

    @property
    def key(self) -> str:
        return PREFIX + self.info.key

    def groups(self) -> int:
        return Footer(self.footer).count

    def run(self, work: Callable[[ColdReader], Awaitable[T]], cache_bytes: int = CACHE_BYTES) -> T:
        """Do some reading with a reader of its own, as a server would after a restart."""

        async def read() -> T:
            loop = asyncio.get_running_loop()
            reader = ColdReader(self.url, self.cache_dir, cache_bytes, Limits(), loop)
            try:
                return await work(reader)
            finally:
                await reader.close()

        return asyncio.run(read())

    async def rows(
        self, reader: ColdReader, entry: int, bytes_ahead: int = 0, footer: bytes | None = None
    ) -> list[SegmentRows]:
        kept = self.footer if footer is None else footer
        found = await reader.rows(PREFIX, self.info, kept, entry, bytes_ahead)
        assert found[0].first <= entry <= found[0].last
        for rows in found:
            assert entries_of(rows, True) == self.entries[rows.first - 1 : rows.last]
        return found

    async def read_all(self, reader: ColdReader, bytes_ahead: int = 200_000) -> None:
        entry = 1
        while entry <= self.info.last:
            entry = (await self.rows(reader, entry, bytes_ahead))[-1].last + 1


def requests(reader: ColdReader) -> int:
    assert reader.parts.objects is not None
    return reader.parts.objects.requests["range"]


@pytest.fixture(params=["file", "memory"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    name = f"{request.node.name}-{tmp_path.name}".translate(str.maketrans("[]_", "---"))
    url = f"memory://{name}" if request.param == "memory" else f"file://{tmp_path}/objects"
    draw = random.Random(1)
    entries = [
        Entry(b'"%s"' % draw.randbytes(50).hex().encode(), index * 1000, b"%04x" % draw.getrandbits(16))
        for index in range(20_000)
    ]
    path = tmp_path / "segment.parquet"
    made = write(path, runs_of(1, entries, True), True)
    stored = Stored(url, tmp_path / "cache", made.info, made.footer, entries)

    async def put(objects: ObjectStore) -> None:
        await objects.create(stored.key, path.read_bytes())
        await objects.close()

    asyncio.run(put(open_object_store(url)))
    return stored


only_buckets = pytest.mark.parametrize("stored", ["memory"], indirect=True)


def logged_fields(caplog: pytest.LogCaptureFixture) -> str:
    """The fields of all log lines, as text."""
    return " ".join(str(vars(record).get("fields")) for record in caplog.records)


def test_a_page_is_one_ranged_get(stored: Stored) -> None:
    async def read(reader: ColdReader) -> None:
        found = await stored.rows(reader, 5000, 500_000)
        assert 3 <= len(found) <= 5
        assert [rows.first for rows in found[1:]] == [rows.last + 1 for rows in found[:-1]]
        assert requests(reader) == 1
        assert len(await stored.rows(reader, 20_000, 10**9)) == 1

    stored.run(read)


def test_everything_in_order_and_at_random(stored: Stored) -> None:
    async def read(reader: ColdReader) -> None:
        await stored.read_all(reader)
        for entry in random.Random(2).sample(range(1, 20_001), 50):
            await stored.rows(reader, entry)

    stored.run(read)


def test_single_payloads_from_all_over_a_segment(stored: Stored) -> None:
    wanted = random.Random(5).sample(range(1, 20_001), 30)

    async def read(reader: ColdReader) -> int:
        found = await reader.payloads(PREFIX, stored.info, stored.footer, wanted)
        assert found == {entry: stored.entries[entry - 1].payload for entry in wanted}
        assert reader.counts.decoded_groups <= stored.groups()
        return reader.counts.misses

    assert stored.run(read) > 0
    assert (stored.run(read) == 0) == stored.url.startswith("memory"), "buckets have a cache"
    for file in stored.cache_dir.iterdir() if stored.cache_dir.exists() else ():
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert stored.run(read) > 0


def test_readers_at_the_same_place_share_one_fetch_and_one_decoding(stored: Stored) -> None:
    async def read(reader: ColdReader) -> None:
        await asyncio.gather(*(stored.rows(reader, 5000 + number, 300_000) for number in range(50)))
        assert requests(reader) == 1
        assert reader.counts.decoded_groups <= 4
        assert reader.counts.shared >= 49

    stored.run(read)


def test_a_reader_that_leaves_does_not_take_the_others_with_it(stored: Stored) -> None:
    async def read(reader: ColdReader) -> None:
        impatient = asyncio.ensure_future(stored.rows(reader, 5000))
        patient = asyncio.ensure_future(stored.rows(reader, 5000))
        await asyncio.sleep(0)
        impatient.cancel()
        assert len(await patient) == 1
        with pytest.raises(asyncio.CancelledError):
            await impatient

    stored.run(read)


def test_a_footer_that_was_not_kept_is_fetched_once(stored: Stored) -> None:
    async def read(reader: ColdReader) -> None:
        await asyncio.gather(*(stored.rows(reader, 1, footer=b"") for _ in range(5)))
        assert requests(reader) <= 3
        before = requests(reader)
        await stored.rows(reader, 20_000, footer=b"")
        assert requests(reader) <= before + 1

    stored.run(read)


def test_a_kept_footer_that_is_damaged_is_fetched_instead(
    stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = bytearray(stored.footer)
    damaged[len(damaged) // 2] ^= 1

    async def read(reader: ColdReader) -> None:
        await stored.rows(reader, 5000, footer=bytes(damaged))
        await stored.rows(reader, 1, footer=b"nonsense")

    stored.run(read)
    assert "stored footer is damaged" in caplog.text


def test_footers_in_memory_are_bounded(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_reader, "FOOTER_BYTES_MAX", 1)

    async def read(reader: ColdReader) -> None:
        objects = await reader.parts.opened()
        raw, _ = await objects.get(stored.key)
        for number in range(4):
            copy = stored._replace(info=_changed(stored.info, f"segments/{number}.parquet"))
            await objects.create(copy.key, raw)
            await copy.rows(reader, 5000)
            await stored.rows(reader, 5000)
            assert len(reader._footers) == 1

    stored.run(read)


def test_since(stored: Stored) -> None:
    async def read(reader: ColdReader) -> None:
        for since_ns, entry in (
            (-1, 1),
            (0, 1),
            (1, 2),
            (1000, 2),
            (10_000_001, 10_002),
            (1_023_001, 1025),
            (19_999_000, 20_000),
            (19_999_001, 20_001),
            (19_999_999_999, 20_001),
        ):
            assert await reader.first_since(PREFIX, stored.info, stored.footer, since_ns) == entry

    stored.run(read)


def test_a_key_is_looked_for_where_it_can_be(stored: Stored) -> None:
    async def read(reader: ColdReader) -> None:
        for wanted in (stored.entries[0].key, stored.entries[-1].key, b"none"):
            assert wanted is not None
            expected = [number for number, entry in enumerate(stored.entries, 1) if entry.key == wanted]
            found: list[int] = []
            looked_at = 0
            entry = 1
            while entry <= stored.info.last:
                entry = await reader.next_with_key(PREFIX, stored.info, stored.footer, wanted, entry)
                if entry > stored.info.last:
                    break
                (rows,) = await stored.rows(reader, entry)
                looked_at += 1
                assert rows.keys is not None
                found += [rows.first + index for index, key in enumerate(rows.keys) if key == wanted]
                entry = rows.last + 1
            assert found == expected
            assert looked_at < stored.groups() // 2

    stored.run(read)


def test_a_missing_object_is_503_and_is_named_in_the_log(
    stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    gone = stored._replace(info=_changed(stored.info, "segments/gone.parquet"))

    async def read(reader: ColdReader) -> None:
        for footer in (gone.footer, b""):
            with pytest.raises(TailraceError) as refused:
                await gone.rows(reader, 1, footer=footer)
            assert (refused.value.code, refused.value.retry_after_s) == ("unavailable", 5)
        assert reader.counts.corrupt == 2

    gone.run(read)
    assert gone.key in logged_fields(caplog)


def test_a_damaged_object_is_503_and_what_is_whole_can_still_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [Entry(b'"%d"' % index, index) for index in range(3000)]
    path = tmp_path / "segment.parquet"
    made = write(path, runs_of(1, entries, True), True)
    stored = Stored(f"file://{tmp_path}/objects", tmp_path / "cache", made.info, made.footer, entries)
    raw = bytearray(path.read_bytes())
    middle = Footer(made.footer).group(1)
    raw[middle.start + 100] ^= 1
    (tmp_path / "objects" / stored.key).parent.mkdir(parents=True)
    (tmp_path / "objects" / stored.key).write_bytes(raw)

    async def read(reader: ColdReader) -> None:
        with pytest.raises(TailraceError, match="damaged"):
            await stored.rows(reader, 1500)
        with pytest.raises(TailraceError, match="damaged"):
            await stored.rows(reader, 1, 10**9)
        await stored.rows(reader, 1)
        await stored.rows(reader, 3000)
        # A kept footer that belongs to another segment.
        other = _changed(stored.info, "segments/other.parquet", first=2)
        with pytest.raises(TailraceError, match="damaged"):
            await reader.rows(PREFIX, other, stored.footer, 2, 0)

    stored.run(read)
    assert "row group 1 has a wrong checksum" in logged_fields(caplog)


def _changed(info: SegmentInfo, key: str, **changes: int) -> SegmentInfo:
    return msgspec.structs.replace(info, key=key, **changes)


def test_a_store_that_does_not_answer_is_503(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    limits = Limits(object_ms=200, object_try_ms=100, object_tries=2, object_retry_ms=1)

    async def read() -> None:
        reader = ColdReader("s3://bucket", stored.cache_dir, 1, limits, asyncio.get_running_loop())
        readers = [stored.rows(reader, entry) for entry in (1, 2, 20_000)]
        for refused in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(refused, TailraceError)
            assert (refused.code, refused.message) == ("unavailable", "the object store does not respond")
        assert reader.counts.corrupt == 0
        await reader.close()

    asyncio.run(read())


def test_many_readers_that_come_and_go(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping pages, a cache that is too small, a tight budget, and a third of them leave early."""
    monkeypatch.setattr(cold_reader, "LOADING_BYTES_MAX", 400_000)
    monkeypatch.setattr(object_parts, "FETCH_BYTES_MAX", 200_000)
    monkeypatch.setattr(cold_reader, "READ_AHEAD_BYTES", 300_000)

    async def read(reader: ColdReader) -> None:
        draw = random.Random(7)

        async def follow(entry: int) -> None:
            for _ in range(4):
                if entry <= stored.info.last:
                    entry = (await stored.rows(reader, entry, draw.choice([0, 200_000, 600_000])))[
                        -1
                    ].last + 1

        readers = [asyncio.ensure_future(follow(draw.randint(1, 20_000))) for _ in range(60)]
        leaving = draw.sample(readers, 20)
        for one in leaving:
            for _ in range(draw.randrange(20)):
                await asyncio.sleep(0)
            one.cancel()
        ended = await asyncio.gather(*readers, return_exceptions=True)
        for one, result in zip(readers, ended, strict=True):
            assert result is None or (one in leaving and isinstance(result, asyncio.CancelledError))
        await asyncio.gather(*reader._work._tasks)
        assert reader._groups == {}
        assert reader.parts._fetches == {}
        assert reader._budget.held == reader.parts._budget.held == 0

    stored.run(read, 500_000)


# -- the cache ---------------------------------------------------------------------------------------------


@only_buckets
def test_what_was_fetched_is_read_from_disk_the_next_time(stored: Stored) -> None:
    async def read(reader: ColdReader) -> tuple[int, int]:
        await stored.read_all(reader)
        return requests(reader), reader.counts.hits

    fetched, _ = stored.run(read)
    assert fetched == 2, "the first page, and then everything, since this reader goes on"
    assert stored.run(read)[0] == 0, "also after a restart"


def test_a_local_store_is_not_cached(tmp_path: Path) -> None:
    made = write(tmp_path / "segment.parquet", runs_of(1, [Entry(b"1", 1)], True), True)
    stored = Stored(
        f"file://{tmp_path}/objects", tmp_path / "cache", made.info, made.footer, [Entry(b"1", 1)]
    )
    (tmp_path / "objects" / stored.key).parent.mkdir(parents=True)
    (tmp_path / "segment.parquet").rename(tmp_path / "objects" / stored.key)

    async def read(reader: ColdReader) -> None:
        await stored.read_all(reader)
        assert reader.parts.cache is None

    stored.run(read)
    assert not stored.cache_dir.exists()


@only_buckets
def test_a_single_read_fetches_no_more_than_its_row_group(stored: Stored) -> None:
    async def read(reader: ColdReader) -> None:
        await stored.rows(reader, 5000)
        group = Footer(stored.footer).group(4)
        assert reader.parts.fetched_bytes == group.stop - group.start

    stored.run(read)


def _bytes_in(directory: Path) -> int:
    """Of all files; some may be on their way out."""
    size = 0
    for file in directory.iterdir():
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


@only_buckets
def test_the_cache_stays_within_its_bytes(stored: Stored) -> None:
    bytes_max = 300_000

    async def read(reader: ColdReader) -> None:
        for entry in random.Random(3).sample(range(1, 20_001), 60):
            await stored.rows(reader, entry)
        cache = reader.parts.cache
        assert cache is not None
        assert 0 < cache.bytes <= bytes_max
        assert cache.evictions > 0
        # Files of what left the cache are removed on a thread, a moment later.
        await until(lambda: _bytes_in(stored.cache_dir) <= bytes_max)

    stored.run(read, bytes_max)

    async def look(reader: ColdReader) -> None:
        await stored.rows(reader, 1)
        cache = reader.parts.cache
        assert cache is not None
        assert cache.bytes <= 100_000, "a smaller bound holds after a restart"

    stored.run(look, 100_000)


@only_buckets
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "unfinished", "strange", "emptied"])
def test_a_spoilt_cache_is_only_a_miss(stored: Stored, damage: str) -> None:
    async def read(reader: ColdReader) -> None:
        await stored.read_all(reader)

    stored.run(read)

    def spoil(file: Path) -> None:
        if damage == "flipped":
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 1
            file.write_bytes(raw)
        elif damage == "cut":
            file.write_bytes(file.read_bytes()[:-1])
        elif damage == "gone":
            file.unlink()
        elif damage == "unfinished":
            file.rename(file.with_name(file.name + ".new"))
        elif damage == "strange":
            file.rename(file.with_name(f"strange{file.name}"))
        else:
            file.write_bytes(b"")

    for file in list(stored.cache_dir.iterdir()):
        spoil(file)
    stored.run(read)
    assert [found.name for found in stored.cache_dir.iterdir() if found.name.startswith("strange")] == []
    assert [found.name for found in stored.cache_dir.iterdir() if found.name.endswith(".new")] == []

    async def read_around_it(reader: ColdReader) -> None:
        await stored.rows(reader, 1)
        # A part that another thread is still writing has not got its name yet.
        whole = [found for found in stored.cache_dir.iterdir() if not found.name.endswith(".new")]
        for found in whole:
            if damage == "flipped":
                raw = bytearray(found.read_bytes())
                raw[len(raw) // 2] ^= 1
                found.write_bytes(raw)
            else:
                found.unlink()
        await stored.read_all(reader)

    stored.run(read_around_it)
    stored.run(read)


@only_buckets
def test_a_cache_that_cannot_be_written_does_not_stop_reading(
    stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    stored.cache_dir.write_bytes(b"a file in the place of the directory")

    async def read(reader: ColdReader) -> None:
        await stored.read_all(reader)

    stored.run(read)
    assert "cache" in caplog.text
