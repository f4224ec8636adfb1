"""The server: health, metrics, memory, sealing, and the OpenAPI document."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.components import (
    BOOLEAN,
    COUNT,
    INSTANT,
    OBJECT,
    STRING,
    Json,
    answer,
    array,
    counts,
    headers,
    obj,
    operation,
    params,
    query,
    schema,
)

TAG: Final = "server"
_TOP: Final[Json] = {"type": "object", "additionalProperties": array(obj({"stream": STRING}))}
_QUEUE: Final[Json] = obj(counts("configured_limit", "current_limit", "active", "queued"))

SCHEMAS: Final[Json] = {
    "Health": obj({"status": {"const": "ok"}}),
    "Readiness": obj(
        {"status": {"enum": ["ready", "degraded", "stopping"]}},
        {"deployment": STRING, "reason": STRING, "object_store": STRING},
    ),
    "Sealed": obj({"sealed": BOOLEAN}),
    "ServerDetails": obj(
        {
            "auto_tune": obj({"enabled": BOOLEAN}),
            "configured_limits": {"type": "object", "additionalProperties": OBJECT},
            "runtime": obj(
                {
                    "memory": obj(
                        {"pressure_active": BOOLEAN, "last_rss_bytes": COUNT, "max_rss_bytes": COUNT}
                    ),
                    "ingest_queue": obj({**counts("requests", "bytes"), "full": BOOLEAN}),
                    "local_backpressure": obj(
                        {"enabled": BOOLEAN, **counts("current_bytes", "max_bytes"), "over_limit": BOOLEAN}
                    ),
                    "uploads": obj(counts("pending_segments")),
                    "concurrency": {"type": "object", "additionalProperties": _QUEUE},
                    "top_streams": _TOP,
                }
            ),
        }
    ),
    "ServerMemory": obj(
        {
            "ts": INSTANT,
            "process": obj(counts("rss_bytes", "heap_total_bytes", "heap_used_bytes")),
            "process_breakdown": obj(counts("managed_bytes", "unattributed_rss_bytes")),
            "sqlite": OBJECT,
            "gc": OBJECT,
            "high_water": {"type": "object", "additionalProperties": obj({"value": COUNT, "at": INSTANT})},
            "counters": {"type": "object", "additionalProperties": COUNT},
            "runtime_counts": {"type": "object", "additionalProperties": COUNT},
            "runtime_bytes": OBJECT,
            "runtime_totals": {"type": "object", "additionalProperties": COUNT},
            "top_streams": _TOP,
        }
    ),
}


def server_paths() -> Json:
    return {
        "/healthz": {"get": _healthy("readHealth")},
        "/health": {"get": _healthy("readHealthAlias")},
        "/readyz": {"get": _ready()},
        "/metrics": {"get": _metrics()},
        "/v1/server/_details": {
            "get": operation(
                "readServerDetails",
                TAG,
                "Limits, queues and memory",
                {"200": answer("As it is now.", schema("ServerDetails"))},
                scope="manage",
            )
        },
        "/v1/server/_mem": {
            "get": operation(
                "readServerMemory",
                TAG,
                "Memory by subsystem",
                {"200": answer("As it is now.", schema("ServerMemory"))},
                scope="manage",
            )
        },
        "/v1/server/_seal": {"post": _seal()},
        "/openapi.json": {"get": _description()},
    }


def _healthy(identifier: str) -> Json:
    return operation(
        identifier, TAG, "Whether the process is running", {"200": answer("It is running.", schema("Health"))}
    )


def _ready() -> Json:
    ready: Json = {"status": "ready", "deployment": "d1", "object_store": "ok"}
    degraded = answer("Not ready; `reason` says why.", schema("Readiness"), headers("Retry-After"))
    return operation(
        "readReadiness",
        TAG,
        "Whether appends and reads are served",
        {"200": answer("Ready.", schema("Readiness"), example=ready), "503": degraded},
    )


def _metrics() -> Json:
    text = answer("Prometheus text.")
    text["content"] = {"text/plain": {"schema": STRING}}
    return operation("readMetrics", TAG, "Metrics", {"200": text}, scope="manage")


def _seal() -> Json:
    return operation(
        "seal",
        TAG,
        "Move everything, or one stream, to the object store",
        {
            "200": answer("Everything is in the object store.", schema("Sealed"), example={"sealed": True}),
            "202": answer(
                "Sealing continues after the request timeout: repeat the request.", schema("Sealed")
            ),
        },
        (404, 409, 410, 429, 507),
        scope="manage",
        parameters=[query("stream", "Only this stream.")],
    )


def _description() -> Json:
    return operation(
        "readDescription",
        TAG,
        "The OpenAPI document",
        {
            "200": answer(
                "OpenAPI 3.1.", obj({"openapi": STRING, "paths": OBJECT}), headers(always=("ETag",))
            ),
            "304": answer("Not modified.", head=headers(always=("ETag",))),
        },
        parameters=params("if-none-match"),
    )
