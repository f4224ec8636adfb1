"""The edge process: builds all parts, runs until a signal, and shuts down."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
from math import inf
from pathlib import Path

import msgspec
import uvloop

from tailrace import __version__
from tailrace.auth import check_listen_address
from tailrace.common import file_descriptors, private_files, process
from tailrace.common.clock import SYSTEM_CLOCK
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import configure_logging, log_fields
from tailrace.common.settings import Settings, SettingsError
from tailrace.common.settings_loading import unknown_variable_warnings
from tailrace.edge.app import EdgeApp, EdgeMetricsApp
from tailrace.edge.auth import Authenticator, EdgeToken
from tailrace.edge.cache import DiskCache, MemoryCache
from tailrace.edge.channels import CLOSE_GOING_AWAY, CLOSE_GONE, ChannelTable
from tailrace.edge.context import EdgeContext
from tailrace.edge.held_streams import HeldEventStreams
from tailrace.edge.invalidation import RegistryFollower, RevocationFollower
from tailrace.edge.live import EdgeLiveReaders
from tailrace.edge.long_poll import LongPolls
from tailrace.edge.metrics import EdgeTelemetry
from tailrace.edge.slices import SliceReader
from tailrace.edge.stream_info import StreamInfoCache
from tailrace.edge.ttl_renewal import TtlRenewals
from tailrace.edge.upstream_pool import parse_upstreams
from tailrace.edge.upstreams import Upstream, Upstreams
from tailrace.http import request_log
from tailrace.http.server import HttpServer
from tailrace.http.streaming_request import StreamingServer
from tailrace.http.tls import Certificate

logger = logging.getLogger("tailrace.edge")

MODES = ("long-poll", "sse", "ws", "held")
# Interval of checks for changed keys and revocations.
IDENTITIES_S = 1.0


def run(settings: Settings) -> int:
    """Runs `tailrace edge`; returns its exit code."""
    settings = listen_settings(settings)
    check_listen_address(settings)
    private_files.restrict_umask()
    configure_logging(settings.log_level, settings.log_format)
    request_log.configure_request_log(settings.log_requests)
    for warning in unknown_variable_warnings(os.environ):
        logger.warning(warning)
    process.set_time_slice(settings.processor_turn_us)
    settings = msgspec.structs.replace(settings, limits=file_descriptors.fit_edge_limits(settings.limits))
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    try:
        return uvloop.run(serve(settings))
    except TailraceError as error:
        sys.stderr.write(f"tailrace: {error}\n")
        return 1


def listen_settings(settings: Settings) -> Settings:
    """The settings with the edge's own address: a server and an edge may share one settings file."""
    host, colon, port = settings.edge_listen.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise SettingsError(
            f"--listen takes an address and a port, as in 127.0.0.1:4438, not {settings.edge_listen!r}"
        )
    limits = msgspec.structs.replace(settings.limits, connections=settings.limits.edge_connections)
    return msgspec.structs.replace(settings, host=host.strip("[]"), port=int(port), limits=limits)


async def serve(settings: Settings) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    edge = EdgeServer(settings)
    loop.add_signal_handler(signal.SIGHUP, edge.reload)
    try:
        await edge.start()
        sys.stdout.write(f"tailrace ready  {edge.url}\nupstream        {settings.edge_upstream}\n")
        sys.stdout.flush()
        await stop.wait()
        logger.info("stopping")
    finally:
        await edge.stop()
    return 0


