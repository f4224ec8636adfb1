"""The registries that come with a profile: as data, in the form of a schema update."""

from __future__ import annotations

from typing import Final

from tailrace.profiles.evlog_config import KEYS
from tailrace.profiles.fields import keyword, text, typed
from tailrace.profiles.metrics import API_VERSION

Json = dict[str, object]

_TEXT: Final[Json] = {"type": ["string", "null"]}
_NAME: Final[Json] = {"type": "string", "minLength": 1}
_INTEGER: Final[Json] = {"type": "integer"}
_NUMBER: Final[Json] = {"type": "number"}
_NUMBER_OR_NULL: Final[Json] = {"type": ["number", "null"]}
_TEXTS: Final[Json] = {"type": "array", "items": {"type": "string"}}


def _closed(properties: Json, optional: Json | None = None) -> Json:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties | (optional or {}),
        "required": list(properties),
    }


def _map(values: Json) -> Json:
    return {"type": "object", "additionalProperties": values}


_EVLOG_SCHEMA: Final[Json] = _closed(
    {
        **dict.fromkeys(KEYS, _TEXT),
        "timestamp": {"type": "string", "format": "date-time"},
        "level": {"enum": ["debug", "info", "warn", "error"]},
        "status": {"type": ["integer", "null"]},
        "duration": _NUMBER_OR_NULL,
        "sampling": {"type": ["object", "null"]},
        "redaction": _closed({"keys": _TEXTS}),
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
        "timestamp": typed("date", "/timestamp"),
        **{
            name: keyword(f"/{name}", lowercase=True)
            for name in ("level", "service", "environment", "method")
        },
        **{name: keyword(f"/{name}", lowercase=False) for name in ("requestId", "traceId", "spanId", "path")},
        "status": typed("integer", "/status"),
        "duration": typed("float", "/duration"),
        **{name: text(f"/{name}") for name in ("message", "why", "fix")},
        "error.message": text("/context/error/message"),
    },
    "rollups": {
        "requests": {
            "dimensions": ["service", "environment", "level", "method", "status"],
            "intervals": ["1m", "5m", "1h"],
            "measures": {
                "requests": {"kind": "count"},
                "errors": {"kind": "count", "include": "level:error"},
                "latency": {"kind": "summary", "field": "duration", "histogram": "log2_v1"},
            },
        }
    },
}

EVLOG: Final[Json] = {"schema": _EVLOG_SCHEMA, "search": _EVLOG_SEARCH}

_HISTOGRAM: Final[Json] = _map(_NUMBER)
_METRICS_SCHEMA: Final[Json] = _closed(
    {
        "apiVersion": {"const": API_VERSION},
        "kind": {"const": "interval"},
        **dict.fromkeys(("metric", "unit", "metricKind", "temporality"), _NAME),
        **dict.fromkeys(("windowStart", "windowEnd", "intervalMs"), _INTEGER),
        **dict.fromkeys(("instance", "stream"), _TEXT),
        **dict.fromkeys(("tags", "attributes"), _map({"type": "string"})),
        "dimensionPairs": _TEXTS,
        "dimensionKey": _TEXT,
        "seriesKey": {"type": "string"},
        "count": {"type": "integer", "minimum": 0},
        "sum": _NUMBER,
        **dict.fromkeys(("min", "max"), _NUMBER_OR_NULL),
        **dict.fromkeys(("avg", "p50", "p95", "p99"), _NUMBER),
        "buckets": _HISTOGRAM,
        "summary": _closed(
            {
                "count": {"type": "integer", "minimum": 0},
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
        **{name: typed("date", f"/{name}") for name in ("windowStart", "windowEnd")},
        **{name: typed("integer", f"/{name}") for name in ("intervalMs", "count")},
        **{
            name: keyword(f"/{name}", lowercase=True)
            for name in ("metric", "unit", "metricKind", "temporality", "stream")
        },
        **{
            name: keyword(f"/{name}", lowercase=False)
            for name in ("instance", "dimensionKey", "dimensionPairs")
        },
        "seriesKey": keyword("/seriesKey", lowercase=False, prefix=False),
        **{name: typed("float", f"/{name}") for name in ("sum", "min", "max", "avg", "p95", "p99")},
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

METRICS_SCHEMA_ONLY: Final[Json] = {"schema": _METRICS_SCHEMA}  # of the server's own metrics stream
METRICS: Final[Json] = {
    "schema": _METRICS_SCHEMA,
    "routingKey": {"jsonPointer": "/seriesKey", "required": True},
    "search": _METRICS_SEARCH,
}
