"""`/v1/server/_keys`, `_revocations` and `_revoked`: API keys, and tokens that are good no more."""

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
    authorise,
    create_api_key,
)
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.protocol import stream_names
from tailrace.protocol.http_headers import if_none_match
from tailrace.routing import responses
from tailrace.routing.context import Context

logger = logging.getLogger("tailrace.auth")

KEYS_PATH: Final = b"/v1/server/_keys"
REVOCATIONS_PATH: Final = b"/v1/server/_revocations"
REVOKED_PATH: Final = b"/v1/server/_revoked"
LISTED_MAX: Final = 1000  # revocations, the newest first

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Seconds = Annotated[int, msgspec.Meta(ge=1, le=10**11)]
Json = dict[str, Any]
T = TypeVar("T")


class NewApiKey(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What is asked of a key; the server chooses its id and its secret."""

    sub: Text
    scopes: list[str]
    streams: list[str] | None = None
    databases: list[str] | None = None
    actor_id: str | None = None
    expires_in: Seconds | None = None


class Revoke(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One token by `jti`, or all that were issued to `sub` up to now."""

    jti: Text | None = None
    sub: Text | None = None
    exp: Seconds | None = None  # of the token; after it nothing needs to be remembered


class IdentityRoutes:
    """For whoever manages the whole server. Files are written on a thread."""

    def __init__(self, context: Context, verifier: TokenVerifier | None) -> None:
        self._context = context
        self._verifier = verifier
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[], None] = _nothing
        self._marks = (0, *_encode_marks(RevokedHashes()))  # the version of the book, tag and bytes

    def handles(self, path: bytes) -> bool:
        return path in (KEYS_PATH, REVOCATIONS_PATH, REVOKED_PATH) or path.startswith(KEYS_PATH + b"/")

    def serve(
        self, exchange: Exchange, method: bytes, path: bytes, identify: Callable[[Exchange], Identity]
    ) -> None:
        if path == REVOKED_PATH:
            self._follow(exchange, method, identify)
            return
        whole = path in (KEYS_PATH, REVOCATIONS_PATH)
        if method not in ((b"GET", b"HEAD", b"POST") if whole else (b"DELETE",)):
            raise responses.method_not_allowed("GET, HEAD, POST, OPTIONS" if whole else "DELETE, OPTIONS")
        identity = identify(exchange)
        authorise(identity, Action.MANAGE_IDENTITIES)
        if self._verifier is None:
            raise TailraceError("conflict", "this server asks nobody for a token: there are no keys")
        if not whole:
            self._remove_key(exchange, identity, path[len(KEYS_PATH) + 1 :])
        elif method == b"POST":
            (self._make_key if path == KEYS_PATH else self._revoke)(exchange, identity)
        else:
            (self._show_keys if path == KEYS_PATH else self._show_revocations)(exchange)

    # -- keys ------------------------------------------------------------------------------------------

    def _show_keys(self, exchange: Exchange) -> None:
        book = self._known.book
        self._run(
            exchange,
            book.read_records,
            lambda found: (200, {"keys": [key.to_public() for key in found.keys]}),
        )

    def _make_key(self, exchange: Exchange, identity: Identity) -> None:
        asked = _decode_body(exchange, NewApiKey)
        key, text = create_api_key(
            sub=asked.sub,
            scopes=asked.scopes,
            streams=asked.streams,
            dbs=asked.databases,
            actor_id=asked.actor_id,
            lifetime_s=asked.expires_in,
            clock=self._context.clock,
        )
        book = self._known.book

        def answer(_: None) -> tuple[int, Json]:
            logger.info("API key %s of %r was made by %r", key.id, key.sub, identity.sub)
            return 201, {"key": text, **key.to_public()}

        self._run(exchange, lambda: book.add_key(key), answer)

    def _remove_key(self, exchange: Exchange, identity: Identity, raw_id: bytes) -> None:
        key_id = stream_names.decode_name(raw_id) or ""
        book = self._known.book

        def answer(_: None) -> tuple[int, None]:
            logger.info("API key %s was revoked by %r", key_id, identity.sub)
            return 204, None

        self._run(exchange, lambda: book.remove_key(key_id), answer)

    # -- revocations -----------------------------------------------------------------------------------

    def _show_revocations(self, exchange: Exchange) -> None:
        def answer(found: IdentityRecords) -> tuple[int, Json]:
            listed = sorted((*found.tokens, *found.subjects), key=lambda one: one.at, reverse=True)
            shown = [msgspec.to_builtins(one) for one in listed[:LISTED_MAX]]
            return 200, {"total": len(listed), "revocations": shown}

        self._run(exchange, self._known.book.read_records, answer)

    def _follow(self, exchange: Exchange, method: bytes, identify: Callable[[Exchange], Identity]) -> None:
        """What edges ask every few seconds. Where nobody needs a token, none can be revoked."""
        if method not in (b"GET", b"HEAD"):
            raise responses.method_not_allowed("GET, HEAD, OPTIONS")
        authorise(identify(exchange), Action.FOLLOW_REVOCATIONS)
        book = None if self._verifier is None else self._verifier.book
        if book is None or book.version == self._marks[0]:
            self._show_marks(exchange)
            return
        version, revocations = book.version, book.revocations

        async def renew() -> None:
            # Hashing tens of thousands of them takes longer than the loop has for one request.
            self._marks = (version, *await asyncio.to_thread(lambda: _encode_marks(revocations.hashes())))
            self._show_marks(exchange)

        self._spawn(renew())

    def _show_marks(self, exchange: Exchange) -> None:
        _, tag, body = self._marks
        head = b"Cache-Control: private, no-cache\r\nETag: %b\r\n" % tag.encode()
        known = exchange.headers.get(b"if-none-match")
        if known is not None and if_none_match(known.decode("latin-1"), tag):
            exchange.respond(304, head)
        else:
            exchange.respond(200, responses.JSON_TYPE + head, body)

    def _revoke(self, exchange: Exchange, identity: Identity) -> None:
        asked = _decode_body(exchange, Revoke)
        jti, sub, book = asked.jti, asked.sub, self._known.book
        if (jti is None) == (sub is None):
            raise TailraceError("invalid_request", "a revocation names a jti or a sub")
        if jti is not None and (jti.count(".") == 2 or jti.startswith(("trk_", "trg_"))):
            raise TailraceError("invalid_request", "jti is the id of a token, not the token or a key")

        def work() -> None:
            if jti is not None:
                book.revoke_token(jti, asked.exp)
            elif sub is not None:
                book.revoke_subject(sub)

        def answer(_: None) -> tuple[int, Json]:
            logger.info("%s was revoked by %r", f"token {jti!r}" if jti else f"subject {sub!r}", identity.sub)
            return 200, {"revoked": {"jti": jti} if jti else {"sub": sub}}

        self._run(exchange, work, answer)

    # -- inside ----------------------------------------------------------------------------------------

    @property
    def _known(self) -> TokenVerifier:
        assert self._verifier is not None, "asked before any of this"
        return self._verifier

    def _run(
        self, exchange: Exchange, work: Callable[[], T], answer: Callable[[T], tuple[int, Json | None]]
    ) -> None:
        self._spawn(self._answered(exchange, work, answer))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._context.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answered(
        self, exchange: Exchange, work: Callable[[], T], answer: Callable[[T], tuple[int, Json | None]]
    ) -> None:
        """The answer comes when the change is on disk and in force here."""
        try:
            found = await asyncio.to_thread(work)
            self.on_change()
            status, body = answer(found)
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)
        except Exception:
            responses.respond_error(exchange, TailraceError("internal", "the request failed"))
            raise
        else:
            head = responses.NO_STORE if body is None else responses.JSON_TYPE + responses.NO_STORE
            exchange.respond(status, head, b"" if body is None else orjson.dumps(body))


def _decode_body(exchange: Exchange, form: type[T]) -> T:
    try:
        return msgspec.json.decode(exchange.body, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TailraceError("invalid_request", f"the request cannot be understood: {error}") from None


def _encode_marks(marks: RevokedHashes) -> tuple[str, bytes]:
    """Tag and bytes: the same in every process that has read the same file."""
    body = orjson.dumps({"tokens": sorted(marks.tokens), "subjects": dict(sorted(marks.subjects.items()))})
    return f'"{xxhash.xxh3_128_hexdigest(body)}"', body


def _nothing() -> None:
    """Nobody has to be told."""
