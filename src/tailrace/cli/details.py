"""``tailrace details``: details of a stream, or of the server."""

from __future__ import annotations

from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.session import DEFAULT_SESSION, Session, flush_output, get_json, print_json, stream_path
from tailrace.cli.tables import make_console

_HELP: Final = """Show details of a stream: entries, segments, bytes, indexes and requests.

Without a stream it shows details of the server: memory, queues and the largest streams.

For example:

    tailrace details orders

    tailrace details

    tailrace details orders --json | jq .storage
"""

Rows = list[tuple[str, object]]
_CELLS_MIN: Final = 26

command = App(name="details", help=_HELP, help_format="markdown")


@command.default
def details(
    stream: Annotated[str, Parameter(help="The stream; by default the server.")] = "",
    /,
    *,
    session: Session = DEFAULT_SESSION,
) -> None:
    path = stream_path(stream, "_details") if stream else "/v1/server/_details"
    found = get_json(session, path)
    if session.json:
        print_json(found)
        flush_output()
        return
    for title, rows in _of_stream(found) if stream else _of_server(found):
        _show(title, rows)


def _of_stream(found: dict[str, Any]) -> list[tuple[str, Rows]]:
    status, storage = found["index_status"], found["storage"]
    families: Rows = [
        (_words(family), _coverage(status[family]))
        for family in ("routing_key_index", "routing_key_lexicon")
        if status[family]["configured"]
    ]
    families += [(f"exact {row['name']}", _coverage(row)) for row in status["exact_indexes"]]
    families += [
        (f"{row['family']} ({', '.join(row['fields'])})", _coverage(row)) for row in status["search_families"]
    ]
    requests: Rows = [
        (_words(row["artifact"]), f"{row['puts']} puts, {row['reads']} reads, {row['deletes']} deletes")
        for row in found["object_store_requests"]["by_artifact"]
        if int(row["puts"]) or int(row["reads"]) or int(row["deletes"])
    ]
    return [
        (found["stream"]["name"], _plain(found["stream"], leave_out=("name",))),
        ("manifest", _plain(status["manifest"])),
        ("object storage", _plain(storage["object_storage"], zeros=False)),
        ("local storage", _plain(storage["local_storage"], zeros=False)),
        ("indexes", families),
        ("requests to the object store", requests),
    ]


def _coverage(row: dict[str, Any]) -> str:
    if row["fully_indexed_uploaded_segments"]:
        return "complete"
    return f"{row['lag_segments']} segments behind"


def _of_server(found: dict[str, Any]) -> list[tuple[str, Rows]]:
    runtime, tuned = found["runtime"], found["auto_tune"]
    memory = runtime["memory"]
    gates = runtime["concurrency"]
    tuning = f"preset of {tuned['preset_mb']} MB" if tuned["enabled"] else "off"
    top: Rows = []
    for kind, rows in runtime["top_streams"].items():
        top += [(row["stream"], f"{row.get('bytes', row.get('waiters')):,} {_words(kind)}") for row in rows]
    return [
        (
            "memory",
            [
                ("resident", f"{memory['last_rss_bytes']:,}"),
                ("highest", f"{memory['max_rss_bytes']:,}"),
                (
                    "limit",
                    f"{memory['pressure_limit_bytes']:,}" if memory["pressure_limit_bytes"] else "none",
                ),
                ("pressure", "yes" if memory["pressure_active"] else "no"),
                ("auto-tune", tuning),
                *(
                    (_words(name), f"{value:,}")
                    for name, value in memory["subsystems"]["heap_estimates"].items()
                ),
            ],
        ),
        (
            "queues",
            [
                ("appends waiting", f"{runtime['ingest_queue']['bytes']:,} bytes"),
                ("not yet in the object store", f"{runtime['local_backpressure']['current_bytes']:,} bytes"),
                ("streams to be sealed", runtime["uploads"]["pending_segments"]),
            ],
        ),
        (
            "concurrency",
            [
                (name, f"{gate['active']} of {gate['current_limit']}, {gate['queued']} waiting")
                for name, gate in gates.items()
                if gate["configured_limit"]
            ],
        ),
        ("streams that use most", top),
    ]


def _plain(group: dict[str, Any], *, leave_out: tuple[str, ...] = (), zeros: bool = True) -> Rows:
    return [
        (_words(name), value)
        for name, value in group.items()
        if name not in leave_out and value is not None and (zeros or str(value) != "0")
    ]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _show(title: str, rows: Rows) -> None:
    if not rows:
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, pad_edge=False, show_header=False, title=Text(title, "bold"), title_justify="left"
    )
    texts = [(f"  {name}", _text(value)) for name, value in rows]
    # Both columns are wrapped, so that neither pushes the other off the screen.
    table.add_column(overflow="fold", min_width=min(_CELLS_MIN, max(len(name) for name, _ in texts)))
    table.add_column(overflow="fold", min_width=min(_CELLS_MIN, max(len(value) for _, value in texts)))
    for name, value in texts:
        table.add_row(Text(name), Text(value))
    make_console().print(table)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    return f"{int(text):,}" if text.isascii() and text.isdigit() else text
