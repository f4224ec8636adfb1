"""The process of one worker, started by the supervisor, which sends commands to its standard input.

Input: the setup as one line of JSON, then `drain` and `stop`. Output: `ready <url>`, `drained`. When the
input ends, the supervisor has exited and the worker stops as well.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import signal
import sys

import uvloop

from tailrace.cluster.worker import WorkerServer, WorkerSetup
from tailrace.common import process
from tailrace.common.errors import TailraceError
from tailrace.common.logging_setup import add_common_fields, configure_logging
from tailrace.http.request_log import configure_request_log
from tailrace.log.journal import JournalCorruptError
from tailrace.routing.client_address import ClientResolver
from tailrace.server import startup
from tailrace.server.process import SWITCH_INTERVAL_S
from tailrace.storage.data_directory import DataDirectory

logger = logging.getLogger("tailrace.workers")


def main() -> int:
    setup = WorkerSetup.decode(_first_line(sys.stdin.fileno()))
    settings = setup.settings
    configure_logging(settings.log_level, settings.log_format)
    configure_request_log(settings.log_requests, ClientResolver.from_settings(settings).log_fields)
    add_common_fields(worker=setup.index)
    process.set_time_slice(settings.processor_turn_us)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    # The supervisor handles signals and stops all workers together.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        uvloop.run(run_worker(setup))
    except (TailraceError, JournalCorruptError) as error:
        sys.stderr.write(f"tailrace: worker {setup.index}: {error}\n")
        return 1
    return 0


async def run_worker(setup: WorkerSetup) -> None:
    loop = asyncio.get_running_loop()
    commands = await _open_commands(loop)
    directory = DataDirectory(setup.settings.data_dir)
    try:
        server = WorkerServer(setup, directory, loop)
    except OSError as error:
        directory.close()
        raise TailraceError("unavailable", f"cannot read data directory {directory.path}: {error}") from error
    try:
        if setup.restored is not None:
            startup.record_restore(setup.restored, server.telemetry)
        await server.start()
        loop.add_signal_handler(signal.SIGHUP, server.reload)
        report(f"ready {server.url}")
        command = await commands.readline()
        if command == b"drain\n":
            await server.drain_clients()
            report("drained")
            await commands.readline()
        else:
            logger.warning("supervisor has exited, stopping")
            await server.cut_clients()  # another server may be waiting for the directory
            shutil.rmtree(setup.sockets, ignore_errors=True)  # instead of the supervisor
    finally:
        await server.stop()
        directory.close()


def _first_line(descriptor: int) -> bytes:
    """Read one line unbuffered: commands after it are read from the descriptor later."""
    with open(descriptor, "rb", buffering=0, closefd=False) as unbuffered:
        return unbuffered.readline()


async def _open_commands(loop: asyncio.AbstractEventLoop) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def report(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        logger.warning("supervisor has exited")


if __name__ == "__main__":
    process.run_and_exit(main)
