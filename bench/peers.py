# pyright: strict
"""Every server we measure: how to start it with an empty directory, and what it promises."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench import install
from bench.places import BARE, BENCH, NODE_MODULES
from bench.processes import Running, free_port, launch

Wire = Literal["http", "redis", "nats"]


@dataclass(frozen=True, slots=True)
class Command:
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict[str, str])
    ready: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    title: str
    wire: Wire
    durable: bool  # as configured here; `bench.strace` checks it
    command: Callable[[int, Path], Command]

    @contextmanager
    def running(
        self, directory: Path, cpus: frozenset[int] | None, env: Mapping[str, str] | None = None
    ) -> Generator[Running]:
        """Start with a clean directory; stop and remove it afterwards."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        server = self.start(directory, cpus, env)
        try:
            yield server
        finally:
            server.stop()
            shutil.rmtree(directory, ignore_errors=True)

    def start(
        self,
        directory: Path,
        cpus: frozenset[int] | None,
        env: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Running:
        """Start on whatever the directory holds. `prefix` goes before the command (strace)."""
        data = directory / "data"
        data.mkdir(exist_ok=True)
        port = free_port()
        command = self.command(port, data)
        argv, all_env = [*prefix, *command.argv], {**command.env, **(env or {})}
        return launch(argv, all_env, port, command.ready, directory / "log", cpus)


def _tailrace(port: int, data: Path) -> Command:
    argv = [sys.executable, "-m", "tailrace", "serve", "--host", "127.0.0.1", "--port", str(port)]
    return Command([*argv, "--data-dir", str(data)], ready="/readyz")


def _reference(port: int, data: Path | None) -> Command:
    install.npm_peers()
    argv = ["node", str(BENCH / "reference.mjs"), str(port)]
    return Command(argv if data is None else [*argv, str(data)])


def _prisma(port: int, data: Path, extra: dict[str, str]) -> Command:
    server = NODE_MODULES / "@prisma/streams-server/src/server.ts"
    env = {"DS_HOST": "127.0.0.1", "PORT": str(port), "DS_ROOT": str(data), **extra}
    return Command([str(install.bun()), str(server), "--object-store", "local", "--no-auth"], env, "/health")


def _redis(port: int, data: Path) -> Command:
    binary, libraries = install.redis_server()
    argv = [str(binary), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(data), "--save", ""]
    env = {} if libraries is None else {"LD_LIBRARY_PATH": str(libraries)}
    return Command([*argv, "--appendonly", "yes", "--appendfsync", "always"], env, "PING")


def _nats(port: int, data: Path) -> Command:
    config = data.parent / "nats.conf"
    config.write_text(
        f'host: "127.0.0.1"\nport: {port}\njetstream {{ store_dir: "{data}", sync_interval: always }}\n'
    )
    return Command([str(install.nats_server()), "-c", str(config)])


RAISED = {"DS_INGEST_CONCURRENCY": "4096", "DS_INGEST_FLUSH_MS": "1", "DS_INGEST_MAX_BATCH_REQS": "512"}

ALL: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("tailrace", "Tailrace", "http", True, _tailrace),
        Peer(
            "prisma-raised", "Prisma Streams, limits raised", "http", True, lambda p, d: _prisma(p, d, RAISED)
        ),
        Peer("prisma", "Prisma Streams, as shipped", "http", True, lambda p, d: _prisma(p, d, {})),
        Peer("reference-file", "reference server, file store", "http", True, _reference),
        Peer(
            "reference-memory", "reference server, memory", "http", False, lambda p, _d: _reference(p, None)
        ),
        Peer("redis", "Redis Streams, appendfsync always", "redis", True, _redis),
        Peer("nats", "NATS JetStream, sync always", "nats", True, _nats),
        Peer(
            "bare",
            "C program, same system calls",
            "http",
            True,
            lambda p, d: Command([str(BARE), "serve", str(p), str(d / "j")]),
        ),
    )
}
US = "tailrace"
# The whole stream in one answer, however long it is.
DO_NOT_PAGE = ("reference-file", "reference-memory")
DURABLE_HTTP = ("prisma-raised", "prisma", "reference-file")
