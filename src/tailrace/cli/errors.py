"""The one place where a failure becomes a message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, Final

from tailrace.common.process import EXIT_INTERRUPTED

OK: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
UNREADABLE: Final = 2
PARTIAL: Final = 3
UNREACHABLE: Final = 4

# The table that the help and docs/cli.md show, and that every command keeps to.
EXIT_CODES: Final[dict[int, str]] = {
    OK: "done; also Ctrl-C in a command that runs until then, and a reader of the output that left (`head`)",
    REFUSED: "refused, not found, or a check found something wrong",
    USAGE: "wrong usage, or a setting, file or object store that cannot be read",
    PARTIAL: "a partial answer: a search did not examine everything, or a comparison found differences",
    UNREACHABLE: "no server answers",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
}

# What the client calls it when no answer came.
_NO_SERVER: Final = frozenset({"connect_failed", "connection_lost"})
# A file or a disk that takes no more, most often that of standard output.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class RefusedError(Exception):
    """The command was understood and cannot be done."""


class UnreachableError(Exception):
    """No server answers."""


class IncompleteError(Exception):
    """The answer that was printed does not take everything into account."""


def check_complete(coverage: dict[str, Any], question: str) -> None:
    """Refuses to pass a partial answer off as a whole one. What was found is printed before."""
    if not coverage["complete"]:
        rows = coverage["possible_missing_events_upper_bound"]
        raise IncompleteError(
            f"INCOMPLETE ANSWER: {rows:,} rows were not examined in time, so matches may be missing;"
            f" repeat the {question}, the index of recent rows is being built"
        )


def unreachable(url: str, reason: object) -> UnreachableError:
    """What is told when there was no answer. A server that TLS kept us from is there all the same."""
    told = str(reason)
    if "CERTIFICATE_VERIFY_FAILED" in told:
        why = told[told.index("CERTIFICATE_VERIFY_FAILED") :].partition(": ")[2].partition(" (_ssl")[0]
        message = f"the certificate of {url} is not trusted ({why}); name yours in SSL_CERT_FILE"
    elif "WRONG_VERSION_NUMBER" in told or "RECORD_LAYER_FAILURE" in told:
        message = f"{url} does not speak TLS; is it an http:// address?"
    else:
        message = f"no server answers at {url}; start one with: tailrace serve"
    return UnreachableError(message)


class UnreadableError(Exception):
    """The object store cannot be read."""


class UsageError(Exception):
    """The command was not put in a way that makes sense."""

    def __init__(self, message: str, **extra: object) -> None:
        super().__init__(message)
        self.extra = extra


def report_error(error: Exception, *, as_json: bool) -> int:
    """Say on standard error what went wrong, and give the exit code. A bug is raised again as it is."""
    import orjson
    from cyclopts import CycloptsError

    from tailrace.common.errors import TailraceError
    from tailrace.common.settings import SettingsError

    message, extra = str(error), dict[str, object]()
    if isinstance(error, TailraceError):
        code, message, extra = error.code, error.message, error.extra
        exit_code = UNREACHABLE if code in _NO_SERVER else REFUSED
    elif isinstance(error, SettingsError | UsageError | CycloptsError):
        code, exit_code, message = "usage", USAGE, message.removesuffix(".")
        extra = error.extra if isinstance(error, UsageError) else extra
    elif isinstance(error, UnreachableError):
        code, exit_code = "unreachable", UNREACHABLE
    elif isinstance(error, IncompleteError):
        code, exit_code = "incomplete", PARTIAL
    elif isinstance(error, UnreadableError):
        code, exit_code = "unreadable", UNREADABLE
    elif isinstance(error, RefusedError):
        code, exit_code = "refused", REFUSED
    elif isinstance(error, BrokenPipeError):
        # The reader of our output left, as `head` does. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    elif isinstance(error, OSError) and error.errno in _NO_ROOM:
        code, exit_code, message = "unwritable", REFUSED, f"cannot write: {error.strerror}"
    else:
        raise error
    if as_json:
        body = {"error": {"code": code, "message": message, **extra}}
        print(orjson.dumps(body, default=str).decode(), file=sys.stderr)
    else:
        print(f"tailrace: {message} ({code})", file=sys.stderr)
    return exit_code
