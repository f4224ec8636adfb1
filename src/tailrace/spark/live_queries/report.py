"""The outcome of a shadow validation: as JSON for machines, and as a page with a picture for people."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from tailrace.spark.live_queries.sides import bucket_midpoint_us

REPORT_FILE, PAGE_FILE, PICTURE_FILE = "report.json", "report.md", "latency.svg"
EXAMPLES_SHOWN: Final = 20
_WIDTH, _HEIGHT, _MARGIN = 640, 260, 40
_COLOURS: Final = {"baseline": "#8a8f98", "candidate": "#2f6feb"}

LatencyHistogram = dict[int, int]  # changes by bucket of time


class SidePair(msgspec.Struct, frozen=True):
    baseline: float = 0
    candidate: float = 0


class ShadowVerdict(msgspec.Struct, frozen=True):
    """Times are microseconds for one change. `times` is for the picture only."""

    baseline: str
    candidate: str
    changes: int = 0
    subscriptions: int = 0
    matches: SidePair = SidePair()
    missing: int = 0
    extra: int = 0
    opDiffers: int = 0  # noqa: N815 - the name on the wire
    p50: SidePair = SidePair()
    p99: SidePair = SidePair()
    examples: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    verdict: Literal["pass", "fail"] = "pass"
    times: dict[str, LatencyHistogram] = msgspec.field(default_factory=dict[str, LatencyHistogram])

    @property
    def divergence(self) -> float:
        """Tuples that only one side has, of all that there are."""
        differing = self.missing + self.extra + 2 * self.opDiffers
        union = (self.matches.baseline + self.matches.candidate + differing) / 2
        return differing / union if union else 0.0

    @property
    def latencyRatio(self) -> float:  # noqa: N802 - as above
        return self.p99.candidate / self.p99.baseline if self.p99.baseline else 1.0

    def report(self) -> dict[str, Any]:
        found = msgspec.to_builtins(self)
        del found["times"]
        found["matches"] = {side: int(count) for side, count in found["matches"].items()}
        return found | {"divergence": self.divergence, "latencyRatio": round(self.latencyRatio, 3)}


def write_report(verdict: ShadowVerdict, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / REPORT_FILE).write_bytes(
        msgspec.json.format(msgspec.json.encode(verdict.report()), indent=2) + b"\n"
    )
    (directory / PAGE_FILE).write_text(render_page(verdict), encoding="utf-8")
    (directory / PICTURE_FILE).write_text(render_histogram(verdict.times), encoding="utf-8")


def render_page(verdict: ShadowVerdict) -> str:
    matches, p50, p99 = verdict.matches, verdict.p50, verdict.p99
    counted = f"{verdict.changes} changes, {verdict.subscriptions} subscriptions"
    lines = [
        f"# Shadow validation: {verdict.verdict}",
        "",
        f"{counted}, divergence {verdict.divergence:.6f}.",
        "",
        f"| | baseline ({verdict.baseline}) | candidate ({verdict.candidate}) |",
        "|---|---|---|",
        f"| matches | {matches.baseline:.0f} | {matches.candidate:.0f} |",
        f"| found by this side only | {verdict.missing} | {verdict.extra} |",
        f"| found by both, told otherwise | {verdict.opDiffers} | {verdict.opDiffers} |",
        f"| p50 for a change | {p50.baseline} µs | {p50.candidate} µs |",
        f"| p99 for a change | {p99.baseline} µs | {p99.candidate} µs |",
        "",
        f"![How long changes took]({PICTURE_FILE})",
    ]
    if verdict.examples:
        shown = verdict.examples[:EXAMPLES_SHOWN]
        lines += [
            "",
            f"The first {len(shown)} differences; up to 100 are in `{REPORT_FILE}`:",
            "",
            "| partition | seq | subscription | baseline | candidate |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {one['partition']} | {one['seq']} | {one['subscription']} | {one['baseline'] or '–'} "
            f"| {one['candidate'] or '–'} |"
            for one in shown
        ]
    return "\n".join(lines) + "\n"


def render_histogram(times: dict[str, LatencyHistogram]) -> str:
    """A histogram of both sides, the time from left to right in steps of five percent."""
    buckets = [bucket for found in times.values() for bucket in found]
    low, high = (min(buckets), max(buckets)) if buckets else (0, 1)
    most = max((count for found in times.values() for count in found.values()), default=1)
    inner_width, inner_height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    step = inner_width / (high - low + 1)
    bottom = _HEIGHT - _MARGIN
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for place, (side, colour) in enumerate(_COLOURS.items()):
        for bucket, count in sorted(times.get(side, {}).items()):
            height = inner_height * count / most
            x = _MARGIN + (bucket - low) * step + place * step / 2
            parts.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{step / 2:.1f}" height="{height:.1f}" '
                f'fill="{colour}"/>'
            )
        parts.append(
            f'<text x="{_MARGIN + 110 * place}" y="{_MARGIN - 16}" fill="{colour}">{escape(side)}</text>'
        )
    parts.append(f'<path d="M{_MARGIN} {bottom}H{_WIDTH - _MARGIN}" stroke="#444"/>')
    for share in (0.0, 0.5, 1.0):
        bucket = low + round((high - low) * share)
        x = _MARGIN + inner_width * share
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{bucket_midpoint_us(bucket):.1f} µs</text>'
        )
    parts.append(f'<text x="{_MARGIN - 6}" y="{_MARGIN}" text-anchor="end">{most}</text>')
    return "\n".join([*parts, "</svg>", ""])
