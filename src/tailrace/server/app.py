"""The application behind the listener: routing, authentication, and the recheck of open connections when
credentials change.

Requests are dispatched by the routing table, except for those of streams themselves: their paths are cached
when they were seen before, and skip all matching.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from tailrace.auth import ANONYMOUS, GrantStore, Identity, TokenVerifier
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.http.cors import AllowedOrigins, CommonHeaders
from tailrace.http.exchange import Exchange
from tailrace.hub.service import HubService
from tailrace.log.commit_path import LogBackpressureError
from tailrace.log.model import Stream
from tailrace.protocol import http_headers, stream_names
from tailrace.routing import responses
from tailrace.routing.client_address import ClientResolver
from tailrace.routing.context import Context
from tailrace.routing.responses import add_phase, method_not_allowed
from tailrace.routing.table import CONTROL_PREFIX, STREAM_PREFIX, RoutingTable, is_stream_path, split_key
from tailrace.schema.adoption import Adoptions
from tailrace.schema.append_validation import AppendValidator
from tailrace.schema.routes import ProfileRoutes, SchemaRoutes
from tailrace.search.index_files.catalogue import IndexFileService
from tailrace.search.query_language import check_rollup_includes
from tailrace.search.routes import AggregateRoutes, SearchRoutes
from tailrace.server.health import HealthRoutes
from tailrace.server.identity_routes import IdentityRoutes
from tailrace.server.listing_routes import ListingRoutes, RoutingKeyRoutes
from tailrace.server.live import LiveReaders
from tailrace.server.openapi import OpenApiRoutes
from tailrace.server.otlp_routes import OtlpRoutes
from tailrace.server.pipeline_routes import PipelineRoutes
from tailrace.server.rate_limits import IdentityRateLimiter, MakeBuckets
from tailrace.server.read_routes import ReadRoutes
from tailrace.server.routes import ROUTES
from tailrace.server.stream_details import DetailsRoutes, DetailsSources
from tailrace.server.stream_routes import StreamRoutes, queue_request
from tailrace.server.touch_routes import TouchRoutes
from tailrace.storage.object_store.cache import ObjectCache
from tailrace.storage.sealing import SealingService
from tailrace.watch.service import WatchService

logger = logging.getLogger("tailrace.api")

BODY_METHODS = frozenset((b"POST", b"PUT", b"PATCH", b"DELETE"))
NAMES_CACHED = 65_536
PATH_BYTES_CACHED = 256


class AppParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a server that exist before its application."""

    grants: GrantStore
    verifier: TokenVerifier | None
    credentials: CredentialWatch | None  # None without authentication, as the verifier
    sealing: SealingService
    index_files: IndexFileService
    object_caches: Sequence[ObjectCache]  # of segments and index files
    pipeline: PipelineRoutes
    watch: WatchService
    hub: HubService
    make_buckets: MakeBuckets  # of the rate limits


