# pyright: strict
"""Where Tailrace's time goes under load: `perf` splits it by library, `py-spy` by Python function."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench import install, peers
from bench.loadgen import Generator, append_options
from bench.places import DATA, RESULTS
from bench.processes import Running

SAMPLES_PER_S = 499


def _tool(name: str) -> str | None:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def by_library(server: Running, seconds: float, out: Path) -> str:
    perf = _tool("perf")
    if perf is None:
        return "perf is not installed"
    data = out / "perf.data"
    record = [
        perf,
        "record",
        "-q",
        "-F",
        str(SAMPLES_PER_S),
        "-g",
        "-o",
        str(data),
        "-p",
        str(server.process.pid),
    ]
    subprocess.run([*record, "--", "sleep", str(seconds)], capture_output=True, check=False)
    text = ""
    for title, sort in (("by library", "dso"), ("by symbol", "dso,symbol")):
        report = [
            perf,
            "report",
            "-i",
            str(data),
            "--stdio",
            "--no-children",
            "-g",
            "none",
            "--percent-limit",
            "0.7",
        ]
        done = subprocess.run([*report, "--sort", sort], capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("#")]
        text += f"{title}\n" + "\n".join(lines[:40]) + "\n\n"
    return text


def by_function(server: Running, seconds: float, out: Path) -> str:
    """Own time and time with callees of each function, counted while a thread held the interpreter."""
    spy = _tool("py-spy")
    if spy is None:
        return "py-spy is not installed"
    raw = out / "py-spy.txt"
    raw.unlink(missing_ok=True)
    record = [spy, "record", "--pid", str(server.process.pid), "--duration", str(int(seconds))]
    record += ["--gil", "--format", "raw", "--rate", str(SAMPLES_PER_S), "--output", str(raw)]
    done = subprocess.run(record, capture_output=True, text=True, check=False)
    if not raw.exists():
        return f"py-spy failed: {done.stderr.strip()}"
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for line in raw.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [frame.rpartition(":")[0] or frame for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        for frame in set(frames):
            whole[frame] += int(count)
    total = sum(own.values()) or 1
    rows = ["own     with callees"]
    for frame, count in own.most_common(30):
        rows.append(f"{count / total:6.1%}  {whole[frame] / total:6.1%}  {frame}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="profile Tailrace under append load")
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--by", choices=("library", "function"), default="function")
    options = parser.parse_args()
    install.tools()
    out = RESULTS / "profile"
    out.mkdir(parents=True, exist_ok=True)
    peer = peers.ALL[peers.US]
    look = by_library if options.by == "library" else by_function
    with peer.running(DATA / "profile", frozenset({0})) as server:
        generator = Generator(frozenset({1}))
        load = generator.start(
            server.port,
            connections=options.connections,
            streams=options.streams,
            seconds=options.seconds + 1,
            **append_options(peer.wire),
        )
        text = look(server, options.seconds, out)
        result = generator.finish(load)
    text = f"{result.ops_per_s:,.0f} appends/s while being watched\n{text}\n"
    (out / f"by-{options.by}.txt").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
