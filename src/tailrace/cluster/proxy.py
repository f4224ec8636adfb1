"""The application of a worker: handles requests for streams it owns, and forwards all others.

Requests come from clients on the listener, or from other workers on the unix socket. A request takes at most
two hops: to the worker that owns the name, and from there to the worker of a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from tailrace.auth import Action, Identity, authorise
from tailrace.cluster.peers import FIRST_WORKER, STREAM_PREFIX, Peers, stream_in_path
from tailrace.cluster.scatter_gather import METRICS_PATH, READY_PATH, ScatterGather
from tailrace.cluster.scatter_gather import STREAMS_PATH as LISTING
from tailrace.common.errors import TailraceError
from tailrace.http.exchange import MODE_UPGRADE, App, Exchange
from tailrace.http.handover import HandoverSender
from tailrace.http.relay import ALONE_HEADER, restore_relayed_request
from tailrace.hub.routes import MESSAGES_PATH as HUB_MESSAGES
from tailrace.protocol.query_params import parse_query
from tailrace.protocol.stream_names import check_creatable_name, is_sub_resource_name
from tailrace.routing import request_headers
from tailrace.routing.context import Context
from tailrace.routing.deferred_responses import DeferredResponses
from tailrace.routing.table import CONTROL_PREFIX, is_stream_path
from tailrace.schema.profiles.touch_waits import TIMEOUT_MS_MAX
from tailrace.server.app import TailraceApp
from tailrace.server.listing_routes import listing_action
from tailrace.server.otlp_routes import TRACES_PATH
from tailrace.server.pipeline_routes import PIPELINE_PREFIX
from tailrace.server.server_details import SEAL_PATH

if TYPE_CHECKING:
    from tailrace.cluster.fork_locations import ForkLocations

PATHS_CACHED: Final = 65_536
PATH_BYTES_CACHED: Final = 256
HOPS_MAX: Final = 2
MOVE_MASK: Final = 31
FORKED_FROM: Final = b"stream-forked-from"
TOUCH_SEGMENT: Final = b"/touch/"
TOUCH_S_MAX: Final = TIMEOUT_MS_MAX / 1000

AwaitSubscriptions = Callable[[], Coroutine[None, None, None]]


class ProxyApp:
    """The application of a worker's listener."""

    def __init__(
        self,
        cluster: Peers,
        context: Context,
        routes: TailraceApp,
        app: App,
        fork_locations: ForkLocations,
        gather: ScatterGather,
        handover: HandoverSender,
        await_subscriptions: AwaitSubscriptions | None,
        pipeline: Callable[[Exchange, Identity], None] | None,
    ) -> None:
        """The last two are those of the first worker. Subscriptions cover the streams of all workers: their
        requests wait for the updates.
        """
        self._routes = routes
        self._log = context.log
        self._loop = context.loop
        self._app = app  # the routes, perhaps wrapped by a `RequestObserver`
        self._index, self._placement, self._peers, self._handover_sockets = cluster
        self._fork_locations = fork_locations
        self._gather = gather
        self._handover = handover
        self._forwarded = 0
        spans = context.settings.otlp_traces_stream
        self._traces = self._placement.owner(spans) if spans else self._index
        self._owners: dict[bytes, int] = {}  # by path, of streams
        self._later = DeferredResponses()
        self._await_subscriptions = await_subscriptions
        self._pipeline = pipeline
        self.on_forget: list[Callable[[], None]] = []  # clears the handlers that listeners have cached
        self.fixed_headers = app.fixed_headers
        self.refuse = app.refuse
        self.common_headers = app.common_headers
        fork_locations.notify_moves(self.forget)

    # -- called by the HTTP server -----------------------------------------------------------------------

    def handle(self, exchange: Exchange) -> None:
        owner = self._owners.get(exchange.path)
        if owner is None:
            self.route(exchange, 0)
        elif owner != self._index:
            self._forward(owner, exchange)
        elif exchange.method == b"PUT":
            self.route(exchange, 0)
        else:
            self._app.handle(exchange)

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        owner = self._owners.get(exchange.path)
        if owner is None:
            return self.handle
        return self._app.handler_for(exchange) if owner == self._index else partial(self._forward, owner)

    def handler_for_relayed(self, exchange: Exchange) -> Callable[[Exchange], None] | None:
        """The fast path for a request forwarded by another worker, if this one owns the name."""
        if not exchange.path.startswith(STREAM_PREFIX) or exchange.path.startswith(CONTROL_PREFIX):
            return None
        name = stream_in_path(exchange.path)
        if name is None or self._placement.owner(name) != self._index:
            return None
        return self._app.handler_for(exchange) if self._fork_locations.location(name) == self._index else None

    def _forward(self, owner: int, exchange: Exchange) -> None:
        """Relay a request to the owner, or hand the connection over to it.

        Live connections are handed over at once, others for one in a few requests: a client that uses one
        stream is soon connected to its owner, and one that uses many streams pays little for it.
        """
        self._forwarded += 1
        lasting = exchange.mode & MODE_UPGRADE or b"live=s" in exchange.query
        if lasting or not self._forwarded & MOVE_MASK:
            # After everything received has been read: pipelined requests would not be handed over.
            self._loop.call_soon(self._move, owner, exchange)
        else:
            self._send(owner, exchange, 1)

    def _move(self, owner: int, exchange: Exchange) -> None:
        if not exchange.answered and not self._handover.hand_over(exchange, self._handover_sockets[owner]):
            self._send(owner, exchange, 1)

    # -- routing -----------------------------------------------------------------------------------------

    def route(self, exchange: Exchange, hops: int) -> None:
        """Handle or forward a request that has been forwarded `hops` times."""
        path = exchange.path
        if exchange.method == b"OPTIONS":
            self._app.handle(exchange)
        elif is_stream_path(path):
            self._stream(exchange, hops)
        elif path.startswith(CONTROL_PREFIX):
            self._forward_to(FIRST_WORKER, exchange, hops)
        elif path == TRACES_PATH:
            self._forward_to(self._traces, exchange, hops)
        elif path == SEAL_PATH and (name := parse_query(exchange.query).get("stream")):
            self._later.respond(exchange, self._forward_to_owner(exchange, name, hops))
        elif path.startswith(PIPELINE_PREFIX):
            if self._pipeline is None:
                self._forward_to(FIRST_WORKER, exchange, hops)
            else:
                self._pipeline(exchange, self._routes.identify(exchange))
        elif self._gather.handles(exchange):
            self._check_gathered(exchange)
            self._later.respond(exchange, self._gather.respond(exchange))
        elif self._is_for_first(exchange):
            self._forward_to(FIRST_WORKER, exchange, hops)
        else:
            self._app.handle(exchange)

    def _check_gathered(self, exchange: Exchange) -> None:
        """Each worker authorises the request as well, but the client gets a complete error only from here."""
        if exchange.path == READY_PATH:
            return
        identity, query = self._routes.identify(exchange), parse_query(exchange.query)
        if exchange.path == LISTING:
            authorise(identity, listing_action(query))
        else:
            authorise(identity, Action.SEAL if exchange.path == SEAL_PATH else Action.INSPECT_SERVER)

    def _is_for_first(self, exchange: Exchange) -> bool:
        found = self._routes.table.find(exchange.path)
        if found is not None:
            return found[0].place == "first"
        return self._routes.hub.routes.accepts_at_root(exchange)

    def _stream(self, exchange: Exchange, hops: int) -> None:
        creates = exchange.method == b"PUT"
        name = stream_in_path(exchange.path, whole=creates)
        if name is None or (creates and is_sub_resource_name(name)):
            # Not a valid name, on any worker; the status depends on the method.
            self._app.handle(exchange)
            return
        owner = self._placement.owner(name)
        if owner == self._index:
            if creates:
                if FORKED_FROM in exchange.headers:
                    self._later.respond(exchange, self._fork(exchange, name, hops))
                    return
                if self._fork_locations.is_being_placed(name):
                    self._later.respond(exchange, self._after_placing(exchange, name, hops))
                    return
            if (elsewhere := self._fork_locations.location(name)) != owner:
                self._relay(elsewhere, exchange, hops)
                return
        elif hops or self._log.find(name) is not None:
            owner = self._index  # a fork: the owner of the name forwarded the request, or would do so
        if len(exchange.path) <= PATH_BYTES_CACHED and not hops:
            if len(self._owners) >= PATHS_CACHED:
                self._owners.clear()
            self._owners[exchange.path] = owner
        self._forward_to(owner, exchange, hops)

    async def _fork(self, exchange: Exchange, name: str, hops: int) -> None:
        """Create a fork on the worker of its source. Authorise first, as its location is stored durably."""
        request_headers.check_single_headers(exchange)
        check_creatable_name(name, self._log.limits.name_bytes)
        source = request_headers.parse_fork(exchange).source
        assert source is not None
        identity = self._routes.identify(exchange)
        authorise(identity, Action.WRITE_STREAM, stream=name, source=source)
        owner = await self._fork_locations.place_fork(name, source)
        self._routes.rates.refund(identity, exchange)
        if owner == self._index:
            self._app.handle(exchange)
        else:
            self._relay(owner, exchange, hops)

    async def _after_placing(self, exchange: Exchange, name: str, hops: int) -> None:
        await self._fork_locations.await_placement(name)
        self._stream(exchange, hops)

    async def _forward_to_owner(self, exchange: Exchange, name: str, hops: int) -> None:
        self._forward_to(self._index if hops else await self._fork_locations.find(name), exchange, hops)

    def _forward_to(self, owner: int, exchange: Exchange, hops: int) -> None:
        if owner != self._index:
            if hops:
                self._relay(owner, exchange, hops)
            else:
                self._forward(owner, exchange)
        elif self._await_subscriptions is not None and exchange.path.startswith(CONTROL_PREFIX):
            self._later.respond(exchange, self._handle_synchronised(exchange))
        else:
            self._app.handle(exchange)

    def _relay(self, owner: int, exchange: Exchange, hops: int) -> None:
        if hops >= HOPS_MAX:
            raise TailraceError("internal", "proxy loop detected: the workers disagree on the owner")
        self._send(owner, exchange, hops + 1)

    def _send(self, owner: int, exchange: Exchange, hops: int) -> None:
        self._peers[owner].relay(exchange, hops, owner_wait_s(exchange.path))

    async def _handle_synchronised(self, exchange: Exchange) -> None:
        assert self._await_subscriptions is not None
        await self._await_subscriptions()
        if not exchange.answered:
            self._app.handle(exchange)

    def forget(self) -> None:
        """The location of a stream has changed: clear the caches."""
        self._owners.clear()
        for forget in self.on_forget:
            forget()


