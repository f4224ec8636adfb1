"""``tailrace fork``: create a stream with the entries of another."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.create import ExpiresAt, Retention, RetentionBytes, Ttl, lifetime_options
from tailrace.cli.session import DEFAULT_SESSION, Session, connect_client, print_json

_HELP: Final = """Create a stream with the entries of another, up to an offset or to its tail.

Nothing is copied, so it is fast for a large stream. Afterwards the two are independent. Retention options
are inherited from the source unless they are given.

For example:

    tailrace fork orders orders-what-if

    tailrace fork orders orders-2025 --offset 00000000000000000004000000
"""

command = App(name="fork", help=_HELP, help_format="markdown")


@command.default
def fork(
    source: Annotated[str, Parameter(help="The stream to fork.")],
    target: Annotated[str, Parameter(help="The stream to create.")],
    /,
    *,
    offset: Annotated[str | None, Parameter(help="Where to fork; the tail by default.")] = None,
    ttl: Ttl = None,
    expires_at: ExpiresAt = None,
    retention: Retention = None,
    retention_bytes: RetentionBytes = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    lifetime = lifetime_options(ttl, expires_at, retention, retention_bytes)
    with connect_client(session) as client:
        made = client.stream(source).fork(target, offset=offset, **lifetime).head()
    if session.json:
        print_json({"stream": target, "source": source, "next_offset": made.next_offset})
    else:
        print(f"forked {source} to {target}, next offset {made.next_offset}")
