"""`_schema` and `_profile` of a stream."""

from __future__ import annotations

from typing import Final, cast

from tailrace.server.openapi.components import (
    BOOLEAN,
    COUNT,
    OBJECT,
    STRING,
    Json,
    answer,
    array,
    closed,
    obj,
    operation,
    params,
    query,
    request,
    schema,
)

TAG: Final = "registry"
POINTER: Final[Json] = {"type": "string", "description": "JSON pointer, RFC 6901."}
_FLAGS: Final = ("exact", "prefix", "column", "exists", "sortable", "aggregatable", "positions", "contains")
_OPS: Final = (
    *("rename", "copy", "add", "remove", "hoist", "plunge", "wrap", "head", "convert", "in", "map"),
)
VERSION: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
_NAMED: Final[Json] = {"pattern": "^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$"}

_FIELD: Final[Json] = closed(
    {
        "kind": {"enum": ["keyword", "text", "integer", "float", "date", "bool"]},
        "bindings": array(
            closed({"version": {"type": "integer", "minimum": 1}, "jsonPointer": POINTER}), minItems=1
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

_REGISTRY_EXAMPLE: Final[Json] = {
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

SCHEMAS: Final[Json] = {
    "RoutingKey": closed({"jsonPointer": POINTER, "required": BOOLEAN}),
    "SearchConfig": closed(
        {
            "fields": {
                "type": "object",
                "propertyNames": _NAMED,
                "additionalProperties": _FIELD,
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
    "Lens": closed(
        {
            "apiVersion": {"const": "durable.lens/v1"},
            "schema": STRING,
            "from": VERSION,
            "to": VERSION,
            "ops": array(obj({"op": {"enum": list(_OPS)}}), minItems=1, maxItems=1000),
        },
        {"description": STRING},
        description="Converts records of one version to the next.",
    ),
    "SchemaUpdate": closed(
        {},
        {
            "apiVersion": {"const": "durable.streams/schema-registry/v1"},
            "schema": {"description": "JSON Schema of the next version.", "type": ["object", "boolean"]},
            "lens": schema("Lens"),
            "routingKey": {"anyOf": [schema("RoutingKey"), {"type": "null"}]},
            "search": {"anyOf": [schema("SearchConfig"), {"type": "null"}]},
        },
        description="At least one of `schema`, `routingKey` and `search`; null clears the latter two.",
        minProperties=1,
    ),
    "Registry": obj(
        {
            "apiVersion": STRING,
            "schema": {"type": "string", "description": "The stream's name."},
            "currentVersion": COUNT,
            "boundaries": array(obj({"offset": COUNT, "version": {"type": "integer", "minimum": 1}})),
            "schemas": {"type": "object", "additionalProperties": {"type": ["object", "boolean"]}},
            "lenses": {"type": "object", "additionalProperties": OBJECT},
        },
        {"routingKey": schema("RoutingKey"), "search": schema("SearchConfig")},
    ),
    "ProfileUpdate": closed(
        {"profile": schema("Profile")}, {"apiVersion": {"const": "durable.streams/profile/v1"}}
    ),
    "ProfileResource": obj(
        {"apiVersion": {"const": "durable.streams/profile/v1"}, "profile": schema("Profile")}
    ),
    "Profile": obj(
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
}

_ERRORS: Final = (404, 410, 429)


_ADOPT: Final = query(
    "adopt",
    "If the stream has entries and the update has its first schema or a profile: check every entry, "
    "and install it from the first entry on. If an entry is invalid, the error names it and nothing changes.",
    {"enum": ["true", "false"]},
)


def _with_progress(shown: Json) -> Json:
    """A response that may be streamed line by line while entries are checked."""
    lines = "Lines of JSON: `checked` and `total` during the check, then `result` or `error`."
    content = cast("Json", shown["content"])
    return {
        **shown,
        "content": {**content, "application/x-ndjson": {"schema": {**STRING, "description": lines}}},
    }


def registry_paths() -> Json:
    shown = answer("The registry.", schema("Registry"))
    profile = answer("The profile.", schema("ProfileResource"))
    return {
        "/v1/stream/{name}/_schema": {
            "parameters": params("name"),
            "get": operation("readSchema", TAG, "Show the registry", {"200": shown}, _ERRORS, scope="read"),
            "post": operation(
                "updateSchema",
                TAG,
                "Add a schema version, set the routing key or the search configuration",
                {"200": _with_progress(shown)},
                (*_ERRORS, 405, 409, 507),
                scope="manage",
                parameters=[_ADOPT],
                body=request(
                    schema("SchemaUpdate"),
                    _REGISTRY_EXAMPLE,
                    "The changes; absent fields are left as they are.",
                ),
            ),
        },
        "/v1/stream/{name}/_profile": {
            "parameters": params("name"),
            "get": operation("readProfile", TAG, "Show the profile", {"200": profile}, _ERRORS, scope="read"),
            "post": operation(
                "installProfile",
                TAG,
                "Install a profile, or change its configuration",
                {"200": _with_progress(profile)},
                (*_ERRORS, 405, 409, 507),
                scope="manage",
                parameters=[_ADOPT],
                body=request(
                    schema("ProfileUpdate"),
                    {"profile": {"kind": "state-protocol", "touch": {"enabled": True}}},
                    "The profile.",
                ),
            ),
        },
    }
