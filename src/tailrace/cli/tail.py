"""``tailrace tail``: follow a stream live."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from tailrace.cli.errors import UsageError
from tailrace.cli.options import parse_past_time
from tailrace.cli.session import DEFAULT_SESSION, Session, connect_client, exit_on_interrupt, flush_output

_HELP: Final = """Follow a stream: print what is appended from now on, until the stream is closed or Ctrl-C.

A lost connection is resumed, without gaps or duplicates.

For example:

    tailrace tail orders

    tailrace tail orders -n 10

    tailrace tail orders --from-start

    tailrace tail orders --since 15m

    tailrace tail orders --offset 00000000000000000004000000 --json

    tailrace tail requests --filter 'status:>=500'
"""

command = App(name="tail", help=_HELP, help_format="markdown")


@command.default
def tail(
    name: Annotated[str, Parameter(help="The stream.")],
    /,
    *,
    last: Annotated[
        int | None, Parameter(name=("-n", "--last"), help="First print this many of the last entries.")
    ] = None,
    from_start: Annotated[bool, Parameter(negative="", help="Start at the beginning of the stream.")] = False,
    offset: Annotated[
        str | None, Parameter(help="Where to start: now (the default), -1 (the start) or an offset.")
    ] = None,
    key: Annotated[str | None, Parameter(help="Only entries with this routing key.")] = None,
    since: Annotated[
        str | None,
        Parameter(help="Start at this time (RFC 3339), or with the last 90s, 15m, 1h or 7d."),
    ] = None,
    matching: Annotated[
        str | None,
        Parameter(name="--filter", help="Only entries that match, for example 'status:>=500'; by long-poll."),
    ] = None,
    mode: Annotated[
        Literal["sse", "long-poll"] | None, Parameter(help="How to wait for entries; sse by default.")
    ] = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    from tailrace.cli.read import entries_before, print_page

    if last is not None:
        _check_last(last, narrowed=bool(from_start or offset or since or key or matching))
    if mode == "sse" and matching is not None:
        raise UsageError("--filter requires --mode long-poll")
    if from_start and offset is not None:
        raise UsageError("use either --from-start or --offset, not both")
    since = None if since is None else parse_past_time(since, "--since")
    with connect_client(session) as client:
        # Report a missing stream at once; following would retry instead.
        info = client.stream(name).head()
        start = "-1" if from_start else "now" if offset is None else offset
        if last is not None:
            start = entries_before(info.next_offset, last, info.earliest_offset)
        how = mode or ("sse" if matching is None else "long-poll")
        exit_on_interrupt()
        for page in client.stream(name).follow(start, mode=how, key=key, since=since, filter=matching):
            print_page(page, as_json=session.json)
            flush_output()


def _check_last(last: int, *, narrowed: bool) -> None:
    if last < 0:
        raise UsageError("-n must be 0 or more")
    if narrowed:
        raise UsageError("-n cannot be combined with --from-start, --offset, --since, --key or --filter")
