"""`tailrace serve --workers N`: prepares port and bucket, starts and restarts workers, stops all together.

The supervisor reserves the port before anything on disk changes. A bootstrap restores the data directory as
for a single process, and the streams are distributed afterwards, as for any change of the number of workers.
The bucket is claimed once for all workers, since each of them alone would find foreign streams in it: those
of the others.

A worker that exits is restarted with a back-off. On shutdown all workers drain their clients first, and then
stop, the first worker last.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from tailrace.auth.token_verifier import identity_path
from tailrace.cluster.layout import Layout, read_layout
from tailrace.cluster.migration import fold_journal, prepare_layout
from tailrace.cluster.peers import FIRST_WORKER
from tailrace.cluster.worker import WorkerSetup
from tailrace.common import file_descriptors, private_files
from tailrace.common.backoff import Backoff
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import configure_logging, log_fields
from tailrace.common.settings import Settings
from tailrace.common.settings_loading import unknown_variable_warnings
from tailrace.log.stored_streams import StoredStreams
from tailrace.server import process as single
from tailrace.server.startup import restore_from_bucket
from tailrace.storage.bootstrap import BootstrapReport, is_bootstrapped
from tailrace.storage.bucket_ownership import BucketOwnership, refuse_foreign_streams
from tailrace.storage.data_directory import DataDirectory
from tailrace.storage.object_store.interface import ObjectStoreError, open_object_store

PORT_S_MAX: Final = 5.0
PORT_RETRY_S: Final = 0.05


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind the port without listening, so that it stays reserved while workers restart."""
    deadline = time.monotonic() + PORT_S_MAX
    while True:
        try:
            return _bind(host, port)
        except OSError as error:
            # Workers of a killed supervisor may still be stopping.
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(PORT_RETRY_S)
                continue
            reason = error.strerror or error
            raise TailraceError("unavailable", f"cannot listen on {host} port {port}: {reason}") from error


def _bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address. The probe without SO_REUSEPORT fails if another server listens there."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    if port:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    bound = socket.socket(family, kind, protocol)
    try:
        # SO_REUSEADDR because of connections in TIME_WAIT of a server that did not share the port.
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


logger = logging.getLogger("tailrace.workers")


async def bootstrap_from_bucket(settings: Settings, root: DataDirectory) -> BootstrapReport | None:
    """Restore from the bucket; None if the process was stopped before it was done."""
    present = read_layout(root.path)
    if present.generation:
        if not all(is_bootstrapped(present.path(root.path, index)) for index in range(present.workers)):
            raise TailraceError(
                "unavailable",
                f"--bootstrap needs a data directory without streams, and {root.path} has workers; to use "
                "the existing data, start without --bootstrap",
            )
        logger.warning("bootstrap was completed before, using the restored data")
        return BootstrapReport()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return await restore_from_bucket(settings, root, stop)


async def claim_bucket(settings: Settings, root: DataDirectory, layout: Layout) -> None:
    """Take over the bucket, if all streams in it are known to one of the workers."""
    with ExitStack() as opened:
        stores: list[StoredStreams] = []
        for index in range(layout.workers):
            path = layout.path(root.path, index)
            # A worker of a killed supervisor may still be stopping.
            opened.callback(DataDirectory(path).close)
            fold_journal(path, settings.limits.tombstone_ms).close()
            stores.append(StoredStreams(path / "hot.db"))
            opened.callback(stores[-1].db.close)
        try:
            objects = open_object_store(settings.object_store_url, limits=settings.limits)
            try:
                ownership = BucketOwnership(objects)
                owner = await ownership.current()
                if owner is None or owner.deployment != root.deployment:
                    await refuse_foreign_streams(objects, stores)
                await ownership.claim(root.deployment, take_over=True)
            finally:
                await objects.close()
        except (ValueError, ObjectStoreError) as error:
            raise TailraceError("unavailable", f"cannot take over the object store: {error}") from error


