"""``tailrace search``: search the records of a stream."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import RefusedError, check_complete
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    flush_output,
    send_request,
    server_error,
    single_line_json,
    stream_path,
    write_output,
)

_HELP: Final = """Search all acknowledged records of a stream, including the most recent ones.

The query is like `service:checkout status:>=500 "payment failed"`: fields, words, phrases, AND, OR, NOT.

For example:

    tailrace search events 'level:error timeout'

    tailrace search events 'status:>=500' --sort duration:desc --size 10

    tailrace search events 'service:checkout' --json | jq .source.message

The table shows fields that have values; `--json` prints whole records with their offsets.

Exit code 3, with a message on standard error, means that not all rows were examined in time.
"""
_COLUMN_CHARS_MAX: Final = 40
_GAP_CHARS: Final = 2

command = App(name="search", help=_HELP, help_format="markdown")


@command.default
def search(
    stream: Annotated[str, Parameter(help="The stream.")],
    query: Annotated[str, Parameter(help="The query.")],
    /,
    *,
    size: Annotated[int, Parameter(help="Maximum number of hits, 1 to 500.")] = 20,
    sort: Annotated[
        list[str] | None,
        Parameter(negative="", help="A field, _score or offset, with :asc or :desc; may be repeated."),
    ] = None,
    after: Annotated[
        str, Parameter(help="Where to continue: the array printed after the previous page.")
    ] = "",
    timeout_ms: Annotated[int | None, Parameter(help="Return the hits found within this time.")] = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    import orjson

    body: dict[str, object] = {"q": query, "size": size}
    if sort:
        body["sort"] = sort
    if after:
        try:
            body["search_after"] = orjson.loads(after)
        except orjson.JSONDecodeError:
            raise RefusedError("--after must be the JSON array printed after the previous page") from None
    if timeout_ms is not None:
        body["timeout_ms"] = timeout_ms
    from tailrace.client import model

    answer = _send_search(session, stream, body)
    found = json.loads(answer)
    if session.json:
        for hit in model.raw_elements(model.raw_members(answer)["hits"]):
            write_output(single_line_json(hit) + b"\n")
        flush_output()
    else:
        _show(query, found["hits"], sort or [])
    _print_summary(found)
    check_complete(found["coverage"], "search")


def _send_search(session: Session, stream: str, body: dict[str, object]) -> bytes:
    """The body of the response, also of a search that timed out."""
    import orjson

    answer = send_request(session, "POST", stream_path(stream, "_search"), orjson.dumps(body))
    if answer.status_code not in (200, 408) or b'"hits"' not in answer.content:
        raise server_error(answer)
    return answer.content


def _show(query: str, hits: list[dict[str, Any]], sort: list[str]) -> None:
    """Print the fields with values, as many as fit: sort fields first, then those of the query."""
    from rich.table import Table
    from rich.text import Text

    from tailrace.cli.tables import make_console as open_console

    console = open_console()
    columns: dict[str, list[str]] = {}
    for name, arrow in _sorted_by(sort):
        columns[f"{name} {arrow}"] = [_cell(hit["fields"].get(name, hit.get(name))) for hit in hits]
    if any(hit["score"] for hit in hits):
        columns["score"] = [f"{hit['score']:.3f}" for hit in hits]
    names = [name for hit in hits for name, value in hit["fields"].items() if value is not None]
    for name in sorted(dict.fromkeys(names), key=lambda name: f"{name}:" not in query):
        if name not in dict(_sorted_by(sort)):
            columns[name] = [_cell(hit["fields"].get(name)) for hit in hits]
    if not names:
        columns["record"] = [_cell(hit["source"]) for hit in hits]
    table = Table(box=None, pad_edge=False, header_style="bold")
    room = console.width
    rows: list[list[Text]] = [[] for _ in hits]
    for name, cells in columns.items():
        width = min(_COLUMN_CHARS_MAX, max(map(len, (name, *cells))))
        if table.columns and width > room:
            continue
        room -= width + _GAP_CHARS
        table.add_column(name, no_wrap=True, overflow="ellipsis")
        for row, cell in zip(rows, cells, strict=True):
            row.append(Text(cell))
    for row in rows:
        table.add_row(*row)
    if hits:
        console.print(table)


def _sorted_by(sort: list[str]) -> list[tuple[str, str]]:
    """The fields of `--sort`, with an arrow up or down, except for the score, which has its own column."""
    parts = [text.partition(":") for text in sort]
    return [(name, "↓" if way == "desc" else "↑") for name, _, way in parts if name != "_score"]


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    # A terminal cannot show lone surrogates.
    return text.encode(errors="replace").decode()


def _print_summary(found: dict[str, Any]) -> None:
    """Print the summary to standard error, so that a pipe only gets the hits."""
    import orjson

    total = found["total"]
    least = "" if total["relation"] == "eq" else "at least "
    line = f"{len(found['hits'])} of {least}{total['value']:,} in {found['took_ms']} ms"
    if found["next_search_after"] is not None:
        line += f"\nnext page: --after '{orjson.dumps(found['next_search_after']).decode()}'"
    sys.stderr.write(line + "\n")
