"""Aggregates in the plainest way: every record looked at, all numbers kept, exact sums and quantiles."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec

from support.search_model import registry_of, search_body
from tailrace.common.timestamps import format_rfc3339_ms
from tailrace.schema.search_config import parse_interval_ms, parse_search_config
from tailrace.search.aggregates.measures import nearest_rank
from tailrace.search.matching import evaluate_record
from tailrace.search.query_language import SEARCH_DIALECT, bind_query
from tailrace.search.records import RecordView, field_values

INTERVALS = ["7ms", "1s", "1h"]
PARTS = {
    "kind": "summary_parts",
    "countJsonPointer": "/count",
    "sumJsonPointer": "/sum",
    "minJsonPointer": "/min",
    "maxJsonPointer": "/max",
    "histogramJsonPointer": "/buckets",
    "sketchJsonPointer": "/sketch",
}
ROLLUPS: dict[str, Any] = {
    "all": {
        "dimensions": ["service", "ok", "status"],
        "intervals": INTERVALS,
        "measures": {
            "n": {"kind": "count"},
            "bad": {"kind": "count", "include": "status:>=5 OR message:checkout"},
            "lat": {"kind": "summary", "field": "ratio", "histogram": "log2_v1"},
            "size": {"kind": "summary", "field": "status"},
        },
    },
    "some": {
        "include": "-id:x",
        "dimensions": ["service"],
        "intervals": INTERVALS,
        "measures": {"n": {"kind": "count"}, "value": PARTS},
    },
}


def rollup_search(rollups: dict[str, Any] = ROLLUPS) -> dict[str, Any]:
    body = search_body()
    for name in ("ratio", "status"):
        body["fields"][name]["aggregatable"] = True
    body["aliases"]["time"] = "at"
    body["rollups"] = copy.deepcopy(rollups)
    return body


def rollup_view(evolved_at: int | None = None, rollups: dict[str, Any] = ROLLUPS) -> RecordView:
    search = parse_search_config(rollup_search(rollups))
    return RecordView(msgspec.structs.replace(registry_of(evolved_at), search=search))


class AggregateModel:
    """`records` are promoted already; None stands for one that has no values."""

    def __init__(self, records: Sequence[object], view: RecordView) -> None:
        self._records = records
        self._view = view

    def _values(self, record: object, field: str) -> list[Any]:
        return list(field_values(record, self._view.config.fields[field], self._view.version))

    def _holds(self, text: str | None, record: object) -> bool:
        if text is None:
            return True
        config = self._view.config
        return evaluate_record(bind_query(text, config, SEARCH_DIALECT), record, config, self._view.version)

    def members(self, body: dict[str, Any]) -> list[tuple[int, Any]]:
        """The records that count, each with its time."""
        rollup = self._view.config.rollups[body["rollup"]]
        found: list[tuple[int, Any]] = []
        for record in self._records:
            if not isinstance(record, dict):
                continue
            times = self._values(record, rollup.timestamp_field or "at")
            if len(times) != 1 or not body["from"] <= times[0] < body["to"]:
                continue
            if any(len(set(self._values(record, name))) > 1 for name in rollup.dimensions):
                continue
            if self._holds(rollup.include, record) and self._holds(body.get("q"), record):
                found.append((times[0], record))
        return found

    def groups(self, body: dict[str, Any]) -> dict[tuple[str, str], list[Any]]:
        """The records of each group, by the start of the window and the text of the key."""
        span = parse_interval_ms(body["interval"])
        assert span is not None
        groups: dict[tuple[str, str], list[Any]] = {}
        for at, record in self.members(body):
            key: dict[str, str | None] = {}
            for name in body.get("group_by", []):
                values = self._values(record, name)
                key[name] = _text(values[0]) if values else None
            text = json.dumps(key, separators=(",", ":"), ensure_ascii=False)
            groups.setdefault((format_rfc3339_ms(at // span * span), text), []).append(record)
        return groups

    def check(self, body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Everything an answer says, and nothing missing."""
        expected = self.groups(body)
        seen: list[tuple[str, str]] = []
        for bucket in answer["buckets"]:
            assert bucket["groups"]
            for group in bucket["groups"]:
                key = json.dumps(group["key"], separators=(",", ":"), ensure_ascii=False)
                seen.append((bucket["start"], key))
                self._check_measures(body["rollup"], expected[seen[-1]], group["measures"])
        assert set(seen) == set(expected)
        assert seen == sorted(seen, key=lambda one: (one[0], one[1].encode()))

    def _check_measures(self, rollup: str, records: list[Any], shown: dict[str, Any]) -> None:
        assert list(shown) == sorted(shown)
        for name, measure in self._view.config.rollups[rollup].measures.items():
            if name not in shown:
                continue
            if measure.kind == "count":
                assert shown[name] == {"count": sum(self._holds(measure.include, r) for r in records)}
            elif measure.kind == "summary":
                assert measure.field is not None
                numbers = [value for record in records for value in self._values(record, measure.field)]
                check_summary(numbers, shown[name], histogram=measure.histogram is not None)
            else:
                check_parts(records, shown[name])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def label(value: Any) -> str:
    power = 1
    while power * 2 <= max(1, abs(Fraction(value))):
        power *= 2
    return str(power)


def check_summary(numbers: list[Any], shown: dict[str, Any], *, histogram: bool) -> None:
    total = sum(map(Fraction, numbers), Fraction(0))
    assert shown["count"] == len(numbers)
    assert math.isclose(shown["sum"], total, rel_tol=1e-9)
    assert shown["min"] == min(numbers, default=None)
    assert shown["max"] == max(numbers, default=None)
    assert ("histogram" in shown) == histogram
    if histogram:
        counts: dict[str, int] = {}
        for number in sorted(numbers, key=abs):
            counts[label(number)] = counts.get(label(number), 0) + 1
        assert list(shown["histogram"].items()) == list(counts.items())
    if not numbers:
        assert [shown[name] for name in ("avg", "p50", "p95", "p99")] == [None] * 4
        return
    assert math.isclose(shown["avg"], total / len(numbers), rel_tol=1e-9)
    for percent in (50, 95, 99):
        exact = sorted(numbers)[nearest_rank(percent / 100, len(numbers)) - 1]
        assert abs(shown[f"p{percent}"] - exact) <= abs(exact) * 0.01
        assert shown["min"] <= shown[f"p{percent}"] <= shown["max"]


def check_parts(records: list[Any], shown: dict[str, Any]) -> None:
    """Parts in tests are whole numbers, or not there."""
    used = [record for record in records if isinstance(record.get("count"), int) and record["count"] > 0]
    used = [record for record in used if isinstance(record.get("sum"), int)]
    assert shown["count"] == sum(record["count"] for record in used)
    assert shown["sum"] == sum(record["sum"] for record in used)
    assert shown["min"] == min((r["min"] for r in used if "min" in r), default=None)
    assert shown["max"] == max((r["max"] for r in used if "max" in r), default=None)
    assert sum(shown["histogram"].values()) == shown["count"]
    assert (shown["p50"] is None) == (shown["percentile_method"] is None)
