"""Search and aggregate requests: parsing, limits, and binding to the stream's search configuration."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple, cast

from tailrace.common.timestamps import TIMESTAMP_MS_MAX, TIMESTAMP_MS_MIN, parse_rfc3339_ns
from tailrace.schema.json_values import expect_array, expect_object, expect_string, invalid_request, shorten
from tailrace.schema.search_config import Measure, Rollup, SearchConfig, parse_interval_ms
from tailrace.search.query_language import SEARCH_DIALECT, BoundQuery, bind_query
from tailrace.search.ranking import SORTS_MAX, SortKey, SortValue, parse_search_after, parse_sort
from tailrace.search.records import INT64_MAX

SIZE_DEFAULT: Final = 50
SIZE_MAX: Final = 500

_SEARCH_KEYS: Final = frozenset({"q", "size", "sort", "search_after", "timeout_ms"})


class SearchParameters(NamedTuple):
    """A parsed search, before its fields are resolved."""

    q: str
    size: int
    sort: list[str] | None
    search_after: object  # None if absent
    timeout_ms: int | None


class SearchRequest(NamedTuple):
    query: BoundQuery
    size: int
    sort: tuple[SortKey, ...]
    after: tuple[SortValue, ...] | None
    timeout_ms: int

    @property
    def by_score(self) -> bool:
        return any(key.kind == "score" for key in self.sort)


def parse_search_body(body: object) -> SearchParameters:
    """Parse the JSON body of a search."""
    members = expect_object(body, "search")
    if "track_total_hits" in members:
        raise invalid_request("track_total_hits is no longer supported")
    expect_object(members, "search", _SEARCH_KEYS)
    if members.get("q") is None:
        raise invalid_request("missing q")
    if not isinstance(members["q"], str):
        raise invalid_request("q must be a string")
    sort: list[str] | None = None
    if members.get("sort") is not None:
        items = expect_array(members["sort"], "sort", SORTS_MAX)
        sort = [expect_string(item, f"sort[{index}]") for index, item in enumerate(items)]
    after = members.get("search_after")
    if after is not None:
        expect_array(after, "search_after", SORTS_MAX + 1)
    return SearchParameters(
        members["q"],
        _size(members.get("size", SIZE_DEFAULT)),
        sort,
        after,
        _timeout_ms(members.get("timeout_ms")),
    )


def _size(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= SIZE_MAX:
        raise invalid_request(f"size must be an integer between 1 and {SIZE_MAX}")
    return value


def _timeout_ms(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or not math.isfinite(value):
        raise invalid_request("timeout_ms must be a number of at least 0")
    return int(value)


def bind_search(
    parameters: SearchParameters, config: SearchConfig | None, timeout_ms_max: int
) -> SearchRequest:
    """Resolve the fields of a request in the stream's search configuration."""
    query = bind_query(parameters.q, config, SEARCH_DIALECT)
    config = cast("SearchConfig", config)
    sort = parse_sort(parameters.sort, query, config)
    after = None if parameters.search_after is None else parse_search_after(parameters.search_after, sort)
    timeout_ms = (
        timeout_ms_max if parameters.timeout_ms is None else min(parameters.timeout_ms, timeout_ms_max)
    )
    return SearchRequest(query, parameters.size, sort, after, timeout_ms)


NAMES_MAX: Final = 64  # in one list; more than any rollup has

_AGGREGATE_KEYS: Final = frozenset({"rollup", "from", "to", "interval", "q", "group_by", "measures"})
_NS_PER_MS: Final = 1_000_000
_NANOSECONDS: Final = re.compile(r"-?[0-9]{1,19}")


class AggregateParameters(NamedTuple):
    """A parsed aggregate, before its rollup is resolved."""

    rollup: str
    from_ns: int
    to_ns: int
    interval: str
    q: str | None
    group_by: list[str]
    measures: list[str] | None


class AggregateRequest(NamedTuple):
    """An aggregate over records whose timestamp is at least `from_ms` and less than `to_ms`."""

    rollup_name: str
    rollup: Rollup
    timestamp_field: str
    from_ms: int
    to_ms: int
    interval: str
    interval_ms: int
    query: BoundQuery | None
    include: BoundQuery | None
    group_by: tuple[str, ...]
    measures: dict[str, Measure]  # by name, in the order of names
    measure_includes: dict[str, BoundQuery]


