# pyright: strict
"""The readings of both servers as Markdown."""

from __future__ import annotations

import time

import msgspec

from bench import machine
from bench.evlog.measure import Asked, Reading
from bench.evlog.queries import QueryClass
from bench.peers import ALL

SECTION = "evlog"
HEADING = "Searches and aggregates over wide events"


class Report(msgspec.Struct):
    date: str
    commit: str
    cpu: str
    events: int
    other_cores: float  # processor time that others took meanwhile
    readings: dict[str, Reading] = msgspec.field(default_factory=dict[str, Reading])
    agreement: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    failures: list[str] = msgspec.field(default_factory=list[str])


def new_report(events: int) -> Report:
    here = machine.describe()
    return Report(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), here.commit, here.cpu, events, 0.0)


def markdown(
    report: Report, us: str, peer: str, classes: list[QueryClass], aggregates: list[QueryClass]
) -> str:
    ours, theirs = report.readings.get(us), report.readings.get(peer)
    where = f"{report.date}, Tailrace at {report.commit}, {report.cpu}"
    out = [
        f"{where}; {report.events:,} events; other processes took {report.other_cores:.2f} cores.",
        "",
        f"| | Tailrace | {ALL[peer].title} | Tailrace is |",
        "|---|---:|---:|---:|",
    ]
    out += _figures(ours, theirs)
    for title, group in (("Searches", classes), ("Aggregates", aggregates)):
        out += ["", f"{title}, milliseconds:", ""]
        out += ["| | goal | Tailrace p50 | p99 | missed | peer p50 | p99 | missed | Tailrace is | answers |"]
        out += ["|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"]
        out += [_row(one, ours, theirs, report) for one in group]
    if report.failures:
        out += ["", *(f"- {failure}" for failure in report.failures)]
    return "\n".join(out) + "\n"


def _figures(ours: Reading | None, theirs: Reading | None) -> list[str]:
    def row(name: str, mine: float | None, its: float | None, unit: str, more_is_better: bool) -> str:
        cells = ["" if value is None else f"{value:,.0f} {unit}" for value in (mine, its)]
        ratio = ""
        if mine and its:
            ratio = f"{mine / its if more_is_better else its / mine:.2f}x"
        return f"| {name} | {cells[0]} | {cells[1]} | {ratio} |"

    def get(name: str) -> tuple[float | None, float | None]:
        return (
            None if ours is None else getattr(ours, name),
            None if theirs is None else getattr(theirs, name),
        )

    def found(name: str) -> tuple[float | None, float | None]:
        """Nothing to show for a server that found no probe in time."""
        mine, its = get(name)
        return mine or None, its or None

    def rate(size: str) -> tuple[float | None, float | None]:
        return (
            None if ours is None else ours.ingest_per_s.get(size),
            None if theirs is None else theirs.ingest_per_s.get(size),
        )

    return [
        row("ingest, batches of 100", *rate("100"), "events/s", True),
        row("ingest, batches of 1,000", *rate("1000"), "events/s", True),
        row("append to searchable, p50", *found("fresh_p50_ms"), "ms", False),
        row("append to searchable, worst", *found("fresh_max_ms"), "ms", False),
        row("not searchable in 30 s", *get("never_fresh"), "probes", False),
        row("peak memory while loading, server", *get("peak_ingest_mb"), "MB", False),
        row("peak memory while loading, with its children", *get("peak_ingest_all_mb"), "MB", False),
        row("peak memory while asked, server", *get("peak_queries_mb"), "MB", False),
        row("peak memory while asked, with its children", *get("peak_queries_all_mb"), "MB", False),
        row("bytes at rest", *get("at_rest_mb"), "MB", False),
        row("background work after loading", *get("settle_s"), "s", False),
    ]


def _row(one: QueryClass, ours: Reading | None, theirs: Reading | None, report: Report) -> str:
    mine = None if ours is None else ours.asked.get(one.name)
    its = None if theirs is None else theirs.asked.get(one.name)
    cells = [one.name, "" if one.goal_ms is None else f"{one.goal_ms:g}"]
    cells += [*_cells(mine), *_cells(its)]
    both = mine is not None and its is not None and mine.p50_ms and its.failed * 2 <= its.asked
    at_least = "> " if its is not None and its.timed_out * 2 > its.asked else ""
    cells.append(f"{at_least}{its.p50_ms / mine.p50_ms:.1f}x" if both and mine and its else "")
    cells.append(report.agreement.get(one.name, ""))
    return "| " + " | ".join(cells) + " |"


def _cells(asked: Asked | None) -> list[str]:
    if asked is None:
        return ["", "", ""]
    missed = [
        f"{count} {what}"
        for count, what in (
            (asked.timed_out, "late"),
            (asked.incomplete, "in part"),
            (asked.failed, "failed"),
        )
        if count
    ]
    return [
        f"{asked.p50_ms:,.1f}",
        f"{asked.p99_ms:,.1f}",
        f"{', '.join(missed)} of {asked.asked}" if missed else "",
    ]
