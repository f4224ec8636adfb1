# pyright: strict
"""Run the benches: every scenario in several rounds, the peers taking turns within each round."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import msgspec

from bench import floor, install, machine, peers, report
from bench.catalogue import GROUPS, SCENARIOS
from bench.places import DATA, RESULTS
from bench.processes import PeerError
from bench.results import Results, Series
from bench.scenarios import Bench, Scenario


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description="measure Tailrace beside its peers on this machine"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round: shows that all works, not how fast"
    )
    parser.add_argument(
        "--only", default="", help=f"comma-separated groups or scenarios; groups: {', '.join(GROUPS)}"
    )
    parser.add_argument("--peers", default="", help=f"comma-separated; known: {', '.join(peers.ALL)}")
    parser.add_argument("--rounds", type=int, default=0, help="rounds per scenario (5)")
    parser.add_argument("--seconds", type=float, default=0.0, help="measured time per reading (4)")
    parser.add_argument("--warm-up", type=float, default=0.0, help="seconds of load before a reading (1)")
    parser.add_argument("--history-mib", type=int, default=0, help="length of a cold history in MiB (1024)")
    parser.add_argument(
        "--server-cpus", default="0", help="cores for every server (0); 'any' to leave it to the system"
    )
    parser.add_argument(
        "--load-cpus", default="1", help="cores for the load (1); 'any' to leave it to the system"
    )
    parser.add_argument(
        "--data", type=Path, default=DATA, help="directory for the servers' data, on the disk to measure"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for results.json and results.md")
    parser.add_argument(
        "--add", action="store_true", help="keep the scenarios of an earlier run that are not run now"
    )
    parser.add_argument("--list", action="store_true", help="list the scenarios and stop")
    return parser.parse_args(arguments)


def cpus(text: str) -> frozenset[int] | None:
    if text == "any" or (os.cpu_count() or 1) < 2:
        return None
    return frozenset(int(part) for part in text.split(","))


def chosen(options: argparse.Namespace) -> list[Scenario]:
    wanted = {name for name in str(options.only).split(",") if name}
    unknown = wanted - {s.name for s in SCENARIOS} - set(GROUPS)
    if unknown:
        raise SystemExit(f"bench: unknown scenario {', '.join(sorted(unknown))}; see --list")
    return [s for s in SCENARIOS if not wanted or s.name in wanted or s.group in wanted]


def one_reading(bench: Bench, scenario: Scenario, name: str, results: Results) -> None:
    began, busy, own = time.monotonic(), machine.busy_seconds(), machine.own_seconds()
    try:
        rows = scenario.measure(bench, peers.ALL[name])
    except (PeerError, install.UnavailableError, OSError) as failure:
        results.failures.append(f"{scenario.name}, {name}: {failure}")
        say(f"  {name}: failed: {failure}")
        return
    others = (machine.busy_seconds() - busy) - (machine.own_seconds() - own)
    other_cores = max(0.0, others / (time.monotonic() - began))
    for label, reading in rows.items():
        reading["other_cores"] = other_cores
        series = results.find(scenario.name, label)
        if series is None:
            series = Series(
                scenario.name,
                scenario.group,
                scenario.title,
                label,
                scenario.metric,
                scenario.unit,
                scenario.higher_is_better,
            )
            results.series.append(series)
        series.readings.setdefault(name, []).append(reading)
        value = f"{reading[scenario.metric]:,.0f} {scenario.unit}"
        say(f"  {name}: {label}: {value} (others used {other_cores:.2f} cores)")


def run_scenario(bench: Bench, scenario: Scenario, only: set[str], rounds: int, results: Results) -> None:
    rounds = min(rounds, scenario.rounds_max)
    names = [name for name in scenario.peers if not only or name in only]
    for turn in range(rounds):
        say(f"{scenario.name}, round {turn + 1} of {rounds}")
        # A different first peer in every round, so that no place in the order is favoured.
        shift = turn % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            one_reading(bench, scenario, name, results)


def write(results: Results, out: Path) -> str:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    text = report.markdown(results)
    (out / "results.md").write_text(text)
    return text


def keep_earlier(results: Results, scenarios: list[Scenario], out: Path) -> None:
    """Takes over what an earlier run measured and this one does not."""
    earlier = msgspec.json.decode((out / "results.json").read_bytes(), type=Results)
    again = {scenario.name for scenario in scenarios}
    results.series += [series for series in earlier.series if series.scenario not in again]
    results.failures += [f for f in earlier.failures if f.partition(",")[0] not in again]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    scenarios = chosen(options)
    if options.list:
        for scenario in scenarios:
            print(f"{scenario.name:22} {scenario.title} ({', '.join(scenario.peers)})")
        return 0
    install.main()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    quick = bool(options.quick)
    rounds = int(options.rounds) or (1 if quick else 5)
    bench = Bench(
        directory=Path(options.data).resolve(),
        server_cpus=cpus(options.server_cpus),
        load_cpus=cpus(options.load_cpus),
        seconds=float(options.seconds) or (1.0 if quick else 4.0),
        warmup_seconds=float(options.warm_up) or (0.3 if quick else 1.0),
        read_mib=8 if quick else 64,
        history_mib=int(options.history_mib) or (8 if quick else 1024),
        idle_streams=5_000 if quick else 100_000,
        fanout_readers=1_000,
    )
    say("measuring the floor")
    results = Results(
        machine.describe(),
        {
            "rounds": rounds,
            "seconds_per_reading": bench.seconds,
            "warm-up_seconds": bench.warmup_seconds,
            "server_cores": str(options.server_cpus) if bench.server_cpus else "any",
            "load_cores": str(options.load_cpus) if bench.load_cpus else "any",
        },
        floor.measure(bench.directory, 1.0 if quick else 3.0, bench.server_cpus, bench.load_cpus),
    )
    out = Path(options.out)
    if options.add and (out / "results.json").exists():
        keep_earlier(results, scenarios, out)
    only = {name for name in str(options.peers).split(",") if name}
    for scenario in scenarios:
        run_scenario(bench, scenario, only, rounds, results)
        results.series.sort(key=lambda series: [s.name for s in SCENARIOS].index(series.scenario))
        write(results, out)
    results.disk_after, _ = floor.disk(bench.directory, 1.0, bench.server_cpus)
    print(write(results, out))
    shutil.rmtree(bench.directory, ignore_errors=True)
    say(f"written to {out}/results.md and results.json")
    return 1 if any(f", {peers.US}:" in failure for failure in results.failures) else 0


if __name__ == "__main__":
    sys.exit(main())
