"""docs/spark.md and the README's lines about Spark, executed as they are written."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.cli import environment
from support.pipeline import Unstoppable
from support.server import ServerProcess
from tailrace.cli import command

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(python tour|sh tour|text|python spark)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def shell(text: str, env: dict[str, str], directory: Path) -> str:
    """A block of commands; `tailrace` is the one of this environment."""
    script = f'tailrace() {{ "{sys.executable}" -m tailrace "$@"; }}\n{text}'
    done = subprocess.run(
        ["bash", "-ec", script],
        env=env,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sql_here(text: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> str:
    """`tailrace sql` in this process, which has a session: another takes longer than all the rest."""
    monkeypatch.setattr("tailrace.spark.session.open_session", lambda *_args: Unstoppable(spark))
    said = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(said):
        assert command(shlex.split(text)[1:]) == 0
    said.seek(0)
    return said.read()


def test_five_minutes(
    spark: SparkSession, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_ENDPOINT", server.base_url)
    monkeypatch.chdir(tmp_path)
    env = {**environment({"TAILRACE_ENDPOINT": server.base_url}), "PATH": os.environ["PATH"]}
    names: dict[str, Any] = {}
    printed = ""
    outputs: list[str] = []
    here = f'.format("tailrace").option("endpoint", "{server.base_url}")'
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    # Spark's own process has another working directory.
    page = page.replace('"checkpoint"', f'"{tmp_path / "checkpoint"}"')
    for kind, text in _BLOCK.findall(page.replace('.format("tailrace")', here)):
        if kind == "python tour":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(text, "docs/spark.md", "exec"), names)
            printed = said.getvalue()
        elif text.startswith("tailrace sql "):
            printed = sql_here(text, spark, monkeypatch)
        elif kind == "sh tour":
            printed = shell(text, env, tmp_path)
        else:
            assert printed == text
        outputs.append(printed)
    shown = "\n".join(outputs)
    assert '{"user": "bob", "page": "/docs"}' in shown
    assert re.search(r"\|\s*ada\|\s*2\|", shown)
    assert '{"user":"EVE","entry":4}' in shown
    shell("tailrace append orders --create '{\"id\": 1}'", env, tmp_path)
    (lines,) = (
        text for kind, text in _BLOCK.findall((ROOT / "README.md").read_text()) if kind == "python spark"
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(lines.replace('.format("tailrace")', here), "README.md", "exec"), {})
    assert '{"id": 1}' in said.getvalue()