class TailraceApp:
    """Routes requests to the routes of each room, after authentication."""

    def __init__(self, context: Context, parts: AppParts) -> None:
        self._context = context
        self._verifier = parts.verifier
        self._grants = parts.grants
        self._watch = parts.watch
        self.hub = parts.hub
        settings = context.settings
        clients = ClientResolver.from_settings(settings, context.clock)
        self.rates = IdentityRateLimiter(context.limits, context.clock, clients, parts.make_buckets)
        self.identities = IdentityRoutes(
            context, parts.verifier, None if parts.credentials is None else parts.credentials.poll
        )
        self.live = LiveReaders(context)
        self.reads = ReadRoutes(context, self.live, parts.index_files.catalogue)
        self.guard = AppendValidator(self.live.contracts, context.clock, context.limits)
        streams = self._streams = StreamRoutes(context, self.guard)
        self.adoptions = Adoptions(context, self.guard.candidates)
        self.schema = SchemaRoutes(
            context, check_rollup_includes, self.live.discard_encoded_step, self.adoptions
        )
        self.touch = TouchRoutes(context)
        self.profile = ProfileRoutes(context, self._profile_changed, self.adoptions)
        self.otlp = OtlpRoutes(context, self.guard)
        self.health = HealthRoutes(
            context, lambda: parts.sealing.state, parts.hub.routes.health if settings.hub_root else None
        )
        self.routing_keys = RoutingKeyRoutes(context, parts.index_files.keys)
        self.search = SearchRoutes(context, parts.index_files.catalogue, parts.sealing.seal_now)
        sources = DetailsSources(parts.sealing, parts.object_caches, self.search.tail, parts.pipeline)
        # `Server` binds the routes of its other parts.
        self.table = RoutingTable(ROUTES)
        self.table.bind(
            *(streams, self.reads, ListingRoutes(context), self.routing_keys, self.touch),
            *(DetailsRoutes(context, self.live, sources), parts.pipeline, parts.hub.routes),
            *parts.watch.routes,
            *(self.schema, self.profile, self.otlp, self.search, AggregateRoutes(context, self.search)),
            *(self.health, self.identities, OpenApiRoutes(ROUTES)),
        )
        self._telemetry = context.telemetry
        self._names: dict[bytes, str] = {}  # by path
        self._append = streams.append
        self._stream_handlers = self.table.stream.handlers
        self._timing = settings.server_timing
        total = "total" if self._timing else None
        self.common_headers = CommonHeaders(settings.resource_policy, AllowedOrigins(settings), total)
        self.fixed_headers = self.common_headers.fixed

    # -- called by the HTTP server -----------------------------------------------------------------------

    def handle(self, exchange: Exchange) -> None:
        method, path = exchange.method, exchange.path
        name = self._names.get(path)
        if name is not None and method != b"OPTIONS":
            # A stream seen before: the path of nearly every request.
            identity = ANONYMOUS if self._verifier is None else self.identify(exchange)
            if method == b"POST":
                self._append(exchange, identity, name)
            else:
                self._stream_method(exchange, identity, method, name)
            return
        if method == b"OPTIONS":
            exchange.respond(204, http_headers.preflight_lines())
            return
        if is_stream_path(path):
            self._stream(exchange, self.identify(exchange), method, path[len(STREAM_PREFIX) :])
            return
        self._check_body(exchange)
        if self.hub.routes.accepts_at_root(exchange):
            self.hub.routes.websocket(exchange, self.identify)
            return
        try:
            self.table.serve(exchange, self.identify)
        except LogBackpressureError as shortage:
            handle = partial(self.table.serve, identify=self._identify_again)
            queue_request(self._context.log, exchange, handle, shortage)

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        name = self._names.get(exchange.path)
        if exchange.method != b"POST" or name is None or self._verifier is not None or self._timing:
            return self.handle
        return self._streams.handler_for(exchange, name) or self.handle

    def has_token(self, exchange: Exchange) -> bool:
        """Whether the client of a request has a valid token, checked before its body is received.

        Raises 401 if the request requires one.
        """
        if self._verifier is None:
            return True
        try:
            return not self._verifier.verify(exchange.headers.get(b"authorization")).public
        except TailraceError:
            if exchange.method in BODY_METHODS and not exchange.path.startswith(CONTROL_PREFIX):
                raise
            return False  # wake responses carry a token of their own

    def refuse(self, exchange: Exchange | None, error: TailraceError) -> tuple[int, bytes, bytes]:
        self._telemetry.refused.add(error.code)
        return responses.render_error(exchange, error)

    def _profile_changed(self, stream: Stream) -> None:
        self.live.discard_encoded_step()
        self.touch.reset(stream)

    def end_live(self) -> None:
        """Shutdown: end all live connections and waits."""
        self.live.end_all()
        self.touch.end_all()
        self._watch.close_live()
        self.hub.end_live()
        self.adoptions.end_all()
        self.otlp.close()

    def recheck(self, is_valid: Callable[[Identity], bool]) -> int:
        """Close connections whose credentials are no longer valid, and return how many."""
        closed = self.live.recheck(is_valid) + self.touch.recheck(is_valid)
        return closed + self._watch.recheck(is_valid) + self.hub.runner.recheck(is_valid)

    def recheck_hub(self) -> None:
        """The hub's rules changed: close connections that may no longer read their hub stream."""
        self.live.recheck_hub()

    # -- routing ---------------------------------------------------------------------------------------

    def identify(self, exchange: Exchange) -> Identity:
        if self._verifier is None:
            return self._internal_identity(exchange)
        begun = time.monotonic() if self._timing else 0.0
        identity = self._identify_again(exchange)
        if self.rates.any:
            self.rates.consume(identity, exchange)
        if self._timing:
            add_phase(exchange, "auth", time.monotonic() - begun)
        return identity

    def _identify_again(self, exchange: Exchange) -> Identity:
        """`identify` for a request that waited for room: it counts once for the rate of its client."""
        if self._verifier is None:
            return self._internal_identity(exchange)
        return self._verifier.verify(exchange.headers.get(b"authorization"))

    def _internal_identity(self, exchange: Exchange) -> Identity:
        """Without authentication: clients are anonymous, jobs of the server have tokens with more rights."""
        credentials = exchange.headers.get(b"authorization")
        if credentials is None:
            return ANONYMOUS
        return self._grants.find(credentials.partition(b" ")[2]) or ANONYMOUS

    def _check_body(self, exchange: Exchange) -> None:
        """Limit bodies that are decoded as a whole, as that takes many times their size."""
        limit = self._context.limits.request_body_bytes
        if len(exchange.body) > limit:
            message = f"the body has {len(exchange.body)} bytes, the limit is {limit}"
            raise TailraceError("payload_too_large", message, limit_bytes=limit)

    def _stream(self, exchange: Exchange, identity: Identity, method: bytes, raw: bytes) -> None:
        decoded = stream_names.decode_name(raw)
        if method == b"PUT":
            self._streams.create(exchange, identity, decoded)
            return
        keyed = split_key(raw)
        if keyed is not None:
            self._read_key(exchange, identity, *keyed)
            return
        if decoded is None or not stream_names.is_valid_name(decoded, self._context.limits.name_bytes):
            raise TailraceError("not_found", "invalid stream name")
        if stream_names.is_sub_resource_name(decoded):
            try:
                self._sub_resource(exchange, identity, decoded)
            except LogBackpressureError as shortage:
                handle = partial(self._sub_resource, identity=identity, path=decoded)
                queue_request(self._context.log, exchange, handle, shortage)
            return
        if len(exchange.path) <= PATH_BYTES_CACHED and not stream_names.is_system_name(decoded):
            if len(self._names) >= NAMES_CACHED:
                self._names.clear()
            self._names[exchange.path] = decoded
        self._stream_method(exchange, identity, method, decoded)

    def _sub_resource(self, exchange: Exchange, identity: Identity, path: str) -> None:
        self._check_body(exchange)
        found = self.table.find_sub_resource(path)
        if found is None:
            raise TailraceError("not_found", "resource not found")
        resource, name = found
        self.table.serve_resource(exchange, resource, (name,), self._identify_again, identity)

    def _stream_method(self, exchange: Exchange, identity: Identity, method: bytes, name: str) -> None:
        handler = self._stream_handlers.get(method)
        if handler is None:
            raise method_not_allowed(self.table.stream.allow)
        handler(exchange, identity, name)

    def _read_key(self, exchange: Exchange, identity: Identity, raw_name: bytes, raw_key: bytes) -> None:
        handler = self.table.key.handler(exchange.method)
        name, key = stream_names.decode_name(raw_name), stream_names.decode_name(raw_key)
        if name is None or not key or not stream_names.is_valid_name(name, self._context.limits.name_bytes):
            raise TailraceError("not_found", "invalid stream name or empty key")
        handler(exchange, identity, name, key)


