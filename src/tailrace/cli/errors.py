"""Maps failures to messages and exit codes."""

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

# The exit codes of all commands, also shown in the help and in docs/cli.md.
EXIT_CODES: Final[dict[int, str]] = {
    OK: "done; also Ctrl-C in a command that runs until then, and a closed output pipe (`head`)",
    REFUSED: "refused, not found, or a check found something wrong",
    USAGE: "wrong usage, or a setting, file or object store that cannot be read",
    PARTIAL: "a partial result: a search did not examine everything, or a comparison found differences",
    UNREACHABLE: "server unreachable",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
}

# Error codes of the client without a response.
_NO_SERVER: Final = frozenset({"connect_failed", "connection_lost"})
# A file or disk that is full, most often that of standard output.
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class RefusedError(Exception):
    """The command is valid but was refused."""


class UnreachableError(Exception):
    """The server is unreachable."""


class IncompleteError(Exception):
    """The printed result is incomplete."""


def check_complete(coverage: dict[str, Any], question: str) -> None:
    """Raise if the result is partial; it has been printed before."""
    if not coverage["complete"]:
        rows = coverage["possible_missing_events_upper_bound"]
        raise IncompleteError(
            f"INCOMPLETE ANSWER: {rows:,} rows were not examined in time, so matches may be missing;"
            f" repeat the {question}, the index of recent rows is being built"
        )


def unreachable(url: str, reason: object) -> UnreachableError:
    """The error when there was no response; TLS errors have their own message, as a server is there."""
    text = str(reason)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = text[text.index("CERTIFICATE_VERIFY_FAILED") :].partition(": ")[2].partition(" (_ssl")[0]
        message = f"the certificate of {url} is not trusted ({why}); set SSL_CERT_FILE to your CA certificate"
    elif "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        message = f"{url} does not speak TLS; is it an http:// address?"
    else:
        message = f"no server responds at {url}; start one with: tailrace serve"
    return UnreachableError(message)


class UnreadableError(Exception):
    """The object store cannot be read."""


class UsageError(Exception):
    """The command line is invalid."""

    def __init__(self, message: str, **extra: object) -> None:
        super().__init__(message)
        self.extra = extra


def report_error(error: Exception, *, as_json: bool) -> int:
    """Print an error to standard error and return the exit code. Unexpected errors are raised again."""
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
        # The reader closed the pipe, as `head` does. Python would report it again when it flushes.
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
