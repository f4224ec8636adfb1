"""`_search` and `_aggregate`, over all acknowledged entries."""

from __future__ import annotations

from typing import Final

from tailrace.protocol.http_headers import SEARCH_HEADERS
from tailrace.server.openapi.components import (
    BOOLEAN,
    COUNT,
    INSTANT,
    OBJECT,
    OFFSET,
    STRING,
    Json,
    answer,
    array,
    closed,
    counts,
    nullable,
    obj,
    operation,
    params,
    query,
    request,
    schema,
)

TAG: Final = "search"
_BOTH: Final = "The partial result of a search that timed out (`timed_out`), or `request_timeout`."
_MOMENT: Final[Json] = {
    "type": ["string", "number"],
    "description": "RFC 3339, nanoseconds as text, or milliseconds as a number.",
}

COVERAGE: Final[Json] = obj(
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
)

SCHEMAS: Final[Json] = {
    "SearchRequest": closed(
        {"q": {"type": "string", "maxLength": 16384}},
        {
            "size": {"type": "integer", "minimum": 1, "maximum": 500, "default": 50},
            "sort": array(STRING, maxItems=64),
            "search_after": {"type": "array", "description": "`next_search_after` of the previous page."},
            "timeout_ms": {"type": "number", "minimum": 0},
        },
    ),
    "Coverage": COVERAGE,
    "AggregateRequest": closed(
        {"rollup": STRING, "from": _MOMENT, "to": _MOMENT, "interval": STRING},
        {
            "q": {"type": ["string", "null"], "maxLength": 16384},
            "group_by": array(STRING, maxItems=64),
            "measures": array(STRING, maxItems=64),
        },
    ),
    "Aggregate": obj(
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
    "SearchResult": obj(
        {
            "stream": STRING,
            "snapshot_end_offset": OFFSET,
            "took_ms": COUNT,
            "timed_out": BOOLEAN,
            "timeout_ms": COUNT,
            "coverage": schema("Coverage"),
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
}


def search_paths() -> Json:
    size: Json = {"type": "integer", "minimum": 1, "maximum": 500, "default": 50}
    asked = [
        query(
            "q",
            "The query.",
            {"type": "string", "maxLength": 16384},
            required=True,
            example="service:checkout",
        ),
        query("size", "Hits on a page.", size),
        query("sort", "Comma-separated `field:asc` or `field:desc`; `offset` and `_score` too."),
        query("search_after", "`next_search_after` of the previous page, as JSON."),
        query("timeout_ms", "Timeout of the search.", {"type": "number", "minimum": 0}),
    ]
    example = {"q": "service:checkout status:>=500", "sort": ["status:desc"], "size": 20}
    body = request(schema("SearchRequest"), example, "The search.")
    return {
        "/v1/stream/{name}/_search": {
            "parameters": params("name"),
            "get": _search("searchByQuery", parameters=asked),
            "post": _search("search", body=body),
        },
        "/v1/stream/{name}/_aggregate": {"parameters": params("name"), "post": _aggregate()},
    }


def _search(identifier: str, parameters: list[Json] | None = None, body: Json | None = None) -> Json:
    either: Json = {"anyOf": [schema("SearchResult"), schema("Error")]}
    return operation(
        identifier,
        TAG,
        "Search the records of a stream",
        {
            "200": answer("Hits, totals and coverage.", schema("SearchResult"), _counters()),
            "408": answer(_BOTH, either),
        },
        (404, 410, 429),
        scope="read",
        parameters=parameters or (),
        body=body,
    )


def _aggregate() -> Json:
    example = {
        "rollup": "requests",
        "from": "2026-01-01T00:00:00Z",
        "to": "2026-01-02T00:00:00Z",
        "interval": "1h",
        "group_by": ["service"],
    }
    return operation(
        "aggregate",
        TAG,
        "Aggregate a rollup over time intervals",
        {"200": answer("Buckets with their groups and measures.", schema("Aggregate"))},
        (404, 410, 429),
        scope="read",
        body=request(schema("AggregateRequest"), example, "The aggregate."),
    )


def _counters() -> Json:
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
