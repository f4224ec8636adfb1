"""The registry that comes with the profile: what a span looks like and what can be asked about it."""

from __future__ import annotations

from typing import Final

from tailrace.profiles.fields import keyword, text, typed
from tailrace.profiles.otel.semantics import RESOURCE
from tailrace.profiles.otel.span import KINDS, STATUSES

Json = dict[str, object]

_TEXT: Final[Json] = {"type": ["string", "null"]}
_COUNT: Final[Json] = {"type": "integer", "minimum": 0}
_INSTANT: Final[Json] = {"type": "string", "format": "date-time"}
_NANOS: Final[Json] = {"type": "string", "pattern": "^[0-9]{1,20}$"}
_TRACE_ID: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
_SPAN_ID: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_MAP: Final[Json] = {"type": "object"}
_TEXTS: Final[Json] = {"type": "array", "items": {"type": "string"}}


def _closed(properties: Json) -> Json:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(properties),
    }


def _all_text(*names: str) -> Json:
    return dict.fromkeys(names, _TEXT)


_EVENT: Final = _closed(
    {
        "name": {"type": "string"},
        "timestamp": {"anyOf": [_INSTANT, {"type": "null"}]},
        "timeUnixNano": {"anyOf": [_NANOS, {"type": "null"}]},
        "attributes": _MAP,
        "droppedAttributes": _COUNT,
    }
)
_LINK: Final = _closed(
    {
        "traceId": _TRACE_ID,
        "spanId": _SPAN_ID,
        "traceState": _TEXT,
        "attributes": _MAP,
        "droppedAttributes": _COUNT,
    }
)

SCHEMA: Final[Json] = _closed(
    {
        "schemaVersion": {"const": 1},
        "signal": {"const": "trace.span"},
        "timestamp": _INSTANT,
        "endTimestamp": _INSTANT,
        "startUnixNano": _NANOS,
        "endUnixNano": _NANOS,
        "duration": {"type": "number", "minimum": 0},
        "traceId": _TRACE_ID,
        "spanId": _SPAN_ID,
        "parentSpanId": {"anyOf": [_SPAN_ID, {"type": "null"}]},
        "traceState": _TEXT,
        "traceFlags": _closed(
            {"sampled": {"type": ["boolean", "null"]}, "raw": {"type": ["integer", "null"]}}
        ),
        "name": {"type": "string"},
        "kind": {"enum": list(KINDS)},
        "status": _closed({"code": {"enum": list(STATUSES)}, "message": _TEXT}),
        **_all_text(*RESOURCE, "requestId"),
        "http": _closed(
            {
                **_all_text("method", "route", "path", "target", "url"),
                "statusCode": {"type": ["integer", "null"]},
                **_all_text("userAgent"),
            }
        ),
        "db": _closed(_all_text("system", "name", "operation", "statement")),
        "rpc": _closed(_all_text("system", "service", "method")),
        "messaging": _closed(_all_text("system", "destination", "operation")),
        "error": _closed({"isError": {"type": "boolean"}, **_all_text("type", "message", "stacktrace")}),
        "instrumentationScope": _closed({**_all_text("name", "version", "schemaUrl"), "attributes": _MAP}),
        "resource": _closed({"schemaUrl": _TEXT, "attributes": _MAP}),
        "attributes": _MAP,
        "events": {"type": "array", "items": _EVENT},
        "eventNames": _TEXTS,
        "links": {"type": "array", "items": _LINK},
        "dropped": _closed(dict.fromkeys(("attributes", "events", "links"), _COUNT)),
        "redaction": _closed({"keys": _TEXTS}),
        "identity": _closed({"spanKey": {"type": "string"}, "dedupeKey": {"type": "string"}}),
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
_LATENCY: Final[Json] = {"kind": "summary", "field": "duration", "histogram": "log2_v1"}
_ERRORS: Final[Json] = {"kind": "count", "include": "error:true"}


def _pointer(name: str) -> str:
    return "/" + name.replace(".", "/")


SEARCH: Final[Json] = {
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
        **{name: typed("date", _pointer(name)) for name in ("timestamp", "endTimestamp")},
        "duration": typed("float", "/duration"),
        "http.statusCode": typed("integer", "/http/statusCode"),
        "error.isError": typed("bool", "/error/isError"),
        **{name: keyword(_pointer(name), lowercase=False) for name in _EXACT},
        **{name: keyword(_pointer(name), lowercase=True) for name in _NAMES},
        **{name: text(_pointer(name)) for name in ("status.message", "error.message", "error.stacktrace")},
        "db.statement": text("/db/statement"),
        "events.name": text("/eventNames"),
    },
    "rollups": {
        "spans": {
            "dimensions": ["service", "kind", "status.code"],
            "intervals": _INTERVALS,
            "measures": {"spans": {"kind": "count"}, "errors": _ERRORS, "latency": _LATENCY},
        },
        "http_server": {
            "include": "kind:server",
            "dimensions": ["service", "http.method", "http.route", "http.statusCode"],
            "intervals": _INTERVALS,
            "measures": {"requests": {"kind": "count"}, "errors": _ERRORS, "latency": _LATENCY},
        },
    },
}

OTEL_TRACES: Final[Json] = {"schema": SCHEMA, "search": SEARCH}
