"""The registries that come with a profile: as data, in the form of a schema update."""

from __future__ import annotations

from typing import Final

from tailrace.schema.profiles.evlog_config import EVLOG_KEYS
from tailrace.schema.profiles.fields import (
    LATENCY_MEASURE,
    keyword_field,
    keyword_fields,
    text_field,
    text_fields,
    typed_fields,
)
from tailrace.schema.profiles.metrics import API_VERSION
from tailrace.schema.profiles.shapes import COUNT, INSTANT, TEXT_OR_NULL, TEXTS, Json, closed_object

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
