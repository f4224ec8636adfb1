"""``tailrace close``: close a stream for appends."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.session import DEFAULT_SESSION, Session, connect_client, print_json

_HELP: Final = """Close a stream permanently: it can be read, but not appended to.

Live readers stop at its end. Closing it again has no effect.

For example:

    tailrace close orders
"""

command = App(name="close", help=_HELP, help_format="markdown")


@command.default
def close(
    name: Annotated[str, Parameter(help="The stream.")], /, *, session: Session = DEFAULT_SESSION
) -> None:
    with connect_client(session) as client:
        closed = client.stream(name).close()
    if session.json:
        print_json({"stream": name, "closed": True, "next_offset": closed.next_offset})
    else:
        print(f"closed {name}, final offset {closed.next_offset}")
