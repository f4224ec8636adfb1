"""``tailrace ls``: the streams of a server."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import UsageError
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    connect_client,
    flush_output,
    print_empty,
    print_json,
)
from tailrace.cli.tables import Column, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tailrace.client import StreamDescriptor

_HELP: Final = """List streams by name.

For example:

    tailrace ls

    tailrace ls logs/ --limit 20

    tailrace ls --json | jq -r .name
"""

command = App(name="ls", help=_HELP, help_format="markdown")


@command.default
def ls(
    prefix: Annotated[str, Parameter(help="Only names with this prefix.")] = "",
    /,
    *,
    limit: Annotated[int | None, Parameter(help="Maximum number.")] = None,
    system: Annotated[bool, Parameter(negative="", help="Include system streams.")] = False,
    session: Session = DEFAULT_SESSION,
) -> None:
    if limit is not None and limit < 1:
        raise UsageError("--limit must be 1 or more")
    with connect_client(session) as client:
        page_size = min(limit or 1000, 1000)
        found = islice(client.streams(prefix, page_size=page_size, system=system), limit)
        if session.json:
            import msgspec

            for stream in found:
                print_json(msgspec.structs.asdict(stream))
            flush_output()
        else:
            _show(found)


def _show(streams: Iterable[StreamDescriptor]) -> None:
    columns = (
        Column("name", fold=True),
        Column("entries", right=True),
        Column("bytes", right=True),
        Column("content type", fold=True),
        Column("state"),
    )
    rows = (
        (
            stream.name,
            int(stream.next_offset or 0),
            int(stream.total_size_bytes or 0),
            stream.content_type or "",
            "closed" if stream.closed else "open",
        )
        for stream in streams
    )
    if not print_table(columns, rows):
        print_empty("streams")
