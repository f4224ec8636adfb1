"""Tables: as wide as the terminal, and one line for each row in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_CELLS: Final = 10_000  # wider than any row


class Column(NamedTuple):
    """`fold`: its cells may be wrapped."""

    title: str
    right: bool = False
    fold: bool = False


def make_console() -> Console:
    """The console for tables; in a pipe rows are not wrapped."""
    from rich.console import Console

    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if narrow else _PIPE_CELLS)


def print_table(columns: Iterable[Column], rows: Iterable[Iterable[object]]) -> bool:
    """Print a table; False, and nothing is printed, if there are no rows."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(column.title, justify=justify, no_wrap=not column.fold, overflow="fold")
    for row in rows:
        table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else str(cell)) for cell in row))
    if table.row_count:
        make_console().print(table)
    return table.row_count > 0
