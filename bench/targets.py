# pyright: strict
"""What Tailrace set out to reach, checked against the medians of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.peers import DURABLE_HTTP, US
from bench.results import Results, Series

# Of the hub, per second and by the row's name: on one core, beside a load that has one of its own.
HUB_GOALS = {
    ("hub-relay", "100 pairs, 8 in flight"): 60_000,
    ("hub-broadcast", "1 sender, 500 receivers"): 150_000,
    ("hub-publish", "1 sender, 500 receivers"): 150_000,
    ("hub-durable", "100 senders"): 20_000,
}
HUB_BYTES_EACH = 4096


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    wanted: str
    got: str
    reached: bool


def _best(series: Series, peers: tuple[str, ...]) -> tuple[str, float] | None:
    """The strongest of these peers in this row."""
    found = [(name, value) for name in peers if (value := series.median(name)) is not None]
    if not found:
        return None
    return (
        max(found, key=lambda pair: pair[1])
        if series.higher_is_better
        else min(found, key=lambda pair: pair[1])
    )


def _at_least(series: Series, peers: tuple[str, ...], factor: float, who: str) -> Iterator[Verdict]:
    best, ours = _best(series, peers), series.median(US)
    if best is None or ours is None:
        return
    ratio = ours / best[1]
    yield Verdict(
        f"{series.scenario}, {series.row}",
        f"{factor:.2g}x {who}",
        f"{ratio:.2f}x ({best[0]})",
        ratio >= factor,
    )


def _p99_no_worse(series: Series) -> Iterator[Verdict]:
    ours = series.median(US, "p99_us")
    if ours is None:
        return
    rivals = (("durable HTTP peers", DURABLE_HTTP), ("memory", ("reference-memory",)), ("Redis", ("redis",)))
    for who, names in rivals:
        theirs = [value for name in names if (value := series.median(name, "p99_us")) is not None]
        if theirs:
            best = min(theirs)
            what = f"{series.scenario}, {series.row}: p99"
            wanted = f"at most {best / 1000:.2f} ms ({who})"
            yield Verdict(what, wanted, f"{ours / 1000:.2f} ms", ours <= best)


def _limit(series: Series, metric: str, limit: float, unit: str, scale: float = 1.0) -> Iterator[Verdict]:
    ours = series.median(US, metric)
    if ours is not None:
        value = ours / scale
        yield Verdict(
            f"{series.scenario}, {series.row}: {metric}",
            f"under {limit:g} {unit}",
            f"{value:.3g} {unit}",
            value < limit,
        )


def _hub(series: Series, ours: float) -> Iterator[Verdict]:
    goal = HUB_GOALS.get((series.scenario, series.row))
    if goal is not None:
        what = f"{series.scenario}, {series.row}"
        yield Verdict(what, f"at least {goal:,} {series.unit}", f"{ours:,.0f}", ours >= goal)
    elif series.row == "half of that speed":
        yield from _limit(series, "p50_us", 1.0, "ms", 1000.0)
        yield from _limit(series, "p99_us", 5.0, "ms", 1000.0)


def _of(series: Series) -> Iterator[Verdict]:
    ours = series.median(US)
    if ours is None:
        return
    if series.group == "appends":
        yield from _at_least(series, DURABLE_HTTP, 3.0, "best durable HTTP peer")
        yield from _at_least(series, ("reference-memory",), 1.0, "reference server from memory")
        yield from _at_least(series, ("redis",), 1 / 1.5, "Redis")
        yield from _p99_no_worse(series)
    elif series.group == "latency":
        over = series.median(US, "over_floor") or 0.0
        wanted = "at most 1.3x one bare fdatasync + one bare round trip"
        yield Verdict("latency, 1 connection", wanted, f"{over:.2f}x ({ours:.0f} µs)", over <= 1.3)
    elif series.group == "reads":
        yield from _at_least(series, ("prisma-raised", "prisma", "redis"), 3.0, "best peer that pages")
        if series.row.startswith("16 "):
            yield Verdict(
                f"{series.scenario}, {series.row}", "over 1 GB/s", f"{ours / 1e9:.2f} GB/s", ours > 1e9
            )
    elif series.group == "fanout":
        share = series.median(US, "delivered_share") or 0.0
        yield Verdict(f"fanout, {series.row}", "all delivered", f"{share:.2%}", share >= 1.0)
        yield from _limit(series, "p99_us", 20.0, "ms", 1000.0)
    elif series.group == "idle":
        yield from _limit(series, "rss_mb", 200.0, "MB")
        yield from _limit(series, "restart_s", 5.0, "s")
        yield from _limit(series, "restart_after_kill_s", 5.0, "s")
    elif series.group == "sealing" and (share := series.median(US, "of_without")) is not None:
        sealed_mb = series.median(US, "sealed_mb") or 0.0
        got = f"{share:.2f}x, {sealed_mb:.0f} MB sealed meanwhile"
        yield Verdict(
            f"sealing, {series.row}", "at least 0.8x of without", got, share >= 0.8 and sealed_mb > 0
        )
    elif series.group == "hub":
        yield from _hub(series, ours)
    elif series.group == "hub-idle":
        yield from _limit(series, "bytes_each", HUB_BYTES_EACH, "bytes")
    elif series.group == "history":
        yield from _limit(series, "rss_mb", 300.0, "MB")


def verdicts(results: Results) -> list[Verdict]:
    return [verdict for series in results.series for verdict in _of(series)]
