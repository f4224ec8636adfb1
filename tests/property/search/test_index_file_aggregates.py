"""Aggregates are the same, to the last digit, from rollups, from columns and from records."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.aggregate_model import INTERVALS, ROLLUPS, AggregateModel, rollup_view
from support.families import FamilyStore
from support.log_harness import MEMORY, LogHarness
from support.log_model import Append
from support.queries import payload_of
from tailrace.common.limits import Limits
from tailrace.log.model import Stream
from tailrace.search.aggregates.run import Aggregator
from tailrace.search.index_files.format import AGG, COL, EXACT, FTS, MBLK
from tailrace.search.requests import bind_aggregate, parse_aggregate
from tailrace.search.run import Searcher
from tailrace.search.tail_index import TailIndex
from tailrace.storage.segments.model import SegmentInfo

NOON = 1767225600000
TIMES = [NOON, NOON + 1, NOON + 5, NOON + 500, NOON + 1000, NOON + 3_600_000, NOON - 1, 0, -5]
VIEW = rollup_view(None)
PARTS = {"count": 2, "sum": 7, "min": 3, "max": 4, "buckets": {"2": 1, "4": 1}}


def few(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


rows = st.fixed_dictionaries(
    {"at": st.one_of(st.sampled_from(TIMES), st.sampled_from(TIMES), few([NOON, NOON], [NOON, 5], None))},
    optional={
        "service": few("a", "A", "b", None, ["a", "a"], ["a", "b"]),
        "ok": few(True, False, "true", [True, False]),
        "status": few(1, 5, "5", [5, 5], [1, 5], 2**40),
        "ratio": few(0, -2.5, 0.1, 3, 1e300, -1e300, [1, 1, 2], "7", None),
        "id": few("x", "y"),
        "message": few("checkout", "fine"),
    },
).flatmap(lambda row: few(row, {**row, **PARTS}, {**row, **PARTS, "sum": None}))
segments = st.lists(st.lists(rows, min_size=1, max_size=8), min_size=1, max_size=4)
subsets = st.lists(
    st.sampled_from([(AGG, COL), (AGG, COL, MBLK), (COL, MBLK), (COL,), (AGG,), (COL, EXACT, FTS, MBLK), ()]),
    min_size=4,
)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(sorted(ROLLUPS)))
    bounds = st.lists(st.sampled_from([*TIMES, NOON + 250]), min_size=2, max_size=2, unique=True)
    low, high = sorted(draw(bounds))
    body: dict[str, Any] = {"rollup": name, "from": low, "to": high, "interval": draw(few(*INTERVALS))}
    body["group_by"] = draw(st.lists(st.sampled_from(ROLLUPS[name]["dimensions"]), unique=True))
    query = draw(few(None, None, "service:a", "service:A service:b", "has:id", "message:checkout"))
    return body if query is None else {**body, "q": query}


class Station:
    """A stream whose segments have some families each; the last rows are in memory."""

    def __init__(self, directory: Path, older: list[list[Any]], families: list[Any]) -> None:
        self.real = LogHarness(directory, Limits(journal_file_bytes=65_536, seal_entries=50))
        self.real.create("s", "application/json", (None, None), Append([], "application/json"), None)
        self.real.settle()
        self.threads = ThreadPoolExecutor(2)
        self.families = FamilyStore(self.real, directory / "objects")
        self.payloads: list[bytes] = []
        for turn, batch in enumerate(older):
            self.append(batch)
            for _ in range(2):
                self.store(turn)
            info = self.segments_of(self.stream.number)[-1]
            self.families.build(self.stream, info, VIEW.registry, families[turn % len(families)], "metrics")
        self.append(older[0])
        reader = self.real.log.reader
        tail = TailIndex(reader, 0, self.threads)
        self.searcher = Searcher(reader, tail, self.threads, self.segments_of, 10)
        self.catalogue = self.real.call(self.families.catalogue)

    def append(self, batch: list[Any]) -> None:
        payloads = [payload_of(record) for record in batch]
        self.real.append("s", Append(payloads, "application/json"))
        self.real.settle()
        self.payloads += payloads

    def store(self, turn: int) -> None:
        self.real.log.retire_active_file()
        self.real.put_meta("turn", str(turn).encode())
        while self.real.retired:
            self.real.checkpoint(tell=True)
        self.real.seal(self.stream)

    def segments_of(self, number: int) -> list[SegmentInfo]:
        decoder = msgspec.msgpack.Decoder(SegmentInfo)
        return [decoder.decode(info) for info in self.real.log.store.db.cold.infos_from(number, 1)]

    @property
    def stream(self) -> Stream:
        found = self.real.find("s")
        assert found is not None
        return found

    def ask(self, body: dict[str, Any], *, families: bool) -> dict[str, Any]:
        self.searcher.catalogue = self.catalogue if families else None
        request = bind_aggregate(parse_aggregate(body), VIEW.config)
        run = Aggregator(self.searcher).aggregate(self.stream, VIEW, request, time.monotonic() + 600)
        return orjson.loads(self.real.run(run))

    def close(self) -> None:
        self.real.call(self.searcher.tail.close)
        self.families.close()
        self.threads.shutdown()
        self.real.close()


def check(older: list[list[Any]], families: list[Any], asked: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        station = Station(Path(directory), older, families)
        try:
            records = [VIEW.record(entry, payload) for entry, payload in enumerate(station.payloads, 1)]
            for body in asked:
                answer, plain = station.ask(body, families=True), station.ask(body, families=False)
                AggregateModel(records, VIEW).check(body, answer)
                assert answer["buckets"] == plain["buckets"]
                shown = "visible_through_primary_timestamp_max"
                assert answer["coverage"][shown] == plain["coverage"][shown]
        finally:
            station.close()


slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(segments, subsets, st.lists(bodies(), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None, suppress_health_check=slow)
def test_p8_a1_a4_aggregates_are_the_same_from_every_family(
    older: list[list[Any]], families: list[Any], asked: list[dict[str, Any]]
) -> None:
    check(older, families, asked)


@pytest.mark.nightly
@given(segments, subsets, st.lists(bodies(), min_size=1, max_size=5))
@settings(max_examples=2000, deadline=None, suppress_health_check=slow)
def test_p8_a1_a4_aggregates_are_the_same_from_every_family_at_length(
    older: list[list[Any]], families: list[Any], asked: list[dict[str, Any]]
) -> None:
    check(older, families, asked)


def test_a1_whole_windows_come_from_rollups_and_edges_from_rows(tmp_path: Path) -> None:
    batch = [{"at": NOON + 250 * n, "service": "a", "status": n, "ratio": n / 8} for n in range(20)]
    station = Station(tmp_path, [batch, batch], [(AGG, COL)])
    try:
        body: dict[str, Any] = {"rollup": "all", "from": NOON, "to": NOON + 5000, "interval": "1s"}
        body |= {"group_by": ["service"], "measures": ["n", "lat", "size"]}
        whole = station.ask(body, families=True)
        coverage = whole["coverage"]
        assert coverage["used_rollups"]
        assert (coverage["indexed_segments"], coverage["scanned_segments"]) == (2, 0)
        assert coverage["index_families_used"] == ["agg"]
        assert coverage["complete"]
        edged = station.ask({**body, "from": NOON + 250}, families=True)
        assert edged["coverage"]["index_families_used"] == ["agg", "col"]
        assert edged["buckets"] == station.ask({**body, "from": NOON + 250}, families=False)["buckets"]
        asked = station.ask({**body, "q": "status:>3"}, families=True)
        assert not asked["coverage"]["used_rollups"]
        assert asked["coverage"]["index_families_used"] == ["col"]
        nothing = station.ask(body, families=False)
        assert nothing["buckets"] == whole["buckets"]
        assert not nothing["coverage"]["used_rollups"]
    finally:
        station.close()


def test_a1_summaries_of_records_come_from_blocks_where_rollups_do_not_help(tmp_path: Path) -> None:
    """A query that is no dimension: rows are chosen by columns, and their summaries are not decoded again."""
    sizes = [(1, 5), (2, 2**53 + 1), (3, 0.1), (4, -7)]
    batch = [
        {
            "at": NOON + n,
            "service": "ab"[n % 2],
            "status": n,
            "count": size,
            "sum": total,
            "min": n,
            "max": 2.5 * n,
        }
        | ({"buckets": {"1": size}} if n % 3 else {})
        for n, (size, total) in enumerate(sizes * 5)
    ]
    station = Station(tmp_path, [batch, batch], [(COL, MBLK)])
    body: dict[str, Any] = {"rollup": "some", "from": NOON, "to": NOON + 20, "interval": "7ms"}
    body |= {"q": "status:>3", "group_by": ["service"]}
    try:
        answer = station.ask(body, families=True)
        assert answer["coverage"]["index_families_used"] == ["col", "mblk"]
        assert answer["coverage"]["scanned_segments"] == 0
        assert answer["buckets"] == station.ask(body, families=False)["buckets"]
        assert any(
            group["measures"]["value"]["count"] for one in answer["buckets"] for group in one["groups"]
        )
    finally:
        station.close()
