"""API keys and revocations."""

from __future__ import annotations

from typing import Final

from tailrace.server.openapi.components import (
    COUNT,
    STRING,
    Json,
    answer,
    array,
    closed,
    headers,
    obj,
    operation,
    params,
    request,
    schema,
)

TAG: Final = "identities"
_TEXT: Final[Json] = {"type": "string", "minLength": 1, "maxLength": 1024}
_LISTED: Final[Json] = {"type": ["array", "null"], "items": _TEXT, "maxItems": 100}
_SECONDS: Final[Json] = {"type": ["integer", "null"], "minimum": 1, "maximum": 10**11}
_TEXT_OR_NULL: Final[Json] = {"type": ["string", "null"], "minLength": 1, "maxLength": 1024}
_SCOPES: Final[Json] = array({"enum": ["read", "write", "manage"]}, minItems=1)
_SHOWN: Final[dict[str, Json]] = {
    "id": STRING,
    "sub": STRING,
    "scopes": _SCOPES,
    "streams": _LISTED,
    "databases": _LISTED,
    "actorId": _TEXT_OR_NULL,
    "createdAt": COUNT,
    "expiresAt": {"type": ["integer", "null"]},
}

SCHEMAS: Final[Json] = {
    "NewApiKey": closed(
        {"sub": _TEXT, "scopes": _SCOPES},
        {"streams": _LISTED, "databases": _LISTED, "actorId": _TEXT_OR_NULL, "expiresIn": _SECONDS},
    ),
    "ApiKey": obj(_SHOWN),
    "MadeApiKey": obj({"key": STRING, **_SHOWN}, description="`key` is returned only here."),
    "Revoke": closed(
        {},
        {"jti": _TEXT_OR_NULL, "sub": _TEXT_OR_NULL, "exp": _SECONDS},
        description="One token by its `jti`, or all tokens issued to `sub` up to now.",
    ),
    "Revocation": obj({"at": COUNT}, {"jti": STRING, "sub": STRING, "until": {"type": ["integer", "null"]}}),
}


def identity_paths() -> Json:
    return {
        "/v1/server/_keys": {"get": _list_keys(), "post": _make_key()},
        "/v1/server/_keys/{id}": {"parameters": params("id"), "delete": _remove_key()},
        "/v1/server/_revocations": {"get": _list_revocations(), "post": _revoke()},
        "/v1/server/_revoked": {"get": _follow()},
    }


def _list_keys() -> Json:
    shown = answer("All keys, without their secrets.", obj({"keys": array(schema("ApiKey"))}))
    return operation("listApiKeys", TAG, "API keys", {"200": shown}, (409,), scope="manage")


def _make_key() -> Json:
    return operation(
        "makeApiKey",
        TAG,
        "Create an API key",
        {"201": answer("The key. Store it: it cannot be read again.", schema("MadeApiKey"))},
        (409, 507),
        scope="manage",
        body=request(
            schema("NewApiKey"),
            {"sub": "ci", "scopes": ["write"], "streams": ["builds/"]},
            "The subject and rights of the key.",
        ),
    )


def _remove_key() -> Json:
    return operation(
        "revokeApiKey",
        TAG,
        "Revoke an API key",
        {"204": answer("The key is revoked and its connections are closed.")},
        (404, 409),
        scope="manage",
    )


def _list_revocations() -> Json:
    shown = obj({"total": COUNT, "revocations": array(schema("Revocation"))})
    return operation(
        "listRevocations",
        TAG,
        "Revocations, the newest first",
        {"200": answer("At most 1,000 revocations.", shown)},
        (409,),
        scope="manage",
    )


def _follow() -> Json:
    tagged = headers(always=("ETag",))
    shown = obj(
        {"tokens": array(STRING), "subjects": {"type": "object", "additionalProperties": COUNT}},
        description="The first 32 hex digits of the SHA-256 of each `jti`, and of each `sub` with its time.",
    )
    return operation(
        "followRevocations",
        TAG,
        "Hashes of all revocations, for edges and other servers that check tokens",
        {
            "200": answer("The hashes.", shown, tagged),
            "304": answer("Not modified.", head=tagged),
        },
        scope="read",
        parameters=params("if-none-match"),
    )


def _revoke() -> Json:
    shown = obj({"revoked": obj({}, {"jti": STRING, "sub": STRING})})
    return operation(
        "revoke",
        TAG,
        "Revoke a token, or all tokens of a subject",
        {"200": answer("The tokens are revoked and their connections are closed.", shown)},
        (409, 507),
        scope="manage",
        body=request(schema("Revoke"), {"jti": "4be1a0c29d3f7a58"}, "The token or the subject."),
    )
