"""One worker: a server for the streams it owns, which proxies requests for all other streams to their owners.

The supervisor sends a worker its `WorkerSetup` as a line of JSON on standard input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from tailrace.cluster import fork_locations, pipeline, remote_sources, system_streams
from tailrace.cluster import subscriptions as feed
from tailrace.cluster.peers import FIRST_WORKER, Peers, Placement, system_stream_suffix
from tailrace.cluster.proxy import ClusterMetricsApp, PeerApp, ProxyApp
from tailrace.cluster.scatter_gather import PEER_METRICS_PATH, ScatterGather
from tailrace.cluster.subscriptions import ClusterSubscriptions
from tailrace.common.limits import Limits
from tailrace.common.settings import Settings
from tailrace.http.exchange import App, Exchange
from tailrace.http.handover import HandoverReceiver, HandoverSender
from tailrace.http.relay import PeerClient
from tailrace.http.server import HttpServer
from tailrace.log.log import Log
from tailrace.log.system_streams import METRICS_STREAM
from tailrace.protocol.query_params import parse_query
from tailrace.routing import responses
from tailrace.server.pipeline_process import PipelineBacklog
from tailrace.server.process import ClusterParts, Server, open_storage
from tailrace.server.rate_limits import SharedTokenBuckets
from tailrace.storage.bootstrap import BootstrapReport
from tailrace.storage.data_directory import DataDirectory


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings  # with the worker's own data directory and the shared object store
    index: int
    count: int
    sockets: str  # the directory of the workers' sockets
    restored: BootstrapReport | None = None  # of a bootstrap before the workers started

    def socket(self, index: int) -> str:
        return f"{self.sockets}/{index}"

    def handover_socket(self, index: int) -> str:
        """The socket where a worker receives connections that another one accepted."""
        return f"{self.sockets}/{index}.door"

    @property
    def rates(self) -> str:
        """The file of the shared rate limit counters."""
        return f"{self.sockets}/rates"

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str) + b"\n"

    @classmethod
    def decode(cls, raw: bytes) -> WorkerSetup:
        return msgspec.json.decode(raw, type=cls, dec_hook=_path)


def _path(kind: type, value: Any) -> object:
    assert kind is Path
    return Path(value)


# Connections between workers never time out.
NEVER_MS: Final = 2**40
# Headers about the client in a relayed request, beside its own, which may be repeated.
HEAD_BYTES_EXTRA: Final = 4096
PAGE_BYTES_MAX: Final = 16 * 1024 * 1024


class WorkerServer(Server):
    """A server process of a cluster. The first worker has subscriptions, documents and the hub."""

    shares_port = True

    def __init__(self, setup: WorkerSetup, directory: DataDirectory, loop: asyncio.AbstractEventLoop) -> None:
        self._setup = setup
        self.index = setup.index
        workers = range(setup.count)
        limits = setup.settings.limits
        bounds = limits.request_ms, limits.append_queue_max_bytes
        self.peers = {index: PeerClient(setup.socket(index), loop, *bounds) for index in workers}
        handover_sockets = {index: setup.handover_socket(index) for index in workers}
        cluster = Peers(setup.index, Placement(setup.count), self.peers, handover_sockets)
        storage = open_storage(setup.settings, directory, loop, system_stream_suffix(setup.index))
        self._fork_locations = fork_locations.ForkLocations(storage.log, cluster)
        is_first = setup.index == FIRST_WORKER
        super().__init__(
            setup.settings, directory, loop, storage, self._cluster_parts(storage.log, cluster, is_first)
        )
        self._gather = ScatterGather(self.peers, limits, directory.deployment)
        self._handover = HandoverSender()
        self._local_pipeline = pipeline.LocalPipeline(self.pipeline, self.app.table)
        self._cluster_pipeline: pipeline.ClusterPipeline | None = None
        if is_first:
            self._cluster_pipeline = pipeline.ClusterPipeline(
                self.pipeline, self.app.table, cluster, self._fork_locations
            )
        subscriptions = self._subscriptions
        self._proxy = ProxyApp(
            cluster,
            self.context,
            self.app,
            super().listener_app(),
            self._fork_locations,
            self._gather,
            self._handover,
            subscriptions.synchronise if isinstance(subscriptions, ClusterSubscriptions) else None,
            None if self._cluster_pipeline is None else self._cluster_pipeline.serve,
        )
        self._feed = feed.TailFeed(self.log, loop, self.app.guard.check)
        self._incoming = system_streams.EventReceiver(self.log, self._prepare)
        self._outgoing = system_streams.EventSender(self.log, self.index, self.peers[FIRST_WORKER])
        self._inner: HttpServer | None = None
        self._adoption: HandoverReceiver | None = None
        peers = tuple(self.peers.values())
        self.telemetry.relayed_requests.read = lambda: sum(peer.relayed for peer in peers)
        self.telemetry.moved_connections.read = lambda: self._handover.handed_over

    def _cluster_parts(self, log: Log, cluster: Peers, is_first: bool) -> ClusterParts:
        parts = ClusterParts(
            sweep_share="first" if is_first else "rest",
            is_elsewhere=self._fork_locations.is_elsewhere,
            make_buckets=partial(SharedTokenBuckets, Path(self._setup.rates)),
        )
        if not is_first:
            return parts
        others = [peer for index, peer in self.peers.items() if index != FIRST_WORKER]
        return msgspec.structs.replace(
            parts,
            open_remote=remote_sources.RemoteOrigins(log, cluster, self._fork_locations).find,
            make_subscriptions=partial(ClusterSubscriptions, peers=others),
        )

    # -- overrides -----------------------------------------------------------------------------------------

    def listener_app(self) -> App:
        return self._proxy

    def metrics_app(self) -> App:
        return ClusterMetricsApp(super().metrics_app(), self._gather)

    def pipeline_demand(self) -> PipelineBacklog:
        if self._cluster_pipeline is None:
            return super().pipeline_demand()
        return self._cluster_pipeline.total_backlog()

    async def start_services(self) -> None:
        """Open the peer socket first: starting workers send requests to each other."""
        await self._open_socket()
        if self._cluster_pipeline is not None:
            await super().start_services()
            self._cluster_pipeline.start()
        else:
            self._outgoing.start()

    async def stop_services(self) -> None:
        if self._cluster_pipeline is not None:
            await self._cluster_pipeline.stop()
            await super().stop_services()

    async def before_log_closes(self) -> None:
        """Deliver all events to the first worker, which stops last."""
        if self.index != FIRST_WORKER:
            await self._outgoing.stop()

    async def _open_socket(self) -> None:
        handlers: dict[bytes, Callable[[Exchange], None]] = {
            fork_locations.LOCATION_PATH.encode(): self._respond_location,
            PEER_METRICS_PATH: self.app.health.metrics,
            system_streams.DELIVER_PATH.encode(): self._incoming.receive,
            feed.FOLLOW_PATH.encode(): self._feed.follow,
            feed.INTEREST_PATH.encode(): self._feed.interest,
            feed.WAKE_PATH.encode(): self._feed.wake,
            remote_sources.SOURCE_PATH.encode(): remote_sources.SourceServer(self.log).respond,
            pipeline.BACKLOG_PATH.encode(): self._local_pipeline.respond_backlog,
            **dict.fromkeys(pipeline.PART_PATHS, self._local_pipeline.respond),
        }
        inner = PeerApp(self._proxy, self.app, handlers)
        self._inner = HttpServer(inner, peer_limits(self._setup.settings.limits))
        self._proxy.on_forget.append(self._inner.cached_heads.clear)
        self.app.rates.peer_listener = self._inner
        await self._inner.start_unix(self._setup.socket(self.index))

    async def start(self) -> None:
        await super().start()
        assert self._http is not None
        self._adoption = HandoverReceiver(
            self._http, self._setup.handover_socket(self.index), asyncio.get_running_loop()
        )
        self._proxy.on_forget.append(self._http.cached_heads.clear)

    async def drain_clients(self) -> None:
        """First phase of the shutdown: finish client requests while all workers are still running."""
        self.app.health.stopping = True
        if self._adoption is not None:
            self._adoption.close()
            self._adoption = None
        if self._http is not None:
            await self._http.drain()
        if self._metrics is not None:
            await self._metrics.drain()

    async def cut_clients(self) -> None:
        """Close client connections without draining them."""
        if self._http is not None:
            await self._http.close()

    async def stop(self) -> None:
        """Second phase of the shutdown: no worker sends requests any more."""
        await self.drain_clients()
        self._feed.end()
        if self._inner is not None:
            await self._inner.drain()
        await super().stop()
        for peer in self.peers.values():
            peer.close()
        self._handover.close()

    def _prepare(self, name: str) -> None:
        if name == METRICS_STREAM:
            self._stream_metrics.stream()

    def _respond_location(self, exchange: Exchange) -> None:
        name = parse_query(exchange.query)["name"]
        exchange.respond(200, responses.JSON_TYPE, msgspec.json.encode(self._fork_locations.lookup(name)))


def peer_limits(limits: Limits) -> Limits:
    """The limits of the peer socket; those of clients are enforced by the worker they are connected to.

    A relayed request has a longer head than the original one, and pages sent between workers may be larger
    than the bodies of clients.
    """
    return msgspec.structs.replace(
        limits,
        idle_ms=NEVER_MS,
        connections=2**31,
        header_bytes=2 * limits.header_bytes + HEAD_BYTES_EXTRA,
        append_body_bytes=max(limits.append_body_bytes, PAGE_BYTES_MAX),
    )
