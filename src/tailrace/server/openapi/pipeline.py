"""The pipeline: plan, publication, heartbeats."""

from __future__ import annotations

from typing import Final

from tailrace.search.index_files.index_plan import FAMILIES
from tailrace.server.openapi.components import (
    BOOLEAN,
    COUNT,
    COUNT_TEXT,
    OBJECT,
    STRING,
    Json,
    answer,
    array,
    closed,
    nullable,
    obj,
    operation,
    query,
    request,
    schema,
)

TAG: Final = "pipeline"
_ID: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
_SHA256: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_FAMILY: Final[Json] = {"enum": list(FAMILIES)}
_ADDED: Final[Json] = {"enum": [*FAMILIES, "segment"]}
_TEXT_OR_NULL: Final[Json] = nullable(STRING)
_RANGE: Final[dict[str, Json]] = {"first": COUNT, "last": COUNT}
_DESCRIBED: Final[dict[str, Json]] = {
    "object": STRING,
    **_RANGE,
    "epoch": COUNT,
    "rows": COUNT,
    "bytes": COUNT,
    "raw_bytes": COUNT,
    "sha256": _SHA256,
}
_SEGMENT: Final[Json] = obj({**_DESCRIBED, "families": array(_FAMILY)})
_WORK: Final[Json] = {
    "oneOf": [
        obj(
            {"job": {"const": "companions"}, "priority": COUNT, "segments": array(_SEGMENT)},
            {"replace": array(STRING)},
        ),
        obj(
            {
                "job": {"const": "merge"},
                "family": _FAMILY,
                "level": COUNT,
                **_RANGE,
                "inputs": array(STRING),
                "input_sha256": array(_SHA256),
            }
        ),
        obj({"job": {"const": "compact"}, **_RANGE, "segments": array(obj(_DESCRIBED))}),
    ]
}
SCHEMAS: Final[Json] = {
    "PipelinePlan": obj(
        {
            "layout": {"const": 1},
            "store": STRING,
            "streams": array(
                obj(
                    {
                        "stream": STRING,
                        "stream_id": _ID,
                        "epoch": COUNT,
                        "content_type": _TEXT_OR_NULL,
                        "profile": STRING,
                        "earliest": COUNT,
                        "manifest": obj({"object": STRING, "generation": COUNT}),
                        "plan": obj(
                            {
                                "generation": COUNT,
                                "hash": STRING,
                                "object": _TEXT_OR_NULL,
                                "families": array(_FAMILY),
                            }
                        ),
                        "work": array(_WORK),
                    }
                )
            ),
            "next_after": _TEXT_OR_NULL,
        }
    ),
    "Publication": obj(
        {
            "stream_id": _ID,
            "job": {"enum": ["companions", "merge", "compact"]},
            "plan_hash": STRING,
            "inputs": array(obj({"object": STRING, "sha256": _SHA256})),
        },
        {
            "writer": STRING,
            "add": array(
                obj(
                    {"family": _ADDED, **_RANGE, "rows": COUNT, "object": STRING, "bytes": COUNT}
                    | {"sha256": _SHA256},
                    {"stats": OBJECT},
                )
            ),
            "replace": array(STRING),
            "quarantine": array(obj({"object": STRING, "code": STRING, "message": STRING})),
        },
    ),
    "PublicationResult": obj(
        {"result": {"enum": ["published", "already_published"]}, "manifest_generation": COUNT}
    ),
    "PipelineHeartbeat": obj(
        {},
        {
            "state": STRING,
            "master": STRING,
            "spark_version": STRING,
            "pid": {"type": "integer"},
            "last_error": _TEXT_OR_NULL,
            "rss_bytes": COUNT_TEXT,
            "drain": BOOLEAN,
        },
    ),
}


def pipeline_paths() -> Json:
    return {
        "/v1/pipeline/plan": {"get": _plan(), "post": _rebuild()},
        "/v1/pipeline/publish": {"post": _publish()},
        "/v1/pipeline/heartbeat": {"post": _heartbeat()},
    }


def _plan() -> Json:
    return operation(
        "readPipelinePlan",
        TAG,
        "Plan of index files, merges and compactions to build",
        {"200": answer("Streams with work, in the order of their oldest segment.", schema("PipelinePlan"))},
        (404, 410),
        scope="manage",
        parameters=[
            query("stream", "Only this stream, with or without work."),
            query("after", "The `next_after` of the last response."),
            query("limit", "Streams in one response.", {"type": "integer", "minimum": 1, "maximum": 500}),
            query("jobs", "Only these jobs, separated by commas: companions, merge, compact; or all."),
            query("live", "Wait up to 4 s for work.", {"enum": ["false", "long-poll"]}),
        ],
    )


def _rebuild() -> Json:
    body = closed({"stream": STRING}, {"family": _FAMILY})
    done = obj({"stream": STRING, "scheduled": COUNT})
    return operation(
        "rebuildCompanions",
        TAG,
        "Rebuild index files",
        {
            "200": answer(
                "The index files are unlisted and will be built again.",
                done,
                example={"stream": "orders", "scheduled": 6},
            )
        },
        (404, 410, 429),
        scope="manage",
        body=request(body, {"stream": "orders", "family": "col"}, "The stream, and optionally one family."),
    )


def _publish() -> Json:
    example: Json = {
        "stream_id": "9f2c" * 8,
        "job": "companions",
        "plan_hash": "sha256:" + "0" * 64,
        "inputs": [],
    }
    return operation(
        "publishCompanions",
        TAG,
        "Publish objects that were built",
        {
            "200": answer(
                "The objects are listed, by this request or an earlier one.", schema("PublicationResult")
            )
        },
        (404, 409, 410, 429, 507),
        scope="manage",
        body=request(schema("Publication"), example, "The objects and their inputs."),
        more="Idempotent: it may be repeated.",
    )


def _heartbeat() -> Json:
    answered = obj({}, {"drain": BOOLEAN, "draining": BOOLEAN})
    return operation(
        "sendHeartbeat",
        TAG,
        "Report the state of a pipeline, or drain it",
        {"200": answer("Whether the pipeline shall exit.", answered)},
        scope="manage",
        body=request(schema("PipelineHeartbeat"), {"state": "idle"}, "The state, or `drain` alone."),
    )
