"""`touch/...`: waiting for changes, on streams with the `state-protocol` profile."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.components import (
    BOOLEAN,
    COUNT,
    COUNT_TEXT,
    OFFSET,
    STRING,
    Json,
    answer,
    array,
    closed,
    counts,
    obj,
    operation,
    params,
    query,
    request,
    schema,
)

TAG: Final = "touch"
_ERRORS: Final = (404, 410, 429)
_CURSOR: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{16}:[0-9]{1,18}$"}
_TEMPLATE_ID: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_TIMEOUT_MS: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 120_000, "default": 30_000}
_TTL_MS: Final[Json] = {"type": "integer", "minimum": 1, "maximum": 30 * 86_400_000}
_KIND: Final[Json] = {"enum": ["fineKey", "tableKey", "templateKey"]}
_BUCKET: Final[dict[str, Json]] = {
    "bucketMaxSourceOffsetSeq": COUNT_TEXT,
    **counts("flushAtMs", "bucketStartMs"),
}

_TEMPLATES: Final[Json] = array(
    closed(
        {
            "entity": STRING,
            "fields": array(
                closed({"name": STRING}, {"encoding": {"type": "string", "default": "string"}}), maxItems=64
            ),
        }
    ),
    maxItems=256,
)

SCHEMAS: Final[Json] = {
    "TouchMeta": obj(
        {
            "mode": {"const": "memory"},
            "cursor": _CURSOR,
            "epoch": STRING,
            **counts(
                "generation", "bucketMs", "coalesceMs", "filterSize", "k", "pendingKeys", "overflowBuckets"
            ),
            **counts("activeWaiters", "lastFlushAtMs", "activeTemplates", "lagSourceOffsets"),
            "bucketMaxSourceOffsetSeq": COUNT_TEXT,
            "settled": BOOLEAN,
            "touchMode": {"enum": ["idle", "fine", "restricted", "coarseOnly"]},
            "walScannedThrough": OFFSET,
        }
    ),
    "TouchTemplates": closed({"templates": _TEMPLATES}, {"inactivityTtlMs": _TTL_MS}),
    "TouchActivation": obj(
        {
            "activated": array(
                obj(
                    {
                        "templateId": _TEMPLATE_ID,
                        "state": {"const": "active"},
                        "activeFromTouchOffset": _CURSOR,
                    }
                )
            ),
            "denied": array(obj({"templateId": _TEMPLATE_ID, "reason": STRING})),
            "limits": obj(counts("maxActiveTemplatesPerStream", "maxActiveTemplatesPerEntity")),
        }
    ),
    "TouchWait": closed(
        {"cursor": {"anyOf": [{"const": "now"}, _CURSOR]}},
        {
            "keys": array({"type": "string", "minLength": 1, "maxLength": 1024}, maxItems=1024),
            "keyIds": array({"type": "integer", "minimum": 0, "maximum": 2**32 - 1}, maxItems=1024),
            "timeoutMs": _TIMEOUT_MS,
            "interestMode": {"enum": ["fine", "coarse"], "default": "fine"},
            "exact": BOOLEAN,
            "templateIdsUsed": array(_TEMPLATE_ID, maxItems=1024),
            "declareTemplates": _TEMPLATES,
            "inactivityTtlMs": _TTL_MS,
        },
        description="At least one of `keys` and `keyIds`.",
    ),
    "Touched": obj({"touched": BOOLEAN, "cursor": _CURSOR, "effectiveWaitKind": _KIND, **_BUCKET}),
    "TouchStale": obj(
        {
            "stale": {"const": True},
            "cursor": _CURSOR,
            "epoch": STRING,
            "generation": COUNT,
            "effectiveWaitKind": _KIND,
            **_BUCKET,
            "error": obj({"code": {"const": "stale"}, "message": STRING}),
        }
    ),
}


def touch_paths() -> Json:
    either: Json = {"anyOf": [schema("Touched"), schema("TouchStale")]}
    template = {"entity": "orders", "fields": [{"name": "customer", "encoding": "string"}]}
    return {
        "/v1/stream/{name}/touch/meta": {
            "parameters": params("name"),
            "get": operation(
                "readTouchMeta",
                TAG,
                "State of touches, and a cursor to start with",
                {"200": answer("The current state.", schema("TouchMeta"))},
                _ERRORS,
                scope="read",
                parameters=[
                    query("settle", "`flush` first processes all appended entries.", {"enum": ["flush", ""]}),
                    query("timeoutMs", "Timeout of the flush.", _TIMEOUT_MS),
                ],
            ),
        },
        "/v1/stream/{name}/touch/templates/activate": {
            "parameters": params("name"),
            "post": operation(
                "activateTouchTemplates",
                TAG,
                "Activate templates: sets of fields whose changes are reported",
                {"200": answer("Active and denied templates.", schema("TouchActivation"))},
                (*_ERRORS, 409, 507),
                scope="read",
                body=request(schema("TouchTemplates"), {"templates": [template]}, "The templates."),
            ),
        },
        "/v1/stream/{name}/touch/wait": {
            "parameters": params("name"),
            "post": operation(
                "waitForTouch",
                TAG,
                "Wait until one of the keys is touched",
                {
                    "200": answer(
                        "Touched, not touched before the timeout, or stale (the cursor is too old).", either
                    )
                },
                (*_ERRORS, 409, 507),
                scope="read",
                body=request(
                    schema("TouchWait"),
                    {"cursor": "now", "keys": ["00d5a1c0ffee0001"], "timeoutMs": 1000},
                    "The keys to wait for.",
                ),
            ),
        },
    }
