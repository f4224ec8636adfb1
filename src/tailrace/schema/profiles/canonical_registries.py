"""The schema registries that profiles install, as data in the form of a schema update."""

from __future__ import annotations

from typing import Final

from tailrace.schema.profiles.evlog import EVLOG_KEYS
from tailrace.schema.profiles.metrics import API_VERSION
from tailrace.schema.profiles.otel_spans import KINDS, RESOURCE_ATTRIBUTES, STATUSES

FieldConfig = dict[str, object]

LATENCY_MEASURE: Final[FieldConfig] = {"kind": "summary", "field": "duration", "histogram": "log2_v1"}


def keyword_field(pointer: str, *, lowercase: bool, prefix: bool = True) -> FieldConfig:
    declared = _bind_pointer("keyword", pointer)
    if lowercase:
        declared["normalizer"] = "lowercase_v1"
    declared["exact"] = True
    if prefix:
        declared["prefix"] = True
    return declared | {"exists": True, "sortable": True, "aggregatable": True}


def typed_field(kind: str, pointer: str) -> FieldConfig:
    flags = ("exact", "column", "exists", "sortable", "aggregatable")
    return _bind_pointer(kind, pointer) | dict.fromkeys(flags, True)


def text_field(pointer: str) -> FieldConfig:
    return _bind_pointer("text", pointer) | {"analyzer": "unicode_word_v1", "exists": True, "positions": True}


# Fields that lie where their names say.


def keyword_fields(*names: str, lowercase: bool) -> FieldConfig:
    return {name: keyword_field(_pointer(name), lowercase=lowercase) for name in names}


def typed_fields(kind: str, *names: str) -> FieldConfig:
    return {name: typed_field(kind, _pointer(name)) for name in names}


def text_fields(*names: str) -> FieldConfig:
    return {name: text_field(_pointer(name)) for name in names}


def _pointer(name: str) -> str:
    return "/" + name.replace(".", "/")


def _bind_pointer(kind: str, pointer: str) -> FieldConfig:
    return {"kind": kind, "bindings": [{"version": 1, "jsonPointer": pointer}]}


Json = dict[str, object]

TEXT_OR_NULL: Final[Json] = {"type": ["string", "null"]}
TEXTS: Final[Json] = {"type": "array", "items": {"type": "string"}}
COUNT: Final[Json] = {"type": "integer", "minimum": 0}
INSTANT: Final[Json] = {"type": "string", "format": "date-time"}


