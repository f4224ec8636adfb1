"""`tailrace serve` declares the flags that are named, and nobody can tell that from all of them."""

from __future__ import annotations

import pytest

from tailrace.cli.serve import command, command_for


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


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--prot", "1"], ["--port", "-1"]])
def test_who_asks_or_errs_sees_all_of_them(arguments: list[str]) -> None:
    assert command_for(arguments) is command
