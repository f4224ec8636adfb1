"""The registry that comes with the profile: what a span looks like and what can be asked about it."""

from __future__ import annotations

from typing import Final

from tailrace.schema.profiles.fields import (
    LATENCY_MEASURE,
    keyword_fields,
    text_field,
    text_fields,
    typed_fields,
)
from tailrace.schema.profiles.semantics import RESOURCE_ATTRIBUTES
from tailrace.schema.profiles.shapes import COUNT, INSTANT, TEXT_OR_NULL, TEXTS, Json, closed_object
from tailrace.schema.profiles.span import KINDS, STATUSES

_NANOS: Final[Json] = {"type": "string", "pattern": "^[0-9]{1,20}$"}
_TRACE_ID: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
_SPAN_ID: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_MAP: Final[Json] = {"type": "object"}


def _all_text(*names: str) -> Json:
    return dict.fromkeys(names, TEXT_OR_NULL)


_EVENT: Final = closed_object(
    {
        "name": {"type": "string"},
        "timestamp": {"anyOf": [INSTANT, {"type": "null"}]},
        "timeUnixNano": {"anyOf": [_NANOS, {"type": "null"}]},
        "attributes": _MAP,
        "droppedAttributes": COUNT,
    }
)
_LINK: Final = closed_object(
    {
        "traceId": _TRACE_ID,
        "spanId": _SPAN_ID,
        "traceState": TEXT_OR_NULL,
        "attributes": _MAP,
        "droppedAttributes": COUNT,
    }
)

OTEL_SCHEMA: Final[Json] = closed_object(
    {
        "schemaVersion": {"const": 1},
        "signal": {"const": "trace.span"},
        "timestamp": INSTANT,
        "endTimestamp": INSTANT,
        "startUnixNano": _NANOS,
        "endUnixNano": _NANOS,
        "duration": {"type": "number", "minimum": 0},
        "traceId": _TRACE_ID,
        "spanId": _SPAN_ID,
        "parentSpanId": {"anyOf": [_SPAN_ID, {"type": "null"}]},
        "traceState": TEXT_OR_NULL,
        "traceFlags": closed_object(
            {"sampled": {"type": ["boolean", "null"]}, "raw": {"type": ["integer", "null"]}}
        ),
        "name": {"type": "string"},
        "kind": {"enum": list(KINDS)},
        "status": closed_object({"code": {"enum": list(STATUSES)}, "message": TEXT_OR_NULL}),
        **_all_text(*RESOURCE_ATTRIBUTES, "requestId"),
        "http": closed_object(
            {
                **_all_text("method", "route", "path", "target", "url"),
                "statusCode": {"type": ["integer", "null"]},
                **_all_text("userAgent"),
            }
        ),
        "db": closed_object(_all_text("system", "name", "operation", "statement")),
        "rpc": closed_object(_all_text("system", "service", "method")),
        "messaging": closed_object(_all_text("system", "destination", "operation")),
        "error": closed_object(
            {"isError": {"type": "boolean"}, **_all_text("type", "message", "stacktrace")}
        ),
        "instrumentationScope": closed_object(
            {**_all_text("name", "version", "schemaUrl"), "attributes": _MAP}
        ),
        "resource": closed_object({"schemaUrl": TEXT_OR_NULL, "attributes": _MAP}),
        "attributes": _MAP,
        "events": {"type": "array", "items": _EVENT},
        "eventNames": TEXTS,
        "links": {"type": "array", "items": _LINK},
        "dropped": closed_object(dict.fromkeys(("attributes", "events", "links"), COUNT)),
        "redaction": closed_object({"keys": TEXTS}),
        "identity": closed_object({"spanKey": {"type": "string"}, "dedupeKey": {"type": "string"}}),
    }
)

# Ids keep their case; everything else is found in any.
_EXACT: Final = (
    "traceId",
    "spanId",
    "parentSpanId",
    "requestId",
    "serviceInstanceId",
    "http.path",
    "http.route",
)
_NAMES: Final = (
    *("service", "serviceNamespace", "environment", "version", "region", "name", "kind"),
    *("status.code", "error.type", "http.method", "db.system", "db.operation"),
    *("rpc.system", "rpc.service", "rpc.method"),
    *("messaging.system", "messaging.destination", "messaging.operation"),
)
_INTERVALS: Final = ["1m", "5m", "1h"]
_ERRORS: Final[Json] = {"kind": "count", "include": "error:true"}

OTEL_SEARCH: Final[Json] = {
    "profile": "otel-traces",
    "primaryTimestampField": "timestamp",
    "defaultFields": [
        {"field": "name", "boost": 2},
        {"field": "error.message", "boost": 2},
        {"field": "status.message", "boost": 1.5},
        {"field": "events.name", "boost": 1.2},
        {"field": "db.statement", "boost": 0.5},
    ],
    "aliases": {
        "trace": "traceId",
        "span": "spanId",
        "parent": "parentSpanId",
        "req": "requestId",
        "svc": "service",
        "op": "name",
        "route": "http.route",
        "method": "http.method",
        "status": "http.statusCode",
        "error": "error.isError",
        "db": "db.system",
        "duration_ms": "duration",
        "time": "timestamp",
        "ts": "timestamp",
    },
    "fields": {
        **typed_fields("date", "timestamp", "endTimestamp"),
        **typed_fields("float", "duration"),
        **typed_fields("integer", "http.statusCode"),
        **typed_fields("bool", "error.isError"),
        **keyword_fields(*_EXACT, lowercase=False),
        **keyword_fields(*_NAMES, lowercase=True),
        **text_fields("status.message", "error.message", "error.stacktrace", "db.statement"),
        "events.name": text_field("/eventNames"),
    },
    "rollups": {
        "spans": {
            "dimensions": ["service", "kind", "status.code"],
            "intervals": _INTERVALS,
            "measures": {"spans": {"kind": "count"}, "errors": _ERRORS, "latency": LATENCY_MEASURE},
        },
        "http_server": {
            "include": "kind:server",
            "dimensions": ["service", "http.method", "http.route", "http.statusCode"],
            "intervals": _INTERVALS,
            "measures": {"requests": {"kind": "count"}, "errors": _ERRORS, "latency": LATENCY_MEASURE},
        },
    },
}

OTEL_REGISTRY: Final[Json] = {"schema": OTEL_SCHEMA, "search": OTEL_SEARCH}