def parse_aggregate(body: object) -> AggregateParameters:
    """Parse the JSON body of an aggregate."""
    members = expect_object(body, "aggregate", _AGGREGATE_KEYS)
    for key in ("rollup", "from", "to", "interval"):
        if members.get(key) is None:
            raise invalid_request(f"missing {key}")
    q, measures = members.get("q"), members.get("measures")
    parameters = AggregateParameters(
        expect_string(members["rollup"], "rollup"),
        _parse_time_ns(members["from"], "from"),
        _parse_time_ns(members["to"], "to"),
        expect_string(members["interval"], "interval"),
        None if q is None else expect_string(q, "q"),
        [] if members.get("group_by") is None else _names(members["group_by"], "group_by"),
        None if measures is None else _names(measures, "measures"),
    )
    if parameters.to_ns <= parameters.from_ns:
        raise invalid_request("to must be greater than from")
    return parameters


def _names(value: object, path: str) -> list[str]:
    return [
        expect_string(item, f"{path}[{index}]")
        for index, item in enumerate(expect_array(value, path, NAMES_MAX))
    ]


def _parse_time_ns(value: object, key: str) -> int:
    """RFC 3339, nanoseconds as text, or milliseconds as a number."""
    found: int | None = None
    if isinstance(value, str):
        found = int(value) if _NANOSECONDS.fullmatch(value) else parse_rfc3339_ns(value)
        if found is not None and abs(found) >= INT64_MAX and not _NANOSECONDS.fullmatch(value):
            found = None  # beyond 64 bits of nanoseconds
    elif isinstance(value, int) and not isinstance(value, bool):
        found = value * _NS_PER_MS
    elif isinstance(value, float) and math.isfinite(value * _NS_PER_MS):
        found = int(value * _NS_PER_MS)
    if found is None or not TIMESTAMP_MS_MIN <= found // _NS_PER_MS <= TIMESTAMP_MS_MAX:
        raise invalid_request(f"{key} must be a valid timestamp")
    return found


def bind_aggregate(parameters: AggregateParameters, config: SearchConfig | None) -> AggregateRequest:
    """Resolve the fields of a request in the stream's search configuration."""
    if config is None:
        raise invalid_request("search is not configured for this stream")
    rollup = config.rollups.get(parameters.rollup)
    if rollup is None:
        raise invalid_request(f"unknown rollup {shorten(parameters.rollup)}")
    if parameters.interval not in rollup.intervals:
        raise invalid_request(
            f"interval {shorten(parameters.interval)} is not configured for rollup {parameters.rollup}"
        )
    measures = _measures(parameters, rollup)
    return AggregateRequest(
        parameters.rollup,
        rollup,
        cast("str", rollup.timestamp_field or config.primary_timestamp_field),
        # Timestamps are whole milliseconds: bounds are rounded up.
        -(-parameters.from_ns // _NS_PER_MS),
        -(-parameters.to_ns // _NS_PER_MS),
        parameters.interval,
        cast("int", parse_interval_ms(parameters.interval)),
        None if parameters.q is None else bind_query(parameters.q, config, SEARCH_DIALECT),
        None if rollup.include is None else bind_query(rollup.include, config, SEARCH_DIALECT),
        _group_by(parameters, rollup, config),
        measures,
        {
            name: bind_query(measure.include, config, SEARCH_DIALECT)
            for name, measure in measures.items()
            if measure.include is not None
        },
    )


def _group_by(parameters: AggregateParameters, rollup: Rollup, config: SearchConfig) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for index, name in enumerate(parameters.group_by):
        field = config.resolve(name)
        if field is None or field not in rollup.dimensions:
            raise invalid_request(
                f"group_by field {shorten(name)} is not configured on rollup {parameters.rollup}"
            )
        if field in found:
            raise invalid_request(f"group_by[{index}] is duplicated")
        found[field] = None
    return tuple(found)


def _measures(parameters: AggregateParameters, rollup: Rollup) -> dict[str, Measure]:
    names = list(rollup.measures) if parameters.measures is None else parameters.measures
    for index, name in enumerate(names):
        if name not in rollup.measures:
            raise invalid_request(f"unknown measure {shorten(name)} on rollup {parameters.rollup}")
        if name in names[:index]:
            raise invalid_request(f"measures[{index}] is duplicated")
    return {name: rollup.measures[name] for name in sorted(names)}
