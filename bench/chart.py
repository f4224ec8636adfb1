# pyright: strict
"""Lines over time, one panel below the other: as SVG of our own, and as PNG where matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 170, 80, 20, 40, 30
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines that share an axis; each has a value per point in time."""

    title: str
    unit: str
    lines: dict[str, Sequence[float]]


def draw_svg(file: Path, title: str, minutes: Sequence[float], panels: Sequence[Panel]) -> None:
    height = TOP + len(panels) * (PANEL_HEIGHT + BOTTOM)
    size = f'width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, minutes, TOP + index * (PANEL_HEIGHT + BOTTOM))
    file.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _panel(panel: Panel, minutes: Sequence[float], top: int) -> list[str]:
    width, height = WIDTH - LEFT - RIGHT, PANEL_HEIGHT - 40
    bottom = top + 30 + height
    peak = _round_up(max((max(values, default=0.0) for values in panel.lines.values()), default=0.0))
    last = max(minutes[-1] if minutes else 0.0, 1e-9)
    title = escape(f"{panel.title} ({panel.unit})")
    parts = [f'<text x="{LEFT}" y="{top + 14}" font-weight="bold">{title}</text>']
    for step in range(5):
        y = bottom - height * step / 4
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{peak * step / 4:g}</text>')
    for step in range(7):
        x = LEFT + width * step / 6
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{last * step / 6:.3g} min</text>'
        )
    for number, (name, values) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{LEFT + width * at / last:.1f},{bottom - height * min(value / peak, 1):.1f}"
            for at, value in zip(minutes, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x = WIDTH - RIGHT - 130 * (len(panel.lines) - number) + 130
        parts.append(f'<text x="{x}" y="{top + 14}" text-anchor="end" fill="{colour}">{escape(name)}</text>')
    return parts


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 with zeros, so that the axis has round numbers."""
    if value <= 0:
        return 1.0
    size = 1.0
    while size < value:
        size *= 10
    while size / 10 >= value:
        size /= 10
    return next(size * part for part in (0.2, 0.5, 1.0) if size * part >= value)


def draw_png(file: Path, title: str, minutes: Sequence[float], panels: Sequence[Panel]) -> bool:
    """The same as a PNG; False where there is no matplotlib to draw it."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(
        len(panels), 1, sharex=True, figsize=(10, 2.4 * len(panels)), squeeze=False
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        for name, values in panel.lines.items():
            axis.plot(minutes, values, label=name, linewidth=1.2)
        axis.set_title(panel.title, loc="left", fontsize=10)
        axis.set_ylabel(panel.unit)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(loc="upper right", fontsize=8)
    axes[-1, 0].set_xlabel("minutes")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return True
