"""``tailrace source``: external databases that collections follow."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from tailrace.cli.docs import request_json, split_database
from tailrace.cli.errors import UsageError
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    flush_output,
    print_empty,
    print_json,
    write_output,
)

_HELP: Final = """Replicate tables of external databases into collections.

A source is named by the Tailrace database and a name of its own. For example:

    tailrace source add default/pg1 --dsn-env PG_DSN --table public.orders=orders

    tailrace source add default/shop --kind mongo --dsn-env MONGO_DSN --table shop.orders=orders

    tailrace source status default/pg1

    tailrace source resync default/pg1

    tailrace source ls default

    tailrace source rm default/pg1

The connection string is in a variable of the server's environment, or in a file that the server can read.
"""

command = App(name="source", help=_HELP, help_format="markdown")

Name = Annotated[str, Parameter(help="Database and source.")]


def _path(name: str) -> str:
    database, rest = split_database(name)
    if "/" in rest:
        raise UsageError(f"{name!r} must be database/source, as in default/pg1")
    return f"/v1/databases/{database}/sources/{rest}"


@command.command
def add(
    name: Name,
    /,
    *,
    table: Annotated[
        list[str],
        Parameter(
            negative="",
            help="schema.table=collection, followed by :column,column if the key is not the primary key;"
            " for MongoDB database.collection=collection; may be repeated.",
        ),
    ],
    kind: Annotated[Literal["postgres", "mongo"], Parameter(help="The kind of the database.")] = "postgres",
    stream: Annotated[str, Parameter(help="Follow this stream instead; --table is type=collection.")] = "",
    dsn_env: Annotated[str, Parameter(help="Variable with the connection string.")] = "",
    dsn_file: Annotated[str, Parameter(help="File with the connection string.")] = "",
    publication: Annotated[str, Parameter(help="PostgreSQL: the publication of the tables.")] = "tailrace",
    slot: Annotated[str, Parameter(help="PostgreSQL: the replication slot; created if it is missing.")] = "",
    on_gap: Annotated[
        Literal["rescan", "hold"], Parameter(help="What to do if changes are missing.")
    ] = "rescan",
    initial: Annotated[
        Literal["load", "now"],
        Parameter(help="load: copy the tables first. now: start with the next change."),
    ] = "load",
    numeric: Annotated[
        Literal["string", "double"], Parameter(help="PostgreSQL: the representation of numeric.")
    ] = "string",
    session: Session = DEFAULT_SESSION,
) -> None:
    """Add or change a source: a database, or a stream with the profile state-protocol."""
    if sum(map(bool, (dsn_env, dsn_file, stream))) != 1:
        raise UsageError("use exactly one of --dsn-env, --dsn-file and --stream")
    given: dict[str, Any] = {"collections": dict(_mapped(text) for text in table), "onGap": on_gap}
    if stream:
        given |= {"kind": "stream", "stream": stream}
    else:
        given |= {
            "kind": kind,
            "dsn": {"env": dsn_env} if dsn_env else {"file": dsn_file},
            "initial": initial,
        }
    if given["kind"] == "postgres":
        given |= {"publication": publication, "numeric": numeric, **({"slot": slot} if slot else {})}
    _print(request_json(session, "PUT", _path(name), given), session)


def _mapped(text: str) -> tuple[str, dict[str, Any]]:
    table, equals, rest = text.partition("=")
    collection, _, key = rest.partition(":")
    if not equals or not collection:
        raise UsageError(f"{text!r} must have the form schema.table=collection")
    found: dict[str, Any] = {"collection": collection}
    if key:
        found["key"] = key.split(",")
    return table, found


@command.command
def status(name: Name, /, *, session: Session = DEFAULT_SESSION) -> None:
    """Show the status of a source."""
    _print(request_json(session, "GET", _path(name)), session)


@command.command
def ls(
    database: Annotated[str, Parameter(help="The database.")] = "default",
    /,
    *,
    session: Session = DEFAULT_SESSION,
) -> None:
    """List the sources of a database."""
    found = request_json(session, "GET", f"/v1/databases/{database}/sources")["sources"]
    for source in found:
        if session.json:
            print_json(source)
        else:
            phase, error = source["status"]["phase"], source["status"]["error"]
            write_output(
                f"{source['name']}\t{source['kind']}\t{phase}\t{error or ''}".rstrip().encode() + b"\n"
            )
    flush_output()
    if not found and not session.json:
        print_empty("sources")


@command.command
def resync(name: Name, /, *, session: Session = DEFAULT_SESSION) -> None:
    """Copy everything again; live queries start again as well."""
    _print(request_json(session, "POST", f"{_path(name)}/resync"), session)


@command.command
def rm(
    name: Name,
    /,
    *,
    keep_slot: Annotated[bool, Parameter(negative="", help="Do not drop the slot in PostgreSQL.")] = False,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Remove a source. Its collections are not changed, its slot is dropped."""
    removed = request_json(session, "DELETE", _path(name), query="keepSlot=1" if keep_slot else "")
    if session.json:
        print_json(removed)
    slot = removed["slot"]
    if slot is not None and not removed["slotDropped"]:
        print(
            f"tailrace: the slot could not be dropped ({removed['reason']}) and retains the database log."
            f" Run there: SELECT pg_drop_replication_slot('{slot}')",
            file=sys.stderr,
        )
    flush_output()


def _print(source: dict[str, Any], session: Session) -> None:
    if session.json:
        print_json(source)
        flush_output()
        return
    status = source["status"]
    lines = [
        f"source       {source['database']}/{source['name']} ({source['kind']})",
        f"phase        {status['phase']}" + (f": {status['reason']}" if status["reason"] else ""),
        f"connected    {'yes' if status['connected'] else 'no'}"
        + (f": {status['error']}" if status["error"] else ""),
        f"position     {status['token']}",
        f"changes      {status['changes']} since the server started, the last at "
        + (status["lastChangeAt"] or "a time that is not known"),
        "lag          " + ("not known" if status["lagSeconds"] is None else f"{status['lagSeconds']} s"),
    ]
    if "slot" in source:
        retained = status["retainedBytes"]
        size = "an unknown number of bytes" if retained is None else f"{retained} bytes"
        slot_state = f"{status['walStatus'] or 'state not known'}, retains {size}"
        lines.append(f"slot         {source['slot']} ({slot_state})")
    for table, mapped in source["collections"].items():
        lines.append(f"table        {table} -> {mapped['collection']}")
    write_output("".join(f"{line}\n" for line in lines).encode())
    flush_output()
