"""Live queries: the matcher alone, events over many connections, connections that only wait.

    python -m bench.watch matching [--subscriptions 1000,10000,100000] [--changes 2000] [--broad]
    python -m bench.watch bloom
    python -m bench.watch latency [--connections 1000] [--rate 1000] [--seconds 15]
    python -m bench.watch idle [--connections 1000,5000,10000]

Each part takes less than two minutes. `--server-cpus 0` pins the server; run the bench itself with `taskset`.
"""

from __future__ import annotations

import argparse

from bench import watch_clients, watch_matching


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Live queries, part by part.")
    parser.add_argument("part", choices=("matching", "bloom", "latency", "idle"))
    parser.add_argument("--subscriptions", type=_numbers, default=[1000, 10_000, 100_000])
    parser.add_argument("--changes", type=int, default=2000)
    parser.add_argument("--broad", action="store_true")
    parser.add_argument("--connections", type=_numbers, default=None)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--server-cpus", type=_numbers, default=None)
    given = parser.parse_args()
    cpus = None if given.server_cpus is None else frozenset(given.server_cpus)
    if given.part == "matching":
        for count in given.subscriptions:
            watch_matching.run(count, given.changes, broad=given.broad, naive=True)
    elif given.part == "bloom":
        for keys in (1000, 10_000, 100_000):
            watch_matching.bloom(keys, 100_000)
    elif given.part == "latency":
        for count in given.connections or [1000]:
            watch_clients.latency(count, given.rate, given.seconds, cpus)
    else:
        watch_clients.idle(given.connections or [1000, 5000, 10_000], cpus)


if __name__ == "__main__":
    main()