RESTART_S: Final = 0.2
RESTART_S_MAX: Final = 10.0
STABLE_S: Final = 30.0  # a worker that ran this long starts with the shortest back-off again
DRAIN: Final = b"drain\n"
STOP_S: Final = 10.0  # in addition to the drain timeout


def run(settings: Settings) -> int:
    """Run the server until it stops, and return its exit code."""
    private_files.restrict_umask()
    configure_logging(settings.log_level, settings.log_format)
    for warning in unknown_variable_warnings(os.environ):
        logger.warning(warning)
    file_descriptors.raise_open_files_limit()
    try:
        # Before anything on disk changes: a server that cannot listen must not move streams.
        port = reserve_port(settings.host, settings.port)
        root = DataDirectory(settings.data_dir)
        try:
            if settings.workers == 1:
                layout = prepare_layout(settings, root)
                port.close()  # a single process does not share it
                return single.run(worker_settings(settings, root, layout, FIRST_WORKER))
            return run_workers(settings, root, port)
        finally:
            root.close()
            port.close()
    except TailraceError as error:
        sys.stderr.write(f"tailrace: {error}\n")
        return 1


def run_workers(settings: Settings, root: DataDirectory, port: socket.socket) -> int:
    restored: BootstrapReport | None = None
    if settings.bootstrap:
        restored = asyncio.run(bootstrap_from_bucket(settings, root))
        if restored is None:
            return 0
    layout = prepare_layout(settings, root)
    if settings.take_over:
        asyncio.run(claim_bucket(settings, root, layout))
    return asyncio.run(Supervisor(settings, root, layout, port, restored).run())


def worker_settings(settings: Settings, root: DataDirectory, layout: Layout, index: int) -> Settings:
    """The settings of one worker: its own directory, and everything shared."""
    path = layout.path(root.path, index)
    changed: dict[str, object] = {"data_dir": path, "object_store": settings.object_store_url, "workers": 1}
    if settings.auth_configured and not settings.auth_keys_file:
        changed["auth_keys_file"] = str(identity_path(settings))
    if settings.tls_self_signed:
        from tailrace.http.tls import self_signed_certificate

        certificate, key = self_signed_certificate(root.path / "tls", settings.host)
        changed |= {"tls_self_signed": False, "tls_cert": str(certificate), "tls_key": str(key)}
    if layout.workers > 1:
        changed |= {"bootstrap": False, "take_over": False}  # done already
        if index != FIRST_WORKER:
            changed["pipeline"] = "off"  # the first worker runs it for all
    return msgspec.structs.replace(settings, **changed)


class WorkerHandle:
    """The process of one worker, restarted when it exits."""

    def __init__(self, supervisor: Supervisor, index: int) -> None:
        self._supervisor = supervisor
        self.index = index
        self.url = ""
        self.process: asyncio.subprocess.Process | None = None
        self.ready = asyncio.Event()
        self.drained = asyncio.Event()
        self._draining = False
        self.failed = False  # it exited before it was ever ready

    async def run(self) -> None:
        backoff = Backoff(RESTART_S, RESTART_S_MAX)
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            outcome = await self._run_once()
            self.drained.set()
            if self._supervisor.stopping.is_set():
                return
            if not self.ready.is_set():
                self.failed = True
                self._supervisor.stopping.set()
                return
            if loop.time() - begun_s > STABLE_S:
                backoff.reset()
            logger.error("worker exited, restarting", extra=log_fields(worker=self.index, exit=str(outcome)))
            await asyncio.sleep(backoff.next_s())
            if self._supervisor.stopping.is_set():
                return
            self.drained.clear()

    async def _run_once(self) -> int | Exception:
        """The exit code, or the error if it could not be started (without memory or descriptors): retried."""
        try:
            return await self._run_process()
        except Exception as error:
            logger.exception("cannot start worker, retrying", extra=log_fields(worker=self.index))
            await self._kill()
            return error

    async def _run_process(self) -> int:
        self.process = None
        setup = self._supervisor.setup(self.index)
        self._supervisor.clear_sockets(setup)
        self.process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tailrace.cluster.worker_process",
            str(self.index),  # only shown in process lists
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C only signals the supervisor, which stops the workers
        )
        assert process.stdout is not None
        self.send_command(setup.encode())
        if self._draining:
            self.send_command(DRAIN)  # draining began while the worker was restarting
        while line := await process.stdout.readline():
            word, _, rest = line.decode().strip().partition(" ")
            if word == "ready":
                self.url = rest
                self.ready.set()
            elif word == "drained":
                self.drained.set()
        return await process.wait()

    async def _kill(self) -> None:
        process = self.process
        if process is not None:
            self.signal(signal.SIGKILL)
            await process.wait()

    def drain(self) -> None:
        self._draining = True
        self.send_command(DRAIN)

    def send_command(self, line: bytes) -> None:
        process = self.process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.write(line)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)