class EdgeServer:
    """All parts of one edge process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        edge_id = secrets.token_hex(4).encode()
        origins = parse_upstreams(settings.edge_upstream)
        mode = settings.edge_upstream_mode
        if len(origins) > 1 and mode == "single":
            raise SettingsError("several upstreams need --upstream-mode any (one deployment) or sharded")
        self.upstreams = Upstreams(origins, mode, settings.limits, edge_id, self._on_other_server)
        self.telemetry = EdgeTelemetry(__version__)
        token = EdgeToken(settings.edge_token_file) if settings.edge_token_file else None
        context = EdgeContext(settings, self.upstreams, self.telemetry, SYSTEM_CLOCK, edge_id, token)
        self.context = context
        self.gate = Authenticator(settings)
        self.memory = MemoryCache(settings.limits.edge_memory_cache_bytes, self.telemetry)
        self.book = StreamInfoCache(self._on_drop)
        self.channels = ChannelTable(context, self.book)
        self.registry = RegistryFollower(context, self._on_registry)
        cache_dir = settings.edge_cache_dir
        self.disk = DiskCache(context, Path(cache_dir)) if cache_dir else None
        self.renewals = TtlRenewals(context, self.book, self.channels)
        self.slices = SliceReader(
            context,
            self.book,
            self.channels,
            self.memory,
            self.disk,
            self.registry,
            self.renewals,
            verifies=self.gate.verifies,
        )
        self.live = EdgeLiveReaders(context, self.gate, self.channels, self.slices)
        self.long_polls = LongPolls(context, self.gate, self.channels, self.book)
        self.revoked: RevocationFollower | None = None
        if self.gate.verifier is not None:
            self.revoked = RevocationFollower(context, self.gate.verifier.book, self._recheck)
        self.held = HeldEventStreams(context, self.channels, self.book)
        self.app = EdgeApp(
            context, self.gate, self.book, self.slices, self.live, self.long_polls, self.held, self._on_write
        )
        self._http: StreamingServer | None = None
        self._metrics: HttpServer | None = None
        self._certificate: Certificate | None = None
        self.url = ""

    async def start(self) -> None:
        settings = self._settings
        self.gate.start()
        await self.upstreams.start()
        self.registry.start()
        if self.revoked is not None:
            self._reload_token()
            await self.revoked.start()
            self.context.tasks.start(self._watch_identities())
        self._http = http = StreamingServer(self.app, settings.limits, on_drain=self.app.end_live)
        self._connect_telemetry(http)
        if settings.tls_cert:
            self._certificate = Certificate(settings.tls_cert, settings.tls_key)
        port = await self._listen(http, settings.port)
        if settings.edge_metrics_port:
            self._metrics = HttpServer(EdgeMetricsApp(self.app.own), settings.limits)
            await self._listen(self._metrics, settings.edge_metrics_port)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{'http' if self._certificate is None else 'https'}://{host}:{port}"

    async def _listen(self, http: HttpServer, port: int) -> int:
        host, tls = self._settings.host, None if self._certificate is None else self._certificate.context
        try:
            return await http.start(host, port, ssl=tls)
        except OSError as error:
            reason = error.strerror or error
            raise TailraceError("unavailable", f"cannot listen on {host} port {port}: {reason}") from error

    def reload(self) -> None:
        """SIGHUP: reloads keys, token and certificate."""
        self.gate.reload()
        self._reload_token()
        self._recheck()
        if self._certificate is not None:
            try:
                self._certificate.reload()
            except TailraceError as error:
                logger.error(
                    "certificate reload failed, keeping the last one", extra=log_fields(error=str(error))
                )

    async def stop(self) -> None:
        """Disconnects clients, then closes the upstreams."""
        self.app.own.stopping = True
        if self._http is not None:
            await self._http.drain()
        if self._metrics is not None:
            await self._metrics.drain()
        self.channels.stop()
        await self.renewals.stop()
        await self.registry.stop()
        if self.revoked is not None:
            await self.revoked.stop()
        await self.context.stop()
        await self.upstreams.stop()
        if self.disk is not None:
            await self.disk.close()
        self.gate.close()

    # -- events between parts

    async def _watch_identities(self) -> None:
        while True:
            await asyncio.sleep(IDENTITIES_S)
            self._reload_token()
            self._recheck()

    def _recheck(self) -> None:
        if self.gate.changed():
            self.live.recheck()
            self.long_polls.recheck()

    def _reload_token(self) -> None:
        token = self.context.own_token
        if token is not None:
            token.refresh()
            self.gate.read_expiry(token)

    def _on_drop(self, name: str, reason: str) -> None:
        self.memory.drop(name)
        if reason != "forgotten":
            self.telemetry.edge_cache_invalidations.add(reason)

    def _on_other_server(self) -> None:
        """An upstream was replaced by another server, whose streams of the same names differ."""
        logger.warning("upstream was replaced by another server, dropping cached streams")
        for name in self.book.drop_all("deployment"):
            self.channels.end_stream(name, CLOSE_GOING_AWAY)

    def _on_write(self, name: str, method: bytes, status: int) -> None:
        self.book.note_write(name, method, status)
        if method == b"DELETE" and status < 300:
            self.channels.end_stream(name, CLOSE_GONE)

    def _on_registry(self, name: str, operation: str) -> None:
        self.book.drop(name, "registry")
        if operation == "delete":
            self.context.tasks.start(self.channels.recheck(name))

    def _connect_telemetry(self, http: StreamingServer) -> None:
        telemetry = self.telemetry
        telemetry.edge_ready.read = lambda: float(self.upstreams.ready and not self.app.own.stopping)
        telemetry.edge_connections.read = lambda: http.connections_open
        telemetry.edge_connections_max.read = lambda: http.limits.connections
        telemetry.edge_connections_refused.read = lambda: http.connections_refused
        telemetry.edge_received_bytes.read = lambda: http.bytes_in
        telemetry.edge_sent_bytes.read = lambda: http.bytes_out
        telemetry.edge_body_bytes.read = lambda: http.body_bytes_held
        for mode in MODES:
            telemetry.edge_clients.reads[(mode,)] = lambda mode=mode: self.channels.clients[mode]
        telemetry.edge_following.reads[("registry",)] = lambda: float(self.registry.is_complete_since(inf))
        own = self.context.own_token
        telemetry.edge_token_refused.read = lambda: float(own is not None and own.is_refused)
        telemetry.edge_overload.reads[("connections",)] = lambda: http.connections_refused
        pools = [pool for upstream in self.upstreams.all for pool in upstream.pools]
        telemetry.edge_overload.reads[("upstream_queue",)] = lambda: sum(pool.refused for pool in pools)
        for upstream in self.upstreams.all:
            self._connect_upstream(upstream)

    def _connect_upstream(self, upstream: Upstream) -> None:
        telemetry, pools = self.telemetry, upstream.pools
        telemetry.edge_upstream_healthy.reads[(upstream.id,)] = lambda: float(upstream.usable)
        requests = telemetry.edge_upstream_requests.reads
        requests[(upstream.id, "active")] = lambda: sum(pool.active for pool in pools)
        requests[(upstream.id, "queued")] = lambda: sum(pool.queued for pool in pools)
