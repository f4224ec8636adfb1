"""``tailrace watch``: the result of a live query."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.docs import split_database
from tailrace.cli.errors import RefusedError, unreachable
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    authorization_header,
    flush_output,
    get_json,
    print_json,
    write_output,
)
from tailrace.common.backoff import Backoff

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

_HELP: Final = """Watch a live query: its result and every change, until Ctrl-C.

On a terminal it is a table that is kept current; in a pipe, one line for each document that is added (`+`),
changed (`~`) or removed (`-`). A lost connection is resumed.

For example:

    tailrace watch default/orders

    tailrace watch default/orders --where 'doc.total > 100 && doc.status == "open"'

    tailrace watch default/orders --json | jq .doc.data.total

    tailrace watch top default
"""
_SIGNS: Final = {"insert": "+", "update": "~", "delete": "-"}
_ROWS_MAX: Final = 50
_PAUSE_S_MIN: Final = 0.2
_PAUSE_S_MAX: Final = 5.0

command = App(name="watch", help=_HELP, help_format="markdown")


@command.default
def watch(
    collection: Annotated[str, Parameter(help="Database and collection, as in default/orders.")],
    /,
    *,
    where: Annotated[str, Parameter(help="An expression, such as doc.total > 3.")] = "",
    session: Session = DEFAULT_SESSION,
) -> None:
    database, name = split_database(collection)
    query: dict[str, Any] = {"collection": name}
    if where:
        query["where"] = where
    drawn = sys.stdout.isatty() and not session.json
    view = _Table(f"{collection} {where}") if drawn else _Lines(session.json)
    try:
        with view:
            _Watching(session, database, query, view).run()
    except KeyboardInterrupt:
        return


@command.command
def top(
    database: Annotated[str, Parameter(help="The database.")] = "default",
    /,
    *,
    every_s: Annotated[float, Parameter(name="--every", help="Seconds between updates.")] = 2.0,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Show the collections of a database: state, subscriptions, burn rate of their objectives, and reason.

    On a terminal the table is kept current until Ctrl-C; in a pipe it is printed once.
    """
    if not sys.stdout.isatty() or session.json:
        found = get_json(session, f"/v1/databases/{database}/status")
        for row in found["collections"]:
            if session.json:
                print_json(row)
            else:
                write_output(f"{_status_line(row)}\n".encode())
        flush_output()
        return
    from rich.live import Live

    try:
        with Live(auto_refresh=False) as live:
            while True:
                found = get_json(session, f"/v1/databases/{database}/status")
                live.update(_status_table(found), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _status_line(row: dict[str, Any]) -> str:
    worst = max(row["burn"].values())
    return (
        f"{row['collection']}  {row['state']}  documents={row['documents']}  "
        f"subscriptions={row['subscriptions']}  lag={row['lag']}  burn={worst:g}  {row['reason']}"
    )


def _status_table(found: dict[str, Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    title = f"{found['database']}: {found['connections']} connections"
    table = Table(
        "collection", "state", "documents", "subscriptions", "lag", "burn", "why", title=escape(title)
    )
    for row in found["collections"][:_ROWS_MAX]:
        worst = f"{max(row['burn'].values()):g}"
        counts = [str(row[name]) for name in ("documents", "subscriptions", "lag")]
        table.add_row(escape(row["collection"]), row["state"], *counts, worst, row["reason"])
    return table


class _Lines:
    """One line for each change."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        flush_output()

    def reset(self, documents: dict[str, dict[str, Any]]) -> None:
        for document in documents.values():
            self.change({"op": "insert", "reason": "snapshot", "doc": document})

    def change(self, delta: dict[str, Any]) -> None:
        import orjson

        doc = delta["doc"]
        if self._as_json:
            print_json(delta)
        else:
            data = orjson.dumps(doc["data"]).decode() if "data" in doc else delta["reason"]
            write_output(f"{_SIGNS[delta['op']]} {doc['id']} {data}\n".encode())
        flush_output()


class _Table:
    """The current result, redrawn at each change."""

    def __init__(self, title: str) -> None:
        from rich.live import Live

        self._title = title
        self._documents: dict[str, dict[str, Any]] = {}
        self._live = Live(self._drawn(), auto_refresh=False)

    def __enter__(self) -> _Table:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def reset(self, documents: dict[str, dict[str, Any]]) -> None:
        self._documents = dict(documents)
        self._live.update(self._drawn(), refresh=True)

    def change(self, delta: dict[str, Any]) -> None:
        if delta["op"] == "delete":
            self._documents.pop(delta["doc"]["id"], None)
        else:
            self._documents[delta["doc"]["id"]] = delta["doc"]
        self._live.update(self._drawn(), refresh=True)

    def _drawn(self) -> Any:
        from rich.markup import escape
        from rich.table import Table

        shown = sorted(self._documents.values(), key=lambda doc: doc["id"])
        columns = list(dict.fromkeys(name for doc in shown[:_ROWS_MAX] for name in doc["data"]))[:8]
        table = Table("id", "version", *columns, title=escape(self._title.strip()))
        for doc in shown[:_ROWS_MAX]:
            cells = [escape(str(doc["data"].get(name, ""))[:40]) for name in columns]
            table.add_row(escape(doc["id"]), str(doc["version"]), *cells)
        more = len(shown) - _ROWS_MAX
        table.caption = f"{len(shown)} documents" + (f", {more} not shown" if more > 0 else "")
        return table


class _Watching:
    """Follows one subscription, with reconnects."""

    def __init__(self, session: Session, database: str, query: dict[str, Any], view: _Lines | _Table) -> None:
        self._session = session
        self._database = database
        self._query = query
        self._view = view
        self._token: str | None = None
        self._pages: dict[str, dict[str, Any]] = {}
        self._in_snapshot = False

    def run(self) -> None:
        from websockets.exceptions import ConnectionClosed

        backoff, reached = Backoff(_PAUSE_S_MIN, _PAUSE_S_MAX), False
        while True:
            try:
                with self._connect() as socket:
                    reached = True
                    backoff.reset()
                    self._follow(socket)
            except (OSError, ConnectionClosed) as error:
                if not reached:
                    raise unreachable(self._session.url, error) from error
            time.sleep(backoff.next_s())

    def _connect(self) -> Any:
        from websockets.exceptions import InvalidHandshake, InvalidURI
        from websockets.sync.client import connect

        address = "ws" + self._session.url.rstrip("/").removeprefix("http") + "/realtime/ws"
        headers = authorization_header(self._session)
        try:
            return connect(address, additional_headers=headers, max_size=None)
        except (InvalidHandshake, InvalidURI) as error:
            raise RefusedError(str(error)) from None

    def _follow(self, socket: ClientConnection) -> None:
        self._send(socket, "auth", "a", {"database": self._database, "tokens": "each"})
        self._begin(socket)
        import orjson

        for message in socket:
            self._take(socket, orjson.loads(message))

    def _begin(self, socket: ClientConnection) -> None:
        if self._token is None:
            self._send(socket, "subscribe", "s", {"query": self._query, "sendSnapshot": True})
        else:
            self._send(socket, "resume", "r", {"subId": "s", "token": self._token, "query": self._query})

    def _send(self, socket: ClientConnection, kind: str, message_id: str, payload: dict[str, Any]) -> None:
        import orjson

        socket.send(orjson.dumps({"id": message_id, "type": kind, "payload": payload}).decode())

    def _take(self, socket: ClientConnection, envelope: dict[str, Any]) -> None:
        kind, payload = envelope["type"], envelope["payload"]
        if kind == "snapshot":
            if payload["page"] == 0:
                self._pages, self._in_snapshot = {}, True
            self._pages |= {document["id"]: document for document in payload["documents"]}
        elif kind == "snapshot-end":
            self._in_snapshot, self._token = False, payload["token"]
            self._view.reset(self._pages)
            self._pages = {}
        elif kind == "event":
            self._change(payload["delta"])
            self._token = payload.get("token", self._token)
        elif kind == "heartbeat":
            self._token = payload["tokens"].get("s", self._token)
        elif kind == "resync-required":
            self._token = None
            self._begin(socket)
        elif kind == "error" and payload["code"] != "going_away":
            from tailrace.client import ClientError

            raise ClientError(payload["code"], payload["message"])

    def _change(self, delta: dict[str, Any]) -> None:
        if not self._in_snapshot:
            self._view.change(delta)
        elif delta["op"] == "delete":
            self._pages.pop(delta["doc"]["id"], None)
        else:
            self._pages[delta["doc"]["id"]] = delta["doc"]
