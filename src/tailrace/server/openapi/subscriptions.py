"""Subscriptions: webhooks and pull-wake, below `/v1/stream/__ds`."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.components import (
    BOOLEAN,
    COUNT,
    INSTANT,
    STRING,
    Json,
    answer,
    array,
    closed,
    headers,
    nullable,
    obj,
    operation,
    params,
    request,
    schema,
)

TAG: Final = "subscriptions"
BASE: Final = "/v1/stream/__ds"
_TEXT_OR_NULL: Final[Json] = nullable(STRING)
_KIND: Final[Json] = {"enum": ["webhook", "pull-wake"]}
_LINK: Final[dict[str, Json]] = {"path": STRING, "link_type": STRING, "acked_offset": STRING}
_LEASE: Final[Json] = {"type": ["integer", "null"], "description": "Lease time of a wake in milliseconds."}

SCHEMAS: Final[Json] = {
    "SubscriptionConfig": closed(
        {"type": _KIND},
        {
            "pattern": _TEXT_OR_NULL,
            "streams": array(STRING, maxItems=10_000),
            "webhook": {"anyOf": [closed({"url": {"type": "string", "minLength": 1}}), {"type": "null"}]},
            "wake_stream": _TEXT_OR_NULL,
            "lease_ttl_ms": _LEASE,
            "description": _TEXT_OR_NULL,
        },
        description="A pattern or streams; a webhook or a wake stream, according to the type.",
    ),
    "Subscription": obj(
        {
            "id": STRING,
            "subscription_id": STRING,
            "type": _KIND,
            "pattern": _TEXT_OR_NULL,
            "streams": array(obj(_LINK)),
            "webhook": {
                "anyOf": [
                    obj({"url": STRING, "signing": obj({"alg": STRING, "kid": STRING, "jwks_url": STRING})}),
                    {"type": "null"},
                ]
            },
            "wake_stream": _TEXT_OR_NULL,
            "lease_ttl_ms": COUNT,
            "created_at": INSTANT,
            "status": {"enum": ["active", "failed"]},
            "description": _TEXT_OR_NULL,
        },
        {"streams_total": COUNT},
    ),
    "StreamNames": closed({"streams": array(STRING, minItems=1, maxItems=10_000)}),
    "Claim": obj({"worker": {"type": "string", "minLength": 1, "maxLength": 256}}),
    "Claimed": obj(
        {
            "wake_id": STRING,
            "generation": COUNT,
            "token": STRING,
            "streams": array(obj({**_LINK, "tail_offset": STRING, "has_pending": BOOLEAN})),
            "lease_ttl_ms": COUNT,
        }
    ),
    "WakeAnswer": obj(
        {"wake_id": STRING, "generation": {"type": "integer"}},
        {"acks": array(obj({"stream": STRING, "offset": STRING}), maxItems=10_000), "done": BOOLEAN},
    ),
    "WakeAnswered": obj({"ok": BOOLEAN, "next_wake": BOOLEAN}),
    "KeySet": obj({"keys": array(obj({"kty": STRING, "kid": STRING}))}),
}

_CONFIG_EXAMPLE: Final[Json] = {
    "type": "pull-wake",
    "pattern": "orders/*",
    "wake_stream": "wakes/orders",
    "lease_ttl_ms": 30_000,
}
_ANSWER_EXAMPLE: Final[Json] = {
    "wake_id": "w1",
    "generation": 1,
    "acks": [{"stream": "orders/1", "offset": "00000000000000000008000000"}],
    "done": True,
}


def subscription_paths() -> Json:
    one = f"{BASE}/subscriptions/{{id}}"
    keys = answer("The keys.", head=headers("Cache-Control"))
    keys["content"] = {"application/jwk-set+json": {"schema": schema("KeySet")}}
    return {
        f"{BASE}/jwks.json": {
            "get": operation("readWebhookKeys", TAG, "Public keys of webhook signatures", {"200": keys})
        },
        one: {"parameters": params("id"), **_managing()},
        f"{one}/streams": {
            "parameters": params("id"),
            "post": operation(
                "addStreams",
                TAG,
                "Add streams by name",
                {"204": answer("The streams are subscribed.")},
                (404, 409, 429, 507),
                scope="manage",
                body=request(schema("StreamNames"), {"streams": ["orders/1"]}, "Names of streams."),
            ),
        },
        f"{one}/streams/{{name}}": {
            "parameters": params("id", "name"),
            "delete": operation(
                "removeStream",
                TAG,
                "Remove a stream that was added by name",
                {"204": answer("The stream is not subscribed by name.")},
                (404, 409, 429, 507),
                scope="manage",
            ),
        },
        f"{one}/claim": {"parameters": params("id"), "post": _claim()},
        f"{one}/callback": {
            "parameters": params("id"),
            "post": _answering("answerWebhook", "A webhook's worker reports progress"),
        },
        f"{one}/ack": {
            "parameters": params("id"),
            "post": _answering("acknowledge", "A pull-wake worker reports progress"),
        },
        f"{one}/release": {
            "parameters": params("id"),
            "post": _answering("release", "A pull-wake worker releases the work"),
        },
    }


def _managing() -> Json:
    errors = (404, 409, 429, 507)
    shown = schema("Subscription")
    return {
        "put": operation(
            "createSubscription",
            TAG,
            "Create a subscription, or confirm its configuration",
            {
                "200": answer("The subscription exists.", shown),
                "201": answer("The subscription was created.", shown),
            },
            (*errors, 405),
            scope="manage",
            body=request(schema("SubscriptionConfig"), _CONFIG_EXAMPLE, "The configuration."),
        ),
        "get": operation(
            "readSubscription",
            TAG,
            "Show a subscription",
            {"200": answer("The subscription.", shown)},
            (404,),
            scope="read",
        ),
        "delete": operation(
            "deleteSubscription",
            TAG,
            "Remove a subscription",
            {"204": answer("Removed, by this request or an earlier one.")},
            (409, 429, 507),
            scope="manage",
        ),
    }


def _claim() -> Json:
    return operation(
        "claimWake",
        TAG,
        "Claim the work of a pull-wake subscription",
        {"200": answer("The work, and a token to report progress with.", schema("Claimed"))},
        (404, 409, 429, 507),
        scope="read",
        body=request(schema("Claim"), {"worker": "worker-1"}, "The worker."),
    )


def _answering(identifier: str, about: str) -> Json:
    done: Json
    if identifier == "release":
        done = {"204": answer("The work is released.")}
    else:
        done = {"200": answer("The progress is stored.", schema("WakeAnswered"))}
    found = operation(
        identifier,
        TAG,
        about,
        done,
        (401, 404, 409, 429, 507),
        scope="",
        body=request(schema("WakeAnswer"), _ANSWER_EXAMPLE, "The progress of the worker."),
        more="Requires the token of the wake itself, also on servers without authentication.",
    )
    found["security"] = [{"wake": list[str]()}]
    return found
