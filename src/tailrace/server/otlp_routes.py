"""OTLP ingestion: POST `{name}/_otlp/v1/traces`, and `/v1/traces` for the stream in `otlp_traces_stream`.

An export is decoded and normalised as a whole on a thread, before any of it is stored, and then appended in
batches.
"""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, Self

from tailrace.auth import Action, Identity, authorise
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.decide import AppendRequest, CreateRequest
from tailrace.log.log import Log
from tailrace.log.model import Stream
from tailrace.log.transaction import Transaction
from tailrace.protocol.http_headers import header_line, media_type
from tailrace.protocol.stream_names import check_creatable_name
from tailrace.routing import request_headers, responses
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses, Response
from tailrace.routing.openapi import OBJECT, STRING, Component, Json, array, headers, obj
from tailrace.routing.table import Auth, Handler, Route, route_group
from tailrace.schema.append_validation import PROFILE_DOCUMENT, AppendValidator
from tailrace.schema.json_values import encode_json_record
from tailrace.schema.profiles.otlp_export import (
    JSON_MEDIA_TYPE,
    PROTOBUF_MEDIA_TYPE,
    OtlpLimits,
    Record,
    SpanExport,
    UnusableSpanError,
)
from tailrace.schema.profiles.otlp_json import read_json
from tailrace.schema.profiles.otlp_protobuf import read_protobuf
from tailrace.schema.profiles.profile import (
    GENERIC,
    OtelTracesProfile,
    install_profile,
    parse_profile,
    profile_document,
)
from tailrace.schema.registry import read_registry
from tailrace.schema.routes import registry_document
from tailrace.schema.stream_schema import SCHEMA_DOCUMENT

TRACES_PATH: Final = b"/v1/traces"
DECODES_MAX: Final = 2  # exports decoded at once; each takes a multiple of its size in memory
WAITING_MAX: Final = 32
# Limits of one append, so that other appends are not delayed by a large export.
APPEND_SPANS: Final = 500
APPEND_BYTES: Final = 1024 * 1024
# Of one normalised export: the attributes of a resource are repeated in each of its spans.
EXPORT_BYTES: Final = 256 * 1024 * 1024


