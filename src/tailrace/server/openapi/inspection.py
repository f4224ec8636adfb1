"""`_details`, `_index_status` and `_routing_keys` of a stream."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.components import (
    BOOLEAN,
    COUNT,
    COUNT_TEXT,
    INSTANT,
    STRING,
    Json,
    answer,
    array,
    counts,
    headers,
    nullable,
    obj,
    operation,
    params,
    query,
    schema,
    texts,
)

TAG: Final = "inspection"
_COUNTERS: Final = ("puts", "reads", "gets", "heads", "lists", "deletes")
_LAG: Final[dict[str, Json]] = {
    "lag_segments": COUNT,
    "lag_ms": nullable(COUNT_TEXT),
    "bytes_at_rest": COUNT_TEXT,
    "object_count": COUNT,
    "fully_indexed_uploaded_segments": BOOLEAN,
    "updated_at": nullable(INSTANT),
}
_RUNS: Final[dict[str, Json]] = {
    **_LAG,
    **counts("indexed_segment_count", "active_run_count", "retired_run_count"),
}

_STREAM: Final[Json] = obj(
    {
        "name": STRING,
        "content_type": STRING,
        "profile": STRING,
        "created_at": INSTANT,
        "updated_at": INSTANT,
        "expires_at": nullable(INSTANT),
        "ttl_seconds": nullable(COUNT),
        "stream_seq": nullable(STRING),
        "closed": BOOLEAN,
        **counts("epoch", "segment_count", "uploaded_segment_count"),
        **texts("next_offset", "sealed_through", "uploaded_through", "pending_rows", "pending_bytes"),
        **texts("total_size_bytes", "wal_rows", "wal_bytes"),
        "last_append_at": nullable(INSTANT),
        "last_segment_cut_at": nullable(INSTANT),
    },
    {"observability": schema("Observability"), "seal_conflict": BOOLEAN},
)
_STORAGE: Final[Json] = obj(
    {
        "object_storage": obj(
            {
                **texts("total_bytes", "segments_bytes", "indexes_bytes", "manifest_and_meta_bytes"),
                **texts("manifest_bytes", "schema_registry_bytes"),
                **counts("segment_object_count", "routing_index_object_count"),
                **counts("routing_lexicon_object_count", "exact_index_object_count"),
                **counts("bundled_companion_object_count"),
            }
        ),
        "local_storage": obj(
            {
                **texts("total_bytes", "wal_retained_bytes", "pending_tail_bytes"),
                **texts("pending_sealed_segment_bytes", "segment_cache_bytes", "routing_index_cache_bytes"),
                **texts("exact_index_cache_bytes", "lexicon_index_cache_bytes", "companion_cache_bytes"),
                **texts("sqlite_shared_total_bytes"),
            }
        ),
        "companion_families": obj(texts("col_bytes", "fts_bytes", "agg_bytes", "mblk_bytes", "exact_bytes")),
    }
)

SCHEMAS: Final[Json] = {
    "IndexStatus": obj(
        {
            "stream": STRING,
            "profile": STRING,
            "desired_index_plan_generation": COUNT,
            "segments": obj(counts("total_count", "uploaded_count")),
            "manifest": obj(
                {
                    **counts("generation", "uploaded_generation"),
                    "last_uploaded_at": nullable(INSTANT),
                    "last_uploaded_etag": nullable(STRING),
                    "last_uploaded_size_bytes": nullable(STRING),
                }
            ),
            "routing_key_index": obj({"configured": BOOLEAN, **_RUNS}),
            "routing_key_lexicon": obj({"configured": BOOLEAN, **_RUNS}),
            "exact_indexes": array(
                obj({"name": STRING, "kind": STRING, "stale_configuration": BOOLEAN, **_RUNS})
            ),
            "bundled_companions": obj(
                {
                    "object_count": COUNT,
                    "bytes_at_rest": COUNT_TEXT,
                    "fully_indexed_uploaded_segments": BOOLEAN,
                }
            ),
            "search_families": array(
                obj(
                    {
                        "family": STRING,
                        "fields": array(STRING),
                        **counts("plan_generation", "covered_segment_count"),
                        **counts("contiguous_covered_segment_count", "stale_segment_count"),
                        **_LAG,
                    }
                )
            ),
            "last_error": nullable(STRING),
            "quarantined": array(
                obj({**counts("first", "last"), "code": STRING, "message": STRING, "at": nullable(INSTANT)})
            ),
            "tail_index": obj({**counts("rows", "bytes", "dropped_rows"), "building": BOOLEAN}),
        }
    ),
    "Details": obj(
        {
            "stream": _STREAM,
            "profile": schema("ProfileResource"),
            "schema": schema("Registry"),
            "index_status": schema("IndexStatus"),
            "storage": _STORAGE,
            "object_store_requests": obj(
                {**texts(*_COUNTERS), "by_artifact": array(obj({"artifact": STRING, **texts(*_COUNTERS)}))}
            ),
        }
    ),
    "RoutingKeys": obj(
        {
            "stream": STRING,
            "source": obj({"kind": {"const": "routing_key"}, "name": STRING}),
            "took_ms": COUNT,
            "coverage": obj(
                {
                    "complete": BOOLEAN,
                    **counts("indexed_segments", "scanned_wal_rows"),
                    **counts("scanned_uploaded_segments", "scanned_local_segments"),
                    **counts("possible_missing_uploaded_segments", "possible_missing_local_segments"),
                }
            ),
            "timing": {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
            "keys": array(STRING),
            "next_after": nullable(STRING),
        }
    ),
}


def inspection_paths() -> Json:
    limit: Json = {"type": "integer", "minimum": 1, "maximum": 500, "default": 100}
    return {
        "/v1/stream/{name}/_details": {
            "parameters": params("name"),
            "get": _watched("readDetails", "All details of a stream", "Details"),
        },
        "/v1/stream/{name}/_index_status": {
            "parameters": params("name"),
            "get": _watched("readIndexStatus", "Progress of each index family", "IndexStatus"),
        },
        "/v1/stream/{name}/_routing_keys": {
            "parameters": params("name"),
            "get": operation(
                "listRoutingKeys",
                TAG,
                "List the distinct routing keys in order",
                {"200": answer("A page of keys.", schema("RoutingKeys"))},
                (404, 410, 429),
                scope="read",
                parameters=[
                    query("limit", "Keys on a page.", limit),
                    query("after", "Only keys after this one."),
                ],
            ),
        },
    }


def _watched(identifier: str, about: str, shape: str) -> Json:
    live: Json = {"enum": ["long-poll", "true", "1", "false", "0", ""]}
    return operation(
        identifier,
        TAG,
        about,
        {
            "200": answer("The current document.", schema(shape), headers(always=("ETag",))),
            "304": answer("Not modified.", head=headers("Stream-Wait-Limit-Ms", always=("ETag",))),
        },
        (404, 410, 429),
        scope="read",
        parameters=[
            query("live", "Wait until the document differs from `If-None-Match`.", live),
            *params("timeout", "timeout_ms", "if-none-match"),
        ],
    )
