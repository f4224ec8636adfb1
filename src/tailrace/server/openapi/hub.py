"""Actors and their messages."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.components import (
    COUNT,
    OBJECT,
    STRING,
    Json,
    answer,
    array,
    nullable,
    obj,
    operation,
    request,
    schema,
)

TAG: Final = "hub"
_ADDRESS: Final[Json] = {"type": "string", "pattern": r"^@\([A-Za-z0-9_.:~/-]+\)$", "maxLength": 256}
_NAME: Final[Json] = {"type": "string", "minLength": 1, "maxLength": 128}
_MILLIS: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
_TYPES: Final = (
    *("hub:send", "hub:publish", "hub:broadcast", "hub:discover", "hub:list_actors"),
    *("hub:mailbox_read", "hub:mailbox_commit"),
)

SCHEMAS: Final[Json] = {
    "HubMessage": obj(
        {"id": _NAME, "type": {"enum": list(_TYPES)}, "timestamp": _MILLIS},
        {
            "from": nullable(STRING),
            "to": nullable(STRING),
            "payload": nullable(OBJECT),
            "pattern": {"enum": ["tell", "ask"]},
            "correlationId": nullable(STRING),
            "metadata": nullable(OBJECT),
            "ttl": {"type": ["integer", "null"], "minimum": 1},
            "signature": nullable(STRING),
        },
    ),
    "HubReply": obj(
        {
            "id": STRING,
            "from": _ADDRESS,
            "to": _ADDRESS,
            "type": STRING,
            "payload": OBJECT,
            "pattern": {"const": "tell"},
            "correlationId": STRING,
            "timestamp": COUNT,
            "metadata": OBJECT,
        }
    ),
    "HubHealth": obj(
        {
            "status": {"const": "ok"},
            "service": {"const": "signal-hub"},
            "version": STRING,
            "timestamp": COUNT,
        }
    ),
    "HubShards": obj({"epoch": COUNT, "shards": array(obj({"id": STRING, "url": STRING}))}),
}


def hub_paths() -> Json:
    message = {
        "id": "0197f3c2-5a10-7c44-9b1e-0d5f6a7b8c90",
        "type": "hub:publish",
        "timestamp": 1767225600000,
        "payload": {"topic": "orders/eu/created", "type": "order", "data": {"id": 1}},
    }
    return {
        "/hub/ws": {
            "get": operation(
                "connectActor",
                TAG,
                "Actors over a WebSocket",
                {"101": answer("The connection is a WebSocket now.")},
                (403, 426, 429),
            )
        },
        "/hub/messages": {
            "post": operation(
                "sendHubMessage",
                TAG,
                "Send one message as an actor, without a session",
                {
                    "200": answer("The reply.", schema("HubReply")),
                    "202": answer("The message was accepted; there is no reply."),
                },
                (404, 409, 410, 429),
                scope="",
                body=request(schema("HubMessage"), message, "One envelope."),
            )
        },
        "/hub/health": {
            "get": operation(
                "readHubHealth",
                TAG,
                "Health of the hub",
                {"200": answer("The hub is running.", schema("HubHealth"))},
            )
        },
        "/hub/shards": {
            "get": operation(
                "listHubShards",
                TAG,
                "The shards to connect to",
                {"200": answer("The shards that own addresses.", schema("HubShards"))},
                scope="read",
            )
        },
    }
