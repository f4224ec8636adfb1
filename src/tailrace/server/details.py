"""GET `_details` and `_index_status`: at once, only if something changed, or when it does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import orjson

from tailrace.auth import Action, Identity, authorise, invalid_token_error
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import Exchange
from tailrace.log.model import Stream
from tailrace.protocol.http_headers import if_none_match
from tailrace.protocol.query_params import parse_query, wait_limit_lines, wait_ms
from tailrace.routing import responses
from tailrace.routing.context import Context
from tailrace.server import descriptor
from tailrace.server.descriptor import CacheBytes, ObjectRequests, VolatileDetails
from tailrace.server.documents import StreamDocuments, read_documents
from tailrace.server.index_status import IndexSnapshot, ManifestStatus, TailIndexStatus, index_status
from tailrace.server.live import LiveReaders
from tailrace.storage.object_store.request_stats import UploadedHead

WAIT_DEFAULT_MS = 3000
READ_METHODS = "GET, HEAD, OPTIONS"

DetailsKind = Literal["details", "index_status"]


class DetailsRoutes:
    """Both endpoints have one contract. An answer is of one moment: it is put together at once."""

    def __init__(self, context: Context, live: LiveReaders) -> None:
        self._context = context
        self._log = context.log
        self._live = live
        self._waits: set[DetailsWait] = set()
        self.requests_of: Callable[[Stream], ObjectRequests] = lambda _: {}
        self.head_of: Callable[[Stream], UploadedHead | None] = lambda _: None
        self.is_in_conflict: Callable[[Stream], bool] = lambda _: False
        self.tail_of: Callable[[Stream], TailIndexStatus] = lambda _: TailIndexStatus()
        self.indexed_of: Callable[[Stream], IndexSnapshot | None] = lambda _: IndexSnapshot()
        self.load_index: Callable[[Stream], Awaitable[None]] = _nothing_to_load
        self._tasks: set[asyncio.Task[None]] = set()
        self.cached_of: Callable[[Stream], CacheBytes] = lambda _: {}

    def details(self, exchange: Exchange, identity: Identity, method: bytes, name: str) -> None:
        self._answer(exchange, identity, method, name, "details")

    def index_status(self, exchange: Exchange, identity: Identity, method: bytes, name: str) -> None:
        self._answer(exchange, identity, method, name, "index_status")

    def _answer(
        self, exchange: Exchange, identity: Identity, method: bytes, name: str, kind: DetailsKind
    ) -> None:
        if method not in (b"GET", b"HEAD"):
            raise responses.method_not_allowed(READ_METHODS)
        authorise(identity, Action.QUERY_STREAM, stream=name)
        query = parse_query(exchange.query)
        stream = self._log.readable(name)
        live = query.get("live", "")
        if live not in ("", "false", "0", "true", "1", "long-poll"):
            raise TailraceError("invalid_request", "live must be true or long-poll")
        waits_ms = wait_ms(query, WAIT_DEFAULT_MS, self._context.limits.details_max_wait_ms)
        if self.indexed_of(stream) is None:
            task = self._context.loop.create_task(
                self._load(exchange, identity, stream, kind, live, waits_ms)
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._answer_known(exchange, identity, stream, kind, live, waits_ms)

    async def _load(
        self,
        exchange: Exchange,
        identity: Identity,
        stream: Stream,
        kind: DetailsKind,
        live: str,
        waits_ms: int,
    ) -> None:
        """How far its indexes are has not been looked at lately."""
        try:
            await self.load_index(stream)
            self._log.readable(stream.name)
            self._answer_known(exchange, identity, stream, kind, live, waits_ms)
        except TailraceError as refusal:
            responses.respond_error(exchange, refusal)

    def _answer_known(
        self,
        exchange: Exchange,
        identity: Identity,
        stream: Stream,
        kind: DetailsKind,
        live: str,
        waits_ms: int,
    ) -> None:
        known = exchange.headers.get(b"if-none-match", b"").decode("latin-1")
        tag = self.tag(stream, kind)
        if not known or not if_none_match(known, tag):
            self.show(exchange, stream, kind)
        elif live in ("", "false", "0") or not waits_ms:
            self.unchanged(exchange, tag)
        else:
            self._live.admit("long-poll", stream)
            wait = DetailsWait(self, exchange, identity, stream, kind, tag)
            self._waits.add(wait)
            wait.begin(self._context.loop.call_later(waits_ms / 1000, wait.end))

    # -- what a wait needs -------------------------------------------------------------------------------

    def tag(self, stream: Stream, kind: DetailsKind) -> str:
        return descriptor.details_etag(kind, stream, read_documents(stream), self._manifest(stream))

    def show(self, exchange: Exchange, stream: Stream, kind: DetailsKind) -> None:
        documents, manifest = read_documents(stream), self._manifest(stream)
        tag = descriptor.details_etag(kind, stream, documents, manifest)
        head = responses.JSON_TYPE + responses.NO_STORE + _etag_header(tag)
        exchange.respond(200, head, orjson.dumps(self._body(stream, kind, documents, manifest)))

    def unchanged(self, exchange: Exchange, tag: str, more: bytes = b"") -> None:
        exchange.respond(304, responses.NO_STORE + _etag_header(tag) + more)

    def waited(self, exchange: Exchange, tag: str) -> None:
        """Nothing changed while the client waited."""
        limit = wait_limit_lines(parse_query(exchange.query), self._context.limits.details_max_wait_ms)
        self.unchanged(exchange, tag, limit)

    def ended(self, wait: DetailsWait, stream: Stream) -> None:
        self._waits.discard(wait)
        self._live.dismiss("long-poll", stream)

    def end_waits(self) -> None:
        """Shutdown: whoever waits is answered as if the time were up."""
        for wait in tuple(self._waits):
            wait.end()

    def recheck(self, stands: Callable[[Identity], bool]) -> int:
        """Answers those who wait and have lost their right, and counts them."""
        lost = [wait for wait in self._waits if not stands(wait.identity)]
        for wait in lost:
            wait.refuse(invalid_token_error("the token was revoked"))
        return len(lost)

    # -- inside ----------------------------------------------------------------------------------------

    def _body(
        self, stream: Stream, kind: DetailsKind, documents: StreamDocuments, manifest: ManifestStatus
    ) -> dict[str, object]:
        if kind == "index_status":
            return index_status(stream, documents, manifest, self.tail_of(stream))
        around = VolatileDetails(
            hot_store_bytes(self._log.directory),
            self.cached_of(stream),
            spooled_bytes(self._log.directory, stream.number),
            self.requests_of(stream),
            self.tail_of(stream),
        )
        return descriptor.stream_details(stream, documents, manifest, around)

    def _manifest(self, stream: Stream) -> ManifestStatus:
        """One that was recorded while the stream was not in memory is in the hot store."""
        cold = stream.cold
        generation = max(cold.generation, self._log.store.db.cold.generation(stream.number))
        head = self.head_of(stream)
        indexed = self.indexed_of(stream) or IndexSnapshot()
        conflict = self.is_in_conflict(stream)
        if head is not None:
            return ManifestStatus(generation, head.at_ns, head.etag, head.size_bytes, indexed, conflict)
        recorded_ns = cold.recorded_ns if cold.generation == generation else 0
        return ManifestStatus(generation, recorded_ns, indexed=indexed, conflict=conflict)


class DetailsWait:
    """Somebody who waits for a change: a place in the stream's list and one timer."""

    __slots__ = ("_exchange", "_kind", "_routes", "_stream", "_tag", "_timer", "identity")

    def __init__(
        self,
        routes: DetailsRoutes,
        exchange: Exchange,
        identity: Identity,
        stream: Stream,
        kind: DetailsKind,
        tag: str,
    ) -> None:
        self._routes = routes
        self._exchange = exchange
        self.identity = identity
        self._stream = stream
        self._kind: DetailsKind = kind
        self._tag = tag
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, timer: asyncio.TimerHandle) -> None:
        self._timer = timer
        self._exchange.on_gone = self._leave
        readers = self._stream.readers
        self._stream.readers = [self] if readers is None else [*readers, self]

    def on_published(self, stream: Stream) -> None:
        if stream.removed or stream.gone:
            self.refuse(responses.stream_deleted(stream))
        elif self._routes.tag(stream, self._kind) != self._tag:
            self._leave()
            self._routes.show(self._exchange, stream, self._kind)

    def end(self) -> None:
        self._leave()
        self._routes.waited(self._exchange, self._tag)

    def refuse(self, error: TailraceError) -> None:
        self._leave()
        responses.respond_error(self._exchange, error)

    def _leave(self) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        readers = self._stream.readers or ()
        self._stream.readers = [other for other in readers if other is not self] or None
        self._routes.ended(self, self._stream)


async def _nothing_to_load(_: Stream) -> None:
    """Where nobody keeps book of indexes."""


def _etag_header(tag: str) -> bytes:
    return b"ETag: %b\r\n" % tag.encode()


def spooled_bytes(directory: Path, number: int) -> int:
    """Segments of a stream on their way to the object store. There are never more than a few in all."""
    total = 0
    for path in (directory / "spool").glob(f"{number}-*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            pass  # it arrived
    return total


def hot_store_bytes(directory: Path) -> int:
    """Size of the hot store, which all streams share."""
    total = 0
    for suffix in ("", "-wal", "-shm"):
        try:
            total += (directory / f"hot.db{suffix}").stat().st_size
        except FileNotFoundError:
            pass
    return total