def closed_object(properties: Json, optional: Json | None = None) -> Json:
    """An object with these properties and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties | (optional or {}),
        "required": list(properties),
    }


_NAME: Final[Json] = {"type": "string", "minLength": 1}
_INTEGER: Final[Json] = {"type": "integer"}
_NUMBER: Final[Json] = {"type": "number"}
_NUMBER_OR_NULL: Final[Json] = {"type": ["number", "null"]}


def _map_schema(values: Json) -> Json:
    return {"type": "object", "additionalProperties": values}


_EVLOG_SCHEMA: Final[Json] = closed_object(
    {
        **dict.fromkeys(EVLOG_KEYS, TEXT_OR_NULL),
        "timestamp": INSTANT,
        "level": {"enum": ["debug", "info", "warn", "error"]},
        "status": {"type": ["integer", "null"]},
        "duration": _NUMBER_OR_NULL,
        "sampling": {"type": ["object", "null"]},
        "redaction": closed_object({"keys": TEXTS}),
        "context": {"type": "object"},
    }
)

_EVLOG_SEARCH: Final[Json] = {
    "profile": "evlog",
    "primaryTimestampField": "timestamp",
    "defaultFields": [
        {"field": "message", "boost": 2},
        {"field": "why", "boost": 1.5},
        {"field": "fix", "boost": 1.25},
        {"field": "error.message", "boost": 2},
    ],
    "aliases": {
        "env": "environment",
        "msg": "message",
        "req": "requestId",
        "span": "spanId",
        "time": "timestamp",
        "trace": "traceId",
        "ts": "timestamp",
    },
    "fields": {
        **typed_fields("date", "timestamp"),
        **keyword_fields("level", "service", "environment", "method", lowercase=True),
        **keyword_fields("requestId", "traceId", "spanId", "path", lowercase=False),
        **typed_fields("integer", "status"),
        **typed_fields("float", "duration"),
        **text_fields("message", "why", "fix"),
        "error.message": text_field("/context/error/message"),
    },
    "rollups": {
        "requests": {
            "dimensions": ["service", "environment", "level", "method", "status"],
            "intervals": ["1m", "5m", "1h"],
            "measures": {
                "requests": {"kind": "count"},
                "errors": {"kind": "count", "include": "level:error"},
                "latency": LATENCY_MEASURE,
            },
        }
    },
}

EVLOG_REGISTRY: Final[Json] = {"schema": _EVLOG_SCHEMA, "search": _EVLOG_SEARCH}

_HISTOGRAM: Final[Json] = _map_schema(_NUMBER)
_METRICS_SCHEMA: Final[Json] = closed_object(
    {
        "apiVersion": {"const": API_VERSION},
        "kind": {"const": "interval"},
        **dict.fromkeys(("metric", "unit", "metricKind", "temporality"), _NAME),
        **dict.fromkeys(("windowStart", "windowEnd", "intervalMs"), _INTEGER),
        **dict.fromkeys(("instance", "stream"), TEXT_OR_NULL),
        **dict.fromkeys(("tags", "attributes"), _map_schema({"type": "string"})),
        "dimensionPairs": TEXTS,
        "dimensionKey": TEXT_OR_NULL,
        "seriesKey": {"type": "string"},
        "count": COUNT,
        "sum": _NUMBER,
        **dict.fromkeys(("min", "max"), _NUMBER_OR_NULL),
        **dict.fromkeys(("avg", "p50", "p95", "p99"), _NUMBER),
        "buckets": _HISTOGRAM,
        "summary": closed_object(
            {
                "count": COUNT,
                "sum": _NUMBER,
                "min": _NUMBER_OR_NULL,
                "max": _NUMBER_OR_NULL,
                "histogram": _HISTOGRAM,
            }
        ),
    },
    {"sketch": True},
)

_METRICS_SEARCH: Final[Json] = {
    "profile": "metrics",
    "primaryTimestampField": "windowStart",
    "defaultFields": [
        {"field": "metric", "boost": 2},
        {"field": "stream", "boost": 1.25},
        {"field": "dimensionPairs", "boost": 1},
    ],
    "aliases": {
        "ts": "windowStart",
        "time": "windowStart",
        "name": "metric",
        "dims": "dimensionKey",
        "series": "seriesKey",
    },
    "fields": {
        **typed_fields("date", "windowStart", "windowEnd"),
        **typed_fields("integer", "intervalMs", "count"),
        **keyword_fields("metric", "unit", "metricKind", "temporality", "stream", lowercase=True),
        **keyword_fields("instance", "dimensionKey", "dimensionPairs", lowercase=False),
        "seriesKey": keyword_field("/seriesKey", lowercase=False, prefix=False),
        **typed_fields("float", "sum", "min", "max", "avg", "p95", "p99"),
    },
    "rollups": {
        "metrics": {
            "dimensions": [
                *("metric", "unit", "stream", "instance", "dimensionKey", "metricKind", "temporality"),
            ],
            "intervals": ["10s", "1m", "5m", "1h"],
            "measures": {
                "value": {
                    "kind": "summary_parts",
                    "countJsonPointer": "/count",
                    "sumJsonPointer": "/sum",
                    "minJsonPointer": "/min",
                    "maxJsonPointer": "/max",
                    "histogramJsonPointer": "/buckets",
                    "sketchJsonPointer": "/sketch",
                }
            },
        }
    },
}

METRICS_SCHEMA_REGISTRY: Final[Json] = {"schema": _METRICS_SCHEMA}  # of the server's own metrics stream
METRICS_REGISTRY: Final[Json] = {
    "schema": _METRICS_SCHEMA,
    "routingKey": {"jsonPointer": "/seriesKey", "required": True},
    "search": _METRICS_SEARCH,
}


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
