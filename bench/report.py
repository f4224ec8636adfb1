# pyright: strict
"""Results as a Markdown fragment for docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from bench import floor
from bench.peers import ALL, US
from bench.results import Results, Series
from bench.targets import verdicts

Cell = Callable[[float], str]


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _ms(value_us: float) -> str:
    return f"{value_us / 1000:.2f}"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _rate(value: float) -> str:
    return f"{value / 1e6:,.0f} MB/s"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


CPU: list[tuple[str, str, Cell]] = [
    ("server_cpu_share", "server core", _share),
    ("load_cpu_share", "load core", _share),
]
ERRORS: list[tuple[str, str, Cell]] = [("errors", "errors", _count)]
TAIL: list[tuple[str, str, Cell]] = [
    ("p50_us", "p50 ms", _ms),
    ("p99_us", "p99 ms", _ms),
    ("p999_us", "p99.9 ms", _ms),
]
COLUMNS: dict[str, list[tuple[str, str, Cell]]] = {
    "appends": [*TAIL, *ERRORS, *CPU],
    "latency": [
        ("over_floor", "x floor", lambda v: f"{v:.2f}"),
        ("floor_us", "floor µs", _count),
        *TAIL,
        ("ops_per_s", "appends/s", _count),
        *ERRORS,
        *CPU,
    ],
    "arrays": [("ops_per_s", "requests/s", _count), *TAIL, *ERRORS, *CPU],
    "reads": [
        ("page_bytes", "page bytes", _count),
        ("p50_us", "page p50 ms", _ms),
        ("p99_us", "page p99 ms", _ms),
        *ERRORS,
        *CPU,
    ],
    "fanout": [
        ("p50_us", "p50 ms", _ms),
        ("max_us", "max ms", _ms),
        ("delivered_share", "delivered", lambda v: f"{v:.2%}"),
        ("append_p99_us", "append p99 ms", _ms),
        *CPU,
    ],
    "idle": [
        ("rest_s", "at rest after", _seconds),
        ("empty_rss_mb", "empty MB", _count),
        ("creates_per_s", "creates/s", _count),
        ("restart_s", "restart", _seconds),
        ("restart_after_kill_s", "restart after kill", _seconds),
        ("restarted_rss_mb", "MB after restart", _count),
    ],
    "slow-disk": [
        ("p50_us", "append p50 ms", _ms),
        ("p99_us", "append p99 ms", _ms),
        ("reads_per_s", "reads/s beside", _count),
        ("read_p50_us", "read p50 ms", _ms),
        ("read_p99_us", "read p99 ms", _ms),
        *ERRORS,
    ],
    "hub": [*TAIL, *ERRORS, *CPU],
    "hub-idle": [("rss_mb", "MB resident", _count), ("opened_per_s", "opened/s", _count)],
    "sealing": [
        ("of_without", "of without", lambda v: f"{v:.2f}x"),
        ("sealed_mb", "sealed MB meanwhile", _count),
        ("sealed_share", "of the appended", _share),
        ("sealed_segments", "segments", _count),
        *TAIL,
        *ERRORS,
        *CPU,
    ],
    "history": [
        ("p50_us", "page p50 ms", _ms),
        ("p99_us", "page p99 ms", _ms),
        ("rss_mb", "peak MB resident", _count),
        ("single_p50_us", "one entry p50 ms", _ms),
        ("single_p99_us", "one entry p99 ms", _ms),
        ("seal_wait_s", "rest sealed in", _seconds),
        ("seal_mb_per_core_s", "sealed MB/s per core", _count),
        ("stored_per_byte", "stored bytes per byte", lambda v: f"{v:.3f}"),
        ("fill_waits", "waits in filling", _count),
        *ERRORS,
    ],
}


def _main_cell(series: Series) -> Cell:
    if series.unit == "bytes/s":
        return _rate
    return _count


def table(series: Series) -> list[str]:
    columns = COLUMNS[series.group]
    heads = ["server", f"{series.unit} (spread)", "Tailrace is", *(head for _, head, _ in columns)]
    out = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    show = _main_cell(series)
    ranked = sorted(
        series.readings, key=lambda name: series.median(name) or 0.0, reverse=series.higher_is_better
    )
    for name in ranked:
        middle, values = series.median(name), series.values(name)
        if middle is None:
            continue
        spread = f" ({show(min(values))} to {show(max(values))})" if len(values) > 1 else ""
        ratio = series.ratio(US, name)
        better = "" if name == US or ratio is None else f"{ratio:.2f}x"
        cells = [
            ALL[name].title + ("" if ALL[name].durable else ", not durable"),
            f"{show(middle)}{spread}",
            better,
        ]
        for metric, _, cell in columns:
            value = series.median(name, metric)
            cells.append("" if value is None else cell(value))
        if name == US:
            cells[0] = f"**{cells[0]}**"
        out.append("| " + " | ".join(cells) + " |")
    return out


def _conditions(results: Results) -> list[str]:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.peer_versions.items())
    conditions = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in results.conditions.items())
    after = results.disk_after
    drift = "" if after is None else f" (at the end of the run {after.latency_us.p50:,.0f} µs)"
    others = [
        v for series in results.series for name in series.readings for v in series.values(name, "other_cores")
    ]
    noise = (
        f"median {statistics.median(others):.2f}, at most {max(others):.2f} cores"
        if others
        else "not measured"
    )
    return [
        f"- {machine.date}, Tailrace at {machine.commit}, Python {machine.python}, node {machine.node}",
        f"- {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB",
        f"- Linux {machine.kernel}, {machine.filesystem}",
        f"- one 150 B write + fdatasync: p50 {results.floor.sync_record.latency_us.p50:,.0f} µs{drift}",
        f"- {conditions}",
        f"- processor time taken by other processes during the readings: {noise}",
        f"- peers: {versions}",
    ]


def targets(results: Results) -> list[str]:
    found = verdicts(results)
    if not found:
        return []
    out = ["| target | wanted | measured | |", "|---|---|---|---|"]
    for verdict in found:
        mark = "reached" if verdict.reached else "**missed**"
        out.append(f"| {verdict.what} | {verdict.wanted} | {verdict.got} | {mark} |")
    return out


def markdown(results: Results) -> str:
    out = ["## Conditions", "", *_conditions(results), ""]
    checked = targets(results)
    if checked:
        out += ["## Targets", "", *checked, ""]
    out += ["## Physical floor", "", *floor.lines(results.floor), ""]
    total = results.floor.sync_plus_round_trip_us
    out += [f"One bare fdatasync plus one bare round trip (p50): {total:,.0f} µs.", ""]
    title = ""
    for series in results.series:
        if series.title != title:
            title = series.title
            out += [f"## {title}", ""]
        out += [f"### {series.row}", "", *table(series), ""]
    if results.failures:
        out += ["## Not measured", "", *(f"- {failure}" for failure in dict.fromkeys(results.failures)), ""]
    return "\n".join(out)
