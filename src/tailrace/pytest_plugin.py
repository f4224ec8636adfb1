"""The pytest plugin. Every run of pytest with Tailrace installed loads it, so it imports nothing heavy."""

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
    """Settings of the servers, by name; override it in a conftest or a test file."""
    return {}


@pytest.fixture
def tailrace_server(
    request: pytest.FixtureRequest, tmp_path: Path, tailrace_settings: Mapping[str, object]
) -> Iterator[TailraceServer]:
    """A server for this test only, empty, on a free port."""
    yield from _run(request, tmp_path / "tailrace", tailrace_settings)


@pytest.fixture(scope="session")
def tailrace_session_server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tailrace_settings: Mapping[str, object],
) -> Iterator[TailraceServer]:
    """One server for all tests of the run; use distinct stream names."""
    yield from _run(request, tmp_path_factory.mktemp("tailrace") / "data", tailrace_settings)


@pytest.fixture
def tailrace_client(tailrace_server: TailraceServer) -> Iterator[Client]:
    """A client of this test's server."""
    with tailrace_server.client() as client:
        yield client


@pytest.fixture
def tailrace_session_client(tailrace_session_server: TailraceServer) -> Iterator[Client]:
    """A client of the shared server."""
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
    """Add the output of a test's servers to its failure report."""
    report = yield
    if report.failed:
        for node in item.listchain():
            for server in node.stash.get(SERVERS, _NONE):
                report.sections.append((f"tailrace server log ({node.name})", server.log[-LOG_CHARS_SHOWN:]))
    return report
