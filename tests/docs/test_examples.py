"""Examples that are started the wrong way say how to start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import environment
from support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path for path in (ROOT / "examples").rglob("*.py") if "__main__" in path.read_text(encoding="utf-8")
)
NEED_NO_ARGUMENTS = {"worker.py"}


def _run(script: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *args]
    return subprocess.run(
        command, env=environment(env), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.name not in NEED_NO_ARGUMENTS], ids=lambda path: path.name
)
def test_an_example_without_arguments_prints_its_usage(script: Path) -> None:
    done = _run(script)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"usage: {script.name}")
    shown = _run(script, "--help")
    assert shown.returncode == 0
    assert f"{script.name} " in shown.stdout.partition("\n\n")[2], "with an example"


def test_an_example_without_a_server_says_so() -> None:
    (worker,) = [path for path in SCRIPTS if path.name in NEED_NO_ARGUMENTS]
    done = _run(worker, TAILRACE_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "tailrace serve" in done.stderr
