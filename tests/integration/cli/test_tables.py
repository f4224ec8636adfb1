"""Tables as a person sees them, 80 columns wide, and as the next program in a pipe reads them."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from support.cli import command, environment, tailrace
from support.server import ServerProcess
from support.terminal import COLUMNS, OnTerminal

LONG = "a/very/long/name/of/a/stream/that/has/the/events/of/production/in/eu-central-1/shard-00017"
FIELDS = (
    '"service":"checkout","level":"error","method":"POST","requestId":"req-%d","status":50%d,"duration":1%d.5'
)
EVENT = (
    f'{{{FIELDS},"path":"/a/long/path/of/a/request/{"x" * 60}/%d","timestamp":"2026-01-01T00:00:0%d.000Z"}}'
)


@pytest.fixture(scope="module")
def filled(server: ServerProcess) -> ServerProcess:
    def run(*args: str, stdin: bytes = b"") -> None:
        done = tailrace(*args, stdin=stdin, env={"TAILRACE_URL": server.base_url})
        assert done.code == 0, done.err

    run("create", LONG, "--type", "application/vnd.a-company.with-a-long-name+json")
    run("create", "orders")
    run("append", "orders", '{"id": 1}')
    run("create", "requests", "--profile", "evlog")
    events = [EVENT % (n, n, n, n, n) for n in range(5)]
    run("append", "requests", stdin="\n".join(events).encode())
    run("docs", "put", "default/orders/o-1", "{}")
    return server


def _on_terminal(server: ServerProcess, *args: str, cwd: Path | None = None) -> str:
    env = environment({"TAILRACE_URL": server.base_url})
    with OnTerminal(command(*args), env=env, cwd=cwd) as screen:
        assert screen.wait_end() == 0, screen.shown
        return screen.shown


TABLES = [
    ("ls", ("entries", "bytes", "content type", "state")),
    ("details requests", ("complete", "fts")),
    ("details", ("resident",)),
    ("docs ls", ("collections",)),
    ("docs ls default", ("documents",)),
    ("search requests status:>=500", ("status", "req-1")),
    ("search requests status:>=500 --sort path", ("path ↑", "/a/long/path")),
    ("search requests status:>=500 --sort duration:desc", ("duration ↓",)),
    ("search requests status:>=500 --sort offset:desc", ("offset ↓",)),
    ("key list --file keys.json", ("expires", "never", "logs/of/some/long/prefix/")),
]


@pytest.mark.parametrize(("line", "expected"), TABLES, ids=[line for line, _ in TABLES])
def test_a_table_fits_80_columns(
    filled: ServerProcess, tmp_path: Path, line: str, expected: tuple[str, ...]
) -> None:
    grant = ("--scope", "write", "--streams", "builds/", "--streams", "logs/of/some/long/prefix/")
    tailrace("key", "create", "--file", "keys.json", "--sub", "ci", *grant, cwd=tmp_path)
    shown = _on_terminal(filled, *line.split(), cwd=tmp_path)
    lines = [one.rstrip() for one in shown.splitlines()]
    assert max(map(len, lines)) <= COLUMNS
    for text in expected:
        assert text in shown, shown


def test_a_long_name_is_shown_whole(filled: ServerProcess) -> None:
    lines = _on_terminal(filled, "ls").splitlines()
    names = "".join(line[: lines[0].index("entries")].split("  ")[0].strip() for line in lines[1:])
    assert LONG in names


def test_a_pipe_gets_a_row_in_one_line(filled: ServerProcess) -> None:
    env = environment({"TAILRACE_URL": filled.base_url})
    del env["COLUMNS"]
    done = subprocess.run(command("ls"), env=env, capture_output=True, text=True, check=True)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith(LONG)]
    assert row.split() == [LONG, "0", "0", "application/vnd.a-company.with-a-long-name+json", "open"]


@pytest.mark.parametrize(
    "line",
    [
        "ls",
        "read orders",
        "read orders --json",
        "search requests status:>=500",
        "search requests status:>=500 --json",
        "details requests",
        "docs ls",
        "completion bash",
        "serve --help-all",
        "--help",
    ],
)
def test_a_pipe_that_is_closed_is_no_error(filled: ServerProcess, line: str) -> None:
    """`| true` has ended before anything is written."""
    env = environment({"TAILRACE_URL": filled.base_url})
    script = f"{shlex.join(command(*line.split()))} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr


def test_no_color_is_respected(filled: ServerProcess) -> None:
    env = environment({"TAILRACE_URL": filled.base_url})
    shell = f"NO_COLOR=1 {' '.join(command('ls'))}"
    with OnTerminal(["bash", "-c", shell], env=env) as screen:
        assert screen.wait_end() == 0
        assert b"\x1b[3" not in screen.raw, "no colours"
