"""``tailrace tail``: follow a stream live."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from tailrace.cli.session import DEFAULT, Session, connect, flush

_HELP: Final = """Follow a stream: print what is appended from now on, until the stream is closed or Ctrl-C.

A lost connection is taken up again where it broke, so nothing is missed and nothing comes twice.

For example:

    tailrace tail orders

    tailrace tail orders --from-start

    tailrace tail orders --offset 00000000000000000002000000 --json
"""

command = App(name="tail", help=_HELP, help_format="markdown")


@command.default
def tail(
    name: Annotated[str, Parameter(help="The stream.")],
    /,
    *,
    from_start: Annotated[bool, Parameter(negative="", help="Print everything first, then follow.")] = False,
    offset: Annotated[str, Parameter(help="Where to begin: now, -1 (the start) or an offset.")] = "now",
    key: Annotated[str | None, Parameter(help="Only entries with this routing key.")] = None,
    mode: Annotated[Literal["sse", "long-poll"], Parameter(help="How to wait for entries.")] = "sse",
    session: Session = DEFAULT,
) -> None:
    from tailrace.cli.read import show

    with connect(session) as client:
        # A name that does not exist is told at once; following would wait for the server instead.
        client.stream(name).head()
        start = "-1" if from_start else offset
        try:
            for page in client.stream(name).follow(start, mode=mode, key=key):
                show(page, as_json=session.json)
                flush()
        except KeyboardInterrupt:
            return
