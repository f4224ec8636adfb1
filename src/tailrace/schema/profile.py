"""GET and POST `_profile`: what a stream's records mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tailrace.api import answers
from tailrace.api.context import Context
from tailrace.api.live import Live
from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.log.transaction import Transaction
from tailrace.schema.adoption import AdoptionResponse, Adoptions, profile_checker, wants_adoption
from tailrace.schema.append_validation import PROFILE_DOCUMENT
from tailrace.schema.profiles.profile import (
    GENERIC,
    Profile,
    StateProtocolProfile,
    install_profile,
    needs_entry_check,
    parse_profile_update,
    profile_document,
    read_profile,
)
from tailrace.schema.profiles.state import new_touch_document
from tailrace.schema.registry import read_registry
from tailrace.schema.schema import parse_json_body, registry_document
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT

TOUCH_DOCUMENT = "touch"  # key of the document
METHODS = "GET, HEAD, POST, OPTIONS"


class ProfileRoutes:
    """A profile and what it installs become durable in one record."""

    def __init__(
        self, context: Context, live: Live, on_changed: Callable[[Stream], None], adoptions: Adoptions
    ) -> None:
        self._context = context
        self._log = context.log
        self._adoptions = adoptions
        self._tasks: set[asyncio.Task[None]] = set()
        self._live = live
        self._on_changed = on_changed

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, name: str) -> None:
        if method == b"POST":
            authorise(identity, Action.CONFIGURE_STREAM, stream=name)
            stream = self._log.existing(name)
            new, answer = parse_profile_update(parse_json_body(exchange.body)), AdoptionResponse(exchange)
            current = read_profile((stream.documents or {}).get(PROFILE_DOCUMENT))
            if wants_adoption(exchange) and stream.tail and needs_entry_check(new, current):
                profile_changes(stream, new, adopted=True)  # what can be refused is refused before the check
                task = self._context.loop.create_task(self._adopt(answer, stream, new))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._install(answer, stream, new)
        elif method in (b"GET", b"HEAD"):
            authorise(identity, Action.QUERY_STREAM, stream=name)
            document = _profile_document(self._log.readable(name))
            exchange.respond(200, answers.JSON_TYPE + answers.NO_STORE, document)
        else:
            raise answers.not_allowed(METHODS)

    async def _adopt(self, answer: AdoptionResponse, stream: Stream, new: Profile) -> None:
        before = registry_document(stream, stream.documents)

        def decide() -> None:
            if registry_document(stream, stream.documents) != before:
                raise TailraceError("conflict", "schema registry changed concurrently")
            self._install(answer, stream, new, adopted=True)

        try:
            await self._adoptions.adopt(stream, profile_checker(new), answer, decide)
        except TailraceError as refusal:
            answer.refuse(refusal)
        except Exception:
            answer.refuse(TailraceError("internal", "the profile was not installed"))
            raise

    def _install(
        self, answer: AdoptionResponse, stream: Stream, new: Profile, *, adopted: bool = False
    ) -> None:
        changes = profile_changes(stream, new, adopted=adopted)
        if changes:
            self._log.describe_all(stream, changes, self._decided, answer)
        else:
            self._log.settled(stream, self._decided, answer)

    def _decided(self, transaction: Transaction, error: TailraceError | None) -> None:
        answer, stream = transaction.context, transaction.subject
        assert type(answer) is AdoptionResponse
        assert stream is not None
        if error is not None:
            answer.refuse(error)
            return
        if transaction.ops:
            self._live.step_stream = None  # what was encoded for readers was promoted by the old registry
            self._on_changed(stream)
        answer.finish(_profile_document(stream))


def profile_changes(stream: Stream, new: Profile, *, adopted: bool = False) -> list[tuple[str, bytes | None]]:
    """The documents of the stream that change when it gets this profile."""
    if new is not GENERIC and not stream.json:
        raise TailraceError(
            "invalid_request", f"{new.kind} profile requires application/json stream content-type"
        )
    documents = stream.documents or {}
    before = registry_document(stream, documents)
    registry = read_registry(before)
    current = read_profile(documents.get(PROFILE_DOCUMENT))
    after = install_profile(new, current, registry, stream.tail, adopted=adopted).to_json()
    wanted: list[tuple[str, bytes | None]] = [
        (PROFILE_DOCUMENT, None if new is GENERIC else profile_document(new)),
        (TOUCH_DOCUMENT, _touch_document(new, documents.get(TOUCH_DOCUMENT))),
    ]
    if after != before:
        wanted.append((SCHEMA_DOCUMENT, after))
    return [(key, value) for key, value in wanted if documents.get(key) != value]


def _touch_document(new: Profile, current: bytes | None) -> bytes | None:
    """Touches keep their epoch and templates as long as they are on."""
    if not isinstance(new, StateProtocolProfile) or new.touch is None or not new.touch.enabled:
        return None
    return new_touch_document() if current is None else current


def _profile_document(stream: Stream) -> bytes:
    return (stream.visible_documents or {}).get(PROFILE_DOCUMENT) or profile_document(GENERIC)
