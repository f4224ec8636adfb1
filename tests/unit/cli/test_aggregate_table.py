"""The table of `tailrace aggregate` fits its terminal, and shows every group and every number."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tailrace.cli.aggregate import draw_bar, layout_tables

LONG = "a-service-with-quite-a-long-name"


def _summary(count: int) -> dict[str, Any]:
    return {
        "count": count,
        "sum": 1.5,
        "min": 1.0,
        "max": count * 941.25,
        "avg": 494.8333333,
        "p50": 31.5,
        "p95": 941.0,
        "p99": 941.125,
    }


def _rows(*services: str | None) -> list[tuple[str, dict[str, Any]]]:
    measures: dict[str, Any] = {"requests": {"count": 3}, "latency": _summary(2), "size": _summary(70_000)}
    return [
        (f"2026-01-01T00:0{minute}:00.000Z", {"key": {"service": service}, "measures": measures})
        for minute in range(2)
        for service in services
    ]


def _shown(rows: list[tuple[str, dict[str, Any]]], measures: list[str], width: int) -> str:
    console = Console(width=width, file=io.StringIO(), no_color=True)
    for table in layout_tables(rows, measures, width):
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_nothing_is_left_out_however_narrow_it_is(width: int) -> None:
    shown = _shown(_rows("checkout", None), ["requests", "latency", "size"], width)
    assert "…" not in shown
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    parts = ("service", "checkout", "requests", "latency", "size", "p50", "p95", "p99", "max", "65,887,500")
    for part in parts:
        assert part in shown, part


def test_the_group_is_there_at_80_columns_and_a_long_one_is_folded() -> None:
    shown = _shown(_rows(LONG, "search"), ["latency"], 80)
    folded = "".join(line[18:].split("  ")[0] for line in shown.splitlines()[1:4])
    assert folded.startswith(LONG)
    assert shown.splitlines()[0].split() == ["start", "service", "latency", "avg", "p50", "p95", "p99", "max"]


def test_times_are_whole_where_there_is_room_and_short_where_not() -> None:
    assert "2026-01-01T00:00:00.000Z" in _shown(_rows("a"), ["requests"], 80)
    narrow = _shown(_rows("a"), ["requests"], 30)
    assert "2026-01-01 00:00 " in narrow
    assert "Z" not in narrow


def test_each_window_is_named_once_and_the_bar_gives_way_first() -> None:
    wide = _shown(_rows("a", "b"), ["requests"], 80)
    assert wide.count("2026-01-01T00:00") == 1
    assert wide.count("█" * 24) == 4
    assert "█" * 10 in _shown(_rows("a", "b"), ["requests"], 55)
    assert "█" not in _shown(_rows("a", "b"), ["requests"], 48)


def test_bars_are_in_eighths_of_a_cell() -> None:
    assert [draw_bar(value, 8, 1) for value in (0, 1, 4, 8)] == ["", "▏", "▌", "█"]
