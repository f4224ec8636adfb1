"""``tailrace aggregate``: what a rollup of a stream measures, over time and by group."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from tailrace.cli.call import get_json, post_json, stream_path
from tailrace.cli.errors import RefusedError, check_complete
from tailrace.cli.quantities import parse_past_time
from tailrace.cli.session import DEFAULT_SESSION, Session, flush_output, print_json

_HELP: Final = """Add up a rollup of a stream: counts, sums and percentiles, by spans of time and by group.

Without a start it shows the last hour. Bars show the first measure; rows without a bar had none of it.

For example:

    tailrace aggregate events requests --interval 5m --by service

    tailrace aggregate events requests --from 2026-01-01T00:00:00Z --to 2026-01-02T00:00:00Z --interval 1h

    tailrace aggregate events requests --query 'level:error' --measure latency --json | jq .measures
"""
_HOUR_MS: Final = 3_600_000

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
        Parameter(name="--from", help="RFC 3339, Unix nanoseconds, or a time span back from now; else 1h."),
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
    session: Session = DEFAULT_SESSION,
) -> None:
    now_ms = int(time.time() * 1000)
    body: dict[str, object] = {
        "rollup": rollup,
        "interval": interval or _first_interval(session, stream, rollup),
        "from": parse_past_time(start, "--from") if start else now_ms - _HOUR_MS,
        "to": parse_past_time(end, "--to") if end else now_ms + 1,
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
                print_json({"start": bucket["start"], "end": bucket["end"], **group})
        flush_output()
    else:
        _show(found, measure)
    _print_coverage(found)
    check_complete(found["coverage"], "question")


def _first_interval(session: Session, stream: str, rollup: str) -> str:
    schema = get_json(session, stream_path(stream, "_schema"))
    try:
        return schema["search"]["rollups"][rollup]["intervals"][0]
    except (LookupError, TypeError):
        raise RefusedError(f"unknown rollup {rollup}") from None


def _show(found: dict[str, Any], measure: list[str] | None) -> None:
    from tailrace.cli.aggregate_table import print_aggregate

    rows = [(bucket["start"], group) for bucket in found["buckets"] for group in bucket["groups"]]
    if rows:
        print_aggregate(rows, measure or list(rows[0][1]["measures"]))


def _print_coverage(found: dict[str, Any]) -> None:
    """What is no part of the table: on the error output, out of a pipe's way."""
    groups = sum(len(bucket["groups"]) for bucket in found["buckets"])
    line = f"{groups:,} groups in {len(found['buckets']):,} windows, {found['from']} to {found['to']}"
    sys.stderr.write(line + "\n")
