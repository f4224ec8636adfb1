"""The server process: `Server` builds the parts, starts them in order, and stops them on SIGTERM or SIGINT.

Metrics are not copied: each one reads the counter of its part when `/metrics` is requested.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shlex
import signal
import ssl
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import uvloop

from tailrace import __version__
from tailrace.auth import GrantStore, Identity, TokenVerifier
from tailrace.common import file_descriptors, private_files, process
from tailrace.common.clock import SYSTEM_CLOCK, Clock
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import configure_logging, log_fields
from tailrace.common.server_metrics import ServerMetrics
from tailrace.common.settings import Settings
from tailrace.common.settings_loading import CONFIG_NAME, unknown_variable_warnings
from tailrace.http.exchange import App
from tailrace.http.request_log import configure_request_log
from tailrace.http.server import HttpServer
from tailrace.http.tls import Certificate
from tailrace.hub.service import HubService, HubStreamAccess
from tailrace.log import listing
from tailrace.log.journal import JournalCorruptError
from tailrace.log.log import Log
from tailrace.routing.client_address import ClientResolver
from tailrace.routing.context import Context
from tailrace.search.index_files.catalogue import IndexFileService
from tailrace.server import startup
from tailrace.server.app import AppParts, CredentialWatch, TailraceApp
from tailrace.server.health import MetricsApp
from tailrace.server.metrics_stream import MetricsWriter, build_series_recorder
from tailrace.server.pipeline_process import PipelineBacklog
from tailrace.server.pipeline_routes import PipelineRoutes
from tailrace.server.rate_limits import MakeBuckets, own_buckets
from tailrace.server.request_tracing import RequestObserver, observes_requests
from tailrace.server.resource_guards import DiskGuard, MemoryGuard, memory_limit_bytes
from tailrace.server.server_details import SealRoute, ServerParts, ServerRoutes
from tailrace.server.startup import DeclaredStreamInstaller
from tailrace.storage.checkpoint_service import CheckpointService
from tailrace.storage.data_directory import DataDirectory
from tailrace.storage.sealing import SealingService
from tailrace.storage.segments.cold_reader import ColdReader
from tailrace.storage.sweep import SweepShare
from tailrace.subscriptions.routes import SubscriptionRoutes
from tailrace.subscriptions.service import AppendCheck, SubscriptionService
from tailrace.subscriptions.webhooks import StartWebhookSpan
from tailrace.watch.service import WatchService
from tailrace.watch.sources.stream import OpenRemoteOrigin

if TYPE_CHECKING:
    from tailrace.server.trace_export import Tracing


logger = logging.getLogger("tailrace")

# The commit thread must not wait 5 ms for the interpreter each time its sync returns.
SWITCH_INTERVAL_S = 0.0005


def run(settings: Settings) -> int:
    """`tailrace serve`: run one server process until it stops, and return its exit code."""
    private_files.restrict_umask()
    configure_logging(settings.log_level, settings.log_format)
    configure_request_log(settings.log_requests, ClientResolver.from_settings(settings).log_fields)
    for warning in unknown_variable_warnings(os.environ):
        logger.warning(warning)
    process.set_time_slice(settings.processor_turn_us)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The log makes few cycles and holds many objects: collect seldom, and never the objects of start-up.
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        return uvloop.run(serve(settings))
    except (TailraceError, JournalCorruptError) as error:
        sys.stderr.write(f"tailrace: {error}\n")
        return 1


async def serve(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    directory = DataDirectory(settings.data_dir)
    try:
        restored = await startup.restore_from_bucket(settings, directory, stop)
        if stop.is_set():
            directory.close()
            return 0
        server = Server(settings, directory, loop)
    except OSError as error:
        directory.close()
        raise TailraceError("unavailable", f"cannot read data directory {directory.path}: {error}") from error
    try:
        if restored is not None:
            startup.record_restore(restored, server.telemetry)
        await server.start()
        loop.add_signal_handler(signal.SIGHUP, server.reload)
        print_startup_banner(server.url, settings)
        await stop.wait()
        logger.info("stopping")
    finally:
        await server.stop()
        directory.close()
    return 0


class Storage(NamedTuple):
    """The log, and what reads its entries from the object store."""

    cold: ColdReader
    log: Log


def open_storage(
    settings: Settings, directory: DataDirectory, loop: asyncio.AbstractEventLoop, own_suffix: str = ""
) -> Storage:
    """`own_suffix` is that of the system streams of a worker."""
    limits = settings.limits
    cache_bytes = limits.segment_cache_max_bytes
    cold = ColdReader(settings.object_store_url, directory.path / "cache", cache_bytes, limits, loop)
    return Storage(cold, Log(directory.path, limits, SYSTEM_CLOCK, loop, own_suffix, cold))


MakeSubscriptions = Callable[
    [
        Log,
        Settings,
        Clock,
        asyncio.AbstractEventLoop,
        ServerMetrics,
        AppendCheck,
        StartWebhookSpan | None,
    ],
    SubscriptionService,
]


class ClusterParts(msgspec.Struct, frozen=True, kw_only=True):
    """What is different in a worker of a server with several processes; the defaults are for one process."""

    sweep_share: SweepShare = "all"
    is_elsewhere: Callable[[str], bool] = lambda _: False  # whether another worker has or creates a stream
    open_remote: OpenRemoteOrigin | None = None  # opens a stream of another worker
    make_subscriptions: MakeSubscriptions = SubscriptionService
    make_buckets: MakeBuckets = own_buckets


ONE_PROCESS: Final = ClusterParts()


class Server:
    """All parts of one server process."""

    shares_port = False  # whether other processes listen on the same port

    def __init__(
        self,
        settings: Settings,
        directory: DataDirectory,
        loop: asyncio.AbstractEventLoop,
        storage: Storage | None = None,
        cluster: ClusterParts = ONE_PROCESS,
    ) -> None:
        """Each part gets the parts that it uses as arguments, so that a part is complete when it is built."""
        self._settings = settings
        self.telemetry = ServerMetrics(__version__)
        self._cold, self.log = storage or open_storage(settings, directory, loop)
        context = Context(settings, self.log, SYSTEM_CLOCK, loop, self.telemetry, directory.deployment)
        self.context = context
        self._tracing = _build_tracing(context)
        tracer = None if self._tracing is None else self._tracing.tracer
        self._grants = GrantStore(SYSTEM_CLOCK)
        hub_access = HubStreamAccess.from_settings(settings)
        self._verifier: TokenVerifier | None = None
        self._credentials: CredentialWatch | None = None
        if settings.auth_configured:
            self._verifier = TokenVerifier(settings, SYSTEM_CLOCK, self._grants, hub_access)
            self._credentials = CredentialWatch(loop, self._verifier)
        self._checkpoints = CheckpointService(self.log)
        self.sealing = SealingService(
            self.log,
            settings,
            directory.deployment,
            loop,
            cluster.sweep_share,
            None if tracer is None else tracer.record_seal,
        )
        self._index_files = IndexFileService(
            self.log, settings.object_store_url, directory.path / "companions", settings.limits, loop
        )
        self._object_caches = (self._cold.parts, self._index_files.parts, self._index_files.lexicons)
        self.pipeline = PipelineRoutes(
            context, self.sealing, self._cold, None if tracer is None else tracer.record_heartbeat
        )
        self.watch = WatchService(
            context, directory.path, self._verifier, self._grants, self.sealing, cluster.open_remote
        )
        self.hub = HubService(context, self._verifier, hub_access, self.sealing)
        self.app = self._build_app(cluster)
        self._subscriptions = cluster.make_subscriptions(
            self.log,
            settings,
            SYSTEM_CLOCK,
            loop,
            self.telemetry,
            self.app.guard.check,
            None if tracer is None else tracer.webhook,
        )
        self._disk = DiskGuard(self.log, loop, self._checkpoints.disk_short)
        self._memory = self._guard_memory(memory_limit_bytes(settings.limits))
        node = self._inspected_parts(context)
        self._bind_routes(ServerRoutes(node))
        self._stream_metrics = MetricsWriter(self.log, SYSTEM_CLOCK, loop, build_series_recorder(node))
        if self._tracing is not None:
            self._tracing.start()
        self._observed = self._observe(settings)
        self._declared: DeclaredStreamInstaller | None = None
        if settings.init:
            self._declared = DeclaredStreamInstaller(context, Path(settings.init), cluster.is_elsewhere)
        self._certificate: Certificate | None = None
        self._http: HttpServer | None = None
        self._metrics: HttpServer | None = None
        self.url = ""

    def _build_app(self, cluster: ClusterParts) -> TailraceApp:
        parts = AppParts(
            grants=self._grants,
            verifier=self._verifier,
            credentials=self._credentials,
            sealing=self.sealing,
            index_files=self._index_files,
            object_caches=self._object_caches,
            pipeline=self.pipeline,
            watch=self.watch,
            hub=self.hub,
            make_buckets=cluster.make_buckets,
        )
        return TailraceApp(self.context, parts)

    def _bind_routes(self, inspection: ServerRoutes) -> None:
        """Bind the routes of the parts that are built after the application."""
        self.app.table.bind(
            SubscriptionRoutes(self.context, self._subscriptions),
            SealRoute(self.context, self.sealing),
            inspection,
        )
        assert not self.app.table.unbound(), "a row has a handler that no part of the server has"

    def _guard_memory(self, limit_bytes: int) -> MemoryGuard:
        """The memory guard, with all caches that it may evict."""
        guard = MemoryGuard(self.log, SYSTEM_CLOCK, self.context.loop, limit_bytes)
        search = self.app.search
        guard.evictors += [self._cold.evict_all, self.app.routing_keys.listing.cache.clear]
        guard.evictors += [search.tail.evict_all, search.records.evict_all, self._index_files.files.evict_all]
        guard.on_tick.append(partial(search.index_new_rows, self.app.guard.grown))
        return guard

    async def start(self) -> None:
        settings = self._settings
        await self.sealing.claim()
        self.log.open()
        self._disk.start()
        self._memory.start()
        self._stream_metrics.start()
        self._checkpoints.start()
        await listing.republish_registry(self.log)
        if self._declared is not None and self.log.refusal is None:
            logger.info("declared streams exist", extra=log_fields(streams=await self._declared.make()))
        self.sealing.start()
        self.pipeline.start()
        if self._credentials is not None:
            self._credentials.start(self.app.recheck)
        await self.start_services()
        limits = file_descriptors.fit_connection_limit(settings.limits)
        self._http = HttpServer(
            self.listener_app(),
            limits,
            on_drain=self.app.end_live,
            admit_body=None if self._verifier is None else self.app.has_token,
        )
        self._register_metrics(self._http)
        self._certificate = load_certificate(settings)
        tls = None if self._certificate is None else self._certificate.context
        port = await self._listen(self._http, settings.port, tls)
        if settings.metrics_port:
            self._metrics = HttpServer(self.metrics_app(), settings.limits)
            await self._listen(self._metrics, settings.metrics_port, tls)
        self.pipeline.supervise(
            self.pipeline_demand,
            self._grant_pipeline(),
            lambda: local_url(settings.host, port, tls is not None),
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{'https' if tls else 'http'}://{host}:{port}"

    def _grant_pipeline(self) -> Callable[[float], str] | None:
        """A function that issues tokens for the local pipeline; None without authentication."""
        if self._verifier is None:
            return None
        identity = Identity(sub="pipeline", scopes=frozenset({"manage", "system"}))
        return lambda seconds: self._grants.issue(identity, seconds)

    def reload(self) -> None:
        """SIGHUP: check for Java again, reload the hub's rules, credentials and the TLS certificate."""
        if self.pipeline.child is not None:
            self.pipeline.child.recheck_java()
        self.hub.reload()
        self.app.recheck_hub()
        if self._credentials is not None:
            self._credentials.reload()
        if self._certificate is not None:
            try:
                self._certificate.reload()
            except TailraceError as error:
                logger.error(
                    "TLS certificate not reloaded, keeping the old one", extra=log_fields(error=str(error))
                )

    # -- overridden by a worker of a server with several processes ---------------------------------------

    def listener_app(self) -> App:
        """The application of the listener."""
        return self._observed or self.app

    def metrics_app(self) -> App:
        return MetricsApp(self.app.health)

    def pipeline_demand(self) -> PipelineBacklog:
        """The work for a local pipeline process."""
        return self.pipeline.state.demand()

    async def start_services(self) -> None:
        await self._subscriptions.start()
        await self.watch.start()
        await self.hub.start()

    async def stop_services(self) -> None:
        await self._subscriptions.stop()
        await self.watch.stop()
        self.hub.stop()

    async def before_log_closes(self) -> None:
        """Called when all requests have ended and nothing appends any more."""

    # -- internal ----------------------------------------------------------------------------------------

    async def _listen(self, http: HttpServer, port: int, tls: ssl.SSLContext | None) -> int:
        host = self._settings.host
        try:
            return await http.start(host, port, ssl=tls, reuse_port=self.shares_port)
        except OSError as error:
            reason = error.strerror or error
            raise TailraceError("unavailable", f"cannot listen on {host} port {port}: {reason}") from error

    async def stop(self) -> None:
        """Finish what is in progress: requests first, then the log, then everything else."""
        self.app.health.stopping = True
        # First: draining would wait for the long-poll of our own pipeline, which would then find no server.
        pipeline_exit = asyncio.create_task(self.pipeline.stop_child())
        if self._http is not None:
            await self._http.drain()
        if self._metrics is not None:
            await self._metrics.drain()
        await self.stop_services()
        self._disk.stop()
        self._memory.stop()
        self._stream_metrics.stop()
        await pipeline_exit
        await self.pipeline.stop()
        await self.sealing.stop()
        await self.before_log_closes()
        self.log.catalogue.close()
        self.app.search.close()
        await self.log.close()
        await self._checkpoints.stop()
        await self._index_files.close()
        await self._cold.close()
        if self._credentials is not None:
            self._credentials.stop()
        if self._tracing is not None:
            self._tracing.close()

    def _inspected_parts(self, context: Context) -> ServerParts:
        """The parts shown by `/v1/server/_details` and recorded in the metrics stream."""
        app = self.app
        return ServerParts(
            context,
            app.live,
            self._memory,
            self.sealing,
            self._checkpoints,
            self._cold,
            app.search,
            app.touch,
            self._index_files,
            self.pipeline.state,
        )

    def _observe(self, settings: Settings) -> RequestObserver | None:
        """The wrapper around the application that logs or traces single requests, if configured."""
        if not observes_requests(settings):
            return None
        tracer = None if self._tracing is None else self._tracing.tracer
        return RequestObserver(self.app, settings, tracer, self.log.committer)

    def _observe_sync(self, seconds: float, records: int) -> None:
        self.telemetry.observe_sync(seconds, records)
        if self._observed is not None:
            self._observed.synced(seconds, records)

    def _register_metrics(self, http: HttpServer) -> None:
        telemetry, log = self.telemetry, self.log
        log.committer.observe_sync = telemetry.observe_sync if self._tracing is None else self._observe_sync
        telemetry.ready.read = lambda: float(self.app.health.unready_reason is None)
        telemetry.requests.each = lambda: (
            ([method.decode(), str(status)], count)
            for (method, status), count in list(http.responses.items())
        )
        telemetry.malformed_requests.read = lambda: http.parse_errors
        telemetry.received_bytes.read = lambda: http.bytes_in
        telemetry.sent_bytes.read = lambda: http.bytes_out
        telemetry.connections.read = lambda: http.connections_open
        telemetry.connections_max.read = lambda: http.limits.connections
        telemetry.connections_refused.read = lambda: http.connections_refused
        for owner in (
            *(log, self._checkpoints, self._disk, self._cold, self._index_files, self.pipeline),
            *(self.app.live, self.app.reads, self.app.rates),
        ):
            owner.register_metrics(telemetry)
        self.sealing.register_metrics(telemetry, self._object_caches)
        if self._credentials is not None:
            self._credentials.register_metrics(telemetry)