class SpanBatch:
    """The spans of one append, normalised and encoded, with the routing key of each."""

    __slots__ = ("_pieces", "keys", "lengths", "size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.lengths: list[int] = []
        self.keys: list[str | None] = []
        self.size = 0

    def add(self, payload: bytes, key: str | None) -> None:
        self._pieces.append(payload)
        self.lengths.append(len(payload))
        self.keys.append(key)
        self.size += len(payload)

    def body(self) -> bytes:
        """The spans as one bytes object, which takes less memory than many small ones."""
        if len(self._pieces) > 1:
            self._pieces = [b",".join(self._pieces)]
        return self._pieces[0]


class ExportTarget(NamedTuple):
    """The stream of an export, looked up for each append: it may be unloaded or deleted in between."""

    name: str
    incarnation: int

    @classmethod
    def of(cls, stream: Stream) -> Self:
        return cls(stream.name, stream.incarnation)

    def existing(self, log: Log) -> Stream:
        stream = log.existing(self.name)
        if stream.incarnation != self.incarnation:  # a new stream of that name, perhaps with another profile
            raise TailraceError("not_found", f"stream {self.name!r} was deleted during the export")
        return stream


class OtlpRoutes:
    """Decodes exports on threads and appends them as any other append."""

    def __init__(self, context: Context, validator: AppendValidator) -> None:
        self._context = context
        self._log = context.log
        self._validator = validator
        self._threads = ThreadPoolExecutor(DECODES_MAX, "otlp")
        self._decodes = asyncio.Semaphore(DECODES_MAX)
        self._waiting = 0
        self._deferred = DeferredResponses(context.limits.request_ms)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def export_to_stream(self, exchange: Exchange, _: Identity, name: str) -> None:
        self._begin(exchange, self._log.existing(name))

    def export(self, exchange: Exchange, identity: Identity) -> None:
        """POST `/v1/traces`: the configured stream, which is created with `otlp_auto_create`."""
        name = self._context.settings.otlp_traces_stream
        authorise(identity, Action.INGEST_TRACES, stream=name or None)
        if not name:
            raise TailraceError("not_found", "no stream for traces is configured: set otlp_traces_stream")
        stream = self._log.find(name)
        if self._context.settings.otlp_auto_create and (stream is None or self._is_unconfigured(stream)):
            authorise(identity, Action.CREATE_TRACES_STREAM, stream=name)
            self._create(name)
        self._begin(exchange, self._log.existing(name))

    # -- the stream ------------------------------------------------------------------------------------

    def _is_unconfigured(self, stream: Stream) -> bool:
        """An empty stream without a profile: its creation was interrupted."""
        return stream.documents is None and not stream.tail and stream.json and not stream.gone

    def _create(self, name: str) -> None:
        if self._log.find(name) is None:
            check_creatable_name(name, self._context.limits.name_bytes)
            self._log.create(CreateRequest(name, JSON_MEDIA_TYPE), _ignore, None)
        stream = self._log.existing(name)
        profile = parse_profile({"kind": "otel-traces"})
        registry = install_profile(profile, GENERIC, read_registry(registry_document(stream, None)), 0)
        documents = [(PROFILE_DOCUMENT, profile_document(profile)), (SCHEMA_DOCUMENT, registry.to_json())]
        self._log.describe_all(stream, documents)

    # -- an export -------------------------------------------------------------------------------------

    def _begin(self, exchange: Exchange, stream: Stream) -> None:
        profile = self._validator.profiles.get(stream.documents)
        if not isinstance(profile, OtelTracesProfile):
            message = "OTLP traces require a stream with the otel-traces profile"
            raise TailraceError("invalid_request", message)
        media = _media_type(exchange)
        gzipped = _is_gzipped(exchange)
        limits = profile.config.otlp_limits
        if gzipped and len(exchange.body) > limits.max_compressed_bytes:
            raise body_too_large(limits.max_compressed_bytes)
        if self._log.pressure is not None:
            raise self._log.pressure
        if self._waiting >= WAITING_MAX:
            raise TailraceError("overloaded", f"{WAITING_MAX} OTLP exports are in progress already")
        work = self._respond(exchange.body, ExportTarget.of(stream), profile, media, gzipped)
        message = "OTLP export timed out; some of its spans may have been stored"
        self._deferred.respond(exchange, work, timeout_message=message)

    async def _respond(
        self, body: bytes, target: ExportTarget, profile: OtelTracesProfile, media: str, gzipped: bool
    ) -> Response:
        self._waiting += 1
        try:
            async with self._decodes:
                export, offset = await self._ingest(body, target, profile, media, gzipped)
        finally:
            self._waiting -= 1
        kind = (
            responses.JSON_TYPE
            if media == JSON_MEDIA_TYPE
            else header_line("Content-Type", PROTOBUF_MEDIA_TYPE)
        )
        head = kind + responses.NO_STORE + responses.next_offset_header(offset)
        return 200, head, export.answer(media)

    async def _ingest(
        self, body: bytes, target: ExportTarget, profile: OtelTracesProfile, media: str, gzipped: bool
    ) -> tuple[SpanExport, str]:
        """Append an export; returns it with the offset of its last span."""
        now_ms = self._context.clock.now_ns() // 1_000_000
        work = partial(_decode_export, body, profile, media, gzipped, now_ms)
        export, batches = await self._context.loop.run_in_executor(self._threads, work)
        stream = target.existing(self._log)
        offset = stream.offset(max(stream.visible, 0))
        for batch in batches:
            lengths = None if len(batch.lengths) == 1 else batch.lengths
            request = AppendRequest(batch.body(), JSON_MEDIA_TYPE, lengths)
            request.check = partial(self._validator.check_normalised, profile, batch.keys)
            offset = await self._append(target, request)
        return export, offset

    async def _append(self, target: ExportTarget, request: AppendRequest) -> str:
        stream = target.existing(self._log)
        done: asyncio.Future[str] = self._context.loop.create_future()

        def reply(transaction: Transaction, error: TailraceError | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
                return
            op = transaction.append
            last = stream.visible if op is None else op.first + op.count - 1
            done.set_result(stream.offset(last))

        await self._log.backpressure_queue.submit(lambda: self._log.append(stream, request, reply, None))
        return await done


def _ignore(_transaction: Transaction, _error: TailraceError | None) -> None:
    """The appends that follow in the journal report the error."""


def body_too_large(bytes_max: int) -> TailraceError:
    return TailraceError("payload_too_large", f"OTLP export is larger than {bytes_max} bytes")


def _media_type(exchange: Exchange) -> str:
    media = media_type(request_headers.request_content_type(exchange) or "")
    if media not in (PROTOBUF_MEDIA_TYPE, JSON_MEDIA_TYPE):
        message = f"OTLP traces require {PROTOBUF_MEDIA_TYPE} or {JSON_MEDIA_TYPE}"
        raise TailraceError("unsupported_media_type", message)
    return media


def _is_gzipped(exchange: Exchange) -> bool:
    coding = exchange.headers.get(b"content-encoding", b"identity").strip().lower()
    if coding not in (b"identity", b"gzip"):
        raise TailraceError(
            "unsupported_encoding", "Content-Encoding of OTLP traces must be gzip or identity"
        )
    return coding == b"gzip"


def _decode_export(
    body: bytes, profile: OtelTracesProfile, media: str, gzipped: bool, now_ms: int
) -> tuple[SpanExport, list[SpanBatch]]:
    """Runs on a thread. Finds all errors of an export before any of it is stored."""
    limits = profile.config.otlp_limits
    data = gunzip_bounded(body, limits) if gzipped else body
    if len(data) > limits.max_decoded_bytes:
        raise body_too_large(limits.max_decoded_bytes)
    batches = SpanBatcher(profile, now_ms)
    export = SpanExport(limits, batches.add)
    (read_protobuf if media == PROTOBUF_MEDIA_TYPE else read_json)(data, export)
    return export, batches.all


class SpanBatcher:
    """Normalises and encodes spans while they are decoded, as all of them as objects would be too large."""

    def __init__(self, profile: OtelTracesProfile, now_ms: int) -> None:
        self._profile = profile
        self._now_ms = now_ms
        self._size = 0
        self.all: list[SpanBatch] = []

    def add(self, span: Record) -> None:
        try:
            record = self._profile.accept(span, self._now_ms)
        except TailraceError as refusal:
            raise UnusableSpanError(refusal.message) from None
        payload = encode_json_record(record)
        size = len(payload)
        if self._size + size > EXPORT_BYTES:
            raise UnusableSpanError(f"the normalised export must have at most {EXPORT_BYTES} bytes")
        batch = self.all[-1] if self.all else None
        if batch is None or len(batch.lengths) >= APPEND_SPANS or batch.size + size > APPEND_BYTES:
            if batch is not None:
                batch.body()
            batch = SpanBatch()
            self.all.append(batch)
        batch.add(payload, self._profile.default_key(record))
        self._size += size


def gunzip_bounded(body: bytes, limits: OtlpLimits) -> bytes:
    """Decompress a gzip body, up to the limit."""
    pieces: list[bytes] = []
    left, rest = limits.max_decoded_bytes, body
    try:
        while rest:
            member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            piece = member.decompress(rest, left + 1)
            left -= len(piece)
            if left < 0:
                raise body_too_large(limits.max_decoded_bytes)
            if not member.eof:
                raise TailraceError("invalid_request", "OTLP body is truncated gzip")
            pieces.append(piece)
            rest = member.unused_data
    except zlib.error:
        raise TailraceError("invalid_request", "OTLP body is not valid gzip") from None
    return b"".join(pieces)


_BYTES: Final[Json] = {"type": "string", "format": "binary"}
_ATTRIBUTES: Final[Json] = array(obj({}, {"key": STRING, "value": OBJECT}))
_EXPORT: Final = Component(
    "TraceExport",
    obj(
        {},
        {
            "resourceSpans": array(
                obj(
                    {},
                    {
                        "resource": obj({}, {"attributes": _ATTRIBUTES}),
                        "scopeSpans": array(obj({}, {"spans": array(OBJECT)}), maxItems=4096),
                    },
                ),
                maxItems=1024,
            )
        },
        description="`ExportTraceServiceRequest` of OTLP as JSON: ids in hex, 64-bit numbers as strings.",
    ),
)
_EXPORT_ANSWER: Final = Component(
    "TraceExportAnswer",
    obj(
        {},
        {"partialSuccess": obj({"rejectedSpans": STRING, "errorMessage": STRING})},
        description="Empty if all spans were stored.",
    ),
)
_EXAMPLE: Final = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "checkout"}}]},
            "scopeSpans": [
                {
                    "spans": [
                        {
                            "traceId": "4bf92f3577b34da6a3ce929d0e0e4736",
                            "spanId": "00f067aa0ba902b7",
                            "name": "GET /orders",
                            "kind": 2,
                            "startTimeUnixNano": "1767225600000000000",
                            "endTimeUnixNano": "1767225600020000000",
                        }
                    ]
                }
            ],
        }
    ]
}


