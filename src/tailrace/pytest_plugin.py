"""The pytest plugin. Every run of pytest beside an installed Tailrace loads it: it loads nothing itself."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tailrace.client import Client
    from tailrace.testing import TailraceServer

LOG_CHARS_SHOWN = 20_000

SERVERS: pytest.StashKey[list[TailraceServer]] = pytest.StashKey()  # of a test, a file or the run
_NONE: list[TailraceServer] = []


@pytest.fixture(scope="session")
def tailrace_settings() -> Mapping[str, object]:
    """Settings of the servers, by name; override it in a conftest or in a file of tests."""
    return {}


@pytest.fixture
def tailrace_server(
    request: pytest.FixtureRequest, tmp_path: Path, tailrace_settings: Mapping[str, object]
) -> Iterator[TailraceServer]:
    """A server of this test alone, empty, on a free port."""
    yield from _run(request, tmp_path / "tailrace", tailrace_settings)


@pytest.fixture(scope="session")
def tailrace_session_server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tailrace_settings: Mapping[str, object],
) -> Iterator[TailraceServer]:
    """One server for all tests of the run that ask for it: they keep apart by the names of their streams."""
    yield from _run(request, tmp_path_factory.mktemp("tailrace") / "data", tailrace_settings)


@pytest.fixture
def tailrace_client(tailrace_server: TailraceServer) -> Iterator[Client]:
    """A client of this test's server."""
    with tailrace_server.client() as client:
        yield client


@pytest.fixture
def tailrace_session_client(tailrace_session_server: TailraceServer) -> Iterator[Client]:
    """A client of the server that all tests share."""
    with tailrace_session_server.client() as client:
        yield client


def _run(
    request: pytest.FixtureRequest, data_dir: Path, settings: Mapping[str, object]
) -> Iterator[TailraceServer]:
    from tailrace.testing import TailraceServer

    server = TailraceServer(data_dir, settings=settings)
    request.node.stash.setdefault(SERVERS, []).append(server)
    server.start()
    yield server
    server.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the servers of a test printed is shown below its failure."""
    report = yield
    if report.failed:
        for node in item.listchain():
            for server in node.stash.get(SERVERS, _NONE):
                report.sections.append((f"tailrace server log ({node.name})", server.log[-LOG_CHARS_SHOWN:]))
    return report
