"""``tailrace read``: a stream up to its tail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import RefusedError, UsageError
from tailrace.cli.options import parse_past_time
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    connect_client,
    flush_output,
    print_json,
    single_line_json,
    write_output,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tailrace.client import Page

_HELP: Final = """Read a stream up to its tail and stop.

A JSON stream is printed one message per line, any other byte for byte. With `--json` every page is one line
that also has the offset to continue from (`next_offset`; null if `--limit` cuts a page of
`--key` or `--filter`).

For example:

    tailrace read orders

    tailrace read orders --offset 00000000000000000004000000

    tailrace read orders --key customer-7 --json

    tailrace read orders --limit 10

    tailrace read orders --since 1h

    tailrace read requests --since 2026-01-31T12:00:00Z --filter 'status:>=500 -level:debug'
"""

command = App(name="read", help=_HELP, help_format="markdown")


@command.default
def read(
    name: Annotated[str, Parameter(help="The stream.")],
    /,
    *,
    offset: Annotated[str | None, Parameter(help="Where to start; the beginning by default.")] = None,
    key: Annotated[str | None, Parameter(help="Only entries with this routing key.")] = None,
    limit: Annotated[
        int | None, Parameter(name=("--limit", "-n"), help="Maximum number of entries, of a JSON stream.")
    ] = None,
    since: Annotated[
        str | None,
        Parameter(help="Only entries since this time (RFC 3339), or of the last 90s, 15m, 1h or 7d."),
    ] = None,
    matching: Annotated[
        str | None, Parameter(name="--filter", help="Only entries that match, for example 'status:>=500'.")
    ] = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    if limit is not None and limit < 1:
        raise UsageError("--limit must be 1 or more")
    since = None if since is None else parse_past_time(since, "--since")
    with connect_client(session) as client:
        pages = client.stream(name).pages(offset, key=key, since=since, filter=matching)
        for page in (
            pages if limit is None else _limited(pages, limit, whole=key is None and matching is None)
        ):
            print_page(page, as_json=session.json)
    flush_output()


def _limited(pages: Iterable[Page], limit: int, *, whole: bool) -> Iterator[Page]:
    """The pages up to `limit` entries. `whole`: no entries are filtered out, so offsets can be computed."""
    import msgspec

    for page in pages:
        if not page.is_json:
            raise RefusedError(
                f"--limit works on application/json only: a page of {page.content_type} does not show entries"
            )
        entries = page.raw_entries
        if len(entries) <= limit:
            yield page
        else:
            body = b"[" + b",".join(entries[:limit]) + b"]"
            # The next offset can be computed only if no entries are filtered out.
            after = entries_before(page.next_offset, len(entries) - limit) if whole else ""
            yield msgspec.structs.replace(page, body=body, next_offset=after, up_to_date=False, closed=False)
        limit -= len(entries)
        if limit <= 0:
            return


def entries_before(offset: str, count: int, earliest: str | None = None) -> str:
    """The offset `count` entries before another one, but not before the earliest."""
    from tailrace.protocol.offsets import encode_offset, parse_offset

    epoch, entry = parse_offset(offset)
    first = 0 if earliest is None else parse_offset(earliest)[1]
    return encode_offset(epoch, max(entry - count, first))


def print_page(page: Page, *, as_json: bool) -> None:
    """Print one page."""
    if as_json:
        print_json(_described(page))
    elif page.is_json:
        write_output(b"".join(single_line_json(message) + b"\n" for message in page.raw_entries))
    else:
        write_output(page.body)


def _described(page: Page) -> dict[str, object]:
    import base64

    import orjson

    described: dict[str, object] = {}
    if page.is_json:
        described["entries"] = [orjson.Fragment(single_line_json(message)) for message in page.raw_entries]
    else:
        described["content_type"] = page.content_type
        try:
            described["text"] = page.body.decode()
        except UnicodeDecodeError:
            described["base64"] = base64.b64encode(page.body).decode()
    described |= {
        "next_offset": page.next_offset or None,
        "up_to_date": page.up_to_date,
        "closed": page.closed,
    }
    return described
