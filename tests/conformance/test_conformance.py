"""The public suite, the official JavaScript client and `ws`, as published, against a default server."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.edge import EdgeProcess
from support.s3 import S3Server
from support.sealing import SEALING_ENV, hot
from support.server import ServerProcess

HERE = Path(__file__).resolve().parent
SUITE_TESTS = 338
# Bytes in memory (None: as many as by default), and whether there is a disk cache.
CACHES: dict[str, tuple[str | None, bool]] = {
    "none": ("0", False),
    "tiny": ("4096", False),
    "memory": (None, False),
    "disk": ("0", True),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As it is started by whoever changes nothing."""
    process = ServerProcess(tmp_path_factory.mktemp("server") / "data", plain=True).start()
    yield process
    process.stop()


def _node(command: list[str], server: ServerProcess, timeout_s: float) -> subprocess.CompletedProcess[str]:
    modules = HERE / "node_modules"
    assert modules.is_dir(), "the suite is not installed: run `make setup`"
    return subprocess.run(
        command,
        cwd=HERE,
        env={**os.environ, "TAILRACE_TEST_URL": server.base_url, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _failures(report: dict[str, Any]) -> list[str]:
    results = [result for file in report["testResults"] for result in file["assertionResults"]]
    return [
        f"{result['status']}: {result['fullName']}\n    " + "\n    ".join(result["failureMessages"])
        for result in results
        if result["status"] != "passed"
    ]


def _run_suite(server: ServerProcess, directory: Path) -> None:
    report_path = directory / "report.json"
    vitest = [
        "node",
        "node_modules/vitest/vitest.mjs",
        "run",
        "--reporter=json",
        f"--outputFile={report_path}",
    ]
    done = _node(vitest, server, timeout_s=280)
    assert report_path.is_file(), f"vitest wrote no report\n{done.stdout}\n{done.stderr}"
    report = json.loads(report_path.read_text(encoding="utf-8"))
    failures = _failures(report)
    assert not failures, f"{report['numPassedTests']} of {SUITE_TESTS} passed\n" + "\n".join(failures)
    assert (report["numPassedTests"], report["numTotalTests"]) == (SUITE_TESTS, SUITE_TESTS)


@pytest.mark.timeout(300)
def test_the_whole_public_suite_passes(server: ServerProcess, tmp_path: Path) -> None:
    _run_suite(server, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cache",
    # Each takes most of a minute. With memory and disk together it is run below.
    ["none", "disk", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tiny", "memory"))],
)
def test_e1_it_passes_through_an_edge(server: ServerProcess, tmp_path: Path, cache: str) -> None:
    """E-1: whatever it keeps, and wherever."""
    memory_bytes, disk = CACHES[cache]
    edge = EdgeProcess(
        tmp_path / "cache",
        server.base_url,
        args=["--cache-dir", str(tmp_path / "slices")] if disk else [],
        env={} if memory_bytes is None else {"TAILRACE_EDGE_MEMORY_CACHE_BYTES": memory_bytes},
        plain=True,
    )
    edge.start()
    try:
        _run_suite(edge, tmp_path)
    finally:
        edge.stop()


@pytest.mark.timeout(300)
def test_e1_it_passes_through_an_edge_that_is_warm(server: ServerProcess, tmp_path: Path) -> None:
    """E-1, with both: what an earlier run has left is in nobody's way, also after a restart."""
    edge = EdgeProcess(
        tmp_path / "cache", server.base_url, args=["--cache-dir", str(tmp_path / "slices")], plain=True
    )
    edge.start()
    try:
        _run_suite(edge, tmp_path)
        edge.restart()
        _run_suite(edge, tmp_path)
    finally:
        edge.stop()


@pytest.mark.timeout(300)
def test_it_passes_with_two_workers(start_server: StartServer, tmp_path: Path) -> None:
    _run_suite(start_server("--workers", "2"), tmp_path)


@pytest.mark.timeout(300)
def test_it_passes_while_everything_is_sealed(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(env=SEALING_ENV)
    _run_suite(server, tmp_path)
    assert hot(server.data_dir)["segments"] > SUITE_TESTS


@pytest.mark.timeout(300)
def test_it_passes_while_everything_is_sealed_to_s3(
    start_server: StartServer, s3: S3Server, tmp_path: Path
) -> None:
    server = start_server(env={**SEALING_ENV, **s3.env(), "TAILRACE_OBJECT_STORE": s3.url("conformance")})
    _run_suite(server, tmp_path)
    assert hot(server.data_dir)["segments"] > SUITE_TESTS


def test_the_official_javascript_client_works(server: ServerProcess) -> None:
    done = _node(["node", "--test", "--test-reporter=spec", "client.test.mjs"], server, timeout_s=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_ws_package_follows_streams(server: ServerProcess) -> None:
    done = _node(["node", "--test", "--test-reporter=spec", "websocket.test.mjs"], server, timeout_s=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
