"""`tailrace serve` declares the flags that are named, and nobody can tell that from all of them."""

from __future__ import annotations

import re

import pytest

from support.cli import tailrace
from tailrace.cli.serve import ESSENTIAL, command, command_for
from tailrace.common.settings import SETTINGS_TABLE


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--port", "0"],
        ["--port=5000", "--data-dir", "here"],
        ["--insecure", "--host", "0.0.0.0"],
        ["--seal-interval-ms", "5s", "--port", "1", "--pipeline", "off"],
    ],
)
def test_they_mean_the_same(arguments: list[str]) -> None:
    few = command_for(arguments)
    assert few is not command
    assert few.parse_args(arguments)[1].arguments == command.parse_args(arguments)[1].arguments


@pytest.mark.parametrize("arguments", [["--help-all"], ["--prot", "1"], ["--port", "-1"]])
def test_a_mistake_and_help_all_see_all_of_them(arguments: list[str]) -> None:
    assert command_for(arguments) is command


def _shown(*arguments: str) -> set[str]:
    """The flags that a help page lists."""
    done = tailrace("serve", *arguments)
    assert done.code == 0, done.err
    return set(re.findall(r"^│ (?:\* +)?(--[a-z0-9-]+)", done.out, re.MULTILINE)) - {"--help", "--help-all"}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_the_twenty_settings_that_people_need(flag: str) -> None:
    assert _shown(flag) == {SETTINGS_TABLE[name].flag for name in ESSENTIAL}
    assert len(ESSENTIAL) == 20
    assert "--help-all" in tailrace("serve", flag).out


def test_help_all_shows_every_setting() -> None:
    assert _shown("--help-all") == {row.flag for row in SETTINGS_TABLE.values()}


def test_help_fits_a_terminal_of_80_columns() -> None:
    shown = tailrace("serve", "--help", env={"COLUMNS": "80"}).out
    assert max(map(len, shown.splitlines())) <= 80
