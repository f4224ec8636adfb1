"""``tailrace schema``: the registry of a stream: schema versions, lenses, routing key and search fields."""

from __future__ import annotations

from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import UsageError
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    adopt_json,
    flush_output,
    get_json,
    post_json,
    print_json,
    stream_path,
    write_output,
)

_HELP: Final = """Show and change the schema of a stream.

For example:

    tailrace schema get orders

    tailrace schema set orders --schema orders.v1.json --routing-key /user

    tailrace schema set old-orders --schema orders.v1.json --adopt

    tailrace schema evolve orders --schema orders.v2.json --lens ops.json
"""

Stream = Annotated[str, Parameter(help="The stream.")]
_LENS: Final = "durable.lens/v1"

command = App(name="schema", help=_HELP, help_format="markdown")


@command.command
def get(stream: Stream, /, *, session: Session = DEFAULT_SESSION) -> None:
    """Print the registry of a stream."""
    _show(get_json(session, stream_path(stream, "_schema")), session)


@command.command(name="set")
def set_(
    stream: Stream,
    /,
    *,
    schema: Annotated[
        str | None,
        Parameter(
            help="File with the first version, a JSON Schema; - is standard input.", allow_leading_hyphen=True
        ),
    ] = None,
    search: Annotated[
        str | None, Parameter(help="File with the searchable fields; `none` removes them.")
    ] = None,
    routing_key: Annotated[
        str | None, Parameter(help="JSON pointer to the key in each record; `none` removes it.")
    ] = None,
    required: Annotated[bool, Parameter(negative="", help="Refuse records without a routing key.")] = False,
    adopt: Annotated[
        bool,
        Parameter(negative="", help="Check the existing entries, and apply the schema to them as well."),
    ] = False,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Install the first schema version, the routing key or the searchable fields."""
    body: dict[str, Any] = {}
    if schema is not None:
        body["schema"] = _read(schema)
    if search is not None:
        body["search"] = None if search == "none" else _read(search)
    if routing_key is not None:
        key = {"jsonPointer": routing_key, "required": required}
        body["routingKey"] = None if routing_key == "none" else key
    elif required:
        raise UsageError("--required requires --routing-key")
    if not body:
        raise UsageError("nothing to set: give --schema, --search or --routing-key")
    post = adopt_json if adopt else post_json
    _show(post(session, stream_path(stream, "_schema"), body), session)


@command.command
def evolve(
    stream: Stream,
    /,
    *,
    schema: Annotated[
        str,
        Parameter(
            help="File with the next version, a JSON Schema; - is standard input.", allow_leading_hyphen=True
        ),
    ],
    lens: Annotated[
        str, Parameter(help="File with the lens to it: the whole lens, or only its array of operations.")
    ],
    search: Annotated[str | None, Parameter(help="File with the new searchable fields.")] = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Add the next schema version. Older entries are then read through the lens."""
    path = stream_path(stream, "_schema")
    body: dict[str, Any] = {"schema": _read(schema), "lens": _read(lens)}
    if isinstance(body["lens"], list):
        version: int = get_json(session, path)["currentVersion"]
        envelope: dict[str, Any] = {"apiVersion": _LENS, "schema": stream, "from": version, "to": version + 1}
        body["lens"] = {**envelope, "ops": body["lens"]}
    if search is not None:
        body["search"] = _read(search)
    _show(post_json(session, path, body), session)


def _read(file: str) -> Any:
    import sys
    from pathlib import Path

    import orjson

    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{file} is not JSON: {error}") from None


def _show(registry: dict[str, Any], session: Session) -> None:
    import orjson

    if session.json:
        print_json(registry)
    else:
        write_output(orjson.dumps(registry, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    flush_output()