auth_logger = logging.getLogger("tailrace.auth")

CREDENTIAL_POLL_S: Final = 1.0
# Closes connections whose identity is no longer valid, and returns how many.
Recheck = Callable[[Callable[[Identity], bool]], int]


class CredentialWatch:
    """Polls every second for changed keys and revocations, made here or by another process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, verifier: TokenVerifier) -> None:
        self._loop = loop
        self._verifier = verifier
        self._recheck: Recheck | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.closed = 0  # connections closed so far

    def start(self, recheck: Recheck) -> None:
        """`recheck` closes connections. It is given here because the routes that change keys call `poll`: the
        application has both, and exists after this.
        """
        self._recheck = recheck
        self._verifier.start()
        self._timer = self._loop.call_later(CREDENTIAL_POLL_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._verifier.close()

    def register_metrics(self, metrics: ServerMetrics) -> None:
        book = self._verifier.book
        metrics.api_keys.read = lambda: len(book.keys)
        metrics.revocations.read = lambda: len(book.revocations)
        metrics.connections_revoked.read = lambda: self.closed

    def _tick(self) -> None:
        self._timer = self._loop.call_later(CREDENTIAL_POLL_S, self._tick)
        self.poll()

    def poll(self) -> None:
        if not self._verifier.poll_changes() or self._recheck is None:
            return
        closed = self._recheck(self._verifier.is_valid)
        self.closed += closed
        if closed:
            auth_logger.info("closed connections with revoked tokens", extra=log_fields(connections=closed))

    def reload(self) -> None:
        """SIGHUP: reload all credentials now."""
        self._verifier.reload()
        self.poll()
