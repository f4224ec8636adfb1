"""The load that lasts: what it holds against a server, and what it draws."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from bench.chart import Panel, draw_svg
from bench.soak import Row, Soak, panels, summary, verdict, write

GOOD = Row(
    minutes=0.0,
    appends_per_s=1000.0,
    append_p50_ms=1.0,
    append_p99_ms=3.0,
    reads_per_s=100.0,
    read_p99_ms=4.0,
    delivery_p99_ms=5.0,
    errors=0,
    stolen_ms=0.0,
    server_mb=100.0,
    all_mb=200.0,
    segments=1,
    publications=0,
)


def soak(*rows: Row, missed: int = 0) -> Soak:
    timed = [msgspec.structs.replace(row, minutes=float(index)) for index, row in enumerate(rows)]
    return Soak(commit="abc", cpu="some", share=0.7, max_per_s=1400.0, missed=missed, rows=timed)


def test_a_run_that_holds() -> None:
    assert verdict(soak(*[GOOD] * 9)) == []
    # Caches fill at first: that is not held against it.
    assert verdict(soak(*[msgspec.structs.replace(GOOD, server_mb=50.0)] * 3, *[GOOD] * 6)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"server_mb": 120.0}, "memory grew by 20%"),
        ({"append_p99_ms": 9.0}, "p99 of appends grew 3.0-fold"),
        ({"errors": 1}, "3 requests failed"),
    ],
)
def test_what_is_held_against_a_run(change: dict[str, float], said: str) -> None:
    late = msgspec.structs.replace(GOOD, **change)
    (found,) = verdict(soak(*[GOOD] * 6, *[late] * 3))
    assert said in found


def test_intervals_in_which_the_machine_stood_still_are_told_apart() -> None:
    still = msgspec.structs.replace(GOOD, append_p99_ms=90.0, stolen_ms=80.0)
    told = summary(soak(*[GOOD] * 3, GOOD, still, still, *[still] * 3).rows).splitlines()
    assert told[1:] == ["  3.0 ms (3), 3.0 ms (3)", "  90.0 ms (3), 3.0 ms (1)", "  90.0 ms (3), none"]


def test_a_message_that_live_readers_missed_is_held_against_a_run() -> None:
    (found,) = verdict(soak(*[GOOD] * 9, missed=6))
    assert "6 messages" in found


def test_a_chart_shows_every_line(tmp_path: Path) -> None:
    files = write(soak(*[GOOD] * 5), tmp_path)
    assert {"soak.json", "soak.svg"} <= {file.name for file in files}
    drawn = ElementTree.parse(tmp_path / "soak.svg")
    lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == sum(len(panel.lines) for panel in panels([GOOD]))
    assert all(len(line.attrib["points"].split()) == 5 for line in lines)
    kept = msgspec.json.decode((tmp_path / "soak.json").read_bytes(), type=Soak)
    assert len(kept.rows) == 5


def test_a_chart_of_nothing_and_of_zeros(tmp_path: Path) -> None:
    draw_svg(tmp_path / "empty.svg", "a < b", [], [Panel("none", "MB", {"x": []})])
    draw_svg(tmp_path / "zeros.svg", "zeros", [0.0, 1.0], [Panel("none", "MB", {"x": [0.0, 0.0]})])
    assert ElementTree.parse(tmp_path / "empty.svg").getroot().tag.endswith("svg")
