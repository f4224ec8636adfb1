"""How a process ends: with its code, its last words and its tidying, and nothing after that."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from tailrace.common.process import run_and_exit

class Late:
    def __del__(self):
        print("taken apart")

late = Late()

def program():
    atexit.register(print, "tidied")
    print("said", end=" ")
    {last}

run_and_exit(program)
"""


def end_of(last: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(last=last)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("return 0", 0),
        ("return 3", 3),
        ("sys.exit(2)", 2),
        ("sys.exit()", 0),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_a_program_ends_with_its_code_and_its_last_words(last: str, code: int) -> None:
    assert end_of(last) == (code, "said tidied\n", "")


def test_an_unexpected_failure_is_told_as_always() -> None:
    code, said, told = end_of("raise ValueError('lost')")
    assert (code, said) == (1, "said tidied\n")
    assert "ValueError: lost" in told


def test_words_for_exit_are_told() -> None:
    assert end_of("sys.exit('no way')") == (1, "said tidied\n", "no way\n")
