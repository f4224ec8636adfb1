"""A search as it was asked for, checked against the stream's search configuration."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, cast

from tailrace.schema.body import expect_array, expect_object, expect_string, invalid_request
from tailrace.schema.search_config import SearchConfig
from tailrace.search.bind import BoundQuery, bind_query
from tailrace.search.dialect import SEARCH_DIALECT
from tailrace.search.sort import SORTS_MAX, SortKey, SortValue, parse_search_after, parse_sort

SIZE_DEFAULT: Final = 50
SIZE_MAX: Final = 500

_SEARCH_KEYS: Final = frozenset({"q", "size", "sort", "search_after", "timeout_ms"})


class SearchParameters(NamedTuple):
    """The shape of a request, before any field is looked up."""

    q: str
    size: int
    sort: list[str] | None
    search_after: object  # None if not given
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
    """The shape of a search in JSON."""
    given = expect_object(body, "search")
    if "track_total_hits" in given:
        raise invalid_request("track_total_hits is no longer supported")
    expect_object(given, "search", _SEARCH_KEYS)
    if given.get("q") is None:
        raise invalid_request("missing q")
    if not isinstance(given["q"], str):
        raise invalid_request("q must be a string")
    sort: list[str] | None = None
    if given.get("sort") is not None:
        items = expect_array(given["sort"], "sort", SORTS_MAX)
        sort = [expect_string(item, f"sort[{index}]") for index, item in enumerate(items)]
    after = given.get("search_after")
    if after is not None:
        expect_array(after, "search_after", SORTS_MAX + 1)
    return SearchParameters(
        given["q"], _size(given.get("size", SIZE_DEFAULT)), sort, after, _timeout_ms(given.get("timeout_ms"))
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


def bind_search(asked: SearchParameters, config: SearchConfig | None, timeout_ms_max: int) -> SearchRequest:
    """The request in the terms of the stream."""
    query = bind_query(asked.q, config, SEARCH_DIALECT)
    config = cast("SearchConfig", config)
    sort = parse_sort(asked.sort, query, config)
    after = None if asked.search_after is None else parse_search_after(asked.search_after, sort)
    timeout_ms = timeout_ms_max if asked.timeout_ms is None else min(asked.timeout_ms, timeout_ms_max)
    return SearchRequest(query, asked.size, sort, after, timeout_ms)
