"""The public suite, the official JavaScript client and `ws`, as published, against a default server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.server import ServerProcess

HERE = Path(__file__).resolve().parent
SUITE_TESTS = 338


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


@pytest.mark.timeout(300)
def test_the_whole_public_suite_passes(server: ServerProcess, tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
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


def test_the_official_javascript_client_works(server: ServerProcess) -> None:
    done = _node(["node", "--test", "--test-reporter=spec", "client.test.mjs"], server, timeout_s=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_ws_package_follows_streams(server: ServerProcess) -> None:
    done = _node(["node", "--test", "--test-reporter=spec", "websocket.test.mjs"], server, timeout_s=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
