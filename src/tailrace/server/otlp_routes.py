"""Spans from OpenTelemetry: POST `{name}/_otlp/v1/traces`, and `/v1/traces` for the stream that is set."""

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
TRACES_ROUTE: Final = "v1/traces"
AT_ONCE: Final = 2  # exports that are decoded; each is a few times its own size in memory
WAITING_MAX: Final = 32
# One append has at most so much of an export: entries of others come between.
APPEND_SPANS: Final = 500
APPEND_BYTES: Final = 1024 * 1024
# Of one export, once its spans are normalised: what a resource says once becomes part of each of them.
EXPORT_BYTES: Final = 256 * 1024 * 1024


class SpanBatch:
    """Spans of one append, normalised and encoded, and the key that each has by itself."""

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
        """The spans as one piece: many small ones take more room than they have bytes."""
        if len(self._pieces) > 1:
            self._pieces = [b",".join(self._pieces)]
        return self._pieces[0]


class ExportTarget(NamedTuple):
    """The stream that an export was sent to. It is looked up each time: it may be put away meanwhile."""

    name: str
    incarnation: int

    @classmethod
    def of(cls, stream: Stream) -> Self:
        return cls(stream.name, stream.incarnation)

    def existing(self, log: Log) -> Stream:
        stream = log.existing(self.name)
        if stream.incarnation != self.incarnation:  # another stream of that name, perhaps of another profile
            raise TailraceError("not_found", f"the stream {self.name!r} was deleted meanwhile")
        return stream


class OtlpRoutes:
    """Decoding is done on threads; what is appended goes the way of every append."""

    def __init__(self, context: Context, guard: AppendValidator) -> None:
        self._context = context
        self._log = context.log
        self._guard = guard
        self._threads = ThreadPoolExecutor(AT_ONCE, "otlp")
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def serve(self, exchange: Exchange, identity: Identity, method: bytes, name: str, route: str) -> None:
        """The spans of one stream."""
        if route != TRACES_ROUTE:
            raise TailraceError("not_found", "there is no such resource on this server")
        if method != b"POST":
            raise responses.method_not_allowed("POST, OPTIONS")
        authorise(identity, Action.INGEST_TRACES, stream=name)
        self._begin(exchange, self._log.existing(name))

    def traces(self, exchange: Exchange, identity: Identity, method: bytes) -> None:
        """The spans of the stream that the settings name, which is made if they say so."""
        if method != b"POST":
            raise responses.method_not_allowed("POST, OPTIONS")
        name = self._context.settings.otlp_traces_stream
        authorise(identity, Action.INGEST_TRACES, stream=name or None)
        if not name:
            raise TailraceError("not_found", "no stream for traces is set: otlp_traces_stream")
        stream = self._log.find(name)
        if self._context.settings.otlp_auto_create and (stream is None or self._is_bare(stream)):
            authorise(identity, Action.CREATE_TRACES_STREAM, stream=name)
            self._create(name)
        self._begin(exchange, self._log.existing(name))

    # -- the stream ------------------------------------------------------------------------------------

    def _is_bare(self, stream: Stream) -> bool:
        """A stream without a profile and without entries: one whose making was cut short."""
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
        profile = self._guard.profiles.get(stream.documents)
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
            raise TailraceError("overloaded", "too many exports of traces wait")
        task = self._context.loop.create_task(
            self._answer(exchange, ExportTarget.of(stream), profile, media, gzipped)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, exchange: Exchange, target: ExportTarget, profile: OtelTracesProfile, media: str, gzipped: bool
    ) -> None:
        self._waiting += 1
        try:
            async with asyncio.timeout(self._context.limits.request_ms / 1000), self._gate:
                export, offset = await self._ingest(exchange.body, target, profile, media, gzipped)
        except TimeoutError:
            message = "the export took too long; some of its spans may have been stored"
            responses.respond_error(exchange, TailraceError("request_timeout", message))
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)
        except Exception:
            responses.respond_error(exchange, TailraceError("internal", "the export failed"))
            raise
        else:
            kind = (
                responses.JSON_TYPE
                if media == JSON_MEDIA_TYPE
                else header_line("Content-Type", PROTOBUF_MEDIA_TYPE)
            )
            head = kind + responses.NO_STORE + responses.next_offset_header(offset)
            exchange.respond(200, head, export.answer(media))
        finally:
            self._waiting -= 1

    async def _ingest(
        self, body: bytes, target: ExportTarget, profile: OtelTracesProfile, media: str, gzipped: bool
    ) -> tuple[SpanExport, str]:
        """What was taken, and the offset of the last span."""
        now_ms = self._context.clock.now_ns() // 1_000_000
        work = partial(_decode_export, body, profile, media, gzipped, now_ms)
        export, batches = await self._context.loop.run_in_executor(self._threads, work)
        stream = target.existing(self._log)
        offset = stream.offset(max(stream.visible, 0))
        for batch in batches:
            lengths = None if len(batch.lengths) == 1 else batch.lengths
            request = AppendRequest(batch.body(), JSON_MEDIA_TYPE, lengths)
            request.check = partial(self._guard.check_normalised, profile, batch.keys)
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

        self._log.append(stream, request, reply, None)
        return await done


def _ignore(_transaction: Transaction, _error: TailraceError | None) -> None:
    """What follows in the journal depends on this anyway."""


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
        raise TailraceError("unsupported_encoding", "OTLP traces may be sent as they are or with gzip")
    return coding == b"gzip"


def _decode_export(
    body: bytes, profile: OtelTracesProfile, media: str, gzipped: bool, now_ms: int
) -> tuple[SpanExport, list[SpanBatch]]:
    """On a thread: everything that can be wrong with an export, before anything of it is stored."""
    limits = profile.config.otlp_limits
    data = gunzip_bounded(body, limits) if gzipped else body
    if len(data) > limits.max_decoded_bytes:
        raise body_too_large(limits.max_decoded_bytes)
    batches = SpanBatcher(profile, now_ms)
    export = SpanExport(limits, batches.add)
    (read_protobuf if media == PROTOBUF_MEDIA_TYPE else read_json)(data, export)
    return export, batches.all


class SpanBatcher:
    """Normalises and encodes spans as they are read: all of them as objects would be far too large."""

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
            raise UnusableSpanError(f"an export may take {EXPORT_BYTES} bytes once it is normalised")
        batch = self.all[-1] if self.all else None
        if batch is None or len(batch.lengths) >= APPEND_SPANS or batch.size + size > APPEND_BYTES:
            if batch is not None:
                batch.body()
            batch = SpanBatch()
            self.all.append(batch)
        batch.add(payload, self._profile.default_key(record))
        self._size += size


def gunzip_bounded(body: bytes, limits: OtlpLimits) -> bytes:
    """The body of a gzip file. Unpacking stops where the limit is, whatever the rest would become."""
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
                raise TailraceError("invalid_request", "OTLP body is cut off: its gzip has no end")
            pieces.append(piece)
            rest = member.unused_data
    except zlib.error:
        raise TailraceError("invalid_request", "OTLP body is not valid gzip") from None
    return b"".join(pieces)
