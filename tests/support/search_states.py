"""A stream in every state it can be in (in memory, stored, sealed, evolved, configured anew, trimmed,
restarted, restored from the bucket, with any budget for the tail index, and whatever was dropped of it), and
searches held against the plain model.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from math import isclose
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from support.log_harness import MEMORY, LogHarness
from support.log_model import Append
from support.queries import SEARCHES, Question, payload_of, questions, records
from support.search_model import ModelHit, SearchModel, registry_of
from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.log.records import Trim
from tailrace.search import collector
from tailrace.search.collector import SearchResult
from tailrace.search.records import RecordView
from tailrace.search.requests import SearchParameters, bind_search
from tailrace.search.run import Searcher
from tailrace.search.tail_index import TailIndex
from tailrace.storage.segments.model import SegmentInfo

FAR_S = 600.0
BUDGETS = [0, 4096, 16_384, 1 << 30]

sort_names = st.sampled_from(["_score", "offset", "id", "service", "status", "ratio", "ok", "at"])
sorts = st.one_of(
    st.none(),
    st.none(),
    st.lists(st.tuples(sort_names, st.sampled_from(["asc", "desc"])), min_size=1, max_size=3),
)
questioned = questions(SEARCHES)
batches = st.lists(records, min_size=1, max_size=6)
kinds = st.sampled_from(
    ["append", "append", "store", "store", "restart", "evict", "budget", "evolve", "trim", "turn", "lose"]
)


@st.composite
def queries(draw: st.DrawFn) -> tuple[Question, list[tuple[str, str]] | None, int]:
    return draw(questioned), draw(sorts), draw(st.integers(1, 9))


@st.composite
def actions(draw: st.DrawFn) -> tuple[Any, ...]:
    """An action and what it needs. A function: its name is all that is shown of it."""
    kind = draw(kinds)
    if kind == "append":
        return kind, draw(batches), draw(st.booleans())
    if kind == "lose":
        return kind, draw(batches)
    if kind == "budget":
        return kind, draw(st.sampled_from(BUDGETS))
    return (kind, draw(st.booleans())) if kind in ("store", "evict") else (kind,)


class SearchStates(RuleBasedStateMachine):
    """One stream; after every action a query is compared, page by page."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=MEMORY))
        self.limits = Limits(
            journal_file_bytes=65_536,
            block_cache_bytes=2000,
            seal_entries=7,
            seal_bytes=100_000,
            bootstrap_settle_ms=0,
        )
        self.real = LogHarness(self.directory, self.limits)
        self.payloads: list[bytes] = []
        self.evolved_at: int | None = None
        self.turned = False
        self.stores = 0
        self.waiting = patch.object(collector, "UNSCORED_MATCHES_MAX", 4)
        self.waiting.start()
        self.threads = ThreadPoolExecutor(2)

    def teardown(self) -> None:
        self.waiting.stop()
        self.close_searcher()
        self.threads.shutdown()
        self.real.close()
        shutil.rmtree(self.directory)

    @initialize(
        budget=st.sampled_from(BUDGETS), rows=st.sampled_from([2, 5, 16]), total=st.sampled_from([3, 10_000])
    )
    def create(self, budget: int, rows: int, total: int) -> None:
        self.rows, self.total = rows, total
        self.real.create("s", "application/json", (None, None), Append([], "application/json"), None)
        self.real.settle()
        self.open_searcher(budget)

    def open_searcher(self, budget: int) -> None:
        reader = self.real.log.reader
        tail = TailIndex(reader, budget, self.threads, self.rows)
        self.searcher = Searcher(reader, tail, self.threads, self.segments_of, self.total)
        self.searcher.scan_rows = 4

    def close_searcher(self) -> None:
        self.real.call(self.searcher.tail.close)

    def segments_of(self, number: int) -> list[SegmentInfo]:
        decoder = msgspec.msgpack.Decoder(SegmentInfo)
        return [decoder.decode(info) for info in self.real.log.store.db.cold.infos_from(number, 1)]

    @property
    def stream(self) -> Stream:
        found = self.real.find("s")
        assert found is not None
        return found

    # -- actions -----------------------------------------------------------------------------------------

    @rule(action=actions(), query=queries())
    def act(self, action: tuple[Any, ...], query: tuple[Any, ...]) -> None:
        getattr(self, action[0])(*action[1:])
        self.search(*query)

    @rule(query=queries())
    def ask(self, query: tuple[Any, ...]) -> None:
        self.search(*query)

    def append(self, batch: list[Any], ascii_only: bool) -> None:
        payloads = [payload_of(record, ascii_only=ascii_only) for record in batch]
        pending = self.real.append("s", Append(payloads, "application/json"))
        self.real.settle()
        assert pending.settled
        assert pending.code is None
        self.payloads += payloads

    def store(self, seals: bool) -> None:
        self.stores += 1
        self.real.log.retire_active_file()
        self.real.put_meta("turn", str(self.stores).encode())
        while self.real.retired:
            self.real.checkpoint(tell=True)
        if seals:
            self.real.seal(self.stream)

    def restart(self) -> None:
        budget = self.searcher.tail.bytes_max
        self.close_searcher()
        self.real.reopen()
        self.open_searcher(budget)

    def lose(self, batch: list[Any]) -> None:
        """The disk is lost; what was sealed comes back from the bucket, in a new epoch."""
        self.store(True)
        self.append(batch, True)
        sealed, epoch, budget = self.stream.sealed, self.stream.epoch, self.searcher.tail.bytes_max
        if not sealed:
            return
        self.close_searcher()
        self.real.bootstrap()
        self.open_searcher(budget)
        assert self.stream.tail == sealed
        assert self.stream.epoch > epoch
        self.forget_after(sealed)

    def forget_after(self, sealed: int) -> None:
        del self.payloads[sealed:]
        if self.evolved_at is not None:
            self.evolved_at = min(self.evolved_at, sealed)

    def turn(self) -> None:
        """Another configuration of the search: what was indexed by the last one says nothing any more."""
        self.turned = not self.turned

    def evict(self, lists_only: bool) -> None:
        index = self.searcher.tail.find(self.stream.number)
        if lists_only and index is not None:
            for chunk in index.chunks[::2]:
                chunk.drop_lists()
        else:
            self.searcher.tail.forget(self.stream.number)

    def budget(self, budget: int) -> None:
        self.searcher.tail.bytes_max = budget

    def evolve(self) -> None:
        if self.evolved_at is None:
            self.evolved_at = len(self.payloads)

    def trim(self) -> None:
        """Retention takes the oldest segment that is still shown."""
        stream = self.stream
        for info in self.segments_of(stream.number):
            if stream.earliest < info.last <= stream.sealed:
                self.real.call(self.real.log.record_objects, Trim(stream.number, info.last))
                self.real.settle()
                return

    # -- comparing ---------------------------------------------------------------------------------------

    def search(self, question: Question, sort: list[tuple[str, str]] | None, size: int) -> None:
        view = RecordView(registry_of(self.evolved_at, turned=self.turned))
        wanted = None if sort is None else [f"{name}:{way}" for name, way in sort]
        request = bind_search(SearchParameters(question.text, size, wanted, None, None), view.config, 3000)
        model = SearchModel(self.payloads, view, self.stream.earliest + 1)
        keys = [f"{key.name}:{'desc' if key.descending else 'asc'}" for key in request.sort]
        expected = model.hits(question.text, keys)
        found: list[Any] = []
        while True:
            outcome = self.run(view, request)
            self.check(outcome, expected, request.size)
            page = outcome.hits[: request.size]
            found += page
            if len(outcome.hits) == len(page):
                break
            request = request._replace(after=tuple(page[-1].values))
        compare(found, expected)
        primaries = [value for entry in model.records for value in model.values(entry, "at")]
        if outcome.exact:
            assert outcome.primary_max == max(primaries, default=None)

    def run(self, view: RecordView, request: Any) -> SearchResult:
        return self.real.run(self.searcher.search(self.stream, view, request, time.monotonic() + FAR_S))

    def check(self, outcome: SearchResult, expected: list[ModelHit], size: int) -> None:
        """Totals and coverage say what is so; no more than a page and a bit is held."""
        assert outcome.complete
        assert outcome.last == outcome.through == len(self.payloads)
        assert outcome.omitted.rows == 0
        assert outcome.counters.peak_hits <= size + 2
        if outcome.exact:
            assert outcome.matches == len(expected)
        else:
            assert min(self.total, len(expected)) <= outcome.matches <= len(expected)


def compare(found: list[Any], expected: list[ModelHit]) -> None:
    assert [hit.entry for hit in found] == [hit.entry for hit in expected]
    for hit, wanted in zip(found, expected, strict=True):
        assert isclose(hit.score, wanted.score, rel_tol=1e-6)
        for value, other in zip(hit.values, wanted.values, strict=True):
            assert value == other or isclose(value, other, rel_tol=1e-6)


def configured(examples: int, steps: int) -> settings:
    """For histories of many steps, which are slow by nature."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.filter_too_much,
        ],
    )
