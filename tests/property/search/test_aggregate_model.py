"""Aggregates equal the plain model in every state a stream can be in, and wherever time is cut."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from math import isclose
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.aggregate_model import INTERVALS, ROLLUPS, AggregateModel, rollup_view
from support.log_harness import MEMORY, LogHarness
from support.log_model import Append
from support.queries import SEARCHES, objects, payload_of, questions, records
from tailrace.common.errors import TailraceError
from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.search.aggregates import groups
from tailrace.search.aggregates.measures import Sketch
from tailrace.search.aggregates.run import Aggregator
from tailrace.search.records import RecordView
from tailrace.search.requests import bind_aggregate, parse_aggregate
from tailrace.search.run import Searcher
from tailrace.search.tail_index import TailIndex
from tailrace.storage.segments.model import SegmentInfo

NOON = 1767225600000
TIMES = [NOON, NOON + 1, NOON + 500, NOON + 1000, NOON + 3_600_000, NOON - 1, 0, 5, -5]

instants = st.sampled_from(TIMES)
counts = st.integers(-1, 4)


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    """A summary of some numbers, whole or with pieces missing."""
    numbers = draw(st.lists(st.integers(-40, 1000), min_size=1, max_size=5))
    sketch = Sketch()
    sketch.add_all(numbers)
    made: dict[str, Any] = {"count": len(numbers), "sum": sum(numbers), "sketch": sketch.to_text()}
    made |= {"min": min(numbers), "max": max(numbers), "buckets": {"1": len(numbers)}}
    for name in draw(st.lists(st.sampled_from(sorted(made)), max_size=3)):
        made.pop(name, None)
    if draw(st.booleans()):
        made["buckets"] = draw(st.dictionaries(st.sampled_from(["1", "2", "64", "x"]), counts))
    return made


def _few(*values: Any) -> st.SearchStrategy[Any]:
    """Few enough that groups have several rows; some have two values, or the same one twice."""
    return st.sampled_from(values)


telling = st.fixed_dictionaries(
    {"at": st.one_of(instants, instants, instants, _few([NOON, NOON], [NOON, 5], [NOON]))},
    optional={
        "service": _few("a", "A", "b", None, ["a", "a"], ["a", "b"]),
        "ok": _few(True, False, "true", [True, True], [True, False]),
        "status": _few(1, 5, "5", [5, 5], [1, 5], 2**40),
        "ratio": _few(0, -2.5, 1, 3, 1e3, [1, 1, 2], "7", None),
        "id": _few("x", "y"),
        "message": _few("checkout", "fine"),
    },
)
timely = st.builds(lambda record, at, more: {**record, "at": at, **more}, objects, instants, parts())
batches = st.lists(st.one_of(telling, telling, telling, timely, timely, records), min_size=1, max_size=12)
kinds = st.sampled_from(["append", "append", "append", "store", "seal", "restart", "evict", "evolve"])
actions = st.lists(st.tuples(kinds, batches), min_size=2, max_size=7)
texts = st.one_of(st.none(), st.none(), questions(SEARCHES).map(lambda question: question.text))


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(ROLLUPS)))
    rollup = ROLLUPS[name]
    low, high = sorted(
        draw(st.lists(st.sampled_from([*TIMES, NOON + 250]), min_size=2, max_size=2, unique=True))
    )
    body: dict[str, Any] = {
        "rollup": name, "from": low, "to": high, "interval": draw(st.sampled_from(INTERVALS)),
    }  # fmt: skip
    body["group_by"] = draw(st.lists(st.sampled_from(rollup["dimensions"]), unique=True))
    if draw(st.booleans()):
        body["measures"] = draw(st.lists(st.sampled_from(sorted(rollup["measures"])), unique=True))
    if (text := draw(texts)) is not None:
        body["q"] = text
    return body


class Station:
    """A stream in a log of its own, and aggregates over it."""

    def __init__(self, directory: Path, budget: int) -> None:
        limits = Limits(journal_file_bytes=65_536, block_cache_bytes=2000, seal_entries=7, seal_bytes=100_000)
        self.real = LogHarness(directory, limits)
        self.real.create("s", "application/json", (None, None), Append([], "application/json"), None)
        self.real.settle()
        self.threads = ThreadPoolExecutor(2)
        self.budget = budget
        self.payloads: list[bytes] = []
        self.evolved_at: int | None = None
        self._turn = 0
        self._open()

    def _open(self) -> None:
        reader = self.real.log.reader
        self.searcher = Searcher(
            reader, TailIndex(reader, self.budget, self.threads, 20), self.threads, self._segments_of, 10
        )
        self.searcher.scan_rows = 4
        self.aggregator = Aggregator(self.searcher)

    def close(self) -> None:
        self.real.call(self.searcher.tail.close)
        self.threads.shutdown()
        self.real.close()

    def _segments_of(self, number: int) -> list[SegmentInfo]:
        decoder = msgspec.msgpack.Decoder(SegmentInfo)
        return [decoder.decode(info) for info in self.real.log.store.db.cold.infos_from(number, 1)]

    @property
    def stream(self) -> Stream:
        found = self.real.find("s")
        assert found is not None
        return found

    @property
    def view(self) -> RecordView:
        return rollup_view(self.evolved_at)

    def act(self, kind: str, batch: list[Any]) -> None:
        if kind == "append":
            payloads = [payload_of(record) for record in batch]
            pending = self.real.append("s", Append(payloads, "application/json"))
            self.real.settle()
            assert pending.settled
            assert pending.code is None
            self.payloads += payloads
        elif kind in ("store", "seal"):
            self._turn += 1
            self.real.log.retire_active_file()
            self.real.put_meta("turn", str(self._turn).encode())
            while self.real.retired:
                self.real.checkpoint(tell=True)
            if kind == "seal":
                self.real.seal(self.stream)
        elif kind == "restart":
            self.real.call(self.searcher.tail.close)
            self.real.reopen()
            self._open()
        elif kind == "evict":
            self.searcher.tail.forget(self.stream.number)
        elif self.evolved_at is None:
            self.evolved_at = len(self.payloads)

    def ask(self, body: dict[str, Any], view: RecordView | None = None) -> dict[str, Any]:
        view = view or self.view
        request = bind_aggregate(parse_aggregate(body), view.config)
        # Over the wire and back, as clients get it.
        return orjson.loads(
            self.real.run(self.aggregator.aggregate(self.stream, view, request, time.monotonic() + 600))
        )

    def model(self, view: RecordView | None = None) -> AggregateModel:
        view = view or self.view
        return AggregateModel(
            [view.record(entry, payload) for entry, payload in enumerate(self.payloads, 1)], view
        )


def merged(answer: dict[str, Any]) -> dict[str, tuple[int, float, int]]:
    """By window, over all groups: the count of rows, the sum and the count of the summary."""
    found: dict[str, tuple[int, float, int]] = {}
    for bucket in answer["buckets"]:
        rows, total, count = found.get(bucket["start"], (0, 0.0, 0))
        for group in bucket["groups"]:
            measures = group["measures"]
            rows += measures["n"]["count"]
            total += measures["size"]["sum"]
            count += measures["size"]["count"]
        found[bucket["start"]] = (rows, total, count)
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for start, (rows, total, count) in one.items():
        assert (rows, count) == (other[start][0], other[start][2])
        assert isclose(total, other[start][1], rel_tol=1e-9, abs_tol=1e4)


def run_history(budget: int, steps: list[tuple[str, list[Any]]], asked: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        station = Station(Path(directory), budget)
        try:
            for kind, batch in steps:
                station.act(kind, batch)
                model = station.model()
                for body in asked:
                    answer = station.ask(body)
                    model.check(body, answer)
                    assert answer["coverage"]["complete"]
            check_cuts(station)
        finally:
            station.close()


def check_cuts(station: Station) -> None:
    """A-2: two halves of time, and all groups together, are the whole."""
    whole = {"rollup": "all", "from": -10, "to": NOON + 4_000_000, "interval": "1h"}
    expected = merged(station.ask(whole))
    same(expected, merged(station.ask({**whole, "group_by": ["status", "service"]})))
    for cut in (0, NOON, NOON + 250):
        halves = [station.ask({**whole, "to": cut}), station.ask({**whole, "from": cut})]
        same(expected, merged({"buckets": [bucket for half in halves for bucket in half["buckets"]]}))


histories = given(st.sampled_from([0, 4096, 1 << 30]), actions, st.lists(bodies(), min_size=1, max_size=3))
checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@histories
@settings(max_examples=40, deadline=None, suppress_health_check=checks)
def test_a1_a2_a4_aggregates_equal_the_model_in_any_state(
    budget: int, steps: list[tuple[str, list[Any]]], asked: list[dict[str, Any]]
) -> None:
    run_history(budget, steps, asked)


@pytest.mark.nightly
@histories
@settings(max_examples=1500, deadline=None, suppress_health_check=checks)
def test_a1_a2_a4_aggregates_equal_the_model_in_any_state_at_length(
    budget: int, steps: list[tuple[str, list[Any]]], asked: list[dict[str, Any]]
) -> None:
    run_history(budget, steps, asked)


@pytest.fixture
def station(tmp_path: Path) -> Any:
    made = Station(tmp_path, 1 << 30)
    yield made
    made.close()


WHOLE = {"rollup": "all", "from": 0, "to": NOON + 4_000_000, "interval": "1h"}


@pytest.mark.parametrize("seals", [False, True])
def test_a3_a_missing_field_takes_nothing_from_other_measures(station: Station, seals: bool) -> None:
    station.act("append", [{"at": NOON, **({"ratio": 2.5} if index % 2 else {})} for index in range(20)])
    if seals:
        station.act("seal", [])
        station.budget = 0
        station.act("restart", [])
    [bucket] = station.ask(WHOLE)["buckets"]
    [group] = bucket["groups"]
    assert group["key"] == {}
    assert group["measures"]["n"] == {"count": 20}
    assert group["measures"]["lat"]["count"] == 10


def test_a5_answers_follow_a_changed_rollup_at_once(station: Station) -> None:
    station.act("append", [{"at": NOON, "id": "x", "status": 1, "a": 3}, {"at": NOON, "status": 2, "b": 4}])
    part = {"kind": "summary_parts", "countJsonPointer": "/a", "sumJsonPointer": "/a"}
    part |= {"minJsonPointer": "/a", "maxJsonPointer": "/a"}

    def ask(**changes: Any) -> dict[str, Any]:
        measures = {"n": {"kind": "count"}, "v": part, **changes.pop("measures", {})}
        rollup = {"dimensions": ["status"], "intervals": ["1h"], "measures": measures, **changes}
        view = rollup_view(None, {"all": rollup})
        body = {**WHOLE, "interval": rollup["intervals"][0], "group_by": rollup["dimensions"]}
        return station.ask(body, view)["buckets"][0]

    def counts_of(bucket: dict[str, Any], name: str) -> list[int]:
        return [group["measures"][name]["count"] for group in bucket["groups"]]

    assert counts_of(ask(), "n") == [1, 1]
    assert counts_of(ask(include="id:x"), "n") == [1]
    assert counts_of(ask(measures={"n": {"kind": "count", "include": "id:x"}}), "n") == [1, 0]
    assert counts_of(ask(), "v") == [3, 0]
    moved = {"v": {**part, "countJsonPointer": "/b", "sumJsonPointer": "/b"}}
    assert counts_of(ask(measures=moved), "v") == [0, 4]
    assert counts_of(ask(dimensions=[]), "n") == [2]
    assert ask(intervals=["1s"])["end"] == "2026-01-01T00:00:01.000Z"


def test_too_many_groups_and_too_much_memory_are_refused(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    station.act("append", [{"at": NOON, "status": index, "ratio": 2**index} for index in range(9)])
    body = {**WHOLE, "group_by": ["status"]}
    monkeypatch.setattr(groups, "GROUPS_MAX", 8)
    with pytest.raises(TailraceError, match="exceeds 8 groups; narrow the range, q or group_by"):
        station.ask(body)
    assert len(station.ask({**body, "q": "status:<8"})["buckets"][0]["groups"]) == 8
    monkeypatch.setattr(groups, "HELD_BYTES_MAX", 10_000)
    with pytest.raises(TailraceError, match="too much memory"):
        station.ask({**body, "q": "status:<8"})


def test_a1_columns_and_records_give_the_same_groups(station: Station) -> None:
    station.act(
        "append", [{"at": NOON, "ok": n % 2 == 0, "status": n % 3, "ratio": n / 2} for n in range(12)]
    )
    body = {**WHOLE, "group_by": ["ok", "status"]}
    from_columns = station.ask(body)
    assert station.searcher.tail.bytes > 0
    station.model().check(body, from_columns)
    station.searcher.tail.bytes_max = 0
    assert station.ask(body)["buckets"] == from_columns["buckets"]


def test_stretches_of_other_times_are_decoded_only_once(station: Station) -> None:
    station.searcher.tail.bytes_max = 0
    station.act("append", [{"at": NOON + 1000 * index} for index in range(12)])
    late = {**WHOLE, "from": NOON + 9000}
    looked_at: list[int] = []
    for _ in range(2):
        answer = station.ask(late)
        station.model().check(late, answer)
        assert answer["coverage"]["complete"]
        assert answer["coverage"]["visible_through_primary_timestamp_max"] == "2026-01-01T00:00:11.000Z"
        looked_at.append(answer["coverage"]["scanned_tail_docs"])
    assert looked_at == [12, 4]
    assert station.ask({**WHOLE, "to": NOON})["buckets"] == []
    assert station.ask(WHOLE)["coverage"]["scanned_tail_docs"] == 12


def test_without_time_there_is_no_answer(station: Station) -> None:
    station.act("append", [{"at": NOON}])
    request = bind_aggregate(parse_aggregate(WHOLE), station.view.config)
    with pytest.raises(TailraceError) as refused:
        station.real.run(
            station.aggregator.aggregate(station.stream, station.view, request, time.monotonic() - 1)
        )
    assert refused.value.code == "request_timeout"


def test_what_cannot_be_read_is_named_in_the_coverage(station: Station) -> None:
    station.act("append", [{"at": NOON}] * 3)
    station.searcher.tail.bytes_max = 0
    station.searcher.scanning_enabled = False
    answer = station.ask(WHOLE)
    assert answer["buckets"] == []
    coverage = answer["coverage"]
    assert (coverage["complete"], coverage["mode"]) == (False, "published")
    assert coverage["possible_missing_wal_rows"] == 3
