"""Files of rollups: what is wanted of them, and that a broken one adds nothing."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest

from support.aggregate_model import rollup_view
from support.companions import Stored, build, plan_of
from support.queries import payload_of
from tailrace.common.timestamps import parse_rfc3339_ns
from tailrace.search.aggregates.array_states import ArrayStates
from tailrace.search.aggregates.groups import Groups
from tailrace.search.aggregates.rollup_ranges import rollup_selection
from tailrace.search.index_files.file_cache import LoadedContent, UnusableFileError
from tailrace.search.index_files.format import AGG
from tailrace.search.index_files.parquet_file import ParquetFile
from tailrace.search.index_files.rollup_files import STATE_CACHE_BYTES_MIN, RollupFile, RollupSelection
from tailrace.search.requests import AggregateRequest, bind_aggregate, parse_aggregate
from tailrace.storage.segments.parquet import pa, pq

NOON = 1767225600000
VIEW = rollup_view(None)


def request(**more: Any) -> AggregateRequest:
    body = {"rollup": "all", "from": NOON, "to": NOON + 5000, "interval": "1s", **more}
    return bind_aggregate(parse_aggregate(body), VIEW.config)


def elevens() -> list[dict[str, Any]]:
    """Eleven records in three seconds; those of service b are alone in their groups."""
    rows = [{"at": NOON + 250 * n, "service": "a", "status": 5, "ratio": n / 8} for n in range(8)]
    return rows + [{"at": NOON + 1000 * n, "service": "b", "status": n, "ratio": 1.5} for n in range(3)]


def bytes_of(rows: list[dict[str, Any]]) -> bytes:
    stored = [Stored(entry, payload_of(row)) for entry, row in enumerate(rows, 1)]
    return build(stored, plan_of(VIEW.registry))[AGG].data


def file_of(rows: list[dict[str, Any]]) -> RollupFile:
    return RollupFile(ParquetFile(LoadedContent(bytes_of(rows))))


def written(table: Any, group_rows: int) -> RollupFile:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=group_rows)
    return RollupFile(ParquetFile(LoadedContent(sink.getvalue().to_pybytes())))


@pytest.fixture(scope="module")
def file() -> RollupFile:
    return file_of(elevens())


def shown(file: RollupFile, asked: AggregateRequest) -> dict[tuple[int, Any], Any]:
    """The measures of each group of a file, by window and service."""
    states = ArrayStates(VIEW, asked, time.monotonic() + 60)
    assert states.add_file(file, rollup_selection(asked))
    return {
        (instant_ms(window["start"]), group["key"].get("service")): group["measures"]
        for window in orjson.loads(b"".join(states.to_json(Groups(VIEW, asked))))
        for group in window["groups"]
    }


def instant_ms(text: str) -> int:
    nanos = parse_rfc3339_ns(text)
    assert nanos is not None
    return nanos // 1_000_000


def test_states_are_added_up_by_what_is_asked_for(file: RollupFile) -> None:
    found = shown(file, request(group_by=["service"], measures=["n", "lat"]))
    expected = {(NOON, "a"): 4, (NOON + 1000, "a"): 4} | {(NOON + 1000 * n, "b"): 1 for n in range(3)}
    assert {key: measures["n"]["count"] for key, measures in found.items()} == expected
    one, several = found[NOON + 2000, "b"]["lat"], found[NOON, "a"]["lat"]
    assert [one[name] for name in ("count", "sum", "min", "max", "avg", "p50", "p99")] == [1, *[1.5] * 6]
    assert [several[name] for name in ("count", "sum", "min", "max")] == [4, 0.75, 0.0, 0.375]
    assert several["histogram"] == {"1": 4}


def test_only_the_wanted_value_of_a_dimension_counts(file: RollupFile) -> None:
    found = shown(file, request(q="service:b", measures=["n"]))
    assert [measures["n"]["count"] for measures in found.values()] == [1, 1, 1]


def test_groups_by_several_dimensions_are_added_up_from_the_whole_rollup(file: RollupFile) -> None:
    asked = request(group_by=["status", "service"], measures=["size"], interval="1h", to=NOON + 3_600_000)
    found = shown(file, asked)
    assert {key: measures["size"]["sum"] for key, measures in found.items()}[NOON, "a"] == 40


def test_states_meet_groups_that_were_made_elsewhere(file: RollupFile) -> None:
    """One group is in both, one only here, one only there: all are shown, in one order."""
    asked = request(group_by=["service"], measures=["n", "lat"], to=NOON + 1000)
    states, groups = ArrayStates(VIEW, asked, time.monotonic() + 60), Groups(VIEW, asked)
    states.add_file(file, rollup_selection(asked))
    for service in ("a", None):
        group = groups.at((NOON, (service,)))
        group.counts[groups.counted.index("n")] += 1
        group.waiting["lat"] = [0.1]
    groups.flush_pending()
    (window,) = orjson.loads(b"".join(states.to_json(groups)))
    found = [(group["key"]["service"], group["measures"]) for group in window["groups"]]
    assert [(service, measures["n"]["count"]) for service, measures in found] == [
        ("a", 5),
        ("b", 1),
        (None, 1),
    ]
    assert found[0][1]["lat"]["sum"] == 0.75 + 0.1
    assert found[0][1]["lat"]["count"] == 5


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
def test_groups_may_be_cut_where_a_row_group_ends(file: RollupFile, rows: int) -> None:
    """A rollup has four measures. Where the time that is asked for begins, the group before it may go on."""
    cut = written(pq.read_table(pa.BufferReader(bytes_of(elevens()))), rows)
    for asked in (
        request(group_by=["service"]),
        request(group_by=["service", "status"]),
        request(group_by=["service"], **{"from": NOON + 1000}, to=NOON + 2000),
        request(q="service:b", measures=["lat"], **{"from": NOON + 2000}),
    ):
        assert shown(cut, asked) == shown(file, asked)


def test_what_is_asked_again_is_there_and_the_same(file: RollupFile) -> None:
    """Also by other measures, other windows and other values: nothing that is kept is of one question."""
    fresh = file_of(elevens())
    before = fresh.memory_bytes
    for _ in range(2):
        for asked in (
            request(group_by=["service"]),
            request(group_by=["service"], measures=["lat", "n"]),
            request(group_by=["service"], to=NOON + 1000),
            request(q="service:a"),
            request(q="service:nobody", group_by=["ok"]),
            request(interval="1h", to=NOON + 3_600_000),
        ):
            again = ArrayStates(VIEW, asked, time.monotonic() + 60)
            again.add_file(fresh, rollup_selection(asked))
            once = ArrayStates(VIEW, asked, time.monotonic() + 60)
            once.add_file(file_of(elevens()), rollup_selection(asked))
            assert b"".join(again.to_json(Groups(VIEW, asked))) == b"".join(once.to_json(Groups(VIEW, asked)))
    assert before < fresh.memory_bytes <= before + STATE_CACHE_BYTES_MIN


def test_files_that_meet_in_a_window_are_added_up(file: RollupFile) -> None:
    """Most of each stays as it is kept; the window that both have is merged, and kept by neither."""
    asked = request(group_by=["service"])
    later = [{**row, "at": row["at"] + 2000} for row in elevens()]
    files = [file_of(elevens()), file_of(later)]
    for _ in range(2):
        states = ArrayStates(VIEW, asked, time.monotonic() + 60)
        for one in files:
            states.add_file(one, rollup_selection(asked))
        whole = ArrayStates(VIEW, asked, time.monotonic() + 60)
        whole.add_file(file_of([*elevens(), *later]), rollup_selection(asked))
        assert b"".join(states.to_json(Groups(VIEW, asked))) == b"".join(whole.to_json(Groups(VIEW, asked)))


def test_windows_that_are_empty_are_known(file: RollupFile) -> None:
    assert file.has_window("all", 1000, NOON + 2000)
    assert not file.has_window("all", 1000, NOON + 3000)
    assert not file.has_window("nothing", 1000, NOON)
    assert not list(file.parts(RollupSelection("all", 1000, NOON - 9000, NOON)))


def test_nothing_of_a_broken_file_is_added() -> None:
    """The last of its row groups has a sketch of fewer numbers than it says."""
    rows = [{"at": NOON + 1000 * n, "service": "a", "ratio": 1.5} for n in range(4)]
    table = pq.read_table(pa.BufferReader(bytes_of(rows)))
    wanted = [
        place
        for place, row in enumerate(table.to_pylist())
        if (row["rollup"], row["interval_ms"], row["measure"]) == ("all/0", 1000, "lat")
    ]
    counts: list[int] = table["count"].to_pylist()
    counts[wanted[-1]] += 1
    broken = table.set_column(table.column_names.index("count"), "count", pa.array(counts, pa.int64()))
    file = written(broken, 4)
    asked = request(group_by=["service"], measures=["lat"])
    states = ArrayStates(VIEW, asked, time.monotonic() + 60)
    with pytest.raises(UnusableFileError, match="sketch"):
        states.add_file(file, rollup_selection(asked))
    assert orjson.loads(b"".join(states.to_json(Groups(VIEW, asked)))) == []
