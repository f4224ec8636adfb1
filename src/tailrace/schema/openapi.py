"""JSON Schemas of `_schema` and `_profile` for the OpenAPI document.

By hand: both documents are validated by code of their own, with rules that no type can express.
"""

from __future__ import annotations

from typing import Final

from tailrace.routing.openapi import BOOLEAN, COUNT, OBJECT, STRING, Component, Json, array, closed, obj

_POINTER: Final[Json] = {"type": "string", "description": "JSON pointer, RFC 6901."}
_FLAGS: Final = ("exact", "prefix", "column", "exists", "sortable", "aggregatable", "positions", "contains")
_OPS: Final = (
    *("rename", "copy", "add", "remove", "hoist", "plunge", "wrap", "head", "convert", "in", "map"),
)
_VERSION: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
_NAMED: Final[Json] = {"pattern": "^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$"}

_SEARCH_FIELD: Final[Json] = closed(
    {
        "kind": {"enum": ["keyword", "text", "integer", "float", "date", "bool"]},
        "bindings": array(
            closed({"version": {"type": "integer", "minimum": 1}, "jsonPointer": _POINTER}), minItems=1
        ),
    },
    {
        "normalizer": {"enum": ["identity_v1", "lowercase_v1"]},
        "analyzer": {"enum": ["unicode_word_v1"]},
        **dict.fromkeys(_FLAGS, BOOLEAN),
    },
)
_MEASURE: Final[Json] = obj(
    {"kind": {"enum": ["count", "summary", "summary_parts"]}}, {"include": STRING, "field": STRING}
)
_ROLLUP: Final[Json] = closed(
    {
        "intervals": array(
            {"type": "string", "pattern": "^[1-9][0-9]{0,15}(ms|s|m|h|d)$"}, minItems=1, maxItems=16
        ),
        "measures": {
            "type": "object",
            "additionalProperties": _MEASURE,
            "minProperties": 1,
            "maxProperties": 32,
        },
    },
    {"timestampField": STRING, "include": STRING, "dimensions": array(STRING, maxItems=12)},
)
_DEFAULT_FIELD: Final[Json] = {
    "anyOf": [STRING, closed({"field": STRING}, {"boost": {"type": "number", "exclusiveMinimum": 0}})]
}

REGISTRY_EXAMPLE: Final[Json] = {
    "schema": {
        "type": "object",
        "properties": {
            "at": {"type": "string"},
            "service": {"type": "string"},
            "status": {"type": "integer"},
        },
    },
    "routingKey": {"jsonPointer": "/service", "required": False},
    "search": {
        "primaryTimestampField": "at",
        "fields": {
            "at": {"kind": "date", "bindings": [{"version": 1, "jsonPointer": "/at"}], "column": True},
            "service": {
                "kind": "keyword",
                "bindings": [{"version": 1, "jsonPointer": "/service"}],
                "exact": True,
                "prefix": True,
                "aggregatable": True,
            },
            "status": {
                "kind": "integer",
                "bindings": [{"version": 1, "jsonPointer": "/status"}],
                "column": True,
                "sortable": True,
                "aggregatable": True,
            },
        },
        "rollups": {
            "requests": {
                "intervals": ["1m", "1h"],
                "dimensions": ["service"],
                "measures": {"count": {"kind": "count"}, "status": {"kind": "summary", "field": "status"}},
            }
        },
    },
}
_ROUTING_KEY: Final = Component("RoutingKey", closed({"jsonPointer": _POINTER, "required": BOOLEAN}))
_SEARCH_CONFIG: Final = Component(
    "SearchConfig",
    closed(
        {
            "fields": {
                "type": "object",
                "propertyNames": _NAMED,
                "additionalProperties": _SEARCH_FIELD,
                "minProperties": 1,
                "maxProperties": 500,
            }
        },
        {
            "profile": STRING,
            "primaryTimestampField": STRING,
            "defaultFields": array(_DEFAULT_FIELD),
            "containsDefaultFields": array(_DEFAULT_FIELD),
            "aliases": {"type": "object", "propertyNames": _NAMED, "additionalProperties": STRING},
            "rollups": {"type": "object", "additionalProperties": _ROLLUP, "maxProperties": 64},
        },
    ),
)
_LENS: Final = Component(
    "Lens",
    closed(
        {
            "apiVersion": {"const": "durable.lens/v1"},
            "schema": STRING,
            "from": _VERSION,
            "to": _VERSION,
            "ops": array(obj({"op": {"enum": list(_OPS)}}), minItems=1, maxItems=1000),
        },
        {"description": STRING},
        description="Converts records of one version to the next.",
    ),
)
SCHEMA_UPDATE: Final = Component(
    "SchemaUpdate",
    closed(
        {},
        {
            "apiVersion": {"const": "durable.streams/schema-registry/v1"},
            "schema": {"description": "JSON Schema of the next version.", "type": ["object", "boolean"]},
            "lens": _LENS,
            "routingKey": {"anyOf": [_ROUTING_KEY, {"type": "null"}]},
            "search": {"anyOf": [_SEARCH_CONFIG, {"type": "null"}]},
        },
        description="At least one of `schema`, `routingKey` and `search`; null clears the latter two.",
        minProperties=1,
    ),
)
REGISTRY: Final = Component(
    "Registry",
    obj(
        {
            "apiVersion": STRING,
            "schema": {"type": "string", "description": "The stream's name."},
            "currentVersion": COUNT,
            "boundaries": array(obj({"offset": COUNT, "version": {"type": "integer", "minimum": 1}})),
            "schemas": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}},
            "lenses": {"type": "object", "additionalProperties": OBJECT},
        },
        {"routingKey": _ROUTING_KEY, "search": _SEARCH_CONFIG},
    ),
)
_PROFILE: Final = Component(
    "Profile",
    obj(
        {"kind": {"enum": ["generic", "evlog", "metrics", "otel-traces", "state-protocol"]}},
        {
            "redactKeys": array(STRING, maxItems=64),
            "correlation": closed(
                {},
                {
                    "requestIdFields": array(STRING, maxItems=64),
                    "traceContextFields": array(STRING, maxItems=64),
                    "parseTraceparent": BOOLEAN,
                },
            ),
            "observability": OBJECT,
            "requestIdAttributes": array(STRING, maxItems=64),
            "attributeLimits": OBJECT,
            "otlpLimits": OBJECT,
            "store": OBJECT,
            "dbStatementMode": {"enum": ["drop", "raw"]},
            "urlMode": {"enum": ["drop_query", "raw"]},
            "touch": obj(
                {}, {"enabled": BOOLEAN, "onMissingBefore": {"enum": ["coarse", "skipBefore", "error"]}}
            ),
        },
    ),
)
PROFILE_UPDATE: Final = Component(
    "ProfileUpdate", closed({"profile": _PROFILE}, {"apiVersion": {"const": "durable.streams/profile/v1"}})
)
PROFILE_RESOURCE: Final = Component(
    "ProfileResource", obj({"apiVersion": {"const": "durable.streams/profile/v1"}, "profile": _PROFILE})
)
