"""`/v1/server/_keys`, `_revocations` and `_revoked`: API keys and revoked tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict, TypeVar

import msgspec
import orjson
import xxhash

from tailrace.auth import (
    Action,
    Identity,
    IdentityRecords,
    RevokedHashes,
    TokenVerifier,
    create_api_key,
)
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.http.exchange import Exchange
from tailrace.protocol.http_headers import if_none_match
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses, Response
from tailrace.routing.openapi import Count, answer, headers, params, request
from tailrace.routing.table import Route, route_group

logger = logging.getLogger("tailrace.auth")

LISTED_MAX: Final = 1000  # the newest revocations

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Seconds = Annotated[int, msgspec.Meta(ge=1, le=10**11)]
Json = dict[str, Any]
T = TypeVar("T")


Scopes = Annotated[list[Literal["read", "write", "manage"]], msgspec.Meta(min_length=1)]
Names = Annotated[list[Text], msgspec.Meta(max_length=100)]


class NewApiKey(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The properties of a new key; the server chooses its id and secret."""

    sub: Text
    scopes: Scopes
    streams: Names | None = None
    databases: Names | None = None
    actor_id: Text | None = None
    expires_in: Seconds | None = None


class Revoke(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Revokes one token by `jti`, or all tokens issued to `sub` up to now."""

    jti: Text | None = None
    sub: Text | None = None
    exp: Seconds | None = None  # expiry of the token, after which the revocation can be deleted


class ShownApiKey(TypedDict):
    """A key without its secret."""

    id: str
    sub: str
    scopes: Scopes
    streams: Names | None
    databases: Names | None
    actorId: Text | None
    createdAt: Count
    expiresAt: int | None


class ApiKeys(TypedDict):
    keys: list[ShownApiKey]


class CreatedApiKey(ShownApiKey):
    """`key` is returned only here."""

    key: str


class Revocation(TypedDict):
    at: Count
    jti: NotRequired[str]
    sub: NotRequired[str]
    until: NotRequired[int | None]


class RevocationList(TypedDict):
    total: Count
    revocations: list[Revocation]


class RevokedIdentity(TypedDict):
    jti: NotRequired[str]
    sub: NotRequired[str]


class RevokeResult(TypedDict):
    revoked: RevokedIdentity


class RevokedHashLists(TypedDict):
    """The first 32 hex digits of the SHA-256 of each `jti`, and of each `sub` with its time."""

    tokens: list[str]
    subjects: dict[str, Count]


class IdentityRoutes:
    """Requires the right to manage the whole server. Files are written on a thread."""

    def __init__(
        self, context: Context, verifier: TokenVerifier | None, on_change: Callable[[], None] | None
    ) -> None:
        """`on_change` is called after a change of the records, before the response."""
        self._context = context
        self._verifier = verifier
        self._deferred = DeferredResponses()
        self._on_change = on_change
        self._marks = (0, *_encode_marks(RevokedHashes()))  # version of the records, ETag and body

    # -- keys ------------------------------------------------------------------------------------------

    def list_keys(self, exchange: Exchange, _: Identity) -> None:
        book = self._required_verifier.book
        self._respond_later(
            exchange,
            book.read_records,
            lambda found: (200, {"keys": [key.to_public() for key in found.keys]}),
        )

    def create_key(self, exchange: Exchange, identity: Identity) -> None:
        book = self._required_verifier.book
        request = _decode_body(exchange, NewApiKey)
        key, text = create_api_key(
            sub=request.sub,
            scopes=request.scopes,
            streams=request.streams,
            dbs=request.databases,
            actor_id=request.actor_id,
            lifetime_s=request.expires_in,
            clock=self._context.clock,
        )

        def build_response(_: None) -> tuple[int, Json]:
            logger.info("API key created", extra=log_fields(key=key.id, sub=key.sub, by=identity.sub))
            return 201, {"key": text, **key.to_public()}

        self._respond_later(exchange, lambda: book.add_key(key), build_response)

    def delete_key(self, exchange: Exchange, identity: Identity, key_id: str) -> None:
        book = self._required_verifier.book

        def build_response(_: None) -> tuple[int, None]:
            logger.info("API key revoked", extra=log_fields(key=key_id, by=identity.sub))
            return 204, None

        self._respond_later(exchange, lambda: book.remove_key(key_id), build_response)

    # -- revocations -----------------------------------------------------------------------------------

    def list_revocations(self, exchange: Exchange, _: Identity) -> None:
        def build_response(found: IdentityRecords) -> tuple[int, Json]:
            listed = sorted((*found.tokens, *found.subjects), key=lambda one: one.at, reverse=True)
            shown = [msgspec.to_builtins(one) for one in listed[:LISTED_MAX]]
            return 200, {"total": len(listed), "revocations": shown}

        self._respond_later(exchange, self._required_verifier.book.read_records, build_response)

    def list_revoked_hashes(self, exchange: Exchange, _: Identity) -> None:
        """Polled by edges every few seconds; empty without authentication."""
        book = None if self._verifier is None else self._verifier.book
        if book is None or book.version == self._marks[0]:
            self._respond_marks(exchange)
            return
        version, revocations = book.version, book.revocations

        async def renew() -> None:
            # On a thread: hashing tens of thousands of them would block the event loop.
            self._marks = (version, *await asyncio.to_thread(lambda: _encode_marks(revocations.hashes())))
            self._respond_marks(exchange)

        self._deferred.respond(exchange, renew())

    def _respond_marks(self, exchange: Exchange) -> None:
        _, tag, body = self._marks
        head = b"Cache-Control: private, no-cache\r\nETag: %b\r\n" % tag.encode()
        known = exchange.headers.get(b"if-none-match")
        if known is not None and if_none_match(known.decode("latin-1"), tag):
            exchange.respond(304, head)
        else:
            exchange.respond(200, responses.JSON_TYPE + head, body)

    def revoke(self, exchange: Exchange, identity: Identity) -> None:
        book = self._required_verifier.book
        request = _decode_body(exchange, Revoke)
        jti, sub = request.jti, request.sub
        if (jti is None) == (sub is None):
            raise TailraceError("invalid_request", "a revocation must have either jti or sub")
        if jti is not None and (jti.count(".") == 2 or jti.startswith(("trk_", "trg_"))):
            raise TailraceError("invalid_request", "jti must be the id of a token, not the token or a key")

        def work() -> None:
            if jti is not None:
                book.revoke_token(jti, request.exp)
            elif sub is not None:
                book.revoke_subject(sub)

        def build_response(_: None) -> tuple[int, Json]:
            if jti:
                logger.info("token revoked", extra=log_fields(jti=jti, by=identity.sub))
            else:
                logger.info("all tokens of a subject revoked", extra=log_fields(sub=sub, by=identity.sub))
            return 200, {"revoked": {"jti": jti} if jti else {"sub": sub}}

        self._respond_later(exchange, work, build_response)

    # -- internal --------------------------------------------------------------------------------------

    @property
    def _required_verifier(self) -> TokenVerifier:
        if self._verifier is None:
            raise TailraceError("conflict", "authentication is not configured, so there are no keys")
        return self._verifier

    def _respond_later(
        self,
        exchange: Exchange,
        work: Callable[[], T],
        build_response: Callable[[T], tuple[int, Json | None]],
    ) -> None:
        self._deferred.respond(exchange, self._respond(work, build_response))

    async def _respond(
        self, work: Callable[[], T], build_response: Callable[[T], tuple[int, Json | None]]
    ) -> Response:
        """Respond when the change is on disk and in effect in this process."""
        found = await asyncio.to_thread(work)
        if self._on_change is not None:
            self._on_change()
        status, body = build_response(found)
        head = responses.NO_STORE if body is None else responses.JSON_TYPE + responses.NO_STORE
        return status, head, b"" if body is None else orjson.dumps(body)


def _decode_body(exchange: Exchange, form: type[T]) -> T:
    try:
        return msgspec.json.decode(exchange.body, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TailraceError("invalid_request", f"invalid body: {error}") from None


def _encode_marks(marks: RevokedHashes) -> tuple[str, bytes]:
    """ETag and body: the same in every process that has read the same file."""
    body = orjson.dumps({"tokens": sorted(marks.tokens), "subjects": dict(sorted(marks.subjects.items()))})
    return f'"{xxhash.xxh3_128_hexdigest(body)}"', body


_TAGGED: Final = headers(always=("ETag",))
ROUTES: Final = route_group(
    "identities",
    Route(
        *("GET", "/v1/server/_keys", Action.MANAGE_IDENTITIES, IdentityRoutes.list_keys, "listApiKeys"),
        "API keys",
        {200: answer("All keys, without their secrets.", ApiKeys)},
        errors=(409,),
    ),
    Route(
        *("POST", "/v1/server/_keys", Action.MANAGE_IDENTITIES, IdentityRoutes.create_key, "makeApiKey"),
        "Create an API key",
        {201: answer("The key. Store it: it cannot be read again.", CreatedApiKey)},
        errors=(409, 507),
        body=request(
            NewApiKey,
            {"sub": "ci", "scopes": ["write"], "streams": ["builds/"]},
            "The subject and rights of the key.",
        ),
    ),
    Route(
        *("DELETE", "/v1/server/_keys/{id}", Action.MANAGE_IDENTITIES, IdentityRoutes.delete_key),
        "revokeApiKey",
        "Revoke an API key",
        {204: answer("The key is revoked and its connections are closed.")},
        errors=(404, 409),
    ),
    Route(
        *("GET", "/v1/server/_revocations", Action.MANAGE_IDENTITIES, IdentityRoutes.list_revocations),
        "listRevocations",
        "Revocations, the newest first",
        {200: answer("At most 1,000 revocations.", RevocationList)},
        errors=(409,),
    ),
    Route(
        *("POST", "/v1/server/_revocations", Action.MANAGE_IDENTITIES, IdentityRoutes.revoke, "revoke"),
        "Revoke a token, or all tokens of a subject",
        {200: answer("The tokens are revoked and their connections are closed.", RevokeResult)},
        errors=(409, 507),
        body=request(Revoke, {"jti": "4be1a0c29d3f7a58"}, "The token or the subject."),
    ),
    Route(
        *("GET", "/v1/server/_revoked", Action.FOLLOW_REVOCATIONS, IdentityRoutes.list_revoked_hashes),
        "followRevocations",
        "Hashes of all revocations, for edges and other servers that check tokens",
        {
            200: answer("The hashes.", RevokedHashLists, _TAGGED),
            304: answer("Not modified.", head=_TAGGED),
        },
        parameters=params("if-none-match"),
    ),
)
