"""``tailrace aggregate``: what a rollup of a stream measures, over time and by group."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.call import get_json, post_json, stream_path
from tailrace.cli.failures import RefusedError
from tailrace.cli.session import DEFAULT, Session, flush, put_json

_HELP: Final = """Add up a rollup of a stream: counts, sums and percentiles, by spans of time and by group.

Without a start it shows the last hour. Bars show the first measure; rows without a bar had none of it.

For example:

    tailrace aggregate events requests --interval 5m --by service

    tailrace aggregate events requests --from 2026-01-01T00:00:00Z --to 2026-01-02T00:00:00Z --interval 1h

    tailrace aggregate events requests --query 'level:error' --measure latency --json | jq .measures
"""
_HOUR_MS: Final = 3_600_000
_BAR_CELLS: Final = 24
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"

command = App(name="aggregate", help=_HELP, help_format="markdown")


@command.default
def aggregate(
    stream: Annotated[str, Parameter(help="The stream.")],
    rollup: Annotated[str, Parameter(help="The rollup, as the stream's schema names it.")],
    /,
    *,
    interval: Annotated[str, Parameter(help="The span of a window; the rollup's first if left out.")] = "",
    start: Annotated[
        str,
        Parameter(name="--from", help="RFC 3339 or Unix nanoseconds; an hour before the end if left out."),
    ] = "",
    end: Annotated[str, Parameter(name="--to", help="Likewise, and not included; now if left out.")] = "",
    query: Annotated[str, Parameter(help="Only records that match.")] = "",
    by: Annotated[
        list[str] | None, Parameter(negative="", help="A dimension to group by; may be given repeatedly.")
    ] = None,
    measure: Annotated[
        list[str] | None,
        Parameter(negative="", help="A measure to show, all if left out; may be given repeatedly."),
    ] = None,
    session: Session = DEFAULT,
) -> None:
    now_ms = int(time.time() * 1000)
    body: dict[str, object] = {
        "rollup": rollup,
        "interval": interval or _first_interval(session, stream, rollup),
        "from": start or now_ms - _HOUR_MS,
        "to": end or now_ms + 1,
        "group_by": by or [],
    }
    if query:
        body["q"] = query
    if measure:
        body["measures"] = measure
    found = post_json(session, stream_path(stream, "_aggregate"), body)
    if session.json:
        for bucket in found["buckets"]:
            for group in bucket["groups"]:
                put_json({"start": bucket["start"], "end": bucket["end"], **group})
        flush()
    else:
        _show(found, measure)
    _tell(found)


def _first_interval(session: Session, stream: str, rollup: str) -> str:
    schema = get_json(session, stream_path(stream, "_schema"))
    try:
        return schema["search"]["rollups"][rollup]["intervals"][0]
    except (LookupError, TypeError):
        raise RefusedError(f"unknown rollup {rollup}") from None


def _show(found: dict[str, Any], measure: list[str] | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [(bucket["start"], group) for bucket in found["buckets"] for group in bucket["groups"]]
    if not rows:
        return
    names: list[str] = measure or list(rows[0][1]["measures"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("start", no_wrap=True)
    keys: list[str] = list(rows[0][1]["key"])
    for key in keys:
        table.add_column(Text(key), overflow="fold")
    for name in names:
        for column in _columns(name, rows[0][1]["measures"][name]):
            table.add_column(Text(column), no_wrap=True, justify="right")
    table.add_column("", no_wrap=True)
    largest = max((group["measures"][names[0]]["count"] for _, group in rows), default=0) if names else 0
    before = ""
    for start, group in rows:
        cells = [Text(start if start != before else "")]
        cells += [Text("-" if group["key"][key] is None else group["key"][key]) for key in keys]
        for name in names:
            cells += [Text(_number(value)) for value in _values(group["measures"][name])]
        bar_of = group["measures"][names[0]]["count"] if names else 0
        table.add_row(*cells, Text(bar(bar_of, largest), "cyan"))
        before = start
    Console().print(table)


def _columns(name: str, measured: dict[str, Any]) -> list[str]:
    return [name] if len(measured) == 1 else [name, "avg", "p50", "p95", "p99", "max"]


def _values(measured: dict[str, Any]) -> list[Any]:
    if len(measured) == 1:
        return [measured["count"]]
    return [measured[name] for name in ("count", "avg", "p50", "p95", "p99", "max")]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.3f}" if 0.001 <= abs(value) < 1e9 else f"{value:.3e}"


def bar(value: int, largest: int) -> str:
    """A bar in eighths of a cell; the largest value has the longest."""
    if value <= 0 or largest <= 0:
        return ""
    eighths = max(1, value * _BAR_CELLS * 8 // largest)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _tell(found: dict[str, Any]) -> None:
    """What is no part of the table: on the error output, out of a pipe's way."""
    coverage = found["coverage"]
    groups = sum(len(bucket["groups"]) for bucket in found["buckets"])
    line = f"{groups:,} groups in {len(found['buckets']):,} windows, {found['from']} to {found['to']}"
    if not coverage["complete"]:
        rows = coverage["possible_missing_events_upper_bound"]
        line += f"; incomplete: {rows:,} rows were not looked at"
    sys.stderr.write(line + "\n")
