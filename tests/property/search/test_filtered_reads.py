"""Filtered reads over a real log: what a walk yields is what a list comprehension over the records says."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.log_harness import LogHarness, Pending
from support.log_model import Append
from support.queries import FILTERS, SEARCH_BODY, Question, payload_of, questions, records
from tailrace.common.limits import Limits
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.log.decide import AppendRequest
from tailrace.log.model import Stream
from tailrace.routing.context import Context
from tailrace.schema.registry import Registry, VersionBoundary
from tailrace.schema.search_config import parse_search_config
from tailrace.search.filtered_reads import FilteredReads
from tailrace.search.records import RecordView

JSON = "application/json"
NAMES = (f"s{number}" for number in itertools.count())
LENS = {
    "apiVersion": "durable.lens/v1",
    "schema": "s",
    "from": 1,
    "to": 2,
    "ops": [{"op": "rename", "from": "/other", "to": "/id"}],
}


class Batch(NamedTuple):
    key: bytes | None
    records: list[Any]
    then: str  # what happens to the stream afterwards


class Bounds(NamedTuple):
    page_bytes: int
    page_entries: int
    scan_bytes: int


batches = st.lists(
    st.builds(
        Batch,
        st.sampled_from([None, b"a", b"b"]),
        st.lists(records, min_size=1, max_size=4),
        st.sampled_from(["", "", "", "checkpoint", "seal"]),
    ),
    min_size=1,
    max_size=6,
)
bounds = st.builds(
    Bounds,
    st.sampled_from([1, 40, 2**20]),
    st.sampled_from([1, 2, 10_000]),
    st.sampled_from([1, 60, 300, 100 * 2**20]),
)


class Walk:
    """Filtered reads of one log, with the bounds of the moment."""

    def __init__(self, directory: Path) -> None:
        self.log = LogHarness(directory, Limits(journal_file_bytes=4096, block_cache_bytes=0))

    def fill(self, filled: list[Batch]) -> Stream:
        name = next(NAMES)
        self.log.create(name, JSON, (None, None), Append([], JSON), None)
        for batch in filled:
            payloads = [payload_of(record) for record in batch.records]
            pending = self.log.append(name, Append(payloads, JSON, key=batch.key))
            self.log.settle()
            assert pending.code is None
            if batch.then:
                self._move(name, batch.then)
        stream = self.log.find(name)
        assert stream is not None
        return stream

    def _move(self, name: str, where: str) -> None:
        self.log.log.retire_active_file()
        self.log.create(next(NAMES), JSON, (None, None), Append([], JSON), None)
        self.log.settle()
        while self.log.retired:
            self.log.checkpoint(tell=True)
        stream = self.log.find(name)
        assert stream is not None
        if where == "seal":
            self.log.seal(stream)

    def walk(
        self, stream: Stream, registry: Registry, text: str, key: bytes | None, limit: Bounds, *, inline: bool
    ) -> list[bytes]:
        """Everything that following the offsets yields, from the start to the end."""
        with self.filtered(registry, limit) as filtered:
            return self.log.run(self._walk(filtered, stream, text, key, limit, inline))

    @contextmanager
    def filtered(self, registry: Registry, limit: Bounds) -> Iterator[FilteredReads]:
        context = Context(
            Settings(
                limits=Limits(
                    read_page_bytes=limit.page_bytes,
                    read_page_entries=limit.page_entries,
                    filter_scan_bytes=limit.scan_bytes,
                )
            ),
            self.log.log,
            self.log.clock,
            self.log.loop,
            ServerMetrics(),
            "model",
        )
        filtered = FilteredReads(context, lambda _stream: registry)
        yield filtered
        filtered.close()

    async def _walk(
        self,
        filtered: FilteredReads,
        stream: Stream,
        text: str,
        key: bytes | None,
        limit: Bounds,
        inline: bool,
    ) -> list[bytes]:
        found: list[bytes] = []
        at = 0
        until = asyncio.get_running_loop().time() + 3600
        while at < stream.visible:
            sieve = filtered.begin(stream, text, at, 0)
            if not (inline and filtered.try_scan(stream, sieve, key)):
                await filtered.scan(stream, sieve, key, until)
            assert sieve.decided > at, "every answer makes progress"
            assert sieve.count <= limit.page_entries
            assert sum(map(len, sieve.parts)) <= limit.page_bytes or sieve.count == 1
            assert bool(filtered.limit_lines(sieve, 0)) == (sieve.scanned_bytes >= limit.scan_bytes)
            found += map(bytes, sieve.parts)
            at = sieve.decided
        return found


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    made = Walk(tmp_path)
    yield made
    made.log.close()


def _registry(boundary: int | None) -> Registry:
    """One version, or two with a lens between them that renames what the filter looks at."""
    search = parse_search_config(SEARCH_BODY)
    if boundary is None:
        return Registry(
            name="s", version=1, search=search, boundaries=(VersionBoundary(0, 1),), schemas={1: True}
        )
    return Registry(
        name="s",
        version=2,
        search=search,
        boundaries=(VersionBoundary(0, 1), VersionBoundary(boundary, 2)),
        schemas={1: True, 2: True},
        lenses={1: LENS},
    )


def _expected(batches: list[Batch], registry: Registry, question: Question, key: bytes | None) -> list[bytes]:
    """Matching entries as readers see them, each decided by the plain truth about the question."""
    view = RecordView(registry)
    rows = [(batch.key, payload_of(record)) for batch in batches for record in batch.records]
    return [
        payload
        for entry, (row_key, payload) in enumerate(rows, 1)
        if (key is None or row_key == key) and question.holds(view.record(entry, payload))
    ]


def check_walks(walk: Walk, runs: settings) -> None:
    @runs
    @given(
        batches,
        questions(FILTERS),
        st.sampled_from([None, b"a"]),
        bounds,
        st.booleans(),
        st.one_of(st.none(), st.integers(1, 10)),
    )
    def follow(
        filled: list[Batch],
        question: Question,
        key: bytes | None,
        limit: Bounds,
        inline: bool,
        boundary: int | None,
    ) -> None:
        registry = _registry(boundary)
        stream = walk.fill(filled)
        found = walk.walk(stream, registry, question.text, key, limit, inline=inline)
        expected = _expected(filled, registry, question, key)
        if boundary is None:
            assert found == expected
        else:
            # Promoted entries are written anew; that promotion is right has tests of its own.
            assert len(found) == len(expected)

    follow()


def test_f1_a_walk_yields_each_match_once_and_in_order(walk: Walk) -> None:
    check_walks(walk, settings(max_examples=40, deadline=None))


@pytest.mark.nightly
def test_f1_many_walks_yield_each_match_once_and_in_order(walk: Walk) -> None:
    check_walks(walk, settings(max_examples=3000, deadline=None))


def test_f1_a_match_in_the_last_row_only_is_found_after_empty_answers(walk: Walk) -> None:
    rows = [{"id": "no", "pad": "x" * 100}] * 30 + [{"id": "x"}]
    stream = walk.fill([Batch(None, rows[:20], "seal"), Batch(None, rows[20:], "")])
    for limit in (Bounds(2**20, 10_000, 250), Bounds(1, 1, 1), Bounds(2**20, 10_000, 2**20)):
        for inline in (True, False):
            found = walk.walk(stream, _registry(None), "id:x", None, limit, inline=inline)
            assert found == [b'{"id": "x"}']


@pytest.mark.parametrize("key", [None, b"a"])
@pytest.mark.parametrize("inline", [True, False])
def test_a_scan_ends_where_the_stream_ended_when_it_began(
    walk: Walk, key: bytes | None, inline: bool
) -> None:
    stream = walk.fill([Batch(b"a", [{"id": "x"}], ""), Batch(b"b", [{"id": "x"}], "")])

    async def scan(filtered: FilteredReads) -> tuple[int, int]:
        sieve = filtered.begin(stream, "id:x", 0, 0)
        pending = Pending()
        request = AppendRequest(b'{"id": "x"}', JSON, None, False, b"a", None, None, None)
        walk.log.log.append(stream, request, pending.reply, None)
        await walk.log.log.committer.drain()
        assert stream.visible == 3
        if not (inline and filtered.try_scan(stream, sieve, key)):
            await filtered.scan(stream, sieve, key, asyncio.get_running_loop().time() + 3600)
        return sieve.count, sieve.decided

    with walk.filtered(_registry(None), Bounds(2**20, 10_000, 2**20)) as filtered:
        assert walk.log.run(scan(filtered)) == (1 if key else 2, 2)


def test_v3_has_gives_the_same_answer_wherever_an_entry_is(walk: Walk) -> None:
    without: list[Any] = [
        {},
        {"id": None},
        {"id": []},
        {"id": [[None], {}]},
        {"id": 5},
        {"id": {"id": "x"}},
        7,
    ]
    having: list[Any] = [{"id": ""}, {"id": "x"}, {"id": [None, "x"]}, {"id": [[], ["", 5]]}]
    rows = [*without, *having]
    everything = Bounds(2**20, 10_000, 2**20)
    for then in ("", "checkpoint", "seal"):
        stream = walk.fill([Batch(None, rows, then)])
        for text, expected in (("has:id", having), ("-has:id", without)):
            for inline in (True, False):
                found = walk.walk(stream, _registry(None), text, None, everything, inline=inline)
                assert found == [payload_of(record) for record in expected], (then, text)


def test_l3_old_entries_are_found_through_the_renamed_field(walk: Walk) -> None:
    old = [{"other": "x"}, {"other": "y"}, {"id": "x"}, 7]
    stream = walk.fill([Batch(None, old, "seal"), Batch(None, [{"id": "x"}, {"other": "x"}], "")])
    everything = Bounds(2**20, 10_000, 2**20)
    found = walk.walk(stream, _registry(4), "id:x", None, everything, inline=False)
    assert found == [b'{"id":"x"}', b'{"id": "x"}']
    # What the lens cannot take has no values, and is given as it is.
    found = walk.walk(stream, _registry(4), "-has:id", None, everything, inline=False)
    assert found == [b'{"id": "x"}', b"7", b'{"other": "x"}']
