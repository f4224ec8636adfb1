"""JSON Schemas of `_search` and `_aggregate` for the OpenAPI document.

By hand: requests are parsed with errors of their own, and results are built from columns.
"""

from __future__ import annotations

from typing import Final

from tailrace.protocol.http_headers import SEARCH_HEADERS
from tailrace.routing.openapi import (
    BOOLEAN,
    COUNT,
    INSTANT,
    OBJECT,
    OFFSET,
    STRING,
    Component,
    Json,
    array,
    closed,
    counts,
    nullable,
    obj,
)

_MOMENT: Final[Json] = {
    "type": ["string", "number"],
    "description": "RFC 3339, nanoseconds as text, or milliseconds as a number.",
}
SEARCH_REQUEST: Final = Component(
    "SearchRequest",
    closed(
        {"q": {"type": "string", "maxLength": 16384}},
        {
            "size": {"type": "integer", "minimum": 1, "maximum": 500, "default": 50},
            "sort": array(STRING, maxItems=64),
            "search_after": {"type": "array", "description": "`next_search_after` of the previous page."},
            "timeout_ms": {"type": "number", "minimum": 0},
        },
    ),
)
AGGREGATE_REQUEST: Final = Component(
    "AggregateRequest",
    closed(
        {"rollup": STRING, "from": _MOMENT, "to": _MOMENT, "interval": STRING},
        {
            "q": {"type": ["string", "null"], "maxLength": 16384},
            "group_by": array(STRING, maxItems=64),
            "measures": array(STRING, maxItems=64),
        },
    ),
)
_COVERAGE: Final = Component(
    "Coverage",
    obj(
        {
            "mode": {"enum": ["complete", "published"]},
            "complete": BOOLEAN,
            "stream_head_offset": OFFSET,
            "visible_through_offset": OFFSET,
            "visible_through_primary_timestamp_max": nullable(INSTANT),
            "oldest_omitted_append_at": nullable(INSTANT),
            **counts(
                *(
                    "possible_missing_uploaded_segments",
                    "possible_missing_sealed_rows",
                    "possible_missing_wal_rows",
                ),
                *(
                    "possible_missing_events_upper_bound",
                    "indexed_segments",
                    "scanned_segments",
                    "scanned_tail_docs",
                ),
            ),
        },
        {"index_families_used": array(STRING)},
        description="What was searched, with further counters of work and time.",
    ),
)
SEARCH_RESULT: Final = Component(
    "SearchResult",
    obj(
        {
            "stream": STRING,
            "snapshot_end_offset": OFFSET,
            "took_ms": COUNT,
            "timed_out": BOOLEAN,
            "timeout_ms": COUNT,
            "coverage": _COVERAGE,
            "total": obj({"value": COUNT, "relation": {"enum": ["eq", "gte"]}}),
            "hits": array(
                obj(
                    {
                        "offset": OFFSET,
                        "score": {"type": ["number", "null"]},
                        "sort": {"type": "array"},
                        "fields": OBJECT,
                        "source": {},
                    }
                )
            ),
            "next_search_after": {"type": ["array", "null"]},
        }
    ),
)
AGGREGATE: Final = Component(
    "Aggregate",
    obj(
        {
            "stream": STRING,
            "rollup": STRING,
            "from": INSTANT,
            "to": INSTANT,
            "interval": STRING,
            "coverage": obj({"complete": BOOLEAN, "used_rollups": BOOLEAN}),
            "buckets": array(
                obj(
                    {
                        "start": INSTANT,
                        "end": INSTANT,
                        "groups": array(
                            obj(
                                {
                                    "key": OBJECT,
                                    "measures": {
                                        "type": "object",
                                        "additionalProperties": OBJECT,
                                    },
                                }
                            )
                        ),
                    }
                )
            ),
        }
    ),
)


def search_headers() -> Json:
    flag: Json = {"enum": ["true", "false"]}
    shapes: dict[str, Json] = {
        "search-timed-out": flag,
        "search-coverage-complete": flag,
        "search-total-relation": {"enum": ["eq", "gte"]},
        "search-index-families-used": STRING,
    }
    return {
        name: {
            "description": "As in the body.",
            "schema": shapes.get(name) or _number(name),
            "required": True,
        }
        for name in SEARCH_HEADERS
    }


def _number(name: str) -> Json:
    """Times have a fraction, except for two that are integers in the body as well."""
    timed = name.endswith("-ms") and name not in ("search-timeout-ms", "search-took-ms")
    return {"type": "number", "minimum": 0} if timed else COUNT