def _export_route(path: str, handler: Handler, operation: str, summary: str, auth: Auth) -> Route:
    return Route(
        *("POST", path, Action.INGEST_TRACES, handler, operation, summary),
        {
            200: {
                "description": "Stored; spans that were rejected are counted.",
                "headers": headers(always=("Stream-Next-Offset",)),
                "content": {
                    JSON_MEDIA_TYPE: {"schema": _EXPORT_ANSWER},
                    PROTOBUF_MEDIA_TYPE: {"schema": _BYTES},
                },
            }
        },
        errors=(404, 405, 409, 410, 415, 507),
        body={
            "description": "The export in either encoding, optionally with `Content-Encoding: gzip`.",
            "required": True,
            "content": {
                JSON_MEDIA_TYPE: {"schema": _EXPORT, "example": _EXAMPLE},
                PROTOBUF_MEDIA_TYPE: {"schema": _BYTES},
            },
        },
        auth=auth,
    )


ROUTES: Final = route_group(
    "traces",
    _export_route(
        *("/v1/stream/{name}/_otlp/v1/traces", OtlpRoutes.export_to_stream, "exportTraces"),
        "Store spans in a stream with the `otel-traces` profile",
        Auth.CHECKED,
    ),
    _export_route(
        *("/v1/traces", OtlpRoutes.export, "exportTracesByDefault"),
        "Store spans in the stream of `otlp_traces_stream`",
        Auth.IDENTIFIED,
    ),
    place="owner",
)
