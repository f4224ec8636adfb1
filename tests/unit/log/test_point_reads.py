"""Entries that lie far apart: read from wherever they are, and kept within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.log_harness import LogHarness
from support.log_model import Append
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.history import MissingBlock, StoredSegment
from tailrace.log.model import Block, Stream
from tailrace.log.reader import PointReader
from tailrace.log.records import Trim

JSON = "application/json"
SEGMENT_ROWS = 5
SEALED, STORED, ALL = 20, 26, 30  # the last entries of segments, of the hot store, and of memory


class Layered:
    """A stream in segments, in blocks of the hot store, and in memory."""

    def __init__(self, directory: Path) -> None:
        limits = Limits(
            journal_file_bytes=65_536, block_cache_bytes=0, seal_entries=SEGMENT_ROWS, seal_bytes=100_000
        )
        self.log = LogHarness(directory, limits)
        self.directory = directory
        self.log.create("s", JSON, (None, None), Append([], JSON), None)
        self.append(1, SEALED)
        self.fold("1")
        self.log.seal(self.stream)
        self.append(SEALED + 1, STORED)
        self.fold("2")
        self.append(STORED + 1, ALL)
        assert (self.stream.sealed, self.stream.stored, self.stream.visible) == (SEALED, STORED, ALL)

    @property
    def stream(self) -> Stream:
        found = self.log.find("s")
        assert found is not None
        return found

    def append(self, first: int, last: int) -> None:
        rows = [payload(entry) for entry in range(first, last + 1)]
        assert self.log.append("s", Append(rows, JSON)).code is None
        self.log.settle()

    def fold(self, turn: str) -> None:
        self.log.log.retire_active_file()
        self.log.put_meta("turn", turn.encode())
        while self.log.retired:
            self.log.checkpoint(tell=True)

    def reader(self, bytes_max: int = 1 << 20) -> PointReader:
        return PointReader(self.log.log.reader, bytes_max)

    def read(self, reader: PointReader, entries: Sequence[int]) -> None:
        found = self.log.run(reader.payloads(self.stream, entries))
        assert found == {entry: payload(entry) for entry in entries}

    def lose_segments(self) -> None:
        for path in self.directory.rglob("*.parquet"):
            path.unlink()


def payload(entry: int) -> bytes:
    return b'{"n":%d,"text":"%s"}' % (entry, b"x" * entry)


@pytest.fixture
def layered(tmp_path: Path) -> Iterator[Layered]:
    made = Layered(tmp_path)
    yield made
    made.log.close()


def test_entries_come_from_wherever_they_are(layered: Layered) -> None:
    reader = layered.reader()
    layered.read(reader, [30, 3, 21, 17, 1, 5, 6, 20, 26, 27])
    layered.read(reader, range(1, ALL + 1))
    layered.read(reader, [])


def test_what_was_read_stays_until_memory_is_short(layered: Layered) -> None:
    reader = layered.reader()
    layered.read(reader, [3, 17])
    assert reader.bytes > 0
    layered.lose_segments()
    layered.read(reader, [17, 3, 22, 30])
    reader.evict_all()
    assert reader.bytes == 0
    with pytest.raises(TailraceError, match="damaged"):
        layered.read(reader, [17])


def test_what_was_not_asked_for_longest_goes_first(layered: Layered) -> None:
    reader = layered.reader(bytes_max=3 * (len(payload(9)) + 200))
    for entry in (1, 3, 1, 5, 7):
        layered.read(reader, [entry])
    assert reader.bytes <= 3 * (len(payload(9)) + 200)
    layered.lose_segments()
    layered.read(reader, [1, 5, 7])
    with pytest.raises(TailraceError, match="damaged"):
        layered.read(reader, [3])


def test_what_was_taken_away_meanwhile_is_gone(layered: Layered) -> None:
    number = layered.stream.number

    async def trim() -> None:
        layered.log.log.record_objects(Trim(number, 2 * SEGMENT_ROWS))
        await layered.log.log.committer.drain()

    reader = layered.reader()
    layered.log.run(trim())
    layered.fold("3")
    layered.lose_segments()
    with pytest.raises(TailraceError) as raised:
        layered.read(reader, [3, 30])
    assert raised.value.code == "offset_gone"


def test_readers_of_the_same_block_share_one_read_of_the_hot_store(layered: Layered) -> None:
    history, stream = layered.log.log.reader.history, layered.stream
    looked: list[int] = []
    look = history.read_local

    def counted(missing: MissingBlock, bytes_max: int) -> list[Block] | StoredSegment:
        looked.append(missing.entry)
        return look(missing, bytes_max)

    async def read() -> bytes:
        page = await layered.log.log.reader.read(stream, SEALED, 1 << 20, 2, apart=True)
        return b"".join(map(bytes, page.parts))

    async def together() -> tuple[list[bytes], int]:
        readers = [asyncio.create_task(read()) for _ in range(8)]
        await asyncio.sleep(0)
        busy = history.fetching
        readers[0].cancel()  # the one that began the read
        return await asyncio.gather(*readers[1:]), busy

    history.read_local = counted
    found, busy = layered.log.run(together())
    assert set(found) == {payload(SEALED + 1) + payload(SEALED + 2)}
    assert (len(looked), busy, history.joined, history.fetching) == (1, 1, 7, 0)
