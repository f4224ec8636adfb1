"""The one place where a failure becomes a message and an exit code."""

from __future__ import annotations

import sys
from typing import Final

OK: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3


class UnreachableError(Exception):
    """No server answered."""


class RefusedError(Exception):
    """The command was understood and cannot be done."""


def explain(error: Exception, *, as_json: bool) -> int:
    """Say on standard error what went wrong, and give the exit code. A bug is raised again as it is."""
    import orjson

    from tailrace.errors import TailraceError
    from tailrace.settings import SettingsError

    extra: dict[str, object] = {}
    if isinstance(error, TailraceError):
        code, exit_code, extra = error.code, REFUSED, error.extra
    elif isinstance(error, SettingsError):
        code, exit_code = "usage", USAGE
    elif isinstance(error, UnreachableError):
        code, exit_code = "unreachable", UNREACHABLE
    elif isinstance(error, RefusedError):
        code, exit_code = "refused", REFUSED
    elif isinstance(error, BrokenPipeError):
        # The reader of our output left, as `head` does. Nothing is wrong, and nothing more can be said.
        sys.stderr.close()
        return OK
    else:
        raise error
    if as_json:
        body = {"error": {"code": code, "message": str(error), **extra}}
        print(orjson.dumps(body).decode(), file=sys.stderr)
    else:
        print(f"tailrace: {error} ({code})", file=sys.stderr)
    return exit_code
