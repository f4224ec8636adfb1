# pyright: strict
"""`python -m bench.evlog`: the same events in Tailrace and in the Prisma server, asked the same."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from itertools import islice
from pathlib import Path
from typing import cast

import msgspec

from bench import install, machine
from bench.evlog.compare import agree, true_counts
from bench.evlog.events import read_events, write_events
from bench.evlog.measure import read
from bench.evlog.queries import QueryClass, aggregate_classes, search_classes
from bench.evlog.report import HEADING, SECTION, Report, markdown, new_report
from bench.evlog.target import Answer, Json, Target
from bench.pages import write_section
from bench.peers import ALL, US
from bench.places import BUILD, DATA, RESULTS, ROOT
from bench.processes import PeerError
from bench.run import cpus, say
from tailrace.schema.profiles.canonical_registries import EVLOG_REGISTRY

PEER = "prisma-raised"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.evlog", description="searches and aggregates over wide events, beside the Prisma server"
    )
    parser.add_argument("--events", type=int, default=1_000_000, help="how many are loaded (1,000,000)")
    parser.add_argument("--seed", type=int, default=1, help="another seed makes other events (1)")
    parser.add_argument("--rounds", type=int, default=10, help="how often each question is asked (10)")
    parser.add_argument(
        "--servers", default=f"{US},{PEER}", help="comma-separated; one of them alone is possible"
    )
    parser.add_argument("--only", default="", help="comma-separated beginnings of the classes that are asked")
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds for indexing after loading (600)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of Tailrace, as environment",
    )
    parser.add_argument("--server-cpus", default="any", help="cores for the servers (any)")
    parser.add_argument("--data", type=Path, default=DATA, help="directory for the servers' data")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for evlog.json and evlog.md")
    parser.add_argument("--write", action="store_true", help="also replace the section in docs/benchmarks.md")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace, path: Path) -> tuple[list[QueryClass], list[QueryClass]]:
    step = max(1, int(options.events) // 500)
    some = list(islice(read_events(path), 0, None, step))
    starts = tuple(name for name in str(options.only).split(",") if name)
    both = search_classes(some), aggregate_classes()
    if not starts:
        return both
    searches, aggregates = ([one for one in group if one.name.startswith(starts)] for group in both)
    return searches, aggregates


def compare(
    classes: list[QueryClass], answers: dict[str, dict[int, Answer]], peer: str, report: Report
) -> None:
    for one in classes:
        verdicts: list[bool | None] = []
        for question in one.questions:
            pair = [answers.get(name, {}).get(id(question)) for name in (US, peer)]
            if pair[0] is not None and pair[1] is not None:
                verdicts.append(agree(question, pair[0], pair[1]))
        same, different = verdicts.count(True), verdicts.count(False)
        if same or different:
            report.agreement[one.name] = (
                "the same" if not different else f"{different} of {same + different} differ"
            )
        for name, reading in report.readings.items():
            asked = reading.asked[one.name]
            report.failures += [f"{ALL[name].title}, {one.name}: {error}" for error in asked.wrong]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    install.main()
    events, directory = int(options.events), Path(options.data).resolve()
    path = BUILD / "evlog" / f"events-{options.seed}-{events}.ndjson"
    say(f"writing {events:,} events")
    write_events(path, events, int(options.seed))
    searches, aggregates = chosen(options, path)
    classes = [*searches, *aggregates]
    say("counting what the answers should be")
    counts = true_counts(path, classes)
    report = new_report(events)
    answers: dict[str, dict[int, Answer]] = {}
    canonical = cast("Json", EVLOG_REGISTRY["search"])
    names = [name for name in str(options.servers).split(",") if name]
    for name in names:
        peer = ALL[name]
        began, busy, own = time.monotonic(), machine.busy_seconds(), machine.own_seconds()
        say(f"{name}: loading")
        try:
            env = dict(pair.split("=", 1) for pair in options.set) if name == US else {}
            with peer.running(directory / name, cpus(options.server_cpus), env) as server:
                target = Target(peer, server)
                # What the profile brings with Tailrace; the peer's own has no rollup.
                target.set_up(None if name == US else canonical)
                report.readings[name], answers[name] = read(
                    target,
                    directory / name,
                    path,
                    events,
                    classes,
                    counts,
                    int(options.rounds),
                    float(options.patience),
                )
        except (PeerError, install.UnavailableError, OSError) as failure:
            report.failures.append(f"{peer.title}: {failure}")
            say(f"{name}: failed: {failure}")
        others = (machine.busy_seconds() - busy) - (machine.own_seconds() - own)
        report.other_cores = max(report.other_cores, others / (time.monotonic() - began))
    theirs = next((name for name in names if name != US), PEER)
    compare(classes, answers, theirs, report)
    text = markdown(report, US, theirs, searches, aggregates)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "evlog.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    (out / "evlog.md").write_text(text)
    if options.write:
        write_section(ROOT / "docs/benchmarks.md", SECTION, HEADING, text)
    shutil.rmtree(directory, ignore_errors=True)
    print(text)
    return 1 if any(failure.startswith(ALL[US].title) for failure in report.failures) else 0


if __name__ == "__main__":
    sys.exit(main())
