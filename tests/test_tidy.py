"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tailrace
from tailrace.common.settings import SETTINGS_TABLE

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
# One letter of each is in brackets, so that this file does not find itself.
UNFINISHED = re.compile(r"TOD[O]|FIXM[E]|NotImplementedErro[r]")
MACHINE = re.compile(r"/roo[t]/|/wor[k]/|/hom[e]/|bash_job[s]|index-ur[l]|registry[=]")
RESOLVED = re.compile(r'"resolved":\s*"https?://')
OLD_WORDS = re.compile(
    r"\b(whoever|nobody|somebody|everybody|convoys?|burying|burials?|leash)\b", re.IGNORECASE
)
LOG_LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
UNTESTED = re.compile(r"mark\.(ski[p]|xfai[l])|pytest\.(ski[p]|xfai[l])\(")


@cache
def _tracked() -> tuple[Path, ...]:
    """Files git knows or would take, so that a new file is judged before it is committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return tuple(path for path in paths if path.is_file())


def _files(*suffixes: str, under: str = "") -> Iterator[Path]:
    for path in _tracked():
        if path.suffix in suffixes and path.is_relative_to(ROOT / under):
            yield path


def _matches(pattern: re.Pattern[str], paths: Iterator[Path]) -> list[str]:
    found: list[str] = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}")
    return found


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in _files(".py")}
    assert [f"{path}: {count}" for path, count in lengths.items() if count > FILE_LINES_MAX] == []


def test_functions_stay_short() -> None:
    found: list[str] = []
    for path in _files(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert found == []


def test_nothing_is_left_unfinished() -> None:
    assert _matches(UNFINISHED, _files(".py", under="src")) == []


def test_nothing_names_the_machine_it_was_written_on() -> None:
    assert (
        _matches(
            MACHINE,
            _files(".py", ".md", ".toml", ".json", ".js", ".mjs", ".ts", ".c", ".txt", ".yml", ".sh", ""),
        )
        == []
    )
    assert _matches(RESOLVED, _files(".json")) == []


def test_source_uses_the_words_of_the_glossary() -> None:
    assert _matches(OLD_WORDS, _files(".py", under="src")) == []


def test_log_lines_are_constant_texts() -> None:
    """Values go into fields (`extra=log_fields(...)`): an operator searches for the text."""
    found: list[str] = []
    for path in _files(".py", under="src"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LOG_LEVELS
                and "logger" in ast.unparse(node.func.value)
                and (len(node.args) != 1 or not isinstance(node.args[0], ast.Constant | ast.Name))
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert found == []


def test_no_test_is_switched_off() -> None:
    assert _matches(UNTESTED, _files(".py", under="tests")) == []


def test_every_package_says_what_it_is_for() -> None:
    """A module without a docstring makes its reader guess."""
    silent = [
        str(path.relative_to(ROOT))
        for path in _files(".py", under="src")
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert [name for name in SETTINGS_TABLE if f"`{name}`" not in page] == []
    assert [name for name, setting in SETTINGS_TABLE.items() if not setting.help.endswith(".")] == []


def _locked(path: Path) -> dict[str, str]:
    pins = re.findall(r"^([a-z0-9-]+)==([^\s;\\]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(pins)


def test_the_locks_satisfy_what_the_project_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = declared["dependency-groups"]
    run = [*declared["project"]["dependencies"], *groups["build"]]
    dev = run + [line for line in groups["dev"] if isinstance(line, str)]
    wrong: list[str] = []
    for lock, lines in (("run.txt", run), ("dev.txt", dev)):
        pins = _locked(ROOT / "requirements" / lock)
        for requirement in map(Requirement, lines):
            pin = pins.get(canonicalize_name(requirement.name))
            if pin is None or pin not in requirement.specifier:
                wrong.append(f"{lock}: {requirement} is locked at {pin}: run make lock")
    assert wrong == []
    assert (
        _locked(ROOT / "requirements" / "run.txt").items()
        <= _locked(ROOT / "requirements" / "dev.txt").items()
    )


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", text, re.MULTILINE)
    assert newest is not None
    assert newest[1] == tailrace.__version__
