"""What searches are made of: values, chunks, needles, the tail index and its budget, the gate."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.log_harness import MEMORY, LogHarness
from support.log_model import Append
from support.queries import SEARCHES, Question, payload_of, questions, records
from support.search_model import SearchModel, registry_of
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.search.chunks import Chunk, build_columns, join_chunks
from tailrace.search.collector import SearchResult
from tailrace.search.columns import build_column_from_values, rows_from_bits
from tailrace.search.matching import Matcher
from tailrace.search.query_language import SEARCH_DIALECT, Equals, StartsWith, bind_query
from tailrace.search.records import (
    FieldExtractor,
    RecordDecoder,
    RecordView,
    field_values,
    parse_dates,
    to_date,
)
from tailrace.search.requests import SearchParameters, SearchRequest, bind_search
from tailrace.search.routes import ConcurrencyLimiter
from tailrace.search.run import Searcher
from tailrace.search.scan import build_prefilter
from tailrace.search.tail_index import TailIndex

SOME = settings(max_examples=60, deadline=None)
MANY = settings(max_examples=5000, deadline=None)
VIEW = RecordView(registry_of())
NAMES = list(VIEW.config.fields)
EXTRACTOR = FieldExtractor(VIEW, NAMES)

batches = st.lists(records, min_size=1, max_size=12)


def chunk(payloads: list[bytes], entries: list[int]) -> Chunk:
    """Made by row: all values of each, then the columns."""
    rows = [EXTRACTOR.row(entry, payload) for entry, payload in zip(entries, payloads, strict=True)]
    columns = {
        name: build_column_from_values(field, [row[index] for row in rows])
        for index, (name, field) in enumerate(VIEW.config.fields.items())
    }
    return Chunk(entries, columns)


def straight_chunk(payloads: list[bytes], entries: list[int], *, lists: bool) -> Chunk:
    """Made by column, without the values of each row, as the tail index and scans do."""
    decoder = RecordDecoder(VIEW, NAMES)
    return Chunk(
        entries,
        build_columns(VIEW.config, decoder.gets, decoder.all_members(entries, payloads), lists=lists),
    )


@SOME
@given(records, st.booleans())
def test_v1_the_values_of_a_row_are_those_of_the_value_function(record: Any, ascii_only: bool) -> None:
    payload = payload_of(record, ascii_only=ascii_only)
    promoted = VIEW.record(1, payload)
    for name, values in zip(NAMES, EXTRACTOR.row(1, payload), strict=True):
        assert list(values) == field_values(promoted, VIEW.config.fields[name], VIEW.version)


usual_times = st.datetimes().map(lambda at: at.isoformat(timespec="milliseconds") + "Z")
odd_times = st.sampled_from(
    [
        "2026-02-30T00:00:00.000Z",
        "0000-01-01T00:00:00.000Z",
        "2026-01-01T00:00:00.000Z\n",
        "\n2026-01-01T00:00:00.000Z",
        "2026-01-01",
        "7",
    ]
)


@SOME
@given(st.one_of(st.sets(usual_times), st.sets(st.one_of(usual_times, odd_times, st.none(), st.integers()))))
def test_v1_dates_by_the_minute_are_those_of_the_value_function(leaves: set[Any]) -> None:
    assert parse_dates(leaves) == {leaf: to_date(leaf) for leaf in leaves}


def check_chunks(batch: list[Any], question: Question, cut: int, gap: int) -> None:
    """A chunk, one joined of two, and one without its lists decide as the model, under their own entries."""
    payloads = [payload_of(record) for record in batch]
    entries = [7 + index * gap for index in range(len(batch))]
    whole = chunk(payloads, entries)
    bound = bind_query(question.text, VIEW.config, SEARCH_DIALECT)
    expected = [
        entry
        for entry, payload in zip(entries, payloads, strict=True)
        if question.holds(VIEW.record(1, payload))
    ]

    def decided(source: Chunk) -> list[int]:
        return [source.entries[row] for row in rows_from_bits(source.match(bound))]

    assert decided(whole) == expected
    for lists in (True, False):
        straight = straight_chunk(payloads, entries, lists=lists)
        assert decided(straight) == expected
        for name in NAMES:
            assert straight.bounds(name) == whole.bounds(name)
            assert straight.rows_without(name) == whole.rows_without(name)
            mine, its = straight.columns[name], whole.columns[name]
            assert (mine.tokens, mine.documents, mine.multiple) == (its.tokens, its.documents, its.multiple)
    if 0 < cut < len(batch):
        halves = [chunk(payloads[:cut], entries[:cut]), chunk(payloads[cut:], entries[cut:])]
        assert decided(join_chunks(VIEW.config, halves)) == expected
    whole.drop_lists()
    assert decided(whole) == expected
    assert [entry for entry in entries if entry > 8] == [
        whole.entries[row] for row in rows_from_bits(whole.rows_after(8))
    ]
    needles, matcher = build_prefilter(bound, VIEW.config), Matcher(bound, VIEW.config, VIEW.version)
    for payload in payloads:
        assert needles is None or needles.may_match(payload) or not matcher.matches(payload)


@SOME
@given(batches, questions(SEARCHES), st.integers(0, 12), st.integers(1, 5))
def test_m4_q1_chunks_with_gaps_between_entries(
    batch: list[Any], question: Question, cut: int, gap: int
) -> None:
    check_chunks(batch, question, cut, gap)


@pytest.mark.nightly
@MANY
@given(batches, questions(SEARCHES), st.integers(0, 12), st.integers(1, 5))
def test_m4_q1_chunks_with_gaps_between_entries_at_length(
    batch: list[Any], question: Question, cut: int, gap: int
) -> None:
    check_chunks(batch, question, cut, gap)


@SOME
@given(st.lists(st.text(max_size=6), min_size=1, max_size=30), st.text(max_size=3))
def test_q2_v2_prefixes_and_equality_find_exactly_their_values(values: list[str], prefix: str) -> None:
    source = chunk([payload_of({"id": value}) for value in values], list(range(1, len(values) + 1)))
    found = rows_from_bits(source.match(StartsWith("id", prefix)))
    assert found == [row for row, value in enumerate(values) if value.startswith(prefix)]
    for value in values:
        found = rows_from_bits(source.match(Equals("id", value)))
        assert found == [row for row, other in enumerate(values) if other == value]


def test_values_without_a_token_have_no_terms() -> None:
    source = chunk([payload_of({"id": "x", "note": ["\U0001f600", "\U0001f600"]})], [1])
    assert rows_from_bits(source.match(Equals("id", "x"))) == [0]


class Bench:
    """A stream in a real log, and searches on it."""

    def __init__(self, harness: LogHarness, threads: ThreadPoolExecutor, budget: int, rows: int) -> None:
        self.harness = harness
        self.payloads: list[bytes] = []
        self.tail = TailIndex(harness.log.reader, budget, threads, rows)
        self.searcher = Searcher(harness.log.reader, self.tail, threads, lambda _: [], 10_000)
        harness.create("s", "application/json", (None, None), Append([], "application/json"), None)
        harness.settle()

    def append(self, batch: list[Any]) -> None:
        payloads = [payload_of(record) for record in batch]
        self.harness.append("s", Append(payloads, "application/json"))
        self.harness.settle()
        self.payloads += payloads

    def search(
        self, text: str, seconds: float = 600, sort: tuple[str, ...] = ("offset:asc",)
    ) -> SearchResult:
        request = bind_search(SearchParameters(text, 500, list(sort), None, None), VIEW.config, 3000)
        return self.run(request, seconds)

    def run(self, request: SearchRequest, seconds: float = 600) -> SearchResult:
        stream = self.harness.find("s")
        assert stream is not None
        return self.harness.run(self.searcher.search(stream, VIEW, request, time.monotonic() + seconds))

    def fill(self) -> int:
        """Searches once, and waits for the index that comes of it; answers how many rows it has."""
        self.search("has:id")
        stream = self.harness.find("s")
        assert stream is not None
        index = self.tail.find(stream.number)
        if index is None:
            return 0
        if index.filling is not None:
            self.harness.run(asyncio.wait_for(index.filling, 60))
        return index.rows

    def expected(self, text: str) -> list[int]:
        return [hit.entry for hit in SearchModel(self.payloads, VIEW).hits(text, ["offset:asc"])]


@contextmanager
def bench(budget: int, rows: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory, ThreadPoolExecutor(2) as threads:
        harness = LogHarness(Path(directory), Limits(journal_file_bytes=65_536))
        made = Bench(harness, threads, budget, rows)
        yield made
        harness.call(made.tail.close)
        harness.close()


def test_r4_what_is_left_out_is_reported_and_nothing_else_is_missing() -> None:
    for budget in (0, 3000, 20_000, 1 << 30):
        with bench(budget, 4) as made:
            made.searcher.scanning_enabled = False
            for number in range(12):
                made.append([{"id": f"r{number}-{n}", "status": n} for n in range(5)])
                outcome = made.search("has:id")
                found = {hit.entry for hit in outcome.hits}
                missing = set(made.expected("has:id")) - found
                assert found <= set(made.expected("has:id"))
                assert outcome.complete == (not outcome.omitted.rows)
                assert len(missing) == outcome.omitted.rows == outcome.omitted.wal_rows
                assert not missing or outcome.through == min(missing) - 1
                assert not missing or not outcome.exact


def test_r4_a_search_that_runs_out_of_time_says_what_it_did_not_decide() -> None:
    for budget in (0, 1 << 30):
        with bench(budget, 64) as made:
            made.searcher.scan_rows = 16
            for number in range(20):
                made.append([{"id": f"r{number}-{n}", "message": f"failed word{n}"} for n in range(40)])
            expected = list(range(1, 801))
            for step in range(25):
                outcome = made.search(
                    "message:failed", step / 2000, ("_score",) if step % 2 else ("offset:asc",)
                )
                found = [hit.entry for hit in outcome.hits]
                missing = set(expected[:500]) - set(found) if not step % 2 else set[int]()
                assert set(found) <= set(expected)
                assert outcome.timed_out == (not outcome.complete)
                assert outcome.matches <= len(expected)
                assert not outcome.exact or outcome.matches == len(expected)
                assert all(entry > outcome.through for entry in missing) or outcome.through == outcome.last
                assert len(missing) <= outcome.omitted.rows
                assert found == sorted(found) or step % 2


def test_stretches_of_other_times_are_not_read_a_second_time() -> None:
    with bench(0, 8) as made:
        made.searcher.scan_rows = 8
        made.append([{"id": f"r{n}", "at": 1000 * n} for n in range(64)])
        assert [hit.entry for hit in made.search("at:>=0").hits] == made.expected("at:>=0")
        for text, stretches in (
            ("at:>=56000", 1),
            ("at:>=15000 at:<17000", 2),
            ("at:64000", 0),
            ("at:<1000 OR at:>62500", 2),
            ("-at:<60000", 8),  # times alone say nothing for certain of rows that match
        ):
            outcome = made.search(text)
            assert [hit.entry for hit in outcome.hits] == made.expected(text), text
            assert outcome.complete
            assert outcome.counters.decoded == stretches * 8, text
            assert outcome.primary_max == 63_000, "what is passed over is still counted"


def test_r7_a_tail_that_stops_growing_is_indexed_without_further_appends() -> None:
    with bench(1 << 30, 8) as made:
        for number in range(30):
            made.append([{"id": f"r{number}-{n}"} for n in range(7)])
        assert made.fill() == 210
        outcome = made.search("id:r3-3")
        assert [hit.entry for hit in outcome.hits] == made.expected("id:r3-3")
        assert outcome.counters.payload_bytes == 0, "everything came from the index"


def test_i5_the_budget_holds_and_results_do_not_depend_on_it() -> None:
    for budget in (2000, 30_000, 60_000):
        with bench(budget, 16) as made:
            for number in range(20):
                made.append([{"id": f"r{number}-{n}", "message": f"word{n} failed"} for n in range(9)])
                outcome = made.search("message:word3")
                assert [hit.entry for hit in outcome.hits] == made.expected("message:word3")
                assert outcome.complete
                assert made.tail.bytes <= budget * 1.1


def test_r6_pages_by_score_are_those_of_scans_that_leave_nothing_out() -> None:
    pages: list[list[tuple[int, float]]] = []
    texts = ["failed", "failed failed badly", "all is well that failed in the end", "fine", "x failed y " * 5]
    for budget in (0, 1 << 30):
        with bench(budget, 64) as made:
            for number in range(15):
                made.append(
                    [
                        {"id": str(n), "message": texts[(n * n + number) % 5] + " z" * (n % 11)}
                        for n in range(60)
                    ]
                )
            assert made.fill() == (900 if budget else 0)
            found: list[tuple[int, float]] = []
            for text in ("failed", "has:id failed", "failed OR well", "-well message:failed"):
                for size in (3, 40):
                    request = bind_search(SearchParameters(text, size, None, None, None), VIEW.config, 3000)
                    outcome = made.run(request)
                    found += [(hit.entry, round(hit.score, 9)) for hit in outcome.hits[:size]]
            pages.append(found)
    assert pages[0] == pages[1]


def test_a_full_queue_of_searches_is_refused_and_turns_come_in_order() -> None:
    async def main() -> None:
        gate = ConcurrencyLimiter(1, 2)
        assert await gate.acquire(1)
        turns = [asyncio.ensure_future(gate.acquire(60)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TailraceError) as refused:
            await gate.acquire(60)
        assert refused.value.code == "overloaded"
        assert refused.value.retry_after_s == 1
        gate.release()
        assert await turns[0]
        assert not turns[1].done()
        turns[1].cancel()
        gate.release()
        assert gate.running == 0
        assert await gate.acquire(1)
        assert not await gate.acquire(0.001)
        gate.release()
        assert gate.running == 0

    asyncio.run(main())
