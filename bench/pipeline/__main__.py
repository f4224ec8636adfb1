# pyright: strict
"""`python -m bench.pipeline`: companions, questions, Spark and other engines over the same wide events.

    python -m bench.pipeline --events 1000000,10000000 --write

Stages run one after the other, each in a process of its own with a time limit. What a stage found is kept: a
run that was broken off goes on where it was, and a stage that failed is run again. Run it on a machine with
nothing else to do; ten million events take about 25 GB of disk and some hours.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import cast

from bench.pages import write_section
from bench.pipeline import stages
from bench.pipeline.place import Place, read_record
from bench.pipeline.report import HEADING, SECTION, markdown
from bench.places import BUILD, RESULTS, ROOT
from bench.run import say


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="stages:\n" + "\n".join(f"  {one.name:11} {one.help}" for one in stages.ALL),
    )
    parser.add_argument("--events", default="1000000", help="how many; several sizes with commas (1000000)")
    parser.add_argument("--only", default="", help="comma-separated stages; what these need has to be there")
    parser.add_argument("--again", action="store_true", help="also run stages that were done before")
    parser.add_argument(
        "--limit", type=float, default=None, help="seconds for each stage, instead of its own"
    )
    # Apart from that of other benches, which remove theirs: events are loaded once and asked about often.
    parser.add_argument(
        "--data", type=Path, default=BUILD / "pipeline-data", help="directory for the servers' data"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for results")
    parser.add_argument("--tidy", action="store_true", help="remove data and events when all stages are done")
    parser.add_argument("--write", action="store_true", help="also replace the section in docs/benchmarks.md")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    data, out = Path(options.data).resolve(), Path(options.out).resolve()
    places = [Place(int(size), data, out) for size in str(options.events).replace("_", "").split(",")]
    if options.inside:
        return stages.inside(stages.BY_NAME[str(options.inside)], places[0])
    names = [name for name in str(options.only).split(",") if name] or list(stages.BY_NAME)
    strange = [name for name in names if name not in stages.BY_NAME]
    if strange:
        say(f"there is no stage {', '.join(strange)}; there are {', '.join(stages.BY_NAME)}")
        return 2
    stages.adopt()
    failed = False
    for place in places:
        done = [_done(stages.BY_NAME[name], place, options) for name in names]
        failed = failed or not all(done)
        if options.tidy and all(done):
            shutil.rmtree(place.directory, ignore_errors=True)
            place.file.unlink(missing_ok=True)
        # After each size: whoever looks in between sees what there is.
        text = markdown(places)
        (out / "pipeline").mkdir(parents=True, exist_ok=True)
        (out / "pipeline" / "pipeline.md").write_text(text)
        if options.write:
            write_section(ROOT / "docs" / "benchmarks.md", SECTION, HEADING, text)
    print(markdown(places))
    return 1 if failed else 0


def _done(stage: stages.Stage, place: Place, options: argparse.Namespace) -> bool:
    found = read_record(place.results / f"{stage.name}.json")
    if found is not None and found.failed is None and not options.again:
        say(f"{place.events:,} events, {stage.name}: done on {found.date}")
        return True
    return stages.run(stage, place, cast("float | None", options.limit), adopting=True).failed is None


if __name__ == "__main__":
    sys.exit(main())
