"""Ingestion of OpenTelemetry spans."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.components import (
    OBJECT,
    STRING,
    Json,
    answer,
    array,
    headers,
    obj,
    operation,
    params,
    schema,
)

TAG: Final = "traces"
_PROTOBUF: Final = "application/x-protobuf"
_BYTES: Final[Json] = {"type": "string", "format": "binary"}
_ATTRIBUTES: Final[Json] = array(obj({}, {"key": STRING, "value": OBJECT}))

SCHEMAS: Final[Json] = {
    "TraceExport": obj(
        {},
        {
            "resourceSpans": array(
                obj(
                    {},
                    {
                        "resource": obj({}, {"attributes": _ATTRIBUTES}),
                        "scopeSpans": array(obj({}, {"spans": array(OBJECT)}), maxItems=4096),
                    },
                ),
                maxItems=1024,
            )
        },
        description="`ExportTraceServiceRequest` of OTLP as JSON: ids in hex, 64-bit numbers as strings.",
    ),
    "TraceExportAnswer": obj(
        {},
        {"partialSuccess": obj({"rejectedSpans": STRING, "errorMessage": STRING})},
        description="Empty if all spans were stored.",
    ),
}

_EXAMPLE: Final = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "checkout"}}]},
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "traceId": "4bf92f3577b34da6a3ce929d0e0e4736",
                            "spanId": "00f067aa0ba902b7",
                            "name": "GET /orders",
                            "kind": 2,
                            "startTimeUnixNano": "1767225600000000000",
                            "endTimeUnixNano": "1767225600020000000",
                        }
                    ]
                }
            ],
        }
    ]
}


def trace_paths() -> Json:
    return {
        "/v1/stream/{name}/_otlp/v1/traces": {
            "parameters": params("name"),
            "post": _export("exportTraces", "Store spans in a stream with the `otel-traces` profile"),
        },
        "/v1/traces": {
            "post": _export("exportTracesByDefault", "Store spans in the stream of `otlp_traces_stream`"),
        },
    }


def _export(identifier: str, about: str) -> Json:
    stored = answer(
        "Stored; spans that were rejected are counted.",
        schema("TraceExportAnswer"),
        headers(always=("Stream-Next-Offset",)),
    )
    content: Json = {
        "application/json": {"schema": schema("TraceExport"), "example": _EXAMPLE},
        _PROTOBUF: {"schema": _BYTES},
    }
    assert isinstance(stored["content"], dict)
    stored["content"][_PROTOBUF] = {"schema": _BYTES}
    body: Json = {
        "description": "The export in either encoding, optionally with `Content-Encoding: gzip`.",
        "required": True,
        "content": content,
    }
    return operation(
        identifier, TAG, about, {"200": stored}, (404, 405, 409, 410, 415, 429, 507), scope="write", body=body
    )
