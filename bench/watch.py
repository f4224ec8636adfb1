"""Live queries: the matcher alone, events over many connections, connections that only wait.

    python -m bench.watch matching [--subscriptions 1000,10000,100000] [--changes 2000]
    python -m bench.watch latency [--connections 1000] [--each 1] [--rate 1000] [--seconds 15] [--stalled 10]
    python -m bench.watch idle [--connections 1000,5000,10000]
    python -m bench.watch deliveries [--connections 10,200]
    python -m bench.watch shared
    python -m bench.watch bloom

Each part takes less than six minutes. `--server-cpus 0` pins the server; run the bench itself with `taskset`.
With `--write` a part replaces its table in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from bench import watch_clients, watch_matching
from bench.machine import commit, cpu_model
from bench.pages import write_section
from bench.places import ROOT

DELIVERIES_RATE = 100  # changes in a second
HEADINGS = {
    "matching": "Live queries: whom a change concerns",
    "latency": "Live queries: from a write to the client",
    "idle": "Live queries: connections that only wait",
    "deliveries": "Live queries: many who are told the same",
    "shared": "Live queries: many who ask the same",
}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---:" for _ in head], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _matching(given: argparse.Namespace) -> str:
    counts: list[int] = given.subscriptions
    wanted = [(count, False) for count in counts] + [(max(counts), True)]
    found = [watch_matching.run(count, given.changes, broad=broad) for count, broad in wanted]
    head = ["subscriptions", "changes/s", "together", "p99", "candidates", "matches", "matches/s"]
    head += ["bytes each", "filed/s", "all evaluated", "faster by"]
    rows = [
        [
            f"{one.subscriptions:,}{' (broad)' if one.broad else ''}",
            f"{one.per_s:,.0f}",
            f"{one.together_per_s:,.0f}",
            f"{one.p99_us:,.0f} µs",
            f"{one.candidates:.1f}",
            f"{one.matches:.2f}",
            f"{one.together_per_s * one.matches:,.0f}",
            f"{one.each_bytes:,.0f}",
            f"{one.filed_per_s:,.0f}",
            f"{one.naive_per_s:,.1f} changes/s",
            f"{one.per_s / one.naive_per_s:,.0f}x",
        ]
        for one in found
    ]
    return _table(head, rows)


def _latency(given: argparse.Namespace) -> str:
    cpus = _cpus(given)
    found = [
        watch_clients.latency(count, given.rate, given.seconds, cpus, stalled, given.each)
        for count in given.connections or [1000]
        for stalled in dict.fromkeys((0, given.stalled))
    ]
    head = [
        "connections",
        "subscriptions",
        "of others, stalled",
        "changes/s",
        "events",
        "p50",
        "p99",
        "server",
    ]
    rows = [
        [
            f"{one.connections:,}",
            f"{one.subscriptions:,}",
            f"{one.stalled:,}",
            f"{one.changes_per_s:,.0f}",
            f"{one.events:,}",
            f"{one.p50_ms:.1f} ms",
            f"{one.p99_ms:.1f} ms",
            f"{one.cores:.2f} cores",
        ]
        for one in found
    ]
    return _table(head, rows)


def _idle(given: argparse.Namespace) -> str:
    found = watch_clients.idle(given.connections or [1000, 5000, 10_000], _cpus(given))
    head = ["connections", "bytes each", "all", "opened/s", "server, idle"]
    rows = [
        [
            f"{one.connections:,}",
            f"{one.each_bytes:,.0f}",
            f"{one.all_bytes / 1e6:,.0f} MB",
            f"{one.opened_per_s:,.0f}",
            f"{one.cores:.3f} cores",
        ]
        for one in found
    ]
    return _table(head, rows)


def _deliveries(given: argparse.Namespace) -> str:
    found = watch_clients.deliveries(
        given.connections or [10, 200], DELIVERIES_RATE, given.seconds, _cpus(given)
    )
    head = ["connections", "deliveries/s", "server", "each delivery more"]
    rows = [
        [
            f"{one.connections:,}",
            f"{one.events_per_s:,.0f}",
            f"{one.cores:.2f} cores",
            "" if one.each_us is None else f"{one.each_us:.1f} µs",
        ]
        for one in found
    ]
    return _table(head, rows)


def _shared(given: argparse.Namespace) -> str:
    found = [watch_matching.shared(each, given.changes) for each in (1, 1000)]
    head = ["subscriptions", "predicates", "changes/s"]
    return _table(head, [[f"{all_:,}", f"{distinct:,}", f"{per_s:,.0f}"] for all_, distinct, per_s in found])


def _cpus(given: argparse.Namespace) -> frozenset[int] | None:
    return None if given.server_cpus is None else frozenset(given.server_cpus)


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {
    "matching": _matching,
    "latency": _latency,
    "idle": _idle,
    "deliveries": _deliveries,
    "shared": _shared,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Live queries, part by part.")
    parser.add_argument("part", choices=(*PARTS, "bloom"))
    parser.add_argument("--subscriptions", type=_numbers, default=[1000, 10_000, 100_000])
    parser.add_argument("--changes", type=int, default=2000)
    parser.add_argument("--connections", type=_numbers, default=None)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--each", type=int, default=1, help="subscriptions of a connection, for latency")
    parser.add_argument("--stalled", type=int, default=10)
    parser.add_argument("--server-cpus", type=_numbers, default=None)
    parser.add_argument("--write", action="store_true", help="also replace the table in docs/benchmarks.md")
    given = parser.parse_args()
    if given.part == "bloom":
        for keys in (1000, 10_000, 100_000):
            watch_matching.bloom(keys, 100_000)
        return
    table = PARTS[given.part](given)
    busy = os.getloadavg()[0]
    text = f"Tailrace at {commit()}, {cpu_model()}; load average {busy:.1f}.\n\n{table}"
    print(f"\n{text}")
    if given.write:
        write_section(ROOT / "docs" / "benchmarks.md", f"watch-{given.part}", HEADINGS[given.part], text)


if __name__ == "__main__":
    main()
