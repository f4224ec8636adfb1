"""PUT, POST, HEAD and DELETE on a stream: create, append, describe, delete.

Most appends repeat the head of an earlier request on the same connection and have no special headers. For
these `FastAppendHandler` computes what depends on the head only once, and checks the state of the stream each
time.

A request that the log has no room for waits in the log's `BackpressureQueue`. Its body is held as received,
and split and checked when there is room for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypedDict

import orjson

from tailrace.auth import ANONYMOUS, Action, Identity, authorise, is_allowed
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.backpressure_queue import WaitingChange
from tailrace.log.commit_path import LogBackpressureError
from tailrace.log.decide import AppendRequest, CreateRequest
from tailrace.log.history import FetchedBlock, NotLocalError
from tailrace.log.log import Log
from tailrace.log.model import NO_LIFETIME, Stream
from tailrace.log.records import Append
from tailrace.log.transaction import Transaction
from tailrace.protocol import json_split
from tailrace.protocol.http_headers import DEFAULT_CONTENT_TYPE, header_line, is_json
from tailrace.protocol.offsets import next_offset_line
from tailrace.protocol.stream_names import check_creatable_name, is_system_name
from tailrace.routing import request_headers, responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses
from tailrace.routing.openapi import (
    INSTANT,
    OFFSET,
    STRING,
    WHOLE,
    WINDOW,
    Count,
    Json,
    OffsetText,
    answer,
    header_param,
    headers,
    params,
)
from tailrace.routing.table import Auth, Route, route_group
from tailrace.schema.append_validation import PROFILE_DOCUMENT, AppendValidator
from tailrace.schema.registry import fork_registry, read_registry
from tailrace.schema.routes import TOUCH_DOCUMENT
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT


def queue_request(
    log: Log, exchange: Exchange, handle: Callable[[Exchange], None], shortage: LogBackpressureError
) -> None:
    """Call `handle` when the log has room; raise `shortage` if the request cannot wait."""

    def attempt() -> None:
        found: list[LogBackpressureError] = []

        def run(exchange: Exchange) -> None:
            try:
                handle(exchange)
            except LogBackpressureError as again:
                found.append(again)  # raised here it would become the response

        exchange.run(run)
        if found:
            raise found[0]
        exchange.release_body()

    def refuse(error: TailraceError) -> None:
        exchange.release_body()
        responses.respond_error(exchange, error)

    if not exchange.hold_body():
        raise shortage
    waiting = WaitingChange(len(exchange.body), attempt, refuse, lambda: exchange.answered)
    try:
        log.backpressure_queue.add(waiting, shortage)
    except LogBackpressureError:
        exchange.release_body()
        raise


class FastAppendHandler:
    """Handles appends that repeat one head; anything unusual takes the general path."""

    __slots__ = (
        "_content_type",
        "_entries_max",
        "_general",
        "_json",
        "_json_depth",
        "_log",
        "_name",
    )

    def __init__(
        self,
        log: Log,
        name: str,
        content_type: str,
        general: Callable[[Exchange], None],
    ) -> None:
        self._log = log
        self._json_depth = log.limits.json_depth
        self._entries_max = log.limits.append_entries
        self._name = name
        self._content_type = content_type
        self._json = is_json(content_type)
        self._general = general

    def __call__(self, exchange: Exchange) -> None:
        log = self._log
        stream = log.streams.by_name.get(self._name)
        try:
            if (
                stream is None
                or stream.closed
                or stream.gone
                or stream.lifetime is not NO_LIFETIME
                or stream.content_type != self._content_type
                or stream.documents is not None
                or log.on_room is not None  # other changes wait for room
            ):
                self._general(exchange)
                return
            body = exchange.body
            if not self._json:
                log.append_plain(stream, body, None, _acknowledge_fast_append, exchange)
                return
            joined, lengths = json_split.split_to_block(body, self._json_depth, self._entries_max)
            if len(lengths) == 1:
                log.append_plain(stream, joined, None, _acknowledge_fast_append, exchange)
            elif lengths:
                log.append_plain(stream, joined, lengths, _acknowledge_fast_append, exchange)
            else:
                self._general(exchange)
        except LogBackpressureError as shortage:
            queue_request(log, exchange, self._general, shortage)


def _acknowledge_fast_append(transaction: Transaction, error: TailraceError | None) -> None:
    exchange, stream, op = transaction.context, transaction.subject, transaction.append
    assert type(exchange) is Exchange
    assert stream is not None
    assert op is not None
    if error is not None:
        responses.respond_error(exchange, error)
        return
    # What was just written is in the current epoch.
    exchange.acknowledge(next_offset_line(stream.epochs[-1][0], op.first + op.count - 1))


# Most appends have none of these headers, and their request is the body alone.
SLOW_PATH_HEADERS = frozenset(
    (
        b"stream-closed",
        b"stream-seq",
        b"stream-key",
        b"stream-timestamp",
        b"producer-id",
        b"producer-epoch",
        b"producer-seq",
        b"prefer",
        b"content-encoding",
    )
)


class StreamRoutes:
    """Creates, appends to, describes and deletes streams."""

    def __init__(self, context: Context, guard: AppendValidator) -> None:
        self._context = context
        self._validator = guard
        self._log = context.log
        self._limits = context.limits
        self._deferred = DeferredResponses(context.limits.request_ms)
        self._respond_append = (
            self._respond_append_timed if context.settings.server_timing else respond_append
        )

    # -- POST ------------------------------------------------------------------------------------------

    def append(self, exchange: Exchange, identity: Identity, name: str) -> None:
        try:
            self._append(exchange, identity, name)
        except LogBackpressureError as shortage:
            queue_request(self._log, exchange, lambda again: self._append(again, identity, name), shortage)

    def _append(self, exchange: Exchange, identity: Identity, name: str) -> None:
        authorise(identity, Action.WRITE_STREAM, stream=name)
        log = self._log
        if log.must_queue:  # before the body is split
            raise LogBackpressureError("other changes are waiting for room", len(exchange.body))
        stream = log.streams.by_name.get(name)
        if stream is None or stream.lifetime is not NO_LIFETIME or stream.gone:
            stream = log.existing(name)
        request = self._append_request(exchange, stream)
        if stream.documents is not None:
            request.check = self._validator.check
        log.append(stream, request, self._respond_append, exchange)

    def handler_for(self, exchange: Exchange, name: str) -> Callable[[Exchange], None] | None:
        """The fast path for appends that repeat this head, or None."""
        if exchange.repeated is not None or not SLOW_PATH_HEADERS.isdisjoint(exchange.headers):
            return None
        try:
            authorise(ANONYMOUS, Action.WRITE_STREAM, stream=name)
            content_type = request_headers.request_content_type(exchange)
        except TailraceError:
            return None
        if content_type is None or not exchange.body:
            return None

        def general(again: Exchange) -> None:
            self._append(again, ANONYMOUS, name)

        return FastAppendHandler(self._log, name, content_type, general)

    def _respond_append_timed(self, transaction: Transaction, error: TailraceError | None) -> None:
        """As `respond_append`, with the commit time in Server-Timing."""
        exchange = transaction.context
        assert type(exchange) is Exchange
        responses.add_phase(exchange, "commit", time.monotonic() - exchange.started)
        respond_append(transaction, error)

    def _append_request(self, exchange: Exchange, stream: Stream) -> AppendRequest:
        headers, body = exchange.headers, exchange.body
        content_type = request_headers.request_content_type(exchange) if body else None
        if SLOW_PATH_HEADERS.isdisjoint(headers) and exchange.repeated is None:
            if not body:
                raise TailraceError("empty_body", "the body is empty")
            if content_type is None:
                raise TailraceError("missing_content_type", "a request with a body must have a Content-Type")
            return self._with_body(body, content_type, stream)
        request_headers.check_single_headers(exchange)
        request_headers.check_content_encoding(exchange)
        producer = request_headers.parse_producer(exchange, self._limits)
        seq = request_headers.parse_stream_seq(exchange, self._limits)
        key = request_headers.parse_stream_key(exchange, self._limits)
        hint_ns = request_headers.parse_stream_timestamp_ns(exchange)
        closes = request_headers.is_closing(exchange)
        if not body:
            if not closes:
                raise TailraceError("empty_body", "the body is empty")
            request = AppendRequest(b"", None)
        elif content_type is None:
            raise TailraceError("missing_content_type", "a request with a body must have a Content-Type")
        else:
            request = self._with_body(body, content_type, stream)
        request.closes = closes
        request.key = key
        request.hint_ns = hint_ns
        request.seq = seq
        request.producer = producer
        return request

    def _with_body(self, body: bytes, content_type: str, stream: Stream | None) -> AppendRequest:
        """Split the body if both it and the stream are JSON; a content type mismatch is found by `decide`."""
        if is_json(content_type) and (stream is None or stream.json or stream.content_type is None):
            joined, lengths = json_split.split_to_block(
                body, self._limits.json_depth, self._limits.append_entries
            )
            if not lengths:
                if stream is None:
                    return AppendRequest(b"", None)
                raise TailraceError("empty_array", "the array is empty, it must have at least one entry")
            return AppendRequest(joined, content_type, None if len(lengths) == 1 else lengths)
        return AppendRequest(body, content_type)

    # -- PUT -------------------------------------------------------------------------------------------

    def create(self, exchange: Exchange, identity: Identity, raw_name: str | None) -> None:
        try:
            self._create(exchange, identity, raw_name)
        except LogBackpressureError as shortage:
            queue_request(
                self._log, exchange, lambda again: self._create(again, identity, raw_name), shortage
            )

    def _create(self, exchange: Exchange, identity: Identity, raw_name: str | None) -> None:
        if raw_name is not None and is_system_name(raw_name) and self._log.find(raw_name) is not None:
            # Clients that may not read it must not learn that it exists: for them the name is reserved.
            if is_allowed(identity, Action.READ_STREAM, stream=raw_name):
                raise read_only_error()
        request_headers.check_single_headers(exchange)
        name = check_creatable_name(raw_name, self._limits.name_bytes)
        fork = request_headers.parse_fork(exchange)
        authorise(identity, Action.WRITE_STREAM, stream=name, source=fork.source)
        request_headers.check_content_encoding(exchange)
        content_type = request_headers.request_content_type(exchange)
        lifetime = request_headers.parse_lifetime(exchange)
        closed = request_headers.is_closing(exchange)
        initial: AppendRequest | None = None
        if exchange.body:
            source = None if fork.source is None else self._log.find(fork.source)
            inherited = None if source is None else source.content_type
            if self._log.find(name) is None:
                content_type = content_type or inherited or DEFAULT_CONTENT_TYPE
                initial = self._with_body(exchange.body, content_type, None)
                initial.key = request_headers.parse_stream_key(exchange, self._limits)
                initial.hint_ns = request_headers.parse_stream_timestamp_ns(exchange)
                initial.closes = closed
                if not initial.count:
                    initial = None
        request = CreateRequest(
            name,
            content_type,
            lifetime,
            closed,
            fork.source,
            fork.position,
            fork.sub,
            initial,
            None if fork.source is None else partial(self._inherit, name, initial),
        )
        # The status says whether the stream is new; the response waits until that is durable.
        try:
            self._log.create(request, self._respond_create, exchange)
        except NotLocalError as needed:
            self._deferred.respond(exchange, self._create_later(exchange, request, needed))

    def _inherit(
        self, name: str, initial: AppendRequest | None, source: Stream, entry: int
    ) -> dict[str, bytes]:
        """The documents that a fork inherits from its source; its first entries have to be valid for them."""
        documents = source.documents or {}
        if initial is not None:
            keys = self._validator.normalise(initial, source)
            initial.check = lambda _request, _stream: keys
        inherited: dict[str, bytes] = {}
        if SCHEMA_DOCUMENT in documents:
            inherited[SCHEMA_DOCUMENT] = fork_registry(
                read_registry(documents[SCHEMA_DOCUMENT]), name, entry
            ).to_json()
        if (
            PROFILE_DOCUMENT in documents and TOUCH_DOCUMENT not in documents
        ):  # touch keys refer to entries of one stream, so a fork does not inherit them
            inherited[PROFILE_DOCUMENT] = documents[PROFILE_DOCUMENT]
        return inherited

    async def _create_later(
        self, exchange: Exchange, request: CreateRequest, needed: NotLocalError | None
    ) -> None:
        """Fork at a position in the object store: fetch the blocks it needs, then create it as usual."""
        fetched: list[FetchedBlock] = []
        while needed is not None:
            fetched.append(await self._log.reader.fetch_block(needed.missing))
            needed = None
            try:
                await self._log.backpressure_queue.submit(
                    partial(self._log.create, request, self._respond_create, exchange, fetched)
                )
            except NotLocalError as more:
                needed = more

    def _respond_create(self, transaction: Transaction, error: TailraceError | None) -> None:
        exchange = transaction.context
        assert isinstance(exchange, Exchange)
        if error is not None:
            responses.respond_error(exchange, error)
            return
        stream = transaction.subject
        assert stream is not None
        head = responses.content_type_header(stream) + responses.next_offset_header(
            stream.offset(stream.visible)
        )
        if stream.visible_closed:
            head += responses.CLOSED
        head += responses.lifetime_headers(stream)
        if transaction.duplicate:
            exchange.respond(200, head + responses.NO_STORE)
            return
        location = responses.base_url(exchange, self._context.settings) + exchange.path.decode("latin-1")
        exchange.respond(201, head + header_line("Location", location) + responses.NO_STORE)

    # -- HEAD, DELETE ----------------------------------------------------------------------------------

    def head(self, exchange: Exchange, identity: Identity, name: str) -> None:
        authorise(identity, Action.READ_STREAM, stream=name)
        stream = self._log.readable(name)
        tail = stream.offset(stream.visible)
        head = (
            responses.content_type_header(stream)
            + responses.next_offset_header(tail)
            + responses.end_offset_header(tail)
        )
        head += header_line("Stream-Earliest-Offset", stream.offset(stream.earliest))
        if stream.visible_closed:
            head += responses.CLOSED
        exchange.respond(200, head + responses.lifetime_headers(stream) + responses.NO_STORE)

    def delete(self, exchange: Exchange, identity: Identity, name: str) -> None:
        if is_system_name(name):
            raise read_only_error()
        authorise(identity, Action.DELETE_STREAM, stream=name)
        log = self._log
        stream = log.find(name)
        if stream is None:
            if log.confirm_deleted(name, _respond_delete, exchange):
                return
        log.remove(log.existing(name), "deleted", _respond_delete, exchange)


def read_only_error() -> TailraceError:
    return TailraceError(
        "read_only_stream",
        "system streams are read-only, only the server writes them",
        headers=(("Allow", "GET, HEAD, OPTIONS"),),
    )


def _respond_delete(transaction: Transaction, error: TailraceError | None) -> None:
    exchange = transaction.context
    assert isinstance(exchange, Exchange)
    if error is not None:
        responses.respond_error(exchange, error)
    else:
        exchange.respond(204, responses.NO_STORE)


def respond_append(transaction: Transaction, error: TailraceError | None) -> None:
    """Acknowledge an append that is durable."""
    exchange, stream = transaction.context, transaction.subject
    assert type(exchange) is Exchange
    assert stream is not None
    if error is not None:
        responses.respond_error(exchange, error)
        return
    if transaction.duplicate:
        _respond_append_with_headers(
            exchange, stream, stream.visible, 0, transaction.producer, stream.visible_closed
        )
        return
    op = transaction.append or transaction.ops[0]
    assert type(op) is Append
    last = op.first + op.count - 1
    if op.producer is None and not op.closes and b"prefer" not in exchange.headers:
        exchange.respond(204, responses.next_offset_header(stream.offset(last)))
    else:
        _respond_append_with_headers(
            exchange, stream, last, op.count, op.producer and op.producer[1:], op.closes
        )


def _respond_append_with_headers(
    exchange: Exchange,
    stream: Stream,
    last: int,
    count: int,
    producer: tuple[int, int] | None,
    closed: bool,
) -> None:
    """Respond with the highest producer sequence that was accepted, also to a duplicate.

    `producer` is the state when the request was decided: later decisions may not be durable yet.
    """
    offset = stream.offset(last)
    head = responses.next_offset_header(offset)
    status = 204
    if b"producer-id" in exchange.headers:
        head += b"Producer-Epoch: %d\r\nProducer-Seq: %d\r\n" % (producer or (0, 0))
        if count:
            status = 200
    if closed:
        head += responses.CLOSED
    if b"return=representation" in exchange.headers.get(b"prefer", b"").lower().replace(b" ", b""):
        body = orjson.dumps({"next_offset": offset, "count": count, "closed": closed})
        head += b"Preference-Applied: return=representation\r\n" + responses.JSON_TYPE
        exchange.respond(200, head, body)
    else:
        exchange.respond(status, head)


class Acknowledgement(TypedDict):
    next_offset: OffsetText
    count: Count
    closed: bool


_LIFETIME: Final = ("Stream-TTL", "Stream-Expires-At", "Stream-Retention", "Stream-Retention-Bytes")
_ENTRIES: Final[Json] = {
    "description": "Each element of a JSON array is an entry. Any other body is one entry.",
    "content": {
        "application/json": {"schema": {}, "example": [{"id": 1}, {"id": 2}]},
        "text/plain": {"schema": STRING, "example": "one line\n"},
        "application/octet-stream": {"schema": {}},
    },
}
_CREATE_PARAMETERS: Final = (
    header_param("Stream-TTL", "Idle time after which the stream expires.", WINDOW, example="7d"),
    header_param(
        "Stream-Expires-At",
        "The time at which the stream expires; not together with a TTL.",
        INSTANT,
        example="2030-01-01T00:00:00Z",
    ),
    header_param("Stream-Retention", "Entries older than this are trimmed.", WINDOW),
    header_param("Stream-Retention-Bytes", "Entries with this much newer payload are trimmed.", WHOLE),
    *params("stream-closed", "stream-key", "stream-timestamp"),
    header_param(
        "Stream-Forked-From",
        "Create a fork of this stream: `/v1/stream/<name>`.",
        example="/v1/stream/orders",
    ),
    header_param(
        "Stream-Fork-Offset",
        "The position in the source; its tail by default.",
        {"anyOf": [{"enum": ["-1", "now"]}, OFFSET]},
    ),
    header_param("Stream-Fork-Sub-Offset", "This many messages or bytes after the offset.", WHOLE),
)
_APPEND_PARAMETERS: Final = (
    *params("stream-key", "stream-timestamp", "stream-closed"),
    header_param("Stream-Seq", "Must be greater than the last one, compared as bytes.", {"minLength": 1}),
    header_param("Producer-Id", "With epoch and sequence number: exactly-once appends.", {"minLength": 1}),
    header_param("Producer-Epoch", "Incremented when the producer restarts.", WHOLE),
    header_param("Producer-Seq", "The sequence number of this request, from 0.", WHOLE),
    header_param("Prefer", "`return=representation` requests a body.", example="return=representation"),
)
_APPENDED: Final = ("Stream-Closed", "Producer-Epoch", "Producer-Seq")
_NEXT: Final = ("Stream-Next-Offset",)
_PATH: Final = "/v1/stream/{name}"
# The handlers authorise: these are the hot path, and a fork needs its source.
ROUTES: Final = route_group(
    "streams",
    Route(
        *("PUT", _PATH, Action.WRITE_STREAM, StreamRoutes.create, "createStream"),
        "Create a stream, or confirm its configuration",
        {
            200: answer(
                "The stream exists with this configuration.",
                head=headers("Stream-Closed", *_LIFETIME, always=_NEXT),
            ),
            201: answer(
                "The stream was created.",
                head=headers("Stream-Closed", *_LIFETIME, always=(*_NEXT, "Location")),
            ),
        },
        errors=(404, 405, 409, 410, 415, 429, 507),
        parameters=_CREATE_PARAMETERS,
        body=_ENTRIES,
        description="`Content-Type` is the type of the stream. A fork requires `read` on its source.",
        auth=Auth.IDENTIFIED,
    ),
    Route(
        *("POST", _PATH, Action.WRITE_STREAM, StreamRoutes.append, "append"),
        "Append entries, close the stream, or both",
        {
            200: answer(
                "Durable; with producer headers, or with a representation. Only the latter has a body.",
                Acknowledgement,
                headers(*_APPENDED, "Preference-Applied", always=_NEXT),
                {"next_offset": "00000000000000000008000000", "count": 2, "closed": False},
            ),
            204: answer(
                "Durable, or a duplicate of an append that is.", head=headers(*_APPENDED, always=_NEXT)
            ),
        },
        errors=(404, 405, 409, 410, 415, 429, 507),
        parameters=_APPEND_PARAMETERS,
        body=_ENTRIES,
        description=(
            "A body requires the `Content-Type` of the stream. `Stream-Closed: true` requires no body."
        ),
        auth=Auth.IDENTIFIED,
    ),
    Route(
        *("HEAD", _PATH, Action.READ_STREAM, StreamRoutes.head, "describeStream"),
        "Content type, tail and lifetime; does not renew the TTL",
        {
            200: answer(
                "The stream exists; `Content-Type` is its type.",
                head=headers(
                    *("Stream-Closed", *_LIFETIME),
                    always=("Stream-Next-Offset", "Stream-End-Offset", "Stream-Earliest-Offset"),
                ),
            )
        },
        errors=(404, 410),
        auth=Auth.IDENTIFIED,
    ),
    Route(
        *("DELETE", _PATH, Action.DELETE_STREAM, StreamRoutes.delete, "deleteStream"),
        "Delete a stream",
        {204: answer("Deleted, by this request or an earlier one.")},
        errors=(404, 405, 410, 507),
        auth=Auth.IDENTIFIED,
    ),
    place="owner",
)
