"""``tailrace read``: a stream up to its tail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from tailrace.cli.session import DEFAULT, Session, connect, flush, one_line, put, put_json

if TYPE_CHECKING:
    from tailrace.client import Page

_HELP: Final = """Read a stream up to its tail and stop.

A JSON stream is printed one message per line, any other byte for byte. With `--json` every page is one line
that also says where to go on.

For example:

    tailrace read orders

    tailrace read orders --offset 00000000000000000002000000

    tailrace read orders --key customer-7 --json

    tailrace read orders --since 2026-01-31T12:00:00Z --filter 'status:>=500 -has:retry'
"""

command = App(name="read", help=_HELP, help_format="markdown")


@command.default
def read(
    name: Annotated[str, Parameter(help="The stream.")],
    /,
    *,
    offset: Annotated[str | None, Parameter(help="Where to begin; the start if not given.")] = None,
    key: Annotated[str | None, Parameter(help="Only entries with this routing key.")] = None,
    since: Annotated[
        str | None, Parameter(help="Only entries appended at this time or later (RFC 3339).")
    ] = None,
    matching: Annotated[
        str | None, Parameter(name="--filter", help="Only entries that match, for example 'status:>=500'.")
    ] = None,
    session: Session = DEFAULT,
) -> None:
    with connect(session) as client:
        for page in client.stream(name).pages(offset, key=key, since=since, filter=matching):
            show(page, as_json=session.json)
    flush()


def show(page: Page, *, as_json: bool) -> None:
    """Print one page."""
    if as_json:
        put_json(_described(page))
    elif page.is_json:
        put(b"".join(one_line(message) + b"\n" for message in page.raw_entries))
    else:
        put(page.body)


def _described(page: Page) -> dict[str, object]:
    import base64

    import orjson

    described: dict[str, object] = {}
    if page.is_json:
        described["entries"] = [orjson.Fragment(one_line(message)) for message in page.raw_entries]
    else:
        described["content_type"] = page.content_type
        try:
            described["text"] = page.body.decode()
        except UnicodeDecodeError:
            described["base64"] = base64.b64encode(page.body).decode()
    described |= {"next_offset": page.next_offset, "up_to_date": page.up_to_date, "closed": page.closed}
    return described
