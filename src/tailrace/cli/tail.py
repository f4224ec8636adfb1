"""``tailrace tail``: follow a stream live."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from tailrace.cli.failures import UsageError
from tailrace.cli.session import DEFAULT, Session, connect, end_at_interrupt, flush

_HELP: Final = """Follow a stream: print what is appended from now on, until the stream is closed or Ctrl-C.

A lost connection is taken up again where it broke, so nothing is missed and nothing comes twice.

For example:

    tailrace tail orders

    tailrace tail orders --from-start

    tailrace tail orders --offset 00000000000000000002000000 --json

    tailrace tail orders --filter 'status:>=500'
"""

command = App(name="tail", help=_HELP, help_format="markdown")


@command.default
def tail(
    name: Annotated[str, Parameter(help="The stream.")],
    /,
    *,
    from_start: Annotated[bool, Parameter(negative="", help="Print everything first, then follow.")] = False,
    offset: Annotated[
        str | None, Parameter(help="Where to begin: now (if not given), -1 (the start) or an offset.")
    ] = None,
    key: Annotated[str | None, Parameter(help="Only entries with this routing key.")] = None,
    since: Annotated[
        str | None, Parameter(help="Begin with the entries of this time (RFC 3339) instead.")
    ] = None,
    matching: Annotated[
        str | None,
        Parameter(name="--filter", help="Only entries that match, for example 'status:>=500'; by long-poll."),
    ] = None,
    mode: Annotated[
        Literal["sse", "long-poll"] | None, Parameter(help="How to wait for entries; sse if not given.")
    ] = None,
    session: Session = DEFAULT,
) -> None:
    from tailrace.cli.read import show

    if mode == "sse" and matching is not None:
        raise UsageError("a filter needs --mode long-poll")
    if from_start and offset is not None:
        raise UsageError("--from-start and --offset say two things about the beginning")
    with connect(session) as client:
        # A name that does not exist is told at once; following would wait for the server instead.
        client.stream(name).head()
        start = "-1" if from_start else "now" if offset is None else offset
        how = mode or ("sse" if matching is None else "long-poll")
        end_at_interrupt()
        for page in client.stream(name).follow(start, mode=how, key=key, since=since, filter=matching):
            show(page, as_json=session.json)
            flush()
