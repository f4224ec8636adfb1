"""The application of a worker: what it owns it answers, everything else it passes on.

Requests come from clients, on the listener, or from other workers, on the unix socket. Of both it is asked
who owns what they are about. A request takes two steps at most: to the worker its name belongs to, and from
there to where a fork lives.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final

from tailrace.auth import Action, Identity, authorise
from tailrace.cluster.peers import FIRST_WORKER, STREAM_PREFIX, DeferredResponses, Peers, stream_in_path
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
from tailrace.schema.profiles.touch_waits import TIMEOUT_MS_MAX
from tailrace.server.app import CONTROL_PREFIX, TailraceApp
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

Settle = Callable[[], Coroutine[None, None, None]]


class ProxyApp:
    """What the listener of a worker serves."""

    def __init__(
        self,
        circle: Peers,
        context: Context,
        routes: TailraceApp,
        app: App,
        homes: ForkLocations,
        gather: ScatterGather,
        handover: HandoverSender,
    ) -> None:
        self._routes = routes
        self._log = context.log
        self._loop = context.loop
        self._app = app  # which may look at requests before the routes do
        self._index, self._placement, self._peers, self._doors = circle
        self._homes = homes
        self._gather = gather
        self._handover = handover
        self._passed_on = 0
        spans = context.settings.otlp_traces_stream
        self._traces = self._placement.home(spans) if spans else self._index
        self._owners: dict[bytes, int] = {}  # by path, of streams
        self._later = DeferredResponses()
        # Subscriptions look at streams of all workers: what those did before the request is heard first.
        self.settle: Settle | None = None
        self.pipeline: Callable[[Exchange, Identity], None] | None = None  # of all, on the first worker
        self.on_forget: list[Callable[[], None]] = []  # what listeners have learnt about heads goes as well
        self.fixed_headers = app.fixed_headers
        self.refuse = app.refuse
        self.common_headers = app.common_headers
        homes.on_moved = self.forget

    # -- what net asks for -------------------------------------------------------------------------------

    def handle(self, exchange: Exchange) -> None:
        owner = self._owners.get(exchange.path)
        if owner is None:
            self.route(exchange, 0)
        elif owner != self._index:
            self._pass_on(owner, exchange)
        elif exchange.method == b"PUT":
            self.route(exchange, 0)
        else:
            self._app.handle(exchange)

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        owner = self._owners.get(exchange.path)
        if owner is None:
            return self.handle
        return self._app.handler_for(exchange) if owner == self._index else partial(self._pass_on, owner)

    def handler_for_relayed(self, exchange: Exchange) -> Callable[[Exchange], None] | None:
        """The short way for what another worker passed on, if it is ours by its name."""
        if not exchange.path.startswith(STREAM_PREFIX) or exchange.path.startswith(CONTROL_PREFIX):
            return None
        name = stream_in_path(exchange.path)
        if name is None or self._placement.home(name) != self._index:
            return None
        return self._app.handler_for(exchange) if self._homes.noted(name) == self._index else None

    def _pass_on(self, owner: int, exchange: Exchange) -> None:
        """A client of ours asks for what another worker owns: the request goes there, or the client does.

        Those that will listen for long go at once. Of the others one in a few does: a client that asks for
        one stream is soon where that stream is, and one that asks for many pays little for it.
        """
        self._passed_on += 1
        lasting = exchange.mode & MODE_UPGRADE or b"live=s" in exchange.query
        if lasting or not self._passed_on & MOVE_MASK:
            # When all that came with it is read: what follows a request would not go along.
            self._loop.call_soon(self._move, owner, exchange)
        else:
            self._send(owner, exchange, 1)

    def _move(self, owner: int, exchange: Exchange) -> None:
        if not exchange.answered and not self._handover.give(exchange, self._doors[owner]):
            self._send(owner, exchange, 1)

    # -- routing -----------------------------------------------------------------------------------------

    def route(self, exchange: Exchange, hops: int) -> None:
        """Answers or passes on a request that has been passed on so often."""
        path = exchange.path
        if exchange.method == b"OPTIONS":
            self._app.handle(exchange)
        elif path.startswith(CONTROL_PREFIX) and path[len(CONTROL_PREFIX) :][:1] in (b"", b"/"):
            self._to(FIRST_WORKER, exchange, hops)
        elif path.startswith(STREAM_PREFIX):
            self._stream(exchange, hops)
        elif path == TRACES_PATH:
            self._to(self._traces, exchange, hops)
        elif path == SEAL_PATH and (name := parse_query(exchange.query).get("stream")):
            self._later.spawn(exchange, self._to_home(exchange, name, hops))
        elif path.startswith(PIPELINE_PREFIX):
            if self.pipeline is None:
                self._to(FIRST_WORKER, exchange, hops)
            else:
                self.pipeline(exchange, self._routes.identify(exchange))
        elif self._gather.handles(exchange):
            self._check_gathered(exchange)
            self._later.spawn(exchange, self._gather.answer(exchange))
        elif self._is_for_first(exchange):
            self._to(FIRST_WORKER, exchange, hops)
        else:
            self._app.handle(exchange)

    def _check_gathered(self, exchange: Exchange) -> None:
        """Each worker asks who it is; a refusal comes from here, with all that belongs to one."""
        if exchange.path == READY_PATH:
            return
        identity, query = self._routes.identify(exchange), parse_query(exchange.query)
        if exchange.path == LISTING:
            authorise(identity, listing_action(query))
        else:
            authorise(identity, Action.SEAL if exchange.path == SEAL_PATH else Action.INSPECT_SERVER)

    def _is_for_first(self, exchange: Exchange) -> bool:
        watch, hub = self._routes.watch, self._routes.hub
        return (watch is not None and watch.handles(exchange.path)) or (
            hub is not None and hub.handles(exchange, exchange.path)
        )

    def _stream(self, exchange: Exchange, hops: int) -> None:
        makes = exchange.method == b"PUT"
        name = stream_in_path(exchange.path, whole=makes)
        if name is None or (makes and is_sub_resource_name(name)):
            # No stream has this name, wherever one asks. Whose the path is else depends on the method.
            self._app.handle(exchange)
            return
        owner = self._placement.home(name)
        if owner == self._index:
            if makes:
                if FORKED_FROM in exchange.headers:
                    self._later.spawn(exchange, self._fork(exchange, name, hops))
                    return
                if self._homes.is_being_placed(name):
                    self._later.spawn(exchange, self._after_placing(exchange, name, hops))
                    return
            if (elsewhere := self._homes.noted(name)) != owner:
                self._relay(elsewhere, exchange, hops)
                return
        elif hops or self._log.find(name) is not None:
            owner = self._index  # the worker that the name belongs to sent it here, or would
        if len(exchange.path) <= PATH_BYTES_CACHED and not hops:
            if len(self._owners) >= PATHS_CACHED:
                self._owners.clear()
            self._owners[exchange.path] = owner
        self._to(owner, exchange, hops)

    async def _fork(self, exchange: Exchange, name: str, hops: int) -> None:
        """The note of where it is made is durable, so nobody writes one who may not make the fork."""
        request_headers.check_single_headers(exchange)
        check_creatable_name(name, self._log.limits.name_bytes)
        source = request_headers.parse_fork(exchange).source
        assert source is not None
        identity = self._routes.identify(exchange)
        authorise(identity, Action.WRITE_STREAM, stream=name, source=source)
        owner = await self._homes.place_fork(name, source)
        self._routes.rates.refund(identity, exchange)
        if owner == self._index:
            self._app.handle(exchange)
        else:
            self._relay(owner, exchange, hops)

    async def _after_placing(self, exchange: Exchange, name: str, hops: int) -> None:
        await self._homes.placed(name)
        self._stream(exchange, hops)

    async def _to_home(self, exchange: Exchange, name: str, hops: int) -> None:
        self._to(self._index if hops else await self._homes.find(name), exchange, hops)

    def _to(self, owner: int, exchange: Exchange, hops: int) -> None:
        if owner != self._index:
            if hops:
                self._relay(owner, exchange, hops)
            else:
                self._pass_on(owner, exchange)
        elif self.settle is not None and exchange.path.startswith(CONTROL_PREFIX):
            self._later.spawn(exchange, self._settled(exchange))
        else:
            self._app.handle(exchange)

    def _relay(self, owner: int, exchange: Exchange, hops: int) -> None:
        if hops >= HOPS_MAX:
            raise TailraceError("internal", "the workers do not agree on who owns this")
        self._send(owner, exchange, hops + 1)

    def _send(self, owner: int, exchange: Exchange, hops: int) -> None:
        self._peers[owner].relay(exchange, hops, owner_wait_s(exchange.path))

    async def _settled(self, exchange: Exchange) -> None:
        assert self.settle is not None
        await self.settle()
        if not exchange.answered:
            self._app.handle(exchange)

    def forget(self) -> None:
        """Somebody lives elsewhere from now on."""
        self._owners.clear()
        for forget in self.on_forget:
            forget()


def owner_wait_s(path: bytes) -> float:
    """How long its owner may wait before it answers: for touches as long as somebody asks for, for the reply
    to a message as long as its sender likes. All others end in a request's time."""
    if path == HUB_MESSAGES:
        return inf
    return TOUCH_S_MAX if TOUCH_SEGMENT in path else 0.0


