"""HTTP routes of a stream's schema registry and profile: GET and POST of `_schema` and `_profile`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, cast

import msgspec

from tailrace.auth import Action, Identity
from tailrace.common.errors import TailraceError
from tailrace.common.tasks import TaskSet
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.log.transaction import Transaction
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.routing.openapi import STRING, Json, answer, query, request
from tailrace.routing.request_headers import check_content_encoding
from tailrace.routing.table import Route, route_group
from tailrace.schema.adoption import (
    AdoptionResponse,
    Adoptions,
    profile_checker,
    schema_checker,
    wants_adoption,
)
from tailrace.schema.append_validation import PROFILE_DOCUMENT
from tailrace.schema.openapi import (
    PROFILE_RESOURCE,
    PROFILE_UPDATE,
    REGISTRY,
    REGISTRY_EXAMPLE,
    SCHEMA_UPDATE,
)
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
from tailrace.schema.profiles.touch_state import new_touch_document
from tailrace.schema.registry import Registry, read_registry
from tailrace.schema.registry_update import RegistryUpdate, decide_update, is_first_schema, prepare_update
from tailrace.schema.search_config import SearchConfig
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT

SearchConfigCheck = Callable[[SearchConfig], None]  # raises TailraceError for an invalid query in it


class SchemaRoutes:
    """GET and POST `_schema`. Updates are checked on a thread and decided in one step on the event loop."""

    def __init__(
        self,
        context: Context,
        check_search: SearchConfigCheck,
        on_changed: Callable[[], None],
        adoptions: Adoptions,
    ) -> None:
        self._context = context
        self._check_search = check_search
        self._on_changed = on_changed
        self._adoptions = adoptions
        self._log = context.log
        self._thread = ThreadPoolExecutor(1, "schema")
        self._tasks = TaskSet()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def show(self, exchange: Exchange, _: Identity, name: str) -> None:
        stream = self._log.readable(name)
        _respond_registry(exchange, registry_document(stream, stream.visible_documents))

    def update(self, exchange: Exchange, _: Identity, name: str) -> None:
        check_content_encoding(exchange)
        self._log.existing(name)
        self._post(exchange, name, parse_json_body(exchange.body), adopts=wants_adoption(exchange))

    def _post(self, exchange: Exchange, name: str, body: object, *, adopts: bool) -> None:
        self._tasks.start(self._update(AdoptionResponse(exchange), name, body, adopts=adopts))

    async def _update(self, response: AdoptionResponse, name: str, body: object, *, adopts: bool) -> None:
        try:
            stream = self._log.existing(name)
            before = registry_document(stream, stream.documents)
            async with asyncio.timeout(self._context.limits.request_ms / 1000):
                registry, update = await self._context.loop.run_in_executor(
                    self._thread, prepare_registry_update, before, body, self._check_search
                )
            if adopts and stream.tail and is_first_schema(registry, update):
                require_json(stream)
                check = schema_checker(update.schema)
                decide = partial(self._decide, response, name, before, registry, update, adopted=True)
                await self._adoptions.adopt(stream, check, response, decide)
            else:
                decide = partial(self._decide, response, name, before, registry, update, adopted=False)
                await self._log.backpressure_queue.submit(decide)
        except TimeoutError:
            response.fail(TailraceError("request_timeout", "request timed out"))
        except TailraceError as error:
            response.fail(error)
        except Exception:
            response.fail(TailraceError("internal", "schema update failed"))
            raise

    def _decide(
        self,
        response: AdoptionResponse,
        name: str,
        before: bytes,
        registry: Registry,
        update: RegistryUpdate,
        *,
        adopted: bool,
    ) -> None:
        """Runs without interruption from reading the stream's state to the journal record."""
        stream = self._log.existing(name)
        require_json(stream)
        if registry_document(stream, stream.documents) != before:
            raise TailraceError("conflict", "schema registry changed concurrently")
        after = decide_update(registry, update, stream.tail, adopted=adopted).to_json()
        if after == before:
            self._log.settled(stream, self._decided, response)
        else:
            self._log.describe(stream, SCHEMA_DOCUMENT, after, self._decided, response)

    def _decided(self, transaction: Transaction, error: TailraceError | None) -> None:
        response, stream = transaction.context, transaction.subject
        assert type(response) is AdoptionResponse
        assert stream is not None
        if error is not None:
            response.fail(error)
            return
        self._on_changed()
        response.finish(registry_document(stream, stream.visible_documents))


def registry_document(stream: Stream, documents: dict[str, bytes] | None) -> bytes:
    """The registry document of a stream; an empty registry if it never had one."""
    found = None if documents is None else documents.get(SCHEMA_DOCUMENT)
    return Registry(name=stream.name).to_json() if found is None else found


def require_json(stream: Stream) -> None:
    if stream.content_type is not None and not stream.json:
        raise TailraceError("invalid_request", "schema requires application/json stream content-type")


def parse_json_body(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TailraceError("invalid_json", f"body is not valid JSON: {error}") from None


def prepare_registry_update(
    document: bytes, body: object, check_search: SearchConfigCheck
) -> tuple[Registry, RegistryUpdate]:
    """The registry and a checked update of it. May take long: runs on a thread."""
    registry = read_registry(document)
    update = prepare_update(registry, body)
    if isinstance(update.search, SearchConfig):
        check_search(update.search)
    return registry, update


def _respond_registry(exchange: Exchange, document: bytes) -> None:
    exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, document)


TOUCH_DOCUMENT = "touch"  # key of the document