def owner_wait_s(path: bytes) -> float:
    """How long the owner may wait: beyond the request timeout for touch waits and replies to messages."""
    if path == HUB_MESSAGES:
        return inf
    return TOUCH_S_MAX if TOUCH_SEGMENT in path else 0.0


class PeerApp:
    """The application of a worker's unix socket: forwarded requests, and those of the workers themselves."""

    def __init__(
        self, proxy: ProxyApp, app: App, handlers: Mapping[bytes, Callable[[Exchange], None]]
    ) -> None:
        """`handlers` respond to requests of the workers themselves, by path."""
        self._proxy = proxy
        self._app = app
        self._handlers = handlers
        self.fixed_headers = app.fixed_headers
        self.refuse = app.refuse
        self.common_headers = app.common_headers

    def handle(self, exchange: Exchange) -> None:
        handler = self._handlers.get(exchange.path)
        if handler is not None:
            handler(exchange)
            return
        hops = restore_relayed_request(exchange)
        if ALONE_HEADER in exchange.headers:
            self._app.handle(exchange)
        else:
            self._proxy.route(exchange, hops)

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        """The fast path for streams that this worker owns."""
        handle = self._proxy.handler_for_relayed(exchange)
        return self.handle if handle is None else partial(_receive_then, handle)


def _receive_then(handle: Callable[[Exchange], None], exchange: Exchange) -> None:
    """Set the client of this request: the connection may have relayed another client before."""
    restore_relayed_request(exchange)
    handle(exchange)


class ClusterMetricsApp:
    """The metrics listener: returns the metrics of all workers."""

    def __init__(self, app: App, gather: ScatterGather) -> None:
        self._app = app
        self._gather = gather
        self._later = DeferredResponses()
        self.fixed_headers = app.fixed_headers
        self.refuse = app.refuse
        self.common_headers = app.common_headers

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        return self.handle

    def handle(self, exchange: Exchange) -> None:
        if exchange.path in (METRICS_PATH, READY_PATH) and self._gather.handles(exchange):
            self._later.respond(exchange, self._gather.respond_public(exchange))
        else:
            self._app.handle(exchange)
