"""The table of `tailrace aggregate`: as wide as the terminal, and nothing is left out but the bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

GAP_CELLS: Final = 2
BAR_CELLS: Final = 24
BAR_CELLS_MIN: Final = 8
KEY_CELLS_MIN: Final = 8  # of a group's name; the rest is on the next line
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
    """Rows are the start of a window and a group in it."""
    from rich.console import Console

    console = Console()
    for number, table in enumerate(layout_tables(rows, measures, console.width)):
        if number:
            console.print()
        console.print(table)


def layout_tables(rows: Sequence[Row], measures: Sequence[str], width: int) -> list[Table]:
    """One table, or as many as the measures need."""
    keys = [_key_column(rows, key) for key in rows[0][1]["key"]]
    measured = [_measure_columns(rows, name) for name in measures]
    whole = _format_starts([start for start, _ in rows], short=False)
    # Where it gets narrow, times lose what they have in common.
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
    """The columns of each table. Measures stay together, and then their parts, as long as there is room."""
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
    """Each window is named once."""
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
    """A bar in eighths of a cell; the largest value has the longest."""
    if value <= 0 or largest <= 0:
        return ""
    eighths = max(1, value * cells * 8 // largest)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
