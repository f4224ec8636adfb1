"""`/v1/server/_keys`, `_revocations` and `_revoked`: API keys and revoked tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final, TypeVar

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
from tailrace.routing.table import Route

logger = logging.getLogger("tailrace.auth")

LISTED_MAX: Final = 1000  # the newest revocations

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Seconds = Annotated[int, msgspec.Meta(ge=1, le=10**11)]
Json = dict[str, Any]
T = TypeVar("T")


class NewApiKey(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The properties of a new key; the server chooses its id and secret."""

    sub: Text
    scopes: list[str]
    streams: list[str] | None = None
    databases: list[str] | None = None
    actor_id: str | None = None
    expires_in: Seconds | None = None


class Revoke(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Revokes one token by `jti`, or all tokens issued to `sub` up to now."""

    jti: Text | None = None
    sub: Text | None = None
    exp: Seconds | None = None  # expiry of the token, after which the revocation can be deleted


class IdentityRoutes:
    """Requires the right to manage the whole server. Files are written on a thread."""

    def __init__(self, context: Context, verifier: TokenVerifier | None) -> None:
        self._context = context
        self._verifier = verifier
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[], None] = _ignore_change
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

        self._spawn(renew())

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
        self._spawn(self._respond(exchange, work, build_response))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._context.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(
        self,
        exchange: Exchange,
        work: Callable[[], T],
        build_response: Callable[[T], tuple[int, Json | None]],
    ) -> None:
        """Respond when the change is on disk and in effect in this process."""
        try:
            found = await asyncio.to_thread(work)
            self.on_change()
            status, body = build_response(found)
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)
        except Exception:
            responses.respond_error(exchange, TailraceError("internal", "request failed"))
            raise
        else:
            head = responses.NO_STORE if body is None else responses.JSON_TYPE + responses.NO_STORE
            exchange.respond(status, head, b"" if body is None else orjson.dumps(body))


def _decode_body(exchange: Exchange, form: type[T]) -> T:
    try:
        return msgspec.json.decode(exchange.body, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TailraceError("invalid_request", f"invalid body: {error}") from None


def _encode_marks(marks: RevokedHashes) -> tuple[str, bytes]:
    """ETag and body: the same in every process that has read the same file."""
    body = orjson.dumps({"tokens": sorted(marks.tokens), "subjects": dict(sorted(marks.subjects.items()))})
    return f'"{xxhash.xxh3_128_hexdigest(body)}"', body


def _ignore_change() -> None:
    """The default `on_change`: no connections to recheck."""


_MANAGE: Final = Action.MANAGE_IDENTITIES
ROUTES: Final = (
    Route("GET", "/v1/server/_keys", _MANAGE, IdentityRoutes.list_keys, "listApiKeys"),
    Route("POST", "/v1/server/_keys", _MANAGE, IdentityRoutes.create_key, "makeApiKey"),
    Route("DELETE", "/v1/server/_keys/{id}", _MANAGE, IdentityRoutes.delete_key, "revokeApiKey"),
    Route("GET", "/v1/server/_revocations", _MANAGE, IdentityRoutes.list_revocations, "listRevocations"),
    Route("POST", "/v1/server/_revocations", _MANAGE, IdentityRoutes.revoke, "revoke"),
    Route(
        "GET",
        "/v1/server/_revoked",
        Action.FOLLOW_REVOCATIONS,
        IdentityRoutes.list_revoked_hashes,
        "followRevocations",
    ),
)