def _build_tracing(context: Context) -> Tracing | None:
    if not context.settings.traces_url:
        return None
    from tailrace.server.trace_export import Tracing  # loads an HTTP client

    return Tracing(context)


def load_certificate(settings: Settings) -> Certificate | None:
    """The configured certificate, or a self-signed one if that is enabled."""
    if settings.tls_cert:
        return Certificate(settings.tls_cert, settings.tls_key)
    if not settings.tls_self_signed:
        return None
    from tailrace.http.tls import self_signed_certificate

    return Certificate(*self_signed_certificate(settings.data_dir / "tls", settings.host))


def local_url(host: str, port: int, tls: bool) -> str:
    """The URL for processes on this machine."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def print_startup_banner(url: str, settings: Settings) -> None:
    """Print the URL, the data directory and a command to try next."""
    lines = (
        f"tailrace ready  {url}",
        f"data directory  {os.fspath(settings.data_dir.absolute())}",
        f"try             {_example_request(url, settings)}",
    )
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _example_request(url: str, settings: Settings) -> str:
    """A curl command that works as printed, with a token and our own certificate where needed."""
    words = ["curl", "-X PUT", "-H 'Content-Type: application/json'"]
    if settings.tls_self_signed:
        words.append(f"--cacert {shlex.quote(str(settings.data_dir.absolute() / 'tls' / 'cert.pem'))}")
    if settings.auth_configured:
        words.append(f'-H "Authorization: Bearer {_token_command(settings)}"')
    return " ".join([*words, f"{url}/v1/stream/hello"])


def _token_command(settings: Settings) -> str:
    """A shell expression that creates a token, so that no secret is printed."""
    grant = "--sub me --scope write --expires 1h"
    if settings.auth_jwt_secret:
        file = Path(settings.config or CONFIG_NAME).absolute()
        named = f" --config {shlex.quote(str(file))}" if file.is_file() else ""
        return f"$(tailrace token create {grant}{named})"
    if settings.auth_keys_file:
        file = Path(settings.auth_keys_file).absolute()
        return f"$(tailrace key create {grant} --file {shlex.quote(str(file))})"
    return "$TAILRACE_TOKEN"
