"""The completion scripts, loaded by the shells that they are for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import environment, tailrace
from support.terminal import OnTerminal

# bash is needed by the suite; the others are tried where they are installed.
SHELLS = [shell for shell in ("bash", "zsh", "fish") if shell == "bash" or shutil.which(shell)]

# What is typed, what has to be offered, what must not be.
CASES = [
    ("tailrace ", {"create", "append", "read", "rm", "completion", "serve"}, {"--url"}),
    ("tailrace cre", {"create"}, {"read"}),
    ("tailrace hub ", {"send", "mailbox", "dead-letters"}, {"append"}),
    ("tailrace tail --m", {"--mode"}, {"--key"}),
    ("tailrace tail orders --mode ", {"sse", "long-poll"}, {"append"}),
    ("tailrace create orders --profile ", {"evlog", "state-protocol"}, {"append"}),
    ("tailrace serve --log-l", {"--log-level"}, {"--port"}),
    ("tailrace completion ", {"bash", "zsh", "fish"}, {"append"}),
]
_BASH = """
source "$1"
COMP_WORDS=($2); [[ $2 == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE=$2; COMP_POINT=${#COMP_LINE}
complete -p tailrace >&2
_tailrace
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        printed = tailrace("completion", shell)
        assert printed.code == 0, printed.err
        name = {"bash": "tailrace.bash", "zsh": "_tailrace", "fish": "tailrace.fish"}[shell]
        (directory / name).write_text(printed.out)
    return directory


def _environment(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return environment({"PATH": path, "HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")})


def _offered(shell: str, scripts: Path, typed: str, home: Path) -> set[str]:
    env = _environment(home)
    if shell == "zsh":
        return _offered_by_zsh(scripts, typed, env)
    program = {
        "bash": ["bash", "--norc", "-c", _BASH, "bash", str(scripts / "tailrace.bash"), typed],
        "fish": ["fish", "-c", f"source {scripts / 'tailrace.fish'}; complete -C '{typed}'"],
    }[shell]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=True)
    return {line.split("\t")[0].strip() for line in done.stdout.splitlines()}


def _offered_by_zsh(scripts: Path, typed: str, env: dict[str, str]) -> set[str]:
    """zsh completes on a terminal only: Ctrl-D lists what Tab could insert."""
    with OnTerminal(["zsh", "-f", "-i"], env=env, columns=200, rows=100) as screen:
        # Quotes in the middle of what is waited for: the echo of what was typed is not it.
        screen.type(f"PROMPT='re''ady> '; fpath+={scripts}; autoload -Uz compinit; compinit -u -D\n")
        screen.wait_for("ready> ")
        before = len(screen.shown)
        screen.type(f"{typed}\x04")
        screen.type("\x15echo do''ne\n")
        screen.wait_for("done\n")
        return set(screen.shown[before:].replace(typed, "").split())


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(("typed", "offered", "not_offered"), CASES, ids=[case[0] for case in CASES])
def test_a_shell_completes(
    scripts: Path, tmp_path: Path, shell: str, typed: str, offered: set[str], not_offered: set[str]
) -> None:
    found = _offered(shell, scripts, typed, tmp_path)
    assert offered <= found, found
    assert not not_offered & found


def test_an_unknown_shell_is_named_with_the_choices() -> None:
    wrong = tailrace("completion", "csh")
    assert (wrong.code, '"bash", "zsh", "fish"' in wrong.err) == (2, True), wrong.err
