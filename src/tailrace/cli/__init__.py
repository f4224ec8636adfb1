"""The ``tailrace`` command: one file per verb, each imported only when it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from tailrace.cli.errors import OK, report_error
from tailrace.common import process


def main() -> None:
    """Run the command line of this process and exit."""
    process.run_and_exit(partial(command, sys.argv[1:]))


def command(argv: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    from tailrace.cli.app import build

    arguments = list(argv)
    try:
        # Usage errors are printed like every other failure, as JSON where that was requested.
        code = build(arguments)(expand_flags(arguments), print_error=False, exit_on_error=False)
        sys.stdout.flush()  # lost output is a failure, reported while it still can be
    except SystemExit as leaving:
        # rich exits when the reader of its output has closed the pipe.
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        code = OK
    except Exception as error:  # noqa: BLE001 - the one place that turns failures into exit codes
        code = report_error(error, as_json="--json" in arguments)
    return code if isinstance(code, int) else 0


def expand_flags(arguments: Sequence[str]) -> list[str]:
    """`--auto-tune` may be given without a value, unlike all other flags."""
    following = [*arguments[1:], ""]
    return [
        f"{word}=yes" if word == "--auto-tune" and not after.isdigit() else word
        for word, after in zip(arguments, following, strict=True)
    ]
