# pyright: strict
"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from pathlib import Path

import msgspec

from bench.places import DATA, NODE_MODULES, ROOT


class Machine(msgspec.Struct, frozen=True):
    date: str
    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    filesystem: str
    python: str
    node: str
    commit: str
    peer_versions: dict[str, str]


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return "?"
    return done.stdout.strip() or "?"


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    return _output(["git", "rev-parse", "--short", "HEAD"])


def _npm_version(package: str) -> str:
    manifest = NODE_MODULES / package / "package.json"
    if not manifest.exists():
        return "not installed"
    fields = msgspec.json.decode(manifest.read_bytes(), type=dict[str, object])
    return str(fields.get("version", "?"))


def _peer_versions() -> dict[str, str]:
    from bench import install

    versions = {
        name: _npm_version(name) for name in ("@durable-streams/server", "@prisma/streams-server", "bun")
    }
    try:
        redis, libraries = install.redis_server()
        env = {**os.environ, "LD_LIBRARY_PATH": str(libraries or "")}
        done = subprocess.run([str(redis), "--version"], capture_output=True, text=True, check=False, env=env)
        versions["redis"] = next((w[2:] for w in done.stdout.split() if w.startswith("v=")), "?")
    except install.UnavailableError:
        versions["redis"] = "not available"
    try:
        versions["nats-server"] = _output([str(install.nats_server()), "--version"]).rpartition(" ")[2]
    except install.UnavailableError:
        versions["nats-server"] = "not available"
    return versions


def busy_seconds() -> float:
    """Processor time spent on this machine by anybody, time taken by other guests included."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor time of this program and of all children it has waited for."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def describe() -> Machine:
    DATA.mkdir(parents=True, exist_ok=True)
    return Machine(
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        cpu=cpu_model(),
        cores=os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        kernel=platform.release(),
        filesystem=_output(["stat", "-f", "-c", "%T", str(DATA)]),
        python=platform.python_version(),
        node=_output(["node", "--version"]).lstrip("v"),
        commit=commit(),
        peer_versions=_peer_versions(),
    )
