"""``tailrace aggregate``: the measures of a rollup over time and by group, as a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from cyclopts import App, Parameter

from tailrace.cli.errors import RefusedError, check_complete
from tailrace.cli.options import parse_past_time
from tailrace.cli.session import (
    DEFAULT_SESSION,
    Session,
    flush_output,
    get_json,
    post_json,
    print_json,
    stream_path,
)

if TYPE_CHECKING:
    from rich.table import Table


GAP_CELLS: Final = 2
BAR_CELLS: Final = 24
BAR_CELLS_MIN: Final = 8
KEY_CELLS_MIN: Final = 8  # of a group's name; the rest is wrapped
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_SUMMARY: Final = ("count", "avg", "p50", "p95", "p99", "max")

Row = tuple[str, dict[str, Any]]


class Column(NamedTuple):
    title: str
    cells: list[str]

    @property
    def width(self) -> int:
        from rich.cells import cell_len

        return max(map(cell_len, (self.title, *self.cells)))


def print_aggregate(rows: Sequence[Row], measures: Sequence[str]) -> None:
    """Print one row for each window and group."""
    from rich.console import Console

    console = Console()
    for number, table in enumerate(layout_tables(rows, measures, console.width)):
        if number:
            console.print()
        console.print(table)


def layout_tables(rows: Sequence[Row], measures: Sequence[str], width: int) -> list[Table]:
    """One table, or several if the measures do not fit."""
    keys = [_key_column(rows, key) for key in rows[0][1]["key"]]
    measured = [_measure_columns(rows, name) for name in measures]
    whole = _format_starts([start for start, _ in rows], short=False)
    # On a narrow terminal times are shortened by their common suffix.
    fits = _width([whole, *keys, *(column for columns in measured for column in columns)]) <= width
    starts = whole if fits else _format_starts([start for start, _ in rows], short=True)
    counts = [group["measures"][measures[0]]["count"] for _, group in rows] if measures else [0] * len(rows)
    return [
        _format_table(starts, keys, columns, counts if number == 0 else [], width)
        for number, columns in enumerate(_split_columns(starts, keys, measured, width))
    ]


def _split_columns(
    starts: Column, keys: list[Column], measured: list[list[Column]], width: int
) -> list[list[Column]]:
    """The columns of each table; a measure is split over tables only if it does not fit into one."""
    narrow = [starts, *(Column("", ["x" * min(key.width, KEY_CELLS_MIN)]) for key in keys)]
    found: list[list[Column]] = [[]]
    for columns in measured:
        if found[-1] and _width([starts, *keys, *found[-1], *columns]) > width:
            found.append([])
        for column in columns:
            if found[-1] and _width([*narrow, *found[-1], column]) > width:
                found.append([])
                column = column._replace(title=f"{columns[0].title} {column.title}")
            found[-1].append(column)
    return found


def _format_table(
    starts: Column, keys: list[Column], columns: list[Column], counts: list[int], width: int
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(starts.title, no_wrap=True)
    for key in keys:
        table.add_column(Text(key.title), overflow="fold", min_width=min(key.width, KEY_CELLS_MIN))
    for column in columns:
        table.add_column(Text(column.title), no_wrap=True, justify="right")
    shown = [starts, *keys, *columns]
    bar_cells = min(BAR_CELLS, width - _width(shown) - GAP_CELLS)
    bars = [""] * len(starts.cells)
    if counts and bar_cells >= BAR_CELLS_MIN:
        table.add_column("", no_wrap=True)
        bars = [draw_bar(count, max(counts), bar_cells) for count in counts]
    for *cells, drawn in zip(*(column.cells for column in shown), bars, strict=True):
        texts = [Text(cell) for cell in cells]
        table.add_row(*texts, *([Text(drawn, "cyan")] if len(table.columns) > len(texts) else []))
    return table


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + GAP_CELLS * (len(columns) - 1)


def _format_starts(starts: Sequence[str], *, short: bool) -> Column:
    """The start of each window, shown once."""
    if short:
        common = ":00.000Z" if all(start.endswith(":00.000Z") for start in starts) else ".000Z"
        starts = [start.removesuffix(common).replace("T", " ") for start in starts]
    before = ["", *starts]
    return Column("start", [now if now != last else "" for now, last in zip(starts, before, strict=False)])


def _key_column(rows: Sequence[Row], key: str) -> Column:
    return Column(key, ["-" if group["key"][key] is None else group["key"][key] for _, group in rows])


def _measure_columns(rows: Sequence[Row], name: str) -> list[Column]:
    measured = [group["measures"][name] for _, group in rows]
    if len(measured[0]) == 1:
        return [Column(name, [_format_number(one["count"]) for one in measured])]
    titles = (name, *_SUMMARY[1:])
    return [
        Column(title, [_format_number(one[part]) for one in measured])
        for title, part in zip(titles, _SUMMARY, strict=True)
    ]


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if not 0.001 <= abs(value) < 1e9:
        return f"{value:.3e}"
    return f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.1f}"


def draw_bar(value: int, largest: int, cells: int = BAR_CELLS) -> str:
    """A bar in eighths of a cell, relative to the largest value."""
    if value <= 0 or largest <= 0:
        return ""
    eighths = max(1, value * cells * 8 // largest)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


_HELP: Final = """Aggregate a rollup of a stream: counts, sums and percentiles, by time interval and by group.

Without a start it shows the last hour. Bars show the first measure.

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
    rollup: Annotated[str, Parameter(help="The name of the rollup in the stream's schema.")],
    /,
    *,
    interval: Annotated[
        str, Parameter(help="The length of a window; by default the first interval of the rollup.")
    ] = "",
    start: Annotated[
        str,
        Parameter(name="--from", help="RFC 3339, Unix nanoseconds, or a duration before now; 1h by default."),
    ] = "",
    end: Annotated[str, Parameter(name="--to", help="Likewise, exclusive; now by default.")] = "",
    query: Annotated[str, Parameter(help="Only records that match.")] = "",
    by: Annotated[
        list[str] | None, Parameter(negative="", help="A dimension to group by; may be repeated.")
    ] = None,
    measure: Annotated[
        list[str] | None,
        Parameter(negative="", help="A measure to show; all by default; may be repeated."),
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

    rows = [(bucket["start"], group) for bucket in found["buckets"] for group in bucket["groups"]]
    if rows:
        print_aggregate(rows, measure or list(rows[0][1]["measures"]))


def _print_coverage(found: dict[str, Any]) -> None:
    """Print the summary to standard error, so that a pipe only gets the table."""
    groups = sum(len(bucket["groups"]) for bucket in found["buckets"])
    line = f"{groups:,} groups in {len(found['buckets']):,} windows, {found['from']} to {found['to']}"
    sys.stderr.write(line + "\n")
