"""One table of exit codes, and every command of the command line keeps to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from support.cli import tailrace
from support.server import ServerProcess
from tailrace.cli.app import build
from tailrace.cli.errors import EXIT_CODES

ROOT = Path(__file__).resolve().parents[3]
NOWHERE = "127.0.0.1:9"

# Arguments that make sense to each command that talks to a server; the rest of the command line has none.
ASKS_A_SERVER: dict[str, tuple[str, ...]] = {
    "aggregate": ("nothing", "requests"),
    "append": ("nothing", "1"),
    "close": ("nothing",),
    "create": ("nothing",),
    "details": ("nothing",),
    "docs get": ("default/nothing/a",),
    "docs ls": ("nothing",),
    "docs put": ("default/nothing/a", "[]"),
    "docs query": ("default/nothing", "--where", "doc."),
    "docs rm": ("default/nothing/a",),
    "fork": ("nothing", "copy"),
    "hub ask": ("@(svc/nothing)", "x"),
    "hub dead-letters": (),
    "hub kick": ("@(svc/nothing)",),
    "hub ls": (),
    "hub mailbox": ("@(svc/nothing)",),
    "hub replay": ("@(svc/nothing)", "--to", "@(svc/other)"),
    "hub send": ("@(svc/nothing)", "x"),
    "hub sub": ("orders/#",),
    "hub tail": ("@(svc/nothing)",),
    "key create": ("--sub", "a", "--scope", "read"),
    "key list": (),
    "key revoke": ("8c1f0a52be93d674",),
    "ls": (),
    "pipeline capture": ("--changes", "default/nothing", "--out", "capture"),
    "pipeline drain": (),
    "pipeline match": (),
    "pipeline rebuild": ("--stream", "nothing"),
    "pipeline rescan": ("--collection", "nothing"),
    "pipeline run": ("--once",),
    "pipeline shadow": ("--candidate", "installed", "--changes", "default/nothing"),
    "pipeline stats": (),
    "pipeline status": (),
    "profile get": ("nothing",),
    "profile set": ("nothing", "evlog"),
    "read": ("nothing",),
    "rm": ("nothing", "--yes"),
    "schema evolve": ("nothing", "--schema", "schema.json", "--lens", "lens.json"),
    "schema get": ("nothing",),
    "schema set": ("nothing", "--schema", "schema.json"),
    "seal": ("nothing",),
    "search": ("nothing", "x"),
    "source add": ("default/nothing", "--table", "a.b=c", "--dsn-env", "NOT_ALLOWED"),
    "source ls": ("nothing",),
    "source resync": ("default/nothing",),
    "source rm": ("default/nothing",),
    "source status": ("default/nothing",),
    "sql": ("select 1",),
    "tail": ("nothing",),
    "token revoke": ("some-id",),
    "watch": ("default/nothing",),
    "watch top": (),
}
# Refused with 1 by a server that has nothing of the kind.
REFUSED = (
    "aggregate", "append", "close", "details", "docs get", "docs put", "docs query", "docs rm", "fork",
    "hub ask", "hub kick", "hub send", "hub tail", "pipeline rebuild", "profile get", "profile set",
    "read", "rm", "schema evolve", "schema get", "schema set", "seal", "search", "source add",
    "source resync", "source rm", "source status", "tail",
)  # fmt: skip
# Its only codes are 0, 2 and 3: a release gate asks whether two versions differ (3) or were not compared (2).
SHADOW = "pipeline shadow"


def _commands(app: App, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command that does something, by the words that call it."""
    children = [name for name in app if not name.startswith("-")]
    if path and app.default_command is not None:
        yield " ".join(path)
    for name in children:
        yield from _commands(app[name], (*path, name))


COMMANDS = tuple(dict.fromkeys(_commands(build([]))))


def _takes(path: str, flag: str) -> bool:
    app = build([])
    for word in path.split():
        app = app[word]
    return any(flag in argument.names for argument in app.assemble_argument_collection())


def test_the_table_is_in_the_help_and_on_the_page() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    shown = tailrace("--help").out
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in page
        assert re.search(rf"\b{code} ", shown[shown.index("Exit codes") :])
    assert sorted(EXIT_CODES) == [0, 1, 2, 3, 4, 130]
    assert "partial" in EXIT_CODES[3]


def test_every_command_that_takes_an_address_is_walked() -> None:
    asking = {path for path in COMMANDS if _takes(path, "--url") or _takes(path, "--endpoint")}
    assert asking == set(ASKS_A_SERVER)


@pytest.mark.parametrize("path", COMMANDS)
def test_help_is_0_and_an_unknown_flag_is_2(path: str) -> None:
    words = path.split()
    assert tailrace(*words, "--help").code == 0
    wrong = tailrace(*words, "--no-such-flag")
    assert (wrong.code, wrong.out) == (2, ""), wrong.err
    assert wrong.err.startswith("tailrace: ")
    assert "--no-such-flag" in wrong.err or "requires an argument" in wrong.err
    assert wrong.err.endswith("(usage)\n")
    error = json.loads(tailrace(*words, "--no-such-flag", "--json").err)["error"]
    assert error["code"] == "usage"


@pytest.mark.parametrize("path", ASKS_A_SERVER)
def test_no_server_is_4(path: str, tmp_path: Path) -> None:
    for file in ("schema.json", "lens.json"):
        (tmp_path / file).write_text("{}")
    done = tailrace(*path.split(), *ASKS_A_SERVER[path], env={"TAILRACE_URL": NOWHERE}, cwd=tmp_path)
    assert (done.code, done.out) == (2 if path == SHADOW else 4, ""), done.err
    assert f"no server responds at http://{NOWHERE}" in done.err


@pytest.mark.parametrize("path", REFUSED)
def test_a_refusal_is_1(path: str, server: ServerProcess, tmp_path: Path) -> None:
    for file in ("schema.json", "lens.json"):
        (tmp_path / file).write_text("{}")
    env = {"TAILRACE_URL": server.base_url}
    done = tailrace(*path.split(), *ASKS_A_SERVER[path], env=env, cwd=tmp_path)
    assert (done.code, done.out) == (1, ""), done.err
    assert done.err.startswith("tailrace: ")