class Supervisor:
    def __init__(
        self,
        settings: Settings,
        root: DataDirectory,
        layout: Layout,
        port: socket.socket,
        restored: BootstrapReport | None = None,
    ) -> None:
        self._settings = settings
        self._root = root
        self._layout = layout
        self._restored = restored
        self._sockets = ""
        self._port = int(port.getsockname()[1])
        self.stopping = asyncio.Event()
        self._workers: list[WorkerHandle] = []

    def setup(self, index: int) -> WorkerSetup:
        settings = worker_settings(self._settings, self._root, self._layout, index)
        settings = msgspec.structs.replace(settings, port=self._port)
        return WorkerSetup(
            settings=settings,
            index=index,
            count=self._layout.workers,
            sockets=self._sockets,
            restored=self._restored if index == FIRST_WORKER else None,
        )

    @staticmethod
    def clear_sockets(setup: WorkerSetup) -> None:
        """Remove the sockets of the worker's previous process."""
        for path in (setup.socket(setup.index), setup.handover_socket(setup.index)):
            Path(path).unlink(missing_ok=True)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        # A private directory with a short path, as the length of socket paths is limited.
        self._sockets = tempfile.mkdtemp(prefix="tailrace-")
        try:
            return await self._run()
        finally:
            shutil.rmtree(self._sockets, ignore_errors=True)

    async def _run(self) -> int:
        self._workers = [WorkerHandle(self, index) for index in range(self._layout.workers)]
        runs = [asyncio.create_task(worker.run()) for worker in self._workers]
        stop = asyncio.create_task(self.stopping.wait())
        ready = asyncio.gather(*(worker.ready.wait() for worker in self._workers))
        await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not self.stopping.is_set():
            single.print_startup_banner(self._workers[0].url, self._settings)
        else:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
        await stop
        await self._stop(runs)
        return 1 if any(worker.failed for worker in self._workers) else 0

    async def _stop(self, runs: list[asyncio.Task[None]]) -> None:
        """All workers finish client requests first; only then they stop serving each other."""
        logger.info("stopping")
        timeout_s = self._settings.limits.drain_ms / 1000 + STOP_S
        for worker in self._workers:
            worker.drain()
        await self._within(timeout_s, *(worker.drained.wait() for worker in self._workers))
        # The first worker receives events from the others, and stops last.
        for stopped in (slice(1, None), slice(0, 1)):
            for worker in self._workers[stopped]:
                worker.send_command(b"stop\n")
            await self._within(timeout_s, *(asyncio.shield(run) for run in runs[stopped]))
        for worker in self._workers:
            worker.signal(signal.SIGKILL)  # if it has not stopped in time
        await asyncio.gather(*runs, return_exceptions=True)

    @staticmethod
    async def _within(seconds: float, *waits: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*waits, return_exceptions=True)
        except TimeoutError:
            logger.warning("workers did not stop in time", extra=log_fields(timeout_s=seconds))

    def _reload(self) -> None:
        for worker in self._workers:
            worker.signal(signal.SIGHUP)