class ProfileRoutes:
    """GET and POST `_profile`. A profile and the registry it installs become durable in one record."""

    def __init__(self, context: Context, on_changed: Callable[[Stream], None], adoptions: Adoptions) -> None:
        self._context = context
        self._log = context.log
        self._adoptions = adoptions
        self._tasks = TaskSet()
        self._on_changed = on_changed

    def show(self, exchange: Exchange, _: Identity, name: str) -> None:
        document = _profile_document(self._log.readable(name))
        exchange.respond(200, responses.JSON_TYPE + responses.NO_STORE, document)

    def install(self, exchange: Exchange, _: Identity, name: str) -> None:
        stream = self._log.existing(name)
        new, response = parse_profile_update(parse_json_body(exchange.body)), AdoptionResponse(exchange)
        current = read_profile((stream.documents or {}).get(PROFILE_DOCUMENT))
        if wants_adoption(exchange) and stream.tail and needs_entry_check(new, current):
            profile_changes(stream, new, adopted=True)  # reject what can be rejected before the check
            self._tasks.start(self._adopt(response, stream, new))
        else:
            self._install(response, stream, new)

    async def _adopt(self, response: AdoptionResponse, stream: Stream, new: Profile) -> None:
        before = registry_document(stream, stream.documents)

        def decide() -> None:
            if registry_document(stream, stream.documents) != before:
                raise TailraceError("conflict", "schema registry changed concurrently")
            self._install(response, stream, new, adopted=True)

        try:
            await self._adoptions.adopt(stream, profile_checker(new), response, decide)
        except TailraceError as error:
            response.fail(error)
        except Exception:
            response.fail(TailraceError("internal", "profile installation failed"))
            raise

    def _install(
        self, response: AdoptionResponse, stream: Stream, new: Profile, *, adopted: bool = False
    ) -> None:
        changes = profile_changes(stream, new, adopted=adopted)
        if changes:
            self._log.describe_all(stream, changes, self._decided, response)
        else:
            self._log.settled(stream, self._decided, response)

    def _decided(self, transaction: Transaction, error: TailraceError | None) -> None:
        response, stream = transaction.context, transaction.subject
        assert type(response) is AdoptionResponse
        assert stream is not None
        if error is not None:
            response.fail(error)
            return
        if transaction.ops:
            self._on_changed(stream)
        response.finish(_profile_document(stream))


def profile_changes(stream: Stream, new: Profile, *, adopted: bool = False) -> list[tuple[str, bytes | None]]:
    """The documents of a stream that change with a new profile."""
    if new is not GENERIC and not stream.json:
        raise TailraceError(
            "invalid_request", f"{new.kind} profile requires application/json stream content-type"
        )
    documents = stream.documents or {}
    before = registry_document(stream, documents)
    registry = read_registry(before)
    current = read_profile(documents.get(PROFILE_DOCUMENT))
    after = install_profile(new, current, registry, stream.tail, adopted=adopted).to_json()
    changes: list[tuple[str, bytes | None]] = [
        (PROFILE_DOCUMENT, None if new is GENERIC else profile_document(new)),
        (TOUCH_DOCUMENT, _touch_document(new, documents.get(TOUCH_DOCUMENT))),
    ]
    if after != before:
        changes.append((SCHEMA_DOCUMENT, after))
    return [(key, value) for key, value in changes if documents.get(key) != value]


def _touch_document(new: Profile, current: bytes | None) -> bytes | None:
    """The touch document: epoch and templates remain as long as touches are enabled."""
    if not isinstance(new, StateProtocolProfile) or new.touch is None or not new.touch.enabled:
        return None
    return new_touch_document() if current is None else current


def _profile_document(stream: Stream) -> bytes:
    return (stream.visible_documents or {}).get(PROFILE_DOCUMENT) or profile_document(GENERIC)


_REGISTRY_SHOWN: Final = answer("The registry.", REGISTRY)
_PROFILE_SHOWN: Final = answer("The profile.", PROFILE_RESOURCE)
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


ROUTES: Final = route_group(
    "registry",
    Route(
        *("GET", "/v1/stream/{name}/_schema", Action.QUERY_STREAM, SchemaRoutes.show, "readSchema"),
        "Show the registry",
        {200: _REGISTRY_SHOWN},
        errors=(404, 410),
    ),
    Route(
        *("POST", "/v1/stream/{name}/_schema", Action.CONFIGURE_STREAM, SchemaRoutes.update, "updateSchema"),
        "Add a schema version, set the routing key or the search configuration",
        {200: _with_progress(_REGISTRY_SHOWN)},
        errors=(404, 405, 409, 410, 507),
        parameters=[_ADOPT],
        body=request(SCHEMA_UPDATE, REGISTRY_EXAMPLE, "The changes; absent fields are left as they are."),
    ),
    Route(
        *("GET", "/v1/stream/{name}/_profile", Action.QUERY_STREAM, ProfileRoutes.show, "readProfile"),
        "Show the profile",
        {200: _PROFILE_SHOWN},
        errors=(404, 410),
    ),
    Route(
        *("POST", "/v1/stream/{name}/_profile", Action.CONFIGURE_STREAM, ProfileRoutes.install),
        "installProfile",
        "Install a profile, or change its configuration",
        {200: _with_progress(_PROFILE_SHOWN)},
        errors=(404, 405, 409, 410, 507),
        parameters=[_ADOPT],
        body=request(
            PROFILE_UPDATE,
            {"profile": {"kind": "state-protocol", "touch": {"enabled": True}}},
            "The profile.",
        ),
    ),
    place="owner",
)
