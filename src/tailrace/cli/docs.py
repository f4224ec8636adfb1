"""``tailrace docs``: documents of a collection, from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

from cyclopts import App, Parameter

from tailrace.cli.errors import UsageError
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    flush_output,
    print_empty,
    print_json,
    send_request,
    server_error,
)
from tailrace.cli.tables import Column, print_table

_HELP: Final = """Read, write and query documents. A path starts with the database; `default` always exists.

For example:

    tailrace docs put default/orders/o-1 '{"total": 5, "status": "open"}'

    tailrace docs get default/orders/o-1

    tailrace docs query default/orders --where 'doc.total > 3' --order total:desc

    tailrace docs rm default/orders/o-1

    tailrace docs ls

    tailrace docs ls default
"""

PAGE: Final = 1000

command = App(name="docs", help=_HELP, help_format="markdown")


def split_database(path: str) -> tuple[str, str]:
    """Split a path into the database and the rest."""
    database, slash, rest = path.partition("/")
    if not slash or not rest:
        raise UsageError(f"{path!r} must start with a database, as in default/orders")
    return database, rest


def request_json(
    session: Session,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    query: str = "",
) -> Any:
    """Send one request; returns the JSON of the response, or None."""
    import orjson

    content = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
    answer = send_request(session, method, quote(path) + (f"?{query}" if query else ""), content, headers)
    if not answer.is_success:
        raise server_error(answer)
    return orjson.loads(answer.content) if answer.content else None


def document_path(path: str) -> str:
    database, rest = split_database(path)
    return f"/v1/databases/{database}/docs/{rest}"


@command.command
def get(
    path: Annotated[str, Parameter(help="Database, collection and id.")],
    /,
    *,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Print a document."""
    print_json(request_json(session, "GET", document_path(path)))


@command.command
def put(
    path: Annotated[str, Parameter(help="Database, collection and id.")],
    data: Annotated[str, Parameter(help="The document as JSON; - reads it from standard input.")],
    /,
    *,
    if_version: Annotated[int | None, Parameter(help="Only if the document has this version.")] = None,
    if_absent: Annotated[bool, Parameter(negative="", help="Only if it does not exist.")] = False,
    patch: Annotated[bool, Parameter(negative="", help="Change only the given fields.")] = False,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Create or replace a document."""
    headers: dict[str, str] = {}
    if if_version is not None:
        headers["If-Match"] = f'"{if_version}"'
    if if_absent:
        headers["If-None-Match"] = "*"
    raw = sys.stdin.buffer.read() if data == "-" else data.encode()
    print_json(request_json(session, "PATCH" if patch else "PUT", document_path(path), raw, headers))


@command.command
def rm(
    path: Annotated[str, Parameter(help="Database, collection and id.")],
    /,
    *,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Delete a document."""
    request_json(session, "DELETE", document_path(path))


@command.command
def ls(
    database: Annotated[
        str, Parameter(help="List the collections of this database; by default the databases.")
    ] = "",
    /,
    *,
    limit: Annotated[int | None, Parameter(help="Maximum number.")] = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """List databases, or the collections of one, by name."""
    if limit is not None and limit < 1:
        raise UsageError("--limit must be 1 or more")
    path = f"/v1/databases/{database}/collections" if database else "/v1/databases"
    found = islice(_listed(session, path, min(limit or PAGE, PAGE)), limit)
    if session.json:
        for row in found:
            print_json(row)
        flush_output()
    else:
        _show(found, "no collections" if database else "no databases")


def _listed(session: Session, path: str, page: int) -> Iterator[dict[str, Any]]:
    """The rows, requested page by page."""
    after = ""
    while rows := request_json(session, "GET", path, query=urlencode({"limit": page, "after": after})):
        yield from rows
        if len(rows) < page:
            return
        after = next(iter(rows[-1].values()))


def _show(rows: Iterator[dict[str, Any]], nothing: str) -> None:
    first = next(rows, None)
    if first is None:
        print(nothing)
        return
    columns = [
        Column(name, right=isinstance(value, int), fold=number == 0)
        for number, (name, value) in enumerate(first.items())
    ]
    print_table(columns, (row.values() for row in chain([first], rows)))


@command.command
def query(
    collection: Annotated[str, Parameter(help="Database and collection.")],
    /,
    *,
    where: Annotated[str, Parameter(help="An expression, such as doc.total > 3.")] = "",
    order: Annotated[
        list[str] | None, Parameter(negative="", help="A field, optionally with :desc; may be repeated.")
    ] = None,
    limit: Annotated[int, Parameter(help="Maximum number, 1 to 1000.")] = 100,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Print the documents that match, one per line."""
    database, name = split_database(collection)
    asked: dict[str, Any] = {"collection": name, "limit": limit}
    if where:
        asked["where"] = where
    if order:
        asked["orderBy"] = [_order(text) for text in order]
    found = request_json(session, "POST", f"/v1/databases/{database}/query", asked)
    for document in found["documents"]:
        print_json(document if session.json else {"id": document["id"], **document["data"]})
    flush_output()
    if not found["documents"] and not session.json:
        print_empty("documents")
    if found["cursor"] is not None:
        sys.stderr.write(f"more than {limit:,} documents match; --limit can be up to 1,000\n")


def _order(text: str) -> dict[str, str]:
    field, _, direction = text.partition(":")
    if not field or direction not in ("", "asc", "desc"):
        raise UsageError(f"--order: {text!r} must be a field, optionally with :asc or :desc")
    return {"field": field, "direction": direction or "asc"}
