"""Fixtures for every test: real server processes on directories of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from support.s3 import S3Server
from support.server import ServerProcess
from support.wire import Wire
from tailrace.pytest_plugin import SERVERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A slow machine is not a failure: no example has a deadline. The suite tries the same examples every time,
# so that a change is judged by what it changed; `make nightly` explores (--hypothesis-profile explore).
settings.register_profile(
    "explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile("repeat")

StartServer = Callable[..., ServerProcess]


def pytest_configure() -> None:
    """Who wants no bytecode in the tree gets it elsewhere: without, each process compiles all it loads."""
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(Path(sys.prefix) / "bytecode")
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file, or all tests that need Spark, go to one worker: what they share is started once."""
    from support.spread import ByFile

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from support.spread import longest_first

    longest_first(items)


def _started(request: pytest.FixtureRequest, directory: Path) -> ServerProcess:
    process = ServerProcess(directory / "data")
    request.node.stash.setdefault(SERVERS, []).append(process)
    return process.start()


@pytest.fixture
def running() -> Iterator[list[ServerProcess]]:
    """Servers that are ended after the test."""
    servers: list[ServerProcess] = []
    yield servers
    for server in servers:
        if server.running:
            server.stop()


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server with default settings, shared by the tests of one file."""
    process = _started(request, tmp_path_factory.mktemp("server"))
    yield process
    process.stop()


@pytest.fixture(scope="session")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """Calls to a server with default settings that all tests of the protocol's rules share."""
    process = ServerProcess(tmp_path_factory.mktemp("rules") / "data").start()
    wire = Wire(process.port)
    yield wire
    wire.close()
    process.stop()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with one bucket; tests keep apart by prefixes."""
    server = S3Server(tmp_path_factory.mktemp("s3")).start()
    yield server
    server.stop()


@pytest.fixture
def start_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StartServer]:
    """Start servers with settings of their own: ``start_server("--server-timing", env={...})``."""
    processes: list[ServerProcess] = []

    def start(*args: str, data_dir: Path | None = None, env: dict[str, str] | None = None) -> ServerProcess:
        directory = data_dir or tmp_path / f"data-{len(processes)}"
        process = ServerProcess(directory, args=args, env=env)
        processes.append(process)
        request.node.stash.setdefault(SERVERS, []).append(process)
        return process.start()

    yield start
    for process in processes:
        if process.running:
            process.stop()


@pytest.fixture(scope="session")
def spark_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark session of the run: it takes seconds and a gigabyte, so it starts when needed."""
    from support.spark import open_session

    session = open_session(tmp_path_factory.mktemp("spark"))
    yield session
    session.stop()


@pytest.fixture
def spark(spark_session: SparkSession) -> Iterator[SparkSession]:
    """The session without what the test before has left in it: no queries, no views, no cached tables."""
    from support.spark import clean

    yield spark_session
    clean(spark_session)
