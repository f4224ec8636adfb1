"""GET and POST `_profile`: what a stream's records mean."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.api import answers
from tailrace.api.context import Context
from tailrace.api.contracts import SCHEMA
from tailrace.api.guard import PROFILE
from tailrace.api.live import Live
from tailrace.api.schema import document_of, parse
from tailrace.auth import Action, Identity, authorise
from tailrace.errors import TailraceError
from tailrace.log.model import Stream
from tailrace.log.transaction import Transaction
from tailrace.net.http1 import Exchange
from tailrace.profiles.profile import (
    GENERIC,
    Profile,
    StateProtocolProfile,
    install,
    parse_update,
    read_profile,
    to_document,
)
from tailrace.profiles.touch.state import new_document
from tailrace.schema.registry import read_registry

TOUCH = "touch"  # key of the document
METHODS = "GET, HEAD, POST, OPTIONS"


class ProfileRoutes:
    """A profile and what it installs become durable in one record."""

    def __init__(self, context: Context, live: Live, on_changed: Callable[[Stream], None]) -> None:
        self._log = context.log
        self._live = live
        self._on_changed = on_changed

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, name: str) -> None:
        if method == b"POST":
            authorise(identity, Action.CONFIGURE_STREAM, stream=name)
            stream = self._log.existing(name)
            self._install(exchange, stream, parse_update(parse(exchange.body)))
        elif method in (b"GET", b"HEAD"):
            authorise(identity, Action.QUERY_STREAM, stream=name)
            _answer(exchange, self._log.readable(name))
        else:
            raise answers.not_allowed(METHODS)

    def _install(self, exchange: Exchange, stream: Stream, new: Profile) -> None:
        changes = profile_changes(stream, new)
        if changes:
            self._log.describe_all(stream, changes, self._decided, exchange)
        else:
            self._log.settled(stream, self._decided, exchange)

    def _decided(self, transaction: Transaction, error: TailraceError | None) -> None:
        exchange, stream = transaction.context, transaction.subject
        assert type(exchange) is Exchange
        assert stream is not None
        if error is not None:
            answers.refuse(exchange, error)
            return
        if transaction.ops:
            self._live.step_stream = None  # what was encoded for readers was promoted by the old registry
            self._on_changed(stream)
        _answer(exchange, stream)


def profile_changes(stream: Stream, new: Profile) -> list[tuple[str, bytes | None]]:
    """The documents of the stream that change when it gets this profile."""
    if new is not GENERIC and not stream.json:
        raise TailraceError(
            "invalid_request", f"{new.kind} profile requires application/json stream content-type"
        )
    documents = stream.documents or {}
    before = document_of(stream, documents)
    registry = read_registry(before)
    current = read_profile(documents.get(PROFILE))
    after = install(new, current, registry, stream.tail).to_json()
    wanted: list[tuple[str, bytes | None]] = [
        (PROFILE, None if new is GENERIC else to_document(new)),
        (TOUCH, _touch_document(new, documents.get(TOUCH))),
    ]
    if after != before:
        wanted.append((SCHEMA, after))
    return [(key, value) for key, value in wanted if documents.get(key) != value]


def _touch_document(new: Profile, current: bytes | None) -> bytes | None:
    """Touches keep their epoch and templates as long as they are on."""
    if not isinstance(new, StateProtocolProfile) or new.touch is None or not new.touch.enabled:
        return None
    return new_document() if current is None else current


def _answer(exchange: Exchange, stream: Stream) -> None:
    document = (stream.visible_documents or {}).get(PROFILE) or to_document(GENERIC)
    exchange.respond(200, answers.JSON_TYPE + answers.NO_STORE, document)