class PeerApp:
    """What the unix socket of a worker serves: requests that others passed on, and their questions."""

    def __init__(self, front: ProxyApp, app: App) -> None:
        self._front = front
        self._app = app
        self.questions: dict[bytes, Callable[[Exchange], None]] = {}
        self.fixed_headers = app.fixed_headers
        self.refuse = app.refuse
        self.common_headers = app.common_headers

    def handle(self, exchange: Exchange) -> None:
        question = self.questions.get(exchange.path)
        if question is not None:
            question(exchange)
            return
        hops = restore_relayed_request(exchange)
        if ALONE_HEADER in exchange.headers:
            self._app.handle(exchange)
        else:
            self._front.route(exchange, hops)

    def handler_for(self, exchange: Exchange) -> Callable[[Exchange], None]:
        """The short way, for what this worker owns."""
        handle = self._front.handler_for_relayed(exchange)
        return self.handle if handle is None else partial(_receive_then, handle)


def _receive_then(handle: Callable[[Exchange], None], exchange: Exchange) -> None:
    """The connection carried the request of another client before."""
    restore_relayed_request(exchange)
    handle(exchange)


class ClusterMetricsApp:
    """The listener for metrics: those of all workers, whichever was asked."""

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
            self._later.spawn(exchange, self._gather.answer_open(exchange))
        else:
            self._app.handle(exchange)
