"""Files of rollups: what is wanted of them, and that a broken one adds nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.aggregate_model import rollup_view
from support.companions import Stored, build, plan_of
from support.queries import payload_of
from tailrace.query.aggregate import Groups
from tailrace.query.aggregate_request import AggregateRequest, bind_aggregate, parse_aggregate
from tailrace.query.aggregate_spans import add_states
from tailrace.query.families import agg_file
from tailrace.query.families.agg_file import AggFile, Wanted
from tailrace.query.families.body import WholeBody
from tailrace.query.families.parquet_file import ParquetFile
from tailrace.query.families.published import UnusableFileError
from tailrace.query.family_format import AGG

NOON = 1767225600000
VIEW = rollup_view(None)


def request(**more: Any) -> AggregateRequest:
    body = {"rollup": "all", "from": NOON, "to": NOON + 5000, "interval": "1s", **more}
    return bind_aggregate(parse_aggregate(body), VIEW.config)


@pytest.fixture(scope="module")
def file() -> AggFile:
    """Eleven records in three seconds; those of service b are alone in their groups."""
    rows = [{"at": NOON + 250 * n, "service": "a", "status": 5, "ratio": n / 8} for n in range(8)]
    rows += [{"at": NOON + 1000 * n, "service": "b", "status": n, "ratio": 1.5} for n in range(3)]
    stored = [Stored(entry, payload_of(row)) for entry, row in enumerate(rows, 1)]
    return AggFile(ParquetFile(WholeBody(build(stored, plan_of(VIEW.registry))[AGG].data)))


def test_states_are_added_up_by_what_is_asked_for(file: AggFile) -> None:
    groups = Groups(VIEW, request(group_by=["service"], measures=["n", "lat"]))
    assert add_states(
        file, request(group_by=["service"], measures=["n", "lat"]), groups, time.monotonic() + 60
    )
    place = groups.counted.index("n")
    found = {key: group.counts[place] for key, group in groups.groups.items()}
    expected = {(NOON, ("a",)): 4, (NOON + 1000, ("a",)): 4}
    assert found == expected | {(NOON + 1000 * n, ("b",)): 1 for n in range(3)}
    one = groups.groups[NOON + 2000, ("b",)].summaries["lat"]
    assert (one.count, one.smallest, one.largest, one.sketch.count) == (1, 1.5, 1.5, 1)
    several = groups.groups[NOON, ("a",)].summaries["lat"]
    assert (several.count, several.smallest, several.largest) == (4, 0.0, 3 / 8)


def test_only_the_wanted_value_of_a_dimension_counts(file: AggFile) -> None:
    asked = request(q="service:b", measures=["n"])
    groups = Groups(VIEW, asked)
    assert add_states(file, asked, groups, time.monotonic() + 60)
    assert [group.counts for group in groups.groups.values()] == [[1], [1], [1]]


def test_windows_that_are_empty_are_known(file: AggFile) -> None:
    assert file.has_window("all", 1000, NOON + 2000)
    assert not file.has_window("all", 1000, NOON + 3000)
    assert not file.has_window("nothing", 1000, NOON)
    assert not list(file.parts(Wanted("all", 1000, NOON - 9000, NOON)))


def test_nothing_of_a_broken_file_is_added(file: AggFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_of(_form: bytes) -> None:
        return None

    monkeypatch.setattr(agg_file, "sketch_of", none_of)
    asked = request(group_by=["service"])
    groups = Groups(VIEW, asked)
    with pytest.raises(UnusableFileError, match="sketch"):
        add_states(file, asked, groups, time.monotonic() + 60)
    assert not groups.groups
