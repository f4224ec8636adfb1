"""Retention takes segments away while a search or an aggregate is looking at them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from support.aggregate_model import rollup_view
from support.log_harness import LogHarness
from support.log_model import Append
from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.log.reader import Page, Reader
from tailrace.log.records import Trim
from tailrace.search.aggregates.run import Aggregator
from tailrace.search.requests import SearchParameters, bind_aggregate, bind_search, parse_aggregate
from tailrace.search.run import Searcher
from tailrace.search.tail_index import TailIndex
from tailrace.storage.segments.model import SegmentInfo

JSON = "application/json"
FAR_S = 600.0
SEGMENT_ROWS = 5
ROWS = 4 * SEGMENT_ROWS
NOON = 1767225600000
VIEW = rollup_view()


class InterruptedReader(Reader):
    """The reader of a log; before one of its reads something else happens."""

    def __init__(self, reader: Reader, at: int, interrupt: Callable[[], Awaitable[None]]) -> None:
        self.__dict__ = reader.__dict__
        self.__at = at
        self.__interrupt = interrupt

    async def read(self, *arguments: Any, **named: Any) -> Page:
        self.__at -= 1
        if self.__at == 0:
            await self.__interrupt()
        return await super().read(*arguments, **named)


class Trimmed:
    """A sealed stream that is searched by scans alone."""

    def __init__(self, directory: Path) -> None:
        limits = Limits(
            journal_file_bytes=65_536, block_cache_bytes=0, seal_entries=SEGMENT_ROWS, seal_bytes=100_000
        )
        self.log = LogHarness(directory, limits)
        self.directory = directory
        self.threads = ThreadPoolExecutor(2)
        self.log.create("s", JSON, (None, None), Append([], JSON), None)
        rows = [orjson.dumps({"id": "x", "at": NOON, "ratio": 1}) for _ in range(ROWS)]
        assert self.log.append("s", Append(rows, JSON)).code is None
        self.log.settle()
        self.fold("1")
        self.log.seal(self.stream)
        assert self.stream.sealed == ROWS
        self.fold("2")  # what is sealed leaves the hot store

    def fold(self, turn: str) -> None:
        self.log.log.retire_active_file()
        self.log.put_meta("turn", turn.encode())
        while self.log.retired:
            self.log.checkpoint(tell=True)

    @property
    def stream(self) -> Stream:
        found = self.log.find("s")
        assert found is not None
        return found

    def segments(self, number: int) -> list[SegmentInfo]:
        decoder = msgspec.msgpack.Decoder(SegmentInfo)
        return [decoder.decode(info) for info in self.log.log.store.db.cold.infos_from(number, 1)]

    def searcher(self, reads: int) -> Searcher:
        """One whose read with this number comes after the two oldest segments have gone."""
        stream = self.stream

        async def trim() -> None:
            self.log.log.record_objects(Trim(stream.number, 2 * SEGMENT_ROWS))
            await self.log.log.committer.drain()
            for gone in sorted(self.directory.rglob("*.parquet"))[:2]:
                gone.unlink()  # the sweep that follows

        reader = InterruptedReader(self.log.log.reader, reads, trim)
        tail = self.log.call(TailIndex, self.log.log.reader, 0, self.threads, 4)
        searcher = Searcher(reader, tail, self.threads, self.segments, 10_000)
        searcher.scan_rows = 3  # some stretches lie across the place of the cut
        return searcher


@pytest.fixture
def trimmed(tmp_path: Path) -> Iterator[Trimmed]:
    made = Trimmed(tmp_path)
    yield made
    made.threads.shutdown()
    made.log.close()


# Reads go from the newest rows to the oldest, or the other way round.
@pytest.mark.parametrize("sort", ["offset:desc", "offset:asc"])
@pytest.mark.parametrize("reads", [1, 2, 3, 4, 5, 6, 7])
def test_a_trim_in_the_midst_of_a_search_drops_only_what_was_trimmed(
    trimmed: Trimmed, reads: int, sort: str
) -> None:
    searcher = trimmed.searcher(reads)
    request = bind_search(SearchParameters("id:x", 100, [sort], None, None), VIEW.config, 3000)
    stream = trimmed.stream
    outcome = trimmed.log.run(searcher.search(stream, VIEW, request, time.monotonic() + FAR_S))
    trimmed.log.settle()
    assert trimmed.stream.earliest == 2 * SEGMENT_ROWS
    found = [hit.entry for hit in outcome.hits]
    kept = set(range(2 * SEGMENT_ROWS + 1, ROWS + 1))
    assert kept <= set(found) <= set(range(1, ROWS + 1))
    assert found == sorted(found, reverse=sort.endswith("desc"))
    assert outcome.complete
    assert outcome.matches == len(found)


@pytest.mark.parametrize("reads", [1, 3, 6])
def test_a_trim_in_the_midst_of_an_aggregate_drops_only_what_was_trimmed(
    trimmed: Trimmed, reads: int
) -> None:
    aggregator = Aggregator(trimmed.searcher(reads))
    body = {"rollup": "all", "from": NOON, "to": NOON + 1000, "interval": "1s", "measures": ["n"]}
    request = bind_aggregate(parse_aggregate(body), VIEW.config)
    answer = trimmed.log.run(aggregator.aggregate(trimmed.stream, VIEW, request, time.monotonic() + FAR_S))
    trimmed.log.settle()
    shown = orjson.loads(answer)
    assert shown["coverage"]["complete"]
    (bucket,) = shown["buckets"]
    assert 2 * SEGMENT_ROWS <= bucket["groups"][0]["measures"]["n"]["count"] <= ROWS
