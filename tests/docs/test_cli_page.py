"""The examples of docs/cli.md about streams, executed as they are written and in the page's order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import environment, tailrace
from support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]
# Sections whose examples need one server and nothing else. `serve`, `edge`, `hub`, `sql`, `pipeline` and
# those that work on files have pages and tests of their own.
SECTIONS = ("create", "append", "read", "tail", "ls", "fork", "close", "search", "profile", "details", "docs",
            "seal", "completion", "rm")  # fmt: skip


def _examples(section: str) -> list[str]:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0].partition("**")[0]
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


@pytest.fixture(scope="module")
def reader(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a reader of the page, whose home has the files and directories that it names."""
    home = tmp_path_factory.mktemp("reader")
    (home / "orders.ndjson").write_text("".join(f'{{"id": {n}}}\n' for n in range(2, 5)))
    (home / "app.log").write_text("started\nready\n")
    for directory in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
        (home / directory).mkdir(parents=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment({"PATH": path, "HOME": str(home), "TAILRACE_URL": server.base_url})
    made = {"TAILRACE_URL": server.base_url}
    for stream, *more in (("events", "--profile", "evlog"), ("spans",), ("changes",), ("sessions/1",)):
        assert tailrace("create", stream, *more, env=made).code == 0
    assert tailrace("create", "sessions/2", env=made).code == 0
    return env


def test_every_section_has_examples() -> None:
    assert [section for section in SECTIONS if not _examples(section)] == []


def test_the_examples_do_what_they_say(reader: dict[str, str]) -> None:
    for section in SECTIONS:
        if section == "tail":
            # A reader of a closed stream comes to its end; of an open one, only Ctrl-C would end it.
            _run("tailrace close orders && tailrace close requests", reader)
        for line in _examples(section):
            script = line.replace("tail -f ", "cat ") if line.startswith("tail -f") else line
            if section == "rm" and "--yes" not in script:
                script += " --yes"  # there is no terminal to ask on
            _run(script, reader)


def _run(script: str, env: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=env["HOME"],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
