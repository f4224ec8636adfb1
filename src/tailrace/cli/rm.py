"""``tailrace rm``: delete streams."""

from __future__ import annotations

import sys
from typing import Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import OK, REFUSED, RefusedError, UsageError, report_error
from tailrace.cli.session import DEFAULT_SESSION, Session, connect_client, print_json

_HELP: Final = """Delete streams and all of their entries. This cannot be undone.

On a terminal it asks for confirmation. Pass `--yes` in scripts, or to skip the question.

For example:

    tailrace rm orders-what-if

    tailrace rm sessions/1 sessions/2 --yes
"""

command = App(name="rm", help=_HELP, help_format="markdown")


@command.default
def rm(
    *names: Annotated[str, Parameter(help="The streams.", required=True)],
    yes: Annotated[
        bool, Parameter(name=("--yes", "-y"), negative="", help="Do not ask for confirmation.")
    ] = False,
    session: Session = DEFAULT_SESSION,
) -> int:
    from tailrace.client import ClientError

    if not yes:
        _ask(names)
    failed = False
    with connect_client(session) as client:
        for name in names:
            try:
                client.stream(name).delete()
            except ClientError as error:
                if not error.status:
                    raise  # the server is unreachable, also for the next request
                failed = True
                report_error(error, as_json=session.json)
                continue
            if session.json:
                print_json({"stream": name, "deleted": True})
            else:
                print(f"deleted {name}")
    return REFUSED if failed else OK


def _ask(names: tuple[str, ...]) -> None:
    """Ask for confirmation on the terminal."""
    if not sys.stdin.isatty():
        raise UsageError("cannot ask for confirmation without a terminal: pass --yes to delete")
    what = f"stream {names[0]}" if len(names) == 1 else f"{len(names)} streams ({', '.join(names)})"
    print(f"Delete {what} and all entries? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError("nothing was deleted")
