"""The pytest plugin, as somebody who tests a program of their own uses it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from support.cli import environment

ROOT = Path(__file__).resolve().parents[2]
PASSING = """
import pytest
from tailrace.client import ClientError
from tailrace.testing import TailraceServer


@pytest.fixture(scope="session")
def tailrace_settings():
    return {"append_body_bytes": "1KiB"}


def test_a_server_of_its_own(tailrace_client, tailrace_server):
    orders = tailrace_client.stream("orders", content_type="application/json")
    orders.create()
    orders.append({"id": 1})
    with pytest.raises(ClientError, match="1024 bytes"):
        orders.append({"id": "x" * 2000})
    tailrace_server.restart(kill=True)
    assert list(orders.entries()) == [{"id": 1}]
    assert isinstance(tailrace_server, TailraceServer)


def test_every_test_begins_with_nothing(tailrace_client, tailrace_session_client):
    assert [one.name for one in tailrace_client.streams()] == []
    tailrace_session_client.stream("shared").create()


def test_what_is_shared_stays(tailrace_session_client, tailrace_session_server):
    assert [one.name for one in tailrace_session_client.streams()] == ["shared"]
    tailrace_session_server.stop()
    assert not tailrace_session_server.running
"""
FAILING = """
def test_that_fails(tailrace_server):
    assert tailrace_server.status("/nowhere") == 200
"""


def run(directory: Path, text: str, *more: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_mine.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", *more]
    return subprocess.run(
        [*command, "--rootdir", str(directory), str(directory)],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_somebodys_tests_run(tmp_path: Path) -> None:
    done = run(tmp_path, PASSING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_a_failure_shows_what_the_server_said(tmp_path: Path) -> None:
    done = run(tmp_path, FAILING)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "tailrace server log" in done.stdout
    assert "tailrace ready  http://127.0.0.1:" in done.stdout


def test_it_is_loaded_by_being_installed() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert declared["project"]["entry-points"]["pytest11"] == {"tailrace": "tailrace.pytest_plugin"}
    (found,) = metadata.entry_points(group="pytest11", name="tailrace")
    assert found.value == "tailrace.pytest_plugin"


def test_those_who_do_not_use_it_do_not_load_the_server() -> None:
    """Every run of pytest imports the plugin."""
    loaded = "sorted(name for name in sys.modules if 'tailrace' in name)"
    program = f"import sys, tailrace.pytest_plugin; print(*{loaded})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tailrace", "tailrace.pytest_plugin"]
