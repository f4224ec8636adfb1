"""``tailrace pipeline``: status, rebuild and drain of the pipeline; and running one."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.errors import RefusedError
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    flush_output,
    get_json,
    post_json,
    print_json,
    write_output,
)

_HELP: Final = """Manage the pipeline, which builds the index files of sealed history.

    tailrace pipeline status

    tailrace pipeline rebuild --stream orders

    tailrace pipeline drain

    tailrace pipeline run --once

    tailrace pipeline rescan --collection orders

A server starts a local pipeline when there is work; `run` is for another machine, a cluster or cron.
"""
_DETAILS: Final = "/v1/server/_details"
_HEARTBEAT: Final = "/v1/pipeline/heartbeat"
_POLL_S: Final = 0.5

command = App(name="pipeline", help=_HELP, help_format="markdown")
command.command("tailrace.cli.pipeline_run:command", name="run", help="Run a pipeline in this process.")
for _name, _summary in (
    ("match", "Match a range of changes with the current subscriptions."),
    ("rescan", "Compare the view of a collection with its log, and correct it."),
    ("stats", "Fields, selectivity and skew of collections."),
    ("capture", "Store changes and subscriptions, with some values masked."),
    ("shadow", "Compare two versions of the matcher."),
):
    command.command(f"tailrace.cli.pipeline_watch:{_name}_command", name=_name, help=_summary)


@command.command
def status(*, session: Session = DEFAULT_SESSION) -> None:
    """Show the state and backlog of the pipeline."""
    found = _pipeline(session)
    if session.json:
        print_json(found)
    else:
        write_output("".join(f"{name:<11}{value}\n" for name, value in _lines(found)).encode())
    flush_output()


@command.command
def rebuild(
    *,
    stream: Annotated[str, Parameter(help="The stream whose index files are rebuilt.")],
    family: Annotated[str | None, Parameter(help="Only this family, such as col or fts.")] = None,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Rebuild the index files of a stream; searches scan in the meantime."""
    body = {"stream": stream} if family is None else {"stream": stream, "family": family}
    answer = post_json(session, "/v1/pipeline/plan", body)
    if session.json:
        print_json(answer)
    else:
        write_output(f"{answer['scheduled']} objects of {stream} are built again\n".encode())
    flush_output()


@command.command
def drain(
    *,
    timeout: Annotated[float, Parameter(help="Maximum seconds to wait.")] = 600.0,
    session: Session = DEFAULT_SESSION,
) -> None:
    """Let the running pipeline finish its jobs, publish and exit; return when it has."""
    until_s = time.monotonic() + timeout
    post_json(session, _HEARTBEAT, {"drain": True})
    while (found := _pipeline(session))["pid"] is not None or found["draining"]:
        if time.monotonic() > until_s:
            raise RefusedError(f"the pipeline is still {found['state']} after {timeout:.0f} s")
        time.sleep(_POLL_S)
    if session.json:
        print_json({"drained": True})
    else:
        write_output(b"the pipeline has ended\n")
    flush_output()


def _pipeline(session: Session) -> dict[str, Any]:
    return get_json(session, _DETAILS)["runtime"]["pipeline"]


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    backlog, totals = found["backlog"], found["totals"]
    state = found["state"] + (f": {found['reason']}" if found["reason"] else "")
    lines = [("state", state + (", draining" if found["draining"] else ""))]
    if found["pid"] is not None:
        lines.append(("process", f"{found['pid']} since {found['started_at']}, {found['master']}"))
        lines.append(("memory", f"{int(found['rss_bytes']) >> 20} MiB"))
    waiting = f"{backlog['segments']} segments, {int(backlog['bytes']) >> 20} MiB"
    oldest_s = int(backlog["oldest_ms"]) / 1000
    lines.append(
        ("waiting", f"{waiting}, the oldest for {oldest_s:.0f} s" if backlog["segments"] else "nothing")
    )
    lines += [
        ("running", f"{one['job']} of {one['stream']}, {one['segments']} segments")
        for one in found["running"]
    ]
    lines.append(("published", f"{totals['segments']} segments, {totals['rows']} entries since the start"))
    if totals["quarantined"]:
        lines.append(("given up", f"{totals['quarantined']} segments: see _index_status of their streams"))
    if found["last_error"]:
        lines.append(("last error", found["last_error"]))
    return lines
